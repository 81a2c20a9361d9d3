//! State dicts that `torch.save` wrote: `.pt`, `.pth`, `.bin`, Lightning's `.ckpt`.
//!
//! Such a file is a zip archive of raw tensor data and one pickle, a small program that puts the
//! objects together. [`pickle`] runs its stack without ever calling what it names; [`state_dict`]
//! finds the tensors in the outcome. (candle's own reader is not used: it stops with a panic on
//! integers of more than 64 bits, such as random seeds, and on pickles that are damaged, does not
//! know protocols after 3, and reads whole tensors only.)

mod archive;
mod pickle;
mod source;
mod state_dict;
mod strided;

pub use source::TorchSource;
