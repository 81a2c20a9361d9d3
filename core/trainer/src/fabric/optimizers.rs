//! Several optimizers of one Fabric.

use std::collections::BTreeMap;

use super::FabricOptimizer;
use crate::{Error, Result};
use fulgurite_engine::optim::{ParamGroup, StateTensor};

/// The state that checkpoints save of one optimizer, or of [several](FabricOptimizers).
pub trait OptimizerState {
    /// Returns the number of steps done, for the checkpoint.
    fn steps(&self) -> u64;

    /// Returns all state tensors.
    ///
    /// # Errors
    /// If memory for them cannot be allocated.
    fn state_tensors(&mut self) -> Result<Vec<StateTensor>>;

    /// Whether state tensors hold the weights of training, because checkpoints have others
    /// ([`Optimizer::averages_weights`](fulgurite_engine::optim::Optimizer::averages_weights)).
    /// Then load the model before the state.
    fn averages_weights(&self) -> bool;

    /// Returns the state that is not a tensor, by name.
    fn scalars(&self) -> BTreeMap<String, f64>;

    /// Restores the state that [`scalars`](Self::scalars) returned.
    ///
    /// # Errors
    /// If a scalar that an optimizer needs is missing.
    fn load_scalars(&mut self, scalars: &BTreeMap<String, f64>) -> Result<()>;

    /// Returns the parameter groups by optimizer name; a single optimizer has the empty name.
    ///
    /// See [`Optimizer::param_groups`](fulgurite_engine::optim::Optimizer::param_groups).
    fn param_groups(&self) -> BTreeMap<String, Vec<ParamGroup>>;

    /// Restores the options that [`param_groups`](Self::param_groups) returned.
    ///
    /// # Errors
    /// If the options belong to other optimizers.
    fn load_param_groups(&mut self, groups: &BTreeMap<String, Vec<ParamGroup>>) -> Result<()>;
}

impl OptimizerState for FabricOptimizer {
    fn steps(&self) -> u64 {
        self.steps()
    }

    fn averages_weights(&self) -> bool {
        self.averages_weights()
    }

    fn state_tensors(&mut self) -> Result<Vec<StateTensor>> {
        self.state_tensors()
    }

    fn scalars(&self) -> BTreeMap<String, f64> {
        self.scalars()
    }

    fn load_scalars(&mut self, scalars: &BTreeMap<String, f64>) -> Result<()> {
        self.load_scalars(scalars)
    }

    fn param_groups(&self) -> BTreeMap<String, Vec<ParamGroup>> {
        BTreeMap::from([(String::new(), self.param_groups())])
    }

    fn load_param_groups(&mut self, groups: &BTreeMap<String, Vec<ParamGroup>>) -> Result<()> {
        self.load_param_groups(groups.get("").ok_or_else(|| no_groups("", groups))?)
    }
}

/// Named optimizers that are saved and loaded together.
///
/// ```
/// # use fulgurite_core::Result;
/// # use fulgurite_core::fabric::{Fabric, FabricOptimizers};
/// # use fulgurite_core::optim::AdamW;
/// # fn save(fabric: Fabric) -> Result<()> {
/// let mut optimizers = FabricOptimizers::default()
///     .with("generator", fabric.setup_optimizer_for(&AdamW::default(), &["generator"])?)
///     .with("critic", fabric.setup_optimizer_for(&AdamW::default(), &["critic"])?);
/// // …
/// optimizers.get_mut("critic")?.step()?;
/// fabric.save("checkpoints/last", &mut optimizers, &())?;
/// # Ok(())
/// # }
/// ```
#[derive(Default)]
pub struct FabricOptimizers {
    named: Vec<(String, FabricOptimizer)>,
}

impl FabricOptimizers {
    /// Adds an optimizer, in place of one with the same name.
    #[must_use]
    pub fn with(mut self, name: &str, optimizer: FabricOptimizer) -> Self {
        self.named.retain(|(other, _)| other != name);
        self.named.push((name.to_owned(), optimizer));
        self
    }

    /// The names, in the order in which the optimizers were added.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.named.iter().map(|(name, _)| name.as_str())
    }

    /// The optimizers with their names.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &FabricOptimizer)> {
        self.named.iter().map(|(name, optimizer)| (name.as_str(), optimizer))
    }

    /// The optimizers with their names.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (&str, &mut FabricOptimizer)> {
        self.named.iter_mut().map(|(name, optimizer)| (name.as_str(), optimizer))
    }

    /// The optimizer with this name.
    ///
    /// # Errors
    /// If no optimizer has this name.
    pub fn get(&self, name: &str) -> Result<&FabricOptimizer> {
        let found = self.named.iter().find(|(other, _)| other == name);
        found.map(|(_, optimizer)| optimizer).ok_or_else(|| self.no_such(name))
    }

    /// The optimizer with this name.
    ///
    /// # Errors
    /// If no optimizer has this name.
    pub fn get_mut(&mut self, name: &str) -> Result<&mut FabricOptimizer> {
        match self.named.iter().position(|(other, _)| other == name) {
            Some(index) => Ok(&mut self.named[index].1),
            None => Err(self.no_such(name)),
        }
    }

    /// The first optimizer, for loops with a single one.
    pub(crate) fn first(&self) -> Option<&FabricOptimizer> {
        self.named.first().map(|(_, optimizer)| optimizer)
    }

    /// Like [`first`](Self::first), mutable.
    pub(crate) fn first_mut(&mut self) -> Option<&mut FabricOptimizer> {
        self.named.first_mut().map(|(_, optimizer)| optimizer)
    }

    /// Prefix of an optimizer's scalars in checkpoints; empty for a single optimizer.
    fn prefix(&self, name: &str) -> String {
        if self.named.len() == 1 { String::new() } else { format!("{name}/") }
    }

    /// Key of an optimizer's parameter groups; empty for a single optimizer.
    fn group_key(&self, name: &str) -> String {
        if self.named.len() == 1 { String::new() } else { name.to_owned() }
    }

    fn no_such(&self, name: &str) -> Error {
        let names: Vec<String> = self.names().map(|name| format!("`{name}`")).collect();
        Error::other(format!("there is no optimizer `{name}`; there is {}", names.join(", ")))
    }
}

impl OptimizerState for FabricOptimizers {
    fn steps(&self) -> u64 {
        self.named.iter().map(|(_, optimizer)| optimizer.steps()).max().unwrap_or(0)
    }

    fn averages_weights(&self) -> bool {
        self.iter().any(|(_, optimizer)| optimizer.averages_weights())
    }

    fn state_tensors(&mut self) -> Result<Vec<StateTensor>> {
        let mut states = Vec::new();
        for (_, optimizer) in &mut self.named {
            states.extend(optimizer.state_tensors()?);
        }
        Ok(states)
    }

    fn scalars(&self) -> BTreeMap<String, f64> {
        let of = |(name, optimizer): &(String, FabricOptimizer)| {
            let prefix = self.prefix(name);
            let scalars = optimizer.scalars().into_iter();
            scalars.map(move |(key, value)| (format!("{prefix}{key}"), value))
        };
        self.named.iter().flat_map(of).collect()
    }

    fn load_scalars(&mut self, scalars: &BTreeMap<String, f64>) -> Result<()> {
        let prefixes: Vec<String> = self.names().map(|name| self.prefix(name)).collect();
        for ((name, optimizer), prefix) in self.named.iter_mut().zip(prefixes) {
            let own: BTreeMap<String, f64> = scalars
                .iter()
                .filter_map(|(key, value)| Some((key.strip_prefix(&prefix)?.to_owned(), *value)))
                .collect();
            if own.is_empty() {
                return Err(Error::other(format!(
                    "there is no state of the optimizer `{name}`: what was saved is of other optimizers"
                )));
            }
            optimizer.load_scalars(&own)?;
        }
        Ok(())
    }

    fn param_groups(&self) -> BTreeMap<String, Vec<ParamGroup>> {
        let of = |(name, optimizer): &(String, FabricOptimizer)| {
            (self.group_key(name), optimizer.param_groups())
        };
        self.named.iter().map(of).collect()
    }

    fn load_param_groups(&mut self, groups: &BTreeMap<String, Vec<ParamGroup>>) -> Result<()> {
        let keys: Vec<String> = self.names().map(|name| self.group_key(name)).collect();
        for ((name, optimizer), key) in self.named.iter_mut().zip(keys) {
            let own = groups.get(&key).ok_or_else(|| no_groups(name, groups))?;
            optimizer.load_param_groups(own)?;
        }
        Ok(())
    }
}

fn no_groups(name: &str, groups: &BTreeMap<String, Vec<ParamGroup>>) -> Error {
    let names: Vec<&str> = groups.keys().map(String::as_str).filter(|n| !n.is_empty()).collect();
    let (of, only) = match name {
        "" => (String::new(), "it is of several: "),
        name => (format!(" of the optimizer `{name}`"), "it has those of "),
    };
    let has = match names.is_empty() {
        true => "of one without a name".to_owned(),
        false => names.join(", "),
    };
    let has = match groups.is_empty() {
        true => "it has none at all".to_owned(),
        false => format!("{only}{has}"),
    };
    Error::other(format!("the state has no parameter groups{of}; {has}"))
}
