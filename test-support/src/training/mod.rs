//! A small transformer with everything that strategies find hard, its data, and a training loop.

mod classifier;
mod data;
mod decoder;
mod toy;
#[expect(clippy::module_inception, reason = "`Training` is the module's subject")]
mod training;
mod transformer;

pub use classifier::{Classifier, images};
pub use data::micro_batch;
pub use decoder::{Decoder, DecoderTraining, LENGTH, Variant};
pub use toy::{ROUTE, Toy};
pub use training::{
    ALL_OFFLOADED, OFFLOADED, Run, Training, checkpointed, gather_weights, init, strategy,
};
pub use transformer::{Transformer, VOCABULARY};
