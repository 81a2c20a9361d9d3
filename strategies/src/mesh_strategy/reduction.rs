//! What is sent of gradients when they are summed over data-parallel ranks, and what they are divided by before.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use candle_core::Tensor;
use fulgurite_engine::autograd::storage;
use fulgurite_engine::collective::{Collective, End, ProcessGroup, ReduceOp, Work};
use fulgurite_engine::mesh::{DATA_PARALLEL_REPLICATE, DP_SHARD_CP, DeviceMesh};
use fulgurite_engine::strategy::{
    GradientBucket, GradientCompression, GradientCompressionConfig, GradientPart,
};
use fulgurite_error::{Error, Result};

/// A compression, which one thread of the rank uses: the one that runs backwards.
type Compression = Arc<Mutex<Box<dyn GradientCompression>>>;

/// What a configuration says.
#[derive(Clone, Default)]
pub(crate) struct GradientSettings {
    /// Of gradients that are summed over replicas; everything is sent if `None`.
    compression: Option<Compression>,
    /// What they are divided by before; as the compression wants if `None`.
    predivide_factor: Option<f64>,
}

impl GradientSettings {
    /// From the two keys of a strategy.
    ///
    /// # Errors
    /// If one of them is out of range.
    pub(crate) fn new(
        compression: Option<&dyn GradientCompressionConfig>,
        predivide_factor: Option<f64>,
    ) -> Result<Self> {
        if let Some(factor) = predivide_factor.filter(|factor| !is_positive(*factor)) {
            return Err(Error::Config(format!(
                "`trainer.strategy.gradient_predivide_factor` = {factor}: expected a positive number, best \
                 a power of two, by which dividing rounds nothing"
            )));
        }
        let compression = compression.map(GradientCompressionConfig::build).transpose()?;
        let compression = compression.map(|compression| Arc::new(Mutex::new(compression)));
        Ok(Self { compression, predivide_factor })
    }
}

fn is_positive(factor: f64) -> bool {
    factor.is_finite() && factor > 0.0
}

/// How gradients are summed on this rank; a clone is the same.
#[derive(Clone)]
pub(super) struct GradientReduction {
    compression: Option<Compression>,
    predivide_factor: f64,
    /// Whether replicas keep their gradients to themselves now.
    apart: Arc<AtomicBool>,
}

impl Default for GradientReduction {
    /// As they are.
    fn default() -> Self {
        Self { compression: None, predivide_factor: 1.0, apart: Arc::default() }
    }
}

impl GradientReduction {
    /// What the settings say on this mesh.
    ///
    /// # Errors
    /// If there is a compression and nothing for it to do, or it wants to divide by what is no positive number.
    pub(super) fn new(settings: &GradientSettings, mesh: &DeviceMesh) -> Result<Self> {
        let replicas = mesh.size(DATA_PARALLEL_REPLICATE)?;
        let ranks = replicas * mesh.size(DP_SHARD_CP)?;
        if settings.compression.is_some() && replicas == 1 && mesh.world().size() > 1 {
            return Err(Error::Mesh(
                "`trainer.strategy.gradient_compression` is of gradients that are summed over replicas, and \
                 data_parallel_replicate has size 1: leave it out, or set `data_parallel_replicate_size`. The \
                 dtype that shards are reduced in is `mixed_precision.reduce_dtype`"
                    .to_owned(),
            ));
        }
        let compression = settings.compression.clone();
        let wanted = || match &compression {
            Some(compression) => lock(compression).predivide_factor(ranks),
            None => 1.0,
        };
        let predivide_factor = match ranks {
            1 => 1.0,
            _ => settings.predivide_factor.unwrap_or_else(wanted),
        };
        if !is_positive(predivide_factor) {
            return Err(Error::other(format!(
                "the gradient compression wants gradients divided by {predivide_factor}; expected a positive \
                 number from its `predivide_factor`"
            )));
        }
        Ok(Self { compression, predivide_factor, apart: Arc::default() })
    }

    /// The same, where replicas keep their gradients to themselves while `apart` is set.
    #[must_use]
    pub(super) fn unless(self, apart: Arc<AtomicBool>) -> Self {
        Self { apart, ..self }
    }

    /// What gradients are divided by before they are summed, and multiplied with after.
    pub(super) fn predivide_factor(&self) -> f64 {
        self.predivide_factor
    }

    /// Starts to sum the gradients `values`, which are those of `parts`, over replicas. Collective.
    pub(super) fn all_reduce(
        &self,
        values: &Tensor,
        parts: impl FnOnce() -> Result<Vec<GradientPart>>,
        replicas: &Arc<dyn ProcessGroup>,
    ) -> Result<Work> {
        if self.apart.load(Ordering::Relaxed) {
            return Ok(Work::ready());
        }
        match &self.compression {
            Some(compression) if replicas.size() > 1 => {
                let bucket = GradientBucket { values: values.clone(), parts: parts()? };
                lock(compression).all_reduce(bucket, replicas)
            }
            _ => replicas.all_reduce(values, ReduceOp::Sum),
        }
    }

    /// The same behind a collective that makes the values, which nobody waits for. `None` if they must be there first.
    pub(super) fn all_reduce_after(
        &self,
        end: &Arc<dyn End>,
        values: &Tensor,
        replicas: &Arc<dyn ProcessGroup>,
    ) -> Result<Option<Work>> {
        match &self.compression {
            _ if self.apart.load(Ordering::Relaxed) => Ok(Some(Work::ready())),
            Some(_) => Ok(None),
            None => replicas.start_after(end, Collective::all_reduce(values, ReduceOp::Sum)),
        }
    }

    /// As [`all_reduce`](Self::all_reduce), and divides before and multiplies after.
    pub(super) fn divide_and_all_reduce(
        &self,
        values: &Tensor,
        parts: impl FnOnce() -> Result<Vec<GradientPart>>,
        replicas: &Arc<dyn ProcessGroup>,
    ) -> Result<Work> {
        let factor = self.predivide_factor;
        scale(values, 1.0 / factor)?;
        let work = self.all_reduce(values, parts, replicas)?;
        if factor == 1.0 {
            return Ok(work);
        }
        let values = values.clone();
        Ok(Work::pending(move || {
            work.wait()?;
            scale(&values, factor)
        }))
    }
}

fn lock(compression: &Compression) -> std::sync::MutexGuard<'_, Box<dyn GradientCompression>> {
    compression.lock().expect("no panic while reducing")
}

/// Multiplies `values` in place.
pub(super) fn scale(values: &Tensor, factor: f64) -> Result<()> {
    if factor == 1.0 {
        return Ok(());
    }
    storage::copy_from(values, &(values * factor)?)
}
