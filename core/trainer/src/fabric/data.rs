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

/// A micro-batch of training samples, with the [scope](ForwardScope) for its forward, on which
/// dropout, context parallelism and a parallel loss depend.
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

    /// The batch, and the scope that its forward must be computed in.
    pub fn into_parts(self) -> (B, ForwardScope) {
        (self.batch, self.scope)
    }
}

/// This rank's micro-batches of the endless stream of training samples; made by
/// [`Fabric::setup_data`].
pub struct TrainLoader<D: DataModule> {
    data: Arc<D>,
    sampler: TrainSampler,
    device: Device,
    /// The scope of every batch, except for the step.
    scope: ForwardScope,
    workers: Workers,
    batches: u64,
    /// From the next batch on; `None` before the first.
    loader: Option<Loader<D::Batch>>,
}

impl<D: DataModule> TrainLoader<D> {
    /// The data module.
    pub fn data(&self) -> &D {
        &self.data
    }

    /// Makes batches on threads of their own, beside what the loop computes; by default those of
    /// `trainer.num_workers`, or as [`Workers::for_device`] says. It changes no batch.
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

    /// The batches from the next one on.
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
        // It ends with an error alone, after which the next one is made by a new loader.
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
    /// Opens the data and returns this rank's micro-batches. Tensor- and context-parallel ranks get
    /// the same ones. Checks that all ranks have the same data. Collective.
    ///
    /// # Errors
    /// If the data cannot be opened or has no training samples; on every rank, if the ranks differ in the
    /// data or its configuration ([`DataModule::host_keys`] may differ).
    pub fn setup_data<D: DataModule>(&self, config: &D::Config) -> Result<TrainLoader<D>> {
        let data = D::setup(config, &self.data_context()?)?;
        if self.world_size() > 1 {
            // A configuration such as `()` is no table and has no keys.
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

    /// This rank's numbers, for data modules.
    ///
    /// # Errors
    /// None after construction; the strategy's own otherwise.
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
