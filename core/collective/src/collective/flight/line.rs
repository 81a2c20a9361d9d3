//! The lines of a flight record.

use serde::{Deserialize, Serialize};

/// A line of a flight record, in JSON.
///
/// The rank comes first, then groups and channels, then the calls in the order in which they began.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum FlightLine {
    /// The rank.
    Rank(FlightHead),
    /// A group that the rank is in.
    Group(GroupLine),
    /// Calls that are numbered together.
    Channel(ChannelLine),
    /// A call.
    Call(Call),
}

/// The rank that a record is of.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FlightHead {
    /// The global rank.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// The rank's host.
    pub host: String,
    /// When the record was written, in seconds since 1970.
    pub written: f64,
    /// Number of calls that were recorded in all. The record has the last of them.
    pub calls: u64,
}

/// A group.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GroupLine {
    /// Number of the group in this record: 0, 1, …
    pub id: usize,
    /// Its name: a mesh dimension, or `world`.
    pub name: String,
    /// Its global ranks, in group order.
    pub ranks: Vec<usize>,
}

/// Calls of a group that are numbered together: its collectives, or its messages with one rank.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Channel {
    /// The collectives.
    #[default]
    All,
    /// The messages to a group rank.
    To(usize),
    /// The messages from a group rank.
    From(usize),
}

/// The calls of a channel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChannelLine {
    /// [`GroupLine::id`] of its group.
    pub group: usize,
    /// The channel.
    pub channel: Channel,
    /// Number of calls in all, also of those before the record's first.
    pub calls: u64,
}

/// A call of a group.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Call {
    /// [`GroupLine::id`] of its group.
    pub group: usize,
    /// Its channel.
    #[serde(default, skip_serializing_if = "is_collective")]
    pub channel: Channel,
    /// Its number in the channel, from 1 on.
    pub number: u64,
    /// The name of the method of [`ProcessGroup`](super::super::ProcessGroup).
    pub op: String,
    /// Bytes of the full tensors.
    pub bytes: u64,
    /// What it is for, such as a unit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// When the rank began it, in seconds since 1970.
    pub begun: f64,
    /// When it was started, and the rank went on computing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started: Option<f64>,
    /// When the rank began to wait for its end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waited: Option<f64>,
    /// When the rank had waited for its end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<f64>,
    /// Whether it failed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub failed: bool,
}

impl Call {
    /// Whether the rank was stuck in the call, or the call failed. A rank is not stuck in a call
    /// that it has started early, until it waits for it.
    pub fn is_stuck(&self) -> bool {
        let is_in_it = self.started.is_none() || self.waited.is_some();
        self.failed || (self.ended.is_none() && is_in_it)
    }
}

fn is_collective(channel: &Channel) -> bool {
    *channel == Channel::All
}
