//! Magnitudes of DoRA adapters. Each magnitude starts as the row norms of its weight.

use candle_core::{DType, Device, Tensor};
use fulgurite_engine::autograd::storage;
use fulgurite_engine::collective::{Collective, ReduceOp};
use fulgurite_engine::execution::read;
use fulgurite_engine::mesh::DeviceMesh;
use fulgurite_engine::parameter::{Parameter, accumulation_dtype};
use fulgurite_engine::quantization::SCALE_SUFFIX;
use fulgurite_engine::shard::Region;
use fulgurite_engine::strategy::StrategyContext;

use crate::{Error, Result};

/// The state of each entry of
/// [`ModuleTree::magnitudes`](fulgurite_engine::module::ModuleTree::magnitudes): this rank's part
/// of the norms last written into it, or `None` once it was loaded or trained.
#[derive(Default)]
pub(super) struct Magnitudes(Vec<Option<Vec<f64>>>);

impl Magnitudes {
    /// Fills the magnitudes of a freshly initialised model with the norms of its weights.
    /// Collective if the model has magnitudes.
    pub(super) fn start(context: StrategyContext<'_>) -> Result<Self> {
        let mut own = Self::default();
        for (magnitude, _) in context.tree.magnitudes() {
            own.0.push(Some(values(magnitude)?));
        }
        own.follow(context)?;
        Ok(own)
    }

    /// Recomputes the norms of untouched magnitudes after values were loaded into the model, so
    /// that adapters do not change the loaded model's outputs at first. Magnitudes that were loaded
    /// or trained keep their values. Called before the strategy makes the model ready for a
    /// forward. Collective if any magnitude was untouched before the load.
    pub(super) fn follow(&mut self, context: StrategyContext<'_>) -> Result<()> {
        let all = context.tree.magnitudes().iter().zip(&mut self.0);
        let mut pending: Vec<_> = all.filter(|(_, filled)| filled.is_some()).collect();
        if pending.is_empty() {
            return Ok(());
        }
        // One all-reduce sums both: the flags of changed magnitudes, and the squared norms.
        let mut sums = Vec::new();
        for ((magnitude, _), filled) in &pending {
            let written = filled.as_ref() != Some(&values(magnitude)?);
            sums.push(f64::from(u8::from(written)));
        }
        for ((magnitude, weight), _) in &pending {
            let start = sums.len();
            sums.resize(start + magnitude.elem_count(), 0.0);
            let rows = Rows::of(weight, magnitude.compute_dtype(), context)?;
            add_squared_norms(&rows, context.mesh, &mut sums[start..])?;
        }
        let len = sums.len();
        let packed = Tensor::from_vec(sums, len, &Device::Cpu)?;
        context.mesh.world().run(Collective::all_reduce(&packed, ReduceOp::Sum))?;
        let written = read::host::<f64>(&packed.narrow(0, 0, pending.len())?)?;
        let mut start = pending.len();
        for (((magnitude, _), filled), written) in pending.iter_mut().zip(written) {
            let squares = packed.narrow(0, start, magnitude.elem_count())?;
            start += magnitude.elem_count();
            if written > 0.0 {
                **filled = None;
                continue;
            }
            let local = magnitude.local()?;
            if !local.region.is_empty() {
                // The dtypes and order in which layers compute the norm.
                let (offset, n) = (local.region.offsets[0], local.region.sizes[0]);
                let squares = squares.narrow(0, offset, n)?;
                let squares = squares.to_dtype(accumulation_dtype(magnitude.compute_dtype()))?;
                let norms = squares.sqrt()?.to_dtype(local.values.dtype())?;
                storage::copy_from(&local.values, &norms.to_device(local.values.device())?)?;
            }
            **filled = Some(values(magnitude)?);
        }
        Ok(())
    }
}

/// Reads this rank's part of a magnitude.
fn values(magnitude: &Parameter) -> Result<Vec<f64>> {
    let local = magnitude.local()?.values.flatten_all()?.to_dtype(DType::F64)?;
    read::host(&local.to_device(&Device::Cpu)?)
}

/// A weight as layers compute with it: dequantised, in the compute dtype.
struct Rows<'a> {
    weight: &'a Parameter,
    /// The scales of a quantised weight.
    scales: Option<&'a Parameter>,
    compute_dtype: DType,
}

impl<'a> Rows<'a> {
    fn of(
        weight: &'a Parameter,
        compute_dtype: DType,
        context: StrategyContext<'a>,
    ) -> Result<Self> {
        let scales = match weight.packed() {
            None => None,
            Some(_) => {
                let name = format!("{}{SCALE_SUFFIX}", weight.fqn());
                let scales = context.tree.parameter(&name);
                Some(scales.ok_or_else(|| Error::parameter(weight.fqn(), "has no scales"))?)
            }
        };
        Ok(Self { weight, scales, compute_dtype })
    }

    /// Returns the values of a region that lies within this rank's local region.
    fn values(&self, region: &Region) -> Result<Tensor> {
        let of = |parameter: &Parameter, region: &Region| -> Result<Tensor> {
            let local = parameter.local()?;
            let inside = region.relative_to(&local.region);
            let mut values = local.values.reshape(&local.region.sizes[..])?;
            for (dim, (start, n)) in inside.offsets.iter().zip(&inside.sizes).enumerate() {
                values = values.narrow(dim, *start, *n)?;
            }
            Ok(values.contiguous()?)
        };
        let values = of(self.weight, region)?;
        let (Some(packed), Some(scales)) = (self.weight.packed(), self.scales) else {
            return Ok(values.to_dtype(self.compute_dtype)?);
        };
        let mut rows = Region::full(scales.global_shape());
        (rows.offsets[0], rows.sizes[0]) = (region.offsets[0], region.sizes[0]);
        packed.format.unpack(&values, &of(scales, &rows)?, self.compute_dtype)
    }
}

/// Adds the squares of the elements that this rank owns to the weight's row sums.
fn add_squared_norms(of: &Rows<'_>, mesh: &DeviceMesh, sums: &mut [f64]) -> Result<()> {
    let weight = of.weight;
    let owned = weight.spec().owned_region(|dim| mesh.coordinate(dim));
    if owned.is_empty() {
        return Ok(());
    }
    let local = weight.local()?;
    if owned.intersect(&local.region).as_ref() != Some(&owned) {
        let message = "this rank does not hold the part of it that it owns, of whose rows it is to compute norms";
        return Err(Error::parameter(weight.fqn(), message));
    }
    const PIECE: usize = 1 << 22;
    let columns: usize = owned.sizes[1..].iter().product();
    let rows = (PIECE / columns.max(1)).max(1);
    for start in (0..owned.sizes[0]).step_by(rows) {
        let first = owned.offsets[0] + start;
        let n = rows.min(owned.sizes[0] - start);
        let mut piece = owned.clone();
        (piece.offsets[0], piece.sizes[0]) = (first, n);
        let values = of.values(&piece)?.to_dtype(accumulation_dtype(of.compute_dtype))?;
        let squares = values.sqr()?.sum(1)?.to_dtype(DType::F64)?.to_device(&Device::Cpu)?;
        for (sum, square) in sums[first..first + n].iter_mut().zip(read::host::<f64>(&squares)?) {
            *sum += square;
        }
    }
    Ok(())
}
