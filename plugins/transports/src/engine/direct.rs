//! Collectives that read and write the tensors of other ranks directly, without a copy in between.
#![allow(unsafe_code)] // Reads and writes tensors of other ranks; see `Direct`.

use std::ops::Range;

use candle_core::{DType, Tensor};
use fulgurite_engine::autograd::storage::{with_bytes, with_bytes_mut};
use fulgurite_engine::collective::ReduceOp;
use fulgurite_error::Result;

use super::plan::{Collective, bytes, is_at};
use super::reduce::reduce;
use super::rendezvous::Rendezvous;
use super::wait::Failure;
use crate::memory::LINE;

/// Smaller collectives always go through the slots. This avoids look-ups, and saves a barrier if
/// the tensors turn out to be unreachable.
const DIRECT_BYTES: usize = 16 << 10;

/// Bytes reduced at a time. Blocks of a few sources stay in the L1 cache together (16 KiB at a time
/// took 1.4 times as long).
const BLOCK_BYTES: usize = 4 << 10;

/// A collective as transfers between tensors.
///
/// Ranks execute their transfers between two barriers. Before the first barrier, the owners have
/// written their tensors. After the second, no rank accesses another rank's tensors.
///
/// In between, at most one rank writes a byte of a tensor, and then no other rank reads it. A rank
/// reads and writes its own part of an all-reduced tensor. Gathered or scattered tensors are only
/// read. An owner does not access its tensors while the collective runs, as
/// [`Work`](fulgurite_engine::collective::Work) demands.
///
/// The collective holds the tensors, so their memory stays valid. A rank whose collective fails may
/// leave it before the others, and therefore never frees the tensors.
pub(crate) struct Direct {
    /// Tensors that other ranks read or write, in the same order on all ranks.
    exposed: Vec<Tensor>,
    transfers: Vec<Transfer>,
}

enum Transfer {
    /// Copies bytes of an exposed tensor of a rank into this rank's `to`, from byte `at` on.
    Copy { rank: usize, exposed: usize, from: Range<usize>, to: Tensor, at: usize },
    /// Reduces a range of the exposed tensors of all ranks.
    Reduce { exposed: usize, range: Range<usize>, op: ReduceOp, into: ReductionTarget },
}

/// The target of a reduction.
enum ReductionTarget {
    /// The reduced tensors of every rank.
    InPlace,
    /// A tensor of this rank.
    Tensor(Tensor),
}

/// Memory of a tensor of any rank, mapped by this one.
#[derive(Clone, Copy)]
struct PeerMemory {
    start: *mut u8,
    len: usize,
}

impl Direct {
    /// Plans the collective as transfers, if its kind and size make them faster. All ranks get the
    /// same answer.
    pub(crate) fn of(collective: &Collective, rank: usize, size: usize) -> Result<Option<Self>> {
        let (mut exposed, mut transfers) = (Vec::new(), Vec::new());
        let total = match collective {
            Collective::AllReduce(tensor, op) => {
                let total = bytes(tensor);
                let piece = total.div_ceil(size).next_multiple_of(LINE);
                let range = (rank * piece).min(total)..((rank + 1) * piece).min(total);
                exposed.push(tensor.clone());
                transfers.push(Transfer::Reduce {
                    exposed: 0,
                    range,
                    op: *op,
                    into: ReductionTarget::InPlace,
                });
                total
            }
            Collective::ReduceScatter(parts, op) => {
                for (i, part) in parts.iter().enumerate() {
                    let element = part.input.dtype().size_in_bytes();
                    let start = part.counts[..rank].iter().sum::<usize>() * element;
                    let range = start..start + part.counts[rank] * element;
                    let into = ReductionTarget::Tensor(part.output.clone());
                    exposed.push(part.input.clone());
                    transfers.push(Transfer::Reduce { exposed: i, range, op: *op, into });
                }
                parts.iter().map(|part| bytes(&part.input)).sum()
            }
            Collective::AllGather(parts) => {
                for (i, part) in parts.iter().enumerate() {
                    let element = part.input.dtype().size_in_bytes();
                    exposed.push(part.input.clone());
                    let mut at = 0;
                    for (peer, count) in part.counts.iter().enumerate() {
                        let len = count * element;
                        let there = peer == rank && is_at(&part.input, &part.output, at)?;
                        if len > 0 && !there {
                            let to = part.output.clone();
                            transfers.push(Transfer::Copy {
                                rank: peer,
                                exposed: i,
                                from: 0..len,
                                to,
                                at,
                            });
                        }
                        at += len;
                    }
                }
                parts.iter().map(|part| bytes(&part.output)).sum()
            }
            Collective::Broadcast(tensor, src) => {
                if rank == *src {
                    exposed.push(tensor.clone());
                } else {
                    let (from, to) = (0..bytes(tensor), tensor.clone());
                    transfers.push(Transfer::Copy { rank: *src, exposed: 0, from, to, at: 0 });
                }
                bytes(tensor)
            }
            Collective::AllToAll(exchange) => {
                exposed.push(exchange.input.clone());
                let element = exchange.input.dtype().size_in_bytes();
                for (peer, part) in exchange.received(rank, size).into_iter().enumerate() {
                    let theirs = exchange.sent(peer, size).swap_remove(rank);
                    if !part.is_empty() {
                        transfers.push(Transfer::Copy {
                            rank: peer,
                            exposed: 0,
                            from: theirs.start * element..theirs.end * element,
                            to: exchange.output.clone(),
                            at: part.start * element,
                        });
                    }
                }
                // Equal on all ranks, whatever each of them sends.
                exchange.longest(size) * size * element
            }
            Collective::Barrier | Collective::Split(_) => 0,
        };
        Ok((total >= DIRECT_BYTES).then_some(Self { exposed, transfers }))
    }

    /// Returns the offsets of the exposed tensors for the other ranks. Returns `None` if they
    /// cannot reach all tensors, or if this rank cannot execute its transfers in place.
    pub(crate) fn exposed_offsets(&self, rendezvous: &dyn Rendezvous) -> Result<Option<Vec<u64>>> {
        let own = self.transfers.iter().filter_map(|m| match m {
            Transfer::Copy { to, .. }
            | Transfer::Reduce { into: ReductionTarget::Tensor(to), .. } => Some(to),
            Transfer::Reduce { .. } => None,
        });
        if !self.exposed.iter().chain(own).all(|tensor| tensor.device().is_cpu()) {
            return Ok(None);
        }
        if self.overwrites_exposed()? {
            return Ok(None);
        }
        let offset = |tensor: &Tensor| match tensor.elem_count() {
            0 => Ok(Some(0)),
            _ => with_bytes(tensor, |bytes| rendezvous.offset_of(bytes)),
        };
        self.exposed.iter().map(offset).collect()
    }

    /// Whether a copy overwrites an exposed tensor, as in an in-place all-to-all.
    fn overwrites_exposed(&self) -> Result<bool> {
        let range = |tensor: &Tensor| match tensor.elem_count() {
            0 => Ok(0..0),
            _ => with_bytes(tensor, |bytes| bytes.as_ptr_range().start.addr())
                .map(|start| start..start + bytes(tensor)),
        };
        let exposed = self.exposed.iter().map(range).collect::<Result<Vec<_>>>()?;
        for step in &self.transfers {
            if let Transfer::Copy { from, to, at, .. } = step {
                let start = range(to)?.start + at;
                let written = start..start + from.len();
                if exposed.iter().any(|r| r.start < written.end && written.start < r.end) {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Executes the transfers. `reach` returns the memory of a rank's exposed tensor, given the
    /// rank, the tensor's index and the accessible length.
    pub(crate) fn execute(
        &self,
        size: usize,
        reach: impl Fn(usize, usize, usize) -> Result<*mut u8>,
    ) -> Result<(), Failure> {
        for step in &self.transfers {
            match step {
                Transfer::Copy { rank, exposed, from, to, at } => {
                    let source = reach(*rank, *exposed, from.end)?;
                    // SAFETY: mapped and that long; all ranks only read it (see `Direct`).
                    let source = unsafe {
                        std::slice::from_raw_parts(source.add(from.start).cast_const(), from.len())
                    };
                    with_bytes_mut(to, |to| to[*at..*at + from.len()].copy_from_slice(source))?;
                }
                Transfer::Reduce { exposed, range, op, into } => {
                    let ranks = (0..size)
                        .map(|rank| {
                            let start = reach(rank, *exposed, range.end)?;
                            // SAFETY: mapped and at least `range.end` long.
                            let start = unsafe { start.add(range.start) };
                            Ok(PeerMemory { start, len: range.len() })
                        })
                        .collect::<Result<Vec<_>>>()?;
                    let dtype = self.exposed[*exposed].dtype();
                    match into {
                        ReductionTarget::InPlace => reduce_into(dtype, *op, &ranks, &ranks),
                        ReductionTarget::Tensor(tensor) => {
                            // The lock on the tensor is not kept, as the tensor may be a view of an
                            // exposed one.
                            let to = with_bytes_mut(tensor, |bytes| PeerMemory {
                                start: bytes.as_mut_ptr(),
                                len: bytes.len(),
                            })?;
                            reduce_into(dtype, *op, &ranks, &[to]);
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

/// Reduces `sources`, one of each rank in rank order, into each of `targets`, which may be the
/// sources themselves. All have the same length.
fn reduce_into(dtype: DType, op: ReduceOp, sources: &[PeerMemory], targets: &[PeerMemory]) {
    let mut block = vec![0u64; BLOCK_BYTES / size_of::<u64>()];
    let block: &mut [u8] = bytemuck::cast_slice_mut(&mut block);
    let len = sources.first().map_or(0, |source| source.len);
    for start in (0..len).step_by(BLOCK_BYTES) {
        let block = &mut block[..BLOCK_BYTES.min(len - start)];
        let bytes = |reached: &PeerMemory| {
            // SAFETY: mapped and `len` long; only this rank writes these bytes (see `Direct`), in
            // the copies below.
            unsafe {
                std::slice::from_raw_parts(reached.start.add(start).cast_const(), block.len())
            }
        };
        let sources: Vec<&[u8]> = sources.iter().map(bytes).collect();
        reduce(dtype, op, &sources, block);
        for target in targets {
            assert_eq!(target.len, len, "targets are as long as sources");
            // SAFETY: as above; the slices of the sources are no longer used.
            unsafe {
                std::ptr::copy_nonoverlapping(block.as_ptr(), target.start.add(start), block.len());
            }
        }
    }
}
