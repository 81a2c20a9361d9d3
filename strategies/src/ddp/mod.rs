//! Distributed data parallelism: every rank holds the model, gradients are all-reduced in buckets
//! while backward goes on.

mod bucket;
mod config;
mod reducer;
mod runtime;

pub use config::Ddp;
