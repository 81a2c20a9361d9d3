//! The data module trait.

use std::sync::Arc;

use candle_core::Device;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{DataReport, SampleOrder, Sampler, Samples};
use crate::parallel::ContextParallel;
use crate::{Error, Result};

/// What samples are used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Split {
    /// Training.
    Train,
    /// Validation while training.
    Validation,
    /// Validation while training, if there are several [sets](DataModule::validation_sets): the one of this
    /// index.
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

/// The rank that sets a data module up, and the run's seed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataContext {
    /// The run's seed.
    pub seed: u64,
    /// This process's rank.
    pub rank: usize,
    /// Number of processes.
    pub world_size: usize,
    /// This rank's index among the ranks that take different samples.
    pub data_parallel_rank: usize,
    /// Number of ranks that take different samples.
    pub data_parallel_size: usize,
}

impl Default for DataContext {
    /// The only process of a run.
    fn default() -> Self {
        Self { seed: 0, rank: 0, world_size: 1, data_parallel_rank: 0, data_parallel_size: 1 }
    }
}

/// Where samples come from (LightningDataModule). Random access: the trainer decides which samples
/// a rank takes, the module makes batches of them.
///
/// Every rank sets up its own, and must see the same samples under the same indices. No method is
/// collective.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fulgurite_core::Result;
/// use fulgurite_core::data::{DataContext, DataModule, Split};
/// use serde::{Deserialize, Serialize};
///
/// /// Squares of whole numbers.
/// struct Squares(SquaresConfig);
///
/// #[derive(Clone, Serialize, Deserialize)]
/// #[serde(deny_unknown_fields, default)]
/// struct SquaresConfig { samples: u64, batch_size: usize }
///
/// impl Default for SquaresConfig {
///     fn default() -> Self { Self { samples: 1000, batch_size: 8 } }
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

    /// Groups of keys of the `[data]` table that exclude each other. A file or an override that
    /// sets one of a group removes the others from earlier layers of the configuration, such as a
    /// program's defaults. None by default.
    fn exclusive_keys() -> &'static [&'static [&'static str]] {
        &[]
    }

    /// Opens the data.
    ///
    /// # Errors
    /// If it is missing, unreadable or too little.
    fn setup(config: &Self::Config, context: &DataContext) -> Result<Self>;

    /// Opens the data to check a configuration, in the process that starts the ranks, before it does:
    /// whatever depends on the data, such as a vocabulary's size, is known then. By default
    /// [`setup`](Self::setup); a data module for which that takes long opens less of its data here, as
    /// long as the same errors are found.
    ///
    /// # Errors
    /// As [`setup`](Self::setup).
    fn preview(config: &Self::Config, context: &DataContext) -> Result<Self> {
        Self::setup(config, context)
    }

    /// Samples of one micro-batch of one data-parallel rank.
    fn batch_size(config: &Self::Config) -> usize;

    /// What the counts of a module's losses on this data count, in the plural, as progress says it: "1.2k
    /// images/s". By default `samples`; `tokens` for text.
    fn items(config: &Self::Config) -> &'static str {
        let _ = config;
        "samples"
    }

    /// Whether training samples come in a random order, another one each epoch.
    fn shuffle(config: &Self::Config) -> bool {
        let _ = config;
        true
    }

    /// An order of training samples of one's own, such as a [`Mixture`](super::Mixture); by default none, and
    /// samples come in order or shuffled, as [`shuffle`](Self::shuffle) says. The same on every rank.
    ///
    /// # Errors
    /// If there is none for this data.
    fn sampler(&self, seed: u64) -> Result<Option<Arc<dyn Sampler>>> {
        let _ = seed;
        Ok(None)
    }

    /// The order of training samples: that of the [`sampler`](Self::sampler) or, without one, of all samples,
    /// shuffled or not.
    ///
    /// # Errors
    /// If there are no training samples, or as [`sampler`](Self::sampler).
    fn train_order(&self, seed: u64, shuffle: bool) -> Result<SampleOrder> {
        match self.sampler(seed)? {
            Some(sampler) => SampleOrder::of_sampler(seed, sampler),
            None => SampleOrder::new(seed, shuffle, self.len(Split::Train)),
        }
    }

    /// The names of several validation sets, the same on every rank; none, the default, if there is one
    /// set or no validation. With names a validation goes through [`Split::ValidationSet`] of each, and
    /// what it logs has the set's name behind it: `val_loss/books`. Without, through [`Split::Validation`].
    fn validation_sets(&self) -> Vec<String> {
        Vec::new()
    }

    /// Number of samples; the same on every rank.
    fn len(&self, split: Split) -> u64;

    /// The samples of these indices, each less than [`len`](Self::len), as one batch on `device`.
    /// `indices` is never empty: a rank without a part of a short validation batch computes on some
    /// sample, and its result is not used.
    ///
    /// With `trainer.num_workers` several threads make batches at once, beside the step, in any order; on an
    /// accelerator the copy to it is made there too. The batch must follow from the arguments alone.
    fn batch(&self, split: Split, indices: &[u64], device: &Device) -> Result<Self::Batch>;

    /// What the trainer calls: by default [`batch`](Self::batch). Data with random augmentation takes its
    /// random numbers from [`Samples::random`], which are those of seed, epoch and sample, so that neither
    /// a resume nor the number of workers or ranks changes them.
    ///
    /// # Errors
    /// As [`batch`](Self::batch).
    fn augmented_batch(&self, samples: &Samples, device: &Device) -> Result<Self::Batch> {
        self.batch(samples.split(), samples.indices(), device)
    }

    /// What tells this data from other data, in a few words: how much there is, and a hash of it or of
    /// parts of it. Equal on every rank, and cheap. A checkpoint has it, and a run does not go on from a
    /// checkpoint with another one unless `checkpoint.allow_other_data` is set. `None`, the default, is
    /// not compared.
    ///
    /// # Errors
    /// If the data cannot be read.
    fn fingerprint(&self) -> Result<Option<String>> {
        Ok(None)
    }

    /// Counts of what was read and left out. Rank 0 shows and logs them at the start of a run.
    /// `None` by default.
    fn report(&self) -> Option<DataReport> {
        None
    }

    /// Bytes of the host's memory that a rank's data takes for good once it is [set up](Self::setup). What is
    /// [previewed](Self::preview) answers for all of the data, by an estimate if need be. The trainer compares
    /// it with the host's memory before ranks start. By default 0, which is right for data that stays in files.
    fn memory(&self) -> u64 {
        0
    }

    /// What defines sample `n` besides the data: names and values, such as the length of a sample. A
    /// checkpoint records them, and a run goes on from it as after the same
    /// [`fingerprint`](Self::fingerprint). The numbers of samples and their order (shuffled or not) need
    /// no entry. Equal on every rank, and cheap.
    ///
    /// # Errors
    /// If the data cannot be read.
    fn sample_definition(&self) -> Result<Vec<(String, String)>> {
        Ok(Vec::new())
    }

    /// As [`fingerprint`](Self::fingerprint), of data that is only evaluated on. It is compared between
    /// ranks and not with a checkpoint's.
    ///
    /// # Errors
    /// If the data cannot be read.
    fn evaluation_fingerprint(&self) -> Result<Option<String>> {
        Ok(None)
    }

    /// Keys of the configuration that may differ between ranks: paths, since hosts may keep the same data
    /// in different places. A key stands for all keys under it, and for each element of a list
    /// (`mixture.path`). All other keys must be equal on all ranks. By default none.
    fn host_keys() -> &'static [&'static str] {
        &[]
    }

    /// This rank's part of a batch under context parallelism: every tensor that has the sequence as a
    /// dimension, cut with [`ContextParallel::shard`]. Ranks of one context-parallel group get the
    /// same batch.
    ///
    /// # Errors
    /// Always by default: a data module of sequences implements it to support `context_parallel_size`
    /// above 1.
    fn shard_sequence(batch: Self::Batch, context: &ContextParallel) -> Result<Self::Batch> {
        drop(batch);
        Err(Error::Data(format!(
            "context_parallel_size is {}, and this data module cannot cut its batches along the \
             sequence; implement `DataModule::shard_sequence` for it",
            context.size()
        )))
    }
}
