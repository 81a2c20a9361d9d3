//! Tensors of a model that are stacks of a file's tensors.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use fulgurite_checkpoint::{TensorInfo, TensorSource};
use fulgurite_engine::shard::Region;
use fulgurite_error::{Error, Result};

/// The tensors of a file that a tensor of the model stacks, and its shape.
#[derive(Debug)]
pub(super) struct Stacked {
    files: Vec<String>,
    pub(super) info: TensorInfo,
}

impl Stacked {
    /// The region of the stack, flat. Reads only the tensors that it has a part of.
    pub(super) fn read(
        &self,
        source: &impl TensorSource,
        region: &Region,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let within =
            Region { offsets: region.offsets[1..].to_vec(), sizes: region.sizes[1..].to_vec() };
        let part = |file: &String| -> Result<Tensor> {
            Ok(source.read(file, &within, dtype, &Device::Cpu)?.flatten_all()?)
        };
        let files = self.files.iter().skip(region.offsets[0]).take(region.sizes[0]);
        let parts = files.map(part).collect::<Result<Vec<_>>>()?;
        let values = match parts.as_slice() {
            [] => Tensor::zeros(0, dtype, &Device::Cpu)?,
            [one] => one.clone(),
            parts => Tensor::cat(parts, 0)?,
        };
        Ok(values.to_device(device)?)
    }
}

/// Collects the tensors of stacks.
#[derive(Debug, Default)]
pub(super) struct Stacks(BTreeMap<String, Vec<Option<String>>>);

impl Stacks {
    /// Adds the file's tensor `file` at its place: the stack, the index, and the size of the stack.
    ///
    /// # Errors
    /// If the stack has no such place.
    pub(super) fn add(
        &mut self,
        source: &impl TensorSource,
        (stack, index, count): (String, Option<usize>, usize),
        file: &str,
    ) -> Result<()> {
        let files = self.0.entry(stack.clone()).or_insert_with(|| vec![None; count]);
        match index.and_then(|index| files.get_mut(index)) {
            Some(place) => *place = Some(file.to_owned()),
            None => {
                return Err(Error::checkpoint(
                    source.location(),
                    format!(
                        "tensor `{file}` is none of the {count} of which `{stack}` is made; do weights and config.json \
                         belong together?"
                    ),
                ));
            }
        }
        Ok(())
    }

    /// The complete stacks. Those with a tensor that cannot be read are added to `unreadable`.
    ///
    /// # Errors
    /// If a stack lacks a tensor, or its tensors differ in shape or dtype.
    pub(super) fn finish(
        self,
        source: &impl TensorSource,
        unreadable: &mut BTreeMap<String, String>,
    ) -> Result<BTreeMap<String, Stacked>> {
        let mut complete = BTreeMap::new();
        for (stack, files) in self.0 {
            let wrong = |message: String| Err(Error::checkpoint(source.location(), message));
            if let Some(index) = files.iter().position(Option::is_none) {
                let count = files.len();
                return wrong(format!(
                    "tensor {index} of the {count} of which `{stack}` is made is missing; do weights and config.json \
                     belong together?"
                ));
            }
            let files: Vec<String> = files.into_iter().flatten().collect();
            let closed = files.iter().find(|file| source.info(file).is_none());
            if let Some(file) = closed {
                let reason = source.unreadable(file).unwrap_or("cannot be read");
                unreadable.insert(stack, reason.to_owned());
                continue;
            }
            let infos: Vec<TensorInfo> =
                files.iter().filter_map(|file| source.info(file)).collect();
            if let Some(i) = infos.iter().position(|info| *info != infos[0]) {
                let (file, info, first, other) = (&files[i], &infos[i], &files[0], &infos[0]);
                return wrong(format!(
                    "tensor `{file}` is {:?} in {:?}, and `{first}` is {:?} in {:?}; all tensors of which `{stack}` is \
                     made need one shape and dtype",
                    info.shape, info.dtype, other.shape, other.dtype
                ));
            }
            let mut info = infos[0].clone();
            info.shape.insert(0, files.len());
            complete.insert(stack, Stacked { files, info });
        }
        Ok(complete)
    }
}
