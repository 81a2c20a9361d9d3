//! Callbacks for the modules of this crate, by name in `trainer.callbacks`.

mod answers;
mod choices;
mod likelihood;
mod samples;
mod scoring;

pub use answers::AnswersConfig;
pub use choices::ChoicesConfig;
pub use likelihood::LikelihoodConfig;
pub use samples::SamplesConfig;
