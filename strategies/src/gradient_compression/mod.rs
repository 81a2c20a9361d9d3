//! Built-in gradient compressions: what replicas send of gradients, for the key
//! `trainer.strategy.gradient_compression`.
//!
//! | `type` | what is sent |
//! |---|---|
//! | `bf16` | gradients in bfloat16 |
//! | `fp16` | gradients in half precision, divided before |

mod half;

pub use half::{Bf16Compression, Fp16Compression};
