//! Measures when collectives and messages run on their streams.

use std::sync::Arc;

use fulgurite_core::accelerator::TimeStamp;
use fulgurite_core::collective::Timing;

use crate::failure::Failure;
use crate::streams::Stream;

/// A timed span of work on a stream.
pub(crate) struct Timed<'a> {
    stream: &'a dyn Stream,
    from: Arc<dyn TimeStamp>,
    timings: Vec<Arc<Timing>>,
}

impl<'a> Timed<'a> {
    /// Starts timing the work queued from now on. Returns `None` without `timings`, or if the
    /// device cannot measure time.
    pub(crate) fn begin(
        stream: &'a dyn Stream,
        timings: impl IntoIterator<Item = Arc<Timing>>,
    ) -> Result<Option<Self>, Failure> {
        let timings: Vec<_> = timings.into_iter().collect();
        if timings.is_empty() {
            return Ok(None);
        }
        Ok(stream.stamp()?.map(|from| Self { stream, from, timings }))
    }

    /// Ends the span with the work queued so far, and reports it. `name` is the stream's name.
    pub(crate) fn end(self, name: &str) -> Result<(), Failure> {
        if let Some(to) = self.stream.stamp()? {
            for timing in self.timings {
                timing.tell(name, self.from.clone(), to.clone());
            }
        }
        Ok(())
    }
}
