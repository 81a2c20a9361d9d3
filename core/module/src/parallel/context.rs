//! Context parallelism: sequences sharded over ranks.

use std::ops::Range;
use std::sync::Arc;

use candle_core::Tensor;

use super::redistribute::dimension;
use crate::{Error, Result};
use fulgurite_collective::collective::{
    AllGather, Collective, ProcessGroup, ReduceOp, ReduceScatter,
};

use fulgurite_tensor::autograd::storage;

/// The ranks of a context-parallel group, which share each sequence.
///
/// A sequence is cut into `2 C` chunks for `C` ranks, and rank `r` holds chunks `r` and
/// `2 C - 1 - r`. Under causal attention late positions see more than early ones; with this
/// assignment every rank has as much work (head-tail balance, as in PyTorch's context parallelism).
///
/// Attention needs the keys and values of the whole sequence. They are **all-gathered**, not passed
/// around a ring. With grouped key and value heads they are small. One collective per layer costs
/// one rendezvous, where a ring costs `C - 1`. Each chunk of queries sees its keys in one piece, in
/// one product without rescaling partial results. Both ways move the same bytes. A ring would hold
/// `2 / C` of the keys and values at a time and could overlap with products, which pays off on
/// networks with their own processors. Backward gathers keys and values again instead of keeping
/// them, and reduce-scatters their gradients.
#[derive(Clone)]
pub struct ContextParallel {
    group: Arc<dyn ProcessGroup>,
}

impl ContextParallel {
    /// Context parallelism over the ranks of `group`; `None` for a single rank.
    pub fn new(group: Arc<dyn ProcessGroup>) -> Option<Self> {
        (group.size() > 1).then_some(Self { group })
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.group.size()
    }

    /// This rank's index in the group.
    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    /// The positions of a sequence of `length` held by `rank`: two ranges, in order.
    fn chunks(&self, rank: usize, length: usize) -> [Range<usize>; 2] {
        let n = length / (2 * self.size());
        [rank, 2 * self.size() - 1 - rank].map(|i| i * n..(i + 1) * n)
    }

    /// The positions in the whole sequence of this rank's `local` positions.
    pub fn positions(&self, local: usize) -> [Range<usize>; 2] {
        self.chunks(self.rank(), local * self.size())
    }

    /// This rank's part of `x` along the sequence dimension `dim`, for input ids, targets and
    /// position ids. Not collective.
    ///
    /// # Errors
    /// If `2 C` does not divide the sequence.
    pub fn shard(&self, x: &Tensor, dim: isize) -> Result<Tensor> {
        let dim = dimension(x, dim)?;
        let (length, parts) = (x.dim(dim)?, 2 * self.size());
        if !length.is_multiple_of(parts) {
            return Err(Error::other(format!(
                "context parallelism cannot cut a sequence of {length} positions: each of the {} \
                 ranks of `{}` takes two chunks of equal length; use a length that is a multiple \
                 of {parts}",
                self.size(),
                self.group.name()
            )));
        }
        let chunks = self.chunks(self.rank(), length);
        let parts = chunks
            .iter()
            .map(|chunk| x.narrow(dim, chunk.start, chunk.len()))
            .collect::<candle_core::Result<Vec<_>>>()?;
        Ok(Tensor::cat(&parts, dim)?)
    }

    /// Gathers each of `parts` along dimension 1, in the order of positions. Collective; outside
    /// the graph.
    pub fn gather(&self, parts: &[&Tensor]) -> Result<Vec<Tensor>> {
        let gathers = parts
            .iter()
            .map(|x| {
                let input = storage::contiguous(x)?.flatten_all()?;
                let n = input.elem_count() * self.size();
                let output = storage::unset(n, x.dtype(), x.device())?;
                Ok(AllGather::even(&output, &input, self.size()))
            })
            .collect::<Result<Vec<_>>>()?;
        self.group.run(Collective::all_gather_into(gathers.clone()))?;
        gathers.iter().zip(parts).map(|(gather, x)| self.in_order(&gather.output, x)).collect()
    }

    /// Reorders `flat`, the ranks' tensors in the shape of `x` one after the other, by position.
    fn in_order(&self, flat: &Tensor, x: &Tensor) -> Result<Tensor> {
        let half = x.dim(1)? / 2;
        let ranks = flat
            .chunk(self.size(), 0)?
            .into_iter()
            .map(|part| part.reshape(x.shape()))
            .collect::<candle_core::Result<Vec<_>>>()?;
        let heads = ranks.iter().map(|part| part.narrow(1, 0, half));
        let tails = ranks.iter().rev().map(|part| part.narrow(1, half, half));
        storage::cat(&heads.chain(tails).collect::<candle_core::Result<Vec<_>>>()?, 1)
    }

    /// This rank's part, along dimension 1, of each whole tensor summed over the ranks. Collective;
    /// outside the graph.
    pub fn reduce_scatter(&self, wholes: &[&Tensor]) -> Result<Vec<Tensor>> {
        let size = self.size();
        let mut shapes = Vec::with_capacity(wholes.len());
        let parts = wholes
            .iter()
            .map(|x| {
                let length = x.dim(1)?;
                let mut chunks = Vec::with_capacity(2 * size);
                for rank in 0..size {
                    let [head, tail] = self
                        .chunks(rank, length)
                        .map(|chunk| x.narrow(1, chunk.start, chunk.len()));
                    let own = storage::cat(&[head?, tail?], 1)?;
                    chunks.push(storage::contiguous(&own)?.flatten_all()?);
                }
                let input = storage::cat(&chunks, 0)?;
                let mut shape = x.dims().to_vec();
                shape[1] = length / size;
                shapes.push(shape);
                let n = input.elem_count() / size;
                let output = storage::unset(n, x.dtype(), x.device())?;
                Ok(ReduceScatter::even(&output, &input, size))
            })
            .collect::<Result<Vec<_>>>()?;
        self.group.run(Collective::reduce_scatter(parts.clone(), ReduceOp::Sum))?;
        let outputs = parts.into_iter().map(|part| part.output).zip(shapes);
        outputs.map(|(output, shape)| Ok(output.reshape(shape)?)).collect()
    }
}

impl std::fmt::Debug for ContextParallel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ContextParallel(rank {} of {})", self.rank(), self.size())
    }
}
