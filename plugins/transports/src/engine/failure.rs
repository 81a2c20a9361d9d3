//! Why a group no longer works.

use fulgurite_core::Error;

/// What ended a collective, and the group with it. Unlike [`Error`] it can be told many times.
#[derive(Debug, Clone)]
pub(crate) enum Failure {
    /// A rank of the job failed: its global rank and its message.
    Peer { rank: usize, message: String },
    /// Anything else, in words.
    Group(String),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        match error {
            Error::PeerFailed { rank, message } => Self::Peer { rank, message },
            other => Self::Group(other.to_string()),
        }
    }
}

impl From<candle_core::Error> for Failure {
    fn from(error: candle_core::Error) -> Self {
        Error::from(error).into()
    }
}
