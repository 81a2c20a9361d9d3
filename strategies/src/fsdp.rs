//! The strategy `fsdp`: parameters, gradients and optimizer state are sharded, and units are
//! gathered to compute.

use fulgurite_config::{Scalar, deserialize_scalar, plugin};
use fulgurite_engine::module::Reshard;
use fulgurite_engine::strategy::{BuildContext, ParallelizeConfig, Strategy, StrategyConfig};
use fulgurite_error::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::mesh_strategy::{AccumulationSync, GradientSettings, MeshStrategy, Settings, Sharding};
use crate::mixed_precision::MixedPrecisionPolicy;
use crate::schedule::fsdp::Prefetch;

/// The treatment of a unit's parameters between its forward and its backward.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ReshardAfterForward {
    /// Like [`Always`](Self::Always): units are freed. The root unit stays, because it would be
    /// gathered again at once (FSDP2's `None`).
    #[default]
    Auto,
    /// Units are freed after forward and gathered again before backward: least memory.
    Always,
    /// Units stay gathered until their backward is done: saves one all-gather a unit.
    Never,
    /// Like [`Always`](Self::Always), except that the last unit, in build order, stays gathered:
    /// its backward follows its forward.
    AllButLast,
    /// Keeps a part of each unit over this many neighbouring ranks: see [`Reshard::Ranks`].
    Ranks(usize),
}

impl ReshardAfterForward {
    /// The treatment of all units but the last, and of the last.
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
    /// Whether a unit's parameters are freed between its forward and its backward: `true` (same as
    /// `"auto"`), `false`, `"all_but_last"`, or the number of ranks over which parts are kept.
    #[default(ReshardAfterForward::Auto)]
    pub reshard_after_forward: ReshardAfterForward,
    /// dtypes to gather, compute and reduce in.
    pub mixed_precision: MixedPrecisionPolicy,
    /// Number of units whose parameters are gathered ahead of the computing unit, or a table of
    /// `forward` and `backward`. Each takes the memory of one gathered unit; 0 overlaps nothing.
    pub prefetch: Prefetch,
    /// Patterns of units that are gathered on their own; other units belong to the root unit.
    /// Empty: all units.
    pub shard_conditions: Vec<String>,
    /// Allows a model in which no unit is gathered on its own: all parameters belong to the root
    /// unit, sharded between steps and whole within a step.
    pub allow_root_only: bool,
    /// Whether shards, gradients and optimizer state stay in host memory, where the optimizer runs;
    /// units move to the device to compute. Has no effect if the device is the CPU.
    pub cpu_offload: bool,
    /// Patterns of parameters excluded from data parallelism: every rank holds them whole, and
    /// their gradients are not reduced.
    pub ignored: Vec<String>,
    /// Communication of all micro-batches before a step's last: `"none"`, or `"reduce_scatter"` to
    /// hold no unsharded gradients between them.
    pub accumulation_sync: AccumulationSync,
    /// Divisor of gradients before they are summed over ranks; the sum is multiplied by it. A power
    /// of two, so that the division does not round. By default 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gradient_predivide_factor: Option<f64>,
    /// A parallelize function to use instead of `shard_conditions`: a name, or a table with a
    /// `type`.
    #[serde(deserialize_with = "plugin::deserialize_option")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parallelize: Option<Box<dyn ParallelizeConfig>>,
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
