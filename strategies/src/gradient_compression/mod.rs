//! Built-in gradient compressions for the key `trainer.strategy.gradient_compression`.
//!
//! | `type` | replicas send |
//! |---|---|
//! | `bf16` | gradients in bfloat16 |
//! | `fp16` | gradients in half precision, divided before the sum |

mod half;

pub use half::{Bf16Compression, Fp16Compression};
