//! Storage of offloaded activations from forward to backward.

use std::collections::VecDeque;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use candle_core::{DType, Device, Shape, Tensor};
use serde::{Deserialize, Serialize};

use crate::{Error, Result};
use fulgurite_tensor::autograd::storage::{with_bytes, with_bytes_mut};
use fulgurite_tensor::execution::transfer::{self, HostCopy};
use fulgurite_tensor::execution::{self, dry_run};
use fulgurite_tensor::memory::{self, Place};

/// Storage of units' offloaded activations: `offload` in `trainer.activation_checkpointing`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ActivationOffload {
    /// The host's memory, for a model on a GPU.
    Host,
    /// Unnamed files in the directory for temporary files (`TMPDIR`).
    Disk,
}

/// A tensor saved for backward.
pub(super) enum SavedActivation {
    /// The tensor itself.
    InPlace(Tensor),
    /// A copy on the host, and the tensor's device.
    Host { copy: Arc<OnItsWay>, device: Device },
    /// The tensor's bytes in an unnamed file, which the system removes when it is closed.
    Disk { file: Arc<File>, offset: u64, shape: Shape, dtype: DType, device: Device },
}

impl SavedActivation {
    /// The tensor, on its device.
    pub(super) fn get(&self) -> Result<Tensor> {
        match self {
            Self::InPlace(x) => Ok(x.clone()),
            Self::Host { copy, device } => {
                transfer::to_device(&copy.wait()?, device, "activations")
            }
            Self::Disk { file, offset, shape, dtype, device } => {
                let _place = memory::at(Place::Host);
                let x = Tensor::zeros(shape.elem_count(), *dtype, &Device::Cpu)?;
                if !dry_run::is_on() {
                    with_bytes_mut(&x, |bytes| file.read_exact_at(bytes, *offset))?
                        .map_err(failed("reading offloaded activations from"))?;
                }
                transfer::to_device(&x.reshape(shape)?, device, "activations")
            }
        }
    }
}

/// A tensor being copied to the host.
pub(super) struct OnItsWay(Mutex<Copy>);

enum Copy {
    Begun(HostCopy),
    There(Tensor),
    Failed,
}

impl OnItsWay {
    /// Waits for the host copy. Afterwards the device memory is free, unless other tensors hold it.
    fn wait(&self) -> Result<Tensor> {
        let mut copy: MutexGuard<'_, Copy> = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Copy::There(there) = &*copy {
            return Ok(there.clone());
        }
        match std::mem::replace(&mut *copy, Copy::Failed) {
            Copy::Begun(begun) => {
                let there = begun.wait()?;
                *copy = Copy::There(there.clone());
                Ok(there)
            }
            _ => Err(Error::other("activations could not be copied to the host")),
        }
    }
}

/// Number of calls whose copies may be in progress while later calls are computed. Tensors being
/// copied still occupy the device, so a larger limit would use the memory that offloading saves.
const CALLS_ON_THEIR_WAY: usize = 2;

/// Copies of the last calls in an execution context, oldest first.
#[derive(Default)]
struct CallsOnTheirWay(Mutex<VecDeque<Vec<Weak<OnItsWay>>>>);

impl CallsOnTheirWay {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Vec<Weak<OnItsWay>>>> {
        self.0.lock().expect("no panic while recording")
    }
}

/// Begins a call, and waits for the copies of calls beyond the limit.
fn begin_call() -> Result<()> {
    let over = {
        let calls = execution::shared::<CallsOnTheirWay>();
        let mut calls = calls.lock();
        calls.push_back(Vec::new());
        let over = calls.len().saturating_sub(CALLS_ON_THEIR_WAY);
        calls.drain(..over).flatten().collect::<Vec<_>>()
    };
    over.iter().filter_map(Weak::upgrade).try_for_each(|copy| copy.wait().map(drop))
}

/// Records a copy of this call.
fn on_its_way(begun: HostCopy) -> Arc<OnItsWay> {
    let copy = Arc::new(OnItsWay(Mutex::new(Copy::Begun(begun))));
    if let Some(call) = execution::shared::<CallsOnTheirWay>().lock().back_mut() {
        call.push(Arc::downgrade(&copy));
    }
    copy
}

/// Saves the tensors of one call. On disk, they share one file.
pub(super) struct Offload {
    to: ActivationOffload,
    file: Option<Arc<File>>,
    offset: u64,
}

impl Offload {
    /// Begins a call of a unit.
    ///
    /// # Errors
    /// If a copy that an earlier call began fails.
    pub(super) fn begin(to: ActivationOffload) -> Result<Self> {
        if to == ActivationOffload::Host {
            begin_call()?;
        }
        Ok(Self { to, file: None, offset: 0 })
    }

    /// Copies a detached tensor. Copies to the host run while later work is computed.
    pub(super) fn save(&mut self, x: Tensor) -> Result<SavedActivation> {
        let device = x.device().clone();
        if self.to == ActivationOffload::Host {
            let copy = on_its_way(transfer::begin_to_host(&x, "activations")?);
            return Ok(SavedActivation::Host { copy, device });
        }
        let copy = transfer::to_host(&x, "activations")?.contiguous()?;
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
        if !dry_run::is_on() {
            let written = with_bytes(&copy, write)?;
            self.offset += written.map_err(failed("offloading activations: writing to"))?;
        }
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
    fn copies_of_last_calls_stay_in_flight() {
        let waited = Arc::<Mutex<Vec<usize>>>::default();
        let begin = |call: usize| {
            Offload::begin(ActivationOffload::Host).unwrap();
            let waited = waited.clone();
            on_its_way(HostCopy::new(move || {
                waited.lock().unwrap().push(call);
                Ok(Tensor::new(call as f64, &Device::Cpu)?)
            }))
        };
        let copies: Vec<_> = (0..2).map(begin).collect();
        assert!(waited.lock().unwrap().is_empty());
        let third = begin(2);
        assert_eq!(*waited.lock().unwrap(), [0]);
        // Backward takes the copies in another order, and waits once for each.
        for (i, copy) in [(2, &third), (1, &copies[1]), (0, &copies[0]), (1, &copies[1])] {
            assert_eq!(copy.wait().unwrap().to_scalar::<f64>().unwrap(), i as f64);
        }
        assert_eq!(*waited.lock().unwrap(), [0, 2, 1]);
        // Copies of an abandoned step are not waited for.
        drop((copies, third));
        let kept: Vec<_> = (3..7).map(begin).collect();
        assert_eq!(*waited.lock().unwrap(), [0, 2, 1, 3, 4]);
        drop(kept);
    }

    #[test]
    fn saved_activations_come_back() {
        let x = Tensor::arange(0f32, 24., &Device::Cpu).unwrap().reshape((4, 6)).unwrap();
        let views =
            [x.clone(), x.t().unwrap(), x.narrow(0, 1, 2).unwrap(), x.narrow(1, 0, 0).unwrap()];
        for to in [ActivationOffload::Host, ActivationOffload::Disk] {
            for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64, DType::U32, DType::U8] {
                for view in &views {
                    let view = view.to_dtype(dtype).unwrap();
                    let mut offload = Offload::begin(to).unwrap();
                    let back = offload.save(view.clone()).unwrap().get().unwrap();
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
