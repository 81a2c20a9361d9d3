//! The adapters of experts: stacks in a model, a layer for each expert in PEFT's files.
//!
//! In a model, `A` and `B` of `mlp.experts.up_proj` are one tensor each, `[experts, ..]`. A file
//! has them for the layers `mlp.experts.0.up_proj`, `mlp.experts.1.up_proj`, …, the paths of
//! experts in released models.

use std::collections::BTreeMap;
use std::ops::Range;

use candle_core::{DType, Device, Tensor};

use super::super::{TensorInfo, TensorSource};
use super::source::layer_of;
use crate::{Error, Result};
use fulgurite_engine::module::expert_stack;
use fulgurite_engine::shard::Region;

/// What an adapter's tensor is in a file: a tensor, rows of one, or a tensor for each expert.
#[derive(Debug)]
pub(super) enum Files {
    One(String),
    Rows(String, Vec<Range<usize>>),
    Experts(Vec<String>),
}

impl Files {
    /// A name, for messages and for what all have.
    pub(super) fn first(&self) -> &str {
        match self {
            Self::One(name) | Self::Rows(name, _) => name,
            Self::Experts(names) => names.first().map_or("", String::as_str),
        }
    }

    /// The number of rows, if it is rows of a tensor; otherwise 0.
    pub(super) fn rows(&self) -> usize {
        match self {
            Self::Rows(_, rows) => rows.iter().map(ExactSizeIterator::len).sum(),
            Self::One(_) | Self::Experts(_) => 0,
        }
    }

    pub(super) fn info(&self, source: &dyn TensorSource) -> Option<TensorInfo> {
        let mut info = source.info(self.first())?;
        match self {
            Self::One(_) => {}
            // Its first dimension was checked.
            Self::Rows(..) => info.shape[0] = self.rows(),
            Self::Experts(names) => info.shape.insert(0, names.len()),
        }
        Some(info)
    }

    pub(super) fn read(
        &self,
        source: &dyn TensorSource,
        region: &Region,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let names = match self {
            Self::One(name) => return source.read(name, region, dtype, device),
            Self::Rows(name, rows) => {
                let parts = regions(rows, region).into_iter();
                let read = |part: Region| source.read(name, &part, dtype, device)?.flatten_all();
                let parts = parts.map(|part| Ok(read(part)?)).collect::<Result<Vec<_>>>()?;
                return joined_parts(&parts, dtype, device);
            }
            Self::Experts(names) => names,
        };
        let within =
            Region { offsets: region.offsets[1..].to_vec(), sizes: region.sizes[1..].to_vec() };
        let experts = names.iter().skip(region.offsets[0]).take(region.sizes[0]);
        let parts = experts.map(|name| source.read(name, &within, dtype, device));
        joined_parts(&parts.collect::<Result<Vec<_>>>()?, dtype, device)
    }
}

fn joined_parts(parts: &[Tensor], dtype: DType, device: &Device) -> Result<Tensor> {
    match parts {
        [] => Ok(Tensor::zeros(0, dtype, device)?),
        parts => Ok(Tensor::cat(parts, 0)?),
    }
}

/// The parts of a file's tensor that are the region of the tensor made of these rows of it.
fn regions(rows: &[Range<usize>], region: &Region) -> Vec<Region> {
    let wanted = region.offsets[0]..region.offsets[0] + region.sizes[0];
    let mut begin = 0;
    let mut parts = Vec::new();
    for range in rows {
        let end = begin + range.len();
        let (first, last) = (wanted.start.max(begin), wanted.end.min(end));
        if first < last {
            let mut part = region.clone();
            part.offsets[0] = range.start + first - begin;
            part.sizes[0] = last - first;
            parts.push(part);
        }
        begin = end;
    }
    parts
}

/// Joins the tensors of experts to stacks, for layers whose weight is one stack (`is_stack`).
///
/// # Errors
/// If an expert lacks a tensor that others have, or has it in another shape.
pub(super) fn joined(
    mut names: BTreeMap<String, Files>,
    source: &dyn TensorSource,
    is_stack: impl Fn(&str) -> bool,
) -> Result<BTreeMap<String, Files>> {
    let mut stacks: BTreeMap<String, BTreeMap<usize, String>> = BTreeMap::new();
    for name in names.keys() {
        if let Some(layer) = layer_of(name)
            && let Some((stack, expert)) = expert_stack(layer)
            && is_stack(&format!("{stack}.weight"))
        {
            let tensor = format!("{stack}{}", &name[layer.len()..]);
            stacks.entry(tensor).or_default().insert(expert, name.clone());
        }
    }
    let fail = |message: String| Err(Error::checkpoint(source.location(), message));
    for (stack, experts) in stacks {
        let mut files = Vec::new();
        for (i, (expert, name)) in experts.iter().enumerate() {
            if i != *expert {
                return fail(format!("has `{name}`, and no such tensor of expert {i}"));
            }
            let Some(file) = names.remove(name) else { continue };
            files.push(file.first().to_owned());
            let shape = |file: &str| source.info(file).map(|info| info.shape);
            let (own, other) = (shape(&files[i]), shape(&files[0]));
            if own != other {
                return fail(format!(
                    "has `{name}` of the shape {own:?}, and of expert 0 it is {other:?}; adapters of all experts need \
                     one shape here",
                    own = own.unwrap_or_default(),
                    other = other.unwrap_or_default()
                ));
            }
        }
        if names.insert(stack.clone(), Files::Experts(files)).is_some() {
            return fail(format!("has `{stack}`, and beside it tensors of each expert"));
        }
    }
    Ok(names)
}
