//! Device, libraries and kernels.

use fulgurite_error::Result;

use crate::findings::Findings;
use crate::target::Target;

/// The device and its memory.
pub(super) fn device(target: &Target) -> Result<Findings> {
    let mut findings = Findings::default();
    let accelerator = target.open()?;
    findings.fact("device", accelerator.description());
    findings.figure("cores", std::thread::available_parallelism().map_or(1, usize::from) as f64);
    if let Some(memory) = accelerator.memory()? {
        findings.figure("total_bytes", memory.total_bytes as f64);
        findings.figure("free_bytes", memory.free_bytes as f64);
        findings.require(memory.free_bytes <= memory.total_bytes, || format!("{memory:?}"));
    }
    #[cfg(feature = "cuda")]
    cuda::versions(accelerator.device(), &mut findings)?;
    Ok(findings)
}

/// Compiles every kernel and reports the time: a first compilation, or a read of the user's cache.
#[cfg(feature = "cuda")]
pub(super) fn kernels(target: &Target) -> Result<Findings> {
    cuda::kernels(&target.device()?)
}

/// Programs without CUDA compile no kernels.
#[cfg(not(feature = "cuda"))]
pub(super) fn kernels(_: &Target) -> Result<Findings> {
    Ok(Findings::default())
}

#[cfg(feature = "cuda")]
mod cuda {
    use std::time::Instant;

    use candle_core::Device;
    use candle_core::cuda_backend::cudarc::driver::sys::CUdevice_attribute as Attribute;
    use candle_core::cuda_backend::{CudaDevice, WrapErr as _};
    use fulgurite_error::{Error, Result};
    use fulgurite_kernels::Source;
    use fulgurite_kernels::cuda::{check_versions, compiled, nvrtc_version};

    use crate::findings::Findings;

    fn cuda(device: &Device) -> Result<&CudaDevice> {
        match device {
            Device::Cuda(device) => Ok(device),
            _ => Err(Error::other("the device was opened as another kind of device")),
        }
    }

    pub(super) fn versions(device: &Device, findings: &mut Findings) -> Result<()> {
        let Ok(device) = cuda(device) else { return Ok(()) };
        let context = device.cuda_stream().context().clone();
        let (major, minor) = context.compute_capability().w()?;
        findings.fact("compute_capability", format!("{major}.{minor}"));
        let (major, minor) = nvrtc_version()?;
        findings.fact("nvrtc", format!("{major}.{minor}"));
        check_versions()?;
        findings.fact("has_memory_pools", context.has_async_alloc());
        let processors = Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        findings.figure("multiprocessors", f64::from(context.attribute(processors).w()?));
        Ok(())
    }

    pub(super) fn kernels(device: &Device) -> Result<Findings> {
        let mut findings = Findings::default();
        let context = cuda(device)?.cuda_stream().context().clone();
        let capability = context.compute_capability().w()?;
        for source in Source::ALL {
            let started = Instant::now();
            let compiled = compiled(source, capability);
            findings.figure(format!("{}_s", source.name()), started.elapsed().as_secs_f64());
            if let Err(error) = compiled {
                findings.wrong.push(error.to_string());
            }
        }
        Ok(findings)
    }
}
