//! Batches that only depend on the step and the sample's place in the global batch.

use candle_core::{Device, Tensor};
use fulgurite_core::Result;
use fulgurite_core::random::{Purpose, Stream};

use super::VOCABULARY;

/// Samples of a global batch; 12 is uneven for most numbers of ranks and micro-batches.
pub const GLOBAL_BATCH: usize = 12;
const TIME: usize = 5;

/// Consecutive samples of a step's global batch.
pub struct Sample {
    /// Token ids, `[samples, time]`.
    pub ids: Tensor,
    /// The next tokens; some are ignored, at a rate that differs by sample.
    pub targets: Tensor,
    /// Index of the first sample in the global batch.
    pub first: usize,
}

/// Shard `index` of `parts` of a step's global batch.
pub fn micro_batch(step: u64, index: usize, parts: usize) -> Result<Sample> {
    let bounds = (index * GLOBAL_BATCH / parts, (index + 1) * GLOBAL_BATCH / parts);
    let stream = Stream::new(9, Purpose::Sample, "tokens").child(step);
    let (mut ids, mut targets) = (Vec::new(), Vec::new());
    for sample in bounds.0..bounds.1 {
        for t in 0..TIME {
            let number = stream.word((sample * TIME + t) as u64);
            let id = number % VOCABULARY as u32;
            ids.push(id);
            // Learnable: the current token determines the next one.
            let next = i64::from((id * 3 + 1) % VOCABULARY as u32);
            targets.push(if t > 0 && (number >> 8) % 12 < sample as u32 { -100 } else { next });
        }
    }
    let shape = (bounds.1 - bounds.0, TIME);
    Ok(Sample {
        ids: Tensor::from_vec(ids, shape, &Device::Cpu)?,
        targets: Tensor::from_vec(targets, shape, &Device::Cpu)?,
        first: bounds.0,
    })
}
