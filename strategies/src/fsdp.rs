//! `strategy = "fsdp"`: parameters, gradients and optimizer state are sharded, and units gathered to
//! compute.

use fulgurite_config::{Scalar, deserialize_scalar, plugin};
use fulgurite_engine::module::Reshard;
use fulgurite_engine::strategy::{BuildContext, ParallelizeConfig, Strategy, StrategyConfig};
use fulgurite_error::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::mesh_strategy::{AccumulationSync, GradientSettings, MeshStrategy, Settings, Sharding};
use crate::mixed_precision::MixedPrecisionPolicy;
use crate::schedule::fsdp::Prefetch;

/// What is kept of a unit's parameters between its forward and its backward.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ReshardAfterForward {
    /// As [`Always`](Self::Always): units are freed. The root unit never is, it would be gathered
    /// again at once (FSDP2's `None`).
    #[default]
    Auto,
    /// Units are freed after forward and gathered again before backward: least memory.
    Always,
    /// Units stay gathered until their backward is done: saves one all-gather a unit.
    Never,
    /// As [`Always`](Self::Always) for all units but the last one, in the order in which they are built:
    /// its backward comes next after its forward.
    AllButLast,
    /// Of each unit a part stays, over so many neighbouring ranks: see [`Reshard::Ranks`].
    Ranks(usize),
}

impl ReshardAfterForward {
    /// What is kept of all units but the last, and of that.
    pub(crate) fn units(self) -> [Reshard; 2] {
        match self {
            Self::Auto | Self::Always => [Reshard::Always; 2],
            Self::Never => [Reshard::Never; 2],
            Self::AllButLast => [Reshard::Always, Reshard::Never],
            Self::Ranks(ranks) => [Reshard::Ranks(ranks); 2],
        }
    }
}

impl Serialize for ReshardAfterForward {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => serializer.serialize_str("auto"),
            Self::Always => serializer.serialize_bool(true),
            Self::Never => serializer.serialize_bool(false),
            Self::AllButLast => serializer.serialize_str("all_but_last"),
            Self::Ranks(ranks) => serializer.serialize_u64(*ranks as u64),
        }
    }
}

impl<'de> Deserialize<'de> for ReshardAfterForward {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        const EXPECTED: &str = "true, false, \"auto\", \"all_but_last\" or a number of ranks";
        deserialize_scalar(deserializer, EXPECTED, |value| match value {
            Scalar::Bool(true) => Some(Self::Always),
            Scalar::Bool(false) => Some(Self::Never),
            Scalar::Text(text) if text == "auto" => Some(Self::Auto),
            Scalar::Text(text) if text == "all_but_last" => Some(Self::AllButLast),
            Scalar::Int(ranks @ 1..) => usize::try_from(*ranks).ok().map(Self::Ranks),
            _ => None,
        })
    }
}

/// `strategy = "fsdp"` (or `"fsdp2"`).
#[derive(Debug, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct Fsdp {
    /// Whether a unit's parameters are freed between its forward and its backward: `true` (which is
    /// `"auto"`), `false`, `"all_but_last"`, or the number of ranks over which a part of each is kept.
    pub reshard_after_forward: ReshardAfterForward,
    /// dtypes to gather, compute and reduce in.
    pub mixed_precision: MixedPrecisionPolicy,
    /// How many units ahead parameters are gathered while one computes, or a table of `forward` and
    /// `backward`. Each takes the memory of one gathered unit; 0 overlaps nothing.
    pub prefetch: Prefetch,
    /// Patterns of units: only these are gathered on their own, the others belong to the root unit.
    /// Empty: all.
    pub shard_conditions: Vec<String>,
    /// Allows a model of which no unit is gathered on its own: everything is the root unit, sharded
    /// between steps and whole within one.
    pub allow_root_only: bool,
    /// Whether this rank's shards, their gradients and the optimizer's state are in the host's memory, where the optimizer
    /// updates them; units are brought to the device to compute. It has an effect where the device is not the CPU.
    pub cpu_offload: bool,
    /// Patterns of parameters that data parallelism leaves alone: every rank holds them whole, and
    /// their gradients are not reduced.
    pub ignored: Vec<String>,
    /// What micro-batches before the last of a step communicate: `"none"`, or `"reduce_scatter"` to
    /// hold no unsharded gradients between them.
    pub accumulation_sync: AccumulationSync,
    /// What gradients are divided by before they are summed over ranks, and multiplied with after: a power of two,
    /// so that nothing is rounded. 1 unless given, or what `gradient_compression` wants.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gradient_predivide_factor: Option<f64>,
    /// A parallelize function that decides instead of `shard_conditions`: a name, or a table with
    /// a `type`.
    #[serde(deserialize_with = "plugin::deserialize_option")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parallelize: Option<Box<dyn ParallelizeConfig>>,
}

impl Default for Fsdp {
    fn default() -> Self {
        Self {
            reshard_after_forward: ReshardAfterForward::Auto,
            mixed_precision: MixedPrecisionPolicy::default(),
            prefetch: Prefetch::default(),
            shard_conditions: Vec::new(),
            allow_root_only: false,
            cpu_offload: false,
            ignored: Vec::new(),
            accumulation_sync: AccumulationSync::default(),
            gradient_predivide_factor: None,
            parallelize: None,
        }
    }
}

impl Fsdp {
    fn strategy(&self, name: &'static str) -> Result<Box<dyn Strategy>> {
        if self.parallelize.is_some() && !self.shard_conditions.is_empty() {
            return Err(Error::Config(
                "`trainer.strategy` has both `parallelize` and `shard_conditions`, which decide \
                 the same; keep one"
                    .to_owned(),
            ));
        }
        let sizes = [Some(1), None, Some(1), Some(1)];
        self.mixed_precision.check()?;
        Ok(Box::new(MeshStrategy::new(Settings {
            reshard_after_forward: self.reshard_after_forward,
            mixed_precision: self.mixed_precision.clone(),
            prefetch: self.prefetch,
            shard_conditions: self.shard_conditions.clone(),
            allow_root_only: self.allow_root_only,
            cpu_offload: self.cpu_offload,
            ignored: self.ignored.clone(),
            accumulation_sync: self.accumulation_sync,
            gradients: GradientSettings::new(None, self.gradient_predivide_factor)?,
            parallelize: self.parallelize.as_ref().map(|config| config.build()).transpose()?,
            ..Settings::new(name, sizes, Sharding::Always)
        })))
    }
}

#[typetag::serde(name = "fsdp")]
impl StrategyConfig for Fsdp {
    fn build(&self, _context: &BuildContext) -> Result<Box<dyn Strategy>> {
        self.strategy("fsdp")
    }
}

/// [`Fsdp`] under another name.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
struct Fsdp2(Fsdp);

#[typetag::serde(name = "fsdp2")]
impl StrategyConfig for Fsdp2 {
    fn build(&self, _context: &BuildContext) -> Result<Box<dyn Strategy>> {
        self.0.strategy("fsdp2")
    }
}

fulgurite_config::register_strategy!(
    "fsdp",
    Fsdp,
    "parameters, gradients and optimizer state are sharded; units are gathered to compute",
    "{ type = \"fsdp\", reshard_after_forward = true }"
);
fulgurite_config::register_strategy!("fsdp2", Fsdp2, "another name of fsdp", "\"fsdp2\"");
