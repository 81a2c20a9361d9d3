//! Batches for this rank, for loops of one's own.

use candle_core::Device;

use super::Fabric;
use crate::Result;
use crate::data::{DataContext, DataModule, SampleOrder, Split, TrainSampler};
use crate::module::ForwardScope;

/// This rank's micro-batches of the endless stream of training samples: [`Fabric::setup_data`].
///
/// Taking one also sets the [surroundings](ForwardScope) of the forwards that follow on the thread,
/// which dropout, context parallelism and a parallel loss depend on, until the loader is dropped. To
/// generate in between, enter `ForwardScope::default()`.
pub struct TrainLoader<D> {
    data: D,
    sampler: TrainSampler,
    device: Device,
    scope: ForwardScope,
    /// What was in force before the first batch.
    outer: Option<ForwardScope>,
    batches: u64,
}

impl<D> Drop for TrainLoader<D> {
    fn drop(&mut self) {
        if let Some(outer) = self.outer.take() {
            outer.set();
        }
    }
}

impl<D> TrainLoader<D> {
    /// The data module.
    pub fn data(&self) -> &D {
        &self.data
    }

    /// Goes on at the `batches`-th micro-batch, counted from 0: what a resumed run does.
    pub fn skip_to(&mut self, batches: u64) {
        self.batches = batches;
    }
}

impl<D: DataModule> Iterator for TrainLoader<D> {
    type Item = Result<D::Batch>;

    fn next(&mut self) -> Option<Self::Item> {
        let indices = self.sampler.indices(self.batches, 0);
        self.batches += 1;
        self.outer.get_or_insert_with(ForwardScope::current);
        ForwardScope { step: self.batches, ..self.scope.clone() }.set();
        let batch = self.data.batch(Split::Train, &indices, &self.device);
        Some(match &self.scope.context {
            Some(context) => batch.and_then(|batch| D::shard_sequence(batch, context)),
            None => batch,
        })
    }
}

impl Fabric {
    /// Opens the data and gives this rank its micro-batches. Ranks that differ only in tensor or
    /// context parallel get the same ones. Not collective.
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
            outer: None,
            batches: 0,
        })
    }

    /// Who this rank is, for data modules.
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
