//! Plans of launches, made from addresses and sizes.

mod activation;
mod attention;
mod copies;
mod dropout;
mod flash;
mod grad_norm;
mod layer_norm;
mod loss;
mod masked_softmax;
mod optimizer;
mod pooling;
mod recurrent;
mod rows;
mod views;

pub use activation::{Activation, activation, activation_backward, gated, gated_backward};
pub use attention::{Attention, Seen, TILE, attention, attention_backward};
pub use copies::{Copied, CopiedPart, copies};
pub use dropout::{Dropout, dropout};
pub use flash::{flash_attention, flash_attention_backward};
pub use grad_norm::{NormTensor, Values, squared_norm};
pub use layer_norm::{LayerNorm, LayerNormBackward, layer_norm, layer_norm_backward};
pub use loss::{CrossEntropy, IGNORED, cross_entropy, cross_entropy_backward, embedding_grad};
pub use masked_softmax::{Broadcast, masked_softmax, masked_softmax_backward};
pub use optimizer::{
    AdamW, AdamWTensor, Average, AverageTensor, Momentum, Noise, Scale, Sgd, SgdTensor, State,
    StepScale, Update, adamw, average, sgd,
};
pub use pooling::{Pooling, max_pool, max_pool_backward, mean_pool, mean_pool_backward};
pub use recurrent::{
    States, Step, StepBackward, gru_step, gru_step_backward, lstm_step, lstm_step_backward,
};
pub use rows::{
    RmsNorm, RmsNormBackward, Rope, add, rms_norm, rms_norm_backward, rope, swiglu, swiglu_backward,
};
pub use views::{View, dense, pick_rows};

/// Evaluates `$body` with `$T` as the element type of an f32, bf16 or f16 dtype.
macro_rules! with_element {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::Float::F32 => {
                type $T = f32;
                $body
            }
            $crate::Float::Bf16 => {
                type $T = $crate::Bf16;
                $body
            }
            $crate::Float::F16 => {
                type $T = $crate::F16;
                $body
            }
            $crate::Float::F64 => panic!("the kernels of layers compute in f32, got f64"),
        }
    };
}
use with_element;

/// Like `with_element`, for 16-bit dtypes.
macro_rules! with_half {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::Float::Bf16 => {
                type $T = $crate::Bf16;
                $body
            }
            $crate::Float::F16 => {
                type $T = $crate::F16;
                $body
            }
            other => panic!("tensor cores take bf16 and f16, got {}", other.name()),
        }
    };
}
use with_half;

/// Returns the number of blocks of `size` elements for `n` elements.
fn blocks(n: u64, size: u64) -> u32 {
    u32::try_from(n.div_ceil(size)).expect("less than 2^32 blocks")
}

/// Columns of a block with one thread per column.
const COLUMNS: u64 = 256;

/// Elements of a tensor per block: `CHUNK` in `kernels/common.cu`.
const CHUNK: u64 = 256 * 32;

/// Counts blocks over several tensors.
#[derive(Default)]
struct Blocks(u32);

impl Blocks {
    /// Returns the first block of the next tensor, which has `length` elements.
    fn next(&mut self, length: u64) -> u32 {
        self.next_of(length, CHUNK)
    }

    /// Like `next`, for blocks of `chunk` elements.
    fn next_of(&mut self, length: u64, chunk: u64) -> u32 {
        let first = self.0;
        self.0 += u32::try_from(length.div_ceil(chunk)).expect("less than 2^45 elements");
        first
    }
}
