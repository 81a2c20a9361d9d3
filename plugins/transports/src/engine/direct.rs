//! Collectives whose tensors all ranks reach where they are: nothing is copied in between.
#![allow(unsafe_code)] // Reads and writes tensors of other ranks; see `Direct`.

use std::ops::Range;

use candle_core::{DType, Tensor};
use fulgurite_core::Result;
use fulgurite_core::autograd::storage::{with_bytes, with_bytes_mut};
use fulgurite_core::collective::ReduceOp;

use super::plan::{Collective, bytes, is_at};
use super::reduce::reduce;
use super::rendezvous::Rendezvous;
use super::wait::Failure;
use crate::memory::LINE;

/// Collectives of fewer bytes go through the slots at once. That needs no look-ups, and one barrier
/// less than a direct collective whose tensors turn out not to be reachable.
const DIRECT_BYTES: usize = 16 << 10;

/// Bytes that are reduced at a time: with those of a few sources they stay in the first-level cache (16
/// KiB at a time took 1.4 times as long).
const BLOCK_BYTES: usize = 4 << 10;

/// A collective as transfers between tensors.
///
/// Ranks carry out their transfers between two barriers. Before the first, the owners of the tensors
/// have written them; after the second, no rank touches another rank's tensors. In between, one rank
/// at most writes a byte of a tensor, and then no other rank reads it: a rank reads and writes its own
/// part of an all-reduced tensor, and tensors that are gathered or scattered are only read. The owner
/// does not touch its tensors while the collective runs, as
/// [`Work`](fulgurite_core::collective::Work) demands. The collective holds the tensors, so their
/// memory stays; a rank whose collective fails may leave it before the others do, and so never frees
/// them.
pub(crate) struct Direct {
    /// Tensors that other ranks read or write, in an order that they know.
    shown: Vec<Tensor>,
    transfers: Vec<Transfer>,
}

enum Transfer {
    /// From the bytes of a rank's shown tensor into this rank's `to`, from byte `at` on.
    Copy { rank: usize, shown: usize, from: Range<usize>, to: Tensor, at: usize },
    /// The bytes of all ranks' shown tensors, reduced.
    Reduce { shown: usize, range: Range<usize>, op: ReduceOp, into: Target },
}

/// Where a reduction goes.
enum Target {
    /// Where it came from, on every rank.
    Everywhere,
    /// The whole of a tensor of this rank.
    Own(Tensor),
}

/// A reachable tensor of another rank, or of this one.
#[derive(Clone, Copy)]
struct Reached {
    start: *mut u8,
    len: usize,
}

impl Direct {
    /// The collective as transfers, if it is of a kind and size that gains by it: the same on all ranks.
    pub(crate) fn of(collective: &Collective, rank: usize, size: usize) -> Result<Option<Self>> {
        let (mut shown, mut transfers) = (Vec::new(), Vec::new());
        let total = match collective {
            Collective::AllReduce(tensor, op) => {
                let total = bytes(tensor);
                let piece = total.div_ceil(size).next_multiple_of(LINE);
                let range = (rank * piece).min(total)..((rank + 1) * piece).min(total);
                shown.push(tensor.clone());
                transfers.push(Transfer::Reduce {
                    shown: 0,
                    range,
                    op: *op,
                    into: Target::Everywhere,
                });
                total
            }
            Collective::ReduceScatter(parts, op) => {
                for (i, part) in parts.iter().enumerate() {
                    let element = part.input.dtype().size_in_bytes();
                    let start = part.counts[..rank].iter().sum::<usize>() * element;
                    let range = start..start + part.counts[rank] * element;
                    let into = Target::Own(part.output.clone());
                    shown.push(part.input.clone());
                    transfers.push(Transfer::Reduce { shown: i, range, op: *op, into });
                }
                parts.iter().map(|part| bytes(&part.input)).sum()
            }
            Collective::AllGather(parts) => {
                for (i, part) in parts.iter().enumerate() {
                    let element = part.input.dtype().size_in_bytes();
                    shown.push(part.input.clone());
                    let mut at = 0;
                    for (peer, count) in part.counts.iter().enumerate() {
                        let len = count * element;
                        let there = peer == rank && is_at(&part.input, &part.output, at)?;
                        if len > 0 && !there {
                            let to = part.output.clone();
                            transfers.push(Transfer::Copy {
                                rank: peer,
                                shown: i,
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
                    shown.push(tensor.clone());
                } else {
                    let (from, to) = (0..bytes(tensor), tensor.clone());
                    transfers.push(Transfer::Copy { rank: *src, shown: 0, from, to, at: 0 });
                }
                bytes(tensor)
            }
            Collective::AllToAll { output, input } => {
                shown.push(input.clone());
                let part = bytes(input) / size;
                for peer in 0..size {
                    let (from, to) = (rank * part..(rank + 1) * part, output.clone());
                    transfers.push(Transfer::Copy {
                        rank: peer,
                        shown: 0,
                        from,
                        to,
                        at: peer * part,
                    });
                }
                bytes(input)
            }
            Collective::Barrier | Collective::Split(_) => 0,
        };
        Ok((total >= DIRECT_BYTES).then_some(Self { shown, transfers }))
    }

    /// The offsets of the shown tensors, for the other ranks; none if they cannot reach all of them,
    /// or if this rank cannot carry out its transfers in place.
    pub(crate) fn shown_offsets(&self, rendezvous: &dyn Rendezvous) -> Result<Option<Vec<u64>>> {
        let own = self.transfers.iter().filter_map(|m| match m {
            Transfer::Copy { to, .. } | Transfer::Reduce { into: Target::Own(to), .. } => Some(to),
            Transfer::Reduce { .. } => None,
        });
        if !self.shown.iter().chain(own).all(|tensor| tensor.device().is_cpu()) {
            return Ok(None);
        }
        if self.overwrites_shown()? {
            return Ok(None);
        }
        let offset = |tensor: &Tensor| match tensor.elem_count() {
            0 => Ok(Some(0)),
            _ => with_bytes(tensor, |bytes| rendezvous.offset_of(bytes)),
        };
        self.shown.iter().map(offset).collect()
    }

    /// Whether a copy goes to where another rank reads, as an all-to-all in place does.
    fn overwrites_shown(&self) -> Result<bool> {
        let range = |tensor: &Tensor| match tensor.elem_count() {
            0 => Ok(0..0),
            _ => with_bytes(tensor, |bytes| bytes.as_ptr_range().start.addr())
                .map(|start| start..start + bytes(tensor)),
        };
        let shown = self.shown.iter().map(range).collect::<Result<Vec<_>>>()?;
        for step in &self.transfers {
            if let Transfer::Copy { from, to, at, .. } = step {
                let start = range(to)?.start + at;
                let written = start..start + from.len();
                if shown.iter().any(|r| r.start < written.end && written.start < r.end) {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Carries out the transfers. `reach` finds the memory of a rank's shown tensor: its length is that
    /// of this rank's shown tensor, or for tensors that are gathered what the transfer names.
    pub(crate) fn carry_out(
        &self,
        size: usize,
        reach: impl Fn(usize, usize, usize) -> Result<*mut u8>,
    ) -> Result<(), Failure> {
        for step in &self.transfers {
            match step {
                Transfer::Copy { rank, shown, from, to, at } => {
                    let source = reach(*rank, *shown, from.end)?;
                    // SAFETY: reachable and that long; only read by anyone (see `Direct`).
                    let source = unsafe {
                        std::slice::from_raw_parts(source.add(from.start).cast_const(), from.len())
                    };
                    with_bytes_mut(to, |to| to[*at..*at + from.len()].copy_from_slice(source))?;
                }
                Transfer::Reduce { shown, range, op, into } => {
                    let ranks = (0..size)
                        .map(|rank| {
                            let start = reach(rank, *shown, range.end)?;
                            // SAFETY: reachable and at least `range.end` long.
                            let start = unsafe { start.add(range.start) };
                            Ok(Reached { start, len: range.len() })
                        })
                        .collect::<Result<Vec<_>>>()?;
                    let dtype = self.shown[*shown].dtype();
                    match into {
                        Target::Everywhere => reduce_into(dtype, *op, &ranks, &ranks),
                        Target::Own(tensor) => {
                            // No lock stays on the tensor: it may be a view of a shown one.
                            let to = with_bytes_mut(tensor, |bytes| Reached {
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

/// Reduces `sources`, one a rank and in rank order, into all of `targets`, which may be the sources
/// (or parts of them at the same places). All have the same length.
fn reduce_into(dtype: DType, op: ReduceOp, sources: &[Reached], targets: &[Reached]) {
    let mut block = vec![0u64; BLOCK_BYTES / size_of::<u64>()];
    let block: &mut [u8] = bytemuck::cast_slice_mut(&mut block);
    let len = sources.first().map_or(0, |source| source.len);
    for start in (0..len).step_by(BLOCK_BYTES) {
        let block = &mut block[..BLOCK_BYTES.min(len - start)];
        let bytes = |reached: &Reached| {
            // SAFETY: reachable and `len` long; until the copies below nobody writes these bytes,
            // which are this rank's alone to write (see `Direct`).
            unsafe {
                std::slice::from_raw_parts(reached.start.add(start).cast_const(), block.len())
            }
        };
        let sources: Vec<&[u8]> = sources.iter().map(bytes).collect();
        reduce(dtype, op, &sources, block);
        for target in targets {
            assert_eq!(target.len, len, "targets are as long as sources");
            // SAFETY: as above, and the slices of the sources are used no more.
            unsafe {
                std::ptr::copy_nonoverlapping(block.as_ptr(), target.start.add(start), block.len());
            }
        }
    }
}
