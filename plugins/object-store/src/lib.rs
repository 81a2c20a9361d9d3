//! Checkpoints in object stores.
//!
//! S3 and compatible stores; with the features `azure` and `gcp` also Azure and Google; for tests,
//! a local directory and memory.
//!
//! ```
//! use std::sync::Arc;
//!
//! use fulgurite_core::checkpoint::CheckpointIO;
//! use fulgurite_object_store::{ObjectStoreIO, object_store::memory::InMemory};
//!
//! let io = ObjectStoreIO::new(Arc::new(InMemory::new()), "memory:///runs")?;
//! io.save("notes/hello", b"bytes")?;
//! assert_eq!(io.load("notes/hello")?, b"bytes");
//! # Ok::<(), fulgurite_core::Error>(())
//! ```
//!
//! In a configuration file; credentials are taken from the environment:
//!
//! ```toml
//! [checkpoint.io]
//! type = "object_store"
//! url = "s3://bucket/my-run"
//! options = { aws_region = "eu-central-1" }
//! ```
//!
//! # How a checkpoint becomes visible
//!
//! Object stores cannot rename. A checkpoint `NAME` is written under the identifier of its save,
//! and stays there:
//!
//! ```text
//! NAME/0123456789abcdef/model/shard-00001-…  during the save: NAME.tmp-0123456789abcdef
//! NAME/0123456789abcdef/manifest.json
//! NAME/committed.json                        written last: the version that is `NAME`
//! ```
//!
//! Writing one object is atomic. `committed.json` is written on the condition that it has not
//! changed since it was read (an ETag), so one of two concurrent saves fails. A store without
//! conditional writes just replaces it. Before the write `NAME` is the old checkpoint; afterwards
//! it is the new one, and the old version is deleted. A reader takes the files in folders from the
//! version whose manifest it has read. It may find them deleted, but never reads parts of two
//! versions.
//!
//! `NAME/0123456789abcdef/` is a whole distributed checkpoint: copied to a disk, it opens there.
//!
//! Large files are uploaded in parts while they are written. The parts of an upload that a crash
//! has interrupted are invisible and cost money: let the bucket's life-cycle rules delete them.

mod config;
mod driver;
mod io;
mod layout;
mod reader;
mod writer;

pub use config::ObjectStoreConfig;
pub use io::ObjectStoreIO;
/// The crate with the stores for [`ObjectStoreIO::new`].
pub use object_store;
