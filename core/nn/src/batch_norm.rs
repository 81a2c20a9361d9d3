//! Batch norm.

use candle_core::{DType, Tensor};

use super::backend::to_accumulation_dtype;
use super::conv::channel_sums;
use super::gradients::accumulate_and_end_use;
use super::sizes::check_sizes;
use crate::{Error, Result};
use fulgurite_engine::collective::{AllGather, Collective, ReduceOp};
use fulgurite_engine::module::{BatchRanks, ForwardScope, Module, ModuleBuilder};
use fulgurite_engine::parallel::{LayerHandle, LayerSharding, LayerStyles, ParallelLayer};
use fulgurite_engine::parameter::{Buffer, BufferOptions, Init, Parameter, accumulation_dtype};

/// The options of a [`BatchNorm`], with PyTorch's defaults.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BatchNormConfig {
    /// Added to the variance.
    pub eps: f64,
    /// The weight of a batch in the running statistics. With `None` they are the mean of all
    /// batches.
    pub momentum: Option<f64>,
    /// Whether channels are scaled by a `weight` and shifted by a `bias`.
    pub affine: bool,
    /// Whether statistics cover the batches of all data-parallel ranks, like PyTorch's
    /// `SyncBatchNorm`. `None` follows `trainer.sync_batchnorm`.
    pub synchronised: Option<bool>,
}

impl Default for BatchNormConfig {
    fn default() -> Self {
        Self { eps: 1e-5, momentum: Some(0.1), affine: true, synchronised: None }
    }
}

/// Batch norm, like PyTorch's `BatchNorm1d`, `BatchNorm2d` and `BatchNorm3d`. Each channel is
/// normalised over the batch and all positions, scaled by its `weight` and shifted by its `bias`.
/// In training (according to the [`ForwardScope`]), the statistics are the batch's, and they update
/// the buffers `running_mean`, `running_var` and `num_batches_tracked`. Evaluation uses the running
/// statistics.
///
/// Input and output are `[batch, channels, ..]`. Arithmetic is at least in f32.
///
/// Each rank normalises its own micro-batch, unless the layer is
/// [synchronised](BatchNormConfig::synchronised). Synchronised ranks share the mean and variance of
/// all their elements, however many elements each rank has, so several ranks train like one device.
/// This takes one collective in forward (two with activation checkpointing, which recomputes) and
/// one in backward. Every rank must call the layer then, even a rank without samples. A micro-batch
/// of [padding](ForwardScope::is_padding) does not count.
///
/// Tensor-parallel plans leave the layer whole: all ranks have the whole batch, and compute the
/// same.
#[derive(Debug, Clone)]
pub struct BatchNorm {
    channels: usize,
    eps: f64,
    momentum: Option<f64>,
    synchronised: bool,
    affine: Option<(Parameter, Parameter)>,
    running_mean: Buffer,
    running_var: Buffer,
    num_batches_tracked: Buffer,
    layer: LayerHandle,
}

/// The layer accepts no style, because the statistics of a part of a sequence differ.
#[derive(Debug)]
struct Whole;

impl ParallelLayer for Whole {
    fn kind(&self) -> &'static str {
        "BatchNorm"
    }

    fn takes(&self) -> &'static str {
        "it needs whole activations, so plans leave it out"
    }

    fn shard(&self, styles: &LayerStyles<'_>) -> Result<LayerSharding> {
        Err(styles.cannot_take(self))
    }
}

/// The statistics that normalise a micro-batch.
#[derive(Debug, Clone)]
struct Statistics {
    /// `[channels]`, in the accumulation dtype.
    mean: Tensor,
    /// The reciprocal of the standard deviation, like `mean`.
    rstd: Tensor,
    /// The batch, if the statistics are the batch's.
    batch: Option<Batch>,
}

/// The batch of the statistics.
#[derive(Debug, Clone)]
struct Batch {
    /// Elements per channel on all ranks, an f64 scalar.
    count: Tensor,
    /// The ranks that share the batch.
    ranks: Option<BatchRanks>,
    /// Whether this rank's share is padding, which does not count.
    is_padding: bool,
}

impl BatchNorm {
    /// A norm of `channels`, with PyTorch's defaults.
    ///
    /// # Errors
    /// As [`with`](Self::with).
    pub fn new(b: &ModuleBuilder, channels: usize) -> Result<Self> {
        Self::with(b, channels, BatchNormConfig::default())
    }

    /// A norm of `channels`. The weight starts at one, the bias at zero.
    ///
    /// # Errors
    /// If `channels` is 0, `eps` is negative or not finite, the momentum is not between 0 and 1, or
    /// the builder's path has a layer already.
    pub fn with(b: &ModuleBuilder, channels: usize, config: BatchNormConfig) -> Result<Self> {
        let BatchNormConfig { eps, momentum, affine, synchronised } = config;
        super::norm::check_eps(b, eps)?;
        check_sizes(b, &[("channels", channels)])?;
        if let Some(momentum) = momentum.filter(|m| !(0.0..=1.0).contains(m)) {
            let message = format!(
                "the momentum, the weight of a batch in the running statistics, must be between 0 and 1; got \
                 {momentum:?}"
            );
            return Err(Error::module(b.path(), message));
        }
        let layer = b.declare(Whole)?;
        let parameter = |name, init| b.parameter(name, [channels], init);
        let affine = match affine {
            true => Some((parameter("weight", Init::ONES)?, parameter("bias", Init::ZEROS)?)),
            false => None,
        };
        let options = BufferOptions::dtype(accumulation_dtype(b.compute_dtype()));
        let running_mean = b.buffer("running_mean", [channels], Init::ZEROS, options)?;
        let running_var = b.buffer("running_var", [channels], Init::ONES, options)?;
        let options = BufferOptions::dtype(DType::I64);
        let num_batches_tracked = b.buffer("num_batches_tracked", [], Init::ZEROS, options)?;
        let synchronised = synchronised.unwrap_or(b.sync_batchnorm());
        if synchronised {
            b.synchronise_batches();
        }
        Ok(Self {
            channels,
            eps,
            momentum,
            synchronised,
            affine,
            running_mean,
            running_var,
            num_batches_tracked,
            layer,
        })
    }

    /// The weight, `[channels]`.
    pub fn weight(&self) -> Option<&Parameter> {
        self.affine.as_ref().map(|(weight, _)| weight)
    }

    /// The bias, `[channels]`.
    pub fn bias(&self) -> Option<&Parameter> {
        self.affine.as_ref().map(|(_, bias)| bias)
    }

    /// The running mean, `[channels]`.
    pub fn running_mean(&self) -> &Buffer {
        &self.running_mean
    }

    /// The running variance, `[channels]`, unbiased.
    pub fn running_var(&self) -> &Buffer {
        &self.running_var
    }

    /// The number of batches in the running statistics, an i64 scalar.
    pub fn num_batches_tracked(&self) -> &Buffer {
        &self.num_batches_tracked
    }

    /// Returns the statistics for normalisation. Batch statistics also update the running ones.
    /// Collective if the layer is synchronised.
    fn statistics(&self, x: &Tensor, scope: Option<&ForwardScope>) -> Result<Statistics> {
        let dtype = x.dtype();
        let Some(scope) = scope else {
            // Copies, because a later training forward changes the buffers.
            let mean = self.running_mean.value()?.to_dtype(dtype)?.copy()?;
            let var = self.running_var.value()?.to_dtype(dtype)?;
            return Ok(Statistics { mean, rstd: self.rstd(&var)?, batch: None });
        };
        let ranks = scope.batch_ranks.clone().filter(|_| self.synchronised);
        let n = x.elem_count() / self.channels.max(1);
        if ranks.is_none() && n < 2 && self.channels > 0 {
            let message = format!(
                "expected more than one value for each channel in training, got an input of shape {:?}: one \
                 has no variance",
                x.dims()
            );
            return Err(Error::module(self.layer.path(), message));
        }
        let counts = n > 0 && !(ranks.is_some() && scope.is_padding);
        let (mean, squares) = if counts {
            let mean = (channel_sums(x)? / n as f64)?;
            let centered = x.broadcast_sub(&of_channels(&mean, x.rank())?)?;
            (mean, channel_sums(&centered.sqr()?)?)
        } else {
            let zeros = Tensor::zeros(self.channels, dtype, x.device())?;
            (zeros.clone(), zeros)
        };
        let (mean, squares) = (mean.to_dtype(DType::F64)?, squares.to_dtype(DType::F64)?);
        let n = if counts { n as f64 } else { 0.0 };
        let count = Tensor::new(n, x.device())?;
        let (count, mean, squares) = match &ranks {
            None => (count, mean, squares),
            Some(ranks) => combine(ranks, &count, &mean, &squares)?,
        };
        let var = squares.broadcast_div(&count.maximum(1.0)?)?;
        if ranks.is_some() || !scope.is_padding {
            self.track(&mean, &squares.broadcast_div(&(&count - 1.0)?.maximum(1.0)?)?)?;
        }
        let batch = Batch { count, ranks, is_padding: scope.is_padding };
        let (mean, var) = (mean.to_dtype(dtype)?, var.to_dtype(dtype)?);
        Ok(Statistics { mean, rstd: self.rstd(&var)?, batch: Some(batch) })
    }

    fn rstd(&self, var: &Tensor) -> Result<Tensor> {
        Ok((var + self.eps)?.sqrt()?.recip()?)
    }

    /// Updates the running statistics with a batch.
    fn track(&self, mean: &Tensor, var: &Tensor) -> Result<()> {
        let batches = (self.num_batches_tracked.value()?.to_dtype(DType::F64)? + 1.0)?;
        let weight = match self.momentum {
            Some(momentum) => Tensor::new(momentum, batches.device())?,
            None => batches.recip()?,
        };
        for (running, now) in [(&self.running_mean, mean), (&self.running_var, var)] {
            let before = running.value()?.to_dtype(DType::F64)?;
            running.set(&(&before + (now - &before)?.broadcast_mul(&weight)?)?)?;
        }
        self.num_batches_tracked.set(&batches)
    }

    fn normalize(&self, x: &Tensor, statistics: &Statistics) -> Result<Tensor> {
        let mean = of_channels(&statistics.mean, x.rank())?;
        Ok(x.broadcast_sub(&mean)?.broadcast_mul(&of_channels(&statistics.rstd, x.rank())?)?)
    }

    /// Computes the gradient of the input. Collective if several ranks share the statistics.
    fn backward(&self, saved: &Tensor, statistics: &Statistics, grad: &Tensor) -> Result<Tensor> {
        let rank = saved.rank();
        let grad = to_accumulation_dtype(grad)?;
        let normalized = self.normalize(&to_accumulation_dtype(saved)?, statistics)?;
        let sums = channel_sums(&grad)?;
        let products = channel_sums(&(&grad * &normalized)?)?;
        let mut scale = statistics.rstd.clone();
        if let Some((weight, bias)) = &self.affine {
            scale = (scale * to_accumulation_dtype(&weight.value()?)?)?;
            accumulate_and_end_use(weight, &products)?;
            accumulate_and_end_use(bias, &sums)?;
        }
        let scale = of_channels(&scale, rank)?;
        let Some(Batch { count, ranks, is_padding }) = &statistics.batch else {
            return Ok(grad.broadcast_mul(&scale)?);
        };
        let mut of_batch = Tensor::cat(&[&sums, &products], 0)?.to_dtype(DType::F64)?;
        if let Some(ranks) = ranks {
            if *is_padding {
                of_batch = of_batch.zeros_like()?;
            }
            ranks.group().run(Collective::all_reduce(&of_batch, ReduceOp::Sum))?;
            if *is_padding {
                return Ok(grad.broadcast_mul(&scale)?);
            }
        }
        let means = of_batch.broadcast_div(&count.maximum(1.0)?)?.to_dtype(grad.dtype())?;
        let mean = of_channels(&means.narrow(0, 0, self.channels)?, rank)?;
        let along = of_channels(&means.narrow(0, self.channels, self.channels)?, rank)?;
        let moved = (grad.broadcast_sub(&mean)? - normalized.broadcast_mul(&along)?)?;
        Ok(moved.broadcast_mul(&scale)?)
    }
}

/// Reshapes one value per channel for a tensor of this number of dimensions.
fn of_channels(values: &Tensor, rank: usize) -> Result<Tensor> {
    let mut shape = vec![1; rank];
    shape[1] = values.elem_count();
    Ok(values.contiguous()?.reshape(shape)?)
}

/// Combines each rank's count, means and squared deviations into the values for all elements.
/// Collective.
fn combine(
    ranks: &BatchRanks,
    count: &Tensor,
    mean: &Tensor,
    squares: &Tensor,
) -> Result<(Tensor, Tensor, Tensor)> {
    let (group, channels) = (ranks.group(), mean.elem_count());
    let own = Tensor::cat(&[&count.reshape(1)?, mean, squares], 0)?;
    let size = group.size();
    let all = Tensor::zeros(size * own.elem_count(), DType::F64, own.device())?;
    let gather = AllGather::even(&all, &own, size);
    group.run(Collective::all_gather_into(vec![gather]))?;
    let all = all.reshape((size, own.elem_count()))?;
    let counts = all.narrow(1, 0, 1)?;
    let (means, squares) = (all.narrow(1, 1, channels)?, all.narrow(1, 1 + channels, channels)?);
    let count = counts.sum_all()?;
    let mean = means.broadcast_mul(&counts)?.sum(0)?.broadcast_div(&count.maximum(1.0)?)?;
    let apart = means.broadcast_sub(&mean)?.sqr()?.broadcast_mul(&counts)?;
    Ok((count, mean, (squares + apart)?.sum(0)?))
}

impl Module for BatchNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        if x.rank() < 2 || x.dims()[1] != self.channels {
            let channels = self.channels;
            let message =
                format!("expected an input of shape [batch, {channels}, ..], got {:?}", x.dims());
            return Err(Error::module(self.layer.path(), message));
        }
        let (saved, input) = self.layer.redistribute_input(x)?;
        let scope = ForwardScope::of_layer(&self.layer)?;
        let (y, statistics) = self.layer.run(|| {
            let x = to_accumulation_dtype(&saved)?;
            let statistics = self.statistics(&x, scope.as_ref())?;
            let mut y = self.normalize(&x, &statistics)?;
            if let Some((weight, bias)) = &self.affine {
                let value = |parameter: &Parameter| {
                    of_channels(&to_accumulation_dtype(&parameter.value()?)?, x.rank())
                };
                y = y.broadcast_mul(&value(weight)?)?.broadcast_add(&value(bias)?)?;
            }
            Ok((y.to_dtype(saved.dtype())?, statistics))
        })?;
        let layer = self.clone();
        let parameters: Vec<&Parameter> =
            self.affine.iter().flat_map(|(weight, bias)| [weight, bias]).collect();
        self.layer.record(&[x], &parameters, y, move |_, grad| {
            let grad = layer.backward(&saved, &statistics, grad)?;
            Ok(vec![Some(input.backward(&grad.to_dtype(saved.dtype())?)?)])
        })
    }
}
