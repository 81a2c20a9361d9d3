//! Groups of ranks that are not started yet.

use std::sync::{Arc, Mutex};

use candle_core::Tensor;

use super::{Collective, ProcessGroup, Work, check};
use crate::Result;

/// A group as its first rank will see it, before any rank is started. It has a size and can be
/// split, but cannot communicate. Strategies plan their mesh and cuts on it.
#[derive(Debug, Clone)]
pub struct Planned {
    name: String,
    global_ranks: Vec<usize>,
    /// Global ranks of all groups made so far, also of those without rank 0.
    groups: Arc<Mutex<Vec<Vec<usize>>>>,
}

impl Planned {
    /// The group of all of `world_size` ranks, as rank 0 sees it.
    pub fn world(world_size: usize) -> Self {
        let global_ranks: Vec<_> = (0..world_size).collect();
        let groups = Arc::new(Mutex::new(vec![global_ranks.clone()]));
        Self { name: "world".to_owned(), global_ranks, groups }
    }

    /// Global ranks of all groups that the splits so far will make, including the world and groups
    /// of other ranks.
    pub fn groups(&self) -> Vec<Vec<usize>> {
        self.groups.lock().expect("no panic while groups are noted").clone()
    }

    fn refuse<T>(&self, op: &'static str) -> Result<T> {
        let group: &dyn ProcessGroup = self;
        Err(group.error(op, "the ranks are not started yet, so nothing can be communicated"))
    }
}

impl ProcessGroup for Planned {
    fn name(&self) -> &str {
        &self.name
    }

    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        self.global_ranks.len()
    }

    fn global_ranks(&self) -> &[usize] {
        &self.global_ranks
    }

    fn start(&self, collective: Collective, _overlap: bool) -> Result<Work> {
        self.refuse(collective.name())
    }

    fn send(&self, _tensor: &Tensor, _dst: usize) -> Result<Work> {
        self.refuse("send")
    }

    fn recv(&self, _tensor: &Tensor, _src: usize) -> Result<Work> {
        self.refuse("recv")
    }

    fn split(&self, partition: &[Vec<usize>], name: &str) -> Result<Arc<dyn ProcessGroup>> {
        check::partition(self, partition)?;
        let global = |set: &Vec<usize>| set.iter().map(|&rank| self.global_ranks[rank]).collect();
        let own = partition.iter().find(|set| set.contains(&0)).map(global).unwrap_or_default();
        let mut groups = self.groups.lock().expect("no panic while groups are noted");
        groups.extend(partition.iter().map(global));
        drop(groups);
        Ok(Arc::new(Self { name: name.to_owned(), global_ranks: own, groups: self.groups.clone() }))
    }

    fn abort(&self, _reason: &str) {}
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;
    use crate::collective::ReduceOp;
    use crate::mesh::{DP_SHARD_CP, DeviceMesh, TENSOR_PARALLEL};

    #[test]
    fn planned_world_splits_without_communication() {
        let world = Arc::new(Planned::world(8));
        let layout = DeviceMesh::layout_for(8, Some(2), None, Some(1), Some(2)).unwrap();
        let mesh = DeviceMesh::new(layout, world.clone()).unwrap();
        assert_eq!(mesh.group(DP_SHARD_CP).unwrap().global_ranks(), [0, 2]);
        assert_eq!(mesh.group(TENSOR_PARALLEL).unwrap().global_ranks(), [0, 1]);
        let groups = world.groups();
        let of_first = groups.iter().filter(|set| set.contains(&0)).map(|set| format!("{set:?}"));
        let of_first = of_first.collect::<Vec<_>>().join(" ");
        insta::assert_snapshot!(of_first, @"[0, 1, 2, 3, 4, 5, 6, 7] [0, 4] [0, 2] [0, 1] [0, 2, 4, 6] [0, 2, 4, 6]");
        assert_eq!(groups.len(), 1 + 3 * 4 + 2 * 2);
        let one = Tensor::new(&[1f32], &candle_core::Device::Cpu).unwrap();
        let error = world.run(Collective::all_reduce(&one, ReduceOp::Sum)).unwrap_err();
        assert_says!(error, "rank 0, process group `world`, all_reduce … not started yet …");
    }
}
