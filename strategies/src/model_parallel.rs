//! `strategy = "model_parallel"`: any mesh of replicas, shards, context and tensor parallelism.

use fulgurite_core::config::{Scalar, deserialize_scalar, plugin};
use fulgurite_core::mesh::DeviceMesh;
use fulgurite_core::strategy::{BuildContext, ParallelizeConfig, Strategy, StrategyConfig};
use fulgurite_core::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::ReshardAfterForward;
use crate::mesh_strategy::{AccumulationSync, MeshStrategy, Settings, Sharding};
use crate::mixed_precision::MixedPrecisionPolicy;
use crate::parallelize::LlamaPlan;

/// The size of a mesh dimension: a number, or `"auto"`, which follows from the world size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Size {
    /// What the other dimensions leave.
    Auto,
    /// A number of ranks.
    Ranks(usize),
}

impl Size {
    fn ranks(self) -> Option<usize> {
        match self {
            Self::Auto => None,
            Self::Ranks(n) => Some(n),
        }
    }
}

impl Serialize for Size {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => serializer.serialize_str("auto"),
            Self::Ranks(n) => serializer.serialize_u64(*n as u64),
        }
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_scalar(deserializer, "a number of ranks or \"auto\"", |value| match value {
            Scalar::Int(ranks) => usize::try_from(*ranks).ok().map(Self::Ranks),
            Scalar::Text(text) if text == "auto" => Some(Self::Auto),
            _ => None,
        })
    }
}

/// `strategy = "model_parallel"` (PyTorch Lightning's `ModelParallelStrategy`, with more
/// dimensions).
///
/// Ranks are a grid of `data_parallel_replicate` × `data_parallel_shard` × `context_parallel` ×
/// `tensor_parallel`; the last is fastest, so that tensor-parallel ranks are neighbours. Sizes that
/// are `"auto"` follow from the world size together: the first of shard, replicate, context and
/// tensor that is open takes what the others leave. Left out, the sizes of shard and tensor are
/// `"auto"`, those of replicate and context 1.
#[derive(Debug, Serialize, Deserialize, fulgurite_core::config::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct ModelParallel {
    /// Number of ranks that see different data (Lightning's name): replicas times shards.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_parallel_size: Option<Size>,
    /// Number of replicas of the shards; 1 unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_parallel_replicate_size: Option<Size>,
    /// Number of ranks that parameters are sharded over; `"auto"` unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_parallel_shard_size: Option<Size>,
    /// Number of ranks that share each sequence (and shard parameters too); 1 unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context_parallel_size: Option<Size>,
    /// Number of ranks that share each layer; `"auto"` unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tensor_parallel_size: Option<Size>,
    /// How the model is cut: a name, or a table with a `type`. Without it, with
    /// `tensor_parallel_size` above 1, `"llama"`.
    #[serde(deserialize_with = "plugin::deserialize_option")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parallelize: Option<Box<dyn ParallelizeConfig>>,
    /// Whether a unit's parameters are freed between its forward and its backward: `true`, `false`
    /// or `"auto"`.
    pub reshard_after_forward: ReshardAfterForward,
    /// dtypes to gather, compute and reduce in.
    pub mixed_precision: MixedPrecisionPolicy,
    /// How many units ahead parameters are gathered while one computes.
    pub prefetch: usize,
    /// Allows a model of which no unit is gathered on its own.
    pub allow_root_only: bool,
    /// What micro-batches before the last of a step communicate: `"none"`, `"reduce_scatter"` or
    /// `"all"`.
    pub accumulation_sync: AccumulationSync,
    /// Whether checkpoints are distributed, each rank writing what it owns (`true`), or full ones in
    /// Hugging Face's layout, gathered on rank 0 tensor by tensor (`false`). A run resumes from
    /// either.
    pub save_distributed_checkpoint: bool,
    /// How long a rank waits for the others in a collective, in place of `trainer.timeout_secs`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_secs: Option<u64>,
}

impl Default for ModelParallel {
    fn default() -> Self {
        Self {
            data_parallel_size: None,
            data_parallel_replicate_size: None,
            data_parallel_shard_size: None,
            context_parallel_size: None,
            tensor_parallel_size: None,
            parallelize: None,
            reshard_after_forward: ReshardAfterForward::Auto,
            mixed_precision: MixedPrecisionPolicy::default(),
            prefetch: 1,
            allow_root_only: false,
            accumulation_sync: AccumulationSync::default(),
            save_distributed_checkpoint: true,
            timeout_secs: None,
        }
    }
}

impl ModelParallel {
    /// The sizes of replicate, shard, context and tensor; `None` where the world size decides.
    fn sizes(&self) -> Result<[Option<usize>; 4]> {
        let or = |size: Option<Size>, default| size.map_or(default, Size::ranks);
        let replicate = or(self.data_parallel_replicate_size, Some(1));
        let context = or(self.context_parallel_size, Some(1));
        let tensor = or(self.tensor_parallel_size, None);
        let shard = match (self.data_parallel_size, self.data_parallel_shard_size) {
            (Some(_), Some(_)) => {
                return Err(Error::Config(
                    "`trainer.strategy` has both `data_parallel_size` and \
                     `data_parallel_shard_size`; keep one: the first is the second times \
                     `data_parallel_replicate_size`"
                        .to_owned(),
                ));
            }
            (None | Some(Size::Auto), shard) => or(shard, None),
            (Some(Size::Ranks(n)), None) => match replicate {
                Some(replicas) if replicas > 0 && n.is_multiple_of(replicas) => Some(n / replicas),
                Some(replicas) => {
                    return Err(Error::Config(format!(
                        "`trainer.strategy.data_parallel_size` = {n} is not divisible by \
                         `data_parallel_replicate_size` = {replicas}"
                    )));
                }
                None => {
                    return Err(Error::Config(
                        "`trainer.strategy.data_parallel_size` and an automatic \
                         `data_parallel_replicate_size` do not say how many ranks shard; give \
                         `data_parallel_shard_size`"
                            .to_owned(),
                    ));
                }
            },
        };
        Ok([replicate, shard, context, tensor])
    }

    fn strategy(
        &self,
        name: &'static str,
        sizes: [Option<usize>; 4],
        context: &BuildContext,
    ) -> Result<Box<dyn Strategy>> {
        // Sizes that do not fit are an error before any rank is started.
        if context.world_size > 0 {
            let [replicate, shard, cp, tp] = sizes;
            let layout = DeviceMesh::layout_for(context.world_size, replicate, shard, cp, tp);
            layout.map_err(|error| match (error, self.data_parallel_size) {
                (Error::Mesh(message), Some(_)) => Error::Mesh(format!(
                    "{message}. `data_parallel_size` is `data_parallel_replicate_size` times \
                     `data_parallel_shard_size`"
                )),
                (error, _) => error,
            })?;
        }
        Ok(Box::new(MeshStrategy::new(Settings {
            reshard_after_forward: self.reshard_after_forward != ReshardAfterForward::Never,
            mixed_precision: self.mixed_precision,
            prefetch: self.prefetch,
            allow_root_only: self.allow_root_only,
            accumulation_sync: self.accumulation_sync,
            save_distributed_checkpoint: self.save_distributed_checkpoint,
            parallelize: self.parallelize.as_ref().map(|config| config.build()).transpose()?,
            default_parallelize: Some(LlamaPlan::default().build()?),
            ..Settings::new(name, sizes, Sharding::WhereUseful)
        })))
    }
}

#[typetag::serde(name = "model_parallel")]
impl StrategyConfig for ModelParallel {
    fn build(&self, context: &BuildContext) -> Result<Box<dyn Strategy>> {
        self.strategy("model_parallel", self.sizes()?, context)
    }

    fn timeout_secs(&self) -> Option<u64> {
        self.timeout_secs
    }
}

/// `size` if the configuration gives it, also as `"auto"`; otherwise `default`.
fn unless_given(said: Option<Size>, size: Option<usize>, default: usize) -> Option<usize> {
    if said.is_some() { size } else { size.or(Some(default)) }
}

/// Configurations with other defaults for the sizes.
macro_rules! alias {
    ($type:ident, $name:literal, $doc:literal, $example:literal, $defaults:expr) => {
        #[doc = $doc]
        #[derive(Debug, Default, Serialize, Deserialize)]
        #[serde(transparent)]
        struct $type(ModelParallel);

        #[typetag::serde(name = $name)]
        impl StrategyConfig for $type {
            fn build(&self, context: &BuildContext) -> Result<Box<dyn Strategy>> {
                let defaults: fn(&ModelParallel) -> Result<[Option<usize>; 4]> = $defaults;
                self.0.strategy($name, defaults(&self.0)?, context)
            }

            fn timeout_secs(&self) -> Option<u64> {
                self.0.timeout_secs
            }
        }

        fulgurite_core::register_strategy!($name, $type, $doc, $example);
    };
}

fulgurite_core::register_strategy!(
    "model_parallel",
    ModelParallel,
    "any mesh of replicas, shards, context and tensor parallelism",
    "{ type = \"model_parallel\", tensor_parallel_size = 2, parallelize = \"llama\" }"
);

alias!(
    Hsdp,
    "hsdp",
    "model_parallel with replicas of shards: gradients are reduce-scattered, then all-reduced",
    "{ type = \"hsdp\", data_parallel_replicate_size = 2 }",
    |config| {
        let [replicate, shard, context, tensor] = config.sizes()?;
        let given = |size: Option<Size>| matches!(size, Some(Size::Ranks(_)));
        if !given(config.data_parallel_replicate_size) && !given(config.data_parallel_shard_size) {
            return Err(Error::Config(
                "strategy `hsdp` needs `data_parallel_replicate_size` (the number of replicas, for \
                 instance of hosts) or `data_parallel_shard_size` (of ranks that share one)"
                    .to_owned(),
            ));
        }
        let replicate = if given(config.data_parallel_replicate_size) { replicate } else { None };
        Ok([replicate, shard, context, unless_given(config.tensor_parallel_size, tensor, 1)])
    }
);

alias!(
    Tp,
    "tp",
    "model_parallel with all ranks tensor-parallel",
    "{ type = \"tp\", parallelize = \"llama\" }",
    |config| {
        let [replicate, shard, context, tensor] = config.sizes()?;
        Ok([replicate, unless_given(config.data_parallel_shard_size, shard, 1), context, tensor])
    }
);

alias!(
    FsdpTp,
    "fsdp_tp",
    "model_parallel with tensor parallelism over 2 ranks, or as many as given, and shards over the others",
    "{ type = \"fsdp_tp\", tensor_parallel_size = 2, parallelize = \"llama\" }",
    |config| {
        let [replicate, shard, context, tensor] = config.sizes()?;
        Ok([replicate, shard, context, unless_given(config.tensor_parallel_size, tensor, 2)])
    }
);
