//! Deferred parameters: declared without memory, filled, emptied and refilled under a living graph,
//! and told when their gradient is complete.
//!
//! A [`Parameter`] is a handle. Its *compute tensor* is made once, as the output of a custom op on
//! a one-element token, with empty storage of the full shape; layers and graphs hold that tensor.
//! A strategy puts values in ([`Parameter::compute`] and
//! [`storage`](crate::autograd::storage)) and takes them out. In backward every gradient goes to
//! the strategy's [`GradReducer`]; candle's `GradStore` never holds one.

mod grad;
mod handle;
pub(crate) mod init;
mod record;
mod tap;
mod uses;

pub use grad::{GradReducer, LocalGrads, accumulation_dtype};
pub(crate) use handle::LayerCut;
pub use handle::{LocalShard, Parameter, ParameterSpec};
pub use init::Init;
pub use record::record;
pub(crate) use uses::{Uses, note_tap};
