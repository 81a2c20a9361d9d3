//! The group of one rank.

use std::sync::Arc;

use candle_core::Tensor;

use super::{AllGather, ProcessGroup, ReduceOp, ReduceScatter, Work};
use crate::Result;
use crate::autograd::storage;

/// A group of one rank: what it gathers or reduces is its own. It communicates nothing.
#[derive(Debug, Clone)]
pub struct Solo {
    name: String,
    global_rank: [usize; 1],
}

impl Solo {
    /// The group of `global_rank` alone.
    pub fn new(name: impl Into<String>, global_rank: usize) -> Self {
        Self { name: name.into(), global_rank: [global_rank] }
    }
}

impl ProcessGroup for Solo {
    fn name(&self) -> &str {
        &self.name
    }

    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn global_ranks(&self) -> &[usize] {
        &self.global_rank
    }

    fn all_reduce(&self, _tensor: &Tensor, _op: ReduceOp) -> Result<Work> {
        Ok(Work::ready())
    }

    fn all_gather_into(&self, parts: Vec<AllGather>) -> Result<Work> {
        for part in parts {
            storage::copy_from(&part.output, &part.input)?;
        }
        Ok(Work::ready())
    }

    fn reduce_scatter(&self, parts: Vec<ReduceScatter>, _op: ReduceOp) -> Result<Work> {
        for part in parts {
            storage::copy_from(&part.output, &part.input)?;
        }
        Ok(Work::ready())
    }

    fn broadcast(&self, _tensor: &Tensor, _src: usize) -> Result<Work> {
        Ok(Work::ready())
    }

    fn all_to_all(&self, output: &Tensor, input: &Tensor) -> Result<Work> {
        storage::copy_from(output, input)?;
        Ok(Work::ready())
    }

    fn send(&self, _tensor: &Tensor, dst: usize) -> Result<Work> {
        let group: &dyn ProcessGroup = self;
        Err(group.error("send", format!("there is no rank {dst} in a group of one")))
    }

    fn recv(&self, _tensor: &Tensor, src: usize) -> Result<Work> {
        let group: &dyn ProcessGroup = self;
        Err(group.error("recv", format!("there is no rank {src} in a group of one")))
    }

    fn barrier(&self) -> Result<Work> {
        Ok(Work::ready())
    }

    fn split(&self, _partition: &[Vec<usize>], name: &str) -> Result<Arc<dyn ProcessGroup>> {
        Ok(Arc::new(Self::new(name, self.global_rank[0])))
    }

    fn abort(&self, _reason: &str) {}
}
