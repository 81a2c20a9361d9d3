//! Where a run stands: its position, its length, and how a step is divided.

use serde::{Deserialize, Serialize};

use super::Stage;

/// The position of a run: optimizer steps and samples.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Cursor {
    /// Optimizer steps done.
    pub(crate) step: u64,
    /// Samples used by all ranks: the position in the endless stream of samples.
    pub(crate) samples: u64,
}

/// The length of a run as far as it is known: steps and epochs, as schedules see them.
pub(crate) type RunLength = (Option<u64>, Option<u64>);

/// The progress of a run. Equal on all ranks.
#[derive(Debug)]
pub(crate) struct Progress {
    stage: Stage,
    cursor: Cursor,
    /// The epoch of the step that is being or was last computed, counted from 0.
    epoch: u64,
    /// The epoch whose start hook was called last; `None` before the first.
    started_epoch: Option<u64>,
    /// Whether the validation due after the last step has not been run yet.
    validation_due: bool,
    length: RunLength,
    /// The length that a resumed run had before.
    length_before: Option<RunLength>,
    /// The count of the losses of the last step, over all ranks.
    items: f64,
    /// Batches of each rank in a step.
    accumulate: u64,
    /// Micro-batches that a batch is split into.
    micro_batches_in_batch: usize,
}

impl Progress {
    /// A run that begins, with steps of `accumulate` batches, each split into `micro_batches_in_batch`.
    pub(crate) fn new(stage: Stage, accumulate: u64, micro_batches_in_batch: usize) -> Self {
        Self {
            stage,
            cursor: Cursor::default(),
            epoch: 0,
            started_epoch: None,
            validation_due: false,
            length: (None, None),
            length_before: None,
            items: 0.0,
            accumulate,
            micro_batches_in_batch,
        }
    }

    /// Goes to the position of a checkpoint.
    pub(crate) fn resume(&mut self, cursor: Cursor) {
        self.cursor = cursor;
    }

    /// Goes on as the training of a checkpoint, whose last step was in `epoch` (`None` before the first step).
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

    /// Optimizer steps done.
    pub(crate) fn step(&self) -> u64 {
        self.cursor.step
    }

    pub(crate) fn samples(&self) -> u64 {
        self.cursor.samples
    }

    /// Goes to the end of the step that ends before sample `samples`, whose losses count `items`. Returns the position
    /// before the step.
    pub(crate) fn end_step(&mut self, samples: u64, items: f64) -> Cursor {
        let before = self.cursor;
        self.cursor = Cursor { step: before.step + 1, samples };
        self.items = items;
        before
    }

    /// Goes back to the position before a step that changed nothing.
    pub(crate) fn go_back(&mut self, before: Cursor) {
        self.cursor = before;
    }

    /// The count of the losses of the last step, over all ranks.
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

    /// Goes to the epoch of the next step. Returns whether that epoch starts.
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

    /// The length that a resumed run had before.
    pub(crate) fn length_before(&self) -> Option<RunLength> {
        self.length_before
    }

    /// Batches of each rank in a step.
    pub(crate) fn accumulate(&self) -> u64 {
        self.accumulate
    }

    /// Sets the number of batches in a step. Returns whether it changes.
    pub(crate) fn set_accumulate(&mut self, accumulate: u64) -> bool {
        std::mem::replace(&mut self.accumulate, accumulate) != accumulate
    }

    /// Micro-batches that a batch is split into.
    pub(crate) fn micro_batches_in_batch(&self) -> usize {
        self.micro_batches_in_batch
    }

    pub(crate) fn split_batches_into(&mut self, micro_batches: usize) {
        self.micro_batches_in_batch = micro_batches;
    }
}
