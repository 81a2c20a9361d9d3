//! The plan of a collective: its transfers through the slots, in chunks.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use fulgurite_engine::autograd::storage;
use fulgurite_engine::collective;
use fulgurite_engine::collective::{AllGather, AllToAll, ReduceOp, ReduceScatter, check};
use fulgurite_error::Result;
use twox_hash::XxHash3_64;

use super::stream::Stream;
use crate::memory::{LINE, RegionLayout};

/// A collective with checked arguments.
pub(crate) enum Collective {
    AllReduce(Tensor, ReduceOp),
    AllGather(Vec<AllGather>),
    ReduceScatter(Vec<ReduceScatter>, ReduceOp),
    Broadcast(Tensor, usize),
    AllToAll(AllToAll),
    Barrier,
    /// Checks that all ranks have the same value.
    Split(u64),
}

/// The names of collectives, by [`Fingerprint::kind`].
pub(crate) const KINDS: [&str; 7] = [
    "all_reduce",
    "all_gather_into",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
    "barrier",
    "split",
];

/// The properties of a collective that must be equal on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fingerprint {
    /// Index into [`KINDS`].
    pub(crate) kind: u32,
    /// Index into [`check::DTYPES`] of the first tensor, plus one; 0 without tensors.
    pub(crate) dtype: u32,
    /// Bytes of all tensors.
    pub(crate) bytes: u64,
    /// Hash of the other properties.
    pub(crate) detail: u64,
}

impl std::fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(KINDS.get(self.kind as usize).unwrap_or(&"an unknown collective"))?;
        match (self.dtype as usize).checked_sub(1).and_then(|i| check::DTYPES.get(i)) {
            Some(dtype) => write!(f, " of {} bytes of {}", self.bytes, dtype.as_str()),
            None => Ok(()),
        }
    }
}

pub(crate) fn dtype_code(dtype: DType) -> u32 {
    check::DTYPES.iter().position(|&d| d == dtype).map_or(0, |i| i as u32 + 1)
}

impl From<collective::Collective> for Collective {
    fn from(collective: collective::Collective) -> Self {
        use collective::Collective as Asked;
        match collective {
            Asked::AllReduce { tensor, op } => Self::AllReduce(tensor, op),
            Asked::AllGatherInto(parts) => Self::AllGather(parts),
            Asked::ReduceScatter { parts, op } => Self::ReduceScatter(parts, op),
            Asked::Broadcast { tensor, src } => Self::Broadcast(tensor, src),
            Asked::AllToAll(exchange) => Self::AllToAll(exchange),
            Asked::Barrier => Self::Barrier,
        }
    }
}

pub(crate) fn bytes(tensor: &Tensor) -> usize {
    tensor.elem_count() * tensor.dtype().size_in_bytes()
}

impl Collective {
    pub(crate) fn name(&self) -> &'static str {
        KINDS[self.kind() as usize]
    }

    fn kind(&self) -> u32 {
        match self {
            Self::AllReduce(..) => 0,
            Self::AllGather(..) => 1,
            Self::ReduceScatter(..) => 2,
            Self::Broadcast(..) => 3,
            Self::AllToAll(_) => 4,
            Self::Barrier => 5,
            Self::Split(..) => 6,
        }
    }

    pub(crate) fn fingerprint(&self) -> Fingerprint {
        let none = (None, 0, 0);
        let (tensor, bytes, detail) = match self {
            Self::AllReduce(tensor, op) => (Some(tensor), bytes(tensor), *op as u64),
            Self::AllGather(parts) => {
                let sum = parts.iter().map(|p| bytes(&p.output)).sum();
                let detail = digest(parts.iter().map(|p| (&p.output, p.counts.as_slice())), 0);
                (parts.first().map(|p| &p.output), sum, detail)
            }
            Self::ReduceScatter(parts, op) => {
                let sum = parts.iter().map(|p| bytes(&p.input)).sum();
                let counts = parts.iter().map(|p| (&p.input, p.counts.as_slice()));
                (parts.first().map(|p| &p.input), sum, digest(counts, *op as u64))
            }
            Self::Broadcast(tensor, src) => (Some(tensor), bytes(tensor), *src as u64),
            Self::AllToAll(AllToAll { input, counts, .. }) => match counts {
                None => (Some(input), bytes(input), 0),
                // Ranks may send different lengths.
                Some(counts) => {
                    (Some(input), 0, digest(counts.iter().map(|row| (input, row.as_slice())), 1))
                }
            },
            Self::Barrier => none,
            Self::Split(hash) => (None, 0, *hash),
        };
        let dtype = tensor.map_or(0, |t| dtype_code(t.dtype()));
        Fingerprint { kind: self.kind(), dtype, bytes: bytes as u64, detail }
    }

    /// Cuts the collective into transfers through slots.
    pub(crate) fn plan(&self, rank: usize, layout: &RegionLayout) -> Result<CollectivePlan> {
        let size = layout.size;
        let mut plan =
            CollectivePlan { stride: layout.portion(), stages: 2, ..CollectivePlan::default() };
        match self {
            Self::AllReduce(tensor, op) => {
                plan.buffers.push(Buffer::updated(tensor)?);
                plan.stages = 3;
                let total = bytes(tensor);
                let piece = total.div_ceil(size).next_multiple_of(LINE);
                for peer in 0..size {
                    let start = (peer * piece).min(total);
                    let stream = Stream::of(0, start, piece.min(total - start));
                    plan.reads.push(Read { rank: peer, portion: peer, stream: stream.clone() });
                    if peer == rank {
                        plan.reduction = Some(Reduction { own: stream, op: *op });
                    } else {
                        plan.writes.push(Write { portion: peer, stream });
                    }
                }
            }
            Self::ReduceScatter(parts, op) => {
                let mut streams = vec![Stream::default(); size];
                let mut output = Stream::default();
                for part in parts {
                    let element = part.input.dtype().size_in_bytes();
                    let input = plan.buffers.len();
                    plan.buffers.push(Buffer::read(&part.input)?);
                    plan.buffers.push(Buffer::written(&part.output)?);
                    output.push(input + 1, 0, bytes(&part.output));
                    let mut start = 0;
                    for (stream, count) in streams.iter_mut().zip(&part.counts) {
                        stream.push(input, start, count * element);
                        start += count * element;
                    }
                }
                for (peer, stream) in streams.into_iter().enumerate() {
                    if peer == rank {
                        plan.reduction = Some(Reduction { own: stream, op: *op });
                    } else {
                        plan.writes.push(Write { portion: peer, stream });
                    }
                }
                plan.reads.push(Read { rank, portion: rank, stream: output });
            }
            Self::AllGather(parts) => {
                plan.stride = layout.slot;
                let mut streams = vec![Stream::default(); size];
                let mut input = Stream::default();
                let mut in_place = true;
                for part in parts {
                    let element = part.input.dtype().size_in_bytes();
                    let output = plan.buffers.len();
                    plan.buffers.push(Buffer::written(&part.output)?);
                    plan.buffers.push(Buffer::read(&part.input)?);
                    input.push(output + 1, 0, bytes(&part.input));
                    let mut start = 0;
                    for (peer, (stream, count)) in streams.iter_mut().zip(&part.counts).enumerate()
                    {
                        stream.push(output, start, count * element);
                        if peer == rank && *count > 0 {
                            in_place &= is_at(&part.input, &part.output, start)?;
                        }
                        start += count * element;
                    }
                }
                plan.writes.push(Write { portion: 0, stream: input });
                for (peer, stream) in streams.into_iter().enumerate() {
                    plan.chunks = plan.chunks.max(stream.len().div_ceil(plan.stride));
                    if peer != rank || !in_place {
                        plan.reads.push(Read { rank: peer, portion: 0, stream });
                    }
                }
            }
            Self::Broadcast(tensor, src) => {
                plan.stride = layout.slot;
                let stream = Stream::of(0, 0, bytes(tensor));
                if rank == *src {
                    plan.buffers.push(Buffer::read(tensor)?);
                    plan.writes.push(Write { portion: 0, stream });
                } else {
                    plan.buffers.push(Buffer::written(tensor)?);
                    plan.reads.push(Read { rank: *src, portion: 0, stream });
                }
            }
            Self::AllToAll(exchange) => {
                plan.buffers.push(Buffer::read(&exchange.input)?);
                plan.buffers.push(Buffer::written(&exchange.output)?);
                let element = exchange.input.dtype().size_in_bytes();
                let stream = |buffer, part: Range<usize>| {
                    Stream::of(buffer, part.start * element, part.len() * element)
                };
                for (peer, part) in exchange.sent(rank, size).into_iter().enumerate() {
                    plan.writes.push(Write { portion: peer, stream: stream(0, part) });
                }
                for (peer, part) in exchange.received(rank, size).into_iter().enumerate() {
                    plan.reads.push(Read { rank: peer, portion: rank, stream: stream(1, part) });
                }
                plan.chunks = (exchange.longest(size) * element).div_ceil(plan.stride);
            }
            Self::Barrier | Self::Split(_) => {}
        }
        let streams = plan.writes.iter().map(|w| &w.stream);
        let streams = streams.chain(plan.reads.iter().map(|r| &r.stream));
        let streams = streams.chain(plan.reduction.iter().map(|r| &r.own));
        let longest = streams.map(Stream::len).max().unwrap_or(0);
        plan.chunks = plan.chunks.max(longest.div_ceil(plan.stride)).max(1);
        Ok(plan)
    }
}

/// Whether `part` is the memory of `whole` from byte `start` on. False for tensors outside the CPU.
pub(super) fn is_at(part: &Tensor, whole: &Tensor, start: usize) -> Result<bool> {
    if !(part.device().is_cpu() && whole.device().is_cpu()) {
        return Ok(false);
    }
    let part = storage::with_bytes(part, |bytes| bytes.as_ptr() as usize)?;
    let whole = storage::with_bytes(whole, |bytes| bytes.as_ptr() as usize)?;
    Ok(part == whole + start)
}

/// A hash of dtypes and counts.
fn digest<'a>(parts: impl Iterator<Item = (&'a Tensor, &'a [usize])>, seed: u64) -> u64 {
    let mut words = vec![seed];
    for (tensor, counts) in parts {
        words.push(dtype_code(tensor.dtype()).into());
        words.extend(counts.iter().map(|&n| n as u64));
    }
    XxHash3_64::oneshot(bytemuck::cast_slice(&words))
}

/// A collective's transfers. Chunk `k` of every stream is its bytes from `k * stride` on.
#[derive(Default)]
pub(crate) struct CollectivePlan {
    pub(crate) buffers: Vec<Buffer>,
    /// Bytes of a chunk of one stream, and of a portion of a slot.
    pub(crate) stride: usize,
    /// Chunks of the longest stream of any rank, at least one. The same on all ranks.
    pub(crate) chunks: usize,
    /// Number of stages: 2 for write and read, 3 for write, reduce and read.
    pub(crate) stages: usize,
    pub(crate) writes: Vec<Write>,
    pub(crate) reduction: Option<Reduction>,
    pub(crate) reads: Vec<Read>,
}

/// A transfer from tensors into a portion of this rank's slot.
pub(crate) struct Write {
    pub(crate) portion: usize,
    pub(crate) stream: Stream,
}

/// Reduces this rank's portion of all slots into the same portion of its own slot. This rank's own
/// contribution is read from its tensors.
pub(crate) struct Reduction {
    pub(crate) own: Stream,
    pub(crate) op: ReduceOp,
}

/// A transfer from a portion of a rank's slot into tensors.
pub(crate) struct Read {
    pub(crate) rank: usize,
    pub(crate) portion: usize,
    pub(crate) stream: Stream,
}

/// A tensor of the collective as host memory.
pub(crate) struct Buffer {
    /// The tensor itself, or its host copy.
    pub(crate) host: Tensor,
    /// The tensor that the host copy is copied to at the end.
    target: Option<Tensor>,
}

impl Buffer {
    /// Makes a buffer for a tensor that is only read.
    pub(crate) fn read(tensor: &Tensor) -> Result<Self> {
        let host = match tensor.device() {
            Device::Cpu => tensor.clone(),
            // `to_device` and `copy` of a view would copy its whole storage.
            _ => tensor.force_contiguous()?.to_device(&Device::Cpu)?,
        };
        Ok(Self { host, target: None })
    }

    /// Makes a buffer for a tensor that is overwritten as a whole.
    pub(crate) fn written(tensor: &Tensor) -> Result<Self> {
        match tensor.device() {
            Device::Cpu => Self::read(tensor),
            _ => {
                let host = Tensor::zeros(tensor.shape(), tensor.dtype(), &Device::Cpu)?;
                Ok(Self { host, target: Some(tensor.clone()) })
            }
        }
    }

    /// Makes a buffer for a tensor that is read and written.
    pub(crate) fn updated(tensor: &Tensor) -> Result<Self> {
        let target = (!tensor.device().is_cpu()).then(|| tensor.clone());
        Ok(Self { target, ..Self::read(tensor)? })
    }

    /// Copies a host copy back to its tensor.
    pub(crate) fn finish(&self) -> Result<()> {
        match &self.target {
            Some(target) => storage::copy_from(target, &self.host.to_device(target.device())?),
            None => Ok(()),
        }
    }
}
