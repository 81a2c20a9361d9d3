//! The record of a model for strategies, plans and checkpoints.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use super::parallelize::{AppliedPlans, Edge};
use super::stage::Stages;
use super::{AfterStep, Experts, ForeignNames, FullyShard, UnitHandle};
use crate::parallel::{LayerHandle, ParallelLayer};
use crate::parameter::{Buffer, Parameter, ParameterSlot};
use crate::{Error, Result};

/// A layer in the tree.
#[derive(Debug, Clone)]
pub struct ModuleInfo {
    /// The layer's kind: `Linear`, `Embedding`, `RmsNorm`, …
    pub kind: &'static str,
    /// The index of the layer's unit.
    pub unit: Option<usize>,
    /// The handle through which plans configure the layer.
    pub(crate) layer: LayerHandle,
    /// The styles that the layer supports in plans.
    pub(crate) parallel: Arc<dyn ParallelLayer>,
}

/// A model's modules, parameters and units, in declaration order. The order is the same on every
/// rank.
#[derive(Debug, Clone, Default)]
pub struct ModuleTree {
    modules: BTreeMap<String, ModuleInfo>,
    parameters: Vec<Parameter>,
    elements: usize,
    owners: Vec<Option<usize>>,
    names: HashMap<String, usize>,
    aliases: BTreeMap<String, usize>,
    buffers: Vec<Buffer>,
    /// Whether a layer computes with the batches of all data-parallel ranks.
    synchronises_batches: bool,
    /// See [`foreign_names`](Self::foreign_names).
    pub(super) foreign_names: Option<Arc<dyn ForeignNames>>,
    /// Layers with an adapter.
    pub(super) adapted: BTreeSet<String>,
    /// Paths of layers that should compute in f32 and can cast.
    pub(super) in_fp32: BTreeSet<String>,
    /// Paths of layers with quantised weights.
    pub(super) quantized: BTreeSet<String>,
    /// See [`magnitudes`](Self::magnitudes).
    pub(super) magnitudes: Vec<(Parameter, Parameter)>,
    /// The root unit's options, if it was sharded explicitly.
    pub(super) root: Option<FullyShard>,
    pub(super) units: Vec<UnitHandle>,
    /// The declared edges, in order.
    pub(super) edges: Vec<Edge>,
    /// See [`stages`](Self::stages).
    pub(super) stages: Option<Stages>,
    /// See [`no_stages`](Self::no_stages).
    pub(super) no_stages: Option<String>,
    /// See [`experts`](Self::experts).
    pub(super) experts: Vec<Experts>,
    /// See [`after_step`](Self::after_step).
    pub(super) after_step: Vec<Arc<dyn AfterStep>>,
    /// The plans applied so far.
    pub(crate) parallel: AppliedPlans,
}

impl ModuleTree {
    /// How files of another library name the parameters, if the model
    /// [says so](super::ModuleBuilder::set_foreign_names).
    pub fn foreign_names(&self) -> Option<&dyn ForeignNames> {
        self.foreign_names.as_deref()
    }

    /// All parameters, in declaration order. Tied parameters appear once.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// The parameters that get gradients, in order.
    pub fn trainable(&self) -> impl Iterator<Item = &Parameter> {
        self.parameters.iter().filter(|p| p.requires_grad())
    }

    /// All buffers, in declaration order.
    pub fn buffers(&self) -> &[Buffer] {
        &self.buffers
    }

    /// The buffer of this name.
    pub fn buffer(&self, fqn: &str) -> Option<&Buffer> {
        self.buffers.iter().find(|buffer| buffer.fqn() == fqn)
    }

    /// The buffers saved in checkpoints, in order.
    pub fn persistent_buffers(&self) -> impl Iterator<Item = &Buffer> {
        self.buffers.iter().filter(|buffer| buffer.is_persistent())
    }

    /// Whether a layer computes with the batches of all data-parallel ranks
    /// ([`ModuleBuilder::synchronise_batches`](super::ModuleBuilder::synchronise_batches)).
    pub fn synchronises_batches(&self) -> bool {
        self.synchronises_batches
    }

    /// Parameters that start as the row norms of a weight
    /// ([`ModuleBuilder::adapter_magnitude`](super::ModuleBuilder::adapter_magnitude)), each with
    /// its weight.
    pub fn magnitudes(&self) -> &[(Parameter, Parameter)] {
        &self.magnitudes
    }

    /// Floating-point operations of a forward and a backward for each item (a token), without
    /// attention: six for each parameter, and four if it is not trained. Of a mixture's experts as
    /// many count as an item uses.
    pub fn flops_per_item(&self) -> f64 {
        let of_mixture = |experts: &Experts| {
            let share = experts.per_row() as f64 / experts.count() as f64;
            experts.parameters().into_iter().map(move |of| (of.fqn().to_owned(), share))
        };
        let shares: HashMap<String, f64> = self.experts.iter().flat_map(of_mixture).collect();
        let of_parameter = |parameter: &Parameter| {
            let share = shares.get(parameter.fqn()).copied().unwrap_or(1.0);
            let operations = if parameter.requires_grad() { 6.0 } else { 4.0 };
            share * operations * parameter.model_elem_count() as f64
        };
        self.parameters.iter().map(of_parameter).sum()
    }

    /// The slots of all parameters, in order, for the strategy that sets up the model.
    pub fn slots(&mut self) -> Vec<ParameterSlot> {
        self.parameters.iter().cloned().map(ParameterSlot::new).collect()
    }

    /// The parameter of this name. Tied parameters have several names.
    pub fn parameter(&self, fqn: &str) -> Option<&Parameter> {
        self.names.get(fqn).map(|&i| &self.parameters[i])
    }

    /// The other names of tied parameters, each with the first name.
    pub fn aliases(&self) -> impl Iterator<Item = (&str, &str)> {
        self.aliases.iter().map(|(alias, &i)| (alias.as_str(), self.parameters[i].fqn()))
    }

    /// All units, in build order.
    pub fn units(&self) -> &[UnitHandle] {
        &self.units
    }

    /// The units between which a pipeline can cut the model, if it has declared them
    /// ([`ModuleBuilder::stages`](super::ModuleBuilder::stages)).
    pub fn stages(&self) -> Option<&Stages> {
        self.stages.as_ref()
    }

    /// Why no pipeline can cut the model, if it has said so
    /// ([`ModuleBuilder::no_stages`](super::ModuleBuilder::no_stages)).
    pub fn no_stages(&self) -> Option<&str> {
        self.no_stages.as_deref()
    }

    /// The parts of a pipeline that compute with a parameter: 0 for what is before the units, the
    /// unit's place from 1, and one more than the units for what is behind them. Several for a tied
    /// parameter. Empty if the model has declared no
    /// [stages](Self::stages).
    pub fn parts_of(&self, parameter: usize) -> Vec<usize> {
        let Some(Stages { before, units }) = &self.stages else { return Vec::new() };
        let path_of = |unit: &usize| self.units[*unit].path();
        let part = |name: &str| {
            if before.iter().any(|path| is_below(name, path)) {
                return 0;
            }
            let unit = units.iter().position(|unit| is_below(name, path_of(unit)));
            unit.map_or(units.len() + 1, |place| place + 1)
        };
        let own = &self.parameters[parameter];
        let tied = self.aliases.iter().filter(|(_, index)| **index == parameter);
        let parts: BTreeSet<usize> =
            tied.map(|(alias, _)| part(alias)).chain([part(own.fqn())]).collect();
        parts.into_iter().collect()
    }

    /// Checkpoints the activations of the units that the closure chooses, and no others, like the
    /// `check_fn` of PyTorch's `apply_activation_checkpointing`. Overrides
    /// `trainer.activation_checkpointing`. Every rank calls it alike.
    ///
    /// ```
    /// # use fulgurite_core::module::{ModuleBuilder, ModuleInit};
    /// # use fulgurite_core::nn::{GatedMlp, Linear};
    /// let b = ModuleBuilder::new(ModuleInit::default());
    /// let up = b.unit("up", |b| Linear::new(b, 4, 8))?;
    /// let blocks = [0, 1].map(|i| b.unit(&format!("blocks.{i}"), |b| GatedMlp::new(b, 8, 16)));
    /// let tree = b.finish()?;
    /// tree.apply_activation_checkpointing(|unit| {
    ///     unit.kind() == "GatedMlp" && !unit.path().ends_with(".1")
    /// })?;
    /// let [first, second] = blocks;
    /// assert!(first?.handle().activation_checkpointing());
    /// assert!(!second?.handle().activation_checkpointing());
    /// assert!(!up.handle().activation_checkpointing());
    /// # Ok::<(), fulgurite_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// If a unit has computed.
    pub fn apply_activation_checkpointing(
        &self,
        chooses: impl Fn(&UnitHandle) -> bool,
    ) -> Result<()> {
        self.units.iter().try_for_each(|unit| unit.set_activation_checkpointing(chooses(unit)))
    }

    /// The parameters of a unit, or of the root for `None`.
    pub fn unit_parameters(&self, unit: Option<usize>) -> Vec<Parameter> {
        let owned = self.owners.iter().zip(&self.parameters).filter(|(owner, _)| **owner == unit);
        owned.map(|(_, parameter)| parameter.clone()).collect()
    }

    /// The unit index of each parameter, parallel to [`parameters`](Self::parameters). `None` is
    /// the root.
    pub fn owners(&self) -> &[Option<usize>] {
        &self.owners
    }

    /// The slots of [`unit_parameters`](Self::unit_parameters).
    pub fn unit_slots(&mut self, unit: Option<usize>) -> Vec<ParameterSlot> {
        self.unit_parameters(unit).into_iter().map(ParameterSlot::new).collect()
    }

    /// The layers, by path.
    pub fn modules(&self) -> &BTreeMap<String, ModuleInfo> {
        &self.modules
    }

    /// Number of elements of all parameters, with tied parameters counted once.
    pub fn elem_count(&self) -> usize {
        self.elements
    }

    /// Checks that the modules before the units exist.
    ///
    /// # Errors
    /// If one does not.
    pub(super) fn check_stages(&self) -> Result<()> {
        let before = self.stages.iter().flat_map(|stages| &stages.before);
        for path in before {
            let below = |name: &str| is_below(name, path);
            if !self.modules.keys().any(|name| below(name))
                && !self.names.keys().any(|name| below(name))
            {
                return Err(Error::module(
                    path,
                    "is declared to compute before the units (`ModuleBuilder::stages`), and the model has no such \
                     module",
                ));
            }
        }
        Ok(())
    }

    pub(super) fn declare(&mut self, path: &str, info: ModuleInfo) -> Result<()> {
        if self.modules.contains_key(path) {
            let message = "two layers were built at this path; give each its own name".to_owned();
            return Err(Error::Module { path: path.to_owned(), message });
        }
        self.modules.insert(path.to_owned(), info);
        Ok(())
    }

    pub(super) fn add_parameter(
        &mut self,
        parameter: Parameter,
        unit: Option<usize>,
    ) -> Result<()> {
        let fqn = parameter.fqn().to_owned();
        let index = self.parameters.len();
        self.name(&fqn, index)?;
        self.elements += parameter.model_elem_count();
        self.parameters.push(parameter);
        self.owners.push(unit);
        Ok(())
    }

    pub(super) fn add_buffer(&mut self, buffer: Buffer) -> Result<()> {
        check_name(buffer.fqn()).map_err(|message| Error::parameter(buffer.fqn(), message))?;
        if self.names.contains_key(buffer.fqn()) || self.buffer(buffer.fqn()).is_some() {
            return Err(declared_twice(buffer.fqn()));
        }
        self.buffers.push(buffer);
        Ok(())
    }

    pub(super) fn synchronise_batches(&mut self) {
        self.synchronises_batches = true;
    }

    /// Records that a layer in `unit` holds the buffer's tensor directly and changes it.
    pub(super) fn expose_buffer(&self, buffer: &Buffer, unit: Option<usize>) -> Result<()> {
        match unit.and_then(|unit| self.units.get(unit)) {
            Some(unit) => unit.expose_buffer(buffer),
            None => Ok(()),
        }
    }

    pub(super) fn tie(
        &mut self,
        alias: &str,
        parameter: &Parameter,
        unit: Option<usize>,
    ) -> Result<()> {
        let Some(&index) = self.names.get(parameter.fqn()) else {
            return Err(Error::parameter(alias, "is tied to a parameter of another model"));
        };
        self.name(alias, index)?;
        self.aliases.insert(alias.to_owned(), index);
        self.share(parameter, unit);
        Ok(())
    }

    /// Records another unit that uses the parameter. Shared parameters belong to the root.
    pub(super) fn share(&mut self, parameter: &Parameter, unit: Option<usize>) {
        if let Some(&index) = self.names.get(parameter.fqn())
            && self.owners[index] != unit
        {
            self.owners[index] = None;
        }
    }

    /// Records that a layer in `unit` holds the parameter's compute tensor directly, not its
    /// handle.
    pub(super) fn expose_tensor(
        &mut self,
        parameter: &Parameter,
        unit: Option<usize>,
    ) -> Result<()> {
        self.share(parameter, unit);
        match unit.and_then(|unit| self.units.get(unit)) {
            Some(unit) => unit.expose_tensor(parameter),
            None => {
                parameter.set_exposed(None, true);
                Ok(())
            }
        }
    }

    fn name(&mut self, fqn: &str, index: usize) -> Result<()> {
        check_name(fqn).map_err(|message| Error::parameter(fqn, message))?;
        if self.names.contains_key(fqn) || self.buffer(fqn).is_some() {
            return Err(declared_twice(fqn));
        }
        self.names.insert(fqn.to_owned(), index);
        Ok(())
    }
}

/// Whether a name is the path, or below it.
pub(super) fn is_below(name: &str, path: &str) -> bool {
    name.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Checks that patterns and checkpoints can refer to this path.
pub(super) fn check_name(path: &str) -> std::result::Result<(), String> {
    let wrong = |segment: &str| {
        segment.is_empty()
            || segment.contains(|c: char| c == '*' || c.is_whitespace() || c.is_control())
    };
    match path.split('.').any(wrong) {
        true => Err(
            "a name has segments with a dot between them, each of at least one character, without \
                     spaces and `*`"
                .to_owned(),
        ),
        false => Ok(()),
    }
}

fn declared_twice(fqn: &str) -> Error {
    Error::parameter(
        fqn,
        "is declared twice; give each its own name, or use `ModuleBuilder::tie` to share one",
    )
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::super::{ModuleBuilder, ModuleInit};
    use crate::parameter::Init;
    use crate::quantization::WeightFormat;

    fn builder() -> ModuleBuilder {
        ModuleBuilder::new(ModuleInit::default())
    }

    #[test]
    fn operations_count_what_an_item_uses() {
        let b = builder();
        let experts = b.experts(4, 2);
        experts.add(&b.parameter("experts.weight", [4, 3, 5], Init::ONES).unwrap()).unwrap();
        b.parameter("norm.weight", [7], Init::ONES).unwrap();
        let frozen = b.frozen();
        frozen.parameter("embed.weight", [2], Init::ONES).unwrap();
        let format = WeightFormat::Nf4 { block_size: 8 };
        frozen.packed_parameters("weight", &[4, 8], Init::ONES, format).unwrap();
        let operations = b.finish().unwrap().flops_per_item();
        assert_eq!(operations, 6.0 * (60.0 / 2.0 + 7.0) + 4.0 * (2.0 + 32.0));
    }

    /// Two layers of one name would be merged in checkpoints. Shared weights must be tied.
    // checklist: composer: _check_duplicate_modules
    #[test]
    fn duplicate_names_are_errors() {
        let b = builder();
        let weight = b.parameter("a.weight", [2], Init::ONES).unwrap();
        let error = b.pp("a").parameter("weight", [2], Init::ONES).unwrap_err();
        assert_says!(error, "parameter `a.weight`: is declared twice … `ModuleBuilder::tie` …");
        b.tie("b.weight", &weight).unwrap();
        assert!(b.tie("b.weight", &weight).is_err());
        let stranger = builder().parameter("w", [2], Init::ONES).unwrap();
        assert_says!(b.tie("c.weight", &stranger).unwrap_err(), "parameter `c.weight` … another …");
        let tree = b.finish().unwrap();
        assert_eq!(tree.parameters().len(), 1);
        assert_eq!(tree.aliases().collect::<Vec<_>>(), [("b.weight", "a.weight")]);
        assert_eq!(tree.parameter("b.weight"), tree.parameter("a.weight"));
    }
}
