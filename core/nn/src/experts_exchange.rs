//! The exchange of rows between the ranks that divide experts among each other.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Device, Tensor};

use super::experts_mixed::{select, stretches};
use super::kernels::routing::Routing;
use crate::{Error, Result};
use fulgurite_engine::autograd::storage;
use fulgurite_engine::collective::{AllGather, AllToAll, Collective, ProcessGroup};
use fulgurite_engine::execution::read;

/// A batch on its way to the ranks that have its experts, and back.
///
/// Each rank sends its choices, which are sorted by expert, to the ranks of these experts. A rank
/// sorts what it receives by expert, and the rows of one expert by the rank that sent them. So an
/// expert computes rows in the order in which one device would that had the batches of all ranks.
#[derive(Debug)]
pub(super) struct Exchange {
    ranks: Ranks,
    /// The number of choices that each rank sends to each.
    counts: Vec<Vec<usize>>,
    /// The place of each row, sorted by expert, among those received; and the reverse.
    received: [Vec<u32>; 2],
    /// The sorted rows of each of this rank's experts.
    ranges: Vec<Range<usize>>,
    /// Whether any rank tells the rows of its sequences apart.
    of_sequences: bool,
}

#[derive(Clone)]
struct Ranks(Arc<dyn ProcessGroup>);

impl Exchange {
    /// Plans the exchange of a batch. `of_sequences`: this rank tells the rows of its sequences
    /// apart. Collective over `ranks`, which have equally many experts.
    pub(super) fn new(
        ranks: &Arc<dyn ProcessGroup>,
        routing: &Routing,
        of_sequences: bool,
    ) -> Result<Self> {
        let (rank, size) = (ranks.rank(), ranks.size());
        let mut own: Vec<u32> = routing.ranges.iter().map(|range| range.len() as u32).collect();
        own.push(u32::from(of_sequences));
        let numbers = own.len();
        let own = Tensor::new(own, &Device::Cpu)?;
        let all = Tensor::zeros(numbers * size, own.dtype(), &Device::Cpu)?;
        let gather = AllGather::even(&all, &own, size);
        ranks.run(Collective::all_gather_into(vec![gather]))?;
        let all = read::vec1::<u32>(&all, "the rows of experts")?;
        let of_ranks: Vec<&[u32]> = all.chunks_exact(numbers).collect();
        let of_sequences = of_ranks.iter().any(|of_rank| of_rank[numbers - 1] > 0);
        let of_rank = (numbers - 1) / size;
        let count = |from: usize, expert: usize| of_ranks[from][expert] as usize;
        let sent = |from, to| (to * of_rank..(to + 1) * of_rank).map(|e| count(from, e)).sum();
        let counts = (0..size).map(|from| (0..size).map(|to| sent(from, to)).collect()).collect();
        // The first received row of each rank for each of this rank's experts.
        let experts = rank * of_rank..(rank + 1) * of_rank;
        let mut starts = vec![vec![0; of_rank]; size];
        let mut place = 0;
        for (from, starts) in starts.iter_mut().enumerate() {
            for (start, expert) in starts.iter_mut().zip(experts.clone()) {
                *start = place;
                place += count(from, expert);
            }
        }
        let mut sorted = Vec::with_capacity(place);
        let mut ranges = Vec::with_capacity(of_rank);
        for (own, expert) in experts.enumerate() {
            let first = sorted.len();
            for (from, starts) in starts.iter().enumerate() {
                let end = starts[own] + count(from, expert);
                sorted.extend((starts[own]..end).map(|place| place as u32));
            }
            ranges.push(first..sorted.len());
        }
        let mut reverse = vec![0; sorted.len()];
        sorted.iter().enumerate().for_each(|(i, &place)| reverse[place as usize] = i as u32);
        let ranks = Ranks(ranks.clone());
        Ok(Self { ranks, counts, received: [sorted, reverse], ranges, of_sequences })
    }

    /// The sorted rows of each of this rank's experts.
    pub(super) fn ranges(&self) -> &[Range<usize>] {
        &self.ranges
    }

    /// Takes values of this rank's choices, sorted by expert (`[choices, ..]`), to the ranks of the
    /// experts. Returns the values of all ranks for this rank's experts, sorted by expert.
    /// Collective.
    pub(super) fn to_experts(&self, x: &Tensor) -> Result<Tensor> {
        ordered(&self.exchange(x, self.counts.clone())?, &self.received[0])
    }

    /// The reverse of [`to_experts`](Self::to_experts). Collective.
    pub(super) fn back(&self, y: &Tensor) -> Result<Tensor> {
        let size = self.counts.len();
        let back = (0..size).map(|from| self.counts.iter().map(|row| row[from]).collect());
        self.exchange(&ordered(y, &self.received[1])?, back.collect())
    }

    /// The lengths of the stretches of rows of one sequence, for each of this rank's experts.
    /// `sequence`: the sequence of each of this rank's sorted choices, if it tells them apart.
    /// Returns `None` if no rank does. Collective.
    pub(super) fn stretches(
        &self,
        sequence: Option<Vec<usize>>,
    ) -> Result<Option<Vec<Vec<usize>>>> {
        if !self.of_sequences {
            return Ok(None);
        }
        let rank = self.ranks.0.rank();
        let choices = self.counts[rank].iter().sum();
        let sequence = sequence.unwrap_or_else(|| vec![0; choices]);
        let ids: Vec<i64> = sequence.iter().map(|i| ((rank as i64) << 32) + *i as i64).collect();
        let ids = self.to_experts(&Tensor::from_vec(ids, choices, &Device::Cpu)?)?;
        let ids = read::vec1::<i64>(&ids, "the sequences of experts")?;
        Ok(Some(stretches(&self.ranges, &ids)))
    }

    fn exchange(&self, x: &Tensor, counts: Vec<Vec<usize>>) -> Result<Tensor> {
        let rank = self.ranks.0.rank();
        let rows: usize = counts.iter().map(|row| row[rank]).sum();
        let mut shape = x.dims().to_vec();
        let sent = std::mem::replace(&mut shape[0], rows);
        if counts[rank].iter().sum::<usize>() != sent {
            return Err(Error::other(format!(
                "an exchange of the rows {counts:?} got {sent} rows from rank {rank}"
            )));
        }
        let width: usize = shape[1..].iter().product();
        let counts = counts.into_iter().map(|row| row.into_iter().map(|n| n * width).collect());
        let input = x.detach().contiguous()?.flatten_all()?;
        let output = storage::unset(rows * width, x.dtype(), x.device())?;
        let exchange = AllToAll::uneven(&output, &input, counts.collect());
        self.ranks.0.run(Collective::AllToAll(exchange))?;
        Ok(output.reshape(shape)?)
    }
}

/// The rows of `x` in this order.
fn ordered(x: &Tensor, order: &[u32]) -> Result<Tensor> {
    match order.is_sorted() {
        true => Ok(x.clone()),
        false => select(x, order),
    }
}

impl std::fmt::Debug for Ranks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0.name())
    }
}
