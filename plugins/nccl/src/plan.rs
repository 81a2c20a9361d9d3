//! Plans a collective: copies into flat buffers, NCCL calls, copies out of the buffers.

use std::ffi::c_void;

use candle_core::{DType, Device, Tensor};
use fulgurite_engine::collective::{AllGather, AllToAll, Collective, ReduceOp, ReduceScatter};
use fulgurite_error::Result;

use crate::flat::{Flat, is_even};
use crate::library::{Call, Operands};
use crate::streams::{Copy, Memory, Streams};

/// A collective that is ready to be queued: all its memory is allocated.
#[derive(Default)]
pub(crate) struct Plan {
    pub(crate) before: Vec<Copy>,
    pub(crate) calls: Vec<(Call, Operands)>,
    pub(crate) after: Vec<Copy>,
    pub(crate) memory: Vec<Memory>,
}

/// Plans collectives for a rank.
pub(crate) struct Planner<'a> {
    pub(crate) streams: &'a dyn Streams,
    pub(crate) device: &'a Device,
    pub(crate) rank: usize,
    pub(crate) size: usize,
}

/// Alignment of parts in flat buffers, in bytes: the size of NCCL's loads.
const ALIGN: usize = 16;

impl Planner<'_> {
    /// Plans a collective with checked arguments. The plan may be empty.
    pub(crate) fn plan(&self, collective: &Collective) -> Result<Plan> {
        let mut plan = Plan::default();
        match collective {
            Collective::AllReduce { tensor, op } => {
                let at = self.memory(&mut plan, tensor, true)?;
                plan.call(Call::AllReduce { op: *op }, at, at, tensor.elem_count(), tensor.dtype());
            }
            Collective::Broadcast { tensor, src } => {
                let at = self.memory(&mut plan, tensor, *src != self.rank)?;
                let (count, dtype) = (tensor.elem_count(), tensor.dtype());
                plan.call(Call::Broadcast { root: *src }, at, at, count, dtype);
            }
            Collective::AllToAll(exchange) => self.all_to_all(&mut plan, exchange)?,
            Collective::AllGatherInto(parts) => self.all_gather(&mut plan, parts)?,
            Collective::ReduceScatter { parts, op } => {
                self.reduce_scatter(&mut plan, parts, *op)?;
            }
            Collective::Barrier => {}
        }
        Ok(plan)
    }

    /// Returns the address of a tensor, which the plan holds from now on. Null if the tensor is
    /// empty.
    fn memory(&self, plan: &mut Plan, tensor: &Tensor, written: bool) -> Result<*mut c_void> {
        if tensor.elem_count() == 0 {
            return Ok(std::ptr::null_mut());
        }
        let memory = self.streams.memory(tensor, written)?;
        let address = memory.address;
        plan.memory.push(memory);
        Ok(address)
    }

    /// Allocates a flat buffer, with a slot for each rank.
    fn buffer(&self, plan: &mut Plan, flat: &Flat, dtype: DType) -> Result<*mut c_void> {
        let bytes = flat.slot * self.size * dtype.size_in_bytes();
        let memory = self.streams.allocate(self.device, bytes)?;
        let address = memory.address;
        plan.memory.push(memory);
        Ok(address)
    }

    fn all_to_all(&self, plan: &mut Plan, exchange: &AllToAll) -> Result<()> {
        let target = self.memory(plan, &exchange.output, true)?;
        let source = self.memory(plan, &exchange.input, false)?;
        let dtype = exchange.input.dtype();
        let sent = exchange.sent(self.rank, self.size);
        let received = exchange.received(self.rank, self.size);
        for (peer, (sent, received)) in sent.into_iter().zip(received).enumerate() {
            let (from, to) = (at(source, sent.start, dtype), at(target, received.start, dtype));
            plan.call(Call::Send { peer }, from, from, sent.len(), dtype);
            plan.call(Call::Recv { peer }, to, to, received.len(), dtype);
        }
        Ok(())
    }

    fn all_gather(&self, plan: &mut Plan, parts: &[AllGather]) -> Result<()> {
        let (even, uneven): (Vec<_>, Vec<_>) = parts.iter().partition(|part| is_even(&part.counts));
        for part in even {
            // The output first: the input may be a part of it.
            let output = self.memory(plan, &part.output, true)?;
            let input = self.memory(plan, &part.input, false)?;
            let (count, dtype) = (part.input.elem_count(), part.input.dtype());
            plan.call(Call::AllGather, input, output, count, dtype);
        }
        for (dtype, parts) in by_dtype(&uneven, |part| part.input.dtype()) {
            let flat = Flat::new(parts.iter().map(|part| &*part.counts), align(dtype));
            let buffer = self.buffer(plan, &flat, dtype)?;
            for (i, part) in parts.iter().enumerate() {
                let output = self.memory(plan, &part.output, true)?;
                let input = self.memory(plan, &part.input, false)?;
                let slot = at(buffer, flat.at(i, self.rank), dtype);
                plan.before.extend(copy(slot, input, part.counts[self.rank], dtype));
                let mut start = 0;
                for (rank, &count) in part.counts.iter().enumerate() {
                    let slot = at(buffer, flat.at(i, rank), dtype);
                    plan.after.extend(copy(at(output, start, dtype), slot, count, dtype));
                    start += count;
                }
            }
            let own = at(buffer, self.rank * flat.slot, dtype);
            plan.call(Call::AllGather, own, buffer, flat.slot, dtype);
        }
        Ok(())
    }

    fn reduce_scatter(&self, plan: &mut Plan, parts: &[ReduceScatter], op: ReduceOp) -> Result<()> {
        let call = Call::ReduceScatter { op };
        let (even, uneven): (Vec<_>, Vec<_>) = parts.iter().partition(|part| is_even(&part.counts));
        for part in even {
            // The output first: it may be a part of the input.
            let output = self.memory(plan, &part.output, true)?;
            let input = self.memory(plan, &part.input, false)?;
            plan.call(call, input, output, part.output.elem_count(), part.output.dtype());
        }
        for (dtype, parts) in by_dtype(&uneven, |part| part.input.dtype()) {
            let flat = Flat::new(parts.iter().map(|part| &*part.counts), align(dtype));
            let buffer = self.buffer(plan, &flat, dtype)?;
            for (i, part) in parts.iter().enumerate() {
                let output = self.memory(plan, &part.output, true)?;
                let input = self.memory(plan, &part.input, false)?;
                let mut start = 0;
                for (rank, &count) in part.counts.iter().enumerate() {
                    let slot = at(buffer, flat.at(i, rank), dtype);
                    plan.before.extend(copy(slot, at(input, start, dtype), count, dtype));
                    start += count;
                }
                let slot = at(buffer, flat.at(i, self.rank), dtype);
                plan.after.extend(copy(output, slot, part.counts[self.rank], dtype));
            }
            let own = at(buffer, self.rank * flat.slot, dtype);
            plan.call(call, buffer, own, flat.slot, dtype);
        }
        Ok(())
    }
}

impl Plan {
    /// Adds a call, unless its count is 0. All ranks have the same count.
    fn call(
        &mut self,
        call: Call,
        input: *mut c_void,
        output: *mut c_void,
        count: usize,
        dtype: DType,
    ) {
        if count > 0 {
            self.calls.push((call, Operands { input, output, count, dtype }));
        }
    }
}

/// Number of elements in [`ALIGN`] bytes.
fn align(dtype: DType) -> usize {
    ALIGN / dtype.size_in_bytes()
}

/// Returns the address of an element.
fn at(start: *mut c_void, element: usize, dtype: DType) -> *mut c_void {
    start.wrapping_byte_add(element * dtype.size_in_bytes())
}

fn copy(target: *mut c_void, source: *mut c_void, count: usize, dtype: DType) -> Option<Copy> {
    (count > 0).then(|| Copy { target, source, bytes: count * dtype.size_in_bytes() })
}

/// Groups parts by dtype, in order of first appearance, which is the same on all ranks. No part
/// here is empty on all ranks: its counts would be even.
fn by_dtype<'a, T>(parts: &[&'a T], dtype: impl Fn(&T) -> DType) -> Vec<(DType, Vec<&'a T>)> {
    let mut groups: Vec<(DType, Vec<&'a T>)> = Vec::new();
    for &part in parts {
        let dtype = dtype(part);
        match groups.iter_mut().find(|(other, _)| *other == dtype) {
            Some((_, group)) => group.push(part),
            None => groups.push((dtype, vec![part])),
        }
    }
    groups
}
