//! Checkpoint storage: bytes to and from a place, and the names used there.

mod io;
mod local;
mod naming;

pub use io::{
    CheckpointIO, CheckpointIOConfig, CheckpointReader, CheckpointWriter, Entry, MAX_MANIFEST,
    PlaceLock,
};
pub use local::LocalFile;
pub use naming::{
    invalid_name, is_temporary, is_temporary_of, replaced_base, replaced_name, staging_name,
    step_name,
};
