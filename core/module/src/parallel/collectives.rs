//! Differentiable collectives, for custom layers.
//!
//! Each takes a tensor in the graph and a process group, and communicates both when called and in
//! backward. So all ranks of the group must call them in the same order. Groups of one rank
//! communicate nothing.
//!
//! | | forward | backward | use |
//! |---|---|---|---|
//! | [`copy_to`] | identity | all-reduce | replicated input of different parts |
//! | [`reduce_from`] | all-reduce | identity | sum of partial results |
//! | [`all_gather`] | all-gather | reduce-scatter | sharded input of different parts |
//! | [`reduce_scatter`] | reduce-scatter | all-gather | sum of partial results, sharded |
//! | [`gather`] | all-gather | split | input of the same computation |
//! | [`split`] | split | all-gather | output of the same computation |
//! | [`all_to_all`] | all-to-all | all-to-all | change of the sharded dimension |
//!
//! ```
//! use std::sync::Arc;
//!
//! use candle_core::{DType, Device, Tensor};
//! use fulgurite_core::collective::{ProcessGroup, Solo};
//! use fulgurite_core::parallel::collectives::{copy_to, reduce_from};
//!
//! let group: Arc<dyn ProcessGroup> = Arc::new(Solo::new("tensor_parallel", 0));
//! let x = Tensor::ones((2, 4), DType::F32, &Device::Cpu)?;
//! let hidden = copy_to(&x, &group)?; // … a column-parallel product, then a row-parallel one …
//! let y = reduce_from(&hidden, &group)?;
//! assert_eq!(y.dims(), [2, 4]);
//! # Ok::<(), fulgurite_core::Error>(())
//! ```

use std::sync::Arc;

use candle_core::Tensor;

use super::Layout;
use super::activations::{self, RecordOwner};
use super::redistribute::{Redistribute, dimension};
use crate::{Error, Result};
use fulgurite_collective::collective::{Collective, ProcessGroup};
use fulgurite_tensor::autograd::{copy, function, storage};

/// Enters `y`, computed from `x`, into the graph, and records its layout if a plan cuts layers over
/// the ranks of `group`. `None`: its layout is known only to the code that calls.
fn enter(
    what: &str,
    layout: Option<Layout>,
    [x, y]: [&Tensor; 2],
    group: &Arc<dyn ProcessGroup>,
    backward: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
) -> Result<Tensor> {
    let Some(plan) = activations::plan_of(group) else {
        return function(&[x], y.clone(), move |_, grad| Ok(vec![Some(backward(grad)?)]));
    };
    let owner = RecordOwner::new();
    let held = owner.clone();
    let y = function(&[x], y.clone(), move |_, grad| {
        let _held = &held;
        Ok(vec![Some(backward(grad)?)])
    })?;
    activations::mark(y, plan.activation(layout, format!("`collectives::{what}`")), &owner)
}

fn apply(
    x: &Tensor,
    how: Redistribute,
    total: impl FnOnce() -> Result<usize>,
    group: &Arc<dyn ProcessGroup>,
) -> Result<Tensor> {
    if group.size() == 1 || how == Redistribute::Keep {
        return Ok(x.clone());
    }
    // The graph takes over the output's memory, and all-reduces work in place.
    let own = move |x: &Tensor| match how {
        Redistribute::Copy | Redistribute::AllReduce => copy(x),
        _ => Ok(x.contiguous()?),
    };
    let (y, redistributed) = how.forward(&own(x)?.detach(), total, group)?;
    let (what, layout) = match how {
        Redistribute::Keep | Redistribute::Copy => ("copy_to", None),
        Redistribute::AllGather(_) => ("all_gather", None),
        Redistribute::AllReduce => ("reduce_from", Some(Layout::Replicate)),
        Redistribute::Gather(_) => ("gather", Some(Layout::Replicate)),
        Redistribute::ReduceScatter(dim) => ("reduce_scatter", Some(Layout::Shard(dim))),
        Redistribute::Split(dim) => ("split", Some(Layout::Shard(dim))),
    };
    enter(what, layout, [x, &y], group, move |grad| redistributed.backward(&own(grad)?))
}

fn none() -> Result<usize> {
    Ok(0)
}

/// Forward: identity. Backward: sums the gradient over the ranks.
///
/// # Errors
/// If a peer fails.
pub fn copy_to(x: &Tensor, group: &Arc<dyn ProcessGroup>) -> Result<Tensor> {
    apply(x, Redistribute::Copy, none, group)
}

/// Forward: sums over the ranks. Backward: identity.
///
/// # Errors
/// If a peer fails.
pub fn reduce_from(x: &Tensor, group: &Arc<dyn ProcessGroup>) -> Result<Tensor> {
    apply(x, Redistribute::AllReduce, none, group)
}

/// Forward: concatenates the ranks' equal parts along `dim` in rank order. Backward: this rank's
/// part of the gradient summed over the ranks.
///
/// # Errors
/// If there is no such dimension, or a peer fails.
pub fn all_gather(x: &Tensor, dim: isize, group: &Arc<dyn ProcessGroup>) -> Result<Tensor> {
    apply(x, Redistribute::AllGather(dim), || whole(x, dim, group), group)
}

/// Forward: this rank's part, along `dim`, of the sum over the ranks. Backward: concatenates the
/// gradient's parts.
///
/// # Errors
/// If there is no such dimension or the ranks do not divide it, or a peer fails.
pub fn reduce_scatter(x: &Tensor, dim: isize, group: &Arc<dyn ProcessGroup>) -> Result<Tensor> {
    divisible(x, dim, group)?;
    apply(x, Redistribute::ReduceScatter(dim), none, group)
}

/// Forward: concatenates the ranks' equal parts along `dim` in rank order. Backward: this rank's
/// part of the gradient, which every rank has whole.
///
/// # Errors
/// If there is no such dimension, or a peer fails.
pub fn gather(x: &Tensor, dim: isize, group: &Arc<dyn ProcessGroup>) -> Result<Tensor> {
    apply(x, Redistribute::Gather(dim), || whole(x, dim, group), group)
}

/// Forward: this rank's part of `x` along `dim`. Backward: concatenates the gradient's parts.
///
/// # Errors
/// If there is no such dimension or the ranks do not divide it, or a peer fails.
pub fn split(x: &Tensor, dim: isize, group: &Arc<dyn ProcessGroup>) -> Result<Tensor> {
    divisible(x, dim, group)?;
    apply(x, Redistribute::Split(dim), none, group)
}

/// Forward: cuts `x` along `split_dim`, sends part `i` to rank `i`, and concatenates the received
/// parts along `concat_dim` in rank order. Backward: the reverse.
///
/// # Errors
/// If there are no such dimensions or the ranks do not divide `split_dim`, or a peer fails.
pub fn all_to_all(
    x: &Tensor,
    split_dim: isize,
    concat_dim: isize,
    group: &Arc<dyn ProcessGroup>,
) -> Result<Tensor> {
    divisible(x, split_dim, group)?;
    let dims = (dimension(x, split_dim)?, dimension(x, concat_dim)?);
    if group.size() == 1 {
        return Ok(x.clone());
    }
    let y = exchange(&x.detach(), dims, &**group)?;
    let ranks = group.clone();
    let layout = Some(Layout::Shard(split_dim));
    let back = (dims.1, dims.0);
    enter("all_to_all", layout, [x, &y], group, move |grad| exchange(grad, back, &*ranks))
}

fn exchange(
    x: &Tensor,
    (split_dim, concat_dim): (usize, usize),
    group: &dyn ProcessGroup,
) -> Result<Tensor> {
    let mut shape = x.dims().to_vec();
    shape[split_dim] /= group.size();
    if x.elem_count() == 0 {
        shape[concat_dim] *= group.size();
        return Ok(Tensor::zeros(shape, x.dtype(), x.device())?);
    }
    let flat = (0..group.size())
        .map(|i| x.narrow(split_dim, i * shape[split_dim], shape[split_dim])?.flatten_all())
        .collect::<candle_core::Result<Vec<_>>>()?;
    let input = storage::cat(&flat, 0)?;
    let output = storage::unset(input.shape(), input.dtype(), input.device())?;
    group.run(Collective::all_to_all(&output, &input))?;
    let count = output.elem_count() / group.size();
    let received = (0..group.size())
        .map(|i| output.narrow(0, i * count, count)?.reshape(shape.as_slice()))
        .collect::<candle_core::Result<Vec<_>>>()?;
    storage::contiguous(&storage::cat(&received, concat_dim)?)
}

fn whole(x: &Tensor, dim: isize, group: &Arc<dyn ProcessGroup>) -> Result<usize> {
    Ok(x.dim(dimension(x, dim)?)? * group.size())
}

fn divisible(x: &Tensor, dim: isize, group: &Arc<dyn ProcessGroup>) -> Result<()> {
    let (size, ranks) = (x.dim(dimension(x, dim)?)?, group.size());
    if size.is_multiple_of(ranks) {
        return Ok(());
    }
    Err(Error::other(format!(
        "dimension {dim} of a tensor of shape {:?} cannot be cut over the {ranks} ranks of `{}`: \
         {size} is not divisible by {ranks}",
        x.dims(),
        group.name()
    )))
}
