//! The data module trait.

use std::sync::Arc;

use candle_core::Device;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{DataReport, SampleOrder, Sampler, Samples};
use crate::{Error, Result};
use fulgurite_module::parallel::ContextParallel;

/// The use of samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Split {
    /// Training.
    Train,
    /// Validation while training.
    Validation,
    /// One of several [validation sets](DataModule::validation_sets), by index.
    ValidationSet(usize),
    /// The test after training.
    Test,
    /// Prediction.
    Predict,
}

impl std::fmt::Display for Split {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Train => "train",
            Self::Validation => "validation",
            Self::ValidationSet(set) => return write!(f, "validation set {set}"),
            Self::Test => "test",
            Self::Predict => "predict",
        })
    }
}

/// The rank that sets up a data module, and the run's seed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataContext {
    /// The run's seed.
    pub seed: u64,
    /// This process's rank.
    pub rank: usize,
    /// Number of processes.
    pub world_size: usize,
    /// This rank's index among the ranks with different samples.
    pub data_parallel_rank: usize,
    /// Number of ranks with different samples.
    pub data_parallel_size: usize,
}

impl Default for DataContext {
    /// The single process of a run.
    fn default() -> Self {
        Self { seed: 0, rank: 0, world_size: 1, data_parallel_rank: 0, data_parallel_size: 1 }
    }
}

/// A source of samples (LightningDataModule) with random access: the trainer chooses the samples of
/// each rank, and the module makes batches of them.
///
/// Every rank sets up its own module, and must see the same samples under the same indices. No
/// method is collective.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fulgurite_core::Result;
/// use fulgurite_core::config::Documented;
/// use fulgurite_core::data::{DataContext, DataModule, Split};
/// use serde::{Deserialize, Serialize};
///
/// /// Squares of whole numbers.
/// struct Squares(SquaresConfig);
///
/// #[derive(Clone, Serialize, Deserialize, Documented)]
/// #[serde(deny_unknown_fields, default)]
/// struct SquaresConfig {
///     /// Number of samples.
///     #[default(1000)]
///     samples: u64,
///     /// Samples of one micro-batch of one rank.
///     #[default(8)]
///     batch_size: usize,
/// }
///
/// impl DataModule for Squares {
///     type Config = SquaresConfig;
///     type Batch = (Tensor, Tensor);
///
///     fn setup(config: &SquaresConfig, _: &DataContext) -> Result<Self> {
///         Ok(Self(config.clone()))
///     }
///     fn batch_size(config: &SquaresConfig) -> usize { config.batch_size }
///     fn len(&self, split: Split) -> u64 {
///         if split == Split::Train { self.0.samples } else { 0 }
///     }
///     fn batch(&self, _: Split, indices: &[u64], device: &Device) -> Result<(Tensor, Tensor)> {
///         let xs: Vec<f32> = indices.iter().map(|&i| i as f32).collect();
///         let xs = Tensor::from_vec(xs, (indices.len(), 1), device)?;
///         let ys = xs.sqr()?;
///         Ok((xs, ys))
///     }
/// }
///
/// let data = Squares::setup(&SquaresConfig::default(), &DataContext::default())?;
/// let (_, ys) = data.batch(Split::Train, &[3, 5], &Device::Cpu)?;
/// assert_eq!(ys.to_vec2::<f32>()?, [[9.0], [25.0]]);
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[allow(clippy::len_without_is_empty)] // a length for each split
pub trait DataModule: Send + Sync + Sized + 'static {
    /// The `[data]` table of the configuration.
    type Config: DeserializeOwned + Serialize + Default + Send + Sync;
    /// The input of a step.
    type Batch: Send + 'static;

    /// Groups of mutually exclusive keys of the `[data]` table. A file or override that sets one
    /// key of a group removes the others from earlier configuration layers, such as a program's
    /// defaults. Empty by default.
    fn exclusive_keys() -> &'static [&'static [&'static str]] {
        &[]
    }

    /// Opens the data.
    ///
    /// # Errors
    /// If the data is missing, unreadable or too small.
    fn setup(config: &Self::Config, context: &DataContext) -> Result<Self>;

    /// Opens the data to check a configuration, in the process that starts the ranks, before it
    /// starts them. Values that depend on the data, such as a vocabulary's size, are known from
    /// then on. The default is [`setup`](Self::setup). If setup is slow, open less data here, but
    /// find the same errors.
    ///
    /// # Errors
    /// As [`setup`](Self::setup).
    fn preview(config: &Self::Config, context: &DataContext) -> Result<Self> {
        Self::setup(config, context)
    }

    /// Samples in a micro-batch of a data-parallel rank.
    fn batch_size(config: &Self::Config) -> usize;

    /// The unit of the counts in losses on this data, in the plural, as progress shows it: "1.2k
    /// images/s". By default `samples`; `tokens` for text.
    fn items(config: &Self::Config) -> &'static str {
        let _ = config;
        "samples"
    }

    /// Whether training samples come in random order, a new one in each epoch.
    fn shuffle(config: &Self::Config) -> bool {
        let _ = config;
        true
    }

    /// A custom order of training samples, such as a [`Mixture`](super::Mixture); the same on every
    /// rank. `None`, the default, takes them in order or shuffled ([`shuffle`](Self::shuffle)).
    ///
    /// # Errors
    /// If the data does not support the order.
    fn sampler(&self, seed: u64) -> Result<Option<Arc<dyn Sampler>>> {
        let _ = seed;
        Ok(None)
    }

    /// The order of training samples: the [`sampler`](Self::sampler)'s or, without one, all
    /// samples, shuffled or not.
    ///
    /// # Errors
    /// Without training samples, or as [`sampler`](Self::sampler).
    fn train_order(&self, seed: u64, shuffle: bool) -> Result<SampleOrder> {
        match self.sampler(seed)? {
            Some(sampler) => SampleOrder::of_sampler(seed, sampler),
            None => SampleOrder::new(seed, shuffle, self.len(Split::Train)),
        }
    }

    /// Names of several validation sets, the same on every rank. With names, validation runs on the
    /// [`Split::ValidationSet`] of each, and logged names end in the set's name: `val_loss/books`.
    /// Empty, the default, means one set or no validation; it runs on [`Split::Validation`].
    fn validation_sets(&self) -> Vec<String> {
        Vec::new()
    }

    /// Number of samples; the same on every rank.
    fn len(&self, split: Split) -> u64;

    /// Makes a batch of the samples at `indices`, each less than [`len`](Self::len), on `device`.
    /// `indices` is never empty: a rank without samples in a short validation batch computes on
    /// another sample, and its result is not used.
    ///
    /// With `trainer.num_workers`, several threads make batches concurrently and in any order. On
    /// an accelerator they also copy them to the device. The batch must depend only on the
    /// arguments.
    fn batch(&self, split: Split, indices: &[u64], device: &Device) -> Result<Self::Batch>;

    /// Makes a batch for the trainer. The default calls [`batch`](Self::batch). Random augmentation
    /// takes its random numbers from [`Samples::random`]. They depend on seed, epoch and sample, so
    /// a resume or another number of workers or ranks does not change them.
    ///
    /// # Errors
    /// As [`batch`](Self::batch).
    fn augmented_batch(&self, samples: &Samples, device: &Device) -> Result<Self::Batch> {
        self.batch(samples.split(), samples.indices(), device)
    }

    /// The name of a sample, such as the path of its file or its line in one, which files of
    /// predictions show. `None`, the default, for data without names.
    fn sample_name(&self, split: Split, index: u64) -> Option<String> {
        let _ = (split, index);
        None
    }

    /// A short text that identifies the data, such as its size and a hash of it or of parts of it.
    /// Equal on every rank, and cheap to compute. Checkpoints record it. A run does not resume from
    /// a checkpoint with another fingerprint unless `checkpoint.allow_other_data` is set. `None`,
    /// the default, is not compared.
    ///
    /// # Errors
    /// If the data cannot be read.
    fn fingerprint(&self) -> Result<Option<String>> {
        Ok(None)
    }

    /// Counts of entries read and left out. Rank 0 shows and logs them at the start of a run.
    /// `None` by default.
    fn report(&self) -> Option<DataReport> {
        None
    }

    /// Host memory in bytes that a rank's data permanently takes after [`setup`](Self::setup). A
    /// [preview](Self::preview) answers for the whole data, with an estimate if necessary. The
    /// trainer compares it with the host's memory before ranks start. By default 0, which is right
    /// for data that stays in files.
    fn memory(&self) -> u64 {
        0
    }

    /// Names and values that define the samples besides the data, such as the length of a sample.
    /// Checkpoints record them and compare them like the [`fingerprint`](Self::fingerprint). The
    /// numbers of samples and their order (shuffled or not) need no entry. Equal on every rank, and
    /// cheap to compute.
    ///
    /// # Errors
    /// If the data cannot be read.
    fn sample_definition(&self) -> Result<Vec<(String, String)>> {
        Ok(Vec::new())
    }

    /// Like [`fingerprint`](Self::fingerprint), for data used only in evaluation. It is compared
    /// between ranks, not with checkpoints.
    ///
    /// # Errors
    /// If the data cannot be read.
    fn evaluation_fingerprint(&self) -> Result<Option<String>> {
        Ok(None)
    }

    /// Configuration keys that may differ between ranks: paths, since hosts may keep the same data
    /// in different places. A key covers all keys under it and each element of a list
    /// (`mixture.path`). All other keys must be equal on all ranks. Empty by default.
    fn host_keys() -> &'static [&'static str] {
        &[]
    }

    /// Returns the lengths of the documents in each sequence of a batch, if attention is to keep
    /// them apart. The trainer puts them in force while the module's step runs.
    ///
    /// The default has none.
    fn documents(batch: &Self::Batch) -> Option<&[Vec<usize>]> {
        let _ = batch;
        None
    }

    /// This rank's part of a batch under context parallelism. Cuts every tensor with a sequence
    /// dimension by [`ContextParallel::shard`]. Ranks of a context-parallel group get the same
    /// batch.
    ///
    /// # Errors
    /// Always by default. Data modules of sequences implement it to support a
    /// `context_parallel_size` above 1.
    fn shard_sequence(batch: Self::Batch, context: &ContextParallel) -> Result<Self::Batch> {
        drop(batch);
        Err(Error::Data(format!(
            "context_parallel_size is {}, and this data module cannot cut its batches along the \
             sequence; implement `DataModule::shard_sequence` for it",
            context.size()
        )))
    }
}
