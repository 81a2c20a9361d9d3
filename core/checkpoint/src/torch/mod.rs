//! State dicts that `torch.save` wrote: `.pt`, `.pth`, `.bin`, Lightning's `.ckpt`.
//!
//! Such a file is a zip archive of raw tensor data and one pickle, a small program that builds the
//! objects. [`pickle`] runs it but calls none of the functions that it names; [`state_dict`] finds
//! the tensors among its objects. (candle's own reader panics on integers of more than 64 bits,
//! such as random seeds, and on damaged pickles, does not support protocols after 3, and reads only
//! whole tensors.)

mod archive;
mod pickle;
mod source;
mod state_dict;
mod strided;

pub use source::TorchSource;
