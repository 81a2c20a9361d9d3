//! Parallel styles of layers, under PyTorch's names.

use std::str::FromStr;

use serde::de::value::{MapAccessDeserializer, MapDeserializer};
use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Serialize};

use super::Layout;
use crate::{Error, Result};

/// A linear layer whose outputs, or an embedding whose columns, are sharded over the ranks
/// (PyTorch's `ColwiseParallel`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Colwise {
    /// Layout of the input: `replicate`, or `shard(1)` for a part of the sequence, which is then
    /// gathered.
    pub input: Layout,
    /// Layout of the output: `shard(-1)`, or `replicate`, for which it is gathered.
    pub output: Layout,
    /// For an output head with `output = "replicate"`: under a trainer's or Fabric's
    /// [forward scope](crate::module::ForwardScope) the logits stay sharded, and the cross entropy
    /// works on the parts. It recognises them even if rows were selected or reshaped in between
    /// ([`ShardedLogits`](super::ShardedLogits)). Other code gets this rank's part of the logits;
    /// [`gather`](crate::parallel::collectives::gather) returns the whole.
    pub loss_parallel: bool,
}

impl Default for Colwise {
    fn default() -> Self {
        Self { input: Layout::Replicate, output: Layout::LAST, loss_parallel: false }
    }
}

/// A linear layer whose inputs, or an embedding whose rows, are sharded over the ranks (PyTorch's
/// `RowwiseParallel`). A bias is added once, after the reduction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Rowwise {
    /// Layout of the input: `shard(-1)`, or `replicate`, from which each rank takes its part.
    /// Ignored for embeddings, whose ids are replicated.
    pub input: Layout,
    /// Layout of the output: `replicate` by an all-reduce, or `shard(1)`, a part of the sequence,
    /// by a reduce-scatter.
    pub output: Layout,
}

impl Default for Rowwise {
    fn default() -> Self {
        Self { input: Layout::LAST, output: Layout::Replicate }
    }
}

/// A norm or dropout that computes on this rank's part of the sequence (PyTorch's
/// `SequenceParallel`). Its parameters are replicated, and their gradients are summed over the
/// ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SequenceParallel {
    /// Layout of the input: `shard(1)`, or `replicate`, from which each rank takes its part.
    pub input: Layout,
    /// Layout of the output: `shard(1)`, or `replicate`, for which it is gathered (norms only).
    pub output: Layout,
}

impl Default for SequenceParallel {
    fn default() -> Self {
        Self { input: Layout::SEQUENCE, output: Layout::SEQUENCE }
    }
}

/// A layer whose input is redistributed from one layout to another (PyTorch's
/// `PrepareModuleInput`). On an attention or MLP block it replaces a gather for each projection by
/// one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrepareModuleInput {
    /// Layout of the input.
    pub input: Layout,
    /// Layout in which the layer computes.
    pub desired: Layout,
}

/// A layer whose output is redistributed from one layout to another (PyTorch's
/// `PrepareModuleOutput`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrepareModuleOutput {
    /// Layout that the layer computes.
    pub output: Layout,
    /// Layout of the output.
    pub desired: Layout,
}

/// The parallel style of a layer in a plan.
///
/// In configuration files a name from Hugging Face's plans (`"colwise"`, `"rowwise"`,
/// `"colwise_rep"`, `"rowwise_rep"`, `"sequence_parallel"`, `"replicated_with_grad_allreduce"`) or
/// a table. A table's `type` is one of these, `"prepare_module_input"` or
/// `"prepare_module_output"`: `{ type = "rowwise", output = "shard(1)" }`.
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
    /// Replicated parameters with partial gradients, because the ranks use them on different parts
    /// of an activation. Whole activations are an error.
    ReplicatedWithGradAllreduce,
}

impl ParallelStyle {
    /// The names accepted by [`FromStr`].
    pub const NAMES: [&'static str; 9] = [
        "colwise",
        "rowwise",
        "colwise_rep",
        "rowwise_rep",
        // Their names in transformers 5.
        "colwise_gather_output",
        "rowwise_split_input",
        "embedding_rowwise",
        "sequence_parallel",
        "replicated_with_grad_allreduce",
    ];

    /// The style's name, as in a table's `type`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Colwise(_) => "colwise",
            Self::Rowwise(_) => "rowwise",
            Self::SequenceParallel(_) => "sequence_parallel",
            Self::PrepareModuleInput(_) => "prepare_module_input",
            Self::PrepareModuleOutput(_) => "prepare_module_output",
            Self::ReplicatedWithGradAllreduce => "replicated_with_grad_allreduce",
        }
    }
}

impl FromStr for ParallelStyle {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Ok(match name {
            "colwise" => Colwise::default().into(),
            "rowwise" | "embedding_rowwise" => Rowwise::default().into(),
            "colwise_rep" | "colwise_gather_output" => {
                Colwise { output: Layout::Replicate, ..Colwise::default() }.into()
            }
            "rowwise_rep" | "rowwise_split_input" => {
                Rowwise { input: Layout::Replicate, ..Rowwise::default() }.into()
            }
            "sequence_parallel" => SequenceParallel::default().into(),
            "replicated_with_grad_allreduce" => Self::ReplicatedWithGradAllreduce,
            "prepare_module_input" | "prepare_module_output" => {
                let first = name.trim_start_matches("prepare_module_");
                return Err(Error::Config(format!(
                    "{name} needs layouts: write a table, {{ type = \"{name}\", {first} = \
                     \"shard(1)\", desired = \"replicate\" }} for instance"
                )));
            }
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

/// The options of a style without options.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NoKeys {}

impl<'de> Deserialize<'de> for ParallelStyle {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NameOrTable)
    }
}

struct NameOrTable;

impl NameOrTable {
    /// The values of a table's `type`.
    const TYPES: &'static [&'static str] = &[
        "colwise",
        "rowwise",
        "colwise_rep",
        "rowwise_rep",
        "sequence_parallel",
        "prepare_module_input",
        "prepare_module_output",
        "replicated_with_grad_allreduce",
    ];
}

/// The keys of a table of type `colwise_rep`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ColwiseRep {
    #[serde(default = "replicate")]
    input: Layout,
    #[serde(default)]
    loss_parallel: bool,
}

/// The keys of a table of type `rowwise_rep`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RowwiseRep {
    #[serde(default = "replicate")]
    output: Layout,
}

fn replicate() -> Layout {
    Layout::Replicate
}

impl<'de> Visitor<'de> for NameOrTable {
    type Value = ParallelStyle;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "one of {}, or a table with a `type`", ParallelStyle::NAMES.join(", "))
    }

    fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<ParallelStyle, E> {
        name.parse().map_err(E::custom)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ParallelStyle, A::Error> {
        match map.next_key::<String>()?.as_deref() {
            Some("type") => {
                let name = map.next_value::<TypeName>()?.0;
                table(name, map)
            }
            None => Err(untyped()),
            // The configuration's deserializer puts the type first. Others keep the order of the
            // text.
            Some(first) => {
                let mut rest = toml::Table::from_iter([(first.to_owned(), map.next_value()?)]);
                while let Some((key, value)) = map.next_entry()? {
                    rest.insert(key, value);
                }
                let name = rest.remove("type").ok_or_else(untyped)?;
                // Only the message: a position in this intermediate table is meaningless.
                let outside = |error: toml::de::Error| A::Error::custom(error.message());
                let name = TypeName::deserialize(name).map_err(outside)?.0;
                table(name, MapDeserializer::new(rest.into_iter())).map_err(outside)
            }
        }
    }
}

/// The error of a table without a `type`. It may be a pattern without quotes, which is read as
/// nested tables.
fn untyped<E: serde::de::Error>() -> E {
    E::custom(
        "a style that is a table needs a `type`; if this is the first part of a pattern, put the \
         whole pattern in quotes: \"layers.*.mlp.up_proj\"",
    )
}

/// A value of `type`.
struct TypeName(&'static str);

impl<'de> Deserialize<'de> for TypeName {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        let known = NameOrTable::TYPES.iter().find(|known| **known == name);
        let unknown = || D::Error::unknown_variant(&name, NameOrTable::TYPES);
        known.map(|known| Self(known)).ok_or_else(unknown)
    }
}

/// Makes the style of this type from the table's other keys.
fn table<'de, A: MapAccess<'de>>(name: &str, keys: A) -> Result<ParallelStyle, A::Error> {
    let keys = MapAccessDeserializer::new(keys);
    Ok(match name {
        "colwise" => Colwise::deserialize(keys)?.into(),
        "rowwise" => Rowwise::deserialize(keys)?.into(),
        "colwise_rep" => {
            let ColwiseRep { input, loss_parallel } = ColwiseRep::deserialize(keys)?;
            Colwise { input, output: Layout::Replicate, loss_parallel }.into()
        }
        "rowwise_rep" => {
            let RowwiseRep { output } = RowwiseRep::deserialize(keys)?;
            Rowwise { input: Layout::Replicate, output }.into()
        }
        "sequence_parallel" => SequenceParallel::deserialize(keys)?.into(),
        "prepare_module_input" => PrepareModuleInput::deserialize(keys)?.into(),
        "prepare_module_output" => PrepareModuleOutput::deserialize(keys)?.into(),
        _ => {
            NoKeys::deserialize(keys)?;
            ParallelStyle::ReplicatedWithGradAllreduce
        }
    })
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    fn read<T: serde::de::DeserializeOwned>(json: &str) -> Result<T, String> {
        serde_json::from_str(json).map_err(|error| error.to_string())
    }

    #[test]
    fn layouts_round_trip() {
        for (layout, text) in [
            (Layout::Replicate, "\"replicate\""),
            (Layout::SEQUENCE, "\"shard(1)\""),
            (Layout::LAST, "\"shard(-1)\""),
        ] {
            assert_eq!(serde_json::to_string(&layout).unwrap(), text);
            assert_eq!(read(text), Ok(layout));
        }
        assert_eq!(read("\"shard( 2 )\""), Ok(Layout::Shard(2)));
        for text in ["\"shard()\"", "\"Shard(1)\"", "\"shard(1\"", "\"\"", "1"] {
            assert!(read::<Layout>(text).is_err(), "{text}");
        }
        assert_says!(
            read::<Layout>("\"shard(x)\"").unwrap_err(),
            r#"`shard(x)` is not a layout … "replicate", "shard(1)" … "shard(-1)" …"#
        );
    }

    #[test]
    fn names_and_tables_give_equal_styles() {
        let same = |name: &str, table: &str| {
            let style = read::<ParallelStyle>(&format!("{name:?}")).unwrap();
            assert_eq!(read(table), Ok(style), "{table}");
            assert_eq!(name.parse::<ParallelStyle>().unwrap(), style);
            assert!(name.starts_with(style.name()));
            assert_eq!(read(&serde_json::to_string(&style).unwrap()), Ok(style));
            // As formats other than TOML may write it.
            let plain = format!("{{\"type\": {name:?}}}");
            assert_eq!(read(&plain), Ok(style));
        };
        same("colwise", r#"{"type": "colwise", "input": "replicate", "output": "shard(-1)"}"#);
        same("rowwise", r#"{"output": "replicate", "type": "rowwise"}"#);
        same("colwise_rep", r#"{"type": "colwise", "output": "replicate"}"#);
        same("rowwise_rep", r#"{"type": "rowwise", "input": "replicate"}"#);
        same("sequence_parallel", r#"{"type": "sequence_parallel"}"#);
        let partial = "replicated_with_grad_allreduce";
        same(partial, r#"{"type": "replicated_with_grad_allreduce"}"#);
        // The names of transformers 5.
        let parsed = |name: &str| name.parse::<ParallelStyle>().unwrap();
        assert_eq!(parsed("colwise_gather_output"), parsed("colwise_rep"));
        assert_eq!(parsed("rowwise_split_input"), parsed("rowwise_rep"));
        assert_eq!(parsed("embedding_rowwise"), parsed("rowwise"));
        assert_eq!(ParallelStyle::NAMES.len(), 9);
    }

    #[test]
    fn tables_round_trip() {
        for style in [
            Colwise { input: Layout::SEQUENCE, loss_parallel: true, ..Colwise::default() }.into(),
            Rowwise { output: Layout::SEQUENCE, ..Rowwise::default() }.into(),
            PrepareModuleInput { input: Layout::SEQUENCE, desired: Layout::Replicate }.into(),
            PrepareModuleOutput { output: Layout::Replicate, desired: Layout::SEQUENCE }.into(),
        ] {
            let style: ParallelStyle = style;
            assert_eq!(read(&serde_json::to_string(&style).unwrap()), Ok(style));
        }
        let rep = r#"{"loss_parallel": true, "input": "shard(1)", "type": "colwise_rep"}"#;
        let expected =
            Colwise { input: Layout::SEQUENCE, output: Layout::Replicate, loss_parallel: true };
        assert_eq!(read::<ParallelStyle>(rep), Ok(expected.into()));
    }

    #[test]
    fn invalid_styles_are_explained() {
        let wrong = |json: &str| read::<ParallelStyle>(json).unwrap_err();
        let messages = [
            wrong("\"columnwise\""),
            wrong("\"prepare_module_output\""),
            wrong("[]"),
            wrong("{}"),
            wrong(r#"{"input": "shard(1)"}"#),
            wrong(r#"{"type": "columnwise"}"#),
            wrong(r#"{"type": "rowwise", "inputs": "shard(1)"}"#),
            wrong(r#"{"inputs": "shard(1)", "type": "rowwise"}"#),
            wrong(r#"{"type": "colwise_rep", "output": "shard(-1)"}"#),
            wrong(r#"{"type": "sequence_parallel", "dim": 1}"#),
            wrong(r#"{"type": "prepare_module_input", "input": "shard(1)"}"#),
        ];
        insta::assert_snapshot!(messages.join("\n"), @r#"
          `columnwise` is not a parallel style; expected one of colwise, rowwise, colwise_rep, rowwise_rep, colwise_gather_output, rowwise_split_input, embedding_rowwise, sequence_parallel, replicated_with_grad_allreduce, or a table with a `type` at line 1 column 12
          prepare_module_output needs layouts: write a table, { type = "prepare_module_output", output = "shard(1)", desired = "replicate" } for instance at line 1 column 23
          invalid type: sequence, expected one of colwise, rowwise, colwise_rep, rowwise_rep, colwise_gather_output, rowwise_split_input, embedding_rowwise, sequence_parallel, replicated_with_grad_allreduce, or a table with a `type` at line 1 column 2
          a style that is a table needs a `type`; if this is the first part of a pattern, put the whole pattern in quotes: "layers.*.mlp.up_proj" at line 1 column 2
          a style that is a table needs a `type`; if this is the first part of a pattern, put the whole pattern in quotes: "layers.*.mlp.up_proj" at line 1 column 21
          unknown variant `columnwise`, expected one of `colwise`, `rowwise`, `colwise_rep`, `rowwise_rep`, `sequence_parallel`, `prepare_module_input`, `prepare_module_output`, `replicated_with_grad_allreduce` at line 1 column 22
          unknown field `inputs`, expected `input` or `output` at line 1 column 28
          unknown field `inputs`, expected `input` or `output` at line 1 column 41
          unknown field `output`, expected `input` or `loss_parallel` at line 1 column 32
          unknown field `dim`, expected `input` or `output` at line 1 column 35
          missing field `desired` at line 1 column 53
        "#);
    }
}
