//! The files of a full checkpoint and their tensors.

use std::collections::BTreeMap;

use safetensors::Dtype;
use serde::{Deserialize, Serialize};

use super::super::manifest::Section;
use super::super::tensor_file::{TensorSlot, sort_by_alignment};
use fulgurite_engine::shard::Region;

/// A whole tensor, without its values.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TensorMeta {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) dtype: Dtype,
}

impl TensorMeta {
    pub(crate) fn slot(&self) -> TensorSlot {
        TensorSlot { name: self.name.clone(), dtype: self.dtype, region: Region::full(&self.shape) }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.slot().bytes()
    }
}

/// A file to be written, and its tensors in order.
#[derive(Debug, Clone)]
pub(crate) struct FilePlan {
    pub(crate) section: Section,
    pub(crate) file: String,
    /// Indices into the list of tensors.
    pub(crate) tensors: Vec<usize>,
}

/// Distributes tensors over files of at most `max_bytes`, in order.
///
/// A larger tensor gets a file of its own. Without tensors there is no file.
pub(crate) fn plan_files(
    section: Section,
    tensors: &[TensorMeta],
    max_bytes: u64,
) -> Vec<FilePlan> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    let mut filled = 0;
    for (i, tensor) in tensors.iter().enumerate() {
        let bytes = tensor.bytes();
        match groups.last_mut() {
            Some(group) if filled + bytes <= max_bytes => {
                group.push(i);
                filled += bytes;
            }
            _ => {
                groups.push(vec![i]);
                filled = bytes;
            }
        }
    }
    let (n, stem) = (groups.len(), section.name());
    let name = |i: usize| match n {
        1 => format!("{stem}.safetensors"),
        _ => format!("{stem}-{:05}-of-{n:05}.safetensors", i + 1),
    };
    let plan = |(i, mut group): (usize, Vec<usize>)| {
        sort_by_alignment(&mut group, |&i| tensors[i].dtype);
        FilePlan { section, file: name(i), tensors: group }
    };
    groups.into_iter().enumerate().map(plan).collect()
}

/// The index of several files, as Hugging Face's libraries write it.
#[derive(Debug, Serialize)]
pub(super) struct Index {
    metadata: IndexMetadata,
    weight_map: BTreeMap<String, String>,
}

#[derive(Debug, Serialize)]
struct IndexMetadata {
    total_size: u64,
}

/// Returns name and content of the index of these files; `None` for fewer than two files.
pub(super) fn index(
    section: Section,
    tensors: &[TensorMeta],
    files: &[FilePlan],
) -> Option<(String, Index)> {
    if files.len() < 2 {
        return None;
    }
    let map = files.iter().flat_map(|file| {
        file.tensors.iter().map(|&i| (tensors[i].name.clone(), file.file.clone()))
    });
    let total_size = tensors.iter().map(TensorMeta::bytes).sum();
    let index = Index { metadata: IndexMetadata { total_size }, weight_map: map.collect() };
    Some((format!("{}.safetensors.index.json", section.name()), index))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(name: &str, n: usize, dtype: Dtype) -> TensorMeta {
        TensorMeta { name: name.to_owned(), shape: vec![n], dtype }
    }

    #[test]
    fn files_fill_in_order_up_to_the_limit() {
        let tensors = [
            tensor("a", 3, Dtype::BF16),
            tensor("b", 1, Dtype::F32),
            tensor("huge", 100, Dtype::F32),
            tensor("c", 2, Dtype::F32),
            tensor("none", 0, Dtype::F32),
            tensor("d", 1, Dtype::F32),
        ];
        let files = plan_files(Section::Model, &tensors, 10);
        let shown: Vec<_> = files.iter().map(|f| (f.file.as_str(), f.tensors.clone())).collect();
        assert_eq!(
            shown,
            [
                ("model-00001-of-00004.safetensors", vec![1, 0]),
                ("model-00002-of-00004.safetensors", vec![2]),
                ("model-00003-of-00004.safetensors", vec![3, 4]),
                ("model-00004-of-00004.safetensors", vec![5]),
            ]
        );
        let (name, index) = index(Section::Model, &tensors, &files).unwrap();
        assert_eq!(name, "model.safetensors.index.json");
        assert_eq!(index.metadata.total_size, 6 + 4 + 400 + 8 + 4);
        assert_eq!(index.weight_map["none"], "model-00003-of-00004.safetensors");
        let one = plan_files(Section::Optimizer, &tensors, 1000);
        assert_eq!(one[0].file, "optimizer.safetensors");
        assert!(super::index(Section::Optimizer, &tensors, &one).is_none());
        assert!(plan_files(Section::Optimizer, &[], 1000).is_empty());
    }
}
