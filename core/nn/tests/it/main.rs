//! Tests of layers: gradients, unsupported sizes, and optimizer state in bf16.

#![allow(clippy::disallowed_methods, reason = "tests read tensors")]

mod bf16_state;
mod candle;
mod gradients;
mod kv_cache;
mod reports;
mod sizes;
