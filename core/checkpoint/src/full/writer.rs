//! Writing the files of a full checkpoint, on the rank that has the tensors.

use std::collections::VecDeque;
use std::path::PathBuf;

use candle_core::Tensor;

use super::super::manifest::Section;
use super::super::manifest::{FULL_MANIFEST, Manifest, SaveMeta, TensorEntry};
use super::super::save::check_replaceable;
use super::super::tensor_file::TensorFile;
use super::layout::{FilePlan, TensorMeta, index};
use crate::{Error, Result};
use fulgurite_engine::checkpoint_io::{self as naming, CheckpointIO};

/// The name of the directory in which the full checkpoint `name` is written. Removes unfinished
/// saves of that name.
pub(super) fn prepare(io: &dyn CheckpointIO, name: &str) -> Result<String> {
    if let Some(complaint) = naming::invalid_name(name) {
        return Err(Error::checkpoint(io.location(name), complaint));
    }
    let entries = io.list("")?;
    for entry in entries.iter().filter(|e| naming::is_temporary_of(&e.name, name)) {
        io.remove(&entry.name)?;
    }
    check_replaceable(io, name, &entries)?;
    Ok(naming::staging_name(name))
}

/// Writes the files of a full checkpoint; is given the tensors in the order of the [`FilePlan`]s.
pub(crate) struct FullWriter<'a> {
    io: &'a dyn CheckpointIO,
    staged: String,
    model: Vec<TensorMeta>,
    optimizer: Vec<TensorMeta>,
    waiting: VecDeque<FilePlan>,
    current: Option<(FilePlan, TensorFile<'a>, usize)>,
    files: Vec<FilePlan>,
    manifest: Manifest,
}

impl<'a> FullWriter<'a> {
    /// A writer into the directory `staged` of `io`, of a checkpoint with this metadata.
    pub(crate) fn new(
        io: &'a dyn CheckpointIO,
        staged: &str,
        (model, optimizer): (&[TensorMeta], &[TensorMeta]),
        files: &[FilePlan],
        (world_size, meta): (usize, &SaveMeta),
    ) -> Self {
        Self {
            io,
            staged: staged.to_owned(),
            model: model.to_vec(),
            optimizer: optimizer.to_vec(),
            waiting: files.to_vec().into(),
            current: None,
            files: files.to_vec(),
            manifest: Manifest::new_full(world_size, meta),
        }
    }

    fn section(&self, section: Section) -> &[TensorMeta] {
        match section {
            Section::Model => &self.model,
            Section::Optimizer => &self.optimizer,
        }
    }

    /// Writes the values of the next tensor, which have its dtype.
    pub(crate) fn put(&mut self, values: &Tensor) -> Result<()> {
        let (plan, mut file, i) = match self.current.take() {
            Some(current) => current,
            None => {
                let Some(plan) = self.waiting.pop_front() else {
                    return Err(Error::other("a full checkpoint was given too many tensors"));
                };
                let tensors = self.section(plan.section);
                let slots = plan.tensors.iter().map(|&i| tensors[i].slot()).collect();
                let (path, name) = (format!("{}/{}", self.staged, plan.file), plan.file.clone());
                (plan, TensorFile::create(self.io, path, name, slots, false)?, 0)
            }
        };
        let written = file.put(values)?;
        let tensor = self.section(plan.section)[plan.tensors[i]].clone();
        let entries = match plan.section {
            Section::Model => &mut self.manifest.model,
            Section::Optimizer => &mut self.manifest.optimizer,
        };
        let entry = TensorEntry {
            shape: tensor.shape,
            dtype: tensor.dtype,
            chunks: written.into_iter().collect(),
        };
        entries.insert(tensor.name, entry);
        if file.is_complete() {
            let (name, len) = file.finish()?;
            self.manifest.files.insert(name, len);
        } else {
            self.current = Some((plan, file, i + 1));
        }
        Ok(())
    }

    /// Writes the other files, [`FULL_MANIFEST`] last if `marked`, and returns the manifest. The
    /// caller commits the checkpoint.
    pub(crate) fn finish(self, extra: &[(String, Vec<u8>)], marked: bool) -> Result<Manifest> {
        if self.current.is_some() || !self.waiting.is_empty() {
            return Err(Error::other("a full checkpoint was given too few tensors"));
        }
        for section in [Section::Model, Section::Optimizer] {
            let files: Vec<_> =
                self.files.iter().filter(|file| file.section == section).cloned().collect();
            write_index(self.io, &self.staged, section, self.section(section), &files)?;
        }
        for (name, bytes) in extra {
            self.io.save(&format!("{}/{name}", self.staged), bytes)?;
        }
        if marked {
            let bytes = serde_json::to_vec_pretty(&self.manifest).map_err(|e| {
                Error::checkpoint(self.location(), format!("encoding {FULL_MANIFEST}: {e}"))
            })?;
            self.io.save(&format!("{}/{FULL_MANIFEST}", self.staged), &bytes)?;
        }
        Ok(self.manifest)
    }

    fn location(&self) -> PathBuf {
        self.io.location(&self.staged)
    }
}

/// Writes the index of the files, if there are several.
fn write_index(
    io: &dyn CheckpointIO,
    staged: &str,
    section: Section,
    tensors: &[TensorMeta],
    files: &[FilePlan],
) -> Result<()> {
    let Some((name, index)) = index(section, tensors, files) else { return Ok(()) };
    let bytes = serde_json::to_vec_pretty(&index)
        .map_err(|e| Error::checkpoint(io.location(staged), format!("encoding {name}: {e}")))?;
    io.save(&format!("{staged}/{name}"), &bytes)
}
