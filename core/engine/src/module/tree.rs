//! The record of a model: what strategies, plans and checkpoints work on.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::parallelize::AppliedPlans;
use super::{FullyShard, UnitHandle};
use crate::parallel::{LayerHandle, ParallelLayer};
use crate::parameter::{Parameter, ParameterSlot};
use crate::{Error, Result};

/// A layer in the tree.
#[derive(Debug, Clone)]
pub struct ModuleInfo {
    /// The layer's kind: `Linear`, `Embedding`, `RmsNorm`, …
    pub kind: &'static str,
    /// The index of the unit it is in.
    pub unit: Option<usize>,
    /// The handle through which plans tell the layer how to compute.
    pub(crate) layer: LayerHandle,
    /// Which styles it takes from plans.
    pub(crate) parallel: Arc<dyn ParallelLayer>,
}

/// A model's modules, parameters and units, in the order they were declared, which is the same on
/// every rank.
#[derive(Debug, Clone, Default)]
pub struct ModuleTree {
    modules: BTreeMap<String, ModuleInfo>,
    parameters: Vec<Parameter>,
    elements: usize,
    owners: Vec<Option<usize>>,
    names: HashMap<String, usize>,
    aliases: BTreeMap<String, usize>,
    /// The root unit's options, if it was sharded explicitly.
    pub(super) root: Option<FullyShard>,
    pub(super) units: Vec<UnitHandle>,
    /// The plans applied so far.
    pub(crate) parallel: AppliedPlans,
}

impl ModuleTree {
    /// All parameters, in the order they were declared. Tied ones appear once.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// The parameters that get gradients, in order.
    pub fn trainable(&self) -> impl Iterator<Item = &Parameter> {
        self.parameters.iter().filter(|p| p.requires_grad())
    }

    /// The slots of all parameters, in order: for the strategy that sets the model up.
    pub fn slots(&mut self) -> Vec<ParameterSlot> {
        self.parameters.iter().cloned().map(ParameterSlot::new).collect()
    }

    /// The parameter of this name; tied parameters are found by all their names.
    pub fn parameter(&self, fqn: &str) -> Option<&Parameter> {
        self.names.get(fqn).map(|&i| &self.parameters[i])
    }

    /// The other names of tied parameters: alias and first name.
    pub fn aliases(&self) -> impl Iterator<Item = (&str, &str)> {
        self.aliases.iter().map(|(alias, &i)| (alias.as_str(), self.parameters[i].fqn()))
    }

    /// All units, in the order they were built.
    pub fn units(&self) -> &[UnitHandle] {
        &self.units
    }

    /// The parameters that belong to a unit, or, for `None`, to no unit: the root's.
    pub fn unit_parameters(&self, unit: Option<usize>) -> Vec<Parameter> {
        let owned = self.owners.iter().zip(&self.parameters).filter(|(owner, _)| **owner == unit);
        owned.map(|(_, parameter)| parameter.clone()).collect()
    }

    /// The index of the unit that each parameter belongs to, parallel to
    /// [`parameters`](Self::parameters); `None` is the root.
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

    /// Number of elements of all parameters, tied ones once.
    pub fn elem_count(&self) -> usize {
        self.elements
    }

    pub(super) fn declare(&mut self, path: &str, info: ModuleInfo) -> Result<()> {
        if self.modules.insert(path.to_owned(), info).is_some() {
            let message = "two layers were built at this path; give each its own name".to_owned();
            return Err(Error::Module { path: path.to_owned(), message });
        }
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
        self.elements += parameter.elem_count();
        self.parameters.push(parameter);
        self.owners.push(unit);
        Ok(())
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

    /// Records that a unit uses the parameter too: shared between units, it belongs to the root.
    pub(super) fn share(&mut self, parameter: &Parameter, unit: Option<usize>) {
        if let Some(&index) = self.names.get(parameter.fqn())
            && self.owners[index] != unit
        {
            self.owners[index] = None;
        }
    }

    /// Records that a layer in `unit` holds the parameter's compute tensor itself, not its handle.
    pub(super) fn expose_tensor(&mut self, parameter: &Parameter, unit: Option<usize>) {
        self.share(parameter, unit);
        match unit.and_then(|unit| self.units.get(unit)) {
            Some(unit) => unit.expose_tensor(parameter),
            None => parameter.set_exposed(None, true),
        }
    }

    fn name(&mut self, fqn: &str, index: usize) -> Result<()> {
        if self.names.insert(fqn.to_owned(), index).is_some() {
            return Err(Error::parameter(
                fqn,
                "is declared twice; give each its own name, or use `ModuleBuilder::tie` to share one",
            ));
        }
        Ok(())
    }
}
