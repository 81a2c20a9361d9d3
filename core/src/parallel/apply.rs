//! Applying a plan to a module tree.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::layer::SequenceLength;
use super::{Colwise, LayerParallel, Layout, ParallelStyle, Plan, Redistribute, Rowwise};
use crate::collective::ProcessGroup;
use crate::mesh::DeviceMesh;
use crate::module::{ModuleInfo, ModuleTree, glob_match};
use crate::parameter::{LayerCut, Parameter};
use crate::shard::{Cut, Placement, chunk};
use crate::{Error, Result};

/// A layer of several projections that computes as one operation.
struct Fused {
    /// The projections of the input.
    inputs: &'static [&'static str],
    /// The projection to the output.
    output: &'static str,
}

fn fused(kind: &str) -> Option<Fused> {
    Some(match kind {
        "CausalSelfAttention" => {
            Fused { inputs: &["q_proj", "k_proj", "v_proj"], output: "o_proj" }
        }
        "SwiGluMlp" => Fused { inputs: &["gate_proj", "up_proj"], output: "down_proj" },
        "GeluMlp" => Fused { inputs: &["up_proj"], output: "down_proj" },
        _ => return None,
    })
}

impl ModuleTree {
    /// Applies a tensor-parallel plan along `mesh`, a mesh of one dimension
    /// (`mesh.get("tensor_parallel")`), as PyTorch's function of this name. Before
    /// [`fully_shard`](Self::fully_shard), and before any value exists; every rank calls it alike. It
    /// communicates nothing.
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use fulgurite_core::collective::Solo;
    /// use fulgurite_core::mesh::{DeviceMesh, TENSOR_PARALLEL};
    /// use fulgurite_core::module::{ModuleBuilder, ModuleInit};
    /// use fulgurite_core::nn::SwiGluMlp;
    /// use fulgurite_core::parallel::{Colwise, Rowwise};
    /// use fulgurite_core::plan;
    ///
    /// let b = ModuleBuilder::new(ModuleInit::default());
    /// let mlp = SwiGluMlp::new(&b.pp("blocks.0.mlp"), 64, 256)?;
    /// let mut tree = b.finish()?;
    /// let mesh = DeviceMesh::new(DeviceMesh::layout_for(1, None, None, None, None)?,
    ///     Arc::new(Solo::new("world", 0)))?;
    /// tree.parallelize_module(&mesh.get(TENSOR_PARALLEL)?, &plan! {
    ///     "blocks.*.mlp.gate_proj" => Colwise::default(),
    ///     "blocks.*.mlp.up_proj" => Colwise::default(),
    ///     "blocks.*.mlp.down_proj" => Rowwise::default(),
    /// })?;
    /// # Ok::<(), fulgurite_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// If a pattern matches no layer or a layer matches two patterns, a layer cannot take its style,
    /// the projections of an attention or MLP block do not fit together, or heads or a parameter
    /// cannot be cut into as many parts. The message names the layer.
    pub fn parallelize_module(&mut self, mesh: &DeviceMesh, plan: &Plan) -> Result<()> {
        let [dim] = mesh.layout().names() else {
            return Err(Error::Mesh(format!(
                "parallelize_module works along one mesh dimension, got a mesh of {}; take one with \
                 `mesh.get(\"tensor_parallel\")`",
                mesh.layout().names().join(", ")
            )));
        };
        let styles = self.styles(plan)?;
        let group = mesh.world().clone();
        let sequence = SequenceLength::default();
        let applying = Applying { tree: self, dim, group, sequence };
        applying.check(&styles)?;
        if applying.group.size() == 1 {
            return Ok(());
        }
        applying.apply(&styles)
    }

    /// The style of each path that the plan names.
    fn styles(&self, plan: &Plan) -> Result<BTreeMap<String, ParallelStyle>> {
        let mut styles: BTreeMap<String, (String, ParallelStyle)> = BTreeMap::new();
        for entry in plan.entries() {
            let pattern = entry.pattern.as_str();
            let owners = self.parameter_owners();
            let mut matched = false;
            let paths = self.modules().keys().map(String::as_str).chain(owners);
            for path in paths.filter(|path| glob_match(pattern, path)) {
                matched = true;
                match styles.get(path) {
                    Some((earlier, _)) if earlier != pattern => {
                        return Err(Error::Module {
                            path: path.to_owned(),
                            message: format!(
                                "two patterns of the plan match it, `{earlier}` and `{pattern}`; \
                                 keep one"
                            ),
                        });
                    }
                    _ => styles.insert(path.to_owned(), (pattern.to_owned(), entry.style)),
                };
            }
            if !matched {
                return Err(self.no_match(pattern));
            }
        }
        Ok(styles.into_iter().map(|(path, (_, style))| (path, style)).collect())
    }

    /// The paths of modules that have parameters and are no layers of `nn`.
    fn parameter_owners(&self) -> impl Iterator<Item = &str> {
        let owners = self.parameters().iter().filter_map(|p| p.fqn().rsplit_once('.'));
        owners.map(|(path, _)| path).filter(|path| !self.modules().contains_key(*path))
    }

    fn no_match(&self, pattern: &str) -> Error {
        // Patterns differ from model to model mostly in a prefix; the kinds of paths help to see it.
        let mut shapes: Vec<String> = self
            .modules()
            .keys()
            .map(|path| {
                let number = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
                path.split('.')
                    .map(|s| if number(s) { "*" } else { s })
                    .collect::<Vec<_>>()
                    .join(".")
            })
            .collect();
        shapes.sort();
        shapes.dedup();
        Error::Module {
            path: pattern.to_owned(),
            message: format!(
                "no layer matches this pattern of the plan (`*` is one segment); the model's layers \
                 are {}",
                shapes.join(", ")
            ),
        }
    }
}

struct Applying<'a> {
    tree: &'a ModuleTree,
    dim: &'a str,
    group: Arc<dyn ProcessGroup>,
    sequence: SequenceLength,
}

type Styles = BTreeMap<String, ParallelStyle>;

fn wrong<T>(path: &str, message: String) -> Result<T> {
    Err(Error::Module { path: path.to_owned(), message })
}

impl Applying<'_> {
    /// What can be said before anything is cut, and on one rank too.
    fn check(&self, styles: &Styles) -> Result<()> {
        for (path, style) in styles {
            let Some(info) = self.tree.modules().get(path) else {
                self.check_foreign(path, style)?;
                continue;
            };
            let fits = match style {
                ParallelStyle::Colwise(_) | ParallelStyle::Rowwise(_) => {
                    matches!(info.kind, "Linear" | "Embedding")
                }
                ParallelStyle::SequenceParallel(_) => {
                    matches!(info.kind, "RmsNorm" | "LayerNorm" | "Dropout")
                }
                ParallelStyle::PrepareModuleInput(_) | ParallelStyle::PrepareModuleOutput(_) => {
                    fused(info.kind).is_some()
                        || matches!(info.kind, "RmsNorm" | "LayerNorm" | "Linear")
                        || (info.kind == "Dropout"
                            && matches!(style, ParallelStyle::PrepareModuleInput(_)))
                }
                ParallelStyle::ReplicatedWithGradAllreduce => true,
            };
            if !fits {
                return wrong(
                    path,
                    format!(
                        "a layer of kind {} cannot be {}; {}",
                        info.kind,
                        name(style),
                        takes(info.kind)
                    ),
                );
            }
            check_layouts(path, info, style)?;
        }
        for (path, info) in self.tree.modules() {
            if let Some(fused) = fused(info.kind) {
                self.check_fused(path, info, &fused, styles)?;
            }
        }
        Ok(())
    }

    /// A path that only has parameters of its own, or candle_nn's.
    fn check_foreign(&self, path: &str, style: &ParallelStyle) -> Result<()> {
        if *style == ParallelStyle::ReplicatedWithGradAllreduce {
            return Ok(());
        }
        if self.parameters_of(path).any(Parameter::is_external) {
            return wrong(
                path,
                format!(
                    "is a candle_nn layer, which cannot be {}: tensor parallelism needs the layers \
                     of `fulgurite::nn`. Leave it out of the plan, where it is replicated, or build \
                     it from `nn`",
                    name(style)
                ),
            );
        }
        wrong(
            path,
            format!(
                "has parameters of its own and is no layer of `fulgurite::nn`, so it cannot be {}; \
                 it takes replicated_with_grad_allreduce",
                name(style)
            ),
        )
    }

    fn parameters_of<'b>(&'b self, path: &'b str) -> impl Iterator<Item = &'b Parameter> {
        self.tree.parameters().iter().filter(move |p| {
            p.fqn()
                .strip_prefix(path)
                .and_then(|rest| rest.strip_prefix('.'))
                .is_some_and(|name| !name.contains('.'))
        })
    }

    /// The parameter `name` of a module, by any of its names.
    fn parameter(&self, path: &str, name: &str) -> Option<&Parameter> {
        self.tree.parameter(&format!("{path}.{name}"))
    }

    /// The projections of a block must be cut together, and heads must divide.
    fn check_fused(
        &self,
        path: &str,
        info: &ModuleInfo,
        fused: &Fused,
        styles: &Styles,
    ) -> Result<()> {
        let style = |name: &str| styles.get(&format!("{path}.{name}"));
        let all: Vec<&str> = fused.inputs.iter().copied().chain([fused.output]).collect();
        if all.iter().all(|name| style(name).is_none()) {
            return Ok(());
        }
        let inputs: Option<Vec<&Colwise>> = fused
            .inputs
            .iter()
            .map(|name| match style(name) {
                Some(ParallelStyle::Colwise(colwise)) => Some(colwise),
                _ => None,
            })
            .collect();
        let together = inputs.is_some_and(|inputs| {
            inputs
                .iter()
                .all(|c| c.input == inputs[0].input && c.output == Layout::LAST && !c.loss_parallel)
        });
        let output = matches!(
            style(fused.output),
            Some(ParallelStyle::Rowwise(Rowwise { input: Layout::LAST, .. }))
        );
        if !together || !output {
            return wrong(
                path,
                format!(
                    "computes as one: its plan must make {} colwise, with one input layout and \
                     output shard(-1), and {} rowwise, with input shard(-1)",
                    fused.inputs.join(", "),
                    fused.output
                ),
            );
        }
        if let Some(heads) = info.heads {
            heads.kv_replicas(path, self.group.size())?;
        }
        Ok(())
    }

    fn apply(&self, styles: &Styles) -> Result<()> {
        for (path, style) in styles {
            let Some(info) = self.tree.modules().get(path) else {
                self.replicate_all(path)?;
                continue;
            };
            let parent = path.rsplit_once('.').and_then(|(parent, name)| {
                let info = self.tree.modules().get(parent)?;
                let fused = fused(info.kind)?;
                let part = fused.inputs.contains(&name) || fused.output == name;
                part.then_some((info, name))
            });
            if let Some((parent, name)) = parent {
                self.apply_projection(path, name, info, parent, style)?;
            } else if fused(info.kind).is_none() {
                self.apply_layer(path, info, style)?;
            }
        }
        for (path, info) in self.tree.modules() {
            if let Some(fused) = fused(info.kind) {
                self.apply_fused(path, info, &fused, styles)?;
            }
        }
        Ok(())
    }

    fn layer(&self) -> LayerParallel {
        LayerParallel {
            group: self.group.clone(),
            input: Redistribute::Keep,
            output: Redistribute::Keep,
            layout: Layout::Replicate,
            sums: false,
            output_width: 0,
            loss_parallel: false,
            sequence: self.sequence.clone(),
        }
    }

    /// A projection within a block, which moves activations for it.
    fn apply_projection(
        &self,
        path: &str,
        name: &str,
        info: &ModuleInfo,
        parent: &ModuleInfo,
        style: &ParallelStyle,
    ) -> Result<()> {
        match style {
            ParallelStyle::Colwise(_) => {
                let replicas = match parent.heads {
                    Some(heads) if name != "q_proj" => {
                        heads.kv_replicas(path, self.group.size())?
                    }
                    _ => 1,
                };
                for name in ["weight", "bias"] {
                    self.cut(path, name, 0, replicas)?;
                }
            }
            ParallelStyle::Rowwise(rowwise) => {
                self.cut(path, "weight", 1, 1)?;
                self.replicate(path, "bias", rowwise.output != Layout::Replicate)?;
                info.layer.set_parallel(LayerParallel { sums: true, ..self.layer() });
            }
            _ => {}
        }
        Ok(())
    }

    fn apply_fused(
        &self,
        path: &str,
        info: &ModuleInfo,
        fused: &Fused,
        styles: &Styles,
    ) -> Result<()> {
        let style = |name: &str| styles.get(&format!("{path}.{name}"));
        let own = styles.get(path);
        let mut layer = match (style(fused.inputs[0]), style(fused.output)) {
            (Some(ParallelStyle::Colwise(input)), Some(ParallelStyle::Rowwise(output))) => {
                LayerParallel {
                    input: into_parts(input.input),
                    output: from_sums(output.output),
                    ..self.layer()
                }
            }
            _ if own.is_none() => return Ok(()),
            _ => self.layer(),
        };
        let cut = layer.output != Redistribute::Keep;
        match own {
            Some(ParallelStyle::PrepareModuleInput(prepare)) => {
                layer.input = match cut {
                    true => into_parts(prepare.input),
                    false => between(path, prepare.input, prepare.desired)?,
                };
            }
            Some(ParallelStyle::PrepareModuleOutput(prepare)) => {
                layer.output = match cut {
                    true => from_sums(prepare.desired),
                    false => between(path, prepare.output, prepare.desired)?,
                };
            }
            Some(ParallelStyle::ReplicatedWithGradAllreduce) => self.replicate_all(path)?,
            _ => {}
        }
        info.layer.set_parallel(layer);
        Ok(())
    }

    /// A layer on its own.
    fn apply_layer(&self, path: &str, info: &ModuleInfo, style: &ParallelStyle) -> Result<()> {
        let embedding = info.kind == "Embedding";
        let layer = match style {
            ParallelStyle::Colwise(colwise) => {
                let weight_dim = usize::from(embedding);
                self.cut(path, "weight", weight_dim, 1)?;
                self.cut(path, "bias", 0, 1)?;
                let weight = self.parameter(path, "weight");
                LayerParallel {
                    input: if embedding { Redistribute::Keep } else { into_parts(colwise.input) },
                    output: match colwise.output {
                        Layout::Replicate => Redistribute::Gather(-1),
                        Layout::Shard(_) => Redistribute::Keep,
                    },
                    output_width: weight.map_or(0, |w| w.global_shape()[weight_dim]),
                    loss_parallel: colwise.loss_parallel,
                    ..self.layer()
                }
            }
            ParallelStyle::Rowwise(rowwise) => {
                self.cut(path, "weight", usize::from(!embedding), 1)?;
                self.replicate(path, "bias", rowwise.output != Layout::Replicate)?;
                LayerParallel {
                    input: match rowwise.input {
                        Layout::Replicate if !embedding => Redistribute::Split(-1),
                        _ => Redistribute::Keep,
                    },
                    output: from_sums(rowwise.output),
                    sums: true,
                    ..self.layer()
                }
            }
            ParallelStyle::SequenceParallel(_) => {
                self.replicate_all(path)?;
                LayerParallel { layout: Layout::SEQUENCE, ..self.layer() }
            }
            ParallelStyle::PrepareModuleInput(prepare) => LayerParallel {
                input: between(path, prepare.input, prepare.desired)?,
                layout: prepare.desired,
                ..self.layer()
            },
            ParallelStyle::PrepareModuleOutput(prepare) => LayerParallel {
                output: between(path, prepare.output, prepare.desired)?,
                ..self.layer()
            },
            ParallelStyle::ReplicatedWithGradAllreduce => return self.replicate_all(path),
        };
        info.layer.set_parallel(layer);
        Ok(())
    }

    /// Cuts a parameter, if the layer has it, along `dim`, with each part on `replicas` neighbouring
    /// ranks. What those compute with it differs, so its gradient is a summand on each.
    fn cut(&self, path: &str, name: &str, dim: usize, replicas: usize) -> Result<()> {
        let Some(parameter) = self.parameter(path, name) else { return Ok(()) };
        let parts = self.group.size() / replicas;
        let n = parameter.global_shape().get(dim).copied().unwrap_or(0);
        if chunk(n, parts, parts - 1).1 == 0 {
            return Err(Error::parameter(
                parameter.fqn(),
                format!(
                    "has shape {:?}: dimension {dim} cannot be cut over the {parts} ranks of `{}`, \
                     some would have nothing; choose a smaller tensor_parallel_size, or leave `{path}` \
                     out of the plan",
                    parameter.global_shape(),
                    self.dim
                ),
            ));
        }
        let mut spec = crate::shard::ShardSpec::new(parameter.global_shape().to_vec())
            .with_cut(Cut::new(self.dim, parts, Placement::Shard(dim)).with_stride(replicas));
        if replicas > 1 {
            spec = spec.with_cut(Cut::new(self.dim, replicas, Placement::Replicate));
        }
        self.set(parameter, spec, replicas > 1)
    }

    /// Notes that the ranks hold the same values of a parameter, if the layer has it.
    fn replicate(&self, path: &str, name: &str, partial_grad: bool) -> Result<()> {
        match self.parameter(path, name) {
            Some(parameter) => self.replicate_parameter(parameter, partial_grad),
            None => Ok(()),
        }
    }

    fn replicate_all(&self, path: &str) -> Result<()> {
        self.parameters_of(path).try_for_each(|p| self.replicate_parameter(p, true))
    }

    fn replicate_parameter(&self, parameter: &Parameter, partial_grad: bool) -> Result<()> {
        let spec = crate::shard::ShardSpec::new(parameter.global_shape().to_vec())
            .with_cut(Cut::new(self.dim, self.group.size(), Placement::Replicate));
        self.set(parameter, spec, partial_grad)
    }

    fn set(
        &self,
        parameter: &Parameter,
        spec: crate::shard::ShardSpec,
        partial_grad: bool,
    ) -> Result<()> {
        let present = parameter.spec();
        if !present.cuts.is_empty() {
            if present == spec && parameter.has_partial_grad() == partial_grad {
                return Ok(());
            }
            return Err(Error::parameter(
                parameter.fqn(),
                "is used by two layers that the plan cuts differently; tied layers need styles that \
                 cut the weight alike, as a rowwise embedding and a colwise head do",
            ));
        }
        let region = spec.region(|_| self.group.rank());
        parameter.cut_layer(spec, LayerCut { region, partial_grad })
    }
}

/// From what comes in to an input of which each rank computes another part of the output.
fn into_parts(layout: Layout) -> Redistribute {
    match layout {
        Layout::Replicate => Redistribute::Copy,
        Layout::Shard(dim) => Redistribute::AllGather(dim),
    }
}

/// From summands to what goes out.
fn from_sums(layout: Layout) -> Redistribute {
    match layout {
        Layout::Replicate => Redistribute::AllReduce,
        Layout::Shard(dim) => Redistribute::ReduceScatter(dim),
    }
}

/// Between two layouts of an activation that all ranks compute with alike.
fn between(path: &str, from: Layout, to: Layout) -> Result<Redistribute> {
    match (from, to) {
        _ if from == to => Ok(Redistribute::Keep),
        (Layout::Shard(dim), Layout::Replicate) => Ok(Redistribute::Gather(dim)),
        (Layout::Replicate, Layout::Shard(dim)) => Ok(Redistribute::Split(dim)),
        _ => wrong(path, format!("cannot go from {from} to {to} in one step; go by replicate")),
    }
}

/// Which layouts a style may have on a layer.
fn check_layouts(path: &str, info: &ModuleInfo, style: &ParallelStyle) -> Result<()> {
    let expect = |what: &str, got: Layout, allowed: &[Layout]| {
        if allowed.contains(&got) {
            return Ok(());
        }
        let allowed: Vec<String> = allowed.iter().map(Layout::to_string).collect();
        let style = name(style);
        let allowed = allowed.join(" or ");
        wrong(path, format!("{style} with {what} {got} does not exist; use {allowed}"))
    };
    let (replicate, sequence, last) = (Layout::Replicate, Layout::SEQUENCE, Layout::LAST);
    match style {
        ParallelStyle::Colwise(colwise) => {
            let inputs: &[Layout] =
                if info.kind == "Embedding" { &[replicate] } else { &[replicate, sequence] };
            expect("input", colwise.input, inputs)?;
            expect("output", colwise.output, &[replicate, last])?;
            if colwise.loss_parallel && colwise.output != replicate {
                return wrong(path, "loss_parallel goes with output replicate".to_owned());
            }
            Ok(())
        }
        ParallelStyle::Rowwise(rowwise) => {
            expect("input", rowwise.input, &[replicate, last])?;
            expect("output", rowwise.output, &[replicate, sequence])
        }
        ParallelStyle::PrepareModuleInput(prepare) if fused(info.kind).is_some() => {
            expect("input", prepare.input, &[replicate, sequence])?;
            expect("desired layout", prepare.desired, &[replicate])
        }
        ParallelStyle::PrepareModuleOutput(prepare) if fused(info.kind).is_some() => {
            expect("output", prepare.output, &[replicate])?;
            expect("desired layout", prepare.desired, &[replicate, sequence])
        }
        ParallelStyle::PrepareModuleInput(prepare) => {
            let allowed = [replicate, sequence, last];
            expect("input", prepare.input, &allowed)?;
            expect("desired layout", prepare.desired, &allowed)?;
            between(path, prepare.input, prepare.desired).map(drop)
        }
        ParallelStyle::PrepareModuleOutput(prepare) => {
            let allowed = [replicate, sequence];
            expect("output", prepare.output, &allowed)?;
            expect("desired layout", prepare.desired, &allowed)
        }
        _ => Ok(()),
    }
}

fn name(style: &ParallelStyle) -> &'static str {
    match style {
        ParallelStyle::Colwise(_) => "colwise",
        ParallelStyle::Rowwise(_) => "rowwise",
        ParallelStyle::SequenceParallel(_) => "sequence_parallel",
        ParallelStyle::PrepareModuleInput(_) => "prepare_module_input",
        ParallelStyle::PrepareModuleOutput(_) => "prepare_module_output",
        ParallelStyle::ReplicatedWithGradAllreduce => "replicated_with_grad_allreduce",
    }
}

fn takes(kind: &str) -> &'static str {
    match kind {
        "Linear" => {
            "it takes colwise, rowwise, prepare_module_input, prepare_module_output and \
             replicated_with_grad_allreduce"
        }
        "Embedding" => "it takes rowwise (rows, the vocabulary) and colwise",
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
