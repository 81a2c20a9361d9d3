//! Tensor sources in memory: a map of tensors, and a closure.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use safetensors::Dtype;

use super::chunks::check_bounds;
use super::narrow::converted;
use super::{TensorInfo, TensorSource};
use crate::{Error, Result};
use fulgurite_engine::shard::Region;

/// Tensors in memory as a [`TensorSource`].
///
/// For example the result of [`gather_cpu_state_dict`](super::gather_cpu_state_dict), or a
/// program's own state dict.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fulgurite_core::checkpoint::{TensorMap, TensorSource};
///
/// let weight = Tensor::ones((4, 2), candle_core::DType::F32, &Device::Cpu)?;
/// let source = TensorMap::new([("head.weight".to_owned(), weight)]);
/// assert_eq!(source.names(), ["head.weight"]);
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct TensorMap {
    tensors: BTreeMap<String, Tensor>,
}

impl TensorMap {
    /// Creates a source of these tensors, which may be on any device.
    pub fn new(tensors: impl IntoIterator<Item = (String, Tensor)>) -> Self {
        Self { tensors: tensors.into_iter().collect() }
    }

    /// The tensors.
    pub fn tensors(&self) -> &BTreeMap<String, Tensor> {
        &self.tensors
    }
}

impl From<BTreeMap<String, Tensor>> for TensorMap {
    fn from(tensors: BTreeMap<String, Tensor>) -> Self {
        Self { tensors }
    }
}

impl TensorSource for TensorMap {
    fn location(&self) -> &Path {
        Path::new("(tensors in memory)")
    }

    fn names(&self) -> Vec<&str> {
        self.tensors.keys().map(String::as_str).collect()
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        let tensor = self.tensors.get(name)?;
        Some(TensorInfo { shape: tensor.dims().to_vec(), dtype: Dtype::from(tensor.dtype()) })
    }

    fn read(&self, name: &str, region: &Region, dtype: DType, device: &Device) -> Result<Tensor> {
        let tensor = self.tensors.get(name).ok_or_else(|| none_of(self.location(), name))?;
        check_bounds(tensor.dims(), region).map_err(|message| {
            Error::checkpoint(self.location(), format!("tensor `{name}`: {message}"))
        })?;
        let mut part = tensor.detach();
        for (dim, (&offset, &size)) in region.offsets.iter().zip(&region.sizes).enumerate() {
            part = part.narrow(dim, offset, size)?;
        }
        Ok(converted(self.location(), name, &part.flatten_all()?, dtype)?.to_device(device)?)
    }
}

type ReadFn = dyn Fn(&str, &Region) -> Result<Tensor> + Send + Sync;

/// A [`TensorSource`] whose values a closure computes or fetches.
///
/// It does so part by part, so that the whole tensor need never be in memory.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fulgurite_core::checkpoint::{TensorFn, TensorInfo, TensorSource};
/// use fulgurite_core::shard::Region;
///
/// // Weights of another format, read by a program's own reader.
/// let infos = [("w".to_owned(), TensorInfo { shape: vec![4, 2], dtype: safetensors::Dtype::F32 })];
/// let source = TensorFn::new("my-format.bin", infos, |_name, region: &Region| {
///     Ok(Tensor::zeros(region.elem_count(), DType::F32, &Device::Cpu)?)
/// });
/// assert_eq!(source.info("w").unwrap().shape, [4, 2]);
/// ```
pub struct TensorFn {
    location: PathBuf,
    infos: BTreeMap<String, TensorInfo>,
    read: Box<ReadFn>,
}

impl TensorFn {
    /// Creates a source of the tensors `infos`. `location` names their origin in messages.
    ///
    /// `read` takes a tensor's name and a region, and returns the region's elements in row-major
    /// order, in any shape, dtype and place. The loading thread calls it, on every rank for its own
    /// part.
    pub fn new(
        location: impl Into<PathBuf>,
        infos: impl IntoIterator<Item = (String, TensorInfo)>,
        read: impl Fn(&str, &Region) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Self {
        let infos = infos.into_iter().collect();
        Self { location: location.into(), infos, read: Box::new(read) }
    }
}

impl std::fmt::Debug for TensorFn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut debug = f.debug_struct("TensorFn");
        debug.field("location", &self.location).field("infos", &self.infos).finish_non_exhaustive()
    }
}

impl TensorSource for TensorFn {
    fn location(&self) -> &Path {
        &self.location
    }

    fn names(&self) -> Vec<&str> {
        self.infos.keys().map(String::as_str).collect()
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        self.infos.get(name).cloned()
    }

    fn read(&self, name: &str, region: &Region, dtype: DType, device: &Device) -> Result<Tensor> {
        let info = self.infos.get(name).ok_or_else(|| none_of(&self.location, name))?;
        let fail = |message: String| {
            Error::checkpoint(&self.location, format!("tensor `{name}`: {message}"))
        };
        check_bounds(&info.shape, region).map_err(&fail)?;
        let values = (self.read)(name, region).map_err(|error| fail(error.to_string()))?;
        let values = values.detach().flatten_all()?;
        if values.elem_count() != region.elem_count() {
            return Err(fail(format!(
                "the closure returned {} elements for a part of {}",
                values.elem_count(),
                region.elem_count()
            )));
        }
        Ok(converted(self.location(), name, &values, dtype)?.to_device(device)?)
    }
}

fn none_of(location: &Path, name: &str) -> Error {
    Error::checkpoint(location, format!("tensor `{name}`: there is none of this name"))
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    fn numbers() -> Tensor {
        Tensor::arange(0f32, 24.0, &Device::Cpu).unwrap().reshape((2, 3, 4)).unwrap()
    }

    fn part() -> Region {
        Region { offsets: vec![1, 0, 2], sizes: vec![1, 3, 2] }
    }

    fn read(source: &dyn TensorSource, region: &Region) -> Result<Vec<f64>> {
        let values = source.read("w", region, DType::F64, &Device::Cpu)?;
        Ok(values.to_vec1::<f64>()?)
    }

    #[test]
    fn maps_and_closures_read_any_region() {
        let expected = [14., 15., 18., 19., 22., 23.];
        let map = TensorMap::new([("w".to_owned(), numbers().transpose(0, 0).unwrap())]);
        assert_eq!(read(&map, &part()).unwrap(), expected);
        let inner = map.clone();
        let infos = [("w".to_owned(), map.info("w").unwrap())];
        let closure = TensorFn::new("elsewhere", infos, move |name, region| {
            inner.read(name, region, DType::F32, &Device::Cpu)
        });
        assert_eq!(read(&closure, &part()).unwrap(), expected);
        let empty = Region { offsets: vec![0; 3], sizes: vec![0, 3, 4] };
        assert!(read(&map, &empty).unwrap().is_empty());
    }

    #[test]
    fn missing_tensors_are_errors() {
        let map = TensorMap::new([("v".to_owned(), numbers())]);
        assert_says!(read(&map, &part()).unwrap_err(), "checkpoint … tensor `w`: there is none …");
        let map = TensorMap::new([("w".to_owned(), numbers())]);
        let outside = Region { offsets: vec![1, 0, 2], sizes: vec![2, 3, 2] };
        assert_says!(read(&map, &outside).unwrap_err(), "checkpoint … `w` … a part of … [2, 3, 4]");
        let infos = [("w".to_owned(), map.info("w").unwrap())];
        let wrong = TensorFn::new("elsewhere", infos, |_, _| Ok(numbers()));
        assert_says!(read(&wrong, &part()).unwrap_err(), "checkpoint elsewhere … `w` … 24 … of 6");
    }
}
