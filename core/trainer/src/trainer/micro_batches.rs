//! Into how many micro-batches a batch is split, and what happens if a micro-batch is too large for the memory of a rank.

use super::session::Session;
use crate::{Error, Result, counted};

impl Session {
    /// Samples that a rank computes on at a time, in training.
    pub(super) fn micro_batch_size(&self) -> usize {
        self.batch_size / self.micro_batches_in_batch
    }

    /// Micro-batches of each rank in a step that accumulates over this number of batches.
    pub(super) fn micro_batches_in_step(&self, accumulate: u64) -> usize {
        accumulate as usize * self.micro_batches_in_batch
    }

    /// Leaves a step that failed with `error` on this rank, if that was because a rank has no memory left and smaller
    /// micro-batches are possible: the step is to begin again with them. Collective in that case.
    ///
    /// # Errors
    /// `error` otherwise, and if the ranks cannot leave the step together.
    pub(super) fn leave_step(&mut self, error: Error) -> Result<()> {
        let fabric = &self.parts.fabric;
        let Some(rank) = fabric.abandon_step(&error)? else { return Err(error) };
        let (step, before) = (self.cursor.step + 1, self.micro_batch_size());
        let Some(samples) = next_smaller(before) else {
            let why = format!(
                "rank {rank} has no memory left in step {step}, and a micro-batch of one sample cannot be smaller: \
                 shard the model over more ranks, or set `trainer.activation_checkpointing`"
            );
            // The error of the others says only that this rank has left the step.
            return Err(if rank == self.rank() { error.during(why) } else { Error::other(why) });
        };
        self.micro_batches_in_batch = self.batch_size / samples;
        if self.rank() == 0 {
            tracing::warn!(
                "rank {rank} has no memory left in step {step}, which begins again: micro-batches now have {} \
                 instead of {before}, {} for each batch of {}",
                counted(samples, "sample"),
                self.micro_batches_in_batch,
                self.batch_size
            );
        }
        Ok(())
    }
}

/// The largest number that divides `samples` and is at most half of it.
fn next_smaller(samples: usize) -> Option<usize> {
    (1..=samples / 2).rev().find(|smaller| samples.is_multiple_of(*smaller))
}

#[cfg(test)]
mod tests {
    use super::next_smaller;

    #[test]
    fn batches_are_halved_where_they_can_be() {
        let sizes = |first| std::iter::successors(Some(first), |size| next_smaller(*size));
        assert_eq!(sizes(8).collect::<Vec<_>>(), [8, 4, 2, 1]);
        assert_eq!(sizes(45).collect::<Vec<_>>(), [45, 15, 5, 1]);
        assert_eq!(sizes(7).collect::<Vec<_>>(), [7, 1]);
    }
}
