//! [`TrainerState`].

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::trainer::checkpoints::retention::RetainedCheckpoint;
use crate::trainer::checkpoints::saved_state::{CallbackState, SavedState};
use crate::trainer::progress::{Cursor, RunLength};
use crate::trainer::record::log_table::SavedStates;

/// The trainer's state in a checkpoint. With weights and optimizer state it is all that a resumed
/// run needs to continue like an uninterrupted one.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct TrainerState {
    pub(crate) cursor: Cursor,
    pub(crate) seed: u64,
    /// The epoch of the last step; `None` before the first.
    #[serde(default)]
    pub(crate) epoch: Option<u64>,
    /// Whether the validation due after the last step has not been run yet.
    #[serde(default)]
    pub(crate) validation_due: bool,
    /// The latest metrics of rank 0; `None` for values that are not finite.
    #[serde(default)]
    pub(crate) metrics: BTreeMap<String, Option<f64>>,
    /// What the present epoch has logged so far, by rank; empty if nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) epoch_metrics: Vec<SavedStates>,
    /// What the module of rank 0 saves of itself.
    #[serde(default, skip_serializing_if = "SavedState::is_empty")]
    pub(crate) module: SavedState,
    /// The states of the callbacks of rank 0.
    #[serde(default)]
    pub(crate) callbacks: Vec<CallbackState>,
    /// The checkpoints that this run keeps, including this one.
    #[serde(default)]
    pub(crate) kept: Vec<RetainedCheckpoint>,
    /// The fingerprint of the data; `None` if it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) data: Option<String>,
    /// What defines the training samples besides the data, by name; empty in checkpoints of versions that
    /// did not record it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) samples: BTreeMap<String, String>,
    /// The steps and the epochs that the run has, as schedules see them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) length: Option<RunLength>,
}
