//! Where activations of units are stored from forward to backward.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use candle_core::{DType, Device, Shape, Tensor};
use serde::{Deserialize, Serialize};

use crate::autograd::storage::{with_bytes, with_bytes_mut};
use crate::execution::transfer;
use crate::{Error, Result};

/// Where activations of units are offloaded to: `offload` in `trainer.activation_checkpointing`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ActivationOffload {
    /// The host's memory, for a model on a GPU.
    Host,
    /// Files without a name in the directory for temporary files (`TMPDIR`).
    Disk,
}

/// A tensor that is saved for backward.
pub(super) enum SavedActivation {
    /// The tensor itself.
    InPlace(Tensor),
    /// A copy on the host, and the device that the tensor was on.
    Host { copy: Tensor, device: Device },
    /// The tensor's bytes in a file without a name, which the system removes when it is closed.
    Disk { file: Arc<File>, offset: u64, shape: Shape, dtype: DType, device: Device },
}

impl SavedActivation {
    /// Copies a detached tensor to the host's memory or to a file.
    pub(super) fn offload(x: Tensor, to: ActivationOffload) -> Result<Self> {
        Offload::begin(to).save(x)
    }

    /// The tensor, on its device.
    pub(super) fn get(&self) -> Result<Tensor> {
        match self {
            Self::InPlace(x) => Ok(x.clone()),
            Self::Host { copy, device } => transfer::to_device(copy, device, "activations"),
            Self::Disk { file, offset, shape, dtype, device } => {
                let x = Tensor::zeros(shape.elem_count(), *dtype, &Device::Cpu)?;
                with_bytes_mut(&x, |bytes| file.read_exact_at(bytes, *offset))?
                    .map_err(failed("reading offloaded activations from"))?;
                transfer::to_device(&x.reshape(shape)?, device, "activations")
            }
        }
    }
}

/// Saves the tensors of one call; on disk, in one file.
pub(super) struct Offload {
    to: ActivationOffload,
    file: Option<Arc<File>>,
    offset: u64,
}

impl Offload {
    pub(super) fn begin(to: ActivationOffload) -> Self {
        Self { to, file: None, offset: 0 }
    }

    /// Copies a detached tensor.
    pub(super) fn save(&mut self, x: Tensor) -> Result<SavedActivation> {
        let device = x.device().clone();
        let copy = transfer::to_host(&x, "activations")?.contiguous()?;
        if self.to == ActivationOffload::Host {
            // It was copied, unless it was on the host already.
            return Ok(SavedActivation::Host { copy, device });
        }
        let file = match &self.file {
            Some(file) => file.clone(),
            None => {
                let file = tempfile::tempfile()
                    .map_err(failed("offloading activations: creating a file in"))?;
                self.file.insert(Arc::new(file)).clone()
            }
        };
        let offset = self.offset;
        let write = |bytes: &[u8]| file.write_all_at(bytes, offset).map(|()| bytes.len() as u64);
        let written = with_bytes(&copy, write)?;
        self.offset += written.map_err(failed("offloading activations: writing to"))?;
        let (shape, dtype) = (x.shape().clone(), x.dtype());
        Ok(SavedActivation::Disk { file, offset, shape, dtype, device })
    }
}

fn failed(action: &'static str) -> impl FnOnce(std::io::Error) -> Error {
    Error::io(action, std::env::temp_dir())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn saved_activations_come_back() {
        let x = Tensor::arange(0f32, 24., &Device::Cpu).unwrap().reshape((4, 6)).unwrap();
        let views =
            [x.clone(), x.t().unwrap(), x.narrow(0, 1, 2).unwrap(), x.narrow(1, 0, 0).unwrap()];
        for to in [ActivationOffload::Host, ActivationOffload::Disk] {
            for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64, DType::U32, DType::U8] {
                for view in &views {
                    let view = view.to_dtype(dtype).unwrap();
                    let back = SavedActivation::offload(view.clone(), to).unwrap().get().unwrap();
                    assert_eq!((back.dims(), back.dtype()), (view.dims(), dtype));
                    let values = |x: &Tensor| {
                        x.to_dtype(DType::F64)
                            .unwrap()
                            .flatten_all()
                            .unwrap()
                            .to_vec1::<f64>()
                            .unwrap()
                    };
                    assert_eq!(values(&back), values(&view), "{to:?}, {dtype:?}");
                }
            }
        }
    }
}
