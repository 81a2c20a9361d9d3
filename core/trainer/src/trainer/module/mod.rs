//! The user's code in a run: modules, callbacks, their hooks, and their contexts.

pub(crate) mod callback;
pub(crate) mod context;
pub(crate) mod hooks;
pub(crate) mod lightning_module;
pub(crate) mod loaded;
pub(crate) mod manual;
pub(crate) mod optimizers;
pub(crate) mod runner;
