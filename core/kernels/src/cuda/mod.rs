//! Carrying out plans on a GPU. **Compiled and linked, and never run: there was no GPU to run it on.**

mod compile;
mod run;

pub use compile::{nvrtc_version, ptx};
pub use run::{address, run};
