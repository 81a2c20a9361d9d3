//! The tensors that a decoder's layers pass on, also from stage to stage of a pipeline.

use candle_core::{Device, Tensor};
use fulgurite_engine::autograd::GradMode;
use fulgurite_engine::execution::read;
use fulgurite_engine::module::stage::{self, StageTensors};
use fulgurite_engine::module::{ForwardScope, without_adapters};
use fulgurite_error::{Error, Result};
use fulgurite_nn::RouterSums;

use super::decoder::Decoder;
use super::layer::DecoderLayer;

/// The output of a layer.
pub(crate) struct Passed {
    /// The hidden states.
    pub(crate) x: Tensor,
    /// The hidden states with adapters off, without a gradient, if they are wanted.
    pub(crate) base: Option<Tensor>,
    /// Behind the first layer with experts, for the loss that balances them.
    pub(crate) sums: Option<RouterSums>,
    /// The rows of each expert in the layers of earlier stages, for the log.
    loads: Loads,
}

/// The rows of each expert, and with a capacity the dropped choices, by layer.
type Loads = Vec<(usize, Vec<f64>)>;

/// The further results of a forward.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Wanted {
    /// The hidden states of the model with adapters off.
    pub(crate) base: bool,
    /// The sums of routers whose rows use so many experts.
    pub(crate) sums: Option<usize>,
}

/// Calls `f` with adapters and gradients off, as in an evaluation: without dropout.
pub(crate) fn as_base<R>(f: impl FnOnce() -> R) -> R {
    without_adapters(|| {
        let _scope = ForwardScope { training: false, ..ForwardScope::current() }.enter();
        f()
    })
}

impl Decoder {
    /// Computes all layers. With and without adapters, both pass a layer before the next one
    /// computes, so that a pipeline can cut the model.
    ///
    /// # Errors
    /// As [`hidden`](Self::hidden).
    pub(super) fn through_layers(&self, ids: &Tensor, wanted: Wanted) -> Result<Passed> {
        let embed = self.embedding(ids)?;
        let first = || {
            let base = wanted.base.then(|| as_base(&embed)).transpose()?;
            Ok(Passed { x: embed()?, base, sums: None, loads: Loads::new() })
        };
        let passed = stage::through(self.layers(), first, |layer, before: &Passed| {
            let forward = |x| layer.call(x, DecoderLayer::forward);
            let base = match &before.base {
                Some(x) => Some(as_base(|| forward(x))?.0),
                None => None,
            };
            let (x, logits) = forward(&before.x)?;
            let mut sums = before.sums.clone();
            if let (Some(logits), Some(per_row)) = (logits, wanted.sums) {
                sums = Some(RouterSums::add(sums, &logits, per_row)?);
            }
            let mut loads = before.loads.clone();
            loads.extend(self.loads_for_later_stages(layer.module()));
            Ok(Passed { x, base, sums, loads })
        })?;
        for (layer, load) in self.expert_loads() {
            let of_layer = passed.loads.iter().filter(|(other, _)| *other == layer);
            of_layer.for_each(|(_, rows)| {
                let experts = load.num_experts();
                load.add_of_stage(&rows[..experts], rows.get(experts).copied());
            });
        }
        Ok(passed)
    }

    /// The rows of a layer's experts in this forward, if the forward ends in another stage, which
    /// logs them.
    fn loads_for_later_stages(&self, layer: &DecoderLayer) -> Option<(usize, Vec<f64>)> {
        let is_counted = stage::ends_early() && GradMode::current().expects_backward();
        let load = layer.load().filter(|_| is_counted && self.logs_loads())?;
        Some((layer.index(), load.take().into_iter().chain(load.take_dropped()).collect()))
    }
}

impl StageTensors for Passed {
    fn tensors(&self) -> Result<Vec<Tensor>> {
        let mut tensors = vec![self.x.clone()];
        tensors.extend(self.base.clone());
        tensors.extend(tensor_of(&self.loads, self.x.device())?);
        if let Some(sums) = &self.sums {
            tensors.extend(sums.tensors()?);
        }
        Ok(tensors)
    }

    fn of_tensors(tensors: Vec<Tensor>) -> Result<Self> {
        let mut tensors = tensors.into_iter().peekable();
        let missing = || Error::other("a stage of a decoder gives hidden states");
        let x = tensors.next().ok_or_else(missing)?;
        let base = tensors.next_if(|tensor| tensor.dims() == x.dims());
        let loads = match tensors.next_if(|tensor| tensor.rank() == 2) {
            Some(tensor) => loads_of(&tensor)?,
            None => Loads::new(),
        };
        let sums: Vec<Tensor> = tensors.collect();
        let sums = (!sums.is_empty()).then(|| RouterSums::of_tensors(sums)).transpose()?;
        Ok(Self { x, base, sums, loads })
    }
}

/// Loads as i64, a row for each layer with its number first; `None` if there are none.
fn tensor_of(loads: &Loads, device: &Device) -> Result<Option<Tensor>> {
    let Some((_, first)) = loads.first() else { return Ok(None) };
    let width = 1 + first.len();
    let mut values = Vec::with_capacity(loads.len() * width);
    for (layer, rows) in loads {
        values.push(*layer as i64);
        values.extend(rows.iter().map(|rows| *rows as i64));
    }
    Ok(Some(Tensor::from_vec(values, (loads.len(), width), device)?))
}

fn loads_of(tensor: &Tensor) -> Result<Loads> {
    let width = tensor.dim(1)?;
    let values = read::vec1::<i64>(&tensor.flatten_all()?, "loads of experts")?;
    let row = |row: &[i64]| (row[0] as usize, row[1..].iter().map(|rows| *rows as f64).collect());
    Ok(values.chunks_exact(width).map(row).collect())
}
