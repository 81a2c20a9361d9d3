//! A model under the names of a Hugging Face file.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use fulgurite_checkpoint::{TensorInfo, TensorSource};
use fulgurite_engine::shard::Region;
use fulgurite_error::{Error, Result};

use super::layout::WeightLayout;
use super::view::{Rows, View};

/// The tensors of a model, under the names and in the shapes of a Hugging Face file.
pub struct ExportedSource<S> {
    source: S,
    /// For each tensor of the file: the model's tensors that it is made of, and its shape.
    tensors: BTreeMap<String, (Vec<(String, View)>, TensorInfo)>,
    /// For each tensor of the file that the model has in a stack: the stack, the index, and its
    /// shape.
    of_stacks: BTreeMap<String, (String, usize, TensorInfo)>,
}

impl<S: TensorSource> ExportedSource<S> {
    /// Maps the model's tensors by the layout.
    ///
    /// # Errors
    /// If a tensor of the file lacks one of its parts, or the sides of a rule have different
    /// numbers of stars.
    pub fn new(source: S, layout: &WeightLayout) -> Result<Self> {
        layout.check()?;
        let mut tensors: BTreeMap<String, (Vec<(String, View)>, TensorInfo)> = BTreeMap::new();
        let mut of_stacks = BTreeMap::new();
        for name in source.names().into_iter().filter(|name| !layout.leaves_out(name)) {
            if let Some(files) = layout.stack_of_model(name) {
                let info = source.info(name).ok_or_else(|| {
                    Error::checkpoint(source.location(), format!("tensor `{name}` cannot be read"))
                })?;
                if info.shape.first() != Some(&files.len()) {
                    let (count, shape) = (files.len(), &info.shape);
                    let message = format!(
                        "tensor `{name}` has the shape {shape:?}, and is to be {count} tensors in `transformers`; do \
                         weights and config.json belong together?"
                    );
                    return Err(Error::checkpoint(source.location(), message));
                }
                let own = TensorInfo { shape: info.shape[1..].to_vec(), dtype: info.dtype };
                for (i, file) in files.into_iter().enumerate() {
                    of_stacks.insert(file, (name.to_owned(), i, own.clone()));
                }
                continue;
            }
            let (file, parts) = layout.of_model(name);
            if tensors.contains_key(&file) {
                continue;
            }
            let wrong = |message: String| {
                Error::checkpoint(source.location(), format!("tensor `{name}`: {message}"))
            };
            let infos = parts.iter().map(|(part, _)| {
                source.info(part).ok_or_else(|| {
                    wrong(format!(
                        "`{part}` is missing, with which it is `{file}` in `transformers`"
                    ))
                })
            });
            let infos = infos.collect::<Result<Vec<_>>>()?;
            let mut shape = infos[0].shape.clone();
            let View { stacked, transposed, .. } = parts[0].1;
            let rows = usize::from(stacked);
            if parts.len() > 1 {
                shape[rows] = infos.iter().map(|info| info.shape[rows]).sum();
            }
            if transposed && shape.len() == rows + 2 {
                shape.swap(rows, rows + 1);
            }
            tensors.insert(file, (parts, TensorInfo { shape, dtype: infos[0].dtype }));
        }
        Ok(Self { source, tensors, of_stacks })
    }

    /// The whole tensor `file`.
    fn whole(&self, parts: &[(String, View)], dtype: DType) -> Result<Tensor> {
        let read = |(name, _): &(String, View)| -> Result<Tensor> {
            let shape = self.source.info(name).map(|info| info.shape).unwrap_or_default();
            let values = self.source.read(name, &Region::full(&shape), dtype, &Device::Cpu)?;
            Ok(values.reshape(shape)?)
        };
        let values = parts.iter().map(read).collect::<Result<Vec<_>>>()?;
        let view = parts[0].1;
        let joined = match (view.rows, values.as_slice()) {
            (Rows::All, [whole]) => whole.clone(),
            (Rows::PerHead { heads, dim, .. }, values) => {
                let by_head = |values: &Tensor| -> Result<Tensor> {
                    let mut shape = values.dims().to_vec();
                    shape.splice(0..1, [heads, dim]);
                    Ok(values.reshape(shape)?)
                };
                let values = values.iter().map(by_head).collect::<Result<Vec<_>>>()?;
                Tensor::cat(&values, 1)?.flatten(0, 1)?
            }
            (Rows::Interleaved { .. }, values) => {
                let rows = usize::from(view.stacked);
                Tensor::stack(values, rows + 1)?.flatten(rows, rows + 1)?
            }
            (_, values) => Tensor::cat(values, usize::from(view.stacked))?,
        };
        let is_matrix = joined.rank() == 2 + usize::from(view.stacked);
        Ok(if view.transposed && is_matrix { joined.t()?.contiguous()? } else { joined })
    }
}

impl<S: TensorSource> TensorSource for ExportedSource<S> {
    fn location(&self) -> &Path {
        self.source.location()
    }

    fn names(&self) -> Vec<&str> {
        let names = self.tensors.keys().chain(self.of_stacks.keys());
        let mut names: Vec<&str> = names.map(String::as_str).collect();
        names.sort_unstable();
        names
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        let of_stack = || self.of_stacks.get(name).map(|(_, _, info)| info.clone());
        self.tensors.get(name).map(|(_, info)| info.clone()).or_else(of_stack)
    }

    /// Reads all parts of the tensor for any region.
    fn read(&self, name: &str, region: &Region, dtype: DType, device: &Device) -> Result<Tensor> {
        if let Some((stack, index, _)) = self.of_stacks.get(name) {
            let region = Region {
                offsets: [&[*index], &region.offsets[..]].concat(),
                sizes: [&[1], &region.sizes[..]].concat(),
            };
            return self.source.read(stack, &region, dtype, device);
        }
        let Some((parts, info)) = self.tensors.get(name) else {
            return self.source.read(name, region, dtype, device);
        };
        if let [(model, View::WHOLE)] = parts.as_slice() {
            return self.source.read(model, region, dtype, device);
        }
        let mut values = self.whole(parts, dtype)?.reshape(info.shape.as_slice())?;
        for (dim, (&offset, &size)) in region.offsets.iter().zip(&region.sizes).enumerate() {
            values = values.narrow(dim, offset, size)?;
        }
        Ok(values.contiguous()?.flatten_all()?.to_device(device)?)
    }

    fn unreadable(&self, name: &str) -> Option<&str> {
        self.source.unreadable(name)
    }

    fn filtered(&self) -> Option<&str> {
        self.source.filtered()
    }

    fn warning(&self) -> Option<String> {
        self.source.warning()
    }
}
