//! Finding the state dict in a pickle, and the tensors in it.

use safetensors::Dtype;

use super::pickle::{Heap, Id, Object};
use crate::chunks::checked_elem_count;

/// The keys under which Lightning, most scripts and DeepSpeed save a model's state dict.
const KEYS: [&str; 4] = ["state_dict", "model", "module", "model_state_dict"];

/// A tensor, as a view of a storage.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct TensorView {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    /// Distance in elements between neighbouring indices, by dimension.
    pub(super) strides: Vec<usize>,
    /// Key of the storage.
    pub(super) storage: String,
    /// First element in the storage.
    pub(super) offset: usize,
}

impl TensorView {
    /// Whether its elements are in row-major order without gaps.
    pub(super) fn is_contiguous(&self) -> bool {
        let mut expected: usize = 1;
        self.shape.contains(&0)
            || self.shape.iter().zip(&self.strides).rev().all(|(&size, &stride)| {
                let fits = size == 1 || stride == expected;
                expected = expected.saturating_mul(size);
                fits
            })
    }

    /// Returns the minimum size of the storage in bytes; `None` on overflow.
    pub(super) fn bytes_needed(&self) -> Option<u64> {
        let last = if self.shape.contains(&0) {
            self.offset
        } else {
            let steps = self.shape.iter().zip(&self.strides);
            let last = steps.map(|(size, stride)| (size - 1).checked_mul(*stride));
            let last = last.chain([Some(self.offset)]).try_fold(1usize, |a, b| a.checked_add(b?));
            last?
        };
        checked_elem_count(&self.shape)?.checked_mul(self.dtype.bitsize())?;
        last.checked_mul(self.dtype.bitsize() / 8).map(|bytes| bytes as u64)
    }
}

/// A tensor of a state dict by name, or the reason why it cannot be read.
pub(super) type NamedTensor = (String, Result<TensorView, String>);

/// Returns the tensors of the state dict in `heap`.
///
/// It is the dict under `keys` or, without keys, the outermost dict with tensors under the usual
/// [`KEYS`].
pub(super) fn tensors(heap: &Heap, keys: &[&str]) -> Result<Vec<NamedTensor>, String> {
    let mut at = heap.root;
    for key in keys {
        at = get(heap, at, key).ok_or_else(|| {
            format!("there is no `{key}` in it; there is: {}", keys_of(heap, at).join(", "))
        })?;
    }
    let mut path: Vec<&str> = keys.to_vec();
    loop {
        let Some(items) = heap.items(at) else {
            let what = match heap.get(at) {
                Object::Call { callable, .. } => heap.global(*callable).unwrap_or("an object"),
                _ => "something else",
            };
            return Err(format!(
                "holds no state dict but {what}; only tensors are read from pickles, nothing in \
                 them is executed. Save `module.state_dict()`"
            ));
        };
        // A dict under one of these keys is preferred to tensors beside it, which belong to the
        // training loop. The depth is limited, since a dict may contain itself.
        let inside = KEYS.iter().find_map(|key| {
            let inside = get(heap, at, key)?;
            heap.items(inside).map(|_| (*key, inside))
        });
        if let Some((key, inside)) = inside.filter(|_| keys.is_empty() && path.len() < 4) {
            path.push(key);
            at = inside;
            continue;
        }
        let mut tensors = Vec::new();
        for (key, value) in items {
            let Some(name) = heap.text(*key) else { continue };
            if let Some(tensor) = tensor(heap, *value).transpose() {
                tensors.push((name.to_owned(), tensor));
            }
        }
        if !tensors.is_empty() {
            return Ok(tensors);
        }
        let place = if path.is_empty() { String::new() } else { format!(" `{}`", path.join(".")) };
        return Err(format!(
            "there is no state dict in it{place}: it has no tensors. Expected them there or in one of \
             {}. It has: {}",
            KEYS.map(|key| format!("`{key}`")).join(", "),
            keys_of(heap, at).join(", ")
        ));
    }
}

pub(super) fn get(heap: &Heap, dict: Id, key: &str) -> Option<Id> {
    let items = heap.items(dict)?;
    items.iter().rev().find(|(k, _)| heap.text(*k) == Some(key)).map(|(_, value)| *value)
}

/// Returns the first keys of a dict, for messages.
pub(super) fn keys_of(heap: &Heap, dict: Id) -> Vec<String> {
    let items = heap.items(dict).unwrap_or_default().iter();
    let mut keys: Vec<String> =
        items.filter_map(|(key, _)| heap.text(*key)).take(20).map(|k| format!("`{k}`")).collect();
    if keys.is_empty() {
        keys.push("nothing".to_owned());
    }
    keys
}

/// Returns the object as a tensor; `None` for other objects.
///
/// The error says why the tensor cannot be loaded.
pub(super) fn tensor(heap: &Heap, mut id: Id) -> Result<Option<TensorView>, String> {
    // Parameters and subclasses wrap the call that makes the tensor in further calls.
    for _ in 0..8 {
        let Object::Call { callable, args, .. } = heap.get(id) else { return Ok(None) };
        let (Some(function), Some(args)) = (heap.global(*callable), heap.sequence(*args)) else {
            return Ok(None);
        };
        let damaged = || format!("is damaged: `{function}` has wrong arguments");
        match function {
            "torch._utils._rebuild_parameter" | "torch._utils._rebuild_parameter_with_state" => {
                id = *args.first().ok_or_else(damaged)?;
            }
            "torch._tensor._rebuild_from_type_v2" => {
                let (Some(&function), Some(&inner)) = (args.first(), args.get(2)) else {
                    return Err(damaged());
                };
                if !matches!(
                    heap.global(function),
                    Some("torch._utils._rebuild_tensor_v2" | "torch._utils._rebuild_tensor_v3")
                ) {
                    let what = heap.global(function).unwrap_or("an unknown function");
                    return Err(unknown(what));
                }
                let inner = heap.sequence(inner).ok_or_else(damaged)?;
                return view(heap, inner).map(Some);
            }
            "torch._utils._rebuild_tensor"
            | "torch._utils._rebuild_tensor_v2"
            | "torch._utils._rebuild_tensor_v3" => return view(heap, args).map(Some),
            name if name.starts_with("torch._utils._rebuild_")
                || name.starts_with("torch._tensor.") =>
            {
                return Err(unknown(name));
            }
            _ => return Ok(None),
        }
    }
    Err("is wrapped too often".to_owned())
}

fn unknown(function: &str) -> String {
    format!(
        "is no plain tensor (it is made by `{function}`: quantized, sparse, distributed or on no \
         device). Turn it into one before saving, with `.full_tensor()`, `.dequantize()` or \
         `.to_dense()`"
    )
}

/// Returns the tensor of a call of `_rebuild_tensor`.
///
/// The arguments are storage, offset, size and stride; version 3 has the dtype as the seventh.
fn view(heap: &Heap, args: &[Id]) -> Result<TensorView, String> {
    let parts = || {
        let [storage, offset, shape, strides, ..] = args else { return None };
        let Object::Persistent(key) = heap.get(*storage) else { return None };
        let [_, class, storage, ..] = heap.sequence(*key)? else { return None };
        let class = heap.global(*class)?.rsplit('.').next()?;
        let dtype =
            args.get(6).and_then(|id| heap.global(*id)).and_then(|n| n.strip_prefix("torch."));
        Some((
            class,
            dtype,
            heap.counts(*shape)?,
            heap.counts(*strides)?,
            heap.text(*storage)?.to_owned(),
            heap.count(*offset)?,
        ))
    };
    let (class, dtype, shape, strides, storage, offset) =
        parts().ok_or("is damaged: its storage, shape or strides are wrong")?;
    if shape.len() != strides.len() {
        return Err("is damaged: its shape and strides are of different lengths".to_owned());
    }
    let dtype = match dtype.filter(|_| class == "UntypedStorage").unwrap_or(class) {
        "FloatStorage" => Dtype::F32,
        "DoubleStorage" => Dtype::F64,
        "HalfStorage" => Dtype::F16,
        "BFloat16Storage" => Dtype::BF16,
        "LongStorage" => Dtype::I64,
        "IntStorage" => Dtype::I32,
        "ShortStorage" => Dtype::I16,
        "CharStorage" => Dtype::I8,
        "ByteStorage" => Dtype::U8,
        "BoolStorage" => Dtype::BOOL,
        "ComplexFloatStorage" | "complex64" => Dtype::C64,
        "uint16" => Dtype::U16,
        "uint32" => Dtype::U32,
        "uint64" => Dtype::U64,
        "float8_e4m3fn" => Dtype::F8_E4M3,
        "float8_e5m2" => Dtype::F8_E5M2,
        other => return Err(format!("has values of a dtype that is not known, `{other}`")),
    };
    Ok(TensorView { dtype, shape, strides, storage, offset })
}
