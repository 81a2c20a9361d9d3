//! Checkpoints: safetensors shards that any mesh can load, a manifest written last, transactions.
//!
//! A **distributed checkpoint** is a directory:
//!
//! ```text
//! step-00000010/
//!   model/shard-00001-model-00001-of-00001.safetensors       one a writing rank
//!   optimizer/shard-00001-model-00001-of-00001.safetensors   keys state.{fqn}.{name}
//!   manifest.json                                            written last
//! ```
//!
//! The two folders are in the layout of PyTorch's `HuggingFaceStorageWriter(save_distributed=True)`
//! and its `HuggingFaceStorageReader` reads them. [`save`] writes one, all ranks together, as a
//! transaction: what is there under its name is whole, or is not there. [`latest`] finds the newest.
//!
//! Everything that tensors are loaded from is a [`TensorSource`]: a [`DistributedCheckpoint`], a
//! [`SafetensorsSource`] (a Hugging Face directory, a single file, PyTorch's shards) or a
//! [`TorchSource`] (`.pt`, `.pth`, Lightning's `.ckpt`); [`open`] tells which is there. [`load_into`]
//! fills a model on any mesh from any of them, each rank reading only the bytes its own part needs;
//! [`LoadOptions`] say what may differ, and [`NameRules`] bring other names in line.
//!
//! ```no_run
//! use fulgurite_core::checkpoint;
//! use fulgurite_core::module::ModuleTree;
//!
//! fn load(tree: &ModuleTree) -> fulgurite_core::Result<()> {
//!     let source = checkpoint::open("models/Llama-3.2-1B")?;
//!     checkpoint::load_into(&*source, tree, true)?;
//!     Ok(())
//! }
//! ```
//!
//! Where the bytes go is a [`CheckpointIO`]'s business, a plugin's; `local` in
//! `fulgurite-checkpoint` is the default.

mod boxes;
mod distributed;
mod filter;
mod io;
mod latest;
mod load;
mod load_options;
mod load_report;
mod local;
mod manifest;
mod names;
mod naming;
mod open;
mod save;
mod shard_file;
mod shard_tensor;
mod source;
mod stored;
mod torch;
mod weights;

pub use distributed::DistributedCheckpoint;
pub use filter::Filter;
pub use io::{CheckpointIO, CheckpointIOConfig, CheckpointReader, CheckpointWriter, Entry};
pub use latest::{Committed, latest};
pub use load::{
    RestoreReport, check, compare, compare_with, load_from_full_model_state_dict,
    load_from_full_optimizer_state_dict, load_into, load_optimizer, load_raw, restore,
};
pub use load_options::{DtypePolicy, LoadOptions};
pub use load_report::{LoadReport, Mismatch};
pub use local::LocalFile;
pub use manifest::{BoxEntry, FORMAT_VERSION, MANIFEST, Manifest, SaveMeta, TensorEntry};
pub use names::{NameRules, Renamed, clean_tensor_name};
pub use naming::{is_temporary, replaced_name, staging_name, step_name};
pub use open::open;
pub use save::save;
pub use shard_tensor::{
    ShardTensor, model_tensors, optimizer_key, optimizer_tensors, parse_optimizer_key, specs,
};
pub use source::{TensorInfo, TensorSource};
pub use stored::StoredTensors;
pub use torch::TorchSource;
pub use weights::SafetensorsSource;
