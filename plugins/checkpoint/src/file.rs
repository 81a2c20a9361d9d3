//! Writing a local file durably.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use fulgurite_config::{Error, Result};
use fulgurite_engine::checkpoint_io::CheckpointWriter;

/// Size of the buffer for small tensors; larger ones are written directly.
const BUFFER: usize = 1 << 20;

/// A file being written.
#[derive(Debug)]
pub(crate) struct LocalWriter {
    file: BufWriter<File>,
    path: PathBuf,
    sync: bool,
}

impl LocalWriter {
    pub(crate) fn create(path: PathBuf, sync: bool) -> Result<Self> {
        let file = File::create(&path).map_err(Error::io("creating", &path))?;
        Ok(Self { file: BufWriter::with_capacity(BUFFER, file), path, sync })
    }
}

impl Write for LocalWriter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.file.flush()
    }
}

impl CheckpointWriter for LocalWriter {
    fn finish(mut self: Box<Self>) -> Result<()> {
        self.file.flush().map_err(Error::io("writing", &self.path))?;
        if self.sync {
            self.file.get_ref().sync_all().map_err(Error::io("syncing", &self.path))?;
            if let Some(parent) = self.path.parent() {
                sync_directory(parent)?;
            }
        }
        Ok(())
    }
}

/// Makes the entries of a directory durable.
pub(crate) fn sync_directory(path: &Path) -> Result<()> {
    let directory = File::open(path).map_err(Error::io("opening", path))?;
    directory.sync_all().map_err(Error::io("syncing", path))
}
