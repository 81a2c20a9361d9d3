//! Writing an object, in parts if it is large.

use std::collections::VecDeque;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use fulgurite_checkpoint::CheckpointWriter;
use fulgurite_error::{Error, Result};
use object_store::path::Path;
use object_store::{MultipartUpload, ObjectStore, ObjectStoreExt, PutPayload};

use crate::driver::{Driver, Pending};

/// An object that is being written. It appears when the write is finished.
#[derive(Debug)]
pub(crate) struct ObjectWriter {
    pub(crate) driver: Arc<Driver>,
    pub(crate) store: Arc<dyn ObjectStore>,
    pub(crate) path: Path,
    /// Its location, for messages.
    pub(crate) location: PathBuf,
    pub(crate) part: usize,
    pub(crate) concurrency: usize,
    /// Bytes that are not sent yet.
    pub(crate) buffer: Vec<u8>,
    /// The multipart upload, once there is more than one part.
    pub(crate) upload: Option<Box<dyn MultipartUpload>>,
    pub(crate) under_way: VecDeque<Pending<()>>,
}

impl ObjectWriter {
    /// Sends the buffer as a part.
    fn send(&mut self) -> object_store::Result<()> {
        if self.under_way.len() >= self.concurrency
            && let Some(oldest) = self.under_way.pop_front()
        {
            oldest.wait()?;
        }
        let bytes = Bytes::from(std::mem::take(&mut self.buffer));
        let upload = match &mut self.upload {
            Some(upload) => upload,
            none => {
                let (store, path) = (self.store.clone(), self.path.clone());
                none.insert(self.driver.run(async move { store.put_multipart(&path).await })?)
            }
        };
        let part = upload.put_part(PutPayload::from(bytes));
        self.under_way.push_back(self.driver.spawn(part));
        Ok(())
    }

    fn complete(&mut self) -> object_store::Result<()> {
        if self.upload.is_none() {
            let (store, path) = (self.store.clone(), self.path.clone());
            let payload = PutPayload::from(std::mem::take(&mut self.buffer));
            return self.driver.run(async move { store.put(&path, payload).await }).map(drop);
        }
        if !self.buffer.is_empty() {
            self.send()?;
        }
        while let Some(part) = self.under_way.pop_front() {
            part.wait()?;
        }
        let Some(mut upload) = self.upload.take() else { return Ok(()) };
        self.driver.run(async move {
            let completed = upload.complete().await;
            if completed.is_err() {
                // The first error is reported instead.
                let _ = upload.abort().await;
            }
            completed.map(drop)
        })
    }
}

impl Write for ObjectWriter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let taken = bytes.len().min(self.part - self.buffer.len());
        self.buffer.extend_from_slice(&bytes[..taken]);
        if self.buffer.len() == self.part {
            self.send()?;
        }
        Ok(taken)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl CheckpointWriter for ObjectWriter {
    fn finish(mut self: Box<Self>) -> Result<()> {
        self.complete().map_err(|e| Error::io("uploading", &self.location)(e.into()))
    }
}

impl Drop for ObjectWriter {
    fn drop(&mut self) {
        if let Some(mut upload) = self.upload.take() {
            while let Some(part) = self.under_way.pop_front() {
                let _ = part.wait();
            }
            if let Err(error) = self.driver.run(async move { upload.abort().await }) {
                tracing::warn!("giving up the upload of {}: {error}", self.location.display());
            }
        }
    }
}
