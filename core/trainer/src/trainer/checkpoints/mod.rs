//! The checkpoints of a run: their location, retention, and the choice of one to resume from.

pub(crate) mod lookup;
pub(crate) mod place;
pub(crate) mod restart;
pub(crate) mod retention;
pub(crate) mod saved_state;
pub(crate) mod trainer_state;
