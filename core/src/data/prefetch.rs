//! Batches that are made while the step before is computed.

use std::iter::FusedIterator;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;

use crate::{Error, Result};

/// An iterator that runs another one on a thread of its own, a few items ahead. The items and
/// their order are the same. Dropping it ends the thread.
///
/// ```
/// use fulgurite_core::data::Prefetch;
///
/// let squares = Prefetch::new(1, (0..4).map(|i| i * i))?;
/// assert_eq!(squares.collect::<Vec<_>>(), [0, 1, 4, 9]);
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Prefetch<T> {
    items: Option<Receiver<T>>,
    thread: Option<JoinHandle<()>>,
}

impl<T: Send + 'static> Prefetch<T> {
    /// Starts to run `iterator`, at most `ahead` items (and the one in the making) ahead.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn new(ahead: usize, iterator: impl Iterator<Item = T> + Send + 'static) -> Result<Self> {
        let (sender, receiver) = sync_channel(ahead);
        let thread = std::thread::Builder::new()
            .name("fulgurite-prefetch".to_owned())
            .spawn(move || {
                for item in iterator {
                    if sender.send(item).is_err() {
                        break; // nobody wants more
                    }
                }
            })
            .map_err(|e| Error::Data(format!("no thread for prefetching batches: {e}")))?;
        Ok(Self { items: Some(receiver), thread: Some(thread) })
    }
}

impl<T> Iterator for Prefetch<T> {
    type Item = T;

    /// # Panics
    /// If the iterator did, with its panic.
    fn next(&mut self) -> Option<T> {
        let item = self.items.as_ref()?.recv().ok();
        if item.is_none() {
            self.items = None;
            if let Some(Err(panic)) = self.thread.take().map(JoinHandle::join) {
                std::panic::resume_unwind(panic);
            }
        }
        item
    }
}

impl<T> FusedIterator for Prefetch<T> {}

impl<T> Drop for Prefetch<T> {
    fn drop(&mut self) {
        self.items = None; // a thread that waits to send hears of it
        if let Some(thread) = self.thread.take() {
            // Its panic, if any, is of an item that nobody asked for.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn dropping_it_early_ends_the_thread_a_few_items_ahead() {
        let made = Arc::new(AtomicUsize::new(0));
        let count = made.clone();
        let mut items = Prefetch::new(
            1,
            (0..).inspect(move |_| {
                count.fetch_add(1, Ordering::SeqCst);
            }),
        )
        .unwrap();
        assert_eq!(items.by_ref().take(3).collect::<Vec<_>>(), [0, 1, 2]);
        drop(items); // joins, so the count is final
        assert!((3..=5).contains(&made.load(Ordering::SeqCst)));
    }

    #[test]
    fn a_panic_is_passed_on_after_the_items_before_it() {
        let mut items =
            Prefetch::new(4, (0..4).inspect(|i| assert!(*i < 2, "no item {i}"))).unwrap();
        assert_eq!((items.next(), items.next()), (Some(0), Some(1)));
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| items.next()));
        assert_eq!(panic.unwrap_err().downcast_ref::<String>().unwrap(), "no item 2");
        assert_eq!(items.next(), None);
    }
}
