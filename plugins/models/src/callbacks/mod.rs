//! Callbacks for the modules of this crate, by name in `trainer.callbacks`.

mod samples;

pub use samples::SamplesConfig;
