//! Attention by cuDNN, without a GPU.

mod graphs;
mod plans;
