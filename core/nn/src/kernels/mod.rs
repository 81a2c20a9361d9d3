//! The mathematics of the layers, forward and backward, on tensors outside any graph. Each has
//! two implementations: one written by hand for the CPU, and one made of tensor operations, for every
//! other device.

pub(super) mod activation;
pub(super) mod attention;
mod attention_host;
mod attention_portable;
pub(super) mod cross_entropy;
pub(super) mod cross_entropy_parts;
pub(super) mod embedding;
pub(super) mod matmul;
pub(super) mod norm;
pub(super) mod rope;
pub(super) mod sequences;
pub(super) mod softmax;
