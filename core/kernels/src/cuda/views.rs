//! Uninitialised memory, and contiguous copies of views.
#![allow(unsafe_code)] // memory that the caller overwrites

use candle_core::backend::BackendDevice as _;
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, CudaStorage, DType, Device, Shape, Storage, Tensor};
use fulgurite_error::{Error, Result};

use super::address;
use super::layers::carry_out;
use super::run::{asked_for, first_element};
use crate::plans::{self, View};

/// Allocates uninitialised memory for a tensor of this shape and dtype. The caller must overwrite
/// all of it. Unlike candle's zeros, it launches nothing.
///
/// # Errors
/// If memory runs out.
pub fn unset_storage(shape: &Shape, dtype: DType, device: &CudaDevice) -> Result<CudaStorage> {
    let bytes = shape.elem_count() * dtype.size_in_bytes();
    // SAFETY: any bits are valid values of these dtypes.
    let storage = unsafe { device.alloc_uninit(shape, dtype) };
    storage.map_err(|error| asked_for(bytes, error))
}

/// Like [`unset_storage`], as a tensor.
pub(super) fn unset(shape: &Shape, dtype: DType, device: &CudaDevice) -> Result<Tensor> {
    let storage = Storage::Cuda(unset_storage(shape, dtype, device)?);
    Ok(Tensor::from_storage(storage, shape.clone(), BackpropOp::none(), false))
}

/// Copies the elements of a view of up to four dimensions to contiguous memory, without a graph:
/// one launch. candle's `contiguous` first copies sizes and strides to the device from pageable
/// memory. Returns `None` for tensors on other devices, without elements, of more dimensions, or in
/// dtypes without a kernel.
///
/// # Errors
/// If memory runs out, or the launch fails.
pub fn dense(tensor: &Tensor) -> Result<Option<Tensor>> {
    let Device::Cuda(device) = tensor.device() else { return Ok(None) };
    let known = [DType::F32, DType::F64, DType::BF16, DType::F16, DType::U32];
    let (dims, strides) = (tensor.dims(), tensor.stride());
    if tensor.elem_count() == 0 || dims.len() > 4 || !known.contains(&tensor.dtype()) {
        return Ok(None);
    }
    let (mut sizes, mut steps) = ([1; 4], [0; 4]);
    let first = 4 - dims.len();
    for (i, (&size, &stride)) in dims.iter().zip(strides).enumerate() {
        (sizes[first + i], steps[first + i]) = (size as u64, stride as u64);
    }
    let dense = unset(tensor.shape(), tensor.dtype(), device)?;
    let view = View {
        address: first_element(tensor)?,
        element: tensor.dtype().size_in_bytes() as u64,
        sizes,
        strides: steps,
    };
    let Some(plan) = plans::dense(view, address(&dense)?) else { return Ok(None) };
    carry_out(&plan, device, &[tensor, &dense])?;
    Ok(Some(dense))
}

/// Returns the tensor itself if it is contiguous; else a [dense] copy, or candle's copy if no
/// kernel supports it.
///
/// # Errors
/// As [`dense`]. Also if candle would have to copy 2^32 elements or more; its kernels would never
/// finish.
pub fn contiguous(tensor: &Tensor) -> Result<Tensor> {
    if tensor.is_contiguous() {
        return Ok(tensor.clone());
    }
    match dense(tensor)? {
        Some(dense) => Ok(dense),
        None => {
            fits_candle(tensor, "a copy in one piece")?;
            Ok(tensor.contiguous()?)
        }
    }
}

/// Refuses a GPU tensor that candle's kernels would loop on forever, because they count elements in
/// 32 bits.
///
/// # Errors
/// If it has 2^32 elements or more.
pub(super) fn fits_candle(tensor: &Tensor, what: &str) -> Result<()> {
    let elements = tensor.elem_count();
    if !tensor.device().is_cuda() || u32::try_from(elements).is_ok() {
        return Ok(());
    }
    Err(Error::other(format!(
        "{what} of a tensor of {elements} elements ({:?} in {:?}) on a GPU: no kernel of Fulgurite takes it, and candle's, \
         which count in 32 bits, take fewer than 2^32 elements. Split it, such as by a smaller micro-batch",
        tensor.dims(),
        tensor.dtype()
    )))
}

/// Returns the rows of `table` (`[rows, width]`, in f32, f64, bf16 or f16) that `ids` select (u32,
/// one dimension), without a graph: `[ids, width]`. The id [`u32::MAX`] gives zeros. The caller
/// guarantees that the ids are in range. Returns `None` for tables on other devices, without
/// elements, or in other dtypes.
///
/// # Errors
/// If shapes or devices do not fit, memory runs out, or the launch fails.
pub fn pick_rows(table: &Tensor, ids: &Tensor) -> Result<Option<Tensor>> {
    let Device::Cuda(device) = table.device() else { return Ok(None) };
    let known = [DType::F32, DType::F64, DType::BF16, DType::F16];
    if table.elem_count() == 0 || ids.elem_count() == 0 || !known.contains(&table.dtype()) {
        return Ok(None);
    }
    let (width, count) = (table.dim(1)?, ids.dims1()?);
    if ids.dtype() != DType::U32 || !ids.device().same_device(table.device()) {
        return Err(Error::other(format!("rows are picked by u32 on their device, got {ids:?}")));
    }
    let (table, ids) = (contiguous(table)?, contiguous(ids)?);
    let rows = unset(&Shape::from((count, width)), table.dtype(), device)?;
    let bytes = width * table.dtype().size_in_bytes();
    let addresses = (address(&ids)?, address(&table)?, address(&rows)?);
    let plan = plans::pick_rows(addresses.0, addresses.1, addresses.2, count as u64, bytes as u64);
    carry_out(&plan, device, &[&ids, &table, &rows])?;
    Ok(Some(rows))
}
