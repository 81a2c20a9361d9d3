//! The forwards and backwards of a step whose ranks compute different stages of the model.

use std::collections::HashMap;
use std::fmt::Display;

use candle_core::Tensor;

use crate::fabric::Fabric;
use crate::trainer::StepContext;
use crate::trainer::fit::plan::LoopPlan;
use crate::trainer::module::hooks::Hook;
use crate::trainer::module::runner::ModuleRunner;
use crate::trainer::run_plan::check_time;
use crate::trainer::session::Session;
use crate::{Error, Result};
use fulgurite_engine::autograd::{detect_anomaly, no_grad};
use fulgurite_engine::data::StepSamples;
use fulgurite_engine::execution::dry_run;
use fulgurite_engine::memory;
use fulgurite_engine::module::ForwardScope;
use fulgurite_engine::module::stage::{Border, Computed, Stage, StageEnd};
use fulgurite_engine::parallel::explain_mismatch;
use fulgurite_engine::parameter::LaterGradients;
use fulgurite_engine::strategy::{Loss, Pipeline, StageWork};

impl Session {
    /// Runs all micro-batches of a step through the stages. The hook before a backward is not
    /// called, because only ranks of the last stage have a loss. Collective.
    pub(super) fn micro_batches_in_pipeline(
        &mut self,
        pipeline: &dyn Pipeline,
        (plan, of_step): (&LoopPlan, &StepSamples),
        ctx: &mut StepContext,
    ) -> Result<()> {
        let mut batches = Vec::with_capacity(of_step.micro_batches);
        for micro_batch in 0..of_step.micro_batches {
            self.batch_hook(Hook::TrainBatchStart, micro_batch as u64)?;
            let _phase = self.setup.fabric.measurements().phase("data");
            batches.push(MicroBatch {
                samples: self.runner.keep_training_batch()?.indices().len(),
                first_sample: plan.sampler.first_sample(of_step, micro_batch),
                is_padding: plan.sampler.is_padding(of_step, micro_batch),
            });
        }
        let _detecting = self.setup.config.detect_anomaly.then(detect_anomaly);
        let (fabric, runner) = (&self.setup.fabric, &mut *self.runner);
        let (computed, left) = (HashMap::new(), HashMap::new());
        let mut work = TrainingWork { fabric, runner, ctx, batches: &batches, computed, left };
        let runtime = &fabric.runtime;
        let result = runtime
            .begin_scale_in_pipeline(|| {
                let _no_grad = no_grad();
                work.ctx.is_muted = true;
                pipeline.forward(|_| work.step(0, "for the first loss scale"))
            })
            .and_then(|()| {
                runtime.in_pipeline(pipeline, || pipeline.train(of_step.micro_batches, &mut work))
            });
        self.runner.forget_kept_batches();
        result?;
        for micro_batch in 0..of_step.micro_batches as u64 {
            self.batch_hook(Hook::AfterBackward, micro_batch)?;
            self.batch_hook(Hook::TrainBatchEnd, micro_batch)?;
        }
        Ok(())
    }
}

/// A micro-batch of a step.
struct MicroBatch {
    /// Number of samples.
    samples: usize,
    /// The first sample's index in the step.
    first_sample: u64,
    is_padding: bool,
}

/// The computation of a step's stages on this rank.
struct TrainingWork<'a> {
    fabric: &'a Fabric,
    runner: &'a mut dyn ModuleRunner,
    ctx: &'a mut StepContext,
    batches: &'a [MicroBatch],
    /// By stage and micro-batch: forwards whose backward is to come.
    computed: HashMap<(usize, usize), Computed<Loss>>,
    /// Gradients of weights to be computed later.
    left: HashMap<(usize, usize), LaterGradients>,
}

impl TrainingWork<'_> {
    /// Computes the module's step on a micro-batch. `what` is for messages.
    fn step(&mut self, micro_batch: usize, what: impl Display) -> Result<Loss> {
        let Self { fabric, runner, ctx, batches, .. } = self;
        let MicroBatch { samples, first_sample, is_padding } = batches[micro_batch];
        ctx.begin_batch(micro_batch as u64, samples, is_padding);
        let step = ctx.step;
        let loss = runner.kept_training_step(micro_batch, ctx, &mut |forward| {
            let scope = fabric.scope(true, step, first_sample);
            let _scope = ForwardScope { is_padding, ..scope }.enter();
            let _phase = fabric.measurements().phase("forward");
            forward().map_err(|error| {
                let place = format!("in training_step of step {step}, {what}");
                explain_mismatch(error).during(place)
            })
        })?;
        if is_padding { loss.ignored() } else { Ok(loss) }
    }
}

impl StageWork for TrainingWork<'_> {
    fn forward(
        &mut self,
        (index, stage): (usize, &Stage),
        micro_batch: usize,
        input: Option<Border>,
    ) -> Result<Option<Border>> {
        self.ctx.is_muted = !stage.is_last();
        mark("forward", index, micro_batch)?;
        let what = format_args!("stage {index}");
        let of_stage = stage.run(input.as_ref(), || self.step(micro_batch, what))?;
        let border = match &of_stage.end {
            StageEnd::Border(border) => Some(border.detach()),
            StageEnd::Step(_) => None,
        };
        self.computed.insert((index, micro_batch), of_stage);
        Ok(border)
    }

    fn backward(
        &mut self,
        stage: usize,
        micro_batch: usize,
        grads: Option<Vec<Tensor>>,
        leaves_weights: bool,
    ) -> Result<Option<Vec<Tensor>>> {
        let Some(computed) = self.computed.remove(&(stage, micro_batch)) else {
            return Err(Error::other("a stage's backward comes before its forward"));
        };
        mark("backward", stage, micro_batch)?;
        let (step, first_sample) = (self.ctx.step, self.batches[micro_batch].first_sample);
        let _scope = self.fabric.forward_scope(true, step, first_sample);
        let located =
            |error: Error| error.during(format_args!("in backward of step {step}, stage {stage}"));
        let backward = || self.fabric.runtime.backward_of_stage(computed, grads).map_err(located);
        if !leaves_weights {
            return backward();
        }
        let (grads, left) = LaterGradients::collect(backward);
        self.left.insert((stage, micro_batch), left);
        grads
    }

    fn weights(&mut self, stage: usize, micro_batch: usize) -> Result<()> {
        mark("gradients of weights", stage, micro_batch)?;
        let _phase = self.fabric.measurements().phase("backward");
        let left = self.left.remove(&(stage, micro_batch));
        left.map_or(Ok(()), LaterGradients::compute)
    }
}

/// Begins a part of a planned step.
fn mark(part: &str, stage: usize, micro_batch: usize) -> Result<()> {
    if !dry_run::is_on() {
        return Ok(());
    }
    memory::mark(&format!("{part} of stage {stage}, micro-batch {micro_batch}"));
    check_time()
}
