//! Functions of whole matrices, each computed by one rank.
//!
//! Each matrix has an owner. The other ranks send it their parts of the input, and it sends them
//! their parts of the output. One rank computes a matrix in one order, so the bits are the same on
//! any mesh.

use candle_core::{DType, Device, Tensor};

use super::update_ranks::UpdateRanks;
use crate::{Error, Result};
use fulgurite_collective::collective::{AllGather, Collective, Label};
use fulgurite_collective::shard::Region;
use fulgurite_module::parameter::Parameter;
use fulgurite_tensor::autograd::storage;

/// The owners of matrices.
///
/// Ranks compute in rounds, each rank at most one matrix a round. So a rank holds one whole matrix
/// at a time.
#[derive(Debug)]
pub(super) struct MatrixOwners {
    ranks: Option<UpdateRanks>,
    /// By round and rank: the index of the rank's matrix.
    rounds: Vec<Vec<Option<usize>>>,
}

impl MatrixOwners {
    /// Computes every matrix here.
    pub(super) fn alone(matrices: usize) -> Self {
        Self { ranks: None, rounds: (0..matrices).map(|index| vec![Some(index)]).collect() }
    }

    /// Gives each matrix to the rank with the least cost so far, the costliest matrices first. Not
    /// collective: every rank finds the same.
    pub(super) fn new(costs: &[u128], ranks: &UpdateRanks) -> Self {
        let size = ranks.group().size();
        let mut order: Vec<usize> = (0..costs.len()).collect();
        order.sort_by_key(|&index| std::cmp::Reverse(costs[index]));
        let mut owned = vec![(0u128, Vec::new()); size];
        for index in order {
            // The first of several ranks with the least cost.
            if let Some((cost, matrices)) = owned.iter_mut().min_by_key(|(cost, _)| *cost) {
                *cost += costs[index];
                matrices.push(index);
            }
        }
        let most = owned.iter().map(|(_, matrices)| matrices.len()).max().unwrap_or(0);
        let round = |i: usize| owned.iter().map(|(_, own)| own.get(i).copied()).collect();
        Self { ranks: Some(ranks.clone()), rounds: (0..most).map(round).collect() }
    }

    /// The matrices that are computed at the same time, by owner.
    pub(super) fn rounds(&self) -> &[Vec<Option<usize>>] {
        &self.rounds
    }

    /// Computes `f` of the whole inputs of one round's matrices. Returns this rank's parts of the
    /// outputs, flat, in the order of the `items`.
    ///
    /// `f` returns a matrix of its input's shape. Collective.
    ///
    /// # Errors
    /// If a rank holds another part than its spec says, if `f` fails, or if a peer fails.
    pub(super) fn compute(
        &self,
        items: &[Item<'_>],
        f: impl Fn(&Item<'_>, Tensor) -> Result<Tensor>,
    ) -> Result<Vec<Tensor>> {
        let Some(ranks) = self.ranks.as_ref().filter(|ranks| ranks.group().size() > 1) else {
            return items.iter().map(|item| flat(f(item, item.whole()?)?)).collect();
        };
        let _label = Label::enter("the optimizer's whole matrices");
        Round::new(ranks, items)?.compute(f)
    }
}

/// A matrix of a round.
pub(super) struct Item<'a> {
    pub(super) parameter: &'a Parameter,
    /// The group's rank that computes it.
    pub(super) owner: usize,
    /// This rank's part of the input, flat.
    pub(super) input: Tensor,
}

impl Item<'_> {
    fn shape(&self) -> (usize, usize) {
        let shape = self.parameter.global_shape();
        (shape[0], shape[1])
    }

    /// The input, if this rank has all of it.
    fn whole(&self) -> Result<Tensor> {
        let (rows, columns) = self.shape();
        if self.input.elem_count() != rows * columns {
            return Err(Error::parameter(
                self.parameter.fqn(),
                format!(
                    "this rank has {} elements of a matrix of {rows} × {columns}, and the optimizer was not \
                     given the ranks with the others (`Optimizer::set_ranks`)",
                    self.input.elem_count()
                ),
            ));
        }
        Ok(self.input.reshape((rows, columns))?)
    }
}

/// A round in progress.
struct Round<'a> {
    ranks: &'a UpdateRanks,
    items: &'a [Item<'a>],
    /// By item and rank: the part that the rank holds.
    held: Vec<Vec<Region>>,
    /// By item and rank: the part that the rank sends to the owner.
    sent: Vec<Vec<Region>>,
    dtype: DType,
    device: Device,
}

impl<'a> Round<'a> {
    fn new(ranks: &'a UpdateRanks, items: &'a [Item<'a>]) -> Result<Self> {
        let size = ranks.group().size();
        let regions = |of: &dyn Fn(&Parameter, usize) -> Result<Region>| {
            let by_rank =
                |item: &Item<'_>| (0..size).map(|rank| of(item.parameter, rank)).collect();
            items.iter().map(by_rank).collect::<Result<Vec<Vec<_>>>>()
        };
        let held = regions(&|parameter, rank| ranks.region(parameter, rank))?;
        let sent = regions(&|parameter, rank| ranks.owned_region(parameter, rank))?;
        for (item, held) in items.iter().zip(&held) {
            let (here, expected) = (item.parameter.local()?.region, &held[ranks.group().rank()]);
            if here.elem_count() + expected.elem_count() > 0 && here != *expected {
                return Err(Error::parameter(
                    item.parameter.fqn(),
                    format!(
                        "this rank holds offsets {:?}, sizes {:?}, and its spec says {:?}, {:?}; this optimizer \
                         needs the parts of all ranks by the spec",
                        here.offsets, here.sizes, expected.offsets, expected.sizes
                    ),
                ));
            }
        }
        let first = items.first().map(|item| &item.input);
        let dtype = first.map_or(DType::F32, Tensor::dtype);
        let device = first.map_or(Device::Cpu, |input| input.device().clone());
        Ok(Self { ranks, items, held, sent, dtype, device })
    }

    fn compute(self, f: impl Fn(&Item<'_>, Tensor) -> Result<Tensor>) -> Result<Vec<Tensor>> {
        let own = self.items.iter().position(|item| item.owner == self.ranks.group().rank());
        let input = self.gather(own)?;
        let output = match (own, input) {
            (Some(own), Some(input)) => Some(f(&self.items[own], input)?),
            _ => None,
        };
        self.scatter(own, output)
    }

    fn zeros(&self, elements: usize) -> Result<Tensor> {
        storage::zeros(elements, self.dtype, &self.device)
    }

    /// Whether every rank has every matrix.
    fn is_replicated(&self) -> bool {
        let whole = |(item, held): (&Item<'_>, &Vec<Region>)| {
            held.iter().all(|region| region.elem_count() == item.parameter.elem_count())
        };
        self.items.iter().zip(&self.held).all(whole)
    }

    /// Sends the parts of each input to its owner. Returns the input of this rank's matrix, `own`.
    fn gather(&self, own: Option<usize>) -> Result<Option<Tensor>> {
        if self.is_replicated() {
            return own.map(|own| self.items[own].whole()).transpose();
        }
        let (size, rank) = (self.ranks.group().size(), self.ranks.group().rank());
        let part = most(&self.sent);
        let [input, output] = [self.zeros(size * part)?, self.zeros(size * part)?];
        for (item, (held, sent)) in self.items.iter().zip(self.held.iter().zip(&self.sent)) {
            let (held, sent) = (&held[rank], &sent[rank]);
            if sent.is_empty() {
                continue;
            }
            let local = item.input.reshape((held.sizes[0], held.sizes[1]))?;
            let values = flat(cut(&local, &sent.relative_to(held))?)?;
            input.slice_set(&values, 0, item.owner * part)?;
        }
        self.ranks.group().run(Collective::all_to_all(&output, &input))?;
        let Some(own) = own else { return Ok(None) };
        let (rows, columns) = self.items[own].shape();
        let whole = self.zeros(rows * columns)?.reshape((rows, columns))?;
        for (rank, region) in self.sent[own].iter().enumerate() {
            paste(&whole, region, &output.narrow(0, rank * part, region.elem_count())?)?;
        }
        Ok(Some(whole))
    }

    /// Sends each rank its parts of the outputs. `output` is of this rank's matrix, `own`.
    fn scatter(&self, own: Option<usize>, output: Option<Tensor>) -> Result<Vec<Tensor>> {
        let (size, rank) = (self.ranks.group().size(), self.ranks.group().rank());
        if self.is_replicated() {
            let mut counts = vec![0; size];
            for item in self.items {
                counts[item.owner] = item.parameter.elem_count();
            }
            let input = output.map_or_else(|| self.zeros(0), flat)?;
            let gathered = self.zeros(counts.iter().sum())?;
            let all = AllGather { input, output: gathered.clone(), counts: counts.clone() };
            self.ranks.group().run(Collective::all_gather_into(vec![all]))?;
            let start = |owner: usize| counts[..owner].iter().sum::<usize>();
            let of =
                |item: &Item<'_>| Ok(gathered.narrow(0, start(item.owner), counts[item.owner])?);
            return self.items.iter().map(of).collect();
        }
        let part = most(&self.held);
        let [input, received] = [self.zeros(size * part)?, self.zeros(size * part)?];
        if let (Some(own), Some(output)) = (own, output) {
            for (rank, region) in self.held[own].iter().enumerate() {
                if !region.is_empty() {
                    input.slice_set(&flat(cut(&output, region)?)?, 0, rank * part)?;
                }
            }
        }
        self.ranks.group().run(Collective::all_to_all(&received, &input))?;
        let of = |(item, held): (&Item<'_>, &Vec<Region>)| {
            Ok(received.narrow(0, item.owner * part, held[rank].elem_count())?)
        };
        self.items.iter().zip(&self.held).map(of).collect()
    }
}

/// The largest number of elements that a rank has of a matrix.
fn most(regions: &[Vec<Region>]) -> usize {
    regions.iter().flatten().map(Region::elem_count).max().unwrap_or(0)
}

fn flat(tensor: Tensor) -> Result<Tensor> {
    Ok(tensor.contiguous()?.flatten_all()?)
}

/// A region of a matrix.
fn cut(matrix: &Tensor, region: &Region) -> Result<Tensor> {
    let rows = matrix.narrow(0, region.offsets[0], region.sizes[0])?;
    Ok(rows.narrow(1, region.offsets[1], region.sizes[1])?)
}

/// Writes flat values to a region of a matrix.
fn paste(matrix: &Tensor, region: &Region, values: &Tensor) -> Result<()> {
    if region.is_empty() {
        return Ok(());
    }
    let rows = matrix.narrow(0, region.offsets[0], region.sizes[0])?;
    let values = values.reshape((region.sizes[0], region.sizes[1]))?.contiguous()?;
    Ok(rows.slice_set(&values, 1, region.offsets[1])?)
}
