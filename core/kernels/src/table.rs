//! The table of kernels: the only place in Rust with their names, files and parameters.
//!
//! Each kernel has a function of the same name that makes a launch, so the Rust compiler checks the
//! arguments. In the tests, a host compiler compares the parameters with the kernels (a
//! `static_assert` for each kernel and for each field of a row). `.ci/kernels` compares them with
//! the compiled PTX.
//!
//! ```
//! use fulgurite_kernels::{In, Out, table};
//! let call = table::sum_f64(1, In::at(0x1000), 100, Out::at(0x2000));
//! # assert_eq!(call.arguments.len(), 3);
//! ```
//!
//! Inputs and outputs cannot be exchanged:
//!
//! ```compile_fail,E0308
//! use fulgurite_kernels::{In, Out, table};
//! let call = table::sum_f64(1, Out::<f64>::at(0x2000), 100, In::<f64>::at(0x1000));
//! ```

use crate::plan::{Parameter, Row};
use crate::plans::{AdamWTensor, AverageTensor, CopiedPart, NormTensor, SgdTensor, StepScale};
use crate::{Bf16, Call, Element, F16, Field, Float, Half, In, Out, Source, THREADS, Unknown};

/// A kernel's name and parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signature {
    /// The kernel's name.
    pub name: &'static str,
    /// The file of the kernel.
    pub source: Source,
    /// The parameters, in order.
    pub parameters: Vec<Declared>,
}

/// A parameter as it is declared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Declared {
    /// The parameter's name, used in this table only.
    pub name: &'static str,
    /// The type in C.
    pub c_type: String,
    /// The type in PTX.
    pub ptx_type: &'static str,
}

macro_rules! kernels {
    ($($source:ident { $(
        $(#[$attribute:meta])*
        fn $name:ident($($argument:ident: $ty:ty),* $(,)?);
    )* })*) => {
        $($(
            $(#[$attribute])*
            #[allow(clippy::too_many_arguments, reason = "as many as the kernel has")]
            pub fn $name(blocks: u32, $($argument: $ty),*) -> Call {
                Call {
                    kernel: stringify!($name),
                    source: Source::$source,
                    blocks,
                    threads: THREADS,
                    shared_bytes: 0,
                    arguments: vec![$($argument.argument()),*],
                }
            }
        )*)*

        /// Signatures of the kernels that are compiled once.
        fn plain() -> Vec<Signature> {
            vec![$($(Signature {
                name: stringify!($name),
                source: Source::$source,
                parameters: vec![$(Declared {
                    name: stringify!($argument),
                    c_type: <$ty>::c_type(),
                    ptx_type: <$ty>::PTX,
                }),*],
            }),*),*]
        }
    };
}

/// Like `kernels`, for kernels that are compiled for each dtype. The dtype ends their names.
macro_rules! kernels_of_floats {
    ($($source:ident { $(
        $(#[$attribute:meta])*
        fn $name:ident<$T:ident>($($argument:ident: $ty:ty),* $(,)?);
    )* })*) => {
        $($(
            $(#[$attribute])*
            #[allow(clippy::too_many_arguments, reason = "as many as the kernel has")]
            pub fn $name<$T: Element>(blocks: u32, $($argument: $ty),*) -> Call {
                Call {
                    kernel: match <$T as Element>::FLOAT {
                        Float::Bf16 => concat!(stringify!($name), "_bf16"),
                        Float::F16 => concat!(stringify!($name), "_f16"),
                        Float::F32 | Float::F64 => concat!(stringify!($name), "_f32"),
                    },
                    source: Source::$source,
                    blocks,
                    threads: THREADS,
                    shared_bytes: 0,
                    arguments: vec![$($argument.argument()),*],
                }
            }
        )*)*

        /// Signatures of the kernels that are compiled for each dtype.
        fn of_floats() -> Vec<Signature> {
            let mut all = Vec::new();
            $($({
                fn parameters<$T: Element>() -> Vec<Declared> {
                    vec![$(Declared {
                        name: stringify!($argument),
                        c_type: <$ty>::c_type(),
                        ptx_type: <$ty>::PTX,
                    }),*]
                }
                let source = Source::$source;
                all.push(Signature {
                    name: concat!(stringify!($name), "_f32"),
                    source,
                    parameters: parameters::<f32>(),
                });
                all.push(Signature {
                    name: concat!(stringify!($name), "_bf16"),
                    source,
                    parameters: parameters::<Bf16>(),
                });
                all.push(Signature {
                    name: concat!(stringify!($name), "_f16"),
                    source,
                    parameters: parameters::<F16>(),
                });
            })*)*
            all
        }
    };
}

/// The row length that a kernel is compiled for. Shorter rows are padded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Width {
    /// Up to 64.
    To64,
    /// Up to 128.
    To128,
    /// Up to 256.
    To256,
}

/// The size of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// Number of blocks.
    pub blocks: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of each block, in bytes.
    pub shared_bytes: u32,
}

/// Like `kernels`, for kernels that are compiled for each 16-bit dtype and each width, for general
/// masks and scores or not. All three end their names. The largest width and the general kernels
/// have sources of their own.
macro_rules! kernels_of_halves {
    ($($source:ident, $wide:ident, $general:ident, $wide_general:ident { $(
        $(#[$attribute:meta])*
        fn $name:ident<$T:ident>($($argument:ident: $ty:ty),* $(,)?);
    )* })*) => {
        $($(
            $(#[$attribute])*
            #[allow(clippy::too_many_arguments, reason = "as many as the kernel has")]
            pub fn $name<$T: Half>(
                Launch { blocks, threads, shared_bytes }: Launch,
                (width, is_general): (Width, bool),
                $($argument: $ty),*
            ) -> Call {
                Call {
                    kernel: match (width, is_general, <$T as Element>::FLOAT == Float::Bf16) {
                        (Width::To64, false, true) => concat!(stringify!($name), "_64_bf16"),
                        (Width::To64, false, false) => concat!(stringify!($name), "_64_f16"),
                        (Width::To64, true, true) => concat!(stringify!($name), "_64_general_bf16"),
                        (Width::To64, true, false) => concat!(stringify!($name), "_64_general_f16"),
                        (Width::To128, false, true) => concat!(stringify!($name), "_128_bf16"),
                        (Width::To128, false, false) => concat!(stringify!($name), "_128_f16"),
                        (Width::To128, true, true) => concat!(stringify!($name), "_128_general_bf16"),
                        (Width::To128, true, false) => concat!(stringify!($name), "_128_general_f16"),
                        (Width::To256, false, true) => concat!(stringify!($name), "_256_bf16"),
                        (Width::To256, false, false) => concat!(stringify!($name), "_256_f16"),
                        (Width::To256, true, true) => concat!(stringify!($name), "_256_general_bf16"),
                        (Width::To256, true, false) => concat!(stringify!($name), "_256_general_f16"),
                    },
                    source: match (width, is_general) {
                        (Width::To64 | Width::To128, false) => Source::$source,
                        (Width::To256, false) => Source::$wide,
                        (Width::To64 | Width::To128, true) => Source::$general,
                        (Width::To256, true) => Source::$wide_general,
                    },
                    blocks,
                    threads,
                    shared_bytes,
                    arguments: vec![$($argument.argument()),*],
                }
            }
        )*)*

        /// Signatures of the kernels that are compiled for each 16-bit dtype and each width.
        fn of_halves() -> Vec<Signature> {
            let mut all = Vec::new();
            $($({
                fn parameters<$T: Half>() -> Vec<Declared> {
                    vec![$(Declared {
                        name: stringify!($argument),
                        c_type: <$ty>::c_type(),
                        ptx_type: <$ty>::PTX,
                    }),*]
                }
                for (name, source, parameters) in [
                    (concat!(stringify!($name), "_64_bf16"), Source::$source, parameters::<Bf16>()),
                    (concat!(stringify!($name), "_64_f16"), Source::$source, parameters::<F16>()),
                    (concat!(stringify!($name), "_64_general_bf16"), Source::$general, parameters::<Bf16>()),
                    (concat!(stringify!($name), "_64_general_f16"), Source::$general, parameters::<F16>()),
                    (concat!(stringify!($name), "_128_bf16"), Source::$source, parameters::<Bf16>()),
                    (concat!(stringify!($name), "_128_f16"), Source::$source, parameters::<F16>()),
                    (concat!(stringify!($name), "_128_general_bf16"), Source::$general, parameters::<Bf16>()),
                    (concat!(stringify!($name), "_128_general_f16"), Source::$general, parameters::<F16>()),
                    (concat!(stringify!($name), "_256_bf16"), Source::$wide, parameters::<Bf16>()),
                    (concat!(stringify!($name), "_256_f16"), Source::$wide, parameters::<F16>()),
                    (concat!(stringify!($name), "_256_general_bf16"), Source::$wide_general, parameters::<Bf16>()),
                    (concat!(stringify!($name), "_256_general_f16"), Source::$wide_general, parameters::<F16>()),
                ] {
                    all.push(Signature { name, source, parameters });
                }
            })*)*
            all
        }
    };
}

/// Returns the signatures of all kernels.
pub fn all() -> Vec<Signature> {
    let mut all = plain();
    all.extend(of_floats());
    all.extend(of_halves());
    all
}

macro_rules! all_rows {
    ($($ty:ty),*) => {
        /// Returns the structs of all tables, by their names in C.
        pub fn rows() -> Vec<(&'static str, Vec<Field>)> {
            use crate::plan::Pointee;
            vec![$((<$ty>::C_NAME, <$ty>::fields())),*]
        }
    };
}
all_rows!(NormTensor, AdamWTensor, SgdTensor, AverageTensor, StepScale, CopiedPart);

kernels! {
    GradNorm {
        /// The sum of squares of each chunk of the tensors, one block per chunk.
        fn squared_norm_chunks(tensors: In<NormTensor>, count: u32, sums: Out<f64>);
        /// The sum of numbers, by one block.
        fn sum_f64(sums: In<f64>, count: u32, total: Out<f64>);
    }
    Optimizer {
        /// AdamW, one block per chunk.
        fn adamw(
            tensors: In<AdamWTensor>,
            count: u32,
            scale: In<StepScale>,
            from_old: u32,
            weight1: f32,
            rest1: f32,
            beta2: f32,
            weight2: f32,
            correction2_sqrt: f32,
            eps: f32,
        );
        /// Stochastic gradient descent, one block per chunk.
        fn sgd(
            tensors: In<SgdTensor>,
            count: u32,
            scale: In<StepScale>,
            momentum: f32,
            gain: f32,
            keep: f32,
            nesterov: u32,
        );
        /// Exponential averages of weights, one block per chunk.
        fn average(tensors: In<AverageTensor>, count: u32, gain: f32, scale: In<StepScale>);
    }
    Copies {
        /// Copies of parts of memory, one block per chunk.
        fn copy_parts(parts: In<CopiedPart>, count: u32);
    }
    Views {
        /// The elements of a view, as 2-byte words, one block per chunk.
        fn dense_2(
            x: In<Unknown>,
            y: Out<Unknown>,
            n: u32,
            size1: u32,
            size2: u32,
            size3: u32,
            stride0: u64,
            stride1: u64,
            stride2: u64,
            stride3: u64,
        );
        /// The elements of a view, as 4-byte words, one block per chunk.
        fn dense_4(
            x: In<Unknown>,
            y: Out<Unknown>,
            n: u32,
            size1: u32,
            size2: u32,
            size3: u32,
            stride0: u64,
            stride1: u64,
            stride2: u64,
            stride3: u64,
        );
        /// The elements of a view, as 8-byte words, one block per chunk.
        fn dense_8(
            x: In<Unknown>,
            y: Out<Unknown>,
            n: u32,
            size1: u32,
            size2: u32,
            size3: u32,
            stride0: u64,
            stride1: u64,
            stride2: u64,
            stride3: u64,
        );
        /// The elements of a view, as 16-byte words, one block per chunk.
        fn dense_16(
            x: In<Unknown>,
            y: Out<Unknown>,
            n: u32,
            size1: u32,
            size2: u32,
            size3: u32,
            stride0: u64,
            stride1: u64,
            stride2: u64,
            stride3: u64,
        );
        /// Rows of a table by their ids, zeros for `u32::MAX`, one block per chunk of words.
        fn pick_rows(
            ids: In<u32>,
            table: In<Unknown>,
            out: Out<Unknown>,
            rows: u64,
            width: u64,
            word: u32,
        );
    }
    Rows {
        /// `out +=` the sum of rows, one block per 256 columns.
        fn add_rows(sums: In<f32>, rows: u32, n: u32, out: Out<f32>);
    }
    Attention {
        /// Softmax of scores with a mask or a bias, in place, one block per row.
        fn masked_softmax(
            scores: Out<f32>,
            mask: In<u8>,
            bias: In<f32>,
            heads: u32,
            queries: u32,
            keys: u32,
            mask_batch: u32,
            mask_head: u32,
            mask_query: u32,
            bias_batch: u32,
            bias_head: u32,
            bias_query: u32,
        );
        /// The gradient of scores, in place of the probabilities', one block per row.
        fn masked_softmax_backward(
            probabilities: In<f32>,
            grad: Out<f32>,
            keys: u32,
            scale: f32,
        );
    }
    Pooling {
        /// The largest element of each window and its place, one block per chunk of outputs.
        fn max_pool(
            x: In<f32>,
            windows: In<u32>,
            y: Out<f32>,
            picked: Out<u32>,
            n: u64,
            rows: u32,
            columns: u32,
            height: u32,
            width: u32,
        );
        /// The gradient of the input of `max_pool`, one block per chunk of inputs.
        fn max_pool_backward(
            picked: In<u32>,
            grad: In<f32>,
            covers: In<u32>,
            dx: Out<f32>,
            n: u64,
            rows: u32,
            columns: u32,
            height: u32,
            width: u32,
        );
        /// The mean of each window, one block per chunk of outputs.
        fn mean_pool(
            x: In<f32>,
            windows: In<u32>,
            y: Out<f32>,
            n: u64,
            rows: u32,
            columns: u32,
            height: u32,
            width: u32,
            divisor: u32,
        );
        /// The gradient of the input of `mean_pool`, one block per chunk of inputs.
        fn mean_pool_backward(
            grad: In<f32>,
            windows: In<u32>,
            covers: In<u32>,
            dx: Out<f32>,
            n: u64,
            rows: u32,
            columns: u32,
            height: u32,
            width: u32,
            divisor: u32,
        );
    }
    Recurrent {
        /// One step of a GRU, one block per chunk of the states.
        fn gru_step(
            gates: Out<f32>,
            product: In<f32>,
            bias: In<f32>,
            before: In<f32>,
            kept: Out<f32>,
            hidden: Out<f32>,
            n: u64,
            width: u64,
        );
        /// The gradients of one step of a GRU, one block per chunk of the states.
        fn gru_step_backward(
            gates: In<f32>,
            before: In<f32>,
            kept: In<f32>,
            grad: In<f32>,
            of_hidden: Out<f32>,
            inputs: Out<f32>,
            products: Out<f32>,
            n: u64,
            width: u64,
        );
        /// One step of an LSTM, one block per chunk of the states.
        fn lstm_step(
            gates: Out<f32>,
            product: In<f32>,
            bias: In<f32>,
            before: In<f32>,
            cell: Out<f32>,
            hidden: Out<f32>,
            n: u64,
            width: u64,
        );
        /// The gradients of one step of an LSTM, one block per chunk of the states.
        fn lstm_step_backward(
            gates: In<f32>,
            before: In<f32>,
            cell: In<f32>,
            grad: In<f32>,
            of_hidden: In<f32>,
            of_cell: Out<f32>,
            inputs: Out<f32>,
            n: u64,
            width: u64,
        );
    }
}

kernels_of_floats! {
    Rows {
        /// RMS norm of `x`, or of `x + residual`, one block per row.
        fn rms_norm<T>(
            x: In<T>,
            residual: In<T>,
            weight: In<f32>,
            sum: Out<T>,
            y: Out<T>,
            rstd: Out<f32>,
            n: u32,
            eps: f32,
        );
        /// The gradient of the normalised input, one block per row.
        fn rms_norm_backward<T>(
            x: In<T>,
            weight: In<f32>,
            rstd: In<f32>,
            grad: In<T>,
            more: In<T>,
            dx: Out<T>,
            n: u32,
        );
        /// Partial sums of the weight's gradient, one block per group of rows and 256 columns.
        fn rms_norm_weight<T>(
            x: In<T>,
            rstd: In<f32>,
            grad: In<T>,
            sums: Out<f32>,
            rows: u32,
            n: u32,
            part: u32,
        );
        /// Layer norm of `x`, or of `x + residual`, one block per row.
        fn layer_norm<T>(
            x: In<T>,
            residual: In<T>,
            weight: In<f32>,
            bias: In<f32>,
            sum: Out<T>,
            y: Out<T>,
            mean: Out<f32>,
            rstd: Out<f32>,
            n: u32,
            eps: f32,
        );
        /// The gradient of the normalised input, one block per row.
        fn layer_norm_backward<T>(
            x: In<T>,
            weight: In<f32>,
            mean: In<f32>,
            rstd: In<f32>,
            grad: In<T>,
            more: In<T>,
            dx: Out<T>,
            n: u32,
        );
        /// Partial sums of the gradients of weight and bias, one block per group of rows and 256
        /// columns.
        fn layer_norm_weight<T>(
            x: In<T>,
            mean: In<f32>,
            rstd: In<f32>,
            grad: In<T>,
            sums: Out<f32>,
            bias_sums: Out<f32>,
            rows: u32,
            n: u32,
            part: u32,
        );
        /// An activation function, one block per chunk.
        fn activation<T>(x: In<T>, y: Out<T>, n: u64, kind: u32);
        /// The gradient of the activation's input, one block per chunk.
        fn activation_backward<T>(x: In<T>, grad: In<T>, dx: Out<T>, n: u64, kind: u32);
        /// Adds `x` to `sum`, one block per chunk.
        fn add<T>(sum: Out<T>, x: In<T>, n: u64);
        /// `silu(gate) * up`, one block per chunk.
        fn swiglu<T>(gate: In<T>, up: In<T>, y: Out<T>, n: u64);
        /// The gradients of `gate` and `up`, one block per chunk.
        fn swiglu_backward<T>(
            gate: In<T>,
            up: In<T>,
            grad: In<T>,
            dgate: Out<T>,
            dup: Out<T>,
            n: u64,
        );
        /// An activation of `gate` times `up`, one block per chunk.
        fn gated<T>(gate: In<T>, up: In<T>, y: Out<T>, n: u64, kind: u32);
        /// The gradients of the inputs of `gated`, one block per chunk.
        fn gated_backward<T>(
            gate: In<T>,
            up: In<T>,
            grad: In<T>,
            dgate: Out<T>,
            dup: Out<T>,
            n: u64,
            kind: u32,
        );
        /// Rotary position embedding, one block per chunk of pairs.
        fn rope<T>(
            x: In<T>,
            cosine: In<f32>,
            sine: In<f32>,
            y: Out<T>,
            pairs: u64,
            width: u32,
            positions: u32,
            inner: u32,
            sign: f32,
        );
    }
    Attention {
        /// Softmax of the scores of some queries, one block per row.
        fn attention_softmax<T>(
            scores: In<f32>,
            probabilities: Out<T>,
            lse: Out<f32>,
            firsts: In<u32>,
            ends: In<u32>,
            heads: u32,
            queries: u32,
            total: u32,
            start: u32,
            keys: u32,
            position: u32,
            before: u32,
            after: u32,
            base: u32,
            cap: f32,
        );
        /// The probabilities and the gradient of scores, one block per row.
        fn attention_softmax_backward<T>(
            scores: In<f32>,
            grad: In<f32>,
            lse: In<f32>,
            firsts: In<u32>,
            ends: In<u32>,
            probabilities: Out<T>,
            dscores: Out<T>,
            heads: u32,
            queries: u32,
            total: u32,
            start: u32,
            keys: u32,
            position: u32,
            before: u32,
            after: u32,
            base: u32,
            scale: f32,
            cap: f32,
        );
    }
    Flash {
        /// The dot product of each output row with its gradient, one warp per row.
        fn flash_level<T>(
            y: In<T>,
            grad: In<T>,
            level: Out<f32>,
            rows: u32,
            heads: u32,
            queries: u32,
            width: u32,
        );
    }
    Dropout {
        /// Dropout, one block per chunk.
        fn dropout<T>(
            x: In<T>,
            y: Out<T>,
            n: u64,
            starts: In<u64>,
            width: u64,
            key0: u32,
            key1: u32,
            high0: u32,
            high1: u32,
            threshold: u64,
            scale: f32,
        );
    }
    Loss {
        /// Cross entropy, one block per row.
        fn cross_entropy<T>(
            logits: In<T>,
            targets: In<u32>,
            losses: Out<f64>,
            lse: Out<f32>,
            classes: u32,
            smoothing: f32,
        );
        /// The gradient of the logits, written over the logits, one block per row.
        fn cross_entropy_backward<T>(
            logits: Out<T>,
            targets: In<u32>,
            lse: In<f32>,
            grad: In<f32>,
            first: u32,
            classes: u32,
            smoothing: f32,
            uniform: f32,
        );
        /// The gradient of an embedding, one block per id and 256 columns.
        fn embedding_grad<T>(
            grad: In<T>,
            ids: In<u32>,
            starts: In<u32>,
            order: In<u32>,
            width: u32,
            out: Out<f32>,
        );
    }
}

kernels_of_halves! {
    Flash, FlashWide, FlashGeneral, FlashWideGeneral {
        /// Attention, one block per 128 queries of a head.
        fn flash_forward<T>(
            q: In<T>,
            k: In<T>,
            v: In<T>,
            y: Out<T>,
            lse: Out<f32>,
            firsts: In<u32>,
            ends: In<u32>,
            heads: u32,
            group: u32,
            queries: u32,
            keys: u32,
            width: u32,
            place: u32,
            before: u32,
            after: u32,
            scale: f32,
            inner: f32,
            outer: f32,
        );
        /// The gradient of queries, one block per 128 queries of a head, or 64 for the largest
        /// width.
        fn flash_queries<T>(
            q: In<T>,
            k: In<T>,
            v: In<T>,
            grad: In<T>,
            lse: In<f32>,
            level: In<f32>,
            dq: Out<T>,
            firsts: In<u32>,
            ends: In<u32>,
            heads: u32,
            group: u32,
            queries: u32,
            keys: u32,
            width: u32,
            place: u32,
            before: u32,
            after: u32,
            scale: f32,
            inner: f32,
            outer: f32,
        );
        /// The gradients of keys and values, one block per 128 keys of a head, or 64 for the
        /// largest width.
        fn flash_keys<T>(
            q: In<T>,
            k: In<T>,
            v: In<T>,
            grad: In<T>,
            lse: In<f32>,
            level: In<f32>,
            dk: Out<T>,
            dv: Out<T>,
            firsts: In<u32>,
            ends: In<u32>,
            heads: u32,
            group: u32,
            queries: u32,
            keys: u32,
            width: u32,
            place: u32,
            before: u32,
            after: u32,
            scale: f32,
            inner: f32,
            outer: f32,
        );
    }
}
