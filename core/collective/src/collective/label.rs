//! Labels that say which work collectives belong to.

use std::sync::Arc;

use fulgurite_tensor::execution::{self, ContextGuard};

/// The purpose of the collectives that a thread starts, such as a unit. A transport may name it
/// when a collective fails; it has no other effect.
///
/// ```
/// use fulgurite_core::collective::Label;
///
/// let label = Label::enter("unit `layers.3`");
/// assert_eq!(Label::current().unwrap().0, "unit `layers.3`");
/// drop(label);
/// assert!(Label::current().is_none());
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Label(pub String);

impl Label {
    /// Sets the thread's label until the guard is dropped.
    pub fn enter(label: impl Into<String>) -> ContextGuard {
        execution::enter(Self(label.into()))
    }

    /// The thread's label.
    pub fn current() -> Option<Arc<Self>> {
        execution::value()
    }
}
