//! Full checkpoints: whole tensors, in a directory that `transformers` and candle load.
//!
//! ```text
//! step-00000010-full/
//!   model.safetensors            or model-00001-of-00003.safetensors, … and
//!   model.safetensors.index.json past a size
//!   optimizer.safetensors        if the optimizer's state is saved; keys state.{fqn}.{name}
//!   config.json                  if one was given
//!   fulgurite.json               written last: version, step, state, configuration, checksums
//! ```
//!
//! Rank 0 gathers the tensors one by one and writes each at once: the file's header follows from
//! the global shapes.

mod gather;
mod layout;
mod open;
mod options;
mod save;
mod writer;

pub use open::FullCheckpoint;
pub use options::{FullOptions, GatherOptions, ModelConfig, NameFilter};
pub use save::{gather_cpu_state_dict, gather_full_optimizer_state, save_full};

pub(super) use layout::{FilePlan, TensorMeta, plan_files};
pub(super) use writer::FullWriter;
