//! Layers: their gradients, and optimizer state in bf16.

#![allow(clippy::disallowed_methods, reason = "tests read tensors")]

mod bf16_state;
mod gradients;
