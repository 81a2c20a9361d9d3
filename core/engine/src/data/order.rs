//! The endless stream of training samples.

use std::fmt;
use std::sync::Arc;

use crate::{Error, Result};
use fulgurite_tensor::random::{Purpose, Stream};

/// A custom order of training samples, for example for oversampling, a curriculum, or batches of
/// similar lengths. A data module returns it from
/// [`DataModule::sampler`](super::DataModule::sampler).
///
/// It is a function of the position in an endless stream of samples, equal on all ranks. The
/// trainer decides which positions a rank takes in a step. So a resume needs no state. Take
/// random numbers from a [`Stream`].
///
/// ```
/// use fulgurite_core::data::Sampler;
/// use fulgurite_core::random::{Purpose, Stream};
///
/// /// Every second sample is one of the first ten.
/// struct OftenFirst { stream: Stream, samples: u64 }
///
/// impl Sampler for OftenFirst {
///     fn epoch_len(&self) -> u64 { self.samples }
///     fn sample(&self, position: u64) -> (u64, u64) {
///         let among = if position % 2 == 0 { 10 } else { self.samples };
///         let index = self.stream.uniform(position) * among as f64;
///         (position / self.samples, index as u64)
///     }
/// }
///
/// let sampler = OftenFirst { stream: Stream::new(42, Purpose::Shuffle, "often"), samples: 1000 };
/// assert!(sampler.sample(6).1 < 10);
/// ```
pub trait Sampler: Send + Sync {
    /// Number of samples in an epoch, at least 1.
    fn epoch_len(&self) -> u64;

    /// The round and the index of the sample at a position. The round counts how often the sample
    /// was taken before, exactly or roughly. The index is less than the number of training samples.
    /// Random augmentation depends on both.
    fn sample(&self, position: u64) -> (u64, u64);
}

/// The order of training samples, a pure function of the position. Epochs follow each other without
/// end, each with every sample once, in its own random order if shuffled. Or a [`Sampler`] decides.
#[derive(Debug, Clone)]
pub struct SampleOrder {
    kind: Kind,
    seed: u64,
    len: u64,
    epoch_len: u64,
}

#[derive(Clone)]
enum Kind {
    InOrder,
    Shuffled(Stream),
    Own(Arc<dyn Sampler>),
}

impl fmt::Debug for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InOrder => "InOrder",
            Self::Shuffled(_) => "Shuffled",
            Self::Own(_) => "Own",
        })
    }
}

impl SampleOrder {
    /// The order of `len` samples.
    ///
    /// # Errors
    /// If `len` is 0.
    pub fn new(seed: u64, shuffle: bool, len: u64) -> Result<Self> {
        let kind = match shuffle {
            true => Kind::Shuffled(Stream::new(seed, Purpose::Shuffle, "train")),
            false => Kind::InOrder,
        };
        Self { kind, seed, len, epoch_len: len }.checked()
    }

    /// The order given by a sampler.
    ///
    /// # Errors
    /// If its epochs are empty.
    pub(crate) fn of_sampler(seed: u64, sampler: Arc<dyn Sampler>) -> Result<Self> {
        let len = sampler.epoch_len();
        Self { kind: Kind::Own(sampler), seed, len, epoch_len: len }.checked()
    }

    fn checked(self) -> Result<Self> {
        match self.len {
            0 => Err(Error::Data("there are no training samples".to_owned())),
            _ => Ok(self),
        }
    }

    /// The run's seed.
    pub(super) fn seed(&self) -> u64 {
        self.seed
    }

    /// Limits epochs to `epoch_len` samples; if shuffled, each epoch has other ones. If there are
    /// fewer samples, an epoch is all of them.
    #[must_use]
    pub fn limited(self, epoch_len: u64) -> Self {
        Self { epoch_len: epoch_len.clamp(1, self.len), ..self }
    }

    /// Number of samples in an epoch.
    pub fn epoch_len(&self) -> u64 {
        self.epoch_len
    }

    /// The epoch of a position in the stream.
    pub fn epoch(&self, position: u64) -> u64 {
        position / self.epoch_len
    }

    /// How often the sample at a position came before (without a sampler, the epoch), and its
    /// index.
    pub fn at(&self, position: u64) -> (u64, u64) {
        match &self.kind {
            Kind::InOrder => (position / self.epoch_len, position % self.epoch_len),
            Kind::Shuffled(stream) => {
                let (epoch, place) = (position / self.epoch_len, position % self.epoch_len);
                (epoch, stream.child(epoch).permute(self.len, place))
            }
            Kind::Own(sampler) => sampler.sample(position),
        }
    }
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn an_epoch_has_every_sample_once(
            seed: u64, shuffle: bool, len in 1u64..200, epoch in 0u64..5
        ) {
            let order = SampleOrder::new(seed, shuffle, len).unwrap();
            let places: Vec<_> = (0..len).map(|i| order.at(epoch * len + i)).collect();
            prop_assert!(places.iter().all(|&(e, _)| e == epoch));
            let mut indices: Vec<_> = places.iter().map(|&(_, index)| index).collect();
            if !shuffle {
                prop_assert!(indices.is_sorted());
            }
            indices.sort_unstable();
            prop_assert_eq!(indices, (0..len).collect::<Vec<_>>());
        }
    }

    #[test]
    fn limited_epoch_has_a_subset() {
        let order = SampleOrder::new(1, true, 50).unwrap();
        let limited = order.clone().limited(7);
        assert_eq!(limited.epoch_len(), 7);
        let epoch = |n: u64| (0..7).map(|i| limited.at(n * 7 + i)).collect::<Vec<_>>();
        assert!(epoch(2).iter().all(|&(epoch, _)| epoch == 2));
        let whole: Vec<_> = (0..7).map(|i| order.at(i)).collect();
        assert_eq!(epoch(0), whole, "the first samples of the whole epoch");
        assert_ne!(epoch(0), epoch(1));
        assert_eq!(order.limited(60).epoch_len(), 50);
    }

    #[test]
    fn epochs_and_seeds_have_distinct_orders() {
        let epoch = |seed, epoch: u64| {
            let order = SampleOrder::new(seed, true, 50).unwrap();
            (0..50).map(|i| order.at(epoch * 50 + i).1).collect::<Vec<_>>()
        };
        assert_eq!(epoch(1, 0), epoch(1, 0));
        assert_ne!(epoch(1, 0), epoch(1, 1));
        assert_ne!(epoch(1, 0), epoch(2, 0));
        assert_ne!(epoch(1, 0), (0..50).collect::<Vec<_>>());
    }

    #[test]
    fn empty_order_is_an_error() {
        assert_says!(SampleOrder::new(0, true, 0).unwrap_err(), "data … no training samples");
    }
}
