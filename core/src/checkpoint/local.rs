//! Files of the local file system, read anywhere.

use std::fs::File;
use std::path::Path;

use super::CheckpointReader;
use crate::{Error, Result};

/// An open local file. Reads are positioned, so threads share it without a lock.
#[derive(Debug)]
pub struct LocalFile(File);

impl LocalFile {
    /// Opens `path` for reading.
    ///
    /// # Errors
    /// [`Error::Io`], of kind `NotFound` if there is no such file.
    pub fn open(path: &Path) -> Result<Self> {
        Ok(Self(File::open(path).map_err(Error::io("opening", path))?))
    }
}

impl CheckpointReader for LocalFile {
    fn len(&self) -> std::io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> std::io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(&self.0, buffer, offset)
    }
}
