//! The sum of gradients over data-parallel ranks, with compression and predivision.

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

/// A compression; only the thread that runs backwards uses it.
type Compression = Arc<Mutex<Box<dyn GradientCompression>>>;

/// The configured options.
#[derive(Clone, Default)]
pub(crate) struct GradientSettings {
    /// Compression of gradients that are summed over replicas; `None` for no compression.
    compression: Option<Compression>,
    /// Predivide factor; `None` for the compression's choice.
    predivide_factor: Option<f64>,
}

impl GradientSettings {
    /// Reads the two keys of a strategy.
    ///
    /// # Errors
    /// If a value is out of range.
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

/// The gradient reduction of this rank; clones share its state.
#[derive(Clone)]
pub(super) struct GradientReduction {
    compression: Option<Compression>,
    predivide_factor: f64,
    /// Whether replicas currently do not reduce gradients among each other.
    apart: Arc<AtomicBool>,
}

impl Default for GradientReduction {
    /// No compression and no predivision.
    fn default() -> Self {
        Self { compression: None, predivide_factor: 1.0, apart: Arc::default() }
    }
}

impl GradientReduction {
    /// Applies the settings to this mesh.
    ///
    /// # Errors
    /// If a compression has nothing to compress, or its predivide factor is not a positive number.
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

    /// The same reduction, without the sum over replicas while `apart` is set.
    #[must_use]
    pub(super) fn unless(self, apart: Arc<AtomicBool>) -> Self {
        Self { apart, ..self }
    }

    /// Divisor of gradients before the sum; the sum is multiplied by it.
    pub(super) fn predivide_factor(&self) -> f64 {
        self.predivide_factor
    }

    /// Starts to sum `values`, the gradients of `parts`, over replicas. Collective.
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

    /// Like [`all_reduce`](Self::all_reduce), queued behind the collective `end` that computes
    /// `values`, without waiting. `None` if the values must be complete first.
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

    /// Like [`all_reduce`](Self::all_reduce), with predivision before and multiplication after.
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
