//! Device times of collectives.

use std::sync::Arc;

use crate::accelerator::TimeStamp;
use fulgurite_tensor::execution::{self, ContextGuard};

/// Receives the device times of the collectives and messages that a thread starts. A transport that
/// queues them on the device stamps the stream before and after each, and [tells](Self::tell) the
/// times. Transports that run collectives on the host do not. Nothing waits for the stamps.
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
    /// Installs `told` on this thread until the guard is dropped. `told` is called once for each
    /// collective or message queued on the device, at the latest when it is waited for. The
    /// arguments are a stream's name, and the device moments of begin and end. A stream runs one
    /// collective at a time.
    pub fn enter(
        told: impl Fn(&str, Arc<dyn TimeStamp>, Arc<dyn TimeStamp>) + Send + Sync + 'static,
    ) -> ContextGuard {
        execution::enter(Self(Box::new(told)))
    }

    /// The thread's receiver.
    pub fn current() -> Option<Arc<Self>> {
        execution::value()
    }

    /// Reports a collective that runs on `stream` between two moments.
    pub fn tell(&self, stream: &str, from: Arc<dyn TimeStamp>, to: Arc<dyn TimeStamp>) {
        self.0(stream, from, to);
    }
}
