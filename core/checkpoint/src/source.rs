//! The trait [`TensorSource`], which tensors are loaded from.

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
    /// The dtype it is stored in.
    pub dtype: safetensors::Dtype,
}

/// Named tensors of which any part can be read: a checkpoint of any format.
///
/// Reads are local; nothing is collective, and ranks may read different parts.
pub trait TensorSource: Send + Sync {
    /// Its path, for messages.
    fn location(&self) -> &Path;

    /// The names of all tensors, sorted.
    fn names(&self) -> Vec<&str>;

    /// Shape and dtype of a tensor; `None` if there is none of this name.
    fn info(&self, name: &str) -> Option<TensorInfo>;

    /// The part `region` of the tensor `name`, flat in the region's row-major order, as `dtype` on
    /// `device`. Only the bytes of that part are read.
    ///
    /// # Errors
    /// If there is no such tensor, the region is not inside its shape, or its bytes are missing,
    /// damaged or of a dtype that cannot be converted; the message names file and tensor.
    fn read(&self, name: &str, region: &Region, dtype: DType, device: &Device) -> Result<Tensor>;

    /// [`read`](Self::read) into the memory of `target`, which is contiguous, has as many elements
    /// as the region, and any dtype and device.
    ///
    /// # Errors
    /// As [`read`](Self::read); the values of `target` are undefined then.
    fn read_into(&self, name: &str, region: &Region, target: &Tensor) -> Result<()> {
        let values = self.read(name, region, target.dtype(), target.device())?;
        storage::copy_from(target, &values)
    }

    /// [`read_into`](Self::read_into) without comparing checksums, if the source has any.
    ///
    /// # Errors
    /// As [`read`](Self::read), but for checksums.
    fn read_into_unverified(&self, name: &str, region: &Region, target: &Tensor) -> Result<()> {
        self.read_into(name, region, target)
    }

    /// The bytes of a whole tensor as they are stored, of whatever dtype: also of one that candle
    /// has no values of, such as F8 or I8.
    ///
    /// # Errors
    /// As [`read`](Self::read); if this source has no bytes of such a dtype.
    fn read_stored(&self, name: &str) -> Result<Vec<u8>> {
        loaded_bytes(self, name)
    }

    /// Why a tensor that the file has cannot be read, such as a sparse one; `None` for those that
    /// can, and if there is none of this name. [`names`](Self::names) lists it, and
    /// [`info`](Self::info) knows nothing of it.
    fn unreadable(&self, name: &str) -> Option<&str> {
        let _ = name;
        None
    }

    /// The description of the [`ParameterFilter`](super::ParameterFilter) that this was saved with;
    /// `None` if there was none.
    fn filtered(&self) -> Option<&str> {
        None
    }

    /// What whoever loads from it should know, such as that damage of a part of it would not be
    /// found;
    /// `None` if there is nothing to know.
    fn warning(&self) -> Option<String> {
        None
    }
}

/// The bytes of a whole tensor of a dtype that can be loaded.
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
