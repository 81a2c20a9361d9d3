//! Checkpoints in object stores: S3 and everything that speaks its protocol, with the features
//! `azure` and `gcp` also those, and, for tests, a local directory and memory.
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
//! Object stores have no rename. A checkpoint `NAME` is written under the identifier of its save, and
//! stays there:
//!
//! ```text
//! NAME/0123456789abcdef/model/shard-00001-…      while it is being saved: NAME.tmp-0123456789abcdef
//! NAME/0123456789abcdef/manifest.json
//! NAME/committed.json                            put last: says which of them is `NAME`
//! ```
//!
//! Putting one object is atomic. It is put on the condition that nobody has put another since (an
//! ETag; a store that knows no such condition just replaces it), so that of two saves that both
//! believe to be the only one, one fails. Before it, `NAME` is what it was, from then on it is the new
//! one, and what it replaced is deleted. A reader takes the files in folders from the version whose
//! manifest it has read: it may find it deleted, but never sees parts of two.
//!
//! `NAME/0123456789abcdef/` is a whole distributed checkpoint: copied to a disk, it opens there.
//!
//! Large files are uploaded in parts while they are written. Those of an upload that was cut short by
//! a crash are not visible and cost money: let the bucket's life-cycle rules delete them.

mod config;
mod driver;
mod io;
mod layout;
mod reader;
mod writer;

pub use config::ObjectStoreConfig;
pub use io::ObjectStoreIO;
/// The crate whose stores [`ObjectStoreIO::new`] takes.
pub use object_store;
