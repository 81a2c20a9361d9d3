//! What collectives are for.

use std::sync::Arc;

use crate::execution::{self, ContextGuard};

/// What the collectives that a thread starts are for, such as a unit. A transport may say it when one of
/// them fails; it changes nothing else.
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
    /// Makes it the thread's until the guard is dropped.
    pub fn enter(label: impl Into<String>) -> ContextGuard {
        execution::enter(Self(label.into()))
    }

    /// The thread's.
    pub fn current() -> Option<Arc<Self>> {
        execution::value()
    }
}
