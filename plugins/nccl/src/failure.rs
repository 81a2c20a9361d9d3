//! The reason why a group has ended.

use fulgurite_core::Error;

use crate::flight::Notice;

/// The failure of a group. Unlike [`Error`], it is `Clone`.
#[derive(Debug, Clone)]
pub(crate) enum Failure {
    /// A rank of the job failed: its global rank and its message.
    Peer { rank: usize, message: String },
    /// Any other failure, by its message.
    Group(String),
    /// This rank was asked to end during the job's start.
    Interrupted,
}

impl Failure {
    /// Adds the collective or message in which it happened, if the failure does not name it.
    pub(crate) fn within(self, notice: &Notice) -> Self {
        match self {
            Self::Group(message) => Self::Group(format!("{message}, in {}", notice.describe())),
            other => other,
        }
    }

    /// Returns the message for the other ranks.
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
