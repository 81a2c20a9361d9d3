//! Batches for loops written with Fabric.

use std::sync::Arc;

use candle_core::Device;

use super::{Fabric, SampleIdentity};
use crate::run::RunConfig;
use crate::{Error, Result};
use fulgurite_config::to_table;
use fulgurite_engine::collective::Agreement;
use fulgurite_engine::data::{DataContext, DataModule, Loader, Samples, TrainSampler, Workers};
use fulgurite_engine::module::ForwardScope;
use toml::Table;

/// A micro-batch of training samples, with the [scope](ForwardScope) for its forward.
///
/// Dropout, context parallelism and a parallel loss depend on the scope.
///
/// ```
/// # use candle_core::Tensor;
/// # use fulgurite_core::{Result, fabric::{Fabric, TrainLoader}, data::DataModule, nn::Loss};
/// # fn train<D: DataModule<Batch = Tensor>>(
/// #     fabric: &Fabric,
/// #     batches: TrainLoader<D>,
/// #     model: impl Fn(&Tensor) -> Result<Loss>,
/// # ) -> Result<()> {
/// for batch in batches {
///     let loss = batch?.forward(|batch| model(batch))?;
///     fabric.backward(&loss)?;
///     // …
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "a micro-batch that is not computed is missing from its step"]
pub struct TrainBatch<B> {
    batch: B,
    scope: ForwardScope,
}

impl<B> TrainBatch<B> {
    /// Calls `f`, the model's forward up to the loss, with the batch and in its scope.
    pub fn forward<R>(&self, f: impl FnOnce(&B) -> R) -> R {
        self.scope.clone().run(|| f(&self.batch))
    }

    /// Returns the batch, and the scope in which its forward must run.
    pub fn into_parts(self) -> (B, ForwardScope) {
        (self.batch, self.scope)
    }
}

/// This rank's micro-batches of the endless stream of training samples.
///
/// [`Fabric::setup_data`] creates it.
pub struct TrainLoader<D: DataModule> {
    data: Arc<D>,
    sampler: TrainSampler,
    device: Device,
    /// The scope of every batch, except for the step.
    scope: ForwardScope,
    workers: Workers,
    batches: u64,
    /// Loads from the next batch on; `None` until that batch is requested.
    loader: Option<Loader<D::Batch>>,
}

impl<D: DataModule> TrainLoader<D> {
    /// Returns the data module.
    pub fn data(&self) -> &D {
        &self.data
    }

    /// Sets the threads that make batches while the loop computes.
    ///
    /// The default is `trainer.num_workers`, or [`Workers::for_device`]. Batches do not depend on
    /// the threads.
    #[must_use]
    pub fn with_workers(mut self, workers: Workers) -> Self {
        self.workers = workers;
        self.loader = None;
        self
    }

    /// Continues with micro-batch `batches`, counted from 0, as a resumed run does.
    pub fn skip_to(&mut self, batches: u64) {
        self.batches = batches;
        self.loader = None;
    }

    /// Creates a loader from the next batch on.
    fn load(&self) -> Result<Loader<D::Batch>> {
        let position = self.batches * self.sampler.global_batch_size();
        let (data, device) = (self.data.clone(), self.device.clone());
        let context = self.scope.context.clone();
        let make = move |samples: &Samples| {
            let batch = data.augmented_batch(samples, &device)?;
            match &context {
                Some(context) => D::shard_sequence(batch, context),
                None => Ok(batch),
            }
        };
        Loader::new(self.sampler.batches_from(position), make, self.workers)
    }

    fn next_batch(&mut self) -> Result<D::Batch> {
        let loader = match self.loader.take() {
            Some(loader) => loader,
            None => self.load()?,
        };
        let loader = self.loader.insert(loader);
        // A loader ends only after an error. A new loader then makes the next batch.
        let made = loader.next().unwrap_or_else(|| Err(Error::other("there is no further batch")));
        if made.is_err() {
            self.loader = None;
        }
        made.map(|(_, batch)| batch)
    }
}

impl<D: DataModule> Iterator for TrainLoader<D> {
    type Item = Result<TrainBatch<D::Batch>>;

    fn next(&mut self) -> Option<Self::Item> {
        let batch = self.next_batch();
        self.batches += 1;
        let scope = ForwardScope { step: self.batches, ..self.scope.clone() };
        Some(batch.map(|batch| TrainBatch { batch, scope }))
    }
}

impl Fabric {
    /// Opens the data and returns this rank's micro-batches. Collective.
    ///
    /// Tensor- and context-parallel ranks get the same micro-batches. All ranks must have the same
    /// data.
    ///
    /// # Errors
    /// If the data cannot be opened or lacks training samples. On every rank, if the ranks differ
    /// in the data or its configuration. [`DataModule::host_keys`] may differ.
    pub fn setup_data<D: DataModule>(&self, config: &D::Config) -> Result<TrainLoader<D>> {
        let data = D::setup(config, &self.data_context()?)?;
        if self.world_size() > 1 {
            // A configuration without keys, such as `()`, does not become a table.
            let table = to_table(config).unwrap_or_default();
            let run = RunConfig::default().with(Table::new(), table);
            let samples = SampleIdentity::of(&data, D::shuffle(config))?;
            let compared = [run.agreement(D::host_keys())?, samples.agreement(&data)?];
            Agreement::check(&**self.world(), &compared)?;
        }
        let share = self.sampler_share()?;
        let order = data.train_order(self.seed(), D::shuffle(config))?;
        let batch_size = D::batch_size(config);
        let sampler = TrainSampler::new(order, batch_size, share.num_replicas, share.rank, 1)?;
        Ok(TrainLoader {
            data: Arc::new(data),
            sampler,
            device: self.device().clone(),
            scope: self.scope(true, 0, (share.rank * batch_size) as u64),
            workers: self.workers,
            batches: 0,
            loader: None,
        })
    }

    /// Returns the seed, the ranks and the sizes that data modules need, such as the number of
    /// ranks with different samples (Lightning's `distributed_sampler_kwargs`).
    ///
    /// # Errors
    /// If the mesh lacks the dimension `data_parallel`.
    pub fn data_context(&self) -> Result<DataContext> {
        let share = self.sampler_share()?;
        Ok(DataContext {
            seed: self.seed(),
            rank: self.global_rank(),
            world_size: self.world_size(),
            data_parallel_rank: share.rank,
            data_parallel_size: share.num_replicas,
        })
    }
}
