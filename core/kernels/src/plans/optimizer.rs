//! Updates of many tensors in one launch: optimizers and averages of weights.

use super::{Blocks, Values};
use crate::plan::{Address, rows};
use crate::{Float, In, Plan, table};

rows! {
    /// The state of a step that all tensors share.
    pub struct StepScale {
        /// Factor of the gradients.
        pub factor: f32,
        /// Each element of a scaled gradient is clamped to plus or minus this value.
        pub bound: f32,
        /// If not zero, the step changes nothing.
        pub skip: u32,
        /// Zero.
        pub unused: u32,
    }

    /// A tensor, as AdamW's kernel reads it.
    pub struct AdamWTensor {
        /// f32, bf16 or f16.
        pub values: Address,
        /// f32.
        pub grad: Address,
        /// The first moment.
        pub exp_avg: Address,
        /// The second moment.
        pub exp_avg_sq: Address,
        /// Number of elements of each.
        pub length: u64,
        /// As [`Noise::run`].
        pub run: u64,
        /// As [`Noise::base`].
        pub base: u64,
        /// As [`Noise::dims`].
        pub size0: u64,
        /// As [`Noise::dims`].
        pub stride0: u64,
        /// As [`Noise::dims`].
        pub size1: u64,
        /// As [`Noise::dims`].
        pub stride1: u64,
        /// As [`Noise::dims`].
        pub size2: u64,
        /// As [`Noise::dims`].
        pub stride2: u64,
        /// As [`Noise::dims`].
        pub size3: u64,
        /// As [`Noise::dims`].
        pub stride3: u64,
        /// As [`Noise::key`].
        pub key0: u32,
        /// As [`Noise::key`].
        pub key1: u32,
        /// As [`Noise::high`].
        pub high0: u32,
        /// As [`Noise::high`].
        pub high1: u32,
        /// Factor of the values, for weight decay.
        pub keep: f32,
        /// Minus the learning rate over the first moment's bias correction.
        pub step_size: f32,
        /// The first block of this tensor.
        pub first_block: u32,
        /// The number of the values' dtype.
        pub dtype: u32,
        /// The number of the state's dtype.
        pub state_dtype: u32,
        /// Zero.
        pub unused: u32,
    }

    /// A tensor, as the kernel of stochastic gradient descent reads it.
    pub struct SgdTensor {
        /// f32, bf16 or f16.
        pub values: Address,
        /// f32.
        pub grad: Address,
        /// The momentum buffer, if any.
        pub momentum_buffer: Address,
        /// Number of elements of each.
        pub length: u64,
        /// As [`Noise::run`].
        pub run: u64,
        /// As [`Noise::base`].
        pub base: u64,
        /// As [`Noise::dims`].
        pub size0: u64,
        /// As [`Noise::dims`].
        pub stride0: u64,
        /// As [`Noise::dims`].
        pub size1: u64,
        /// As [`Noise::dims`].
        pub stride1: u64,
        /// As [`Noise::dims`].
        pub size2: u64,
        /// As [`Noise::dims`].
        pub stride2: u64,
        /// As [`Noise::dims`].
        pub size3: u64,
        /// As [`Noise::dims`].
        pub stride3: u64,
        /// As [`Noise::key`].
        pub key0: u32,
        /// As [`Noise::key`].
        pub key1: u32,
        /// As [`Noise::high`].
        pub high0: u32,
        /// As [`Noise::high`].
        pub high1: u32,
        /// Weight decay: this value times the parameter is added to the gradient.
        pub weight_decay: f32,
        /// Minus the learning rate.
        pub step_size: f32,
        /// The first block of this tensor.
        pub first_block: u32,
        /// The number of the values' dtype.
        pub dtype: u32,
        /// The number of the state's dtype, or 4 for no state.
        pub state_dtype: u32,
        /// Zero.
        pub unused: u32,
    }

    /// A tensor and its average, as the kernel reads them.
    pub struct AverageTensor {
        /// f32.
        pub average: Address,
        /// f32, bf16 or f16.
        pub values: Address,
        /// Number of elements of each.
        pub length: u64,
        /// The first block of this tensor.
        pub first_block: u32,
        /// The number of the values' dtype.
        pub dtype: u32,
    }
}

/// The dtype of optimizer state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Single precision, as the arithmetic.
    F32,
    /// bf16, with stochastic rounding.
    Bf16,
}

/// The scale of gradients in one step, read by the kernel from the device's memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scale {
    /// Known when the plan is made.
    Known {
        /// Gradients are multiplied by this value.
        factor: f32,
        /// After that, each element is clamped to plus or minus this value, which may be infinite.
        bound: f32,
    },
    /// The address of a [`StepScale`], which other kernels may have written.
    At(u64),
}

impl Scale {
    fn pointer(self, plan: &mut Plan) -> In<StepScale> {
        match self {
            Self::Known { factor, bound } => {
                plan.table([StepScale { factor, bound, skip: 0, unused: 0 }])
            }
            Self::At(address) => In::at(address),
        }
    }
}

/// The random words for a tensor's elements: a key, and the elements' positions in the whole
/// parameter.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Noise {
    /// The stream's key.
    pub key: [u32; 2],
    /// The upper half of the stream's counter.
    pub high: [u32; 2],
    /// Elements of a run. A run is contiguous in the whole parameter.
    pub run: u64,
    /// The beginning of the first run in the whole parameter.
    pub base: u64,
    /// Size in this shard and stride in the whole parameter of each dimension outside the runs,
    /// innermost first.
    pub dims: Vec<[u64; 2]>,
}

impl Noise {
    /// The most dimensions outside the runs that the kernels support.
    pub const MOST_DIMS: usize = 4;

    fn dim(&self, index: usize) -> [u64; 2] {
        self.dims.get(index).copied().unwrap_or([1, 0])
    }
}

/// The operands of one tensor's update. All have the same length.
#[derive(Debug, Clone, PartialEq)]
pub struct Update<'a, const N: usize> {
    /// The parameter, updated in place: f32, bf16 or f16.
    pub values: Values,
    /// The address of the gradient, f32.
    pub grad: u64,
    /// The addresses of the state, updated in place.
    pub state: [u64; N],
    /// The dtype of the state.
    pub state_dtype: State,
    /// The random words that round bf16 state. It has at most [`MOST_DIMS`](Noise::MOST_DIMS)
    /// dimensions.
    pub noise: &'a Noise,
    /// Minus the learning rate; for AdamW, divided by the first moment's bias correction.
    pub step_size: f32,
    /// AdamW: factor of the values. SGD: this value times the parameter is added to the gradient.
    pub decay: f32,
}

/// The settings of an AdamW step that all tensors share.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Square root of the second moment's bias correction.
    pub correction2_sqrt: f64,
    /// Added to the denominator.
    pub eps: f64,
}

/// The momentum of an SGD step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Momentum {
    /// With Nesterov momentum, factor of the buffer in the update.
    pub momentum: f64,
    /// Factor of the gradient in the new buffer.
    pub gain: f64,
    /// Factor of the old buffer in the new one.
    pub keep: f64,
    /// Whether to use Nesterov momentum: the update is the gradient plus the momentum.
    pub nesterov: bool,
}

/// Stochastic gradient descent, with or without momentum.
pub type Sgd = Option<Momentum>;

fn dtype(values: Float) -> u32 {
    assert!(values != Float::F64, "the kernels of optimizers compute in f32");
    values as u32
}

/// Updates many tensors by one AdamW step: one launch.
pub fn adamw<'a>(
    updates: impl IntoIterator<Item = Update<'a, 2>>,
    adamw: AdamW,
    scale: Scale,
) -> Plan {
    let mut plan = Plan::default();
    let mut blocks = Blocks::default();
    let rows: Vec<_> = updates
        .into_iter()
        .filter(|update| update.values.length > 0)
        .map(|update| {
            let dims = [0, 1, 2, 3].map(|dim| update.noise.dim(dim));
            AdamWTensor {
                values: Address(update.values.address),
                grad: Address(update.grad),
                exp_avg: Address(update.state[0]),
                exp_avg_sq: Address(update.state[1]),
                length: update.values.length,
                run: update.noise.run.max(1),
                base: update.noise.base,
                size0: dims[0][0],
                stride0: dims[0][1],
                size1: dims[1][0],
                stride1: dims[1][1],
                size2: dims[2][0],
                stride2: dims[2][1],
                size3: dims[3][0],
                stride3: dims[3][1],
                key0: update.noise.key[0],
                key1: update.noise.key[1],
                high0: update.noise.high[0],
                high1: update.noise.high[1],
                keep: update.decay,
                step_size: update.step_size,
                first_block: blocks.next(update.values.length),
                dtype: dtype(update.values.dtype),
                state_dtype: update.state_dtype as u32,
                unused: 0,
            }
        })
        .collect();
    let count = rows.len() as u32;
    let tensors = plan.table(rows);
    let scale = scale.pointer(&mut plan);
    plan.call(table::adamw(
        blocks.0,
        tensors,
        count,
        scale,
        u32::from(1.0 - adamw.beta1 < 0.5),
        (1.0 - adamw.beta1) as f32,
        adamw.beta1 as f32,
        adamw.beta2 as f32,
        (1.0 - adamw.beta2) as f32,
        adamw.correction2_sqrt as f32,
        adamw.eps as f32,
    ));
    plan
}

/// Updates many tensors by one step of stochastic gradient descent: one launch.
pub fn sgd<'a>(
    updates: impl IntoIterator<Item = Update<'a, 1>>,
    momentum: Sgd,
    scale: Scale,
) -> Plan {
    const NO_STATE: u32 = 4;
    let mut plan = Plan::default();
    let mut blocks = Blocks::default();
    let rows: Vec<_> = updates
        .into_iter()
        .filter(|update| update.values.length > 0)
        .map(|update| {
            let dims = [0, 1, 2, 3].map(|dim| update.noise.dim(dim));
            SgdTensor {
                values: Address(update.values.address),
                grad: Address(update.grad),
                momentum_buffer: Address(update.state[0]),
                length: update.values.length,
                run: update.noise.run.max(1),
                base: update.noise.base,
                size0: dims[0][0],
                stride0: dims[0][1],
                size1: dims[1][0],
                stride1: dims[1][1],
                size2: dims[2][0],
                stride2: dims[2][1],
                size3: dims[3][0],
                stride3: dims[3][1],
                key0: update.noise.key[0],
                key1: update.noise.key[1],
                high0: update.noise.high[0],
                high1: update.noise.high[1],
                weight_decay: update.decay,
                step_size: update.step_size,
                first_block: blocks.next(update.values.length),
                dtype: dtype(update.values.dtype),
                state_dtype: match momentum {
                    Some(_) => update.state_dtype as u32,
                    None => NO_STATE,
                },
                unused: 0,
            }
        })
        .collect();
    let count = rows.len() as u32;
    let tensors = plan.table(rows);
    let scale = scale.pointer(&mut plan);
    let none = Momentum { momentum: 0.0, gain: 0.0, keep: 0.0, nesterov: false };
    let Momentum { momentum, gain, keep, nesterov } = momentum.unwrap_or(none);
    let [momentum, gain, keep] = [momentum, gain, keep].map(|x| x as f32);
    plan.call(table::sgd(
        blocks.0,
        tensors,
        count,
        scale,
        momentum,
        gain,
        keep,
        u32::from(nesterov),
    ));
    plan
}

/// An average of a tensor's values, in f32.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Average {
    /// The address of the average, updated in place.
    pub average: u64,
    /// The averaged values: f32, bf16 or f16.
    pub values: Values,
}

/// Updates averages by `average += gain * (values - average)`: one launch for many tensors. `scale`
/// is the address of the preceding step's [`StepScale`], if on the device. If that step was
/// skipped, the averages do not change.
pub fn average(averages: &[Average], gain: f64, scale: Option<u64>) -> Plan {
    let mut plan = Plan::default();
    let mut blocks = Blocks::default();
    let rows: Vec<_> = averages
        .iter()
        .filter(|average| average.values.length > 0)
        .map(|&Average { average, values }| AverageTensor {
            average: Address(average),
            values: Address(values.address),
            length: values.length,
            first_block: blocks.next(values.length),
            dtype: dtype(values.dtype),
        })
        .collect();
    let count = rows.len() as u32;
    let tensors = plan.table(rows);
    let scale = scale.map_or(In::null(), In::at);
    plan.call(table::average(blocks.0, tensors, count, gain as f32, scale));
    plan
}
