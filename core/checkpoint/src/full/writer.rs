//! Writing the files of a full checkpoint, on the rank that has the tensors.

use std::collections::VecDeque;

use candle_core::Tensor;

use super::super::manifest::Section;
use super::super::manifest::{FULL_MANIFEST, FileDigest, Manifest, SaveMeta, TensorEntry};
use super::super::save::{check_replaceable, remove_abandoned};
use super::super::tensor_file::{FileKind, TensorFile};
use super::layout::{FilePlan, TensorMeta, index};
use crate::{Error, Result};
use fulgurite_engine::checkpoint_io::{self as naming, CheckpointIO, PlaceLock};

/// Returns the directory to write the full checkpoint `name` in, and its lock. Removes unfinished
/// saves.
pub(super) fn prepare(io: &dyn CheckpointIO, name: &str) -> Result<(String, Option<PlaceLock>)> {
    if let Some(complaint) = naming::invalid_name(name) {
        return Err(Error::checkpoint(io.location(name), complaint));
    }
    let entries = io.list("")?;
    remove_abandoned(io, name, &entries)?;
    check_replaceable(io, name, &entries)?;
    let staged = naming::staging_name(name);
    let lock = io.lock(&staged)?;
    Ok((staged, lock))
}

/// Writes the files of a full checkpoint; takes the tensors in the order of the [`FilePlan`]s.
pub(crate) struct FullWriter<'a> {
    io: &'a dyn CheckpointIO,
    staged: String,
    model: Vec<TensorMeta>,
    optimizer: Vec<TensorMeta>,
    waiting: VecDeque<FilePlan>,
    current: Option<(FilePlan, TensorFile<'a>, usize)>,
    files: Vec<FilePlan>,
    manifest: Manifest,
    kind: FileKind,
}

impl<'a> FullWriter<'a> {
    /// Creates a writer into the directory `staged` of `io`, with the metadata of a checkpoint.
    /// `kind` says whether it is a checkpoint or bare weights.
    pub(crate) fn new(
        io: &'a dyn CheckpointIO,
        staged: &str,
        (model, optimizer): (&[TensorMeta], &[TensorMeta]),
        files: &[FilePlan],
        (world_size, meta): (usize, &SaveMeta),
        kind: FileKind,
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
            kind,
        }
    }

    fn section(&self, section: Section) -> &[TensorMeta] {
        match section {
            Section::Model => &self.model,
            Section::Optimizer => &self.optimizer,
        }
    }

    /// Writes the next tensor's values, which must have its dtype.
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
                (plan, TensorFile::create(self.io, path, name, slots, self.kind)?, 0)
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
            file.finish(&mut self.manifest)?;
        } else {
            self.current = Some((plan, file, i + 1));
        }
        Ok(())
    }

    /// Writes the other files and returns the manifest. A checkpoint's [`FULL_MANIFEST`] is written
    /// last. The caller commits the checkpoint.
    pub(crate) fn finish(mut self, extra: &[(String, Vec<u8>)]) -> Result<Manifest> {
        if self.current.is_some() || !self.waiting.is_empty() {
            return Err(Error::other("a full checkpoint was given too few tensors"));
        }
        for section in [Section::Model, Section::Optimizer] {
            let files: Vec<_> =
                self.files.iter().filter(|file| file.section == section).cloned().collect();
            if let Some((name, index)) = index(section, self.section(section), &files) {
                let bytes = serde_json::to_vec_pretty(&index).map_err(|e| {
                    let location = self.io.location(&self.staged);
                    Error::checkpoint(location, format!("encoding {name}: {e}"))
                })?;
                self.put_companion(name, &bytes)?;
            }
        }
        for (name, bytes) in extra {
            self.put_companion(name.clone(), bytes)?;
        }
        if self.kind == FileKind::Full {
            let path = format!("{}/{FULL_MANIFEST}", self.staged);
            self.io.save(&path, &self.manifest.encode(&self.io.location(&path))?)?;
        }
        Ok(self.manifest)
    }

    fn put_companion(&mut self, name: String, bytes: &[u8]) -> Result<()> {
        self.io.save(&format!("{}/{name}", self.staged), bytes)?;
        self.manifest.companions.insert(name, FileDigest::of(bytes));
        Ok(())
    }
}
