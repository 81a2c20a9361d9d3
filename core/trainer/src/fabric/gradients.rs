//! Norms and checks of a step's gradients.

use std::collections::BTreeMap;

use super::{Fabric, FabricOptimizer};
use crate::Result;
use crate::runtime::{StrategyRuntime, UnusedParameters};

/// The gradients of an optimizer's parameters since its last step; see [`Fabric::gradients`].
///
/// All methods are collective. They are for the time between backward and the optimizer's step.
pub struct Gradients<'a> {
    runtime: &'a StrategyRuntime,
    /// The optimizer's index.
    optimizer: usize,
}

impl Fabric {
    /// Returns the gradients of the only optimizer. Not collective.
    ///
    /// [`FabricOptimizer::gradients`] is for several optimizers.
    ///
    /// # Errors
    /// If there are several optimizers.
    pub fn gradients(&self) -> Result<Gradients<'_>> {
        Ok(Gradients { runtime: &self.runtime, optimizer: self.runtime.only_optimizer()? })
    }
}

impl FabricOptimizer {
    /// Returns the gradients of this optimizer's parameters. Not collective.
    pub fn gradients(&self) -> Gradients<'_> {
        Gradients { runtime: &self.runtime, optimizer: self.index }
    }
}

impl Gradients<'_> {
    /// Returns the norm of the mean gradient, which may be infinite or NaN. Collective.
    ///
    /// [`FabricOptimizer::gradient_norm`] refuses such norms.
    ///
    /// # Errors
    /// If a peer fails.
    pub fn norm(&self) -> Result<f64> {
        self.runtime.gradient_norm(self.optimizer)
    }

    /// Returns the mean gradient's norm by group of parameters, with one all-reduce. Collective.
    ///
    /// `group` maps a parameter's name to its group's name.
    ///
    /// # Errors
    /// If a peer fails.
    pub fn norms(&self, group: &dyn Fn(&str) -> String) -> Result<BTreeMap<String, f64>> {
        self.runtime.gradient_norms(self.optimizer, group)
    }

    /// Checks in the first step that all trainable parameters have a gradient. Collective.
    ///
    /// The optimizer's step calls it. In later steps it does nothing.
    ///
    /// # Errors
    /// [`Error::UnusedParameters`](crate::Error::UnusedParameters) under
    /// [`UnusedParameters::Error`].
    pub fn audit(&self, policy: UnusedParameters) -> Result<()> {
        self.runtime.audit_gradients(self.optimizer, policy)
    }
}
