//! Collectives in levels: within the hosts, and between them.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use fulgurite_core::Result;
use fulgurite_core::autograd::storage::{copy_from, with_bytes, with_bytes_mut};
use fulgurite_core::collective::{
    AllGather, Collective, ProcessGroup, ReduceOp, ReduceScatter, Work,
};

use super::placement::{Placement, pieces};
use crate::engine::{self, reduce};

/// Bytes of a piece of a reduction.
const PIECE_BYTES: usize = 1 << 20;
/// Number of pieces that a leader may be ahead of the next host.
const AHEAD: usize = 2;

/// A member's position among hosts with equally many members.
pub(super) struct Levels {
    /// The members on this host.
    local: Arc<dyn ProcessGroup>,
    /// The members at this member's place, by host.
    rail: Arc<dyn ProcessGroup>,
    placement: Placement,
    host: usize,
    hosts: usize,
}

impl Levels {
    pub(super) fn new(
        local: Arc<dyn ProcessGroup>,
        rail: Arc<dyn ProcessGroup>,
        placement: Placement,
    ) -> Self {
        let (host, hosts) = (rail.rank(), rail.size());
        Self { local, rail, placement, host, hosts }
    }

    pub(super) fn run(&mut self, collective: &engine::Collective) -> Result<()> {
        match collective {
            engine::Collective::AllGather(parts) => self.all_gather(parts),
            engine::Collective::Broadcast(tensor, src) => self.broadcast(tensor, *src),
            engine::Collective::AllReduce(tensor, op) => self.all_reduce(tensor, *op),
            engine::Collective::ReduceScatter(parts, op) => self.reduce_scatter(parts, *op),
            other => Err(fulgurite_core::Error::other(format!("{} in levels", other.name()))),
        }
    }

    fn is_leader(&self) -> bool {
        self.local.rank() == 0
    }

    fn is_last(&self) -> bool {
        self.host + 1 == self.hosts
    }

    fn broadcast(&self, tensor: &Tensor, src: usize) -> Result<()> {
        let (host, place) = self.placement.find(src);
        if self.local.rank() == place {
            self.rail.run(Collective::broadcast(tensor, host))?;
        }
        self.local.run(Collective::broadcast(tensor, place))
    }

    fn all_gather(&self, parts: &[AllGather]) -> Result<()> {
        let (own, per_host) = (self.local.rank(), self.local.size());
        let mut over_rail = Vec::with_capacity(parts.len());
        for part in parts {
            let counts: Vec<usize> =
                (0..self.hosts).map(|host| part.counts[host * per_host + own]).collect();
            let elements: usize = counts.iter().sum();
            let output = Tensor::zeros(elements, part.output.dtype(), &Device::Cpu)?;
            over_rail.push(AllGather { input: part.input.clone(), output, counts });
        }
        self.rail.run(Collective::all_gather_into(over_rail.clone()))?;
        let mut within = Vec::with_capacity(parts.len() * self.hosts);
        for (part, gathered) in parts.iter().zip(&over_rail) {
            let (mut start, mut from) = (0, 0);
            for host in 0..self.hosts {
                let counts = &part.counts[host * per_host..(host + 1) * per_host];
                let before: usize = counts[..own].iter().sum();
                let input = part.output.flatten_all()?.narrow(0, start + before, counts[own])?;
                if counts[own] > 0 {
                    copy_from(&input, &gathered.output.narrow(0, from, counts[own])?)?;
                }
                let whole = counts.iter().sum();
                let output = part.output.flatten_all()?.narrow(0, start, whole)?;
                within.push(AllGather { input, output, counts: counts.to_vec() });
                (start, from) = (start + whole, from + counts[own]);
            }
        }
        self.local.run(Collective::all_gather_into(within))
    }

    fn all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<()> {
        let flat = tensor.flatten_all()?;
        let len = PIECE_BYTES / accumulator(tensor.dtype()).size_in_bytes();
        let pieces = pieces(flat.elem_count(), len).map(|range| {
            let input = flat.narrow(0, range.start, range.len())?;
            Ok(Piece { result: Target::InPlace, input })
        });
        self.reduce(pieces.collect::<Result<_>>()?, op)
    }

    fn reduce_scatter(&self, parts: &[ReduceScatter], op: ReduceOp) -> Result<()> {
        let (own, per_host) = (self.local.rank(), self.local.size());
        let mut all = Vec::new();
        for part in parts {
            let (input, output) = (part.input.flatten_all()?, part.output.flatten_all()?);
            let len = PIECE_BYTES / accumulator(input.dtype()).size_in_bytes();
            let mut start = 0;
            for host in 0..self.hosts {
                let counts = &part.counts[host * per_host..(host + 1) * per_host];
                let whole: usize = counts.iter().sum();
                // This member's part, within its host's.
                let before: usize = counts[..own].iter().sum();
                let mine = before..before + counts[own];
                for range in pieces(whole, len) {
                    let input = input.narrow(0, start + range.start, range.len())?;
                    let common = range.start.max(mine.start)..range.end.min(mine.end);
                    let copy = (host == self.host && !common.is_empty()).then(|| {
                        let to = output.narrow(0, common.start - mine.start, common.len())?;
                        let from = common.start - range.start..common.end - range.start;
                        Ok::<_, fulgurite_core::Error>((from, to))
                    });
                    all.push(Piece {
                        input,
                        result: Target::Host { host, copy: copy.transpose()? },
                    });
                }
                start += whole;
            }
        }
        self.reduce(all, op)
    }

    /// Reduces the pieces, which are the same on all members, from the first host to the last and
    /// back. At step `s` a host reduces piece `s`, and gets the result of an earlier piece. The
    /// more hosts follow it, the earlier that piece is.
    fn reduce(&self, pieces: Vec<Piece>, op: ReduceOp) -> Result<()> {
        let delay = AHEAD * (self.hosts - 1 - self.host);
        let mut flow = Flow::default();
        let mut early = pieces.iter().take(AHEAD);
        early.try_for_each(|piece| self.expect_partial(&mut flow, piece))?;
        for step in 0..pieces.len() + delay {
            if let Some(piece) = pieces.get(step) {
                if let Some(next) = pieces.get(step + AHEAD) {
                    self.expect_partial(&mut flow, next)?;
                }
                self.reduce_piece(&mut flow, piece, op)?;
            }
            if let Some(piece) = step.checked_sub(delay).and_then(|before| pieces.get(before)) {
                self.finish_piece(&mut flow, piece)?;
            }
        }
        flow.sent.into_iter().try_for_each(|(work, _)| work.wait())
    }

    /// Begins to receive the partial result of a piece from the previous host.
    fn expect_partial(&self, flow: &mut Flow, piece: &Piece) -> Result<()> {
        if self.host > 0 && self.is_leader() {
            let partial = piece.empty(accumulator(piece.input.dtype()))?;
            flow.partials.push_back((self.rail.recv(&partial, self.host - 1)?, partial));
        }
        Ok(())
    }

    /// Reduces this host's values of a piece onto the partial result of the previous host, and
    /// passes it on.
    fn reduce_piece(&self, flow: &mut Flow, piece: &Piece, op: ReduceOp) -> Result<()> {
        let wide = accumulator(piece.input.dtype());
        let mut contribution = piece.input.to_dtype(wide)?;
        if let Some((work, partial)) = flow.partials.pop_front() {
            work.wait()?;
            contribution = fold(&partial, &contribution, op)?;
        }
        let elements = piece.input.elem_count();
        let mut counts = vec![0; self.local.size()];
        counts[0] = elements;
        let reduced =
            Tensor::zeros(if self.is_leader() { elements } else { 0 }, wide, &Device::Cpu)?;
        let part = ReduceScatter { input: contribution, output: reduced.clone(), counts };
        self.local.run(Collective::reduce_scatter(vec![part], op))?;
        if !self.is_leader() {
            flow.results.push_back((Work::ready(), piece.result_tensor()?));
            return Ok(());
        }
        if !self.is_last() {
            flow.send(&*self.rail, reduced, self.host + 1)?;
            let result = piece.result_tensor()?;
            let work = match piece.result.reaches(self.host) {
                true => self.rail.recv(&result, self.host + 1)?,
                false => Work::ready(),
            };
            flow.results.push_back((work, result));
            return Ok(());
        }
        let result = piece.result_tensor()?;
        copy_from(&result, &reduced.to_dtype(result.dtype())?)?;
        flow.results.push_back((Work::ready(), result));
        Ok(())
    }

    /// Passes the result of a piece back, and broadcasts it to this host's members.
    fn finish_piece(&self, flow: &mut Flow, piece: &Piece) -> Result<()> {
        let Some((work, result)) = flow.results.pop_front() else {
            return Err(fulgurite_core::Error::other("a piece that was not reduced"));
        };
        work.wait()?;
        if self.is_leader() && self.host > 0 && piece.result.reaches(self.host - 1) {
            flow.send(&*self.rail, result.clone(), self.host - 1)?;
        }
        match &piece.result {
            Target::InPlace => self.local.run(Collective::broadcast(&result, 0)),
            Target::Host { host, copy } if *host == self.host => {
                self.local.run(Collective::broadcast(&result, 0))?;
                match copy {
                    Some((from, to)) => copy_from(to, &result.narrow(0, from.start, from.len())?),
                    None => Ok(()),
                }
            }
            Target::Host { .. } => Ok(()),
        }
    }
}

/// A piece of a reduction.
struct Piece {
    /// This member's values.
    input: Tensor,
    result: Target,
}

/// The target of a piece's result.
enum Target {
    /// All members, in place of their values.
    InPlace,
    /// The members of one host. `copy` holds this member's range of the piece, and the tensor to
    /// copy it to.
    Host { host: usize, copy: Option<(Range<usize>, Tensor)> },
}

impl Target {
    /// Whether the result goes to `host` or to an earlier host.
    fn reaches(&self, host: usize) -> bool {
        match self {
            Self::InPlace => true,
            Self::Host { host: to, .. } => *to <= host,
        }
    }
}

impl Piece {
    fn empty(&self, dtype: DType) -> Result<Tensor> {
        Ok(Tensor::zeros(self.input.elem_count(), dtype, &Device::Cpu)?)
    }

    /// Returns the tensor for the result. An in-place result overwrites the member's values after
    /// their reduction.
    fn result_tensor(&self) -> Result<Tensor> {
        match self.result {
            Target::InPlace => Ok(self.input.clone()),
            Target::Host { .. } => self.empty(self.input.dtype()),
        }
    }
}

/// Messages under way between leaders, and pending results.
#[derive(Default)]
struct Flow {
    partials: VecDeque<(Work, Tensor)>,
    results: VecDeque<(Work, Tensor)>,
    /// Sent messages, with their memory.
    sent: VecDeque<(Work, Tensor)>,
}

impl Flow {
    /// Number of messages that a member sends before it waits for the first of them.
    const MAX_SENT: usize = 2 * (AHEAD + 1);

    fn send(&mut self, rail: &dyn ProcessGroup, tensor: Tensor, host: usize) -> Result<()> {
        self.sent.push_back((rail.send(&tensor, host)?, tensor));
        if self.sent.len() > Self::MAX_SENT
            && let Some((work, _)) = self.sent.pop_front()
        {
            work.wait()?;
        }
        Ok(())
    }
}

/// Dtype in which values are reduced until the last host rounds the result.
fn accumulator(dtype: DType) -> DType {
    match dtype {
        DType::BF16 | DType::F16 => DType::F32,
        other => other,
    }
}

/// Reduces `values` onto `partial`, into a new tensor.
fn fold(partial: &Tensor, values: &Tensor, op: ReduceOp) -> Result<Tensor> {
    let dtype = values.dtype();
    let out = Tensor::zeros(values.elem_count(), dtype, &Device::Cpu)?;
    with_bytes_mut(&out, |out| {
        with_bytes(partial, |partial| {
            with_bytes(values, |values| reduce(dtype, op, &[partial, values], out))
        })
    })???;
    Ok(out)
}
