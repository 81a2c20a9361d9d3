//! What the engine needs of a network: messages between the members of a group.

use std::sync::Arc;
use std::time::Duration;

use fulgurite_error::Result;

/// A way to reach the other ranks of a job: TCP, MPI. One for each process.
pub trait Network: Send + Sync {
    /// Its name, for messages: `tcp`.
    fn name(&self) -> &'static str;

    /// Connects the members of a group, given by their global ranks, of which this process is number `own`.
    /// Collective over the members, which all give the same `key`; no other group of the job has it.
    ///
    /// While it waits for a member, it asks `wanted` now and again, at least every [`POLL_INTERVAL`].
    ///
    /// # Errors
    /// Those of `wanted`; [`Error::Launch`](fulgurite_error::Error::Launch) if a member does not come within
    /// `timeout` or cannot be reached, naming it.
    fn connect(
        self: Arc<Self>,
        key: &str,
        members: &[usize],
        own: usize,
        timeout: Duration,
        wanted: &dyn Fn() -> Result<()>,
    ) -> Result<Box<dyn Wire>>;

    /// Where a rank is, for messages: its host's name or address. `None` if that is not known.
    fn place(&self, rank: usize) -> Option<String> {
        let _ = rank;
        None
    }
}

/// The connections of one member of a group to the others. Members are numbered by their index in the group.
/// One thread at a time uses it.
pub trait Wire: Send {
    /// Sends and receives all of these messages at once, and returns when all are done.
    ///
    /// From one member to another, messages arrive in the order in which they are sent: of calls, and within
    /// a call of `sends`. The receiver gives the lengths that the sender gives, unless the ranks are in
    /// different collectives, which `watch` finds by the first message of each. So of two messages from one
    /// member, `watch` is told of the first before it is of the second, and an error of its ends the exchange;
    /// what has come of the second by then is of no consequence.
    ///
    /// # Errors
    /// What [`Watch`] returns; [`WireError::Lost`] if a member's end of a connection is gone;
    /// [`WireError::Failed`] otherwise. The wire must not be used again.
    ///
    /// # Safety
    /// The memory of all messages is valid until this returns, and meanwhile nobody else writes what is sent
    /// nor accesses what is received. After an error it must stay valid for the rest of the process: a
    /// network may still access it.
    #[allow(unsafe_code)] // The memory is that of tensors, no lock of which may be held during a wait.
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
    /// The member that it goes to; never this one.
    pub to: usize,
    /// What is sent. It may be empty; such a message is none.
    pub bytes: *const [u8],
}

/// Where a message from a member goes.
#[derive(Debug, Clone, Copy)]
pub struct Incoming {
    /// The member that it comes from; never this one.
    pub from: usize,
    /// Memory of the message's length. It may be empty; such a message is none.
    pub bytes: *mut [u8],
}

/// Who asks for an exchange watches it.
pub trait Watch {
    /// Receive number `index` is complete. Not called for messages without bytes.
    ///
    /// # Errors
    /// [`WireError::Ended`], to end the exchange.
    fn received(&mut self, index: usize) -> std::result::Result<(), WireError>;

    /// Called now and again while the exchange waits, at least every [`POLL_INTERVAL`]. `moved`: whether any
    /// byte was sent or received since the last call. `missing`: the members whose messages, or whose taking
    /// of messages, are still waited for.
    ///
    /// # Errors
    /// [`WireError::Ended`], to end the exchange.
    fn waiting(&mut self, moved: bool, missing: &[usize]) -> std::result::Result<(), WireError>;
}

/// How often a wire that waits calls [`Watch::waiting`].
pub const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// How an exchange failed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum WireError {
    /// The [`Watch`] ended it, and knows why.
    Ended,
    /// A member's end of a connection is gone.
    Lost {
        /// The member.
        member: usize,
        /// How that showed: `connection reset by peer`.
        why: String,
    },
    /// Anything else; the message.
    Failed(String),
}
