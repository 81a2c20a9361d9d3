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
//! The two folders are in the layout of PyTorch's
//! `HuggingFaceStorageWriter(save_distributed=True)`, and its `HuggingFaceStorageReader` reads
//! them. On [`save`] all ranks write one together, as a transaction: its name holds a whole
//! checkpoint or nothing. [`AsyncSaver`] saves in the background, and [`last`] finds the checkpoint
//! saved last.
//!
//! ## Why saving in the background is not a `CheckpointIO`
//! Lightning's is one: it wraps another `CheckpointIO`, whose `save_checkpoint` takes the whole
//! state. Here a save writes many files from many ranks, which communicate at its beginning and
//! before its end. Its fast part must copy the shards before the next step changes them. So it is
//! implemented above the [`CheckpointIO`], once for all of them and for every strategy.
//!
//! A **full checkpoint** is a directory that `transformers` and candle load: `model.safetensors`,
//! or several files with an index; `config.json` if there is one; `optimizer.safetensors` if the
//! optimizer's state is saved; and a manifest, `fulgurite.json`, written last. [`save_full`] writes
//! one under any strategy; [`tools`] convert between full and distributed checkpoints.
//!
//! Tensors are loaded from a [`TensorSource`]: a [`DistributedCheckpoint`], a [`FullCheckpoint`], a
//! [`SafetensorsSource`] (a Hugging Face directory, a single file, PyTorch's shards) or a
//! [`TorchSource`] (`.pt`, `.pth`, Lightning's `.ckpt`); [`open`] detects the format. Sources in
//! memory are a [`TensorMap`], or a closure as a [`TensorFn`]. If only rank 0 can read, a
//! [`RankZeroSource`] sends the tensors to the other ranks.
//!
//! [`load_into`] fills a model on any mesh from any source; each rank reads only the bytes of its
//! own part. [`LoadOptions`] say what may differ, and [`NameRules`] map names.
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
//! Bytes are written and read through a [`CheckpointIO`], a plugin; the default is `local` in
//! `fulgurite-checkpoint-local`.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests read tensors"))]

mod async_save;
mod checksum;
mod chunks;
mod coverage;
mod distributed;
mod file_header;
mod filter;
mod fingerprint;
mod full;
mod json;
mod latest;
mod load;
mod load_options;
mod load_report;
mod manifest;
mod memory;
mod names;
mod narrow;
mod on_hosts;
mod open;
mod packed;
mod peft;
mod rank_zero;
mod save;
mod shard_file;
mod shard_tensor;
mod snapshot;
mod source;
mod stored;
mod tensor_file;
mod tied;
pub mod tools;
mod torch;
mod unpacked;
mod weights;

pub use async_save::{AsyncSaver, SavedCheckpoint};
pub use distributed::DistributedCheckpoint;
pub use filter::ParameterFilter;
pub use fingerprint::fingerprint;
pub use full::{
    FullCheckpoint, FullOptions, GatherOptions, ModelConfig, NameFilter, gather_cpu_state_dict,
    gather_full_optimizer_state, save_full,
};
pub use json::read_json;
pub use latest::{CommittedCheckpoint, LAST, last, latest};
pub use load::{
    RestoreReport, check_compatible, check_compatible_with, compare, compare_with,
    load_from_full_model_state_dict, load_from_full_optimizer_state_dict, load_into,
    load_optimizer, load_raw, restore,
};
pub use load_options::{DtypePolicy, LoadOptions};
pub use load_report::{LoadReport, Mismatch};
pub use manifest::{
    ChunkEntry, FORMAT_VERSION, FULL_MANIFEST, FileDigest, MANIFEST, Manifest, SaveMeta,
    TensorEntry,
};
pub use memory::{TensorFn, TensorMap};
pub use names::{NameRules, RenamedSource, clean_tensor_name};
pub use on_hosts::{
    HostPart, Hosts, HostsReader, OnHosts, parts_on_host, save_on_hosts, whole_on_hosts,
};
pub use open::{open, resolve_last};
pub use packed::{PackedSource, Packing};
pub use peft::{
    ADAPTER_CONFIG, ADAPTER_MODEL, AdapterLabels, AdapterSource, MergedModel, PeftConfig,
    load_adapter, save_adapter, write_adapter,
};
pub use rank_zero::RankZeroSource;
pub use save::{SaveRequest, after_commit, remove_unfinished, save};
pub use shard_tensor::{
    ShardTensor, model_tensors, optimizer_key, optimizer_tensors, parse_optimizer_key,
    replica_tensors, shard_specs,
};
pub use source::{TensorInfo, TensorSource};
pub use stored::StoredTensors;
pub use tied::same_values;
pub use torch::{RekeyedOptimizer, TorchOptimizer, TorchSource};
pub use unpacked::UnpackedSource;
pub use weights::SafetensorsSource;

pub use fulgurite_engine::checkpoint_io::{
    CheckpointIO, CheckpointIOConfig, CheckpointReader, CheckpointWriter, Entry, LocalFile,
    PlaceLock, is_temporary, replaced_name, staging_name, step_name,
};
pub use fulgurite_engine::{Error, Result};
