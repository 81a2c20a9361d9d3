//! The loads of experts in training, and the bias that balances them without a loss.

use std::sync::{Arc, Mutex, MutexGuard};

use candle_core::{Device, Tensor};

use super::kernels::routing::Routing;
use crate::Result;
use fulgurite_engine::autograd::GradMode;
use fulgurite_engine::module::{AfterStep, ForwardScope};
use fulgurite_engine::parameter::{Buffer, Parameter};

/// Counts the rows that this rank's forwards have routed to each expert of a
/// [`MixtureOfExperts`](super::MixtureOfExperts). Clones share the counts.
///
/// Forwards without a backward do not count, nor does the recomputation of a checkpointed unit, nor
/// a batch of padding ([`ForwardScope::is_padding`]). Padded positions in a batch of samples count,
/// and so do choices that are dropped for want of [capacity].
///
/// [capacity]: super::MixtureOfExpertsConfig::capacity_factor
#[derive(Debug, Clone)]
pub struct ExpertLoad(Arc<Mutex<Counts>>);

#[derive(Debug)]
struct Counts {
    /// Since the last [`ExpertLoad::take`].
    taken: Vec<f64>,
    /// Since the last optimizer step.
    of_step: Vec<f64>,
    /// Dropped choices since the last [`ExpertLoad::take_dropped`]; `None` without a capacity.
    dropped: Option<f64>,
}

impl ExpertLoad {
    pub(super) fn new(experts: usize, has_capacity: bool) -> Self {
        let (taken, of_step) = (vec![0.0; experts], vec![0.0; experts]);
        let dropped = has_capacity.then_some(0.0);
        Self(Arc::new(Mutex::new(Counts { taken, of_step, dropped })))
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.0.lock().expect("no panic while counting")
    }

    /// Number of experts.
    pub fn num_experts(&self) -> usize {
        self.counts().taken.len()
    }

    /// Returns the rows of each expert since the last call, and begins again.
    pub fn take(&self) -> Vec<f64> {
        take(&mut self.counts().taken)
    }

    /// Returns the number of dropped choices since the last call, and begins again. `None` without
    /// a capacity.
    pub fn take_dropped(&self) -> Option<f64> {
        self.counts().dropped.as_mut().map(std::mem::take)
    }

    /// Adds rows and dropped choices that an earlier stage of a pipeline has taken, for the next
    /// calls of [`take`](Self::take) and [`take_dropped`](Self::take_dropped).
    pub fn add_of_stage(&self, rows: &[f64], dropped: Option<f64>) {
        let counts = &mut *self.counts();
        counts.taken.iter_mut().zip(rows).for_each(|(sum, rows)| *sum += rows);
        if let (Some(sum), Some(dropped)) = (&mut counts.dropped, dropped) {
            *sum += dropped;
        }
    }

    /// Counts the choices of a forward, if a backward follows.
    pub(super) fn add(&self, routing: &Routing) {
        if !forward_counts() {
            return;
        }
        let Counts { taken, of_step, .. } = &mut *self.counts();
        for sums in [taken, of_step] {
            for (sum, range) in sums.iter_mut().zip(&routing.ranges) {
                *sum += range.len() as f64;
            }
        }
    }

    /// Counts the dropped choices of a forward, if a backward follows.
    pub(super) fn add_dropped(&self, routing: &Routing) {
        if forward_counts() {
            *self.counts().dropped.get_or_insert_default() += routing.dropped() as f64;
        }
    }
}

/// Whether a backward follows, for the first time and of samples.
fn forward_counts() -> bool {
    let (scope, mode) = (ForwardScope::current(), GradMode::current());
    !scope.is_padding && mode.expects_backward() && !mode.recomputes()
}

fn take(counts: &mut Vec<f64>) -> Vec<f64> {
    let zeros = vec![0.0; counts.len()];
    std::mem::replace(counts, zeros)
}

/// The change of a [correction bias](super::CorrectionBias) after each step, as torchtitan's
/// `load_balance_coeff` makes it.
#[derive(Debug)]
pub(super) struct Balance {
    pub(super) load: ExpertLoad,
    pub(super) bias: Buffer,
    pub(super) update_rate: f64,
    /// The router's weight: a frozen router keeps its bias.
    pub(super) weight: Parameter,
}

impl AfterStep for Balance {
    fn take(&self) -> Vec<f64> {
        take(&mut self.load.counts().of_step)
    }

    fn update(&self, loads: &[f64]) -> Result<()> {
        if !self.weight.requires_grad() {
            return Ok(());
        }
        let changes = changes(loads, self.update_rate);
        let bias = self.bias.value()?;
        let changes = Tensor::from_slice(&changes, changes.len(), &Device::Cpu)?;
        let changes = changes.to_dtype(bias.dtype())?.to_device(bias.device())?;
        self.bias.overwrite(&(bias + changes)?)
    }
}

/// The change of each expert's bias. Their mean is 0.
fn changes(loads: &[f64], update_rate: f64) -> Vec<f64> {
    let experts = loads.len() as f64;
    let mean = loads.iter().sum::<f64>() / experts;
    // `f64::signum` of 0 is 1.
    let sign = |load: &f64| f64::from(*load < mean) - f64::from(*load > mean);
    let signs: Vec<f64> = loads.iter().map(sign).collect();
    let center = signs.iter().sum::<f64>() / experts;
    signs.into_iter().map(|sign| update_rate * (sign - center)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_centred_signs() {
        assert_eq!(changes(&[4.0, 4.0, 4.0], 0.5), [0.0; 3]);
        assert_eq!(changes(&[0.0; 4], 0.5), [0.0; 4]);
        assert_eq!(changes(&[9.0, 1.0, 5.0, 5.0], 0.5), [-0.5, 0.5, 0.0, 0.0]);
        // Signs 1, 1, 1, -1 have the mean 0.5.
        assert_eq!(changes(&[1.0, 2.0, 3.0, 30.0], 1.0), [0.5, 0.5, 0.5, -1.5]);
    }
}
