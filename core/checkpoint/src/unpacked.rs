//! Unpacking the quantised weights of a source.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use safetensors::Dtype;

use super::narrow::converted;
use super::source::loaded_bytes;
use super::{TensorInfo, TensorSource};
use crate::Result;
use fulgurite_engine::quantization::{SCALE_SUFFIX, WeightFormat};
use fulgurite_engine::shard::Region;

/// A source that unpacks [quantised weights](fulgurite_engine::quantization), codes and scales.
///
/// Each becomes one tensor in f32; other tensors stay as they are.
///
/// A quantised weight is recognised by its two tensors: `w` of bytes, and `w_scale`. Their shapes
/// must match a [`WeightFormat`].
#[derive(Debug)]
pub struct UnpackedSource<S> {
    source: S,
    /// Quantised weights by the name of their codes.
    packed: BTreeMap<String, (WeightFormat, TensorInfo)>,
}

impl<S: TensorSource> UnpackedSource<S> {
    /// Unpacks all quantised weights of `source`.
    pub fn new(source: S) -> Self {
        Self::except(source, |_, _| false)
    }

    /// Unpacks all quantised weights, except if `keeps` is true for the codes' name and shape.
    pub(super) fn except(source: S, keeps: impl Fn(&str, &[usize]) -> bool) -> Self {
        let of = |name: &str| {
            let codes = source.info(name).filter(|info| info.dtype == Dtype::U8)?;
            let scales = source.info(&format!("{name}{SCALE_SUFFIX}"))?;
            let scales = Some(scales).filter(|info| info.dtype == Dtype::F32)?;
            let (format, columns) = WeightFormat::of_shapes(&codes.shape, &scales.shape)?;
            if keeps(name, &codes.shape) {
                return None;
            }
            let rows = &scales.shape[..scales.shape.len() - 1];
            let shape = [rows, &[columns]].concat();
            Some((name.to_owned(), (format, TensorInfo { shape, dtype: Dtype::F32 })))
        };
        let packed = source.names().into_iter().filter_map(of).collect();
        Self { source, packed }
    }
}

impl<S: TensorSource> TensorSource for UnpackedSource<S> {
    fn location(&self) -> &Path {
        self.source.location()
    }

    fn names(&self) -> Vec<&str> {
        let is_scale = |name: &&str| {
            name.strip_suffix(SCALE_SUFFIX).is_some_and(|codes| self.packed.contains_key(codes))
        };
        self.source.names().into_iter().filter(|name| !is_scale(name)).collect()
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        match self.packed.get(name) {
            Some((_, info)) => Some(info.clone()),
            None => self.source.info(name),
        }
    }

    /// For a quantised weight, reads the whole rows of the region.
    fn read(&self, name: &str, region: &Region, dtype: DType, device: &Device) -> Result<Tensor> {
        let Some((format, info)) = self.packed.get(name) else {
            return self.source.read(name, region, dtype, device);
        };
        let columns = info.shape.len() - 1;
        let part = |name: &str, dtype: DType| -> Result<Tensor> {
            let mut rows =
                Region::full(&self.source.info(name).map(|i| i.shape).unwrap_or_default());
            rows.offsets[..columns].copy_from_slice(&region.offsets[..columns]);
            rows.sizes[..columns].copy_from_slice(&region.sizes[..columns]);
            let values = self.source.read(name, &rows, dtype, &Device::Cpu)?;
            Ok(values.reshape(rows.sizes)?)
        };
        let codes = part(name, DType::U8)?;
        let scales = part(&format!("{name}{SCALE_SUFFIX}"), DType::F32)?;
        let weight = format.unpack(&codes, &scales, DType::F32)?;
        let weight = weight.narrow(columns, region.offsets[columns], region.sizes[columns])?;
        let weight = converted(self.location(), name, &weight.flatten_all()?, dtype)?;
        Ok(weight.to_device(device)?)
    }

    fn read_into_unverified(&self, name: &str, region: &Region, target: &Tensor) -> Result<()> {
        match self.packed.contains_key(name) {
            true => self.read_into(name, region, target),
            false => self.source.read_into_unverified(name, region, target),
        }
    }

    fn read_into(&self, name: &str, region: &Region, target: &Tensor) -> Result<()> {
        if !self.packed.contains_key(name) {
            return self.source.read_into(name, region, target);
        }
        let values = self.read(name, region, target.dtype(), target.device())?;
        fulgurite_engine::autograd::storage::copy_from(target, &values)
    }

    fn read_codes(&self, name: &str, region: &Region) -> Result<Vec<u8>> {
        self.source.read_codes(name, region)
    }

    fn read_stored(&self, name: &str) -> Result<Vec<u8>> {
        match self.packed.contains_key(name) {
            true => loaded_bytes(self, name),
            false => self.source.read_stored(name),
        }
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
