//! Layers: their gradients, and optimizer state in bf16.

mod bf16_state;
mod gradients;
