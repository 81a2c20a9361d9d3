//! Fulgurite's error type, opening of [files] of unknown origin, and non-blocking [output].
//!
//! A message names the problem, the expectation and the remedy. Context (rank, FQN, path) travels
//! in the variant's fields, so callers can match on it.

use std::fmt;
#[cfg(feature = "candle")]
use std::panic::Location;
use std::path::PathBuf;

pub mod files;
mod limits;
pub mod output;

pub use limits::{advice, is_exhausted};
pub use output::{print, print_message, printable, quoted};

/// The result of every fallible call of the crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of `fulgurite-core` or of a plugin.
///
/// `Debug` prints the message too, with its lines, so that a `main` that returns this error prints
/// it readably.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// candle refused an operation (shapes, dtypes, devices). The location is where the program
    /// converted candle's error to this type, usually by `?`.
    #[cfg(feature = "candle")]
    #[error("{0} (at {file}:{line})", file = .1.file(), line = .1.line())]
    Candle(#[source] candle_core::Error, &'static Location<'static>),

    /// A file or directory could not be read or written.
    #[error("{action} {path}: {source}{}", advice(source), path = path.display())]
    Io {
        /// The attempted action, as a gerund: `reading`, `creating`.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },

    /// A configuration file, key or value is wrong.
    #[error("{0}")]
    Config(String),

    /// No linked plugin of this kind has this name.
    #[error(
        "unknown {kind} `{name}`; {}vailable: {available}. If a plugin crate provides `{name}`, \
         link it with `use that_crate as _;` in the program",
        if suggestion.is_empty() { "a".to_owned() } else { format!("{suggestion} A") }
    )]
    UnknownPlugin {
        /// The kind of plugin: `strategy`, `process_group`, …
        kind: &'static str,
        /// The requested name.
        name: String,
        /// A sentence with a suggestion, such as ``did you mean `fsdp`?``; may be empty.
        suggestion: String,
        /// The known names, sorted, separated by commas.
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
        /// The crate of the first one.
        first: String,
        /// The crate of the second one.
        second: String,
    },

    /// Sizes, names or ranks of a device mesh contradict each other.
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
        /// The problem.
        message: String,
    },

    /// Another rank failed, so this one stops.
    #[error("rank {rank} failed: {message}")]
    PeerFailed {
        /// The rank that failed first.
        rank: usize,
        /// Its error message.
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
        /// The problem.
        message: String,
    },

    /// A module was declared or used wrongly.
    #[error("module `{path}`: {message}")]
    Module {
        /// The module's path.
        path: String,
        /// The problem.
        message: String,
    },

    /// Trainable parameters that got no gradient in the first step.
    #[error(
        "{} got no gradient in the first step: {}{detail}",
        counted(names.len(), "trainable parameter"),
        names.join(", ")
    )]
    UnusedParameters {
        /// Their FQNs, in order.
        names: Vec<String>,
        /// Text about the causes, starting with a separator; may be empty.
        detail: String,
    },

    /// A loss or gradient norm is NaN or infinite. No parameter was changed.
    #[error("non-finite {what} ({value}) at step {step}{detail}")]
    NonFinite {
        /// `loss` or `gradient norm`.
        what: &'static str,
        /// The value.
        value: f64,
        /// The optimizer step that was being computed, counted from 1.
        step: u64,
        /// Text appended to the message, starting with a separator; may be empty.
        detail: String,
    },

    /// A checkpoint is missing, torn, or belongs to another model.
    #[error("checkpoint {path}: {message}", path = path.display())]
    Checkpoint {
        /// The checkpoint's directory or file.
        path: PathBuf,
        /// The problem.
        message: String,
    },

    /// Training data is missing or unusable.
    #[error("data: {0}")]
    Data(String),

    /// The run was interrupted (Ctrl-C, SIGTERM, SIGUSR1).
    #[error("interrupted")]
    Interrupted,

    /// Any other error, raised by user code or a plugin.
    #[error("{0}")]
    Other(String),
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&output::one_message(&self.to_string()))
    }
}

impl Error {
    /// An [`Error::Other`] from anything that implements `Display`.
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

    /// An [`Error::Module`]. The empty path names the root of the model.
    pub fn module(path: &str, message: impl std::fmt::Display) -> Self {
        let path = if path.is_empty() { "(root)" } else { path };
        Self::Module { path: path.to_owned(), message: message.to_string() }
    }

    /// Adds the module at `path` to an error that does not name a place in the model yet.
    ///
    /// It is for `map_err`, so that the innermost module is named.
    ///
    /// ```
    /// use fulgurite_error::Error;
    /// let error = Error::other("3 heads cannot share 2").in_module("layers.0.attn").in_module("layers.0");
    /// assert_eq!(error.to_string(), "module `layers.0.attn`: 3 heads cannot share 2");
    /// ```
    #[must_use]
    pub fn in_module(self, path: &str) -> Self {
        match self {
            Self::Other(message) => Self::module(path, message),
            #[cfg(feature = "candle")]
            error @ Self::Candle(..) => Self::module(path, error),
            error => error,
        }
    }

    /// Appends the current activity (`in the backward of step 3`) to an error of the model's
    /// computation.
    ///
    /// Other errors (of peers, of files) stay unchanged.
    #[must_use]
    pub fn during(self, what: impl std::fmt::Display) -> Self {
        match self {
            Self::Other(message) => Self::Other(format!("{message} ({what})")),
            #[cfg(feature = "candle")]
            error @ Self::Candle(..) => Self::Other(format!("{error} ({what})")),
            Self::Module { path, message } => {
                Self::Module { path, message: format!("{message} ({what})") }
            }
            Self::Parameter { fqn, message } => {
                Self::Parameter { fqn, message: format!("{message} ({what})") }
            }
            error => error,
        }
    }

    /// An [`Error::Checkpoint`].
    pub fn checkpoint(path: impl Into<PathBuf>, message: impl std::fmt::Display) -> Self {
        Self::Checkpoint { path: path.into(), message: message.to_string() }
    }
}

/// Hooks run inside candle's backward, which returns only candle's errors. So an error of this
/// crate is wrapped in candle's error, by value, and the conversion back unwraps it.
#[cfg(feature = "candle")]
impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        // `Wrapped` holds any error too, but cannot be unwrapped.
        Self::Io(std::io::Error::other(error))
    }
}

#[cfg(feature = "candle")]
impl From<candle_core::Error> for Error {
    #[track_caller]
    fn from(error: candle_core::Error) -> Self {
        let at = Location::caller();
        unwrap_candle(error).unwrap_or_else(|error| Self::Candle(error, at))
    }
}

/// Unwraps the error inside candle's error, below any context, path or backtrace from candle.
///
/// Returns candle's error if it does not wrap one.
#[cfg(feature = "candle")]
fn unwrap_candle(error: candle_core::Error) -> Result<Error, candle_core::Error> {
    use candle_core::Error as Candle;
    match error {
        Candle::Io(io) => io.downcast().map_err(Candle::Io),
        Candle::Context { inner, context } => unwrap_candle(*inner)
            .map_err(|inner| Candle::Context { inner: Box::new(inner), context }),
        Candle::WithPath { inner, path } => {
            unwrap_candle(*inner).map_err(|inner| Candle::WithPath { inner: Box::new(inner), path })
        }
        Candle::WithBacktrace { inner, backtrace } => unwrap_candle(*inner)
            .map_err(|inner| Candle::WithBacktrace { inner: Box::new(inner), backtrace }),
        Candle::WrappedContext { wrapped, context } => {
            let wrapped = match wrapped.downcast::<Error>() {
                Ok(error) => return Ok(*error),
                Err(wrapped) => wrapped,
            };
            let wrapped = match wrapped.downcast::<Candle>() {
                Ok(inner) => match unwrap_candle(*inner) {
                    Ok(error) => return Ok(error),
                    Err(inner) => Box::new(inner),
                },
                Err(wrapped) => wrapped,
            };
            Err(Candle::WrappedContext { wrapped, context })
        }
        other => Err(other),
    }
}

/// Formats a count and its noun in singular or plural: `1 rank`, `2 ranks`.
///
/// The plural must end in `s`.
///
/// ```
/// use fulgurite_error::counted;
/// assert_eq!(counted(1, "data-parallel rank"), "1 data-parallel rank");
/// assert_eq!(counted(0_usize, "error"), "0 errors");
/// ```
pub fn counted<N: fmt::Display + PartialEq + From<u8>>(count: N, noun: &str) -> String {
    let plural = if count == N::from(1) { "" } else { "s" };
    format!("{count} {noun}{plural}")
}

#[cfg(all(test, feature = "candle"))]
mod tests {
    use candle_core::Context as _;

    use super::*;

    fn peer() -> Error {
        Error::PeerFailed { rank: 3, message: "out of memory".to_owned() }
    }

    fn in_candle() -> candle_core::Error {
        peer().into()
    }

    #[test]
    fn error_round_trips_through_candle() {
        let result = || Err::<(), _>(in_candle());
        let backtrace = candle_core::Error::WithBacktrace {
            inner: Box::new(in_candle()),
            backtrace: Box::new(std::backtrace::Backtrace::force_capture()),
        };
        assert_eq!(in_candle().to_string(), peer().to_string());
        for through in [
            in_candle(),
            in_candle().context("in a hook").bt(),
            in_candle().with_path("model.safetensors").context("reading"),
            backtrace.context("in a hook"),
            result().context("in a hook").unwrap_err(),
            result().context("inner").context("outer").unwrap_err(),
            Err::<(), _>(peer()).context("in a hook").unwrap_err(),
        ] {
            let text = through.to_string();
            let back = Error::from(through);
            assert!(matches!(back, Error::PeerFailed { rank: 3, .. }), "{text}");
        }
        let elsewhere = std::thread::spawn(in_candle).join().expect("does not panic");
        assert!(matches!(Error::from(elsewhere), Error::PeerFailed { rank: 3, .. }));
    }

    #[test]
    fn swallowed_error_does_not_resurface() {
        drop(in_candle());
        let later = candle_core::Error::Msg(format!("retried: {}", peer()));
        assert!(matches!(Error::from(later), Error::Candle(candle_core::Error::Msg(_), _)));
    }

    #[test]
    fn errors_with_equal_text_stay_distinct() {
        let (first, second): (candle_core::Error, candle_core::Error) =
            (peer().into(), Error::other(peer()).into());
        assert!(matches!(Error::from(first), Error::PeerFailed { .. }));
        assert!(matches!(Error::from(second), Error::Other(_)));
    }

    #[test]
    fn candles_own_errors_keep_their_context() {
        let own = || candle_core::Error::Msg("shape mismatch".to_owned());
        let not_found = std::io::Error::from(std::io::ErrorKind::NotFound);
        for around in [
            own().context("in a hook"),
            own().with_path("model.safetensors"),
            Err::<(), _>(own()).context("in a hook").unwrap_err(),
            Err::<(), _>("x".parse::<u8>().unwrap_err()).context("a number").unwrap_err(),
            not_found.into(),
        ] {
            let text = around.to_string();
            match Error::from(around) {
                Error::Candle(back, _) => assert_eq!(back.to_string(), text),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn candles_errors_name_the_source_location() {
        use candle_core::{DType, Device, Tensor};

        fn add() -> Result<Tensor> {
            let ones = |n| Tensor::ones(n, DType::F32, &Device::Cpu);
            Ok((ones(2)? + ones(3)?)?)
        }
        let here = line!() - 2;
        let check = |error: Error, before: &str, after: &str| {
            let text = error.to_string();
            let start = format!("{before}shape mismatch in add, lhs: [2], rhs: [3]");
            assert!(text.starts_with(&start), "{text}");
            assert!(text.ends_with(&format!("(at {}:{here}){after}", file!())), "{text}");
        };
        check(add().unwrap_err(), "", "");
        // The place also survives a conversion to candle's error and back.
        let around = || -> Result<()> { Err(candle_core::Error::from(add().unwrap_err()))? };
        check(around().unwrap_err(), "", "");
        let named = add().unwrap_err().in_module("layers.0").during("in step 2");
        check(named, "module `layers.0`: ", " (in step 2)");
        assert!(matches!(
            peer().in_module("layers.0").during("in step 2"),
            Error::PeerFailed { .. }
        ));
    }
}
