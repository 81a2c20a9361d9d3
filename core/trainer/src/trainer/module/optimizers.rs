//! The optimizers and schedules of a module.

use crate::fabric::{Fabric, FabricOptimizers, UnusedParameters};
use crate::run::TrainerConfig;
use crate::{Error, Result};
use fulgurite_engine::collective::Agreement;
use fulgurite_engine::module::{ModuleTree, any_pattern_matches, pattern_matches};
use fulgurite_engine::optim::{OptimizerConfig, SchedulerConfig};
use fulgurite_engine::parameter::Parameter;

/// Optimizer and learning-rate schedule of a module.
#[derive(Debug)]
pub struct OptimizerSetup {
    /// The optimizer.
    pub optimizer: Box<dyn OptimizerConfig>,
    /// The learning-rate schedule.
    pub scheduler: Box<dyn SchedulerConfig>,
}

impl OptimizerSetup {
    /// Copies the setup, for another optimizer.
    ///
    /// # Errors
    /// If its configuration cannot be written and read.
    pub fn another(&self) -> Result<Self> {
        let copy = || -> serde_json::Result<Self> {
            Ok(Self {
                optimizer: serde_json::from_value(serde_json::to_value(&self.optimizer)?)?,
                scheduler: serde_json::from_value(serde_json::to_value(&self.scheduler)?)?,
            })
        };
        copy().map_err(|error| Error::other(format!("copying an optimizer's options: {error}")))
    }
}

/// The optimizers of a module: a single one, or several with separate parameters.
///
/// ```
/// # use fulgurite_core::Result;
/// use fulgurite_core::trainer::{OptimizerSetup, Optimizers};
///
/// fn configure_optimizers(configured: OptimizerSetup) -> Result<Optimizers> {
///     let same = configured.another()?;
///     Ok(Optimizers::several()
///         .with("generator", &["generator"], configured)
///         .with("critic", &["critic"], same))
/// }
/// ```
#[derive(Debug)]
pub struct Optimizers {
    named: Vec<Named>,
}

#[derive(Debug)]
struct Named {
    /// Empty for a single optimizer.
    name: String,
    patterns: Vec<String>,
    setup: OptimizerSetup,
}

impl From<OptimizerSetup> for Optimizers {
    fn from(setup: OptimizerSetup) -> Self {
        Self { named: vec![Named { name: String::new(), patterns: Vec::new(), setup }] }
    }
}

impl Optimizers {
    /// Creates an empty list. [`with`](Self::with) adds optimizers.
    pub fn several() -> Self {
        Self { named: Vec::new() }
    }

    /// Adds an optimizer for the trainable parameters whose names match one of the patterns.
    ///
    /// [`pattern_matches`] defines the patterns. Every trainable parameter belongs to one
    /// optimizer.
    #[must_use]
    pub fn with(mut self, name: &str, patterns: &[&str], setup: OptimizerSetup) -> Self {
        let patterns = patterns.iter().map(|&pattern| pattern.to_owned()).collect();
        self.named.push(Named { name: name.to_owned(), patterns, setup });
        self
    }

    /// Checks the number of optimizers, that each trainable parameter belongs to one, and keys that
    /// contradict manual optimization.
    ///
    /// # Errors
    /// If a check fails.
    pub(crate) fn check(
        &self,
        tree: &ModuleTree,
        automatic: bool,
        config: &TrainerConfig,
    ) -> Result<()> {
        if !automatic && config.micro_batch_size.is_some() {
            return Err(Error::Config(
                "`trainer.micro_batch_size`: the module optimizes by itself (`automatic_optimization`), so only \
                 its `training_step` can split a batch; leave the key out"
                    .to_owned(),
            ));
        }
        if !automatic && config.accumulate_grad_batches > 1 {
            return Err(Error::Config(
                "`trainer.accumulate_grad_batches`: the module optimizes by itself \
                 (`automatic_optimization`), so its `training_step` accumulates gradients \
                 (`StepContext::no_backward_sync`); leave the key out"
                    .to_owned(),
            ));
        }
        let explain =
            |message: String| Err(Error::Config(format!("configure_optimizers: {message}")));
        if self.named.is_empty() {
            return explain("it returned no optimizer".to_owned());
        }
        if automatic && self.named.len() > 1 {
            return explain(format!(
                "{} optimizers need manual optimization: return `false` from \
                 `LightningModule::automatic_optimization`, and let `training_step` give each its turn \
                 (`StepContext::optimize`)",
                self.named.len()
            ));
        }
        for (i, Named { name, .. }) in self.named.iter().enumerate() {
            if self.named[..i].iter().any(|earlier| earlier.name == *name) {
                return explain(format!("two optimizers are called `{name}`"));
            }
        }
        if self.is_one() {
            return Ok(());
        }
        for Named { name, patterns, .. } in &self.named {
            if patterns.is_empty() {
                return explain(format!("`{name}` has no patterns, so it has no parameters"));
            }
            for pattern in patterns {
                if !tree.trainable().any(|p| pattern_matches(pattern, p.fqn())) {
                    return explain(format!(
                        "the pattern {pattern:?} of `{name}` matches no trainable parameter"
                    ));
                }
            }
        }
        for parameter in tree.trainable() {
            let owners: Vec<&str> =
                self.named.iter().filter(|n| n.has(parameter)).map(|n| n.name.as_str()).collect();
            match owners[..] {
                [_] => {}
                [] => {
                    return explain(format!(
                        "no optimizer has the parameter `{}`; add it to the patterns of one, or freeze it \
                         (`trainer.freeze`)",
                        parameter.fqn()
                    ));
                }
                [a, b, ..] => {
                    return explain(format!(
                        "`{a}` and `{b}` both have the parameter `{}`",
                        parameter.fqn()
                    ));
                }
            }
        }
        Ok(())
    }

    /// Returns whether there is a single optimizer for all parameters.
    fn is_one(&self) -> bool {
        matches!(&self.named[..], [Named { patterns, .. }] if patterns.is_empty())
    }

    /// Returns the parameters and setup of each optimizer.
    ///
    /// Frozen parameters are included, because patterns in the options may name them.
    pub(crate) fn with_parameters(
        &self,
        tree: &ModuleTree,
    ) -> impl Iterator<Item = (Vec<Parameter>, &OptimizerSetup)> {
        self.named.iter().map(|named| {
            let has = |p: &&Parameter| !p.requires_grad() || self.is_one() || named.has(p);
            (tree.parameters().iter().filter(has).cloned().collect(), &named.setup)
        })
    }

    /// Builds the optimizers. Their schedules are set when the run's length is known. Local.
    ///
    /// # Errors
    /// As [`Fabric::setup_optimizer_for`].
    pub(crate) fn build(
        self,
        fabric: &Fabric,
        unused: UnusedParameters,
    ) -> Result<(FabricOptimizers, Vec<Box<dyn SchedulerConfig>>)> {
        let is_one = self.is_one();
        let (mut optimizers, mut schedulers) = (FabricOptimizers::default(), Vec::new());
        for Named { name, patterns, setup } in self.named {
            let patterns: Vec<&str> = patterns.iter().map(String::as_str).collect();
            let optimizer = match is_one {
                true => fabric.setup_optimizer(&*setup.optimizer)?,
                false => fabric.setup_optimizer_for(&*setup.optimizer, &patterns)?.named(&name),
            };
            optimizers = optimizers.with(&name, optimizer.with_unused_parameters(unused));
            schedulers.push(setup.scheduler);
        }
        Ok((optimizers, schedulers))
    }
}

impl Named {
    fn has(&self, parameter: &Parameter) -> bool {
        any_pattern_matches(&self.patterns, parameter.fqn())
    }
}

/// Returns the data of optimizers and schedules that must be equal on all ranks.
///
/// A program may create optimizers and schedules in code. So the options of each parameter group
/// are compared, and factors of the learning rate.
///
/// # Errors
/// If a schedule needs an unknown run length.
pub(crate) fn agreement(
    optimizers: &FabricOptimizers,
    schedulers: &[Box<dyn SchedulerConfig>],
    max_steps: Option<u64>,
) -> Result<Agreement> {
    let mut agreement = Agreement::on(
        "the optimizers",
        "`LightningModule::configure_optimizers` must make the same ones on all ranks",
    );
    let end = max_steps.unwrap_or(10_000);
    for ((name, optimizer), scheduler) in optimizers.iter().zip(schedulers) {
        let of = if name.is_empty() { "the optimizer".to_owned() } else { format!("`{name}`") };
        for (i, group) in optimizer.param_groups().iter().enumerate() {
            agreement.insert(
                format!("the number of parameters in group {i} of {of}"),
                group.params.len(),
            );
            for (option, value) in &group.options {
                agreement.insert(format!("`{option}` of group {i} of {of}"), value);
            }
        }
        for step in [0, 1, 10, 100, 1000, end / 2, end.saturating_sub(1)] {
            // Rounded, since other hosts' libraries may compute another last digit.
            let factor = format!("{:.6}", scheduler.factor(step, max_steps)?);
            agreement.insert(format!("the schedule's factor for {of} at step {step}"), factor);
        }
    }
    Ok(agreement)
}
