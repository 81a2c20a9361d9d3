//! Reading byte ranges of an object.

use std::collections::VecDeque;
use std::io::{Error, ErrorKind};
use std::sync::Arc;

use fulgurite_checkpoint::CheckpointReader;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};

use crate::driver::Driver;

/// An object of known length.
#[derive(Debug)]
pub(crate) struct ObjectReader {
    pub(crate) driver: Arc<Driver>,
    pub(crate) store: Arc<dyn ObjectStore>,
    pub(crate) path: Path,
    pub(crate) len: u64,
    /// Larger ranges are read in parts of this many bytes.
    pub(crate) part: usize,
    /// Number of parts that are read at the same time.
    pub(crate) concurrency: usize,
}

impl CheckpointReader for ObjectReader {
    fn len(&self) -> std::io::Result<u64> {
        Ok(self.len)
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> std::io::Result<()> {
        if buffer.is_empty() {
            return Ok(());
        }
        if offset.checked_add(buffer.len() as u64).is_none_or(|end| end > self.len) {
            return Err(Error::new(ErrorKind::UnexpectedEof, "the object ends before"));
        }
        let mut parts = buffer.chunks_mut(self.part);
        let mut start = offset;
        let mut under_way = VecDeque::new();
        loop {
            while under_way.len() < self.concurrency
                && let Some(part) = parts.next()
            {
                let range = start..start + part.len() as u64;
                start = range.end;
                let (store, path) = (self.store.clone(), self.path.clone());
                let request = self.driver.spawn(async move { store.get_range(&path, range).await });
                under_way.push_back((part, request));
            }
            let Some((part, request)) = under_way.pop_front() else { return Ok(()) };
            let bytes = request.wait()?;
            if bytes.len() != part.len() {
                return Err(Error::new(ErrorKind::UnexpectedEof, "the object ends before"));
            }
            part.copy_from_slice(&bytes);
        }
    }
}
