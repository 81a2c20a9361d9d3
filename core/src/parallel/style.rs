//! What a plan may do to a layer, under PyTorch's names.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::Layout;
use crate::{Error, Result};

/// A linear layer whose outputs, or an embedding whose columns, are cut over the ranks (PyTorch's
/// `ColwiseParallel`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Colwise {
    /// Layout of what comes in: `replicate`, or `shard(1)` for a part of the sequence, which is then
    /// gathered.
    pub input: Layout,
    /// Layout of what goes out: `shard(-1)`, or `replicate`, to which it is then gathered.
    pub output: Layout,
    /// For an output head with `output = "replicate"`: under a trainer's or Fabric's
    /// [forward scope](crate::module::ForwardScope) the logits stay cut, and
    /// [`cross_entropy`](crate::nn::cross_entropy) works on the parts. It knows them by their last
    /// dimension: in such a step, other logits must not be as wide as a rank's part.
    pub loss_parallel: bool,
}

impl Default for Colwise {
    fn default() -> Self {
        Self { input: Layout::Replicate, output: Layout::LAST, loss_parallel: false }
    }
}

/// A linear layer whose inputs, or an embedding whose rows, are cut over the ranks (PyTorch's
/// `RowwiseParallel`). A bias is added once, after the reduction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Rowwise {
    /// Layout of what comes in: `shard(-1)`, or `replicate`, of which each rank then takes its part.
    /// An embedding takes ids, which are replicated; it ignores this.
    pub input: Layout,
    /// Layout of what goes out: `replicate` by an all-reduce, or `shard(1)`, a part of the sequence,
    /// by a reduce-scatter.
    pub output: Layout,
}

impl Default for Rowwise {
    fn default() -> Self {
        Self { input: Layout::LAST, output: Layout::Replicate }
    }
}

/// A norm or dropout that computes on this rank's part of the sequence (PyTorch's
/// `SequenceParallel`). Its parameters are replicated, and their gradients summed over the ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SequenceParallel {}

/// A layer whose input comes in one layout and is computed in another (PyTorch's
/// `PrepareModuleInput`). On an attention or MLP block it spares its projections one gather each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrepareModuleInput {
    /// Layout of what comes in.
    pub input: Layout,
    /// Layout that the layer computes in.
    pub desired: Layout,
}

/// A layer whose output is given in another layout than it is computed in (PyTorch's
/// `PrepareModuleOutput`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrepareModuleOutput {
    /// Layout of what the layer computes.
    pub output: Layout,
    /// Layout of what goes out.
    pub desired: Layout,
}

/// What a plan does to a layer.
///
/// In configuration files a name that Hugging Face's plans have (`"colwise"`, `"rowwise"`,
/// `"colwise_rep"`, `"rowwise_rep"`, `"sequence_parallel"`, `"replicated_with_grad_allreduce"`), or a
/// table: `{ type = "rowwise", output = "shard(1)" }`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ParallelStyle {
    /// See [`Colwise`].
    Colwise(Colwise),
    /// See [`Rowwise`].
    Rowwise(Rowwise),
    /// See [`SequenceParallel`].
    SequenceParallel(SequenceParallel),
    /// See [`PrepareModuleInput`].
    PrepareModuleInput(PrepareModuleInput),
    /// See [`PrepareModuleOutput`].
    PrepareModuleOutput(PrepareModuleOutput),
    /// Parameters that are replicated and whose gradient on each rank is a summand, because the
    /// ranks use them on different parts of an activation.
    ReplicatedWithGradAllreduce,
}

impl ParallelStyle {
    /// The names that [`FromStr`] knows.
    pub const NAMES: [&'static str; 6] = [
        "colwise",
        "rowwise",
        "colwise_rep",
        "rowwise_rep",
        "sequence_parallel",
        "replicated_with_grad_allreduce",
    ];
}

impl FromStr for ParallelStyle {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Ok(match name {
            "colwise" => Colwise::default().into(),
            "rowwise" => Rowwise::default().into(),
            "colwise_rep" => Colwise { output: Layout::Replicate, ..Colwise::default() }.into(),
            "rowwise_rep" => Rowwise { input: Layout::Replicate, ..Rowwise::default() }.into(),
            "sequence_parallel" => SequenceParallel {}.into(),
            "replicated_with_grad_allreduce" => Self::ReplicatedWithGradAllreduce,
            _ => {
                return Err(Error::Config(format!(
                    "`{name}` is not a parallel style; expected one of {}, or a table with a `type`",
                    Self::NAMES.join(", ")
                )));
            }
        })
    }
}

impl From<Colwise> for ParallelStyle {
    fn from(style: Colwise) -> Self {
        Self::Colwise(style)
    }
}

impl From<Rowwise> for ParallelStyle {
    fn from(style: Rowwise) -> Self {
        Self::Rowwise(style)
    }
}

impl From<SequenceParallel> for ParallelStyle {
    fn from(style: SequenceParallel) -> Self {
        Self::SequenceParallel(style)
    }
}

impl From<PrepareModuleInput> for ParallelStyle {
    fn from(style: PrepareModuleInput) -> Self {
        Self::PrepareModuleInput(style)
    }
}

impl From<PrepareModuleOutput> for ParallelStyle {
    fn from(style: PrepareModuleOutput) -> Self {
        Self::PrepareModuleOutput(style)
    }
}

/// The table form.
#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Table {
    Colwise(Colwise),
    Rowwise(Rowwise),
    SequenceParallel(SequenceParallel),
    PrepareModuleInput(PrepareModuleInput),
    PrepareModuleOutput(PrepareModuleOutput),
    ReplicatedWithGradAllreduce,
}

impl<'de> Deserialize<'de> for ParallelStyle {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = ParallelStyle;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, "one of {}, or a table with a `type`", ParallelStyle::NAMES.join(", "))
            }

            fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<Self::Value, E> {
                name.parse().map_err(E::custom)
            }

            fn visit_map<A: serde::de::MapAccess<'de>>(
                self,
                map: A,
            ) -> Result<Self::Value, A::Error> {
                let table = Table::deserialize(serde::de::value::MapAccessDeserializer::new(map))?;
                Ok(match table {
                    Table::Colwise(style) => style.into(),
                    Table::Rowwise(style) => style.into(),
                    Table::SequenceParallel(style) => style.into(),
                    Table::PrepareModuleInput(style) => style.into(),
                    Table::PrepareModuleOutput(style) => style.into(),
                    Table::ReplicatedWithGradAllreduce => {
                        ParallelStyle::ReplicatedWithGradAllreduce
                    }
                })
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}
