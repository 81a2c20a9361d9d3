//! The adapters of experts: stacks in a model, a layer for each expert in PEFT's files.
//!
//! In a model, `A` and `B` of `mlp.experts.up_proj` are one tensor each, `[experts, ..]`. A file
//! has them for the layers `mlp.experts.0.up_proj`, `mlp.experts.1.up_proj`, …, the paths of
//! experts in released models.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};

use super::super::{TensorInfo, TensorSource};
use super::source::layer_of;
use crate::Result;
use fulgurite_engine::shard::Region;

/// The last segment of the path that a stack is in.
const EXPERTS: &str = "experts";

/// The layer of one expert, for the layer that is a stack: `mlp.experts.3.up_proj`.
pub(super) fn of_expert(stack: &str, expert: usize) -> String {
    match stack.rsplit_once('.') {
        Some((path, name)) => format!("{path}.{expert}.{name}"),
        None => format!("{expert}.{stack}"),
    }
}

/// The stack that the layer of an expert belongs to, and the expert: the reverse of [`of_expert`].
pub(super) fn stack_of(layer: &str) -> Option<(String, usize)> {
    let (path, name) = layer.rsplit_once('.')?;
    let (path, expert) = path.rsplit_once('.')?;
    let is_experts = path.rsplit('.').next() == Some(EXPERTS);
    let expert = is_experts.then(|| expert.parse().ok()).flatten()?;
    Some((format!("{path}.{name}"), expert))
}

/// The names in a file of the tensor of an adapter: one, or one for each expert.
#[derive(Debug)]
pub(super) enum Files {
    One(String),
    Experts(Vec<String>),
}

impl Files {
    /// A name, for messages and for what all have.
    pub(super) fn first(&self) -> &str {
        match self {
            Self::One(name) => name,
            Self::Experts(names) => names.first().map_or("", String::as_str),
        }
    }

    pub(super) fn info(&self, source: &dyn TensorSource) -> Option<TensorInfo> {
        let mut info = source.info(self.first())?;
        if let Self::Experts(names) = self {
            info.shape.insert(0, names.len());
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
            Self::Experts(names) => names,
        };
        let within =
            Region { offsets: region.offsets[1..].to_vec(), sizes: region.sizes[1..].to_vec() };
        let experts = names.iter().skip(region.offsets[0]).take(region.sizes[0]);
        let parts = experts.map(|name| source.read(name, &within, dtype, device));
        Ok(Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, 0)?)
    }
}

/// Joins the tensors of experts to stacks, for layers whose weight is one stack (`is_stack`). They
/// stay apart if one is missing or has another shape.
pub(super) fn joined(
    names: BTreeMap<String, Files>,
    source: &dyn TensorSource,
    is_stack: impl Fn(&str) -> bool,
) -> BTreeMap<String, Files> {
    let mut stacks: BTreeMap<String, BTreeMap<usize, String>> = BTreeMap::new();
    for name in names.keys() {
        if let Some((stack, expert)) = layer_of(name).and_then(stack_of)
            && is_stack(&format!("{stack}.weight"))
        {
            let suffix = name.rfind(".lora_").map_or("", |at| &name[at..]);
            stacks.entry(format!("{stack}{suffix}")).or_default().insert(expert, name.clone());
        }
    }
    let mut names = names;
    for (stack, experts) in stacks {
        let is_whole = experts.keys().copied().eq(0..experts.len());
        let files = experts.values().filter_map(|name| names.get(name));
        let files: Vec<String> = files.map(|files| files.first().to_owned()).collect();
        let shapes = || files.iter().map(|file| source.info(file).map(|info| info.shape));
        if is_whole
            && shapes().all(|shape| shape.is_some() && Some(&shape) == shapes().next().as_ref())
        {
            experts.values().for_each(|name| drop(names.remove(name)));
            names.insert(stack, Files::Experts(files));
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stacks_and_layers_of_experts_name_each_other() {
        let stack = "model.layers.3.mlp.experts.up_proj";
        assert_eq!(of_expert(stack, 12), "model.layers.3.mlp.experts.12.up_proj");
        assert_eq!(stack_of(&of_expert(stack, 12)), Some((stack.to_owned(), 12)));
        for other in ["model.layers.3.up_proj", "experts.up_proj", "experts.one.up_proj", "up_proj"]
        {
            assert_eq!(stack_of(other), None, "{other}");
        }
    }
}
