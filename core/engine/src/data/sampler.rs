//! Samplers: the samples of a rank in each step.

use std::ops::Range;

use fulgurite_config::ConfigType;
use serde::{Deserialize, Serialize};

use super::{SampleOrder, Samples, Split};
use crate::{Error, Result, counted};

/// Limit of samples in a micro-batch, far above real ones.
const MAX_BATCH: usize = 1 << 30;
/// Limit of samples in a step, so that positions in the stream do not overflow.
const MAX_STEP: u64 = 1 << 48;

/// Treatment of an epoch's last samples if they do not fill a step: `trainer.last_batch`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LastBatch {
    /// The step continues in the next epoch, so all steps have the same size.
    #[default]
    Wrap,
    /// The epoch's last step has fewer samples, and its mean is over these.
    Partial,
    /// The epoch leaves them out.
    Drop,
}

impl ConfigType for LastBatch {
    fn describe() -> String {
        "`\"wrap\"`, `\"partial\"` or `\"drop\"`".to_owned()
    }
}

/// The samples of one optimizer step, over all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepSamples {
    /// The position of the first sample in the stream.
    start: u64,
    /// Number of samples.
    pub samples: u64,
    /// Micro-batches of each rank, equal on all ranks.
    pub micro_batches: usize,
    /// The position at which the next step begins.
    pub end: u64,
}

/// The training samples of one data-parallel rank, by step and micro-batch.
///
/// A step takes the next `batch_size * step_ranks * accumulate` samples of the stream, or
/// [fewer](LastBatch) at the end of an epoch. Rank `r` takes their `r`-th contiguous part. So the
/// samples of a step depend only on their number, not on their distribution over ranks and
/// micro-batches.
#[derive(Debug, Clone)]
pub struct TrainSampler {
    last_batch: LastBatch,
    order: SampleOrder,
    batch_size: u64,
    data_parallel_size: u64,
    data_parallel_rank: u64,
    accumulate: u64,
    step_ranks: u64,
}

impl TrainSampler {
    /// The samples of rank `data_parallel_rank` of `data_parallel_size`, in micro-batches of
    /// `batch_size`. A step takes `accumulate` micro-batches.
    ///
    /// # Errors
    /// If a size is zero or probably a mistake (a micro-batch of more than 2^30 samples, a step of
    /// more than 2^48), or the rank is not less than `data_parallel_size`.
    pub fn new(
        order: SampleOrder,
        batch_size: usize,
        data_parallel_size: usize,
        data_parallel_rank: usize,
        accumulate: usize,
    ) -> Result<Self> {
        check_batch(batch_size, data_parallel_size, data_parallel_rank)?;
        if accumulate == 0 {
            return Err(Error::Config(
                "trainer.accumulate_grad_batches must be at least 1, got 0".to_owned(),
            ));
        }
        let factors = [batch_size, data_parallel_size, accumulate].map(|n| n as u64);
        let step = factors.into_iter().try_fold(1_u64, u64::checked_mul);
        if step.is_none_or(|samples| samples > MAX_STEP) {
            return Err(Error::Config(format!(
                "`data.batch_size` = {batch_size} times {} times \
                 `trainer.accumulate_grad_batches` = {accumulate} are the samples of a step, which must \
                 be at most {MAX_STEP}",
                counted(data_parallel_size, "data-parallel rank")
            )));
        }
        Ok(Self {
            order,
            batch_size: batch_size as u64,
            data_parallel_size: data_parallel_size as u64,
            data_parallel_rank: data_parallel_rank as u64,
            accumulate: accumulate as u64,
            step_ranks: data_parallel_size as u64,
            last_batch: LastBatch::Wrap,
        })
    }

    /// Sets the number of ranks for whose batches a step has samples; by default all. Fewer or more
    /// ranks divide these samples among them, in more or fewer micro-batches. As after the loss of
    /// a rank.
    #[must_use]
    pub fn with_step_ranks(mut self, ranks: usize) -> Self {
        self.step_ranks = ranks.max(1) as u64;
        self
    }

    /// Sets the treatment of an epoch's last samples if they do not fill a step.
    ///
    /// # Errors
    /// If every sample would be left out.
    pub fn with_last_batch(mut self, last_batch: LastBatch) -> Result<Self> {
        let (epoch, step) = (self.order.epoch_len(), self.global_batch_size());
        if last_batch == LastBatch::Drop && epoch < step {
            return Err(Error::Config(format!(
                "`trainer.last_batch` = \"drop\": an epoch has {}, and a step takes {step}, so \
                 all would be left out; give more data, lower the batch size, or set \"partial\"",
                counted(epoch, "sample")
            )));
        }
        self.last_batch = last_batch;
        Ok(self)
    }

    /// The step that begins at `position` of the stream, or after the samples left out there.
    pub fn step_at(&self, position: u64) -> StepSamples {
        let (epoch, full) = (self.order.epoch_len(), self.global_batch_size());
        let left = |position: u64| epoch - position % epoch;
        let start = match self.last_batch {
            LastBatch::Drop if left(position) < full => position + left(position),
            _ => position,
        };
        let samples = match self.last_batch {
            LastBatch::Partial => full.min(left(start)),
            _ => full,
        };
        let end = match self.last_batch {
            LastBatch::Drop if left(start + samples) < full => {
                start + samples + left(start + samples)
            }
            _ => start + samples,
        };
        let largest_part = samples.div_ceil(self.data_parallel_size);
        let micro_batches = largest_part.div_ceil(self.batch_size) as usize;
        StepSamples { start, samples, micro_batches, end }
    }

    /// Number of steps from `position` of the stream to `end`; the last may be cut short.
    pub fn steps_between(&self, position: u64, end: u64) -> u64 {
        let (epoch, full) = (self.order.epoch_len(), self.global_batch_size());
        let in_part = |samples: u64| match self.last_batch {
            LastBatch::Drop => samples / full,
            _ => samples.div_ceil(full),
        };
        if end <= position {
            return 0;
        }
        if self.last_batch == LastBatch::Wrap || end - position <= epoch - position % epoch {
            return in_part(end - position);
        }
        let first = epoch - position % epoch;
        let rest = end - position - first;
        in_part(first)
            .saturating_add((rest / epoch).saturating_mul(in_part(epoch)))
            .saturating_add(in_part(rest % epoch))
    }

    /// This rank's part of a step's samples, as offsets from the step's first.
    fn share(&self, step: &StepSamples) -> Range<u64> {
        let bound = |rank: u64| {
            (u128::from(step.samples) * u128::from(rank) / u128::from(self.data_parallel_size))
                as u64
        };
        bound(self.data_parallel_rank)..bound(self.data_parallel_rank + 1)
    }

    /// The offset in the step of the first sample of this rank's micro-batch.
    pub fn first_sample(&self, step: &StepSamples, micro_batch: usize) -> u64 {
        self.share(step).start + micro_batch as u64 * self.batch_size
    }

    /// Whether this rank lacks samples for a micro-batch that other ranks compute. It then
    /// computes on the step's first sample, and its loss does not count.
    pub fn is_padding(&self, step: &StepSamples, micro_batch: usize) -> bool {
        self.first_sample(step, micro_batch) >= self.share(step).end
    }

    /// The samples of this rank's micro-batch of a step.
    fn micro_batch(&self, step: &StepSamples, micro_batch: usize) -> Samples {
        let start = self.first_sample(step, micro_batch);
        let places = start..(start + self.batch_size).min(self.share(step).end);
        let places = if places.is_empty() { 0..1 } else { places };
        let order = &self.order;
        let samples = places.map(|place| order.at(step.start + place));
        Samples::new(Split::Train, order.seed(), samples)
    }

    /// Samples of a full step over all ranks.
    pub fn global_batch_size(&self) -> u64 {
        self.batch_size * self.step_ranks * self.accumulate
    }

    /// The samples of this rank's micro-batch `micro_batch` of step `step`, both counted from 0.
    pub fn indices(&self, step: u64, micro_batch: usize) -> Vec<u64> {
        let samples = self.samples_from(step * self.global_batch_size(), micro_batch);
        samples.indices().to_vec()
    }

    /// The samples of this rank's micro-batch `micro_batch`, counted from 0, of a step that begins
    /// at `position` of the stream. For runs that resume with another global batch size.
    fn samples_from(&self, position: u64, micro_batch: usize) -> Samples {
        self.micro_batch(&self.step_at(position), micro_batch)
    }

    /// This rank's micro-batches without end, from the step that begins at `position` of the
    /// stream.
    pub fn batches_from(&self, position: u64) -> impl Iterator<Item = Samples> + Send + use<> {
        let sampler = self.clone();
        let mut step = sampler.step_at(position);
        let mut micro_batch = 0;
        std::iter::from_fn(move || {
            if micro_batch == step.micro_batches {
                (step, micro_batch) = (sampler.step_at(step.end), 0);
            }
            micro_batch += 1;
            Some(sampler.micro_batch(&step, micro_batch - 1))
        })
    }
}

/// The samples of one data-parallel rank in validation, test and prediction: every sample once, in
/// order, without repeats to fill a batch. All ranks see the same number of batches. The last may
/// be short, and a rank's part of it empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EvalSampler {
    len: u64,
    batch_size: u64,
    data_parallel_size: u64,
    data_parallel_rank: u64,
}

impl EvalSampler {
    /// `len` samples (may be 0), in batches of `batch_size` for each rank.
    ///
    /// # Errors
    /// If a size is zero, or the rank is not less than `data_parallel_size`.
    pub fn new(
        len: u64,
        batch_size: usize,
        data_parallel_size: usize,
        data_parallel_rank: usize,
    ) -> Result<Self> {
        check_batch(batch_size, data_parallel_size, data_parallel_rank)?;
        Ok(Self {
            len,
            batch_size: batch_size as u64,
            data_parallel_size: data_parallel_size as u64,
            data_parallel_rank: data_parallel_rank as u64,
        })
    }

    /// Number of batches, the same on every rank.
    pub fn num_batches(&self) -> u64 {
        self.len.div_ceil(self.batch_size * self.data_parallel_size)
    }

    /// The samples of this rank's part of batch `batch`. Parts are contiguous, in rank order, and
    /// equal in size to within one sample.
    pub fn indices(&self, batch: u64) -> Range<u64> {
        let global = self.batch_size * self.data_parallel_size;
        let start = (batch * global).min(self.len);
        let count = global.min(self.len - start);
        let part = |rank: u64| start + count * rank / self.data_parallel_size;
        part(self.data_parallel_rank)..part(self.data_parallel_rank + 1)
    }

    /// This rank's first `batches` batches of a split. An empty batch gets the first sample of the
    /// split, and its result is not used.
    pub fn batches(
        &self,
        split: Split,
        seed: u64,
        batches: u64,
    ) -> impl Iterator<Item = Samples> + Send + use<> {
        let sampler = *self;
        (0..batches).map(move |batch| {
            let indices = sampler.indices(batch);
            let indices = if indices.is_empty() { 0..1 } else { indices };
            Samples::new(split, seed, indices.map(|index| (0, index)))
        })
    }
}

fn check_batch(batch_size: usize, parallel: usize, rank: usize) -> Result<()> {
    if batch_size == 0 {
        return Err(Error::Config("data.batch_size must be at least 1, got 0".to_owned()));
    }
    if batch_size > MAX_BATCH {
        return Err(Error::Config(format!(
            "`data.batch_size` must be at most {MAX_BATCH}, found {batch_size}"
        )));
    }
    if rank >= parallel {
        return Err(Error::Data(format!("there is no data-parallel rank {rank} of {parallel}")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;
    use proptest::prelude::*;

    use super::*;

    /// All samples of a step in stream order: rank by rank, micro-batch by micro-batch.
    fn step_samples(
        order: &SampleOrder,
        step: u64,
        (dp, accumulate, batch): (usize, usize, usize),
    ) -> Vec<u64> {
        let samplers =
            (0..dp).map(|r| TrainSampler::new(order.clone(), batch, dp, r, accumulate).unwrap());
        samplers.flat_map(|s| (0..accumulate).flat_map(move |m| s.indices(step, m))).collect()
    }

    /// A distribution of 24 samples over ranks and micro-batches.
    fn shares() -> impl Strategy<Value = (usize, usize, usize)> {
        let all: Vec<_> = (1..=24)
            .flat_map(|dp| (1..=24).map(move |accumulate| (dp, accumulate)))
            .filter(|(dp, accumulate)| 24 % (dp * accumulate) == 0)
            .map(|(dp, accumulate)| (dp, accumulate, 24 / (dp * accumulate)))
            .collect();
        prop::sample::select(all)
    }

    /// This rank's samples in the steps from `position` to `end` of the stream, step by step.
    fn of_steps(sampler: &TrainSampler, mut position: u64, end: u64) -> Vec<Vec<u64>> {
        let mut steps = Vec::new();
        while position < end {
            let step = sampler.step_at(position);
            let real = (0..step.micro_batches).filter(|&m| !sampler.is_padding(&step, m));
            let samples = real.map(|m| sampler.micro_batch(&step, m).indices().to_vec());
            steps.push(samples.collect::<Vec<_>>().concat());
            position = step.end;
        }
        steps
    }

    proptest! {
        #[test]
        fn last_step_is_partial_or_dropped(
            seed: u64, len in 1u64..60, epochs in 1u64..4, first in 0u64..60, (dp, accumulate, batch) in shares()
        ) {
            let order = SampleOrder::new(seed, true, len).unwrap();
            let end = epochs * len;
            let first = first.min(end);
            for last_batch in [LastBatch::Partial, LastBatch::Drop] {
                let sampler = |rank| {
                    let sampler = TrainSampler::new(order.clone(), batch, dp, rank, accumulate).unwrap();
                    sampler.with_last_batch(last_batch)
                };
                if last_batch == LastBatch::Drop && len < 24 {
                    prop_assert!(sampler(0).is_err());
                    continue;
                }
                let by_rank: Vec<_> =
                    (0..dp).map(|rank| of_steps(&sampler(rank).unwrap(), 0, end)).collect();
                // In each step the ranks' parts, in rank order, form the stream.
                let steps = by_rank[0].len();
                let joined: Vec<Vec<u64>> = (0..steps)
                    .map(|step| by_rank.iter().flat_map(|rank| rank[step].clone()).collect())
                    .collect();
                let per_epoch = match last_batch { LastBatch::Drop => len / 24 * 24, _ => len };
                let expected = (0..epochs)
                    .flat_map(|epoch| (0..per_epoch).map(move |i| epoch * len + i))
                    .map(|position| order.at(position).1);
                prop_assert_eq!(joined.concat(), expected.collect::<Vec<_>>());
                prop_assert!(joined.iter().all(|step| !step.is_empty() && step.len() <= 24));
                // All ranks, and `batches_from`, see the same number of micro-batches.
                let sampler = sampler(dp - 1).unwrap();
                prop_assert_eq!(sampler.steps_between(0, end), steps as u64);
                let from_first = of_steps(&sampler, first, end).len() as u64;
                let left_out = last_batch == LastBatch::Drop && end - first < 24 && first < end;
                prop_assert!(sampler.steps_between(first, end) == from_first || left_out);
            }
        }

        #[test]
        fn step_samples_do_not_depend_on_sharing(
            seed: u64, shuffle: bool, len in 1u64..100, step in 0u64..20, share in shares()
        ) {
            let order = SampleOrder::new(seed, shuffle, len).unwrap();
            let stream: Vec<_> = (24 * step..24 * (step + 1)).map(|p| order.at(p).1).collect();
            prop_assert_eq!(step_samples(&order, step, share), stream);
        }

        #[test]
        fn ranks_share_an_epoch_disjointly(
            seed: u64, steps in 1u64..6, share in shares()
        ) {
            let len = 24 * steps;
            let order = SampleOrder::new(seed, true, len).unwrap();
            let mut seen: Vec<_> = (0..steps).flat_map(|s| step_samples(&order, s, share)).collect();
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..len).collect::<Vec<_>>());
        }

        #[test]
        fn epoch_begins_after_last_samples_of_previous(
            len in 1u64..100, epochs in 1u64..4, share in shares()
        ) {
            let order = SampleOrder::new(1, true, len).unwrap();
            let (dp, accumulate, batch) = share;
            let sampler = TrainSampler::new(order, batch, dp, 0, accumulate).unwrap();
            let steps = (epochs * len).div_ceil(sampler.global_batch_size());
            prop_assert!(sampler.order.epoch(steps * sampler.global_batch_size()) >= epochs);
            prop_assert!(sampler.order.epoch((steps - 1) * sampler.global_batch_size()) < epochs);
        }

        #[test]
        fn evaluation_takes_every_sample_once_in_order(
            len in 0u64..200, batch in 1usize..9, dp in 1usize..6
        ) {
            let sampler = |rank| EvalSampler::new(len, batch, dp, rank).unwrap();
            let batches = sampler(0).num_batches();
            let mut seen = Vec::new();
            for k in 0..batches {
                for rank in 0..dp {
                    prop_assert_eq!(sampler(rank).num_batches(), batches);
                    let part = sampler(rank).indices(k);
                    prop_assert!(part.end - part.start <= batch as u64);
                    seen.extend(part);
                }
            }
            prop_assert_eq!(seen, (0..len).collect::<Vec<_>>());
            prop_assert!(sampler(0).indices(batches).is_empty());
        }
    }

    #[test]
    fn without_shuffling_ranks_have_contiguous_parts() {
        let order = SampleOrder::new(0, false, 1000).unwrap();
        let sampler = TrainSampler::new(order, 2, 3, 2, 2).unwrap();
        // Step s has samples 12 s ..; rank 2 the last four of them.
        assert_eq!(sampler.indices(5, 0), [68, 69]);
        assert_eq!(sampler.indices(5, 1), [70, 71]);
    }

    #[test]
    fn a_short_last_batch_is_shared_evenly() {
        let parts: Vec<_> =
            (0..4).map(|r| EvalSampler::new(21, 4, 4, r).unwrap().indices(1)).collect();
        assert_eq!(parts, [16..17, 17..18, 18..19, 19..21]);
        let parts: Vec<_> =
            (0..4).map(|r| EvalSampler::new(2, 4, 4, r).unwrap().indices(0)).collect();
        assert_eq!(parts, [0..0, 0..1, 1..1, 1..2]);
    }

    #[test]
    fn mistakes_are_explained() {
        let order = SampleOrder::new(0, false, 10).unwrap();
        let message = |batch, dp, rank, accumulate| {
            TrainSampler::new(order.clone(), batch, dp, rank, accumulate).unwrap_err().to_string()
        };
        assert_says!(message(0, 1, 0, 1), "data.batch_size must be at least 1, got 0");
        assert_says!(message(1, 1, 0, 0), "trainer.accumulate_grad_batches … at least 1, got 0");
        assert_says!(message(1, 2, 2, 1), "data: there is no data-parallel rank 2 of 2");
    }

    #[test]
    fn absurd_sizes_are_refused() {
        let order = SampleOrder::new(0, false, 1000).unwrap();
        let error = |batch, accumulate| {
            TrainSampler::new(order.clone(), batch, 4, 0, accumulate).unwrap_err().to_string()
        };
        assert_says!(error(1_000_000_000_000_000_000, 1), "`data.batch_size` … most 1073741824 …");
        assert_says!(error(1 << 30, usize::MAX), "`data.batch_size` … at most 281474976710656");
        assert!(EvalSampler::new(10, usize::MAX, 2, 0).is_err());
    }
}
