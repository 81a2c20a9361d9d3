//! Deferred parameters, declared without memory. A strategy fills and frees their values while
//! graphs hold them, and is told when a gradient is complete.
//!
//! A [`Parameter`] is a handle. Its *compute tensor* is made once, as the output of a custom op on
//! a one-element token, with empty storage of the full shape. Layers and graphs hold this tensor. A
//! strategy fills and frees it through the parameter's [`ParameterSlot`]
//! ([`compute`](ParameterSlot::compute) and [`storage`](fulgurite_tensor::autograd::storage)). It
//! also sets the [`GradReducer`], which takes every gradient in backward; candle's `GradStore`
//! never holds one.

mod buffer;
mod grad;
mod grad_flow;
mod grad_hook;
pub(crate) mod init;
mod later;
#[expect(clippy::module_inception, reason = "the type is the module's subject")]
mod parameter;
mod paused;
mod record;
mod slot;
mod uses;

#[doc(hidden)]
pub use buffer::about as about_buffer;
pub use buffer::{Buffer, BufferInit, BufferOptions};
pub use grad::{GradReducer, LocalGrads, accumulation_dtype};
pub use init::Init;
pub use later::{LaterGradients, compute_or_leave, leaving_none};
pub(crate) use parameter::{LayerCut, ParameterSpec};
pub use parameter::{LocalShard, Parameter, UnusedBecause};
pub use paused::PausedGradients;
pub use record::record;
pub(crate) use record::record_outputs;
pub use slot::ParameterSlot;
pub(crate) use uses::{Uses, note_tensor_use};
