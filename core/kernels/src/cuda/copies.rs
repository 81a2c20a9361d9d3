//! Casts and copies of many tensors in one launch.
#![allow(unsafe_code)] // memory that a launch overwrites completely

use candle_core::backend::BackendDevice as _;
use candle_core::op::BackpropOp;
use candle_core::{DType, Device, Storage, Tensor};
use fulgurite_error::Result;

use super::address;
use super::layers::{carry_out, taken};
use super::views::fits_candle;
use crate::Float;
use crate::plans::{Copied, copies};

/// Casts each tensor to a dtype, in new memory: one launch for all. The result is `None` for
/// tensors that need another way: on another device, empty, with gaps, already of that dtype, or to
/// or from a dtype other than f32, bf16 and f16.
///
/// # Errors
/// If memory runs out, or the launch fails. Also if candle would have to cast 2^32 elements
/// or more; its kernels would never finish.
pub fn casts(tensors: &[(&Tensor, DType)]) -> Result<Vec<Option<Tensor>>> {
    let mut copied = Vec::new();
    let mut device = None;
    let mut all = Vec::with_capacity(tensors.len());
    for &(tensor, dtype) in tensors {
        let together = device.is_none_or(|first| Device::same_device(first, tensor.device()));
        let (Some((own, from)), Some(to)) = (taken(tensor), float(dtype)) else {
            if tensor.dtype() != dtype {
                fits_candle(tensor, "a cast")?;
            }
            all.push(None);
            continue;
        };
        if !together || from == to || !tensor.is_contiguous() {
            if from != to {
                fits_candle(tensor, "a cast")?;
            }
            all.push(None);
            continue;
        }
        device = Some(tensor.device());
        // SAFETY: the launch writes every element.
        let storage = unsafe { own.alloc_uninit(tensor.shape(), dtype) }?;
        let (storage, shape) = (Storage::Cuda(storage), tensor.shape().clone());
        let cast = Tensor::from_storage(storage, shape, BackpropOp::none(), false);
        let elements = tensor.elem_count() as u64;
        copied.push(Copied::cast(address(&cast)?, address(tensor)?, elements, [from, to]));
        all.push(Some(cast));
    }
    if let Some(Device::Cuda(device)) = device {
        let held: Vec<&Tensor> =
            tensors.iter().map(|(tensor, _)| *tensor).chain(all.iter().flatten()).collect();
        carry_out(&copies(copied), device, &held)?;
    }
    Ok(all)
}

/// Copies each second tensor into the memory of the first, cast to its dtype: one launch for all.
/// No target may overlap another target or a source. The result is false for pairs that need
/// another way: on another device, empty, with gaps, of different sizes, or in dtypes other than
/// f32, bf16 and f16.
///
/// # Errors
/// If the launch fails.
pub fn copy_all(copied: &[(&Tensor, &Tensor)]) -> Result<Vec<bool>> {
    let mut rows = Vec::new();
    let mut device = None;
    let mut all = Vec::with_capacity(copied.len());
    for &(target, source) in copied {
        let first = *device.get_or_insert(target.device());
        let dtype = |tensor: &Tensor| match taken(tensor) {
            Some((_, dtype)) if first.same_device(tensor.device()) && tensor.is_contiguous() => {
                Some(dtype)
            }
            _ => None,
        };
        let dtypes = dtype(source).zip(dtype(target));
        let dtypes = dtypes.filter(|_| target.elem_count() == source.elem_count());
        all.push(dtypes.is_some());
        if let Some((from, to)) = dtypes {
            let elements = source.elem_count() as u64;
            rows.push(Copied::cast(address(target)?, address(source)?, elements, [from, to]));
        }
    }
    if let (Some(Device::Cuda(device)), false) = (device, rows.is_empty()) {
        let held: Vec<&Tensor> =
            copied.iter().flat_map(|(target, source)| [*target, *source]).collect();
        carry_out(&copies(rows), device, &held)?;
    }
    Ok(all)
}

fn float(dtype: DType) -> Option<Float> {
    match dtype {
        DType::F32 => Some(Float::F32),
        DType::BF16 => Some(Float::Bf16),
        DType::F16 => Some(Float::F16),
        _ => None,
    }
}
