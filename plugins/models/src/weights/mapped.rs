//! A file under the names of the model.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use fulgurite_checkpoint::{PackedSource, TensorInfo, TensorSource};
use fulgurite_engine::shard::Region;
use fulgurite_error::{Error, Result};

use super::layout::WeightLayout;
use super::stack::{Stacked, Stacks};
use super::view::View;

/// The tensors of a Hugging Face file, under the names and in the shapes of a model.
pub struct MappedSource<S> {
    source: PackedSource<S>,
    /// For each tensor of the model: its name in the file, the part of it, and its shape.
    tensors: BTreeMap<String, (String, View, TensorInfo)>,
    /// The tensors of the model that are stacks of tensors of the file.
    stacks: BTreeMap<String, Stacked>,
    unreadable: BTreeMap<String, String>,
}

impl<S: TensorSource> MappedSource<S> {
    /// Maps the file's tensors by the layout.
    ///
    /// # Errors
    /// If a tensor does not have the rows that the layout takes from it, if a stack lacks a tensor,
    /// or if the sides of a rule have different numbers of stars.
    pub fn new(source: S, layout: &WeightLayout) -> Result<Self> {
        layout.check()?;
        let source = PackedSource::new(source, layout.packing());
        let prefix = format!("{}.", layout.prefix());
        let has_prefix = || source.names().iter().any(|name| name.starts_with(&prefix));
        let base_only = !layout.prefix().is_empty() && !has_prefix();
        let (mut tensors, mut unreadable) = (BTreeMap::new(), BTreeMap::new());
        let mut stacks = Stacks::default();
        for file in source.names() {
            let full = match base_only {
                true => format!("{prefix}{file}"),
                false => file.to_owned(),
            };
            // The names of norms in the oldest files of BERT.
            let full = match full.rsplit_once('.') {
                Some((path, "gamma")) => format!("{path}.weight"),
                Some((path, "beta")) => format!("{path}.bias"),
                _ => full,
            };
            if layout.ignores(&full) {
                continue;
            }
            if let Some(place) = layout.stack_of_file(&full) {
                stacks.add(&source, place, file)?;
                continue;
            }
            for (name, view) in layout.of_file(&full) {
                let Some(info) = source.info(file) else {
                    let reason = source.unreadable(file).unwrap_or("cannot be read");
                    unreadable.insert(name, reason.to_owned());
                    continue;
                };
                let Some(shape) = view.shape(&info.shape) else {
                    return Err(Error::checkpoint(
                        source.location(),
                        format!(
                            "tensor `{file}` has the shape {:?}, which does not hold `{name}`; do weights and \
                             config.json belong together?",
                            info.shape
                        ),
                    ));
                };
                let info = TensorInfo { shape, dtype: info.dtype };
                tensors.insert(name, (file.to_owned(), view, info));
            }
        }
        let stacks = stacks.finish(&source, &mut unreadable)?;
        Ok(Self { source, tensors, stacks, unreadable })
    }
}

impl<S: TensorSource> TensorSource for MappedSource<S> {
    fn location(&self) -> &Path {
        self.source.location()
    }

    fn names(&self) -> Vec<&str> {
        let names = self.tensors.keys().chain(self.stacks.keys()).chain(self.unreadable.keys());
        let mut names: Vec<&str> = names.map(String::as_str).collect();
        names.sort_unstable();
        names
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        let of_stack = || self.stacks.get(name).map(|stack| stack.info.clone());
        self.tensors.get(name).map(|(_, _, info)| info.clone()).or_else(of_stack)
    }

    fn read(&self, name: &str, region: &Region, dtype: DType, device: &Device) -> Result<Tensor> {
        if let Some(stack) = self.stacks.get(name) {
            return stack.read(&self.source, region, dtype, device);
        }
        let Some((file, view, _)) = self.tensors.get(name) else {
            return self.source.read(name, region, dtype, device);
        };
        let values = view.read(&self.source, file, region, dtype)?;
        Ok(values.to_device(device)?)
    }

    fn read_into(&self, name: &str, region: &Region, target: &Tensor) -> Result<()> {
        match self.tensors.get(name) {
            Some((file, View::WHOLE, _)) => self.source.read_into(file, region, target),
            _ => {
                let values = self.read(name, region, target.dtype(), target.device())?;
                fulgurite_engine::autograd::storage::copy_from(target, &values)
            }
        }
    }

    fn unreadable(&self, name: &str) -> Option<&str> {
        self.unreadable.get(name).map(String::as_str)
    }

    fn filtered(&self) -> Option<&str> {
        self.source.filtered()
    }

    fn warning(&self) -> Option<String> {
        self.source.warning()
    }
}
