//! `fulgurite bench`: measurements that anyone can repeat, on a model and with options that are said
//! in full.
//!
//! Every time is that of the slowest rank, and the median over the repeats, which begin at a barrier. A
//! limit (raw writes and reads of the same bytes, the matrix products alone) is measured in the same
//! run.

mod checkpoint;
mod collectives;
mod floor;
mod loops;
mod memory;
mod model;
mod overhead;
mod ranks;
mod startup;
mod subject;
mod train;

pub use checkpoint::{CheckpointBench, checkpoint};
pub use collectives::{CollectivesBench, collectives};
pub use model::{Decoder, DecoderSize, SizeOptions, Workload};
pub use overhead::{OverheadBench, overhead};
pub use subject::Subject;
pub use train::{TrainBench, train};
