//! A model of three large tensors, sharded over the ranks.

use candle_core::Tensor;
use fulgurite_core::Result;
use fulgurite_core::collective::ProcessGroup;
use fulgurite_core::module::{ModuleBuilder, ModuleInit, ModuleTree};
use fulgurite_core::parameter::{Init, LocalShard};
use fulgurite_core::shard::{Cut, Placement};

pub(crate) const TENSORS: usize = 3;
pub(crate) const ROWS: usize = 2048;
pub(crate) const COLUMNS: usize = 3072;

/// This rank's part of the model, cut along a dimension; `value` computes a tensor's element from
/// its index.
pub(crate) fn cut_model(
    group: &dyn ProcessGroup,
    dim: usize,
    value: fn(usize) -> f32,
) -> Result<ModuleTree> {
    let b = ModuleBuilder::new(ModuleInit::default());
    for i in 0..TENSORS {
        b.parameter(&format!("w{i}"), [ROWS, COLUMNS], Init::ONES)?;
    }
    let mut tree = b.finish()?;
    for parameter in tree.slots() {
        let cut = Cut::new("data_parallel_shard", group.size(), Placement::Shard(dim));
        let spec = parameter.spec().with_cut(cut);
        let region = spec.region(|_| group.rank());
        let runs = region.runs(&spec.shape);
        let values = runs.iter().flat_map(|run| run.outer..run.outer + run.len).map(value);
        let values = Tensor::from_iter(values, parameter.device())?;
        parameter.set_spec(spec);
        parameter.set_local(LocalShard { values, region });
    }
    Ok(tree)
}
