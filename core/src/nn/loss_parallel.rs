//! How cross entropy learns that an output head left the logits cut.

use std::cell::RefCell;
use std::sync::Arc;

use crate::collective::ProcessGroup;
use crate::module::ForwardScope;

/// Logits of which each rank has some classes.
#[derive(Clone)]
pub(super) struct ShardedLogits {
    /// The ranks that share the classes.
    pub(super) group: Arc<dyn ProcessGroup>,
    /// This rank's first class.
    pub(super) first_class: usize,
    /// Number of classes of this rank.
    pub(super) local_classes: usize,
    /// Number of classes.
    pub(super) classes: usize,
}

thread_local! {
    static LATEST: RefCell<Option<ShardedLogits>> = const { RefCell::new(None) };
}

/// Notes what the head that computes on this thread gives.
pub(super) fn note(logits: ShardedLogits) {
    LATEST.replace(Some(logits));
}

/// What is known of logits of this width: they are cut if the scope allows it and the latest head
/// on this thread gave logits of the width.
pub(super) fn find(width: usize) -> Option<ShardedLogits> {
    let latest = LATEST.with_borrow(Option::clone)?;
    (ForwardScope::current().loss_parallel && latest.local_classes == width).then_some(latest)
}
