//! Who wants to know when collectives run.

use std::sync::Arc;

use crate::accelerator::TimeStamp;
use crate::execution::{self, ContextGuard};

/// Who is told when the collectives and messages that a thread starts run on the device. A transport that queues them
/// there stamps the stream before and after each, and [tells](Self::tell) it; others, whose collectives run on the host,
/// do not. Nothing waits for the stamps.
///
/// ```
/// use fulgurite_core::collective::Timing;
///
/// let timing = Timing::enter(|stream, _from, _to| println!("something on {stream}"));
/// assert!(Timing::current().is_some());
/// drop(timing);
/// assert!(Timing::current().is_none());
/// ```
pub struct Timing(Box<Told>);

type Told = dyn Fn(&str, Arc<dyn TimeStamp>, Arc<dyn TimeStamp>) + Send + Sync;

impl Timing {
    /// Makes it the thread's until the guard is dropped. `told` is called once for each collective or message that is queued
    /// on the device, at the latest when that is waited for, with the name of a stream, on which one thing runs at a time,
    /// and the moments of the device at which it begins and ends.
    pub fn enter(
        told: impl Fn(&str, Arc<dyn TimeStamp>, Arc<dyn TimeStamp>) + Send + Sync + 'static,
    ) -> ContextGuard {
        execution::enter(Self(Box::new(told)))
    }

    /// The thread's.
    pub fn current() -> Option<Arc<Self>> {
        execution::value()
    }

    /// Says that it runs on `stream`, between these moments.
    pub fn tell(&self, stream: &str, from: Arc<dyn TimeStamp>, to: Arc<dyn TimeStamp>) {
        self.0(stream, from, to);
    }
}
