//! Group norm.

use candle_core::Tensor;

use super::backend::to_accumulation_dtype;
use super::conv::channel_sums;
use super::gradients::accumulate_and_end_use;
use super::kernels::norm::Norm;
use super::sizes::check_sizes;
use super::styles::WholeLayer;
use crate::{Error, Result};
use fulgurite_engine::module::{Module, ModuleBuilder};
use fulgurite_engine::parallel::LayerHandle;
use fulgurite_engine::parameter::{Init, Parameter};

/// Group norm, like PyTorch's. The channels of each sample are normalised in groups, over all
/// positions, and each channel is scaled by its `weight` and shifted by its `bias`. It does not
/// depend on the other samples of a batch, so it needs no running statistics and is the same on any
/// number of ranks. With one group per channel it is an instance norm.
///
/// Input and output are `[batch, channels, ..]`. Arithmetic is at least in f32. Tensor-parallel
/// plans leave the layer whole.
#[derive(Debug, Clone)]
pub struct GroupNorm {
    norm: Norm,
    groups: usize,
    weight: Parameter,
    bias: Parameter,
    layer: LayerHandle,
}

impl GroupNorm {
    /// A norm of `channels` in `groups`. The weight starts at one, the bias at zero.
    ///
    /// # Errors
    /// If a size is 0, the groups do not divide the channels, `eps` is negative or not finite, or
    /// the builder's path has a layer already.
    pub fn new(b: &ModuleBuilder, groups: usize, channels: usize, eps: f64) -> Result<Self> {
        let norm = Norm { center: true, eps, unit_offset: false };
        super::norm::check_eps(b, eps)?;
        check_sizes(b, &[("channels", channels), ("groups", groups)])?;
        if !channels.is_multiple_of(groups) {
            let message = format!("{groups} groups do not divide {channels} channels");
            return Err(Error::module(b.path(), message));
        }
        let layer = b.declare(WholeLayer("GroupNorm"))?;
        let weight = b.parameter("weight", [channels], Init::ONES)?;
        let bias = b.parameter("bias", [channels], Init::ZEROS)?;
        Ok(Self { norm, groups, weight, bias, layer })
    }

    /// The weight, `[channels]`.
    pub fn weight(&self) -> &Parameter {
        &self.weight
    }

    /// The bias, `[channels]`.
    pub fn bias(&self) -> &Parameter {
        &self.bias
    }

    /// Reshapes one value per channel for a tensor of this number of dimensions.
    fn of_channels(&self, parameter: &Parameter, rank: usize) -> Result<Tensor> {
        let mut shape = vec![1; rank];
        shape[1] = parameter.elem_count();
        Ok(to_accumulation_dtype(&parameter.value()?)?.reshape(shape)?)
    }

    /// Returns a weight of ones, and the elements of `x` with one group per row.
    fn rows(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        let rows = x.dim(0)? * self.groups;
        let x = to_accumulation_dtype(x)?.reshape((rows, x.elem_count() / rows.max(1)))?;
        Ok((Tensor::ones(x.dim(1)?, x.dtype(), x.device())?, x))
    }
}

impl Module for GroupNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let channels = self.weight.elem_count();
        if x.rank() < 2 || x.dims()[1] != channels {
            let message =
                format!("expected an input of shape [batch, {channels}, ..], got {:?}", x.dims());
            return Err(Error::module(self.layer.path(), message));
        }
        let (saved, input) = self.layer.redistribute_input(x)?;
        let y = self.layer.run(|| {
            let (ones, rows) = self.rows(&saved)?;
            let y = self.norm.forward(&rows, &ones, None)?.0.reshape(x.shape())?;
            let y = y.broadcast_mul(&self.of_channels(&self.weight, x.rank())?)?;
            let y = y.broadcast_add(&self.of_channels(&self.bias, x.rank())?)?;
            Ok(y.to_dtype(saved.dtype())?)
        })?;
        let layer = self.clone();
        self.layer.record(&[x], &[&self.weight, &self.bias], y, move |_, grad| {
            let (ones, rows) = layer.rows(&saved)?;
            let (normalized, stats) = layer.norm.forward(&rows, &ones, None)?;
            let normalized = normalized.reshape(saved.shape())?;
            let grad = to_accumulation_dtype(grad)?;
            let of_normalized =
                grad.broadcast_mul(&layer.of_channels(&layer.weight, saved.rank())?)?;
            let of_normalized = of_normalized.reshape(rows.shape())?;
            let dx = layer.norm.backward(&rows, &ones, false, &stats, &of_normalized, None)?.x;
            accumulate_and_end_use(&layer.weight, &channel_sums(&(&grad * normalized)?)?)?;
            accumulate_and_end_use(&layer.bias, &channel_sums(&grad)?)?;
            let dx = dx.reshape(saved.shape())?.to_dtype(saved.dtype())?;
            Ok(vec![Some(input.backward(&dx)?)])
        })
    }
}
