//! When what is launched runs, for those who want to know it.

use std::sync::Arc;

use fulgurite_engine::accelerator::TimeStamp;
use fulgurite_engine::collective::Timing;

use crate::failure::Failure;
use crate::streams::Stream;

/// What is being queued on a stream, and is timed.
pub(crate) struct Timed<'a> {
    stream: &'a dyn Stream,
    from: Arc<dyn TimeStamp>,
    timings: Vec<Arc<Timing>>,
}

impl<'a> Timed<'a> {
    /// Begins with what is queued from now on; `None`: nobody wants to know, or the device has no clock.
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

    /// Ends with what is queued until now, and tells them. `name`: of the stream.
    pub(crate) fn end(self, name: &str) -> Result<(), Failure> {
        if let Some(to) = self.stream.stamp()? {
            for timing in self.timings {
                timing.tell(name, self.from.clone(), to.clone());
            }
        }
        Ok(())
    }
}
