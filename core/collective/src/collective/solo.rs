//! The group of one rank.

use std::sync::{Arc, OnceLock};

use candle_core::{Storage, Tensor};

use super::{Collective, ProcessGroup, Work, check};
use crate::{Error, Result};
use fulgurite_tensor::autograd::storage;

/// A group of one rank, which communicates nothing.
#[derive(Debug, Clone)]
pub struct Solo {
    name: String,
    global_rank: [usize; 1],
    aborted: Arc<OnceLock<String>>,
}

impl Solo {
    /// The group of `global_rank` alone.
    pub fn new(name: impl Into<String>, global_rank: usize) -> Self {
        Self { name: name.into(), global_rank: [global_rank], aborted: Arc::default() }
    }

    fn alive(&self, op: &'static str) -> Result<&dyn ProcessGroup> {
        match self.aborted.get() {
            Some(reason) => {
                let group: &dyn ProcessGroup = self;
                Err(group.error(op, format!("the group was aborted: {reason}")))
            }
            None => Ok(self),
        }
    }
}

/// Copies each second tensor to the first, also between views of one storage. Does nothing if both
/// are the same view.
fn copy<'a>(copied: impl IntoIterator<Item = (&'a Tensor, &'a Tensor)>) -> Result<()> {
    let is_apart =
        |(output, input): &(&Tensor, &Tensor)| storage_address(output) != storage_address(input);
    let (apart, within): (Vec<_>, Vec<_>) = copied.into_iter().partition(is_apart);
    within.into_iter().try_for_each(|(output, input)| copy_within(output, input))?;
    storage::copy_all(&apart)
}

fn copy_within(output: &Tensor, input: &Tensor) -> Result<()> {
    let offset = |t: &Tensor| t.storage_and_layout().1.start_offset();
    if offset(output) == offset(input) {
        return Ok(());
    }
    storage::copy_from(output, &input.copy()?)
}

/// Identifies a tensor's storage. The storage is locked only within this call.
fn storage_address(tensor: &Tensor) -> *const Storage {
    let (storage, _) = tensor.storage_and_layout();
    &*storage
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

    fn start(&self, collective: Collective, _overlap: bool) -> Result<Work> {
        collective.check(self.alive(collective.name())?)?;
        match collective {
            Collective::AllGatherInto(parts) => {
                copy(parts.iter().map(|part| (&part.output, &part.input)))?;
            }
            Collective::ReduceScatter { parts, .. } => {
                copy(parts.iter().map(|part| (&part.output, &part.input)))?;
            }
            Collective::AllToAll(exchange) => copy([(&exchange.output, &exchange.input)])?,
            Collective::AllReduce { .. } | Collective::Broadcast { .. } | Collective::Barrier => {}
        }
        Ok(Work::ready())
    }

    fn send(&self, _tensor: &Tensor, dst: usize) -> Result<Work> {
        check::peer(self.alive("send")?, "send", dst)?;
        Ok(Work::ready())
    }

    fn recv(&self, _tensor: &Tensor, src: usize) -> Result<Work> {
        check::peer(self.alive("recv")?, "recv", src)?;
        Ok(Work::ready())
    }

    fn split(&self, partition: &[Vec<usize>], name: &str) -> Result<Arc<dyn ProcessGroup>> {
        check::partition(self.alive("split")?, partition)?;
        Ok(Arc::new(Self::new(name, self.global_rank[0])))
    }

    fn abort(&self, reason: &str) {
        let _ = self.aborted.set(reason.to_owned());
    }

    fn failure(&self) -> Option<Error> {
        self.alive("failure").err()
    }
}
