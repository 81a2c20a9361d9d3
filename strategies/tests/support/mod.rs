//! A small transformer with everything that strategies find hard, its data, and a training loop.
#![allow(dead_code, unused_imports)] // Each test binary uses a part.

mod classifier;
mod data;
mod decoder;
mod toy;
mod training;
mod transformer;

pub(crate) use classifier::{Classifier, images};
pub(crate) use data::micro_batch;
pub(crate) use decoder::{Decoder, DecoderTraining, LENGTH, Variant};
pub(crate) use toy::{ROUTE, Toy};
pub(crate) use training::{OFFLOADED, Run, Training, checkpointed, gather_weights, init, strategy};
pub(crate) use transformer::{Transformer, VOCABULARY};
