//! Deferred parameters: declared without memory, filled, emptied and refilled under a living graph,
//! and told when their gradient is complete.
//!
//! A [`Parameter`] is a handle. Its *compute tensor* is made once, as the output of a custom op on
//! a one-element token, with empty storage of the full shape; layers and graphs hold that tensor.
//! A strategy has the parameter's [`ParameterSlot`]: through it, it puts values in
//! ([`compute`](ParameterSlot::compute) and [`storage`](crate::autograd::storage)), takes them out, and
//! says where gradients go. In backward every gradient goes to
//! the strategy's [`GradReducer`]; candle's `GradStore` never holds one.

mod grad;
mod grad_flow;
mod grad_hook;
pub(crate) mod init;
#[expect(clippy::module_inception, reason = "the type is the module's subject")]
mod parameter;
mod record;
mod slot;
mod uses;

pub use grad::{GradReducer, LocalGrads, accumulation_dtype};
pub use init::Init;
pub(crate) use parameter::LayerCut;
pub use parameter::{LocalShard, Parameter, ParameterSpec};
pub use record::record;
pub use slot::ParameterSlot;
pub(crate) use uses::{Uses, note_tensor_use};
