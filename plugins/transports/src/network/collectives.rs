//! Collectives as rounds of messages.

use std::ops::Range;

use fulgurite_engine::collective::ReduceOp;

use super::memory::{Memory, Scratch};
use super::worker::Operation;
use crate::engine::{Buffer, Collective, Failure, Stream, bytes};

/// Limit for an all-reduce in one round instead of two: bytes of all members together, which all go
/// to all members.
const SMALL_REDUCTION: usize = 64 << 10;
/// Limit in bytes for a broadcast in one round. A larger one is cut into parts that the members
/// send on.
const SMALL_BROADCAST: usize = 256 << 10;
/// Minimum bytes that a member gets from another in one round of a reduction.
const MIN_CHUNK: usize = 16 << 10;
/// Chunks are cut at cache lines.
const LINE: usize = crate::memory::LINE;

/// Messages of one round. Messages to one member are in the order in which it receives them.
#[derive(Default)]
pub(super) struct Round {
    pub(super) sends: Vec<(usize, Memory)>,
    pub(super) receives: Vec<(usize, Memory)>,
}

/// Runs a collective.
pub(super) fn run(
    operation: &mut Operation<'_>,
    collective: &Collective,
    scratch: &mut Scratch,
) -> Result<(), Failure> {
    let mut buffers = Vec::new();
    let result = run_on(operation, collective, scratch, &mut buffers)
        .and_then(|()| buffers.iter().try_for_each(|buffer: &Buffer| Ok(buffer.finish()?)));
    if result.is_err() {
        // A network may still access the host copies of tensors.
        std::mem::forget(buffers);
    }
    result
}

/// Runs a collective. Its tensors, or their host copies, become `buffers` before any exchange.
fn run_on(
    operation: &mut Operation<'_>,
    collective: &Collective,
    scratch: &mut Scratch,
    buffers: &mut Vec<Buffer>,
) -> Result<(), Failure> {
    let (rank, size) = (operation.rank(), operation.size());
    match collective {
        Collective::Barrier | Collective::Split(_) => operation.exchange(Round::default())?,
        Collective::AllGather(parts) => {
            let mut round = Round::default();
            for part in parts {
                let (input, output) = (Buffer::read(&part.input)?, Buffer::written(&part.output)?);
                let (from, to) = (Memory::of(&input.host)?, Memory::of(&output.host)?);
                let element = part.input.dtype().size_in_bytes();
                let mut start = 0;
                for (peer, count) in part.counts.iter().enumerate() {
                    let theirs = to.part(start..start + count * element);
                    start += count * element;
                    if peer == rank {
                        theirs.copy_from(from);
                    } else {
                        round.sends.push((peer, from));
                        round.receives.push((peer, theirs));
                    }
                }
                buffers.extend([input, output]);
            }
            operation.exchange(round)?;
        }
        Collective::AllToAll(exchange) => {
            let input = Buffer::read(&exchange.input)?;
            let output = Buffer::written(&exchange.output)?;
            let (from, to) = (Memory::of(&input.host)?, Memory::of(&output.host)?);
            let element = exchange.input.dtype().size_in_bytes();
            let parts = |memory: Memory, parts: Vec<Range<usize>>| -> Vec<_> {
                let part =
                    |part: Range<usize>| memory.part(part.start * element..part.end * element);
                parts.into_iter().map(part).enumerate().collect()
            };
            let mut sends = parts(from, exchange.sent(rank, size));
            let mut receives = parts(to, exchange.received(rank, size));
            buffers.extend([input, output]);
            let ((_, own_from), (_, own_to)) = (sends.remove(rank), receives.remove(rank));
            own_to.copy_from(own_from);
            operation.exchange(Round { sends, receives })?;
        }
        Collective::Broadcast(tensor, src) => {
            let buffer = match rank == *src {
                true => Buffer::read(tensor)?,
                false => Buffer::written(tensor)?,
            };
            let memory = Memory::of(&buffer.host)?;
            buffers.push(buffer);
            broadcast(operation, memory, *src)?;
        }
        Collective::AllReduce(tensor, op) => {
            let buffer = Buffer::updated(tensor)?;
            let memory = Memory::of(&buffer.host)?;
            buffers.push(buffer);
            let dtype = tensor.dtype();
            let total = bytes(tensor);
            if total * size <= SMALL_REDUCTION {
                reduce_at_once(operation, memory, scratch, |operation, sources, out| {
                    operation.reduce(dtype, *op, sources, out);
                })?;
            } else {
                let piece = total.div_ceil(size).next_multiple_of(LINE);
                let part = |peer: usize| {
                    let start = (peer * piece).min(total);
                    Stream::of(0, start, piece.min(total - start))
                };
                let parts: Vec<Stream> = (0..size).map(part).collect();
                let reduction = Reduction {
                    output: parts[rank].clone(),
                    parts,
                    memories: vec![memory],
                    dtypes: vec![dtype],
                    op: *op,
                    gathers: true,
                };
                reduction.run(operation, scratch)?;
            }
        }
        Collective::ReduceScatter(parts, op) => {
            let mut reduction = Reduction {
                parts: vec![Stream::default(); size],
                output: Stream::default(),
                memories: Vec::new(),
                dtypes: Vec::new(),
                op: *op,
                gathers: false,
            };
            for part in parts {
                let (input, output) = (Buffer::read(&part.input)?, Buffer::written(&part.output)?);
                let number = reduction.memories.len();
                reduction.memories.extend([Memory::of(&input.host)?, Memory::of(&output.host)?]);
                reduction.dtypes.extend([part.input.dtype(); 2]);
                let element = part.input.dtype().size_in_bytes();
                reduction.output.push(number + 1, 0, bytes(&part.output));
                let mut start = 0;
                for (stream, count) in reduction.parts.iter_mut().zip(&part.counts) {
                    stream.push(number, start, count * element);
                    start += count * element;
                }
                buffers.extend([input, output]);
            }
            reduction.run(operation, scratch)?;
        }
    }
    Ok(())
}

fn broadcast(operation: &mut Operation<'_>, memory: Memory, src: usize) -> Result<(), Failure> {
    let (rank, size, total) = (operation.rank(), operation.size(), memory.len());
    let others = |of: usize| (0..size).filter(move |&peer| peer != of);
    if total <= SMALL_BROADCAST || size == 2 {
        let mut round = Round::default();
        match rank == src {
            true => round.sends = others(src).map(|peer| (peer, memory)).collect(),
            false => round.receives = vec![(src, memory)],
        }
        return operation.exchange(round);
    }
    let piece = total.div_ceil(size).next_multiple_of(LINE);
    let part =
        |peer: usize| memory.part((peer * piece).min(total)..((peer + 1) * piece).min(total));
    if rank == src {
        let theirs = others(src).map(|peer| (peer, part(peer)));
        operation.exchange(Round { sends: theirs.collect(), receives: Vec::new() })?;
        let own = others(src).map(|peer| (peer, part(src)));
        return operation.exchange(Round { sends: own.collect(), receives: Vec::new() });
    }
    let own = Round { sends: Vec::new(), receives: vec![(src, part(rank))] };
    operation.exchange(own)?;
    let sends = others(rank).filter(|&peer| peer != src).map(|peer| (peer, part(rank)));
    let receives = others(rank).map(|peer| (peer, part(peer)));
    operation.exchange(Round { sends: sends.collect(), receives: receives.collect() })
}

/// Every member sends all of `memory` to all others, and reduces it.
fn reduce_at_once(
    operation: &mut Operation<'_>,
    memory: Memory,
    scratch: &mut Scratch,
    reduce: impl Fn(&Operation<'_>, &[Memory], Memory),
) -> Result<(), Failure> {
    let (rank, size, len) = (operation.rank(), operation.size(), memory.len());
    let slot = len.next_multiple_of(LINE);
    let all = scratch.take(slot * (size + 1));
    let place = |slot_of: usize| all.part(slot_of * slot..slot_of * slot + len);
    let peers = || (0..size).filter(|&peer| peer != rank);
    operation.exchange(Round {
        sends: peers().map(|peer| (peer, memory)).collect(),
        receives: peers().map(|peer| (peer, place(peer))).collect(),
    })?;
    let sources: Vec<Memory> =
        (0..size).map(|peer| if peer == rank { memory } else { place(peer) }).collect();
    reduce(operation, &sources, place(size));
    memory.copy_from(place(size));
    Ok(())
}

/// A reduce-scatter, or an all-reduce, in chunks.
struct Reduction {
    /// Each member's part of the reduced data, in this rank's tensors.
    parts: Vec<Stream>,
    /// This rank's part of the result, cut like its part of the reduced data.
    output: Stream,
    /// Memory of the streams, by buffer number.
    memories: Vec<Memory>,
    dtypes: Vec<candle_core::DType>,
    op: ReduceOp,
    /// Whether the reduced parts go to all members, in place.
    gathers: bool,
}

impl Reduction {
    fn run(&self, operation: &mut Operation<'_>, scratch: &mut Scratch) -> Result<(), Failure> {
        let (rank, size) = (operation.rank(), operation.size());
        let stride = (operation.chunk_bytes() / size).max(MIN_CHUNK).next_multiple_of(LINE);
        let longest = self.parts.iter().map(Stream::len).max().unwrap_or(0);
        let chunks = longest.div_ceil(stride);
        let stride = stride.min(longest.next_multiple_of(LINE));
        let all = scratch.take(stride * (size + 1));
        let slot = |peer: usize| all.part(peer * stride..(peer + 1) * stride);
        let peers = || (0..size).filter(|&peer| peer != rank);
        // Ranks meet even without any bytes.
        for chunk in 0..(chunks + usize::from(self.gathers && chunks > 0)).max(1) {
            let mut round = Round::default();
            for peer in peers() {
                for (number, range, _) in self.parts[peer].chunk(chunk, stride) {
                    round.sends.push((peer, self.memories[number].part(range)));
                }
                for (_, _, place) in self.parts[rank].chunk(chunk, stride) {
                    round.receives.push((peer, slot(peer).part(place)));
                }
            }
            if let (true, Some(before)) = (self.gathers, chunk.checked_sub(1)) {
                for peer in peers() {
                    for (number, range, _) in self.parts[rank].chunk(before, stride) {
                        round.sends.push((peer, self.memories[number].part(range)));
                    }
                    for (number, range, _) in self.parts[peer].chunk(before, stride) {
                        round.receives.push((peer, self.memories[number].part(range)));
                    }
                }
            }
            operation.exchange(round)?;
            let own = self.parts[rank].chunk(chunk, stride);
            for ((number, range, place), (out, to, _)) in own.zip(self.output.chunk(chunk, stride))
            {
                let mine = self.memories[number].part(range);
                let source = |peer: usize| match peer == rank {
                    true => mine,
                    false => slot(peer).part(place.clone()),
                };
                let sources: Vec<Memory> = (0..size).map(source).collect();
                // The output may be the memory of this rank's own part, so it is written last.
                let result = slot(size).part(place.clone());
                operation.reduce(self.dtypes[number], self.op, &sources, result);
                self.memories[out].part(to).copy_from(result);
            }
        }
        Ok(())
    }
}
