//! The checkpoints of a run: their place, which ones are kept, and which one a run goes on from.

pub(crate) mod lookup;
pub(crate) mod place;
pub(crate) mod restart;
pub(crate) mod retention;
pub(crate) mod saved_state;
pub(crate) mod trainer_state;
