//! What tensors are loaded from.

use std::path::Path;

use candle_core::{DType, Device, Tensor};

use crate::Result;
use crate::autograd::storage;
use crate::shard::Region;

/// Shape and dtype of a tensor that can be loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// The global shape.
    pub shape: Vec<usize>,
    /// The dtype it is stored in.
    pub dtype: safetensors::Dtype,
}

/// A set of named tensors, any part of which can be read: a checkpoint of whatever format.
///
/// Reads are local; nothing is collective, and ranks may read different parts.
pub trait TensorSource: Send + Sync {
    /// Where it is, for messages.
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

    /// The same, into the memory of `target`: contiguous, with as many elements as the region, of
    /// any dtype and device.
    ///
    /// # Errors
    /// As [`read`](Self::read); `target`'s content is undefined then.
    fn read_into(&self, name: &str, region: &Region, target: &Tensor) -> Result<()> {
        let values = self.read(name, region, target.dtype(), target.device())?;
        storage::copy_from(target, &values)
    }
}
