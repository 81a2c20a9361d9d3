//! The `checkpoint.io` plugin `local`, the default: a directory of a local or shared file system.
//!
//! ```
//! use fulgurite_checkpoint_local::LocalDirectory;
//! use fulgurite_core::checkpoint::CheckpointIO;
//!
//! let directory = tempfile::tempdir()?;
//! let io = LocalDirectory::new(directory.path());
//! io.save("notes/hello", b"bytes")?;
//! assert_eq!(io.load("notes/hello")?, b"bytes");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! In a configuration file:
//!
//! ```toml
//! [checkpoint]
//! dir = "checkpoints"
//! io = { type = "local" }
//! ```

mod directory;
mod file;
mod lock;

pub use directory::{LocalConfig, LocalDirectory};
