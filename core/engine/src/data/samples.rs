//! The samples of a batch: [`Samples`].

use super::Split;
use fulgurite_tensor::random::{Purpose, Stream};

/// The samples of one batch, with a random stream for each.
///
/// A sample's random numbers depend only on the run's seed, the epoch and the sample's index. So a
/// resumed run sees the same bits, with any number of workers and ranks.
///
/// ```
/// use fulgurite_core::data::{Samples, Split};
///
/// // Sample 7 in epoch 0, and again in epoch 1.
/// let samples = Samples::new(Split::Train, 42, vec![(0, 7), (1, 7)]);
/// assert_eq!(samples.indices(), [7, 7]);
/// let flip = |nth| samples.random(nth).uniform(0) < 0.5;
/// assert_eq!((flip(0), flip(0)), (false, false)); // a function, without state
/// assert_ne!(samples.random(0).word(0), samples.random(1).word(0)); // each epoch its own
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Samples {
    split: Split,
    seed: u64,
    indices: Vec<u64>,
    epochs: Vec<u64>,
}

impl Samples {
    /// Samples of a split, as pairs of epoch and index.
    pub fn new(split: Split, seed: u64, samples: impl IntoIterator<Item = (u64, u64)>) -> Self {
        let (epochs, indices) = samples.into_iter().unzip();
        Self { split, seed, indices, epochs }
    }

    /// The split of the samples.
    pub fn split(&self) -> Split {
        self.split
    }

    /// The samples' indices in their split.
    pub fn indices(&self) -> &[u64] {
        &self.indices
    }

    /// The epoch of each sample, counted from 0. A batch at the end of an epoch also has samples of
    /// the next.
    pub fn epochs(&self) -> &[u64] {
        &self.epochs
    }

    /// The random numbers of the batch's `nth` sample, for augmentation. Take
    /// [`child`](Stream::child)ren for several independent streams.
    ///
    /// # Panics
    /// If the batch has fewer samples.
    pub fn random(&self, nth: usize) -> Stream {
        let stream = Stream::new(self.seed, Purpose::Augmentation, &self.split.to_string());
        stream.child(self.epochs[nth]).child(self.indices[nth])
    }

    /// The samples in messages.
    pub(super) fn describe(&self) -> String {
        const SHOWN: usize = 8;
        let split = self.split;
        let list: Vec<String> = self.indices.iter().take(SHOWN).map(u64::to_string).collect();
        let list = list.join(", ");
        match self.indices.len() {
            1 => format!("{split} sample {list}"),
            n if n <= SHOWN => format!("{split} samples {list}"),
            n => format!("{split} samples {list}, … ({n} in all)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_stream_ignores_place_in_batch() {
        let word = |split, seed, sample| Samples::new(split, seed, [sample]).random(0).word(0);
        let one = word(Split::Train, 1, (2, 3));
        let others = [
            word(Split::Validation, 1, (2, 3)),
            word(Split::ValidationSet(0), 1, (2, 3)),
            word(Split::ValidationSet(1), 1, (2, 3)),
            word(Split::Train, 2, (2, 3)),
            word(Split::Train, 1, (3, 3)),
            word(Split::Train, 1, (2, 4)),
            word(Split::Train, 1, (3, 2)),
        ];
        assert!(!others.contains(&one));
        assert_ne!(others[1], others[2]);
        let batch = Samples::new(Split::Train, 1, [(0, 9), (2, 3)]);
        assert_eq!(batch.random(1).word(0), one);
    }

    #[test]
    fn messages_name_few_samples() {
        let describe = |n| Samples::new(Split::Train, 0, (0..n).map(|i| (0, 2 * i))).describe();
        assert_eq!(describe(1), "train sample 0");
        assert_eq!(describe(3), "train samples 0, 2, 4");
        assert_eq!(describe(9), "train samples 0, 2, 4, 6, 8, 10, 12, 14, … (9 in all)");
    }
}
