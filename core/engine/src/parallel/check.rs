//! What is wrong with a plan: all that can be said before a parameter is cut, and on one rank too.

use super::apply::Applying;
use super::block::Block;
use super::{
    Colwise, Layout, ParallelStyle, PrepareModuleInput, PrepareModuleOutput, Rowwise,
    SequenceParallel,
};
use crate::module::ModuleInfo;
use crate::parameter::Parameter;
use crate::{Error, Result};

fn wrong<T>(path: &str, message: String) -> Result<T> {
    Err(Error::Module { path: path.to_owned(), message })
}

impl Applying<'_> {
    /// Checks the whole plan.
    pub(super) fn check(&self) -> Result<()> {
        for (path, style) in &self.styles {
            match self.tree.modules().get(path) {
                Some(info) => check_layer(path, info, style)?,
                None => self.check_foreign(path, style)?,
            }
        }
        for (path, info) in self.tree.modules() {
            if let Some(block) = Block::of(info.kind) {
                self.check_block(path, info, &block)?;
            }
        }
        self.check_tied()
    }

    /// A path that only has parameters of its own, or candle_nn's.
    fn check_foreign(&self, path: &str, style: &ParallelStyle) -> Result<()> {
        if *style == ParallelStyle::ReplicatedWithGradAllreduce {
            return Ok(());
        }
        let style = style.name();
        if self.parameters_of(path).any(Parameter::is_external) {
            return wrong(
                path,
                format!(
                    "is a candle_nn layer, which cannot be {style}: tensor parallelism needs the \
                     layers of `fulgurite::nn`. Leave it out of the plan, where it is replicated, or \
                     build it from `nn`"
                ),
            );
        }
        wrong(
            path,
            format!(
                "has parameters of its own and is no layer of `fulgurite::nn`, so it cannot be \
                 {style}; it takes replicated_with_grad_allreduce"
            ),
        )
    }

    /// The projections of a block must be cut together, and heads must divide.
    fn check_block(&self, path: &str, info: &ModuleInfo, block: &Block) -> Result<()> {
        let style = |name: &str| self.styles.get(&format!("{path}.{name}"));
        if block.names().all(|name| style(name).is_none()) {
            return Ok(());
        }
        let inputs: Option<Vec<&Colwise>> = block
            .inputs
            .iter()
            .map(|name| match style(name) {
                Some(ParallelStyle::Colwise(colwise)) => Some(colwise),
                _ => None,
            })
            .collect();
        let inputs = inputs.filter(|inputs| {
            inputs
                .iter()
                .all(|c| c.input == inputs[0].input && c.output == Layout::LAST && !c.loss_parallel)
        });
        let output = match style(block.output) {
            Some(ParallelStyle::Rowwise(rowwise)) if rowwise.input == Layout::LAST => Some(rowwise),
            _ => None,
        };
        let (Some(inputs), Some(output)) = (inputs, output) else {
            let found: Vec<String> = block
                .names()
                .map(|name| match style(name) {
                    Some(style) => format!("{name} is {}", describe(style)),
                    None => format!("{name} has no style"),
                })
                .collect();
            return wrong(
                path,
                format!(
                    "computes as one: its plan must make {} colwise, with one input layout and \
                     output shard(-1), and {} rowwise, with input shard(-1); here {}",
                    block.inputs.join(", "),
                    block.output,
                    found.join(", ")
                ),
            );
        };
        self.check_prepared(path, inputs[0], output)?;
        if let Some(heads) = info.heads {
            heads.kv_replicas(path, self.group.size())?;
        }
        Ok(())
    }

    /// A block that prepares its input or output does it for projections that expect this.
    fn check_prepared(&self, path: &str, input: &Colwise, output: &Rowwise) -> Result<()> {
        let (what, projections, got, expected) = match self.styles.get(path) {
            Some(ParallelStyle::PrepareModuleInput(prepare)) => {
                ("input", "colwise projections take", input.input, prepare.desired)
            }
            Some(ParallelStyle::PrepareModuleOutput(prepare)) => {
                ("output", "rowwise projection gives", output.output, prepare.output)
            }
            _ => return Ok(()),
        };
        if got == expected {
            return Ok(());
        }
        wrong(
            path,
            format!(
                "prepares its {what} as if it were {expected} within, and its {projections} {got}; \
                 make that {expected}, or leave the block's own style out"
            ),
        )
    }

    /// Layers that share a weight must cut it alike: each computes with the part that is there.
    fn check_tied(&self) -> Result<()> {
        for (alias, first) in self.tree.aliases() {
            let (Some((a, _)), Some((b, _))) = (first.rsplit_once('.'), alias.rsplit_once('.'))
            else {
                continue;
            };
            let uses = [a, b].map(|path| self.weight_use(path));
            if uses[0] == uses[1] {
                continue;
            }
            let said = [a, b].map(|path| match self.styles.get(path) {
                Some(style) => format!("`{path}` is {}", style.name()),
                None => format!("`{path}` has no style"),
            });
            return Err(Error::parameter(
                first,
                format!(
                    "is shared by two layers that the plan does not cut alike: {}; make the \
                     embedding rowwise and the head colwise, which both cut the vocabulary, or leave \
                     both out of the plan",
                    said.join(", ")
                ),
            ));
        }
        Ok(())
    }

    /// What the plan does to the weight of a layer.
    fn weight_use(&self, path: &str) -> WeightUse {
        let embedding = self.tree.modules().get(path).is_some_and(|m| m.kind == "Embedding");
        match self.styles.get(path) {
            Some(ParallelStyle::Colwise(_)) => WeightUse::Cut(usize::from(embedding)),
            Some(ParallelStyle::Rowwise(_)) => WeightUse::Cut(usize::from(!embedding)),
            Some(style) if style.is_partial() => WeightUse::Replicated,
            _ => WeightUse::Untouched,
        }
    }
}

#[derive(PartialEq)]
enum WeightUse {
    Untouched,
    /// Its gradients are summands.
    Replicated,
    /// Along this dimension.
    Cut(usize),
}

/// Whether a layer of this kind can have this style.
fn check_layer(path: &str, info: &ModuleInfo, style: &ParallelStyle) -> Result<()> {
    let kind = info.kind;
    let block = Block::of(kind).is_some();
    let fits = match style {
        ParallelStyle::Colwise(_) | ParallelStyle::Rowwise(_) => {
            matches!(kind, "Linear" | "Embedding")
        }
        ParallelStyle::SequenceParallel(_) => matches!(kind, "RmsNorm" | "LayerNorm" | "Dropout"),
        ParallelStyle::PrepareModuleInput(_) => {
            block || matches!(kind, "RmsNorm" | "LayerNorm" | "Linear" | "Dropout")
        }
        ParallelStyle::PrepareModuleOutput(_) => {
            block || matches!(kind, "RmsNorm" | "LayerNorm" | "Linear")
        }
        ParallelStyle::ReplicatedWithGradAllreduce => !block && kind != "Dropout",
    };
    if !fits {
        let style = style.name();
        let takes = takes(kind);
        return wrong(path, format!("a layer of kind {kind} cannot be {style}; {takes}"));
    }
    check_layouts(path, kind, style)
}

/// Which layouts a style may have on a layer.
fn check_layouts(path: &str, kind: &str, style: &ParallelStyle) -> Result<()> {
    let expect = |what: &str, got: Layout, allowed: &[Layout]| {
        if allowed.contains(&got) {
            return Ok(());
        }
        let allowed: Vec<String> = allowed.iter().map(Layout::to_string).collect();
        let (style, allowed) = (style.name(), allowed.join(" or "));
        wrong(path, format!("{style} with {what} {got} does not exist for {kind}; use {allowed}"))
    };
    let (replicate, sequence, last) = (Layout::Replicate, Layout::SEQUENCE, Layout::LAST);
    let (embedding, block) = (kind == "Embedding", Block::of(kind).is_some());
    match *style {
        ParallelStyle::Colwise(Colwise { input, output, loss_parallel }) => {
            let inputs: &[Layout] = if embedding { &[replicate] } else { &[replicate, sequence] };
            expect("input", input, inputs)?;
            expect("output", output, &[replicate, last])?;
            if loss_parallel && (embedding || output != replicate) {
                return wrong(
                    path,
                    "loss_parallel is for a Linear that gives logits, with output replicate"
                        .to_owned(),
                );
            }
            Ok(())
        }
        ParallelStyle::Rowwise(Rowwise { input, output }) => {
            expect("input", input, &[replicate, last])?;
            expect("output", output, &[replicate, sequence])
        }
        ParallelStyle::PrepareModuleInput(PrepareModuleInput { input, desired }) if block => {
            expect("input", input, &[replicate, sequence])?;
            expect("desired layout", desired, &[replicate])
        }
        ParallelStyle::PrepareModuleOutput(PrepareModuleOutput { output, desired }) if block => {
            expect("output", output, &[replicate])?;
            expect("desired layout", desired, &[replicate, sequence])
        }
        ParallelStyle::PrepareModuleInput(PrepareModuleInput { input, desired }) => {
            expect("input", input, &[replicate, sequence, last])?;
            let dropout = kind == "Dropout";
            // Only dropout computes alike on any part of a row.
            let inside: &[Layout] = match input {
                Layout::LAST if dropout => &[last],
                _ if dropout => &[replicate, sequence, last],
                _ => &[replicate, sequence],
            };
            expect("desired layout", desired, inside)?;
            check_step(path, input, desired)
        }
        ParallelStyle::PrepareModuleOutput(PrepareModuleOutput { output, desired }) => {
            expect("output", output, &[replicate, sequence])?;
            expect("desired layout", desired, &[replicate, sequence])
        }
        ParallelStyle::SequenceParallel(SequenceParallel { input, output }) => {
            let allowed: &[Layout] =
                if kind == "Dropout" { &[sequence] } else { &[sequence, replicate] };
            expect("input", input, allowed)?;
            expect("output", output, allowed)
        }
        ParallelStyle::ReplicatedWithGradAllreduce => Ok(()),
    }
}

/// One move must do, between layouts of an activation.
fn check_step(path: &str, from: Layout, to: Layout) -> Result<()> {
    match (from, to) {
        (Layout::Shard(a), Layout::Shard(b)) if a != b => wrong(
            path,
            format!("cannot go from {from} to {to} in one step; one of them must be replicate"),
        ),
        _ => Ok(()),
    }
}

/// A style with its layouts, for messages.
fn describe(style: &ParallelStyle) -> String {
    match style {
        ParallelStyle::Colwise(Colwise { input, output, .. })
        | ParallelStyle::Rowwise(Rowwise { input, output }) => {
            format!("{} from {input} to {output}", style.name())
        }
        _ => style.name().to_owned(),
    }
}

fn takes(kind: &str) -> &'static str {
    match kind {
        "Linear" => {
            "it takes colwise, rowwise, prepare_module_input, prepare_module_output and \
             replicated_with_grad_allreduce"
        }
        "Embedding" => {
            "it takes rowwise (rows, the vocabulary), colwise and replicated_with_grad_allreduce"
        }
        "RmsNorm" | "LayerNorm" => {
            "it takes sequence_parallel, prepare_module_input, prepare_module_output and \
             replicated_with_grad_allreduce"
        }
        "Dropout" => "it takes sequence_parallel and prepare_module_input",
        "CausalSelfAttention" | "SwiGluMlp" | "GeluMlp" => {
            "it takes prepare_module_input and prepare_module_output; colwise and rowwise are for \
             its projections"
        }
        _ => "it takes replicated_with_grad_allreduce",
    }
}
