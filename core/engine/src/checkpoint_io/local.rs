//! Files in the local file system.

use std::fs::File;
use std::path::Path;

use super::CheckpointReader;
use crate::Result;
use fulgurite_error::files::open_regular;

/// Bytes read at a time: few enough to stay in a core's cache.
const PIECE: usize = 256 << 10;

/// An open local file. Reads are positioned, so threads share it without a lock.
#[derive(Debug)]
pub struct LocalFile(File);

impl LocalFile {
    /// Opens the regular file `path` for reading.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io), of kind `NotFound` if the file does not exist. Also if it
    /// is a pipe, a device or another endless source.
    pub fn open(path: &Path) -> Result<Self> {
        Ok(Self(open_regular(path)?))
    }

    /// The file itself, positioned at its beginning.
    pub fn into_file(self) -> File {
        self.0
    }
}

impl CheckpointReader for LocalFile {
    fn len(&self) -> std::io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> std::io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(&self.0, buffer, offset)
    }

    fn read_exact_at_with(
        &self,
        buffer: &mut [u8],
        mut offset: u64,
        on_read: &mut dyn FnMut(&[u8]),
    ) -> std::io::Result<()> {
        for piece in buffer.chunks_mut(PIECE) {
            self.read_exact_at(piece, offset)?;
            on_read(piece);
            offset += piece.len() as u64;
        }
        Ok(())
    }
}
