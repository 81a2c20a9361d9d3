//! The strategy `model_parallel`: any mesh of pipeline stages, replicas, shards, context and tensor
//! parallelism.

mod sizes;

use fulgurite_config::plugin;
use fulgurite_engine::mesh::DeviceMesh;
use fulgurite_engine::strategy::{
    BuildContext, GradientCompressionConfig, ParallelizeConfig, Strategy, StrategyConfig,
};
use fulgurite_error::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::ReshardAfterForward;
use crate::mesh_strategy::{
    AccumulationSync, GradientSettings, MeshStrategy, PipelineSettings, PipelineUnits,
    ScheduleSource, Settings, Sharding, check_expert_parallel_size,
};
use crate::mixed_precision::MixedPrecisionPolicy;
use crate::parallelize::LlamaPlan;
use crate::schedule::fsdp::Prefetch;
pub use sizes::Size;
use sizes::Sizes;

/// `strategy = "model_parallel"` (like PyTorch Lightning's `ModelParallelStrategy`, with more
/// dimensions).
///
/// Ranks form a grid of `pipeline_parallel` × `data_parallel_replicate` × `data_parallel_shard` ×
/// `context_parallel` × `tensor_parallel`. The last dimension is the fastest, so tensor-parallel
/// ranks are neighbours.
///
/// By default pipeline, replicate and context have size 1, and data and tensor parallelism are
/// `"auto"`. If both are `"auto"` under a pipeline, its stages are sharded over the remaining
/// ranks. If both are `"auto"` without one, the sizes are Lightning's: one data-parallel rank per
/// host (`trainer.num_nodes`), and the ranks of a host share each layer. Otherwise `"auto"` means
/// the same as `"rest"`: the remaining ranks. If several sizes are open, the one with `"rest"`
/// takes the remaining ranks, else the first of shard, replicate, context and tensor. The other
/// open sizes are 1.
#[derive(Debug, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct ModelParallel {
    /// Number of ranks with different data (Lightning's name): replicas times shards; `"auto"` or a
    /// number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_parallel_size: Option<Size>,
    /// Number of replicas of the shards; by default 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_parallel_replicate_size: Option<Size>,
    /// Number of ranks that parameters are sharded over, `"auto"` or `"rest"`; by default `"auto"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_parallel_shard_size: Option<Size>,
    /// Number of ranks that share each sequence (and also shard parameters); by default 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context_parallel_size: Option<Size>,
    /// Number of ranks that share each layer, `"auto"` or `"rest"`; by default `"auto"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tensor_parallel_size: Option<Size>,
    /// Number of ranks with different experts, by default one. It divides the number of ranks that
    /// share parameters (shards times context). Rows go to the ranks of their experts and come
    /// back.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expert_parallel_size: Option<usize>,
    /// Number of ranks with stages of the model of their own, which see the same data; by default
    /// one. The micro-batches of a step pass through the stages one behind the other, so
    /// `trainer.accumulate_grad_batches` should be several times as large.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pipeline_parallel_size: Option<usize>,
    /// Order of the stages' forwards and backwards: `"gpipe"`, `"1f1b"`, `"interleaved_1f1b"`,
    /// `"zb_h1"`, `"zb_v"`, `"dual_pipe_v"`, or a file of lists that ends in `.csv`; by default
    /// `"1f1b"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pipeline_schedule: Option<String>,
    /// Number of stages of each rank; by default as few as the schedule has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pipeline_stages_per_rank: Option<usize>,
    /// Number of the model's units (layers) in each stage, or `"balanced"` for stages of about
    /// equal work, with the head's; by default about even, with one less in the first and the last
    /// stage.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pipeline_units: Option<PipelineUnits>,
    /// The tensor-parallel plan: a name, or a table with a `type`. By default `"llama"` if
    /// `tensor_parallel_size` is above 1.
    #[serde(deserialize_with = "plugin::deserialize_option")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parallelize: Option<Box<dyn ParallelizeConfig>>,
    /// Whether a unit's parameters are freed between its forward and its backward: `true` (same as
    /// `"auto"`), `false`, `"all_but_last"`, or the number of ranks over which parts are kept.
    #[default(ReshardAfterForward::Auto)]
    pub reshard_after_forward: ReshardAfterForward,
    /// dtypes to gather, compute and reduce in.
    pub mixed_precision: MixedPrecisionPolicy,
    /// Number of units whose parameters are gathered ahead of the computing unit, or a table of
    /// `forward` and `backward`.
    pub prefetch: Prefetch,
    /// Allows a model in which no unit is gathered on its own.
    pub allow_root_only: bool,
    /// Whether shards, gradients and optimizer state stay in host memory, where the optimizer runs;
    /// units move to the device to compute. Has no effect if the device is the CPU.
    pub cpu_offload: bool,
    /// Patterns of parameters excluded from data parallelism: every rank holds them whole, and
    /// their gradients are not reduced.
    pub ignored: Vec<String>,
    /// Communication of all micro-batches before a step's last: `"none"`, `"reduce_scatter"` or
    /// `"all"`.
    pub accumulation_sync: AccumulationSync,
    /// Compression of gradients when they are summed over replicas: `"bf16"`, `"fp16"`, a plugin's
    /// name, or a table with a `type`. By default gradients are not compressed.
    #[serde(deserialize_with = "plugin::deserialize_option")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gradient_compression: Option<Box<dyn GradientCompressionConfig>>,
    /// Divisor of gradients before they are summed over ranks; the sum is multiplied by it. A power
    /// of two, so that the division does not round. By default 1, or the compression's choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gradient_predivide_factor: Option<f64>,
    /// Whether checkpoints are distributed, with each rank writing its own part (`true`), or full
    /// in Hugging Face's layout, gathered on rank 0 tensor by tensor (`false`). A run resumes from
    /// either.
    #[default(true)]
    pub save_distributed_checkpoint: bool,
    /// How long a rank waits for the others in a collective; overrides `trainer.timeout_secs`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_secs: Option<u64>,
}

impl ModelParallel {
    fn strategy(
        &self,
        name: &'static str,
        defaults: Sizes,
        context: &BuildContext,
    ) -> Result<Box<dyn Strategy>> {
        let pipeline = self.pipeline()?;
        let stages = pipeline.as_ref().map_or(1, |pipeline| pipeline.ranks);
        if !context.world_size.is_multiple_of(stages) {
            return Err(Error::Mesh(format!(
                "`pipeline_parallel_size` = {stages} does not divide the world size ({}); change it, or \
                 `trainer.devices` × `trainer.num_nodes`",
                context.world_size
            )));
        }
        let of_stage = BuildContext::new(context.world_size / stages).on_nodes(context.num_nodes);
        let sizes = match &pipeline {
            None => defaults.given(self)?.resolve(&of_stage)?,
            Some(_) => defaults.given(self)?.of_stages().resolve(&of_stage)?,
        };
        let expert_parallel_size = self.expert_parallel_size.unwrap_or(1);
        // Reports wrong sizes before any rank is started.
        if context.world_size > 0 {
            let [replicate, shard, cp, tp] = sizes;
            let layout = DeviceMesh::layout_for(of_stage.world_size, replicate, shard, cp, tp);
            let layout = layout.map_err(|error| match (error, self.data_parallel_size) {
                (Error::Mesh(message), Some(_)) => Error::Mesh(format!(
                    "{message}. `data_parallel_size` is `data_parallel_replicate_size` times \
                     `data_parallel_shard_size`"
                )),
                (error, _) => error,
            })?;
            let shard_and_context = &layout.sizes()[1..3];
            let sharing = shard_and_context.iter().product();
            check_expert_parallel_size(expert_parallel_size, sharing)?;
        }
        self.mixed_precision.check()?;
        let reshard_after_forward = match self.reshard_after_forward {
            // As torchtitan: gathered once a step, not once a micro-batch.
            ReshardAfterForward::Auto if pipeline.is_some() => ReshardAfterForward::Never,
            chosen => chosen,
        };
        Ok(Box::new(MeshStrategy::new(Settings {
            reshard_after_forward,
            pipeline,
            expert_parallel_size,
            mixed_precision: self.mixed_precision.clone(),
            prefetch: self.prefetch,
            allow_root_only: self.allow_root_only,
            cpu_offload: self.cpu_offload,
            ignored: self.ignored.clone(),
            accumulation_sync: self.accumulation_sync,
            gradients: GradientSettings::new(
                self.gradient_compression.as_deref(),
                self.gradient_predivide_factor,
            )?,
            save_distributed_checkpoint: self.save_distributed_checkpoint,
            parallelize: self.parallelize.as_ref().map(|config| config.build()).transpose()?,
            default_parallelize: Some(LlamaPlan::default().build()?),
            ..Settings::new(name, sizes, Sharding::WhereUseful)
        })))
    }
}

impl ModelParallel {
    /// The pipeline; `None` if every rank computes the whole model.
    fn pipeline(&self) -> Result<Option<PipelineSettings>> {
        let ranks = self.pipeline_parallel_size.unwrap_or(1);
        let given = [
            ("pipeline_schedule", self.pipeline_schedule.is_some()),
            ("pipeline_stages_per_rank", self.pipeline_stages_per_rank.is_some()),
            ("pipeline_units", self.pipeline_units.is_some()),
        ];
        match (ranks, given.iter().find(|(_, is_given)| *is_given)) {
            (0, _) => Err(Error::Config(
                "`trainer.strategy.pipeline_parallel_size` = 0; expected at least 1, which is no pipeline".to_owned(),
            )),
            (1, Some((key, _))) => Err(Error::Config(format!(
                "`trainer.strategy.{key}` is about a pipeline, and there is none: set \
                 `trainer.strategy.pipeline_parallel_size` to 2 or more, or leave the key out"
            ))),
            (1, None) => Ok(None),
            _ => {
                let schedule = self.pipeline_schedule.as_deref().unwrap_or("1f1b");
                let source = ScheduleSource::new(schedule, self.pipeline_stages_per_rank, ranks)?;
                Ok(Some(PipelineSettings { ranks, source, units: self.pipeline_units.clone() }))
            }
        }
    }
}

#[typetag::serde(name = "model_parallel")]
impl StrategyConfig for ModelParallel {
    fn build(&self, context: &BuildContext) -> Result<Box<dyn Strategy>> {
        self.strategy("model_parallel", Sizes::AUTO, context)
    }

    fn timeout_secs(&self) -> Option<u64> {
        self.timeout_secs
    }
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
                let defaults: fn(&ModelParallel) -> Result<Sizes> = $defaults;
                self.0.strategy($name, defaults(&self.0)?, context)
            }

            fn timeout_secs(&self) -> Option<u64> {
                self.0.timeout_secs
            }
        }

        fulgurite_config::register_strategy!($name, $type, $doc, $example);
    };
}

fulgurite_config::register_strategy!(
    "model_parallel",
    ModelParallel,
    "any mesh of pipeline stages, replicas, shards, context and tensor parallelism",
    "{ type = \"model_parallel\", tensor_parallel_size = 2, parallelize = \"llama\" }"
);

alias!(
    Hsdp,
    "hsdp",
    "model_parallel with replicas of shards: gradients are reduce-scattered, then all-reduced",
    "{ type = \"hsdp\", data_parallel_replicate_size = 2 }",
    |config| {
        let given = |size: Option<Size>| matches!(size, Some(Size::Ranks(_)));
        if !given(config.data_parallel_replicate_size) && !given(config.data_parallel_shard_size) {
            return Err(Error::Config(
                "strategy `hsdp` needs `data_parallel_replicate_size` (the number of replicas, for \
                 instance of hosts) or `data_parallel_shard_size` (of ranks that share one)"
                    .to_owned(),
            ));
        }
        Ok(Sizes {
            replicate: Size::Rest,
            shard: Size::Rest,
            tensor: Size::Ranks(1),
            ..Sizes::AUTO
        })
    }
);

alias!(
    Tp,
    "tp",
    "model_parallel with all ranks tensor-parallel",
    "{ type = \"tp\", parallelize = \"llama\" }",
    |_| Ok(Sizes { shard: Size::Ranks(1), ..Sizes::AUTO })
);

alias!(
    FsdpTp,
    "fsdp_tp",
    "model_parallel with tensor parallelism over 2 ranks, or as many as given, and shards over the others",
    "{ type = \"fsdp_tp\", tensor_parallel_size = 2, parallelize = \"llama\" }",
    |_| Ok(Sizes { tensor: Size::Ranks(2), ..Sizes::AUTO })
);
