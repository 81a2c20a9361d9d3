//! The progress of a run: its position, its length, and the division of steps.

use serde::{Deserialize, Serialize};

use super::Stage;

/// The position of a run: optimizer steps and samples.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Cursor {
    /// Number of finished optimizer steps.
    pub(crate) step: u64,
    /// Samples used by all ranks: the position in the endless stream of samples.
    pub(crate) samples: u64,
}

/// The length of a run as far as known: steps and epochs, as schedules see them.
pub(crate) type RunLength = (Option<u64>, Option<u64>);

/// The work after a step: its validation, the end of its epoch, its checkpoints, and the vote.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Tail {
    /// Whether some of it may be left.
    pub(crate) open: bool,
    /// Whether the step was validated.
    pub(crate) validated: bool,
    /// The last epoch whose end is done.
    pub(crate) ended_epoch: Option<u64>,
}

/// The progress of a run. Equal on all ranks.
#[derive(Debug)]
pub(crate) struct Progress {
    stage: Stage,
    cursor: Cursor,
    /// The epoch of the current or last step, counted from 0.
    epoch: u64,
    /// The epoch whose start hook was called last; `None` before the first.
    started_epoch: Option<u64>,
    /// Whether the validation due after the last step has not run yet.
    validation_due: bool,
    tail: Tail,
    /// Whether the run goes on after the loss of a rank.
    goes_on: bool,
    length: RunLength,
    /// The run's length before a resume.
    length_before: Option<RunLength>,
    /// The count of the losses of the last step, over all ranks.
    items: f64,
    /// Number of batches per rank in a step.
    accumulate: u64,
    /// Number of micro-batches in a batch.
    micro_batches_in_batch: usize,
}

impl Progress {
    /// Creates the progress of a run that begins. A step has `accumulate` batches, each split into
    /// `micro_batches_in_batch`.
    pub(crate) fn new(stage: Stage, accumulate: u64, micro_batches_in_batch: usize) -> Self {
        Self {
            stage,
            cursor: Cursor::default(),
            epoch: 0,
            started_epoch: None,
            validation_due: false,
            tail: Tail::default(),
            goes_on: false,
            length: (None, None),
            length_before: None,
            items: 0.0,
            accumulate,
            micro_batches_in_batch,
        }
    }

    /// Moves to the position of a checkpoint.
    pub(crate) fn resume(&mut self, cursor: Cursor) {
        self.cursor = cursor;
    }

    /// Continues the training of a checkpoint, whose last step was in `epoch` (`None` before the
    /// first step).
    pub(crate) fn resume_training(
        &mut self,
        epoch: Option<u64>,
        validation_due: bool,
        length: Option<RunLength>,
    ) {
        self.epoch = epoch.unwrap_or(0);
        self.started_epoch = epoch;
        self.validation_due = validation_due;
        self.length_before = length;
    }

    pub(crate) fn stage(&self) -> Stage {
        self.stage
    }

    pub(crate) fn set_stage(&mut self, stage: Stage) {
        self.stage = stage;
    }

    pub(crate) fn cursor(&self) -> Cursor {
        self.cursor
    }

    /// Returns the number of finished optimizer steps.
    pub(crate) fn step(&self) -> u64 {
        self.cursor.step
    }

    pub(crate) fn samples(&self) -> u64 {
        self.cursor.samples
    }

    /// Completes a step that ends before sample `samples` and whose losses count `items`.
    ///
    /// Returns the position before the step.
    pub(crate) fn end_step(&mut self, samples: u64, items: f64) -> Cursor {
        let before = self.cursor;
        self.cursor = Cursor { step: before.step + 1, samples };
        self.items = items;
        self.tail = Tail { open: true, validated: false, ..self.tail };
        before
    }

    /// Returns to the position before a step that changed nothing.
    pub(crate) fn go_back(&mut self, before: Cursor) {
        self.cursor = before;
        self.tail.open = false;
    }

    /// Returns what has been done after the last step.
    pub(crate) fn tail(&self) -> Tail {
        self.tail
    }

    /// Opens or closes the work after the last step.
    pub(crate) fn set_open(&mut self, open: bool) {
        self.tail.open = open;
    }

    /// Notes that the validation after the last step is done.
    pub(crate) fn end_validation(&mut self) {
        (self.validation_due, self.tail.validated) = (false, true);
    }

    /// Notes that the end of the present epoch is done. Returns whether it was not before.
    pub(crate) fn end_epoch(&mut self) -> bool {
        self.tail.ended_epoch.replace(self.epoch) != Some(self.epoch)
    }

    /// Goes on after the loss of a rank.
    pub(crate) fn go_on(&mut self, tail: Tail) {
        (self.tail, self.goes_on) = (tail, true);
    }

    /// Returns whether the run goes on after the loss of a rank, from a state in memory.
    pub(crate) fn goes_on(&self) -> bool {
        self.goes_on
    }

    /// Returns the count of the losses of the last step, over all ranks.
    pub(crate) fn items(&self) -> f64 {
        self.items
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Sets the epoch of the next step before the first epoch has started.
    pub(crate) fn set_first_epoch(&mut self, epoch: u64) {
        if self.started_epoch.is_none() {
            self.epoch = epoch;
        }
    }

    /// Moves to the epoch of the next step. Returns whether that epoch starts.
    pub(crate) fn begin_epoch(&mut self, epoch: u64) -> bool {
        self.epoch = epoch;
        self.started_epoch.replace(epoch) != Some(epoch)
    }

    pub(crate) fn validation_due(&self) -> bool {
        self.validation_due
    }

    pub(crate) fn set_validation_due(&mut self, due: bool) {
        self.validation_due = due;
    }

    pub(crate) fn length(&self) -> RunLength {
        self.length
    }

    pub(crate) fn set_length(&mut self, length: RunLength) {
        self.length = length;
    }

    /// Returns the run's length before a resume.
    pub(crate) fn length_before(&self) -> Option<RunLength> {
        self.length_before
    }

    /// Returns the number of batches per rank in a step.
    pub(crate) fn accumulate(&self) -> u64 {
        self.accumulate
    }

    /// Sets the number of batches in a step. Returns whether it changes.
    pub(crate) fn set_accumulate(&mut self, accumulate: u64) -> bool {
        std::mem::replace(&mut self.accumulate, accumulate) != accumulate
    }

    /// Returns the number of micro-batches in a batch.
    pub(crate) fn micro_batches_in_batch(&self) -> usize {
        self.micro_batches_in_batch
    }

    pub(crate) fn split_batches_into(&mut self, micro_batches: usize) {
        self.micro_batches_in_batch = micro_batches;
    }
}
