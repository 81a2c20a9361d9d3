//! The computations of the layers, forward and backward, on tensors outside any graph. Each has two
//! implementations: a kernel for the CPU, and tensor operations for every other device. With the
//! feature `cuda`, some first try GPU kernels, which decline unsupported tensors.

pub(super) mod activation;
pub(super) mod attention;
#[cfg(feature = "cuda")]
mod attention_cuda;
mod attention_host;
mod attention_portable;
mod attention_row;
pub(super) mod cached_attention;
mod cached_attention_host;
pub(super) mod clamped;
pub(super) mod context_attention;
pub(super) mod convolution;
pub(super) mod cross_entropy;
pub(super) mod cross_entropy_parallel;
pub(super) mod embedding;
mod few_rows;
pub(super) mod grouped;
pub(super) mod masked_attention;
mod masked_attention_host;
pub(super) mod matmul;
pub(super) mod norm;
pub(super) mod output_factors;
pub(super) mod pooling;
pub(super) mod recurrent;
pub(super) mod rope;
pub(super) mod routing;
pub(super) mod sinks;
pub(super) mod softmax;
