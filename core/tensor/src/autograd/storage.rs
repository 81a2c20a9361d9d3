//! Replacing, freeing and changing a tensor's storage in place.
//!
//! A tensor of candle is a reference to storage plus a layout; a graph holds such references. These
//! functions change the storage behind the reference, so a graph keeps its tensors while their
//! memory comes and goes. Parameters' memory is allocated and freed only by these functions.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use fulgurite_core::autograd::storage;
//!
//! let t = Tensor::zeros((2, 3), DType::F32, &Device::Cpu)?;
//! storage::with_host_mut(&t, |xs: &mut [f32]| xs.fill(1.0))?;
//! assert_eq!(t.sum_all()?.to_scalar::<f32>()?, 6.0);
//!
//! storage::release(&t)?; // the memory is gone, the tensor still has its shape
//! assert_eq!(t.dims(), [2, 3]);
//! assert!(storage::is_released(&t));
//! # Ok::<(), fulgurite_core::Error>(())
//! ```

use std::cell::RefCell;
use std::sync::Mutex;

use candle_core::backend::BackendDevice as _;
use candle_core::op::BackpropOp;
use candle_core::{
    CpuStorage, CudaStorage, DType, Device, InplaceOp1, Layout, Shape, Storage, Tensor, WithDType,
};

use crate::execution::dry_run::skips_pass;
use crate::{Error, Result, zeros};

/// An empty storage, as released tensors have.
pub fn empty(dtype: DType, device: &Device) -> Result<Storage> {
    Ok(match device {
        Device::Cpu => Storage::Cpu(empty_cpu(dtype)?),
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            Storage::Cuda(fulgurite_kernels::cuda::unset_storage(&Shape::from(0), dtype, device)?)
        }
        #[cfg(not(feature = "cuda"))]
        Device::Cuda(device) => Storage::Cuda(device.zeros_impl(&Shape::from(0), dtype)?),
        Device::Metal(device) => Storage::Metal(device.zeros_impl(&Shape::from(0), dtype)?),
    })
}

fn empty_cpu(dtype: DType) -> candle_core::Result<CpuStorage> {
    Ok(match dtype {
        DType::U8 => CpuStorage::U8(vec![]),
        DType::U32 => CpuStorage::U32(vec![]),
        DType::I16 => CpuStorage::I16(vec![]),
        DType::I32 => CpuStorage::I32(vec![]),
        DType::I64 => CpuStorage::I64(vec![]),
        DType::BF16 => CpuStorage::BF16(vec![]),
        DType::F16 => CpuStorage::F16(vec![]),
        DType::F32 => CpuStorage::F32(vec![]),
        DType::F64 => CpuStorage::F64(vec![]),
        other => candle_core::bail!("dtype {other:?} cannot be held by a parameter"),
    })
}

/// Swaps a tensor's storage for another one.
struct Swap(Mutex<Storage>);

impl InplaceOp1 for Swap {
    fn name(&self) -> &'static str {
        "fulgurite-swap-storage"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        match &mut *self.0.lock().expect("no panic while swapping") {
            Storage::Cpu(other) => std::mem::swap(storage, other),
            _ => candle_core::bail!("a storage of another device was put into a CPU tensor"),
        }
        Ok(())
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> candle_core::Result<()> {
        match &mut *self.0.lock().expect("no panic while swapping") {
            Storage::Cuda(other) => std::mem::swap(storage, other),
            _ => candle_core::bail!("a storage of another device was put into a CUDA tensor"),
        }
        Ok(())
    }
}

/// Replaces the storage of `tensor`, and so of every clone and view of it, and returns the old
/// storage. The caller ensures that size and dtype fit.
pub fn replace(tensor: &Tensor, storage: Storage) -> Result<Storage> {
    if tensor.elem_count() == 0 {
        // candle refuses in-place writes to tensors with a stride of 0, such as a tensor of shape
        // [2, 0].
        return empty(tensor.dtype(), tensor.device());
    }
    let swap = Swap(Mutex::new(storage));
    tensor.inplace_op1(&swap)?;
    Ok(swap.0.into_inner().expect("no panic while swapping"))
}

/// Takes the storage out of `tensor`, which is left released.
pub fn take(tensor: &Tensor) -> Result<Storage> {
    replace(tensor, empty(tensor.dtype(), tensor.device())?)
}

/// Frees the memory of `tensor`; its shape and its place in a graph stay.
pub fn release(tensor: &Tensor) -> Result<()> {
    take(tensor).map(drop)
}

/// A flat tensor of all elements of a storage that was [taken](take).
#[doc(hidden)]
pub fn flat(storage: Storage) -> Result<Tensor> {
    let elements = match len(&storage) {
        usize::MAX => return Err(Error::other("a storage of this kind cannot be moved")),
        elements => elements,
    };
    Ok(Tensor::from_storage(storage, elements, BackpropOp::none(), false))
}

/// Gives a released tensor memory for all its elements, zero-filled. A tensor that has memory
/// keeps it, and its content.
pub fn allocate(tensor: &Tensor) -> Result<()> {
    if is_released(tensor) {
        let fresh = zeros(tensor.shape(), tensor.dtype(), tensor.device())?;
        replace(tensor, take(&fresh)?)?;
    }
    Ok(())
}

/// Like [`allocate`], but uninitialised on NVIDIA GPUs. The caller must write every element.
pub fn allocate_unset(tensor: &Tensor) -> Result<()> {
    #[cfg(feature = "cuda")]
    if let (true, Device::Cuda(device)) = (is_released(tensor), tensor.device()) {
        let (shape, dtype) = (tensor.shape(), tensor.dtype());
        let fresh = fulgurite_kernels::cuda::unset_storage(shape, dtype, device)?;
        replace(tensor, Storage::Cuda(fresh))?;
        return Ok(());
    }
    allocate(tensor)
}

/// `Tensor::zeros`, but its error names the bytes requested, which a device's own error does not.
///
/// # Errors
/// If the device has no memory for it.
pub fn zeros(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
    let shape = shape.into();
    let zeros = match device {
        Device::Cpu => zeros::on_host(&shape, dtype),
        device => Tensor::zeros(&shape, dtype, device),
    };
    zeros.map_err(|error| {
        let (dims, bytes) = (shape.dims(), shape.elem_count() * dtype.size_in_bytes());
        Error::from(error)
            .during(format_args!("{bytes} bytes were asked for, {dims:?} in {dtype:?}"))
    })
}

/// Like [`zeros`], but uninitialised on NVIDIA GPUs. The caller must write every element before it
/// is read.
///
/// # Errors
/// As [`zeros`].
pub fn unset(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device {
        let shape = shape.into();
        let storage = fulgurite_kernels::cuda::unset_storage(&shape, dtype, device)?;
        return Ok(Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false));
    }
    zeros(shape, dtype, device)
}

/// Whether the tensor's memory is freed. A tensor without elements is never released.
pub fn is_released(tensor: &Tensor) -> bool {
    tensor.elem_count() > 0 && len(&tensor.storage_and_layout().0) == 0
}

/// Whether the tensor is contiguous and all of its storage: neither a view of a larger tensor nor a
/// transpose.
pub(super) fn is_whole(tensor: &Tensor) -> bool {
    let (storage, layout) = tensor.storage_and_layout();
    layout.is_contiguous() && layout.start_offset() == 0 && len(&storage) == tensor.elem_count()
}

/// Number of elements of a storage; `usize::MAX` for unknown kinds.
fn len(storage: &Storage) -> usize {
    match storage {
        Storage::Cpu(storage) => cpu_len(storage),
        #[cfg(feature = "cuda")]
        Storage::Cuda(storage) => cuda_len(storage),
        _ => usize::MAX,
    }
}

fn cpu_len(storage: &CpuStorage) -> usize {
    match storage {
        CpuStorage::U8(v) => v.len(),
        CpuStorage::U32(v) => v.len(),
        CpuStorage::I16(v) => v.len(),
        CpuStorage::I32(v) => v.len(),
        CpuStorage::I64(v) => v.len(),
        CpuStorage::BF16(v) => v.len(),
        CpuStorage::F16(v) => v.len(),
        CpuStorage::F32(v) => v.len(),
        CpuStorage::F64(v) => v.len(),
        _ => usize::MAX,
    }
}

#[cfg(feature = "cuda")]
fn cuda_len(storage: &CudaStorage) -> usize {
    use candle_core::cuda_backend::CudaStorageSlice as S;
    match &storage.slice {
        S::U8(s) => s.len(),
        S::U32(s) => s.len(),
        S::I16(s) => s.len(),
        S::I32(s) => s.len(),
        S::I64(s) => s.len(),
        S::BF16(s) => s.len(),
        S::F16(s) => s.len(),
        S::F32(s) => s.len(),
        S::F64(s) => s.len(),
        _ => usize::MAX,
    }
}

/// Copies the elements of `source` (same element count, any dtype and layout) into the memory of
/// `target`, a contiguous tensor or view. Tensors of i16 and i32 on a device go through the
/// host, because candle lacks kernels for them. Their target must be a whole tensor.
pub fn copy_from(target: &Tensor, source: &Tensor) -> Result<()> {
    if lacks_kernels(target.device(), target.dtype()) {
        return replace_through_host(target, source);
    }
    if super::cast::convert_into(target, source)? {
        return Ok(());
    }
    if target.elem_count() == source.elem_count() && skips_pass(2 * bytes_of(target)) {
        return Ok(());
    }
    let (target, source) = (target.flatten_all()?, source.flatten_all()?);
    if target.elem_count() > 0 {
        target.slice_set(&source.to_dtype(target.dtype())?.contiguous()?, 0, 0)?;
    }
    Ok(())
}

/// `Tensor::cat` outside of graphs, for at least one part. Large ones are left zero in a dry run.
///
/// # Errors
/// If the parts do not fit together.
pub fn cat(parts: &[Tensor], dim: usize) -> Result<Tensor> {
    if let Some(first) = parts.first().filter(|first| first.device().is_cpu())
        && dim < first.rank()
        && skips_pass(2 * parts.iter().map(bytes_of).sum::<usize>())
    {
        let mut dims = first.dims().to_vec();
        dims[dim] = parts.iter().map(|part| part.dims()[dim]).sum();
        return zeros(dims, first.dtype(), first.device());
    }
    let parts: Vec<Tensor> = parts.iter().map(Tensor::detach).collect();
    Ok(Tensor::cat(&parts, dim)?)
}

/// `Tensor::contiguous` outside of graphs. Large copies are left zero in a dry run.
///
/// # Errors
/// If the device has no memory for the copy.
pub fn contiguous(tensor: &Tensor) -> Result<Tensor> {
    let tensor = tensor.detach();
    match !tensor.is_contiguous() && tensor.device().is_cpu() && skips_pass(2 * bytes_of(&tensor)) {
        true => zeros(tensor.shape(), tensor.dtype(), tensor.device()),
        false => Ok(tensor.contiguous()?),
    }
}

fn bytes_of(tensor: &Tensor) -> usize {
    tensor.elem_count() * tensor.dtype().size_in_bytes()
}

/// Whether candle lacks kernels that write parts of such a tensor or convert to its dtype.
fn lacks_kernels(device: &Device, dtype: DType) -> bool {
    !device.is_cpu() && matches!(dtype, DType::I16 | DType::I32)
}

/// [`copy_from`] for a whole tensor: replaces its storage.
fn replace_through_host(target: &Tensor, source: &Tensor) -> Result<()> {
    let dtype = target.dtype();
    if target.elem_count() != source.elem_count() {
        let (to, from) = (target.shape(), source.shape());
        return Err(Error::other(format!("{from:?} values cannot be copied into {to:?}")));
    }
    if !is_whole(target) {
        return Err(Error::other(format!(
            "a part of a tensor in {dtype:?} cannot be written on a device, for lack of a kernel: use u32 or i64"
        )));
    }
    let values = source.to_device(&Device::Cpu)?.to_dtype(dtype)?.force_contiguous()?;
    replace(target, take(&values.to_device(target.device())?)?).map(drop)
}

/// `to_dtype` outside of graphs, also for tensors without elements, such as empty shards. For those
/// candle would launch a CUDA kernel without threads, which is an error.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fulgurite_core::autograd::storage;
///
/// for elements in [0, 3] {
///     let cast = storage::cast(&Tensor::ones(elements, DType::F32, &Device::Cpu)?, DType::BF16)?;
///     assert_eq!((cast.dims(), cast.dtype()), (&[elements][..], DType::BF16));
/// }
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
///
/// # Errors
/// If candle cannot convert between the dtypes.
pub fn cast(tensor: &Tensor, dtype: DType) -> Result<Tensor> {
    if tensor.dtype() != dtype && lacks_kernels(tensor.device(), dtype) && tensor.elem_count() > 0 {
        let values = tensor.to_device(&Device::Cpu)?.to_dtype(dtype)?;
        return Ok(values.to_device(tensor.device())?);
    }
    if let Some(converted) = super::cast::converted(tensor, dtype)? {
        return Ok(converted);
    }
    if tensor.elem_count() > 0 || tensor.dtype() == dtype {
        let bytes = bytes_of(tensor) + tensor.elem_count() * dtype.size_in_bytes();
        if tensor.dtype() != dtype && tensor.device().is_cpu() && skips_pass(bytes) {
            return zeros(tensor.shape(), dtype, tensor.device());
        }
        return Ok(tensor.detach().to_dtype(dtype)?);
    }
    let storage = empty(dtype, tensor.device())?;
    Ok(Tensor::from_storage(storage, tensor.shape().clone(), BackpropOp::none(), false))
}

/// [`cast`] of each tensor in its place. On a GPU, one launch casts all contiguous tensors in f32,
/// bf16 and f16.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fulgurite_core::autograd::storage;
///
/// let shard = |elements| Tensor::ones(elements, DType::F32, &Device::Cpu);
/// let mut shards = [shard(3)?, shard(0)?];
/// storage::cast_all(shards.iter_mut().map(|shard| (shard, DType::BF16)))?;
/// assert!(shards.iter().all(|shard| shard.dtype() == DType::BF16));
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
///
/// # Errors
/// As [`cast`].
pub fn cast_all<'a>(tensors: impl IntoIterator<Item = (&'a mut Tensor, DType)>) -> Result<()> {
    #[cfg(feature = "cuda")]
    let tensors = {
        let all: Vec<_> = tensors.into_iter().collect();
        let wanted: Vec<_> = all.iter().map(|(tensor, dtype)| (&**tensor, *dtype)).collect();
        let casts = fulgurite_kernels::cuda::casts(&wanted)?;
        all.into_iter().zip(casts).filter_map(|((tensor, dtype), cast)| match cast {
            Some(cast) => {
                *tensor = cast;
                None
            }
            None => Some((tensor, dtype)),
        })
    };
    for (tensor, dtype) in tensors {
        *tensor = cast(tensor, dtype)?;
    }
    Ok(())
}

/// [`copy_from`] for pairs of a target and a source. On a GPU, one launch copies and casts all
/// contiguous tensors in f32, bf16 and f16. No target may overlap another target or a source.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fulgurite_core::autograd::storage;
///
/// let target = Tensor::zeros(3, DType::F32, &Device::Cpu)?;
/// let source = Tensor::ones(3, DType::F32, &Device::Cpu)?;
/// storage::copy_all(&[(&target, &source)])?;
/// assert_eq!(target.to_vec1::<f32>()?, [1.0; 3]);
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
///
/// # Errors
/// As [`copy_from`].
pub fn copy_all(copied: &[(&Tensor, &Tensor)]) -> Result<()> {
    #[cfg(feature = "cuda")]
    let done = fulgurite_kernels::cuda::copy_all(copied)?;
    #[cfg(not(feature = "cuda"))]
    let done = std::iter::repeat(false);
    for ((target, source), done) in copied.iter().zip(done) {
        if !done {
            copy_from(target, source)?;
        }
    }
    Ok(())
}

/// An element type of CPU tensors with a plain byte representation.
pub trait HostElement: WithDType + bytemuck::Pod {
    /// The elements, if `storage` holds this type.
    fn slice_mut(storage: &mut CpuStorage) -> Option<&mut [Self]>;
}

macro_rules! host_elements {
    ($($ty:ty => $variant:ident),*) => {
        $(impl HostElement for $ty {
            fn slice_mut(storage: &mut CpuStorage) -> Option<&mut [Self]> {
                match storage {
                    CpuStorage::$variant(v) => Some(v),
                    _ => None,
                }
            }
        })*

        /// Calls `f` with the bytes of a contiguous CPU tensor or view, to be changed in place.
        ///
        /// # Errors
        /// As [`with_host_mut`], and for dtypes without a byte representation.
        pub fn with_bytes_mut<R>(tensor: &Tensor, f: impl FnOnce(&mut [u8]) -> R) -> Result<R> {
            match tensor.dtype() {
                $(DType::$variant => with_host_mut(tensor, |x: &mut [$ty]| f(bytemuck::cast_slice_mut(x))),)*
                other => Err(Error::other(format!("dtype {other:?} has no byte view"))),
            }
        }

        /// Calls `f` with the bytes of a contiguous CPU tensor or view.
        ///
        /// # Errors
        /// As [`with_bytes_mut`].
        pub fn with_bytes<R>(tensor: &Tensor, f: impl FnOnce(&[u8]) -> R) -> Result<R> {
            match tensor.dtype() {
                $(DType::$variant => with_host(tensor, |x: &[$ty]| f(bytemuck::cast_slice(x))),)*
                other => Err(Error::other(format!("dtype {other:?} has no byte view"))),
            }
        }
    };
}

host_elements!(
    u8 => U8, u32 => U32, i16 => I16, i32 => I32, i64 => I64,
    half::bf16 => BF16, half::f16 => F16, f32 => F32, f64 => F64
);

/// Access to a tensor's storage inside an in-place op. One type for all closures: candle compiles
/// its machinery for each type of op.
struct HostAccess<'a, 'b>(RefCell<&'a mut OnHost<'b>>);

type OnHost<'a> = dyn FnMut(&mut CpuStorage, (usize, usize)) -> candle_core::Result<()> + 'a;

impl InplaceOp1 for HostAccess<'_, '_> {
    fn name(&self) -> &'static str {
        "fulgurite-host-access"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let Some(elements) = layout.contiguous_offsets() else {
            candle_core::bail!("in-place access needs a contiguous tensor, got {layout:?}")
        };
        (self.0.borrow_mut())(storage, elements)
    }
}

/// Calls `f` with the elements of a contiguous CPU tensor or view, to be changed in place.
///
/// `f` must not use `tensor` or another tensor that shares its storage, which is locked meanwhile.
///
/// # Errors
/// If the tensor is not on the CPU, not contiguous, released, or of another dtype than `T`.
pub fn with_host_mut<T: HostElement, R>(
    tensor: &Tensor,
    f: impl FnOnce(&mut [T]) -> R,
) -> Result<R> {
    let (mut f, mut result) = (Some(f), None);
    let mut on_host = |storage: &mut CpuStorage, (start, end): (usize, usize)| {
        let Some(all) = T::slice_mut(storage) else {
            candle_core::bail!("in-place access as {:?} to a tensor of another dtype", T::DTYPE)
        };
        let Some(slice) = all.get_mut(start..end) else {
            candle_core::bail!("in-place access to a tensor whose memory is released")
        };
        result = f.take().map(|f| f(slice));
        Ok(())
    };
    in_place(tensor, &mut on_host)?;
    result.ok_or_else(|| Error::other("in-place access did not run"))
}

fn in_place(tensor: &Tensor, on_host: &mut OnHost<'_>) -> Result<()> {
    Ok(tensor.inplace_op1(&HostAccess(RefCell::new(on_host)))?)
}

/// Calls `f` with the elements of a contiguous CPU tensor or view.
///
/// # Errors
/// As [`with_host_mut`].
pub fn with_host<T: HostElement, R>(tensor: &Tensor, f: impl FnOnce(&[T]) -> R) -> Result<R> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        return Err(Error::other("host access to a tensor that is not on the CPU"));
    };
    let Some((start, end)) = layout.contiguous_offsets() else {
        return Err(Error::other(format!("host access needs a contiguous tensor, got {layout:?}")));
    };
    let Some(slice) = T::cpu_storage_as_slice(storage)?.get(start..end) else {
        return Err(Error::other("host access to a tensor whose memory is released"));
    };
    Ok(f(slice))
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    /// Runs on the CPU, where the same code runs as on devices that lack kernels.
    #[test]
    fn whole_tensor_is_replaced_through_host() {
        let target = Tensor::zeros((2, 3), DType::I32, &Device::Cpu).unwrap();
        let shared = target.detach();
        let source = Tensor::new(&[[1f32, -2.], [3., 4.], [5., 6.]], &Device::Cpu).unwrap();
        replace_through_host(&target, &source.t().unwrap()).unwrap();
        assert_eq!(shared.to_vec2::<i32>().unwrap(), [[1, 3, 5], [-2, 4, 6]]);
        let part = replace_through_host(
            &target.narrow(0, 0, 1).unwrap(),
            &shared.narrow(0, 1, 1).unwrap(),
        );
        assert_says!(part.unwrap_err(), "a part of a tensor in I32 cannot be written … u32 or i64");
        let few = replace_through_host(&target, &shared.narrow(0, 1, 1).unwrap());
        assert_says!(few.unwrap_err(), "[1, 3] values cannot be copied into [2, 3]");
        assert!(lacks_kernels(&Device::Metal(candle_core::MetalDevice), DType::I16));
        assert!(!lacks_kernels(&Device::Cpu, DType::I16));
    }

    #[test]
    fn failed_allocation_names_bytes() {
        let device = Device::Metal(candle_core::MetalDevice);
        let error = zeros((2, 3), DType::F32, &device).unwrap_err().to_string();
        assert!(error.ends_with("(24 bytes were asked for, [2, 3] in F32)"), "{error}");
    }
}
