//! Writing a distributed checkpoint from one process.

use super::super::CheckpointIO;
use super::super::full::TensorMeta;
use super::super::manifest::Section;
use super::super::manifest::{MANIFEST, Manifest, SaveMeta, TensorEntry};
use super::super::shard_file::file_name;
use super::super::stored::loadable_dtype;
use super::super::tensor_file::{FileKind, TensorFile, TensorSlot, sort_by_alignment};
use super::convert::OutputSection;
use super::progress::Counter;
use crate::{Error, Result};
use fulgurite_engine::mesh::DATA_PARALLEL_SHARD;
use fulgurite_engine::shard::{Cut, Placement, Region, ShardSpec};

/// Writes the checkpoint as `shards` ranks of FSDP would, and returns the number of files.
///
/// All shards are written at the same time: so every tensor is read once, whole, and its checksum
/// is verified.
pub(super) fn write(
    io: &dyn CheckpointIO,
    staged: &str,
    shards: usize,
    parts: &[&OutputSection<'_>],
    meta: SaveMeta,
    counter: &mut Counter<'_>,
) -> Result<usize> {
    let specs = parts.iter().filter(|part| part.section == Section::Model).flat_map(|part| {
        part.tensors.iter().map(|tensor| (tensor.name.clone(), spec(&tensor.shape, shards)))
    });
    let meta = SaveMeta {
        mesh: vec![(DATA_PARALLEL_SHARD.to_owned(), shards)],
        specs: specs.collect(),
        ..meta
    };
    let mut manifest = Manifest::new(shards, &meta);
    for part in parts {
        let mut order: Vec<usize> = (0..part.tensors.len()).collect();
        sort_by_alignment(&mut order, |&i| part.tensors[i].dtype);
        let mut files = create(io, staged, shards, part, &order)?;
        for &i in &order {
            let (tensor, values) = (&part.tensors[i], part.read(i)?);
            let mut chunks = Vec::new();
            for (shard, file) in files.iter_mut().enumerate() {
                let Some(file) = file else { continue };
                let region = piece(&tensor.shape, shards, shard);
                if region.is_empty() {
                    continue;
                }
                // A part of the first dimension is contiguous.
                let row = tensor.shape.iter().skip(1).product::<usize>();
                let start = region.offsets.first().map_or(0, |first| first * row);
                let (start, len) = (at(tensor, start)?, at(tensor, region.elem_count())?);
                chunks.extend(file.put(&values.narrow(0, start, len)?)?);
            }
            let entry = TensorEntry { shape: tensor.shape.clone(), dtype: tensor.dtype, chunks };
            let entries = match part.section {
                Section::Model => &mut manifest.model,
                Section::Optimizer => &mut manifest.optimizer,
            };
            entries.insert(tensor.name.clone(), entry);
            counter.add(tensor.bytes());
        }
        for file in files.into_iter().flatten() {
            file.finish(&mut manifest)?;
        }
    }
    let path = format!("{staged}/{MANIFEST}");
    io.save(&path, &manifest.encode(&io.location(&path))?)?;
    Ok(manifest.files.len())
}

/// Returns the index of an element in the flat values.
///
/// If candle does not support the dtype, the values are bytes, and the index is the element's first
/// byte.
fn at(tensor: &TensorMeta, element: usize) -> Result<usize> {
    let bits = element * tensor.dtype.bitsize();
    if loadable_dtype(tensor.dtype).is_some() {
        return Ok(element);
    }
    if !bits.is_multiple_of(8) {
        return Err(Error::other(format!(
            "tensor `{}`: a shard would begin within a byte of its dtype {}; write one shard, or a full checkpoint",
            tensor.name, tensor.dtype
        )));
    }
    Ok(bits / 8)
}

/// Creates a file for every shard that has a part of any tensor.
fn create<'a>(
    io: &'a dyn CheckpointIO,
    staged: &str,
    shards: usize,
    part: &OutputSection<'_>,
    order: &[usize],
) -> Result<Vec<Option<TensorFile<'a>>>> {
    (0..shards)
        .map(|shard| {
            let slot = |tensor: &TensorMeta| TensorSlot {
                name: tensor.name.clone(),
                dtype: tensor.dtype,
                region: piece(&tensor.shape, shards, shard),
            };
            let slots = order.iter().map(|&i| slot(&part.tensors[i]));
            let slots: Vec<TensorSlot> = slots.filter(|slot| !slot.region.is_empty()).collect();
            if slots.is_empty() {
                return Ok(None);
            }
            let file = format!("{}/{}", part.section.name(), file_name(shard));
            TensorFile::create(io, format!("{staged}/{file}"), file, slots, FileKind::Shard)
                .map(Some)
        })
        .collect()
}

fn spec(shape: &[usize], shards: usize) -> ShardSpec {
    let placement = if shape.is_empty() { Placement::Replicate } else { Placement::Shard(0) };
    ShardSpec::new(shape.to_vec()).with_cut(Cut::new(DATA_PARALLEL_SHARD, shards, placement))
}

/// Returns the region of a tensor in a shard.
fn piece(shape: &[usize], shards: usize, shard: usize) -> Region {
    spec(shape, shards).owned_region(|_| shard)
}
