//! State dicts that `torch.save` wrote: `.pt`, `.pth`, `.bin`, Lightning's `.ckpt`.
//!
//! Such a file is a zip archive of raw tensor data and one pickle, a small program that builds the
//! objects. [`pickle`] runs it but calls none of the functions that it names; [`state_dict`] finds
//! the tensors among its objects, [`optimizer`] those of an optimizer, with its options
//! ([`optimizer_kind`]). (candle's own reader panics on integers of more than 64 bits,
//! such as random seeds, and on damaged pickles, does not support protocols after 3, and reads only
//! whole tensors.)

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
