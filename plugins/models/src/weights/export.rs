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
        for name in source.names().into_iter().filter(|name| !layout.leaves_out(name)) {
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
            if parts.len() > 1 {
                shape[0] = infos.iter().map(|info| info.shape[0]).sum();
            }
            if parts[0].1.transposed {
                shape.reverse();
            }
            tensors.insert(file, (parts, TensorInfo { shape, dtype: infos[0].dtype }));
        }
        Ok(Self { source, tensors })
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
            (_, values) => Tensor::cat(values, 0)?,
        };
        Ok(if view.transposed { joined.t()?.contiguous()? } else { joined })
    }
}

impl<S: TensorSource> TensorSource for ExportedSource<S> {
    fn location(&self) -> &Path {
        self.source.location()
    }

    fn names(&self) -> Vec<&str> {
        self.tensors.keys().map(String::as_str).collect()
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        self.tensors.get(name).map(|(_, info)| info.clone())
    }

    /// Reads all parts of the tensor for any region.
    fn read(&self, name: &str, region: &Region, dtype: DType, device: &Device) -> Result<Tensor> {
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
