//! Checkpoints in object stores.

mod contract;
#[cfg(feature = "aws")]
mod s3;
