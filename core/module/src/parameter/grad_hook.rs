//! The op whose output is a parameter's compute tensor.

use std::sync::Weak;

use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Layout, Shape, Storage, Tensor};

use super::Parameter;
use super::parameter::Inner;
use fulgurite_tensor::autograd::storage;

/// Makes a tensor of the parameter's full shape with empty storage. In backward it receives the
/// parameter's summed gradient once and passes it on.
pub(super) struct GradHook {
    pub(super) parameter: Weak<Inner>,
    pub(super) shape: Shape,
    pub(super) dtype: DType,
}

impl CustomOp1 for GradHook {
    fn name(&self) -> &'static str {
        "fulgurite-parameter"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        match storage::empty(self.dtype, &candle_core::Device::Cpu)? {
            Storage::Cpu(storage) => Ok((storage, self.shape.clone())),
            _ => candle_core::bail!("a CPU parameter got a storage of another device"),
        }
    }

    fn cuda_fwd(
        &self,
        token: &CudaStorage,
        _: &Layout,
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        use candle_core::backend::BackendStorage as _;
        let device = candle_core::Device::Cuda(token.device().clone());
        match storage::empty(self.dtype, &device)? {
            Storage::Cuda(storage) => Ok((storage, self.shape.clone())),
            _ => candle_core::bail!("a CUDA parameter got a storage of another device"),
        }
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        if let Some(inner) = self.parameter.upgrade() {
            Parameter(inner).deliver_from_graph(grad)?;
        }
        Ok(None)
    }
}
