//! [`TrainerState`].

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::trainer::SaveRequest;
use crate::trainer::checkpoints::retention::RetainedCheckpoint;
use crate::trainer::checkpoints::saved_state::{CallbackState, SavedState};
use crate::trainer::progress::{Cursor, RunLength, Tail};
use crate::trainer::record::log_table::SavedStates;

/// The trainer's state in a checkpoint.
///
/// With weights and optimizer state it suffices for a resumed run to continue like an uninterrupted
/// one.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct TrainerState {
    pub(crate) cursor: Cursor,
    pub(crate) seed: u64,
    /// The epoch of the last step; `None` before the first.
    #[serde(default)]
    pub(crate) epoch: Option<u64>,
    /// Whether the validation due after the last step has not run yet.
    #[serde(default)]
    pub(crate) validation_due: bool,
    /// What a run goes on with after the loss of a rank; `None` in checkpoints.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) goes_on: Option<GoesOn>,
    /// The latest metrics of rank 0; `None` for values that are not finite.
    #[serde(default)]
    pub(crate) metrics: BTreeMap<String, Option<f64>>,
    /// Values logged so far in the present epoch, by rank; empty if nothing was logged.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) epoch_metrics: Vec<SavedStates>,
    /// The state that the module of rank 0 saves.
    #[serde(default, skip_serializing_if = "SavedState::is_empty")]
    pub(crate) module: SavedState,
    /// The states of the callbacks of rank 0.
    #[serde(default)]
    pub(crate) callbacks: Vec<CallbackState>,
    /// The checkpoints that this run keeps, including this one.
    #[serde(default)]
    pub(crate) kept: Vec<RetainedCheckpoint>,
    /// The fingerprint of the data, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) data: Option<String>,
    /// The settings besides the data that define the training samples, by name.
    ///
    /// Empty in checkpoints of versions that did not record them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) samples: BTreeMap<String, String>,
    /// The run's length in steps and epochs, as schedules see it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) length: Option<RunLength>,
}

/// The part of a run's state that only the same run goes on with.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct GoesOn {
    pub(crate) tail: Tail,
    /// Whether the run stops after this step.
    pub(crate) stop: bool,
    /// Checkpoints that hooks have requested.
    pub(crate) saves: Vec<SaveRequest>,
    /// The step in which each metric was logged last.
    pub(crate) metric_steps: BTreeMap<String, u64>,
    /// The checkpoint of the run's location that it resumed from.
    pub(crate) resumed_from: Option<String>,
}
