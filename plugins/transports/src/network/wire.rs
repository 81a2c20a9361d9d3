//! The network interface of the engine: messages between the members of a group.

use std::sync::Arc;
use std::time::Duration;

use fulgurite_core::Result;

/// A way to reach the other ranks of a job, such as TCP or MPI. One for each process.
pub trait Network: Send + Sync {
    /// The network's name, for messages: `tcp`.
    fn name(&self) -> &'static str;

    /// Connects the members of a group, given by their global ranks; `own` is this process's index.
    ///
    /// Collective over the members, which all pass the same `key`, unique among the job's groups.
    /// While waiting for a member, calls `wanted` at least every [`POLL_INTERVAL`].
    ///
    /// # Errors
    /// Errors of `wanted`. [`Error::Launch`](fulgurite_core::Error::Launch) if a member is missing
    /// after `timeout` or cannot be reached; the error names the member.
    fn connect(
        self: Arc<Self>,
        key: &str,
        members: &[usize],
        own: usize,
        timeout: Duration,
        wanted: &dyn Fn() -> Result<()>,
    ) -> Result<Box<dyn Wire>>;

    /// A rank's location for messages, its host's name or address, if known.
    fn place(&self, rank: usize) -> Option<String> {
        let _ = rank;
        None
    }
}

/// The connections of one member of a group to the others. Members are numbered by their index in
/// the group. Only one thread at a time uses it.
pub trait Wire: Send {
    /// Sends and receives all of these messages at once, and returns when all are done.
    ///
    /// Messages from one member to another arrive in the order in which they are sent, both within
    /// `sends` and between calls. The receiver expects the lengths that the sender sends. Only
    /// ranks in different collectives may differ, and `watch` detects this by the first message of
    /// each member. So `watch` is told of a member's first message before the second. An error of
    /// `watch` ends the exchange; received parts of the second message are then ignored.
    ///
    /// # Errors
    /// Errors of [`Watch`]. [`WireError::Lost`] if a member's end of a connection is gone,
    /// [`WireError::Failed`] otherwise. The wire must not be used again.
    ///
    /// # Safety
    /// The memory of all messages is valid until this returns. Meanwhile no other code writes to
    /// sent memory or accesses received memory. After an error the memory must stay valid for the
    /// rest of the process, as a network may still access it.
    #[allow(unsafe_code)] // Tensors must not be locked during a wait.
    unsafe fn exchange(
        &mut self,
        sends: &[Outgoing],
        receives: &[Incoming],
        watch: &mut dyn Watch,
    ) -> std::result::Result<(), WireError>;
}

/// A message to a member.
#[derive(Debug, Clone, Copy)]
pub struct Outgoing {
    /// The receiving member, never this one.
    pub to: usize,
    /// The bytes to send. If empty, the message is not sent.
    pub bytes: *const [u8],
}

/// Memory for a message from a member.
#[derive(Debug, Clone, Copy)]
pub struct Incoming {
    /// The sending member, never this one.
    pub from: usize,
    /// Memory of the message's length. If empty, the message is not received.
    pub bytes: *mut [u8],
}

/// Watches an exchange for its caller.
pub trait Watch {
    /// Called when receive number `index` is complete. Not called for empty messages.
    ///
    /// # Errors
    /// [`WireError::Ended`], to end the exchange.
    fn received(&mut self, index: usize) -> std::result::Result<(), WireError>;

    /// Called at least every [`POLL_INTERVAL`] while the exchange waits.
    ///
    /// `moved` says whether any byte was sent or received since the last call. `missing` lists the
    /// members with unfinished messages in either direction.
    ///
    /// # Errors
    /// [`WireError::Ended`], to end the exchange.
    fn waiting(&mut self, moved: bool, missing: &[usize]) -> std::result::Result<(), WireError>;
}

/// Interval at which a waiting wire calls [`Watch::waiting`].
pub const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The ways in which an exchange fails.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum WireError {
    /// The [`Watch`] ended it, and knows the reason.
    Ended,
    /// A member's end of a connection is gone.
    Lost {
        /// The member.
        member: usize,
        /// The symptom: `connection reset by peer`.
        why: String,
    },
    /// Any other failure, by its message.
    Failed(String),
}
