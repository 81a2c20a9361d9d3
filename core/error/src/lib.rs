//! The error type of every crate of Fulgurite.
//!
//! A message says what was wrong, what was expected and what to do about it. Context (rank, FQN,
//! path) travels in the variant's fields, so callers can match on it.

#[cfg(feature = "candle")]
use std::cell::RefCell;
use std::path::PathBuf;

/// The result of every fallible call of the crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong in `fulgurite-core` and in the plugins built on it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// candle refused an operation (shapes, dtypes, devices), or a hook inside its backward failed.
    #[cfg(feature = "candle")]
    #[error("{0}")]
    Candle(#[source] candle_core::Error),

    /// A file or directory could not be read or written.
    #[error("{action} {path}: {source}", path = path.display())]
    Io {
        /// What was being done, as a gerund: `reading`, `creating`.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },

    /// A configuration file, key or value is wrong.
    #[error("{0}")]
    Config(String),

    /// A name that no linked plugin answers to.
    #[error(
        "unknown {kind} `{name}`; available: {available}. If a plugin crate provides `{name}`, \
         link it with `use that_crate as _;` in the program"
    )]
    UnknownPlugin {
        /// The kind of plugin: `strategy`, `process_group`, …
        kind: &'static str,
        /// The name that was asked for.
        name: String,
        /// The names that are known, sorted, separated by commas.
        available: String,
    },

    /// Two plugins of one kind share a name.
    #[error(
        "two {kind} plugins are named `{name}`: one in crate `{first}`, one in crate `{second}`; \
         unlink one of them or rename it"
    )]
    DuplicatePlugin {
        /// The kind of plugin.
        kind: &'static str,
        /// The name they share.
        name: String,
        /// The crate of the first.
        first: String,
        /// The crate of the second.
        second: String,
    },

    /// Mesh sizes, names or ranks do not fit together.
    #[error("device mesh: {0}")]
    Mesh(String),

    /// A collective was called wrongly or failed.
    #[error("rank {rank}, process group `{group}`, {op}: {message}")]
    Collective {
        /// The global rank that reports it.
        rank: usize,
        /// The process group's name.
        group: String,
        /// The collective.
        op: &'static str,
        /// What happened.
        message: String,
    },

    /// Another rank failed, so this one stops. The message is the other rank's own.
    #[error("rank {rank} failed: {message}")]
    PeerFailed {
        /// The rank that failed first.
        rank: usize,
        /// Its error.
        message: String,
    },

    /// Processes could not find each other, or a rank could not be started.
    #[error("launch: {0}")]
    Launch(String),

    /// A parameter was declared or used wrongly.
    #[error("parameter `{fqn}`: {message}")]
    Parameter {
        /// The parameter's fully qualified name.
        fqn: String,
        /// What is wrong with it.
        message: String,
    },

    /// A module was declared or used wrongly.
    #[error("module `{path}`: {message}")]
    Module {
        /// The module's path.
        path: String,
        /// What is wrong with it.
        message: String,
    },

    /// Trainable parameters that got no gradient in the first step.
    #[error(
        "{} trainable parameter(s) got no gradient in the first step: {}. Either they do not \
         take part in the loss, or an operation without a backward cut the graph (candle_nn's \
         fused layer_norm, rms_norm, softmax_last_dim and rope do; the layers of \
         `fulgurite::nn` do not). If it is meant, set `trainer.unused_parameters` to \"zero\" or \
         \"ignore\"", names.len(), names.join(", ")
    )]
    UnusedParameters {
        /// Their FQNs, in order.
        names: Vec<String>,
    },

    /// A loss or gradient norm is NaN or infinite. Nothing was changed.
    #[error("non-finite {what} ({value}) at step {step}{detail}")]
    NonFinite {
        /// `loss` or `gradient norm`.
        what: &'static str,
        /// The value.
        value: f64,
        /// The optimizer step that was being computed, counted from 1.
        step: u64,
        /// More, starting with a separator; may be empty.
        detail: String,
    },

    /// A checkpoint is missing, torn, or of another model.
    #[error("checkpoint {path}: {message}", path = path.display())]
    Checkpoint {
        /// The checkpoint's directory or file.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },

    /// Data is missing or does not fit.
    #[error("data: {0}")]
    Data(String),

    /// The run was interrupted (Ctrl-C, SIGTERM, SIGUSR1).
    #[error("interrupted")]
    Interrupted,

    /// Anything else, in the words of whoever raised it (user code, third-party plugins).
    #[error("{0}")]
    Other(String),
}

impl Error {
    /// An [`Error::Other`] from anything that can be shown.
    pub fn other(message: impl std::fmt::Display) -> Self {
        Self::Other(message.to_string())
    }

    /// An [`Error::Io`]; for `map_err`.
    pub fn io(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }

    /// An [`Error::Parameter`].
    pub fn parameter(fqn: impl Into<String>, message: impl std::fmt::Display) -> Self {
        Self::Parameter { fqn: fqn.into(), message: message.to_string() }
    }

    /// An [`Error::Checkpoint`].
    pub fn checkpoint(path: impl Into<PathBuf>, message: impl std::fmt::Display) -> Self {
        Self::Checkpoint { path: path.into(), message: message.to_string() }
    }
}

#[cfg(feature = "candle")]
thread_local! {
    /// The error that is travelling through candle on this thread, and its text.
    static IN_CANDLE: RefCell<Option<(String, Error)>> = const { RefCell::new(None) };
}

/// Hooks run inside candle's backward, which carries candle's errors only. The original waits on
/// this thread until the conversion back finds it.
#[cfg(feature = "candle")]
impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            other => {
                let text = other.to_string();
                IN_CANDLE.set(Some((text.clone(), other)));
                candle_core::Error::Msg(text)
            }
        }
    }
}

#[cfg(feature = "candle")]
impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        match IN_CANDLE.take() {
            Some((text, original)) if error.to_string().contains(&text) => original,
            _ => Self::Candle(error),
        }
    }
}

#[cfg(all(test, feature = "candle"))]
mod tests {
    use super::*;

    #[test]
    fn an_error_comes_back_from_candle_as_it_went_in() {
        let peer = || Error::PeerFailed { rank: 3, message: "out of memory".to_owned() };
        let through: candle_core::Error = peer().into();
        let through = through.context("in a hook").bt();
        assert!(matches!(Error::from(through), Error::PeerFailed { rank: 3, .. }));
        let stale: candle_core::Error = peer().into();
        let unrelated = Error::from(candle_core::Error::Msg("shape mismatch".to_owned()));
        assert!(matches!(unrelated, Error::Candle(_)));
        drop(stale);
    }
}
