//! Samples that are read sequentially.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use super::order::Sampler;
use crate::{Error, Result};
use fulgurite_tensor::random::{Purpose, Stream};

/// A source of samples that can only be read from its beginning, such as compressed files, a
/// generator or a network archive. It gives the same samples each time it is opened.
pub trait SampleStream: Send + 'static {
    /// A sample, as cheap to read as possible. Leave slow work, such as decoding, to the data
    /// module, which runs on all workers.
    type Sample: Send + 'static;

    /// The next sample; `None` at the end.
    ///
    /// # Errors
    /// If it cannot be read.
    fn next(&mut self) -> Result<Option<Self::Sample>>;

    /// Skips the next `count` samples. The default reads them.
    ///
    /// # Errors
    /// If there are fewer samples, or they cannot be read.
    fn skip(&mut self, count: u64) -> Result<()> {
        for done in 0..count {
            if self.next()?.is_none() {
                return Err(Error::Data(format!(
                    "the stream ended {} samples before the one that is wanted",
                    count - done
                )));
            }
        }
        Ok(())
    }
}

impl<S: Send + 'static, I: Iterator<Item = Result<S>> + Send + 'static> SampleStream for I {
    type Sample = S;

    fn next(&mut self) -> Result<Option<S>> {
        Iterator::next(self).transpose()
    }
}

/// Access by index to a stream, for a [`DataModule`](super::DataModule) (an iterable data set).
///
/// Indices are positions in the stream, in any order. Access is fast because workers and ranks ask
/// for nearly increasing positions. Samples passed on the way are kept, up to a limit. For an
/// earlier sample, the stream is opened again. So checkpoints need not save the position: a resumed
/// run continues at the sample that the trainer asks for, on any number of ranks. Each rank reads
/// the whole stream and keeps its own samples.
///
/// Return `false` from [`DataModule::shuffle`](super::DataModule::shuffle), or shuffle nearby
/// samples by a [`BlockShuffle`]. The data module's `len` is the stream's length;
/// [`count`](Self::count) finds it if it is unknown. For endless streams use the order [`Endless`],
/// which defines their epochs.
///
/// ```
/// use fulgurite_core::data::Streaming;
///
/// let squares = Streaming::new(100, || Ok((0_u64..).map(|i| Ok(i * i))));
/// assert_eq!([squares.get(3)?, squares.get(5)?, squares.get(4)?], [9, 25, 16]);
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
pub struct Streaming<S: SampleStream> {
    open: Box<dyn Fn() -> Result<S> + Send + Sync>,
    window: usize,
    state: Mutex<State<S>>,
}

struct State<S: SampleStream> {
    stream: Option<S>,
    /// The position of the stream's next sample.
    next: u64,
    /// Samples that were passed but not yet asked for.
    passed: BTreeMap<u64, S::Sample>,
}

impl<S: SampleStream> Streaming<S> {
    /// The stream opened by `open`. Up to `window` passed samples are kept. The window should hold
    /// a step's samples times the batches that workers make ahead; otherwise the stream is reopened
    /// often.
    pub fn new(window: usize, open: impl Fn() -> Result<S> + Send + Sync + 'static) -> Self {
        let state = State { stream: None, next: 0, passed: BTreeMap::new() };
        Self { open: Box::new(open), window, state: Mutex::new(state) }
    }

    /// Counts the samples by opening the stream once more and reading it to its end, for
    /// [`setup`](super::DataModule::setup). Every rank counts for itself. Does not return for
    /// endless streams.
    ///
    /// # Errors
    /// If it cannot be opened or read.
    pub fn count(&self) -> Result<u64> {
        let mut stream = (self.open)()?;
        let mut count = 0;
        while stream.next()?.is_some() {
            count += 1;
        }
        Ok(count)
    }

    /// The sample at a position.
    ///
    /// # Errors
    /// If the stream is shorter, or cannot be opened or read.
    pub fn get(&self, index: u64) -> Result<S::Sample> {
        // A stream that panicked was taken out of the state.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(sample) = state.passed.remove(&index) {
            return Ok(sample);
        }
        let mut stream = match state.stream.take() {
            Some(stream) if state.next <= index => stream,
            before => {
                let window = self.window as u64;
                if before.is_some() && index > 0 && state.next - index <= window.saturating_mul(16)
                {
                    tracing::warn!(
                        "a stream is opened again for sample {index}, after sample {}: more samples are \
                         passed than its window of {window} holds",
                        state.next
                    );
                }
                state.passed.clear();
                state.next = 0;
                (self.open)()?
            }
        };
        let sample = state.advance(&mut stream, index, self.window)?;
        state.stream = Some(stream);
        Ok(sample)
    }
}

impl<S: SampleStream> State<S> {
    fn advance(&mut self, stream: &mut S, index: u64, window: usize) -> Result<S::Sample> {
        let unneeded = (index - self.next).saturating_sub(window as u64);
        stream.skip(unneeded).map_err(|error| match error {
            Error::Data(message) => Error::Data(format!("sample {index} of a stream: {message}")),
            other => other,
        })?;
        self.next += unneeded;
        loop {
            let Some(sample) = stream.next()? else {
                return Err(Error::Data(format!(
                    "the stream has {} samples, and sample {index} is wanted: the data module's `len` says \
                     more than there are (`Streaming::count` counts them), or the stream has fewer than when \
                     it was opened before",
                    self.next
                )));
            };
            let position = self.next;
            self.next += 1;
            if position == index {
                return Ok(sample);
            }
            self.passed.insert(position, sample);
            if self.passed.len() > window {
                self.passed.pop_first();
            }
        }
    }
}

impl<S: SampleStream> fmt::Debug for Streaming<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Streaming").field("window", &self.window).finish_non_exhaustive()
    }
}

/// The order of an endless [`Streaming`] source: each sample once, in order. Every `epoch_len`
/// samples begin an epoch, with new samples. Return it from
/// [`DataModule::sampler`](super::DataModule::sampler). The training split's `len` then does not
/// define an epoch, and may be `u64::MAX`.
///
/// The run ends as usual by `trainer.max_steps`, `max_epochs` or `max_time`. A resumed run opens
/// the stream again and skips the samples it has had.
///
/// ```
/// use fulgurite_core::data::{Endless, Sampler};
///
/// let order = Endless::new(1000)?;
/// assert_eq!(order.sample(2500), (2, 2500)); // in the third epoch
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Endless {
    epoch_len: u64,
}

impl Endless {
    /// Epochs of this number of samples, over all ranks.
    ///
    /// # Errors
    /// If it is 0.
    pub fn new(epoch_len: u64) -> Result<Self> {
        if epoch_len == 0 {
            return Err(Error::Data(
                "an epoch of an endless stream has no samples; it must have at least 1".to_owned(),
            ));
        }
        Ok(Self { epoch_len })
    }
}

impl Sampler for Endless {
    fn epoch_len(&self) -> u64 {
        self.epoch_len
    }

    fn sample(&self, position: u64) -> (u64, u64) {
        (position / self.epoch_len, position)
    }
}

/// An order that shuffles samples within blocks of consecutive samples, differently in each epoch.
/// For [`Streaming`] sources whose window holds a block.
///
/// ```
/// use fulgurite_core::data::{BlockShuffle, Sampler};
///
/// let order = BlockShuffle::new(42, 1000, 100)?;
/// assert!((200..300).all(|position| (200..300).contains(&order.sample(position).1)));
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct BlockShuffle {
    stream: Stream,
    samples: u64,
    block: u64,
}

impl BlockShuffle {
    /// An order of `samples` in blocks of `block`.
    ///
    /// # Errors
    /// If either is 0.
    pub fn new(seed: u64, samples: u64, block: u64) -> Result<Self> {
        if samples == 0 || block == 0 {
            return Err(Error::Data(format!(
                "{samples} samples cannot be shuffled in blocks of {block}; both must be at least 1"
            )));
        }
        let stream = Stream::new(seed, Purpose::Shuffle, "blocks");
        Ok(Self { stream, samples, block })
    }
}

impl Sampler for BlockShuffle {
    fn epoch_len(&self) -> u64 {
        self.samples
    }

    fn sample(&self, position: u64) -> (u64, u64) {
        let (epoch, place) = (position / self.samples, position % self.samples);
        let first = place - place % self.block;
        let len = self.block.min(self.samples - first);
        let order = self.stream.child(epoch).child(first);
        (epoch, first + order.permute(len, place - first))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use fulgurite_test_message::assert_says;
    use proptest::prelude::*;

    use super::*;
    use crate::data::{Loader, SampleOrder, TrainSampler, Workers};

    /// A stream of the numbers below `len`, and a count of how often it was opened.
    fn numbers(
        len: u64,
        window: usize,
    ) -> (Streaming<impl SampleStream<Sample = u64>>, Arc<AtomicUsize>) {
        let opened = Arc::new(AtomicUsize::new(0));
        let count = opened.clone();
        let streaming = Streaming::new(window, move || {
            count.fetch_add(1, Ordering::SeqCst);
            Ok((0..len).map(Ok))
        });
        (streaming, opened)
    }

    proptest! {
        #[test]
        fn samples_do_not_depend_on_access_order(
            len in 1u64..60, window in 0usize..20, asked in prop::collection::vec(0u64..70, 0..40)
        ) {
            let (streaming, _) = numbers(len, window);
            for index in asked {
                prop_assert_eq!(streaming.get(index).ok(), (index < len).then_some(index));
            }
        }

        #[test]
        fn blocks_have_every_sample_once_an_epoch(
            seed: u64, samples in 1u64..100, block in 1u64..30, epoch in 0u64..3
        ) {
            let order = BlockShuffle::new(seed, samples, block).unwrap();
            let taken: Vec<_> = (0..samples).map(|i| order.sample(epoch * samples + i)).collect();
            for (place, (round, index)) in taken.iter().enumerate() {
                prop_assert_eq!((*round, index / block), (epoch, place as u64 / block));
            }
            let mut seen: Vec<_> = taken.into_iter().map(|(_, index)| index).collect();
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..samples).collect::<Vec<_>>());
        }
    }

    #[test]
    fn stream_opens_once_an_epoch_from_any_start() {
        for rank in 0..3 {
            for num_workers in [0, 1, 4] {
                for shuffled in [false, true] {
                    let (streaming, opened) = numbers(600, 200);
                    let order = match shuffled {
                        true => {
                            let blocks = BlockShuffle::new(1, 600, 50).unwrap();
                            SampleOrder::of_sampler(1, Arc::new(blocks)).unwrap()
                        }
                        false => SampleOrder::new(1, false, 600).unwrap(),
                    };
                    let sampler = TrainSampler::new(order, 4, 3, rank, 2).unwrap();
                    let plan = sampler.batches_from(240).take(2 * 40);
                    let make = move |samples: &super::super::Samples| {
                        samples
                            .indices()
                            .iter()
                            .map(|&i| streaming.get(i))
                            .collect::<Result<Vec<_>>>()
                    };
                    let workers = Workers { num_workers, prefetch_factor: 2 };
                    for made in Loader::new(plan, make, workers).unwrap() {
                        let (samples, batch) = made.unwrap();
                        assert_eq!(samples.indices(), batch);
                    }
                    // From the middle of the first epoch to the end of the second. Two workers may
                    // be in two epochs.
                    let opened = opened.load(Ordering::SeqCst);
                    let expected = if num_workers < 2 { 2..=2 } else { 2..=20 };
                    assert!(expected.contains(&opened), "{num_workers} workers: {opened}");
                }
            }
        }
    }

    #[test]
    fn stream_recovers_from_error_or_panic() {
        let tries = AtomicUsize::new(0);
        let streaming = Streaming::new(5, move || {
            let first = tries.fetch_add(1, Ordering::SeqCst) < 2;
            let second = tries.load(Ordering::SeqCst) == 2;
            Ok((0..10).map(move |i| match i {
                3 if second => panic!("a broken stream"),
                3 if first => Err(Error::Data("a broken connection".to_owned())),
                i => Ok(i),
            }))
        });
        assert_eq!(streaming.get(1).unwrap(), 1);
        assert_says!(streaming.get(4).unwrap_err(), "data: a broken connection");
        let panics = std::panic::AssertUnwindSafe(|| streaming.get(4));
        assert!(std::panic::catch_unwind(panics).is_err());
        assert_eq!(streaming.get(4).unwrap(), 4);
        assert_says!(streaming.get(12).unwrap_err(), "data … 10 samples … sample 12 … `len` …");
        assert_says!(streaming.get(19).unwrap_err(), "data: sample 19 … ended 4 samples before …");
        assert_eq!(streaming.count().unwrap(), 10);
        assert_says!(Endless::new(0).unwrap_err(), "data … endless … no samples … at least 1");
        assert_says!(BlockShuffle::new(0, 5, 0).unwrap_err(), "data: 5 … blocks of 0 … at least 1");
    }
}
