//! Why a group is over.

use fulgurite_error::Error;

use crate::flight::Notice;

/// The failure of a group. Unlike [`Error`] it is `Clone`.
#[derive(Debug, Clone)]
pub(crate) enum Failure {
    /// A rank of the job failed: its global rank and its message.
    Peer { rank: usize, message: String },
    /// Any other failure; its message.
    Group(String),
    /// This rank was asked to end while the job starts.
    Interrupted,
}

impl Failure {
    /// With what it happened in, where that is not in the message.
    pub(crate) fn within(self, notice: &Notice) -> Self {
        match self {
            Self::Group(message) => Self::Group(format!("{message}, in {}", notice.describe())),
            other => other,
        }
    }

    /// What the other ranks are told.
    pub(crate) fn reason(&self) -> String {
        match self {
            Self::Peer { rank, message } => format!("rank {rank} failed: {message}"),
            Self::Group(message) => message.clone(),
            Self::Interrupted => "interrupted".to_owned(),
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        match error {
            Error::PeerFailed { rank, message } => Self::Peer { rank, message },
            Error::Interrupted => Self::Interrupted,
            Error::Collective { message, .. } => Self::Group(message),
            other => Self::Group(other.to_string()),
        }
    }
}
