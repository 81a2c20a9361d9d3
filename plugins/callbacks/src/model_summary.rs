//! A table of a model's units and rank 0's share of them.

use std::fmt::Write as _;

use fulgurite_engine::module::ModuleTree;
use fulgurite_engine::parameter::Parameter;
use fulgurite_error::Result;
use fulgurite_trainer::trainer::{Callback, CallbackConfig, HookContext, Hooks, Stage};
use serde::{Deserialize, Serialize};

/// Prints a table of the model before training: `{ type = "model_summary", max_units = 40 }`. For
/// each unit it lists the parameters, the trainable ones and the bytes that rank 0 holds. Below the
/// table it lists tied parameters and, if others are sharded, the parameters that rank 0 holds
/// whole. Like Lightning's `ModelSummary`.
#[derive(
    Debug, Clone, PartialEq, Eq, Serialize, Deserialize, fulgurite_config_derive::Documented,
)]
#[serde(deny_unknown_fields, default)]
pub struct ModelSummaryConfig {
    /// Number of units listed individually; the rest share one row.
    #[default(40)]
    pub max_units: usize,
}

#[typetag::serde(name = "model_summary")]
impl CallbackConfig for ModelSummaryConfig {
    fn build(&self) -> Result<Box<dyn Callback>> {
        Ok(Box::new(ModelSummary(self.max_units)))
    }
}

fulgurite_config::register_callback!(
    "model_summary",
    ModelSummaryConfig,
    "Prints the units of the model and what a rank holds of them",
    "{ type = \"model_summary\", max_units = 40 }"
);

struct ModelSummary(usize);

impl Callback for ModelSummary {}

impl Hooks for ModelSummary {
    fn on_fit_start(&mut self, ctx: &mut HookContext) -> Result<()> {
        if ctx.stage == Stage::Fit && ctx.is_global_zero() {
            let text = summary(ctx.fabric().module_tree()?, self.0, ctx.world_size)?;
            ctx.print(text);
        }
        Ok(())
    }
}

/// A row of the table.
#[derive(Debug, Default, Clone, Copy)]
struct Row {
    parameters: usize,
    trainable: usize,
    /// On this rank.
    bytes: usize,
}

impl Row {
    fn of(parameters: &[Parameter]) -> Result<Self> {
        let mut row = Self::default();
        for parameter in parameters {
            row.parameters += parameter.elem_count();
            row.trainable += if parameter.requires_grad() { parameter.elem_count() } else { 0 };
            let values = parameter.local()?.values;
            row.bytes += values.elem_count() * values.dtype().size_in_bytes();
        }
        Ok(row)
    }

    fn plus(self, other: Self) -> Self {
        Self {
            parameters: self.parameters + other.parameters,
            trainable: self.trainable + other.trainable,
            bytes: self.bytes + other.bytes,
        }
    }
}

/// Formats the table and the lists below it. Not collective.
fn summary(tree: &ModuleTree, max_units: usize, ranks: usize) -> Result<String> {
    let mut rows = Vec::new();
    for unit in tree.units() {
        let row = Row::of(&tree.unit_parameters(Some(unit.index())))?;
        rows.push((unit.path().to_owned(), row));
    }
    let of_none = tree.unit_parameters(None);
    if !of_none.is_empty() {
        rows.push(("outside of units".to_owned(), Row::of(&of_none)?));
    }
    let sum =
        |rows: &[(String, Row)]| rows.iter().fold(Row::default(), |sum, (_, row)| sum.plus(*row));
    let total = sum(&rows);
    if rows.len() > max_units.saturating_add(1) {
        let rest = rows.split_off(max_units);
        rows.push((format!("{} more", rest.len()), sum(&rest)));
    }
    rows.push(("all".to_owned(), total));

    let width = rows.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0).max(4);
    let held = if ranks > 1 { "bytes on rank 0" } else { "bytes" };
    let mut text =
        format!("{:width$}  {:>14}  {:>14}  {held:>15}\n", "unit", "parameters", "trainable");
    for (name, Row { parameters, trainable, bytes }) in &rows {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{name:width$}  {parameters:>14}  {trainable:>14}  {bytes:>15}");
    }
    let is_whole =
        |p: &Parameter| -> Result<bool> { Ok(p.local()?.region.elem_count() == p.elem_count()) };
    let mut whole = Vec::new();
    for parameter in tree.parameters() {
        if is_whole(parameter)? {
            whole.push(parameter.fqn());
        }
    }
    if ranks > 1 && whole.len() == tree.parameters().len() {
        text.push_str("every rank holds all of it: the strategy cuts nothing\n");
    } else if ranks > 1 && !whole.is_empty() {
        let few = list(&whole);
        let _ = writeln!(
            text,
            "whole on rank 0, as the strategy's conditions leave them uncut or one part has everything ({}): {few}",
            whole.len()
        );
    }
    let tied: Vec<String> =
        tree.aliases().map(|(alias, fqn)| format!("{alias} is {fqn}")).collect();
    if !tied.is_empty() {
        let tied: Vec<&str> = tied.iter().map(String::as_str).collect();
        let _ = writeln!(text, "tied ({}): {}", tied.len(), list(&tied));
    }
    Ok(text.trim_end().to_owned())
}

/// Joins the first eight names.
fn list(names: &[&str]) -> String {
    let (few, more) = names.split_at(names.len().min(8));
    format!("{}{}", few.join(", "), if more.is_empty() { "" } else { ", …" })
}
