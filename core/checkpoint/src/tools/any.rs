//! [`AnyCheckpoint`]: a checkpoint of any kind.

use std::path::Path;

use serde::Serialize;

use super::super::manifest::{FULL_MANIFEST, MANIFEST, Manifest};
use super::super::open::{Format, format_of};
use super::super::{
    DistributedCheckpoint, FullCheckpoint, SafetensorsSource, StoredTensors, TensorSource,
    TorchSource,
};
use crate::{Error, Result};

/// The kind of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum CheckpointKind {
    /// Shards and a manifest.
    Distributed,
    /// Whole tensors, with Fulgurite's manifest.
    Full,
    /// Weights alone: a Hugging Face directory, a safetensors file, PyTorch's shards.
    Weights,
    /// Weights of `torch.save`: `pytorch_model.bin`, `.pt`, `.pth`, Lightning's `.ckpt`.
    Torch,
}

impl std::fmt::Display for CheckpointKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Distributed => "distributed checkpoint",
            Self::Full => "full checkpoint",
            Self::Weights => "safetensors weights",
            Self::Torch => "weights of torch.save",
        })
    }
}

/// A checkpoint on disk, of any kind.
#[derive(Debug)]
pub enum AnyCheckpoint {
    /// Shards and a manifest.
    Distributed(Box<DistributedCheckpoint>),
    /// Whole tensors, with Fulgurite's manifest.
    Full(Box<FullCheckpoint>),
    /// Weights alone.
    Weights(SafetensorsSource),
    /// Weights of `torch.save`.
    Torch(TorchSource),
}

impl AnyCheckpoint {
    /// Opens the checkpoint at `path`, in any format that [`open`](crate::open) supports.
    ///
    /// # Errors
    /// If the checkpoint is missing or incomplete.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let (path, format) = format_of(path.as_ref())?;
        Ok(match format {
            Format::Distributed => Self::Distributed(Box::new(DistributedCheckpoint::open(path)?)),
            Format::Full => Self::Full(Box::new(FullCheckpoint::open(path)?)),
            Format::Torch => Self::Torch(TorchSource::open(path)?),
            Format::Safetensors => {
                if let Some(inside) = checkpoints_in(&path).into_iter().next_back() {
                    let message = format!(
                        "this directory is no checkpoint but has some in it; name one, such as {}",
                        path.join(inside).display()
                    );
                    return Err(Error::checkpoint(path, message));
                }
                Self::Weights(SafetensorsSource::open(path)?)
            }
        })
    }

    /// A warning for the user, such as that the manifest was saved without a checksum.
    pub fn warning(&self) -> Option<String> {
        match self {
            Self::Distributed(checkpoint) => checkpoint.warning(),
            Self::Full(checkpoint) => checkpoint.warning(),
            Self::Weights(source) => source.warning(),
            Self::Torch(source) => source.warning(),
        }
    }

    /// Its path.
    pub fn location(&self) -> &Path {
        self.model().location()
    }

    /// Its kind.
    pub fn kind(&self) -> CheckpointKind {
        match self {
            Self::Distributed(_) => CheckpointKind::Distributed,
            Self::Full(_) => CheckpointKind::Full,
            Self::Weights(_) => CheckpointKind::Weights,
            Self::Torch(_) => CheckpointKind::Torch,
        }
    }

    /// The model's tensors.
    pub fn model(&self) -> &dyn TensorSource {
        match self {
            Self::Distributed(checkpoint) => checkpoint.model(),
            Self::Full(checkpoint) => checkpoint.model(),
            Self::Weights(source) => source,
            Self::Torch(source) => source,
        }
    }

    /// Returns the optimizer's tensors, if there are any.
    pub fn optimizer(&self) -> Option<&StoredTensors> {
        let optimizer = match self {
            Self::Distributed(checkpoint) => checkpoint.optimizer(),
            Self::Full(checkpoint) => checkpoint.optimizer(),
            Self::Weights(_) | Self::Torch(_) => return None,
        };
        (!optimizer.is_empty()).then_some(optimizer)
    }

    /// Its manifest; `None` for weights alone.
    pub fn manifest(&self) -> Option<&Manifest> {
        match self {
            Self::Distributed(checkpoint) => Some(checkpoint.manifest()),
            Self::Full(checkpoint) => Some(checkpoint.manifest()),
            Self::Weights(_) | Self::Torch(_) => None,
        }
    }

    /// The manifest that bare weights say they were saved with, if it is missing.
    pub(super) fn missing_manifest(&self) -> Option<&str> {
        match self {
            Self::Distributed(_) | Self::Full(_) | Self::Torch(_) => None,
            Self::Weights(source) => source.missing_manifest(),
        }
    }

    /// Returns the model's and the optimizer's tensors, each with the section's name.
    pub(super) fn sections(&self) -> Vec<(&'static str, &dyn TensorSource)> {
        let optimizer = self.optimizer().map(|o| ("optimizer", o as &dyn TensorSource));
        [("model", self.model())].into_iter().chain(optimizer).collect()
    }
}

/// Returns the sorted names of checkpoints in this directory, if it does not have weights itself.
fn checkpoints_in(path: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(path) else { return Vec::new() };
    let entries: Vec<_> = entries.flatten().collect();
    if entries.iter().any(|entry| entry.path().extension().is_some_and(|e| e == "safetensors")) {
        return Vec::new();
    }
    let is_checkpoint =
        |path: &Path| [MANIFEST, FULL_MANIFEST].iter().any(|m| path.join(m).is_file());
    let mut names: Vec<_> = entries
        .iter()
        .filter(|entry| is_checkpoint(&entry.path()))
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| !super::super::is_temporary(name))
        .collect();
    names.sort();
    names
}
