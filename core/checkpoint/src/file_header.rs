//! The JSON of a safetensors file's header, parsed in one pass and in little memory.

use std::collections::{HashMap, HashSet};

use safetensors::SafeTensorError;
use safetensors::tensor::TensorInfo;
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};

/// The content of a header, with the checks of `safetensors::tensor::Metadata`: tensors are in the
/// order of their bytes, without gaps.
pub(super) struct FileHeader {
    /// The key `__metadata__`.
    pub(super) metadata: HashMap<String, String>,
    pub(super) tensors: Vec<(String, TensorInfo)>,
}

impl<'de> Deserialize<'de> for FileHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = FileHeader;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a map of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<FileHeader, A::Error> {
        let mut metadata = None;
        let mut tensors: Vec<(String, TensorInfo)> = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                metadata = map.next_value::<Option<_>>()?;
            } else {
                tensors.push((name, map.next_value()?));
            }
        }
        tensors.sort_by_key(|(_, info)| info.data_offsets);
        check(&tensors).map_err(A::Error::custom)?;
        let mut names = HashSet::with_capacity(tensors.len());
        if let Some((name, _)) = tensors.iter().find(|(name, _)| !names.insert(name)) {
            return Err(A::Error::custom(format_args!("tensor `{name}` is there twice")));
        }
        Ok(FileHeader { metadata: metadata.unwrap_or_default(), tensors })
    }
}

/// Checks that each tensor has the bytes that its shape needs, directly after the previous tensor.
fn check(tensors: &[(String, TensorInfo)]) -> Result<(), SafeTensorError> {
    let mut position = 0;
    for (name, info) in tensors {
        let (start, end) = info.data_offsets;
        if start != position || end < start {
            return Err(SafeTensorError::InvalidOffset(name.clone()));
        }
        position = end;
        let bits = info
            .shape
            .iter()
            .try_fold(1usize, |n, &size| n.checked_mul(size))
            .and_then(|n| n.checked_mul(info.dtype.bitsize()))
            .ok_or(SafeTensorError::ValidationOverflow)?;
        if bits % 8 != 0 {
            return Err(SafeTensorError::MisalignedSlice);
        }
        if end - start != bits / 8 {
            return Err(SafeTensorError::TensorInvalidInfo);
        }
    }
    Ok(())
}
