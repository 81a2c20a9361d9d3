//! Batches for loops written with Fabric.

use candle_core::Device;

use super::Fabric;
use crate::Result;
use fulgurite_engine::data::{DataContext, DataModule, SampleOrder, Split, TrainSampler};
use fulgurite_engine::module::ForwardScope;

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
pub struct TrainLoader<D> {
    data: D,
    sampler: TrainSampler,
    device: Device,
    /// The scope of every batch, except for the step.
    scope: ForwardScope,
    batches: u64,
}

impl<D> TrainLoader<D> {
    /// The data module.
    pub fn data(&self) -> &D {
        &self.data
    }

    /// Continues with micro-batch `batches`, counted from 0, as a resumed run does.
    pub fn skip_to(&mut self, batches: u64) {
        self.batches = batches;
    }
}

impl<D: DataModule> Iterator for TrainLoader<D> {
    type Item = Result<TrainBatch<D::Batch>>;

    fn next(&mut self) -> Option<Self::Item> {
        let indices = self.sampler.indices(self.batches, 0);
        self.batches += 1;
        let scope = ForwardScope { step: self.batches, ..self.scope.clone() };
        let batch = self.data.batch(Split::Train, &indices, &self.device);
        let batch = match &scope.context {
            Some(context) => batch.and_then(|batch| D::shard_sequence(batch, context)),
            None => batch,
        };
        Some(batch.map(|batch| TrainBatch { batch, scope }))
    }
}

impl Fabric {
    /// Opens the data and returns this rank's micro-batches. Tensor- and context-parallel ranks get
    /// the same ones. Not collective.
    ///
    /// # Errors
    /// If the data cannot be opened or has no training samples.
    pub fn setup_data<D: DataModule>(&self, config: &D::Config) -> Result<TrainLoader<D>> {
        let data = D::setup(config, &self.data_context()?)?;
        let share = self.sampler_share()?;
        let order = SampleOrder::new(self.seed(), D::shuffle(config), data.len(Split::Train))?;
        let batch_size = D::batch_size(config);
        let sampler = TrainSampler::new(order, batch_size, share.num_replicas, share.rank, 1)?;
        Ok(TrainLoader {
            data,
            sampler,
            device: self.init.device.clone(),
            scope: self.scope(true, 0, (share.rank * batch_size) as u64),
            batches: 0,
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
