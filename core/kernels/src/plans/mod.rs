//! Plans: what is launched, and with which arguments, for addresses and sizes.

mod grad_norm;
mod optimizer;

pub use grad_norm::{NormTensor, Values, squared_norm};
pub use optimizer::{
    AdamW, AdamWTensor, Average, AverageTensor, Momentum, Noise, Scale, Sgd, SgdTensor, State,
    StepScale, Update, adamw, average, sgd,
};

/// Elements of a tensor that one block works on: `CHUNK` in `kernels/common.cu`.
const CHUNK: u64 = 256 * 32;

/// Counts blocks over tensors.
#[derive(Default)]
struct Blocks(u32);

impl Blocks {
    /// The first block of the next tensor, of that many elements.
    fn next(&mut self, length: u64) -> u32 {
        let first = self.0;
        self.0 += u32::try_from(length.div_ceil(CHUNK)).expect("less than 2^45 elements");
        first
    }
}
