//! Callbacks for the modules of this crate, by name in `trainer.callbacks`.

mod choices;
mod samples;

pub use choices::ChoicesConfig;
pub use samples::SamplesConfig;
