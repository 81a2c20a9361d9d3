//! Compares every layer and function with central finite differences in f64, by hand-written
//! kernels and by tensor operations, on contiguous and on strided input.

mod adapters;
mod attention;
mod attention_options;
mod batch_norm;
mod convolution;
mod cross_attention;
mod dora;
mod expert_capacity;
mod experts;
mod functional;
pub(crate) mod harness;
mod latent_attention;
mod layers;
mod linear_cross_entropy;
mod loss;
mod norm_of_sum;
mod peers;
mod pooling;
mod precision;
mod recorded;
mod recurrent;
mod residual;
mod table;
