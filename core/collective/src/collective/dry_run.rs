//! A group of which one rank runs, for dry runs.

use std::sync::Arc;

use candle_core::Tensor;

use super::{AllGather, Collective, ProcessGroup, Work, check};
use crate::Result;

/// A group of which only this rank runs, as PyTorch's `FakeProcessGroup`.
///
/// Its collectives end at once, as if every other rank had the values of this one. Gathered parts
/// of integers are copies of this rank's, if all parts are equally long and the whole is small
/// ([`COPIED_BYTES`]): these are control messages. Other results are left as they were: they have
/// the right shape, and no meaning. So agreements between ranks hold, and the rank goes the way
/// that it would go among others.
///
/// ```
/// use fulgurite_core::collective::{DryRunGroup, ProcessGroup as _, all_gather_object};
///
/// let world = DryRunGroup::world(5, 8);
/// assert_eq!(all_gather_object(&world, &7)?, [7; 8]);
/// let pair = world.split(&[vec![0, 1, 2, 3], vec![5, 4, 7, 6]], "pair")?;
/// assert_eq!((pair.rank(), pair.global_ranks()), (0, &[5, 4, 7, 6][..]));
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct DryRunGroup {
    name: String,
    rank: usize,
    global_ranks: Arc<[usize]>,
}

/// Gathered wholes of up to this many bytes are filled. Control messages between thousands of ranks
/// are smaller.
pub const COPIED_BYTES: usize = 1 << 20;

impl DryRunGroup {
    /// The group of all of `world_size` ranks, as `rank` sees it.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn world(rank: usize, world_size: usize) -> Self {
        assert!(rank < world_size, "rank {rank} of {world_size}");
        Self { name: "world".to_owned(), rank, global_ranks: (0..world_size).collect() }
    }

    /// Fills the gathered whole with this rank's part, if the parts are equally long.
    fn gather(&self, part: &AllGather) -> Result<()> {
        let own = part.counts[self.rank];
        let bytes = part.output.elem_count() * part.output.dtype().size_in_bytes();
        let is_message = part.output.dtype().is_int() && bytes <= COPIED_BYTES;
        if !is_message || part.counts.iter().any(|&count| count != own) {
            return Ok(());
        }
        let (input, output) = (part.input.flatten_all()?.copy()?, part.output.flatten_all()?);
        for i in 0..part.counts.len() {
            output.slice_set(&input, 0, i * own)?;
        }
        Ok(())
    }
}

impl ProcessGroup for DryRunGroup {
    fn name(&self) -> &str {
        &self.name
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.global_ranks.len()
    }

    fn global_ranks(&self) -> &[usize] {
        &self.global_ranks
    }

    fn start(&self, collective: Collective, _overlap: bool) -> Result<Work> {
        collective.check(self)?;
        if let Collective::AllGatherInto(parts) = &collective {
            parts.iter().try_for_each(|part| self.gather(part))?;
        }
        // The tensors live until the wait, as with other ranks.
        Ok(Work::pending(move || {
            drop(collective);
            Ok(())
        }))
    }

    fn send(&self, _tensor: &Tensor, dst: usize) -> Result<Work> {
        check::peer(self, "send", dst)?;
        Ok(Work::ready())
    }

    fn recv(&self, _tensor: &Tensor, src: usize) -> Result<Work> {
        check::peer(self, "recv", src)?;
        Ok(Work::ready())
    }

    fn split(&self, partition: &[Vec<usize>], name: &str) -> Result<Arc<dyn ProcessGroup>> {
        check::partition(self, partition)?;
        let own = partition.iter().find_map(|set| {
            let rank = set.iter().position(|&rank| rank == self.rank)?;
            let global_ranks = set.iter().map(|&rank| self.global_ranks[rank]).collect();
            Some(Self { name: name.to_owned(), rank, global_ranks })
        });
        let group: &dyn ProcessGroup = self;
        let own = own.ok_or_else(|| group.error("split", "no part has this rank"))?;
        Ok(Arc::new(own))
    }

    fn abort(&self, _reason: &str) {}
}
