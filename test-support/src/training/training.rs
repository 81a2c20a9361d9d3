//! Training with a hand-written loop.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{DType, Tensor};
use fulgurite_core::Result;
use fulgurite_core::collective::{ProcessGroup, all_gather_object};
use fulgurite_core::fabric::{Fabric, FabricOptimizer};
use fulgurite_core::module::{ActivationCheckpointing, Module as _, ModuleInit, ModuleTree};
use fulgurite_core::nn::{Loss, cross_entropy};
use fulgurite_core::optim::{AdamW, Cosine, OptimizerConfig};
use fulgurite_core::shard::Region;
use fulgurite_core::strategy::{BuildContext, Strategy, StrategyConfig};
use fulgurite_strategies as _;

use super::{Transformer, micro_batch};

/// Parses a strategy's table (as JSON), and `trainer.activation_checkpointing`, a key that tests
/// add to it.
fn parse(config: &str) -> Result<(Box<dyn StrategyConfig>, ActivationCheckpointing)> {
    const KEY: &str = "activation_checkpointing";
    let parsed = || -> serde_json::Result<_> {
        let mut table: serde_json::Map<String, serde_json::Value> = serde_json::from_str(config)?;
        let checkpointing = table.remove(KEY).map(serde_json::from_value).transpose()?;
        Ok((serde_json::from_value(table.into())?, checkpointing.unwrap_or_default()))
    };
    parsed().map_err(fulgurite_core::Error::other)
}

/// The strategy that a configuration names.
pub fn strategy(config: &str) -> Result<Box<dyn Strategy>> {
    parse(config)?.0.build(&BuildContext::default())
}

/// The model initialisation for a configuration.
pub fn init(config: &str) -> Result<ModuleInit> {
    Ok(ModuleInit { activation_checkpointing: parse(config)?.1, ..ModuleInit::default() })
}

/// A configuration with activation checkpointing: a word, or a table (as JSON).
pub fn checkpointed(config: &str, mode: &str) -> String {
    let mode = if mode.starts_with('{') { mode.to_owned() } else { format!("{mode:?}") };
    format!(r#"{}, "activation_checkpointing": {mode}}}"#, config.trim_end_matches('}'))
}

/// Activation checkpointing with inputs in files.
pub const OFFLOADED: &str = r#"{"type": "full", "offload": "disk"}"#;

/// Nothing is recomputed; all kept activations are in files.
pub const ALL_OFFLOADED: &str = r#"{"type": "none", "offload": "disk"}"#;

/// The result of a training run.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    pub losses: Vec<f64>,
    pub norms: Vec<f64>,
    /// Full parameters by FQN.
    pub weights: BTreeMap<String, Vec<f32>>,
    /// Exponential moving averages, if kept.
    pub averages: BTreeMap<String, Vec<f32>>,
}

/// A rank's transformer in training.
pub struct Training {
    pub fabric: Fabric,
    pub model: Transformer,
    pub optimizer: FabricOptimizer,
    /// Micro-batches per step.
    pub accumulate: usize,
    pub step: u64,
}

impl Training {
    pub const STEPS: u64 = 20;

    /// Sets up training, with one frozen projection.
    pub fn new(
        world: Arc<dyn ProcessGroup>,
        config: &str,
        compute_dtype: DType,
        accumulate: usize,
    ) -> Result<Self> {
        let optimizer = AdamW {
            lr: 3e-3,
            weight_decay: 0.1,
            no_decay: vec!["*norm*".to_owned(), "bias".to_owned()],
            ..AdamW::default()
        };
        Self::with_optimizer(world, config, compute_dtype, accumulate, &optimizer)
    }

    /// Like [`new`](Self::new), with this optimizer.
    pub fn with_optimizer(
        world: Arc<dyn ProcessGroup>,
        config: &str,
        compute_dtype: DType,
        accumulate: usize,
        optimizer: &dyn OptimizerConfig,
    ) -> Result<Self> {
        let frozen = vec!["layers.*.self_attn.k_proj.weight".to_owned()];
        let init = ModuleInit { compute_dtype, frozen, ..init(config)? };
        let mut fabric = Fabric::new(world, strategy(config)?, init, 7)?;
        let (model, optimizer) = fabric.setup(Transformer::new, optimizer)?;
        let schedule = Cosine { warmup_steps: 3, ..Cosine::default() };
        let optimizer = optimizer.with_scheduler(Box::new(schedule), Some(Self::STEPS));
        Ok(Self { fabric, model, optimizer, accumulate, step: 0 })
    }

    /// One micro-batch, forward and backward. `last` says whether gradients synchronise.
    pub fn micro_step(&self, micro: usize, last: bool) -> Result<()> {
        self.micro_step_with(micro, last, &Ok)
    }

    /// Like [`micro_step`](Self::micro_step), with backward from `change` applied to the loss.
    pub fn micro_step_with(
        &self,
        micro: usize,
        last: bool,
        change: &dyn Fn(Loss) -> Result<Loss>,
    ) -> Result<()> {
        let (rank, size) = (self.fabric.global_rank(), self.fabric.world_size());
        let sample = micro_batch(self.step, micro * size + rank, size * self.accumulate)?;
        let _scope = self.fabric.forward_scope(true, self.step, sample.first as u64);
        let logits = self.model.forward(&sample.ids)?;
        let loss = change(cross_entropy(&logits, &sample.targets)?)?;
        let _no_sync = self.fabric.no_backward_sync(!last);
        self.fabric.backward(&loss)
    }

    /// Ends a step; returns its loss and gradient norm.
    pub fn finish_step(&mut self) -> Result<(f64, f64)> {
        let loss = self.fabric.step_totals(&[])?.mean();
        let norm = self.fabric.clip_gradients_norm(&mut self.optimizer, 0.5)?;
        self.optimizer.step()?;
        self.step += 1;
        Ok((loss, norm))
    }

    /// One optimizer step; returns its loss and gradient norm.
    pub fn step(&mut self) -> Result<(f64, f64)> {
        for micro in 0..self.accumulate {
            self.micro_step(micro, micro + 1 == self.accumulate)?;
        }
        self.finish_step()
    }

    /// Runs all steps.
    pub fn run(mut self) -> Result<Run> {
        let steps: Vec<(f64, f64)> =
            (0..Self::STEPS).map(|_| self.step()).collect::<Result<_>>()?;
        let (losses, norms) = steps.into_iter().unzip();
        let weights = gather_weights(self.fabric.module_tree()?, &**self.fabric.world())?;
        Ok(Run { losses, norms, weights, averages: BTreeMap::new() })
    }
}

/// Gathers every parameter to full size on every rank.
pub fn gather_weights(
    tree: &ModuleTree,
    world: &dyn ProcessGroup,
) -> Result<BTreeMap<String, Vec<f32>>> {
    let parameters = tree.parameters().iter();
    parameters
        .map(|parameter| {
            let (local, fqn) = (parameter.local()?, parameter.fqn());
            let shape = parameter.global_shape();
            Ok((fqn.to_owned(), gather_whole(fqn, &local.values, local.region, shape, world)?))
        })
        .collect()
}

/// Assembles a tensor of `shape` from the ranks' regions. Overlapping regions must agree bit by
/// bit.
pub(crate) fn gather_whole(
    name: &str,
    values: &Tensor,
    region: Region,
    shape: &[usize],
    world: &dyn ProcessGroup,
) -> Result<Vec<f32>> {
    let values = values.to_dtype(DType::F32)?.to_vec1::<f32>()?;
    let bits: Vec<u32> = values.into_iter().map(f32::to_bits).collect();
    let mut whole = vec![None; shape.iter().product()];
    let parts: Vec<(Region, Vec<u32>)> = all_gather_object(world, &(region, bits))?;
    for (region, bits) in parts {
        for run in region.runs(shape) {
            for i in 0..run.len {
                let value = bits[run.inner + i];
                let place = &mut whole[run.outer + i];
                assert!(place.is_none_or(|other| other == value), "{name}");
                *place = Some(value);
            }
        }
    }
    let whole = whole.into_iter().map(|bits| f32::from_bits(bits.expect("nothing is missing")));
    Ok(whole.collect())
}
