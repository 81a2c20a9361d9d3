//! The log of units' actions, `fulgurite::fsdp`: their order at level `debug`, also bytes and times
//! at `trace`.

use std::time::Instant;

use tracing::Level;

use super::group::ParamGroup;
use crate::schedule::fsdp::{Action, Event};

/// Writes a rank's lines. Reads the clock only if times are logged.
pub(super) struct Log<'a> {
    pub(super) rank: usize,
    pub(super) groups: &'a [ParamGroup],
}

/// The target of the lines, for `FULGURITE_LOG`.
macro_rules! line {
    ($level:ident, $self:ident, $group:expr, $what:expr $(, $field:ident)*) => {
        tracing::$level!(
            target: "fulgurite::fsdp",
            rank = $self.rank,
            unit = %$self.groups[$group].path,
            $($field,)*
            "{}", $what
        )
    };
}

fn traces() -> bool {
    tracing::enabled!(target: "fulgurite::fsdp", Level::TRACE)
}

impl Log<'_> {
    pub(super) fn event(&self, event: Event) {
        match event {
            Event::PreForward { group, .. } => line!(debug, self, group, "pre-forward"),
            Event::PostForward { group } => line!(debug, self, group, "post-forward"),
            Event::PreBackward { group } => line!(debug, self, group, "pre-backward"),
            _ => {}
        }
    }

    /// Logs an action that starts or is immediate. Returns the start time of a waiting action, if
    /// times are logged.
    pub(super) fn before(&self, action: Action) -> Option<Instant> {
        let (group, what, bytes) = match action {
            Action::Gather(g) => (g, "gather started", self.groups[g].gathered_bytes()),
            Action::GatherParts(g) => {
                (g, "gather from parts started", self.groups[g].gathered_bytes())
            }
            Action::Free(g) => (g, "freed", self.groups[g].gathered_bytes()),
            Action::KeepPart(g) => (g, "freed but for a part", self.groups[g].gathered_bytes()),
            Action::Reduce(g) => (g, "reduce started", self.groups[g].gradient_bytes()),
            Action::WaitGather(_) | Action::WaitReduction(_) | Action::WaitReplication(_) => {
                return traces().then(Instant::now);
            }
            Action::CompleteUnused(_) | Action::Replicate(_) | Action::Deliver => return None,
        };
        match traces() {
            true => line!(trace, self, group, what, bytes),
            false => line!(debug, self, group, what),
        }
        None
    }

    /// Logs a finished wait, with its duration if it `began` at a known time.
    pub(super) fn after(&self, action: Action, began: Option<Instant>) {
        let (group, what) = match action {
            Action::WaitGather(group) => (group, "gather done"),
            Action::WaitReduction(group) => (group, "reduce done"),
            Action::WaitReplication(group) if self.groups[group].has_replicas() => {
                (group, "replicas done")
            }
            _ => return,
        };
        match began {
            Some(began) => {
                let waited_us = began.elapsed().as_micros() as u64;
                line!(trace, self, group, what, waited_us);
            }
            None => line!(debug, self, group, what),
        }
    }
}
