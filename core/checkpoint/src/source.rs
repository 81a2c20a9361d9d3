//! The trait [`TensorSource`]: sources to load tensors from.

use std::path::Path;

use candle_core::{DType, Device, Tensor};

use super::stored::loadable_dtype;
use crate::{Error, Result};
use fulgurite_engine::autograd::storage;
use fulgurite_engine::shard::Region;

/// Shape and dtype of a tensor in a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// The global shape.
    pub shape: Vec<usize>,
    /// The stored dtype.
    pub dtype: safetensors::Dtype,
}

/// Named tensors, readable in any part: a checkpoint of any format.
///
/// Reads are local; nothing is collective, and ranks may read different parts.
pub trait TensorSource: Send + Sync {
    /// Its path, for messages.
    fn location(&self) -> &Path;

    /// The names of all tensors, sorted.
    fn names(&self) -> Vec<&str>;

    /// Returns shape and dtype of a tensor; `None` for an unknown name.
    fn info(&self, name: &str) -> Option<TensorInfo>;

    /// Reads the part `region` of the tensor `name`, as `dtype` on `device`.
    ///
    /// The values are flat in the region's row-major order. Only the bytes of the region are read.
    ///
    /// # Errors
    /// If the name is unknown, the region is not inside the tensor's shape, or the bytes are
    /// missing, damaged or of a dtype that cannot be converted; the message names file and tensor.
    fn read(&self, name: &str, region: &Region, dtype: DType, device: &Device) -> Result<Tensor>;

    /// Reads as [`read`](Self::read), into the memory of `target`.
    ///
    /// `target` is contiguous and has as many elements as the region, of any dtype on any device.
    ///
    /// # Errors
    /// As [`read`](Self::read); the values of `target` are undefined then.
    fn read_into(&self, name: &str, region: &Region, target: &Tensor) -> Result<()> {
        let values = self.read(name, region, target.dtype(), target.device())?;
        storage::copy_from(target, &values)
    }

    /// Reads as [`read_into`](Self::read_into), without comparing checksums.
    ///
    /// # Errors
    /// As [`read`](Self::read), without errors about checksums.
    fn read_into_unverified(&self, name: &str, region: &Region, target: &Tensor) -> Result<()> {
        self.read_into(name, region, target)
    }

    /// Returns the stored bytes of the part `region` of a tensor whose elements have 8 bits, such
    /// as F8. They are in the order of [`read`](Self::read).
    ///
    /// # Errors
    /// As [`read`](Self::read); if elements have another size, or this source reads values only.
    fn read_codes(&self, name: &str, region: &Region) -> Result<Vec<u8>> {
        let _ = region;
        let message = format!("tensor `{name}`: its bytes cannot be read here");
        Err(Error::checkpoint(self.location(), message))
    }

    /// Returns the stored bytes of a whole tensor of any dtype, even if candle does not support it.
    ///
    /// F8 and I8 are such dtypes.
    ///
    /// # Errors
    /// As [`read`](Self::read); if this source cannot give bytes of such a dtype.
    fn read_stored(&self, name: &str) -> Result<Vec<u8>> {
        loaded_bytes(self, name)
    }

    /// Returns the reason why a tensor of the file cannot be read, such as being sparse.
    ///
    /// Returns `None` for readable tensors and unknown names. [`names`](Self::names) lists an
    /// unreadable tensor, but [`info`](Self::info) returns `None` for it.
    fn unreadable(&self, name: &str) -> Option<&str> {
        let _ = name;
        None
    }

    /// Describes the [`ParameterFilter`](super::ParameterFilter) of the save, if it had one.
    fn filtered(&self) -> Option<&str> {
        None
    }

    /// Returns a warning for the user who loads from this source, if there is a reason.
    ///
    /// For example, that damage of some bytes would not be found.
    fn warning(&self) -> Option<String> {
        None
    }
}

/// Returns the bytes of a whole tensor whose dtype candle supports.
pub(super) fn loaded_bytes<S: TensorSource + ?Sized>(source: &S, name: &str) -> Result<Vec<u8>> {
    let fail = |message: String| {
        Err(Error::checkpoint(source.location(), format!("tensor `{name}`: {message}")))
    };
    let Some(TensorInfo { shape, dtype }) = source.info(name) else {
        return fail("there is none of this name".to_owned());
    };
    let Some(loaded) = loadable_dtype(dtype) else {
        return fail(format!("values of dtype {dtype} cannot be read here"));
    };
    let values = source.read(name, &Region::full(&shape), loaded, &Device::Cpu)?;
    storage::with_bytes(&values, <[u8]>::to_vec)
}

macro_rules! forward {
    ($($pointer:ty),*) => {$(
        impl<S: TensorSource + ?Sized> TensorSource for $pointer {
            fn location(&self) -> &Path {
                (**self).location()
            }

            fn names(&self) -> Vec<&str> {
                (**self).names()
            }

            fn info(&self, name: &str) -> Option<TensorInfo> {
                (**self).info(name)
            }

            fn read(
                &self,
                name: &str,
                region: &Region,
                dtype: DType,
                device: &Device,
            ) -> Result<Tensor> {
                (**self).read(name, region, dtype, device)
            }

            fn read_into(&self, name: &str, region: &Region, target: &Tensor) -> Result<()> {
                (**self).read_into(name, region, target)
            }

            fn read_into_unverified(
                &self,
                name: &str,
                region: &Region,
                target: &Tensor,
            ) -> Result<()> {
                (**self).read_into_unverified(name, region, target)
            }

            fn read_codes(&self, name: &str, region: &Region) -> Result<Vec<u8>> {
                (**self).read_codes(name, region)
            }

            fn read_stored(&self, name: &str) -> Result<Vec<u8>> {
                (**self).read_stored(name)
            }

            fn unreadable(&self, name: &str) -> Option<&str> {
                (**self).unreadable(name)
            }

            fn filtered(&self) -> Option<&str> {
                (**self).filtered()
            }

            fn warning(&self) -> Option<String> {
                (**self).warning()
            }
        }
    )*};
}

forward!(&S, Box<S>, std::sync::Arc<S>);
