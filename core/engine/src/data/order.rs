//! The endless stream of training samples.

use crate::random::{Purpose, Stream};
use crate::{Error, Result};

/// The order in which training samples come: epoch after epoch without end, each epoch every
/// sample once, in its own random order if shuffled. A pure function of the position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleOrder {
    stream: Option<Stream>,
    seed: u64,
    len: u64,
}

impl SampleOrder {
    /// The order of `len` samples.
    ///
    /// # Errors
    /// If there are no samples.
    pub fn new(seed: u64, shuffle: bool, len: u64) -> Result<Self> {
        if len == 0 {
            return Err(Error::Data("there are no training samples".to_owned()));
        }
        let stream = shuffle.then(|| Stream::new(seed, Purpose::Shuffle, "train"));
        Ok(Self { stream, seed, len })
    }

    /// The run's seed.
    pub(super) fn seed(&self) -> u64 {
        self.seed
    }

    /// Number of samples in an epoch.
    pub fn epoch_len(&self) -> u64 {
        self.len
    }

    /// The epoch that a position of the stream is in, and the index of the sample there.
    pub fn at(&self, position: u64) -> (u64, u64) {
        let (epoch, place) = (position / self.len, position % self.len);
        match self.stream {
            Some(stream) => (epoch, stream.child(epoch).permute(self.len, place)),
            None => (epoch, place),
        }
    }
}

#[cfg(test)]
mod tests {
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
    fn epochs_and_seeds_have_orders_of_their_own() {
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
    fn no_samples_are_an_error() {
        insta::assert_snapshot!(SampleOrder::new(0, true, 0).unwrap_err(), @"data: there are no training samples");
    }
}
