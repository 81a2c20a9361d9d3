//! Splitting groups.

use super::suite::Suite;
use super::value::values;
use crate::Result;
use fulgurite_engine::collective::{ProcessGroup, ReduceOp};

impl Suite<'_> {
    pub(super) fn split(&self) -> Result<()> {
        let all: Vec<usize> = (0..self.size()).collect();
        let reversed: Vec<usize> = all.iter().rev().copied().collect();
        let singles: Vec<Vec<usize>> = all.iter().map(|&r| vec![r]).collect();
        let (even, odd): (Vec<usize>, Vec<usize>) = all.iter().partition(|&&r| r % 2 == 0);
        let halves = all.chunks(all.len().div_ceil(2)).map(<[_]>::to_vec).collect();
        let two = [odd, even].into_iter().filter(|set| !set.is_empty()).collect();
        let partitions = [vec![all], vec![reversed], singles, two, halves];
        for (i, partition) in partitions.into_iter().enumerate() {
            let name = format!("part{i}");
            let child = self.split_case(&partition, &name)?;
            // Splits the split group again; the partition lists the child's ranks.
            let nested: Vec<usize> = (0..child.size()).rev().collect();
            let suite = Suite { group: &*child, ..*self };
            suite.split_case(&[nested], "nested")?;
            child.barrier()?.wait()?;
        }
        // Parent and child both still work.
        let whole: Vec<usize> = (0..self.size()).collect();
        let child = self.group.split(&[whole], "beside")?;
        let a = self.view(&values::<f32>(self.rank(), 100, 1))?;
        let b = self.view(&values::<f32>(self.rank(), 100, 2))?;
        let first = self.group.all_reduce(&a.tensor, ReduceOp::Sum)?;
        let second = child.all_reduce(&b.tensor, ReduceOp::Sum)?;
        second.wait()?;
        first.wait()?;
        a.expect_reduced(self, "parent", ReduceOp::Sum, (100, 1), 0..100)?;
        b.expect_reduced(self, "child", ReduceOp::Sum, (100, 2), 0..100)
    }

    fn split_case(
        &self,
        partition: &[Vec<usize>],
        name: &str,
    ) -> Result<std::sync::Arc<dyn ProcessGroup>> {
        let child = self.group.split(partition, name)?;
        let what = format!("split into {partition:?}");
        let Some(set) = partition.iter().find(|set| set.contains(&self.rank())) else {
            return Err(self.wrong(format!("{what} leaves out rank {}", self.rank())));
        };
        let global: Vec<usize> = set.iter().map(|&r| self.group.global_ranks()[r]).collect();
        self.ensure(child.name() == name, format!("{what}: is named {}", child.name()))?;
        self.ensure(child.size() == set.len(), format!("{what}: has size {}", child.size()))?;
        self.ensure(
            child.global_ranks() == global && set[child.rank()] == self.rank(),
            format!("{what}: rank {} of {:?}", child.rank(), child.global_ranks()),
        )?;
        let suite = Suite { group: &*child, ..*self };
        let view = suite.view(&values::<f32>(child.rank(), 2049, 3))?;
        child.all_reduce(&view.tensor, ReduceOp::Sum)?.wait()?;
        let reduced = format!("{what}: all_reduce");
        view.expect_reduced(&suite, &reduced, ReduceOp::Sum, (2049, 3), 0..2049)?;
        for src in 0..child.size() {
            let view = suite.view(&values::<u32>(child.rank(), 9, 4))?;
            child.broadcast(&view.tensor, src)?.wait()?;
            view.expect(&suite, &format!("{what}: broadcast"), &values::<u32>(src, 9, 4))?;
        }
        Ok(child)
    }
}
