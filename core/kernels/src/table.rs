//! The table of kernels: the one place in Rust that says what each is called, where it is and what it takes.
//!
//! Launches are made by functions of the kernels' names, so the Rust compiler checks their arguments. That the
//! parameters are those of the kernels is checked by a host compiler in the tests (a `static_assert` for each
//! kernel, and for each field of a row) and against the compiled PTX in `.ci/kernels`.
//!
//! ```
//! use fulgurite_kernels::{In, Out, table};
//! let call = table::sum_f64(1, In::at(0x1000), 100, Out::at(0x2000));
//! # assert_eq!(call.arguments.len(), 3);
//! ```
//!
//! What it reads and what it writes exchanged is no program:
//!
//! ```compile_fail,E0308
//! use fulgurite_kernels::{In, Out, table};
//! let call = table::sum_f64(1, Out::<f64>::at(0x2000), 100, In::<f64>::at(0x1000));
//! ```

use crate::plan::{Parameter, Row};
use crate::plans::{AdamWTensor, AverageTensor, NormTensor, SgdTensor, StepScale};
use crate::{Call, Field, In, Out, Source};

/// A kernel's name and parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signature {
    /// Its name.
    pub name: &'static str,
    /// The file that it is in.
    pub source: Source,
    /// Its parameters, in order.
    pub parameters: Vec<Declared>,
}

/// A parameter as it is declared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Declared {
    /// Its name, in the table alone.
    pub name: &'static str,
    /// Its type in C.
    pub c_type: String,
    /// Its type in PTX.
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
                    arguments: vec![$($argument.argument()),*],
                }
            }
        )*)*

        /// All kernels.
        pub fn all() -> Vec<Signature> {
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

macro_rules! all_rows {
    ($($ty:ty),*) => {
        /// All structs of tables, by their names in C.
        pub fn rows() -> Vec<(&'static str, Vec<Field>)> {
            use crate::plan::Pointee;
            vec![$((<$ty>::C_NAME, <$ty>::fields())),*]
        }
    };
}
all_rows!(NormTensor, AdamWTensor, SgdTensor, AverageTensor, StepScale);

kernels! {
    GradNorm {
        /// The sums of squares of the tensors' chunks, a block each.
        fn squared_norm_chunks(tensors: In<NormTensor>, count: u32, sums: Out<f64>);
        /// The sum of numbers, by one block.
        fn sum_f64(sums: In<f64>, count: u32, total: Out<f64>);
    }
    Optimizer {
        /// AdamW, a block for each chunk.
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
        /// Stochastic gradient descent, a block for each chunk.
        fn sgd(
            tensors: In<SgdTensor>,
            count: u32,
            scale: In<StepScale>,
            momentum: f32,
            gain: f32,
            keep: f32,
            nesterov: u32,
        );
        /// Exponential averages of weights, a block for each chunk.
        fn average(tensors: In<AverageTensor>, count: u32, gain: f32);
    }
}
