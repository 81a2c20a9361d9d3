//! State dicts of `torch.save`: `.pt`, `.pth`, `.bin`, Lightning's `.ckpt`.
//!
//! Such a file is a zip archive of raw tensor data and one pickle, a small program that builds the
//! objects. [`pickle`] runs the program but calls none of its functions. [`state_dict`] finds the
//! tensors among the objects. [`optimizer`] finds an optimizer's tensors and options
//! ([`optimizer_kind`]).
//!
//! candle's own reader panics on damaged pickles and on integers of more than 64 bits, such as
//! random seeds. It also lacks protocols after 3, and reads only whole tensors.

mod archive;
mod optimizer;
mod optimizer_groups;
mod optimizer_kind;
mod pickle;
mod rekeyed;
mod source;
mod state_dict;
mod strided;

pub use optimizer::TorchOptimizer;
pub use rekeyed::RekeyedOptimizer;
pub use source::TorchSource;
