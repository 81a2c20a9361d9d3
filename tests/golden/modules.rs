//! The modules that a `Trainer` trains, and their data.

use candle_core::{Device, Tensor};
use fulgurite::core::trainer::{OptimizerSetup, Optimizers};
use fulgurite::prelude::*;
use fulgurite_test_support::training::{Transformer, micro_batch};
use serde::{Deserialize, Serialize};

use crate::fault::FaultAt;
use crate::pair::Pair;

/// Unset keys are not serialised, so that older configurations keep their serialised form.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct ModelConfig {
    /// The fault to inject.
    #[serde(skip_serializing_if = "Option::is_none")]
    fault: Option<FaultAt>,
    /// Whether the pair's optimizers update only every second step.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    accumulates: bool,
}

impl ModelConfig {
    fn change(&self, loss: Loss, ctx: &StepContext) -> Result<Loss> {
        match self.fault {
            Some(fault) => fault.apply(loss, ctx.step, (ctx.rank, ctx.world_size)),
            None => Ok(loss),
        }
    }
}

/// The transformer.
pub(crate) struct Lit {
    transformer: Transformer,
    config: ModelConfig,
}

impl LightningModule for Lit {
    type Config = ModelConfig;
    type Data = Samples;

    fn configure_model(config: &ModelConfig, b: &ModuleBuilder) -> Result<Self> {
        Ok(Self { transformer: Transformer::new(b)?, config: config.clone() })
    }

    fn training_step(&mut self, batch: &(Tensor, Tensor), ctx: &mut StepContext) -> Result<Loss> {
        let loss = self.validation_step(batch, ctx)?;
        self.config.change(loss, ctx)
    }

    fn validation_step(
        &mut self,
        (ids, targets): &(Tensor, Tensor),
        _: &mut StepContext,
    ) -> Result<Loss> {
        cross_entropy(&self.transformer.forward(ids)?, targets)
    }
}

impl Hooks<Samples> for Lit {}

/// The generator and its critic, by manual optimization.
pub(crate) struct LitPair {
    pair: Pair,
    config: ModelConfig,
}

impl LightningModule for LitPair {
    type Config = ModelConfig;
    type Data = Samples;

    fn configure_model(config: &ModelConfig, b: &ModuleBuilder) -> Result<Self> {
        Ok(Self { pair: Pair::new(b)?, config: config.clone() })
    }

    fn configure_optimizers(&self, configured: OptimizerSetup) -> Result<Optimizers> {
        let another = configured.another()?;
        let [critic, generator] = Pair::OPTIMIZERS;
        Ok(Optimizers::several().with(critic, &[critic], configured).with(
            generator,
            &[generator],
            another,
        ))
    }

    fn automatic_optimization(&self) -> bool {
        false
    }

    fn training_step(
        &mut self,
        (ids, _): &(Tensor, Tensor),
        ctx: &mut StepContext,
    ) -> Result<Loss> {
        let accumulating = self.config.accumulates && ctx.step % 2 == 1;
        for name in Pair::OPTIMIZERS {
            if !self.config.accumulates {
                let step =
                    ctx.optimize(name, |ctx| self.config.change(self.pair.loss(name, ids)?, ctx))?;
                ctx.log(&format!("{name}_loss"), step.loss);
                continue;
            }
            let _no_sync = ctx.no_backward_sync(accumulating)?;
            let turn = ctx.toggle_optimizer(name)?;
            ctx.manual_backward(&self.pair.loss(name, ids)?)?;
            drop(turn);
            if !accumulating {
                ctx.optimizer_step(name)?;
            }
        }
        let [_, generator] = Pair::OPTIMIZERS;
        self.pair.loss(generator, ids)
    }

    fn validation_step(
        &mut self,
        (ids, _): &(Tensor, Tensor),
        _: &mut StepContext,
    ) -> Result<Loss> {
        let [_, generator] = Pair::OPTIMIZERS;
        self.pair.loss(generator, ids)
    }
}

impl Hooks<Samples> for LitPair {}

/// Shuffled samples of the test support.
pub(crate) struct Samples;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct SamplesConfig {
    batch_size: usize,
}

impl Default for SamplesConfig {
    fn default() -> Self {
        Self { batch_size: 3 }
    }
}

impl DataModule for Samples {
    type Config = SamplesConfig;
    type Batch = (Tensor, Tensor);

    fn setup(_: &SamplesConfig, _: &DataContext) -> Result<Self> {
        Ok(Self)
    }

    fn batch_size(config: &SamplesConfig) -> usize {
        config.batch_size
    }

    fn shuffle(_: &SamplesConfig) -> bool {
        true
    }

    fn len(&self, split: Split) -> u64 {
        match split {
            Split::Train => 40,
            _ => 7,
        }
    }

    fn batch(&self, _: Split, indices: &[u64], _: &Device) -> Result<(Tensor, Tensor)> {
        let samples = indices.iter().map(|&i| micro_batch(i, i as usize % 12, 12));
        let samples = samples.collect::<Result<Vec<_>>>()?;
        let ids: Vec<&Tensor> = samples.iter().map(|sample| &sample.ids).collect();
        let targets: Vec<&Tensor> = samples.iter().map(|sample| &sample.targets).collect();
        Ok((Tensor::cat(&ids, 0)?, Tensor::cat(&targets, 0)?))
    }
}
