//! The tests, in order, and the group under test.

use candle_core::{Device, Tensor};

use super::value::{Value, reduced, slacks};
use crate::{Error, Result};
use fulgurite_engine::autograd::storage;
use fulgurite_engine::collective::{ProcessGroup, ReduceOp};

/// Checks the contract of [`ProcessGroup`] except failures, with tensors on the CPU.
///
/// Reductions are compared bit by bit, unless the group declares them
/// [not exact](ProcessGroup::exact_reductions).
///
/// Collective: every rank of the group calls it, of any size. Runs about a hundred sizes, dtypes
/// and operations, with some tens of MB of data on each rank. The group stays usable.
///
/// # Errors
/// The first broken promise: the collective, the case, and the expectation.
pub fn process_group(group: &dyn ProcessGroup) -> Result<()> {
    process_group_on(group, &Device::Cpu)
}

/// Checks as [`process_group`], with tensors on `device`.
pub fn process_group_on(group: &dyn ProcessGroup, device: &Device) -> Result<()> {
    let suite = Suite { group, device, from_group: false };
    suite.identity()?;
    suite.data()?;
    // With tensors in the group's own memory, on all ranks and on some.
    Suite { from_group: true, ..suite }.data()?;
    Suite { from_group: group.rank() % 2 == 1, ..suite }.data()?;
    suite.point_to_point()?;
    suite.waited_for()?;
    suite.in_flight()?;
    suite.misuse()?;
    suite.split()?;
    suite.behind()?;
    suite.barrier()
}

/// Elements of the large cases: more than a transport's chunk, and not a multiple of it.
pub(super) const LARGE: usize = 1_500_007;

/// A group under test.
#[derive(Clone, Copy)]
pub(super) struct Suite<'a> {
    pub(super) group: &'a dyn ProcessGroup,
    pub(super) device: &'a Device,
    /// Whether [`ProcessGroup::empty`] allocates the tensors.
    pub(super) from_group: bool,
}

impl Suite<'_> {
    /// Runs all collectives with data.
    fn data(&self) -> Result<()> {
        self.all_reduce()?;
        self.reduce_scatter()?;
        self.all_gather()?;
        self.broadcast()?;
        self.all_to_all()
    }

    pub(super) fn size(&self) -> usize {
        self.group.size()
    }

    pub(super) fn rank(&self) -> usize {
        self.group.rank()
    }

    pub(super) fn wrong(&self, what: impl std::fmt::Display) -> Error {
        self.group.error("conformance", what)
    }

    pub(super) fn ensure(&self, holds: bool, what: impl std::fmt::Display) -> Result<()> {
        if holds { Ok(()) } else { Err(self.wrong(what)) }
    }

    fn identity(&self) -> Result<()> {
        let group = self.group;
        self.ensure(group.size() > 0 && group.rank() < group.size(), "rank() is not below size()")?;
        let ranks = group.global_ranks();
        self.ensure(ranks.len() == group.size(), "global_ranks() is not one a rank")?;
        let mut sorted = ranks.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        self.ensure(sorted.len() == ranks.len(), "global_ranks() names a rank twice")
    }

    /// A barrier ends when all ranks have joined. (`process_group_abort` checks that it does not
    /// end earlier.)
    fn barrier(&self) -> Result<()> {
        for _ in 0..20 {
            self.group.barrier()?.wait()?;
        }
        Ok(())
    }

    /// Returns a view of `values` in the middle of a larger tensor, and the larger tensor.
    pub(super) fn view<T: Value>(&self, values: &[T]) -> Result<View<T>> {
        let margin = 3;
        let mut all = vec![T::MARGIN; values.len() + 2 * margin];
        all[margin..margin + values.len()].copy_from_slice(values);
        let n = all.len();
        let mut whole = Tensor::from_vec(all, n, &Device::Cpu)?.to_device(self.device)?;
        if self.from_group {
            let empty = self.group.empty(n, T::DTYPE, self.device)?;
            let fits = empty.dims() == [n] && empty.dtype() == T::DTYPE;
            self.ensure(fits, format!("empty() made {empty:?} of {n} {:?}", T::DTYPE))?;
            storage::copy_from(&empty, &whole)?;
            whole = empty;
        }
        let tensor = whole.narrow(0, margin, values.len())?;
        Ok(View { whole, tensor, margin, _type: std::marker::PhantomData })
    }
}

/// A view of a larger tensor, whose other elements must not change.
pub(super) struct View<T> {
    pub(super) whole: Tensor,
    pub(super) tensor: Tensor,
    pub(super) margin: usize,
    pub(super) _type: std::marker::PhantomData<T>,
}

impl<T: Value> View<T> {
    /// Checks the view and the other elements, bit by bit.
    pub(super) fn expect(&self, suite: &Suite, what: &str, expected: &[T]) -> Result<()> {
        self.expect_each(suite, what, expected, |_, found, expected| found.same(expected))
    }

    /// Checks that the view has a part of the reduction of all ranks' `n`
    /// [`values`](super::value::values).
    ///
    /// Bit by bit, unless the group declares its reductions not exact.
    pub(super) fn expect_reduced(
        &self,
        suite: &Suite,
        what: &str,
        op: ReduceOp,
        (n, salt): (usize, u64),
        part: std::ops::Range<usize>,
    ) -> Result<()> {
        let expected = &reduced::<T>(op, suite.size(), n, salt)[part.clone()];
        if suite.group.exact_reductions() {
            return self.expect(suite, what, expected);
        }
        let slacks = &slacks::<T>(op, suite.size(), n, salt)[part];
        self.expect_each(suite, what, expected, |i, found, expected| {
            found.is_near(expected, slacks[i])
        })
    }

    /// Checks the elements of the view with `fits`, and the other elements bit by bit.
    pub(super) fn expect_each(
        &self,
        suite: &Suite,
        what: &str,
        expected: &[T],
        fits: impl Fn(usize, T, T) -> bool,
    ) -> Result<()> {
        let all = self.whole.to_device(&Device::Cpu)?.to_vec1::<T>()?;
        let (before, rest) = all.split_at(self.margin);
        let (found, after) = rest.split_at(expected.len());
        for (i, (a, b)) in found.iter().zip(expected).enumerate() {
            if !fits(i, *a, *b) {
                return Err(suite.wrong(format!(
                    "{what}: element {i} of {} is {a:?}, expected {b:?}",
                    expected.len(),
                )));
            }
        }
        let clean = before.iter().chain(after).all(|x| x.same(T::MARGIN));
        suite.ensure(clean, format!("{what}: changed memory outside the view it was given"))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{process_group_abort, process_group_timeout};
    use super::*;
    use fulgurite_engine::collective::Solo;
    use std::time::Duration;

    #[test]
    fn single_rank_group_conforms() {
        process_group(&Solo::new("world", 3)).unwrap();
        process_group_abort(&Solo::new("world", 3)).unwrap();
        process_group_timeout(&Solo::new("world", 3), Duration::ZERO).unwrap();
    }
}
