//! Reading a full checkpoint.

use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use super::super::coverage;
use super::super::distributed::contents;
use super::super::manifest::{FULL_MANIFEST, Manifest};
use super::super::stored::{FileLocation, check_undamaged};
use super::super::{CheckpointIO, StoredTensors, TensorInfo, TensorSource};
use crate::{Error, Result};
use fulgurite_engine::checkpoint_io::MAX_MANIFEST;
use fulgurite_engine::shard::Region;
use fulgurite_error::files::read_regular;

/// A checkpoint written by [`save_full`](super::save_full) or the [`tools`](super::super::tools).
///
/// As a [`TensorSource`] it is the [model](Self::model). Opening reads `fulgurite.json` and the
/// lengths of the files; nothing is collective.
#[derive(Debug)]
pub struct FullCheckpoint {
    manifest: Manifest,
    model: StoredTensors,
    optimizer: StoredTensors,
}

impl FullCheckpoint {
    /// Opens the checkpoint in the local directory `path`.
    ///
    /// # Errors
    /// If [`FULL_MANIFEST`] is missing, torn or of a newer version, or a file that it names is
    /// missing or has another length.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let bytes = read_regular(path.join(FULL_MANIFEST), MAX_MANIFEST);
        Self::from_manifest(bytes, &FileLocation::Local(path.to_owned()))
    }

    /// Opens the checkpoint `name` of `io`.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with(io: &Arc<dyn CheckpointIO>, name: &str) -> Result<Self> {
        let bytes = io.load(&format!("{name}/{FULL_MANIFEST}"));
        Self::from_manifest(bytes, &FileLocation::Io(io.clone(), name.to_owned()))
    }

    fn from_manifest(bytes: Result<Vec<u8>>, place: &FileLocation) -> Result<Self> {
        let bytes = match bytes {
            Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                let message = format!(
                    "there is no full checkpoint here: it has no {FULL_MANIFEST}. If it holds \
                     weights that others wrote, open it as a `SafetensorsSource`"
                );
                return Err(Error::checkpoint(place.location(""), message));
            }
            bytes => bytes?,
        };
        let manifest = Manifest::parse_full(&bytes, &place.location(FULL_MANIFEST))?;
        let (model, optimizer) = contents(&manifest, place, FULL_MANIFEST)?;
        Ok(Self { manifest, model, optimizer })
    }

    /// Sets whether a tensor that is read whole is compared with its checksum. The default is
    /// `true`.
    #[must_use]
    pub fn verify_on_load(mut self, verify: bool) -> Self {
        self.model.set_verify(verify);
        self.optimizer.set_verify(verify);
        self
    }

    /// The manifest, `fulgurite.json`.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The state that was saved, [`SaveMeta::state`](super::super::SaveMeta::state).
    pub fn state(&self) -> &serde_json::Value {
        &self.manifest.state
    }

    /// The model's tensors, by FQN.
    pub fn model(&self) -> &StoredTensors {
        &self.model
    }

    /// The optimizer's tensors, by [`optimizer_key`](super::super::optimizer_key); empty if they
    /// were not saved.
    pub fn optimizer(&self) -> &StoredTensors {
        &self.optimizer
    }

    /// Reads the whole checkpoint and compares it with the checksums.
    ///
    /// # Errors
    /// If anything is damaged, naming file and tensor of each damage.
    pub fn verify(&self) -> Result<()> {
        let mut damages = self.model.damages();
        damages.append(&mut self.optimizer.damages());
        for damage in coverage::damages(&self.manifest, self.model.place()) {
            let file = self.model.place().location(&damage.file);
            damages.push(format!("{}: {}", file.display(), damage.message));
        }
        check_undamaged(self.location(), damages)
    }
}

impl TensorSource for FullCheckpoint {
    fn location(&self) -> &Path {
        self.model.location()
    }

    fn names(&self) -> Vec<&str> {
        self.model.names()
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        self.model.info(name)
    }

    fn read(&self, name: &str, region: &Region, dtype: DType, device: &Device) -> Result<Tensor> {
        self.model.read(name, region, dtype, device)
    }

    fn read_into(&self, name: &str, region: &Region, target: &Tensor) -> Result<()> {
        self.model.read_into(name, region, target)
    }

    fn read_into_unverified(&self, name: &str, region: &Region, target: &Tensor) -> Result<()> {
        self.model.read_into_unverified(name, region, target)
    }

    fn read_stored(&self, name: &str) -> Result<Vec<u8>> {
        self.model.read_stored(name)
    }

    fn warning(&self) -> Option<String> {
        self.manifest.warning()
    }
}
