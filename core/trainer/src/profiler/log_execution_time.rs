//! [`LogExecutionTime`].

use std::borrow::Cow;
use std::time::Instant;

use tracing::Level;

/// Logs its lifetime when dropped, in the target `fulgurite::time` at level `debug`.
///
/// Reads the clock only if that target is enabled.
/// [`Measurements::log_execution_time`](crate::fabric::Measurements::log_execution_time) creates
/// it.
#[derive(Debug)]
#[must_use = "the time that is logged is that until the guard is dropped"]
pub struct LogExecutionTime {
    rank: usize,
    what: Cow<'static, str>,
    began: Option<Instant>,
}

impl LogExecutionTime {
    pub(crate) fn begin(rank: usize, what: impl Into<Cow<'static, str>>) -> Self {
        let wanted = tracing::enabled!(target: "fulgurite::time", Level::DEBUG);
        Self { rank, what: what.into(), began: wanted.then(Instant::now) }
    }
}

impl Drop for LogExecutionTime {
    fn drop(&mut self) {
        if let Some(began) = self.began {
            let seconds = began.elapsed().as_secs_f64();
            tracing::debug!(
                target: "fulgurite::time", rank = self.rank, seconds, "{} took {seconds:.2} s", self.what
            );
        }
    }
}
