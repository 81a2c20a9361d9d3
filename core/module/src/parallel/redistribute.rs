//! Redistribution of activations from one layout to another, and of their gradients back.

use std::sync::Arc;

use candle_core::{DType, Tensor};

use super::Layout;
use crate::{Error, Result};
use fulgurite_collective::collective::{
    AllGather, Collective, ProcessGroup, ReduceOp, ReduceScatter,
};
use fulgurite_collective::shard::chunk;
use fulgurite_tensor::autograd::{copy, storage};

/// A redistribution of an activation at the edge of a layer, and of its gradient in backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Redistribute {
    /// Identity. Backward: identity.
    Keep,
    /// Identity, before each rank computes a part. Backward: all-reduce.
    Copy,
    /// All-reduce of partial sums. Backward: identity.
    AllReduce,
    /// All-gather along a dimension, before each rank computes a part. Backward: reduce-scatter.
    AllGather(isize),
    /// Reduce-scatter of partial sums along a dimension. Backward: all-gather.
    ReduceScatter(isize),
    /// All-gather along a dimension, before all ranks compute the same. Backward: this rank's
    /// chunk.
    Gather(isize),
    /// This rank's chunk of a dimension. Backward: all-gather.
    Split(isize),
}

/// A finished redistribution and cast, kept to take the gradient back.
#[derive(Clone)]
pub struct Redistributed {
    /// `None` if nothing is communicated.
    group: Option<Arc<dyn ProcessGroup>>,
    how: Redistribute,
    /// Size of the whole along the dimension.
    total: usize,
    /// The activation's dtype, to which the gradient is cast. `None`: not cast.
    dtype: Option<DType>,
}

/// The dimension index of `dim`, which may count from the end.
pub(super) fn dimension(x: &Tensor, dim: isize) -> Result<usize> {
    let place = if dim < 0 { x.rank().checked_add_signed(dim) } else { Some(dim.unsigned_abs()) };
    place.filter(|&d| d < x.rank()).ok_or_else(|| {
        Error::other(format!("a tensor of shape {:?} has no dimension {dim}", x.dims()))
    })
}

impl Redistribute {
    /// The redistribution of a layer's input from its layout between layers to the layer's internal
    /// layout. `None` if one collective is not enough. `Partial` inside means that the values are
    /// whole, and each rank computes a partial sum of their gradient.
    pub(crate) fn input(outside: Layout, inside: Layout) -> Option<Self> {
        Some(match (outside, inside) {
            (Layout::Replicate, Layout::Partial) => Self::Copy,
            (Layout::Shard(dim), Layout::Partial) => Self::AllGather(dim),
            _ => return Self::between(outside, inside),
        })
    }

    /// The redistribution of a layer's output from the layer's internal layout to the layout
    /// between layers. `None` if one collective is not enough. `Partial` inside means that each
    /// rank computes a partial sum.
    pub(crate) fn output(inside: Layout, outside: Layout) -> Option<Self> {
        Some(match (inside, outside) {
            (Layout::Partial, Layout::Replicate) => Self::AllReduce,
            (Layout::Partial, Layout::Shard(dim)) => Self::ReduceScatter(dim),
            _ => return Self::between(inside, outside),
        })
    }

    /// The redistribution between two layouts that the gradient has too.
    fn between(from: Layout, to: Layout) -> Option<Self> {
        match (from, to) {
            _ if from == to => Some(Self::Keep),
            (Layout::Shard(dim), Layout::Replicate) => Some(Self::Gather(dim)),
            (Layout::Replicate, Layout::Shard(dim)) => Some(Self::Split(dim)),
            _ => None,
        }
    }

    /// Redistributes `x`, which is outside the graph and may be overwritten. `total` is the whole
    /// size of the gathered dimension. Collective.
    pub(crate) fn forward(
        self,
        x: &Tensor,
        total: impl FnOnce() -> Result<usize>,
        group: &Arc<dyn ProcessGroup>,
    ) -> Result<(Tensor, Redistributed)> {
        let redistributed =
            |total| Redistributed { group: Some(group.clone()), how: self, total, dtype: None };
        let whole = |dim| Ok::<_, Error>(x.dim(dimension(x, dim)?)?);
        Ok(match self {
            Self::Keep | Self::Copy => (x.clone(), redistributed(0)),
            Self::AllReduce => (all_reduce(x, &**group)?, redistributed(0)),
            Self::AllGather(dim) | Self::Gather(dim) => {
                let total = total()?;
                (all_gather(x, dim, total, &**group)?, redistributed(total))
            }
            Self::ReduceScatter(dim) => {
                (reduce_scatter(x, dim, &**group)?, redistributed(whole(dim)?))
            }
            Self::Split(dim) => (split(x, dim, &**group)?, redistributed(whole(dim)?)),
        })
    }
}

impl Redistributed {
    /// No redistribution.
    pub fn none() -> Self {
        Self { group: None, how: Redistribute::Keep, total: 0, dtype: None }
    }

    /// The same for an activation that was in `dtype` before.
    pub(super) fn of_dtype(self, dtype: DType) -> Self {
        Self { dtype: Some(dtype), ..self }
    }

    /// Redistributes the gradient back, and casts it to the activation's dtype; `grad` may be
    /// overwritten. Collective if the gradient is communicated, which may be the case even if the
    /// activation was not.
    ///
    /// # Errors
    /// If a peer fails.
    pub fn backward(&self, grad: &Tensor) -> Result<Tensor> {
        let grad = self.redistribute_back(grad)?;
        match self.dtype {
            Some(dtype) if grad.dtype() != dtype => storage::cast(&grad, dtype),
            _ => Ok(grad),
        }
    }

    fn redistribute_back(&self, grad: &Tensor) -> Result<Tensor> {
        let Some(group) = &self.group else { return Ok(grad.clone()) };
        match self.how {
            Redistribute::Keep | Redistribute::AllReduce => Ok(grad.clone()),
            Redistribute::Copy => all_reduce(grad, &**group),
            Redistribute::AllGather(dim) => reduce_scatter(grad, dim, &**group),
            Redistribute::ReduceScatter(dim) | Redistribute::Split(dim) => {
                all_gather(grad, dim, self.total, &**group)
            }
            Redistribute::Gather(dim) => split(grad, dim, &**group),
        }
    }
}

/// Sums over the ranks, in place if `x` is contiguous.
fn all_reduce(x: &Tensor, group: &dyn ProcessGroup) -> Result<Tensor> {
    let sum = storage::contiguous(x)?;
    group.run(Collective::all_reduce(&sum, ReduceOp::Sum))?;
    Ok(sum)
}

/// Concatenates the ranks' chunks (cut as by `torch.chunk`).
fn all_gather(x: &Tensor, dim: isize, total: usize, group: &dyn ProcessGroup) -> Result<Tensor> {
    let dim = dimension(x, dim)?;
    let sizes: Vec<usize> = (0..group.size()).map(|r| chunk(total, group.size(), r).1).collect();
    if x.dim(dim)? != sizes[group.rank()] {
        return Err(group.error(
            "all_gather",
            format!(
                "dimension {dim} of {:?} should be a chunk of {} of {total} entries; is the tensor \
                 sharded as the layer expects?",
                x.dims(),
                sizes[group.rank()]
            ),
        ));
    }
    let (outer, inner) = around(x, dim);
    let counts: Vec<usize> = sizes.iter().map(|n| outer * n * inner).collect();
    let input = storage::contiguous(x)?.flatten_all()?;
    let flat = storage::unset(outer * total * inner, x.dtype(), x.device())?;
    let part = AllGather { input, output: flat.clone(), counts: counts.clone() };
    group.run(Collective::all_gather_into(vec![part]))?;
    let mut dims = x.dims().to_vec();
    if outer == 1 || flat.elem_count() == 0 {
        dims[dim] = total;
        return Ok(flat.reshape(dims)?);
    }
    let mut start = 0;
    let mut parts = Vec::with_capacity(sizes.len());
    for (size, count) in sizes.into_iter().zip(counts) {
        dims[dim] = size;
        if count > 0 {
            parts.push(flat.narrow(0, start, count)?.reshape(dims.as_slice())?);
        }
        start += count;
    }
    storage::cat(&parts, dim)
}

/// This rank's chunk of the sum over the ranks.
fn reduce_scatter(x: &Tensor, dim: isize, group: &dyn ProcessGroup) -> Result<Tensor> {
    let dim = dimension(x, dim)?;
    let total = x.dim(dim)?;
    let (outer, inner) = around(x, dim);
    let chunks: Vec<(usize, usize)> =
        (0..group.size()).map(|r| chunk(total, group.size(), r)).collect();
    let counts: Vec<usize> = chunks.iter().map(|(_, n)| outer * n * inner).collect();
    let x = x.detach();
    let input = if outer == 1 || x.elem_count() == 0 {
        storage::contiguous(&x)?.flatten_all()?
    } else {
        let parts = chunks
            .iter()
            .filter(|(_, n)| *n > 0)
            .map(|&(start, n)| Ok(storage::contiguous(&x.narrow(dim, start, n)?)?.flatten_all()?))
            .collect::<Result<Vec<_>>>()?;
        storage::cat(&parts, 0)?
    };
    let mine = storage::unset(counts[group.rank()], x.dtype(), x.device())?;
    let part = ReduceScatter { input, output: mine.clone(), counts };
    group.run(Collective::reduce_scatter(vec![part], ReduceOp::Sum))?;
    let mut dims = x.dims().to_vec();
    dims[dim] = chunks[group.rank()].1;
    Ok(mine.reshape(dims)?)
}

/// Copies this rank's chunk. A graph takes over the copy's storage, and `x` keeps its own.
fn split(x: &Tensor, dim: isize, group: &dyn ProcessGroup) -> Result<Tensor> {
    let dim = dimension(x, dim)?;
    let (start, size) = chunk(x.dim(dim)?, group.size(), group.rank());
    let part = x.detach().narrow(dim, start, size)?;
    // candle cannot copy an empty view that begins past the end.
    if part.elem_count() == 0 { Ok(part.zeros_like()?) } else { copy(&part) }
}

/// Number of entries before and after a dimension.
fn around(x: &Tensor, dim: usize) -> (usize, usize) {
    let dims = x.dims();
    (dims[..dim].iter().product(), dims[dim + 1..].iter().product())
}
