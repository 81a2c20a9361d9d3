//! Process groups around other ones.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use super::{Collective, End, ProcessGroup, Work};
use crate::{Error, Result};

/// Sees the calls of a process group before the group does: to count, record, delay or refuse them.
///
/// [`Intercepted`] is the group with an interceptor around it. It passes on everything that an
/// interceptor does not see: ranks, memory, device connections, failures. So a method that
/// [`ProcessGroup`] gains later is passed on here, once for all interceptors.
///
/// ```
/// use std::sync::Arc;
/// use fulgurite_core::Result;
/// use fulgurite_core::collective::{
///     Collective, End, Intercepted, Interceptor, ProcessGroup, Solo, Work,
/// };
///
/// /// Prints the name of each collective.
/// struct Printer;
///
/// impl Interceptor for Printer {
///     fn start(
///         &self,
///         group: &Arc<dyn ProcessGroup>,
///         collective: Collective,
///         overlap: bool,
///     ) -> Result<Work> {
///         println!("{} {}", group.name(), collective.name());
///         group.start(collective, overlap)
///     }
///
///     fn start_after(
///         &self,
///         group: &Arc<dyn ProcessGroup>,
///         end: &Arc<dyn End>,
///         collective: Collective,
///     ) -> Result<Option<Work>> {
///         println!("{} {}", group.name(), collective.name());
///         group.start_after(end, collective)
///     }
///
///     fn around(&self, part: Arc<dyn ProcessGroup>) -> Result<Arc<dyn ProcessGroup>> {
///         Ok(Arc::new(Intercepted::new(part, Printer)))
///     }
/// }
///
/// let world = Intercepted::new(Arc::new(Solo::new("world", 0)), Printer);
/// world.barrier()?.wait()?; // prints `world barrier`
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
pub trait Interceptor: Send + Sync {
    /// [`ProcessGroup::start`] of `group`.
    ///
    /// # Errors
    /// As there.
    fn start(
        &self,
        group: &Arc<dyn ProcessGroup>,
        collective: Collective,
        overlap: bool,
    ) -> Result<Work>;

    /// [`ProcessGroup::start_after`] of `group`.
    ///
    /// # Errors
    /// As there.
    fn start_after(
        &self,
        group: &Arc<dyn ProcessGroup>,
        end: &Arc<dyn End>,
        collective: Collective,
    ) -> Result<Option<Work>>;

    /// A group that was split from this one, with an interceptor of its own.
    ///
    /// # Errors
    /// If the interceptor cannot be made.
    fn around(&self, part: Arc<dyn ProcessGroup>) -> Result<Arc<dyn ProcessGroup>>;

    /// [`ProcessGroup::send`] of `group`. By default passes the call on.
    ///
    /// # Errors
    /// As there.
    fn send(&self, group: &Arc<dyn ProcessGroup>, tensor: &Tensor, dst: usize) -> Result<Work> {
        group.send(tensor, dst)
    }

    /// [`ProcessGroup::recv`] of `group`. By default passes the call on.
    ///
    /// # Errors
    /// As there.
    fn recv(&self, group: &Arc<dyn ProcessGroup>, tensor: &Tensor, src: usize) -> Result<Work> {
        group.recv(tensor, src)
    }
}

/// A process group whose calls an [`Interceptor`] sees first.
pub struct Intercepted<I> {
    // The first field, so that an interceptor ends before its group.
    by: I,
    group: Arc<dyn ProcessGroup>,
}

impl<I: Interceptor> Intercepted<I> {
    /// `group` with `by` around it.
    pub fn new(group: Arc<dyn ProcessGroup>, by: I) -> Self {
        Self { by, group }
    }
}

impl<I: Interceptor> ProcessGroup for Intercepted<I> {
    fn name(&self) -> &str {
        self.group.name()
    }

    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    fn transport(&self) -> String {
        self.group.transport()
    }

    fn exact_reductions(&self) -> bool {
        self.group.exact_reductions()
    }

    fn global_ranks(&self) -> &[usize] {
        self.group.global_ranks()
    }

    fn connect(&self, device: &Device) -> Result<()> {
        self.group.connect(device)
    }

    fn start(&self, collective: Collective, overlap: bool) -> Result<Work> {
        self.by.start(&self.group, collective, overlap)
    }

    fn start_after(&self, end: &Arc<dyn End>, collective: Collective) -> Result<Option<Work>> {
        self.by.start_after(&self.group, end, collective)
    }

    fn send(&self, tensor: &Tensor, dst: usize) -> Result<Work> {
        self.by.send(&self.group, tensor, dst)
    }

    fn recv(&self, tensor: &Tensor, src: usize) -> Result<Work> {
        self.by.recv(&self.group, tensor, src)
    }

    fn begin_messages(&self) -> Result<()> {
        self.group.begin_messages()
    }

    fn travels_apart(&self, tensor: &Tensor) -> bool {
        self.group.travels_apart(tensor)
    }

    fn split(&self, partition: &[Vec<usize>], name: &str) -> Result<Arc<dyn ProcessGroup>> {
        self.by.around(self.group.split(partition, name)?)
    }

    fn empty(&self, elements: usize, dtype: DType, device: &Device) -> Result<Tensor> {
        self.group.empty(elements, dtype, device)
    }

    fn abort(&self, reason: &str) {
        self.group.abort(reason);
    }

    fn failure(&self) -> Option<Error> {
        self.group.failure()
    }
}
