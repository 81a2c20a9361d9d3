//! The capacity of experts: the rows of a sequence that an expert computes at most in training.

use candle_core::{Device, Tensor};

use super::experts_config::MixtureOfExpertsConfig;
use super::kernels::routing::Routing;
use super::kv_cache::CachedTokens;
use crate::{Error, Result};
use fulgurite_engine::execution::{dry_run, read};
use fulgurite_engine::module::ForwardScope;
use fulgurite_engine::parallel::{ContextParallel, LayerHandle};

/// The capacity of the experts of one forward, in the rows that this rank has.
///
/// An expert takes the first choices of each sequence in the order of positions. The unit is a
/// sequence, so ranks and micro-batches with other sequences drop the same choices.
#[derive(Debug)]
pub(super) struct Capacity {
    /// The rows of a sequence that an expert takes at most.
    limit: u32,
    /// Number of sequences.
    sequences: usize,
    /// Positions of each sequence on this rank.
    time: usize,
    /// The ranks that share the sequences.
    context: Option<ContextParallel>,
}

impl Capacity {
    /// Returns the capacity of a forward for an input of these dimensions, `[.., time, hidden]`.
    /// `None` if the forward drops nothing: without a capacity, in evaluation, and with a cache.
    ///
    /// # Errors
    /// With a capacity outside of any scope, as [`ForwardScope::of_layer`]. If ranks share a
    /// sequence in chunks of unequal length.
    pub(super) fn of_forward(
        config: &CapacityConfig,
        layer: &LayerHandle,
        dims: &[usize],
    ) -> Result<Option<Self>> {
        let Some(factor) = config.factor else { return Ok(None) };
        let Some(scope) = ForwardScope::of_layer(layer)? else { return Ok(None) };
        if CachedTokens::current().is_some() {
            return Ok(None);
        }
        let (time, sequences) = match dims {
            [before @ .., time, _] => (*time, before.iter().product()),
            _ => (1, 1),
        };
        let context = scope.context;
        if context.is_some() && !time.is_multiple_of(2) {
            return Err(Error::module(
                layer.path(),
                format!(
                    "has {time} positions of each sequence on this rank, whose context parallelism has two chunks of \
                     equal length; expected an even number in the dimension before the last of {dims:?}"
                ),
            ));
        }
        let whole = time * context.as_ref().map_or(1, ContextParallel::size);
        let limit = config.limit(factor, whole);
        Ok(Some(Self { limit, sequences, time, context }))
    }

    /// Drops the choices beyond the capacity. Collective over the ranks that share sequences.
    pub(super) fn apply(&self, routing: Routing, device: &Device) -> Result<Routing> {
        let chunks = if self.context.is_some() { 2 } else { 1 };
        let of_chunk = self.time / chunks * routing.per_row;
        let context = self.context.as_ref();
        let earlier = context.map(|context| self.earlier(context, &routing, of_chunk, device));
        let earlier = earlier.transpose()?;
        // The choices of a plan are made up.
        if of_chunk == 0 || dry_run::is_on() {
            return Ok(routing);
        }
        let experts = routing.ranges.len();
        let mut counts = vec![0; experts];
        let mut keeps = Vec::with_capacity(routing.experts.len());
        for (chunk, choices) in routing.experts.chunks(of_chunk).enumerate() {
            match &earlier {
                None => counts.fill(0),
                Some(earlier) => counts.copy_from_slice(&earlier[chunk * experts..][..experts]),
            }
            for &expert in choices {
                let count = &mut counts[expert as usize];
                keeps.push(*count < self.limit);
                *count += 1;
            }
        }
        Ok(routing.keeping(&keeps))
    }

    /// Counts, for each chunk of each sequence on this rank and for each expert, the choices in
    /// earlier chunks on any rank: `[sequences, 2, experts]`.
    fn earlier(
        &self,
        context: &ContextParallel,
        routing: &Routing,
        of_chunk: usize,
        device: &Device,
    ) -> Result<Vec<u32>> {
        let experts = routing.ranges.len();
        let mut own = vec![0u32; self.sequences * 2 * experts];
        for (choice, &expert) in routing.experts.iter().enumerate() {
            own[choice / of_chunk * experts + expert as usize] += 1;
        }
        let own = Tensor::from_vec(own, (self.sequences, 2, experts), device)?;
        let mut found = Vec::with_capacity(self.sequences * 2 * experts);
        for all in context.gather(&[&own])? {
            let all = read::vec1::<u32>(&all.flatten_all()?, "the capacity of experts")?;
            let chunks = 2 * context.size();
            for sequence in all.chunks_exact(chunks * experts) {
                for end in [context.rank(), chunks - 1 - context.rank()] {
                    let mut sums = vec![0; experts];
                    for chunk in sequence[..end * experts].chunks_exact(experts) {
                        sums.iter_mut().zip(chunk).for_each(|(sum, count)| *sum += count);
                    }
                    found.extend(sums);
                }
            }
        }
        Ok(found)
    }
}

/// The keys from which a capacity follows.
#[derive(Debug, Clone, Copy)]
pub(super) struct CapacityConfig {
    /// `None` for no capacity.
    pub(super) factor: Option<f64>,
    experts: usize,
    per_row: usize,
}

impl CapacityConfig {
    pub(super) fn new(config: &MixtureOfExpertsConfig) -> Self {
        let &MixtureOfExpertsConfig { capacity_factor, num_experts, experts_per_row, .. } = config;
        Self { factor: capacity_factor, experts: num_experts, per_row: experts_per_row }
    }

    /// The capacity for a sequence of `time` positions. A cast saturates.
    fn limit(&self, factor: f64, time: usize) -> u32 {
        let exact = factor * (time * self.per_row) as f64 / self.experts as f64;
        // 1.1 times 70 is a little more than 77 in f64.
        (exact * (1.0 - 1e-12)).ceil() as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use proptest::prelude::*;

    /// Each expert's choices, sequence by sequence, up to the limit.
    fn kept_by_definition(experts: &[u32], per_row: usize, time: usize, limit: usize) -> Vec<bool> {
        let mut kept = vec![false; experts.len()];
        for sequence in 0..experts.len() / (time * per_row) {
            let own = sequence * time * per_row..(sequence + 1) * time * per_row;
            for expert in 0..8 {
                let choices = own.clone().filter(|choice| experts[*choice] == expert);
                choices.take(limit).for_each(|choice| kept[choice] = true);
            }
        }
        kept
    }

    proptest! {
        #[test]
        fn choices_beyond_the_limit_are_dropped(
            scores in proptest::collection::vec(0u8..5, 8 * 24),
            (sequences, time) in prop_oneof![Just((1, 24)), Just((3, 8)), Just((24, 1))],
            per_row in 1usize..4,
            factor in 0.01..3.0,
        ) {
            let scores: Vec<f32> = scores.into_iter().map(f32::from).collect();
            let scores = Tensor::from_vec(scores, (24, 8), &Device::Cpu).unwrap();
            let routing = Routing::of(&scores, per_row, None).unwrap();
            let config = CapacityConfig { factor: Some(factor), experts: 8, per_row };
            let limit = config.limit(factor, time);
            let exact = factor * (time * per_row) as f64 / 8.0;
            let expected = (0..).find(|n| *n as f64 >= exact - 1e-9).unwrap();
            let kept = kept_by_definition(&routing.experts, per_row, time, expected);
            let capacity = Capacity { limit, sequences, time, context: None };
            let found = capacity.apply(routing, &Device::Cpu).unwrap();
            let mut choices = found.choices.clone();
            choices.sort_unstable();
            let expected: Vec<u32> = (0..24 * per_row as u32).filter(|i| kept[*i as usize]).collect();
            prop_assert_eq!(choices, expected);
            // The orders of a row's choices and of an expert's rows, without the dropped ones.
            let inverse = found.inverse();
            for (row, places) in found.places.chunks(per_row).enumerate() {
                let own = row * per_row..(row + 1) * per_row;
                let mut expected = inverse[own.clone()].to_vec();
                expected.sort_unstable();
                prop_assert_eq!(places, expected);
                for choice in own {
                    let place = inverse[choice] as usize;
                    prop_assert_eq!(place < found.len(), kept[choice]);
                    let range = &found.ranges[found.experts[choice] as usize];
                    prop_assert!(!kept[choice] || range.contains(&place) && found.rows[place] == row as u32);
                }
            }
            prop_assert!(found.ranges.iter().all(|range| found.rows[range.clone()].is_sorted()));
        }
    }

    #[test]
    fn capacities_are_rounded_up() {
        let config = |experts, per_row| CapacityConfig { factor: None, experts, per_row };
        assert_eq!(config(4, 2).limit(1.0, 16), 8);
        assert_eq!(config(4, 2).limit(1.25, 10), 7);
        assert_eq!(config(4, 2).limit(1.1, 140), 77);
        assert_eq!(config(64, 1).limit(0.01, 1), 1);
        assert_eq!(config(1, 1).limit(f64::MAX, 9), u32::MAX);
    }
}
