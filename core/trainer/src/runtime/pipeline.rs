//! Steps under a pipeline: one backward of the strategy for all micro-batches of a step.

use std::sync::Arc;

use candle_core::{DType, Tensor};

use super::runtime::StrategyRuntime;
use crate::{Error, Result};
use fulgurite_engine::autograd::{refuse_variables, refuse_wrong_gradients};
use fulgurite_engine::execution::dry_run;
use fulgurite_engine::module::stage::{Computed, StageEnd};
use fulgurite_engine::strategy::{Loss, Pipeline};

impl StrategyRuntime {
    /// The strategy's pipeline, if ranks compute different stages.
    pub(crate) fn pipeline(&self) -> Result<Option<Arc<dyn Pipeline>>> {
        Ok(self.lock_state()?.extensions().pipeline())
    }

    /// Sets the first loss scale of a training in f16. `forward` computes the first micro-batch's
    /// loss, which ranks of the last stage get. Within the step the scale would come too late for
    /// the other ranks. Collective.
    pub(crate) fn begin_scale_in_pipeline(
        &self,
        forward: impl FnOnce() -> Result<Option<Loss>>,
    ) -> Result<()> {
        match self.loss_scale()? {
            Some(mut scale) if !scale.has_begun() => {
                // In a plan other ranks would send nothing.
                match dry_run::is_on() {
                    true => scale.begin(1.0),
                    false => {
                        let loss = forward()?;
                        self.begin_scale(&mut scale, loss.map_or(0.0, |loss| loss.count()))?;
                    }
                }
                self.set_loss_scale(scale)
            }
            _ => Ok(()),
        }
    }

    /// Runs a step's forwards and backwards: `run` computes them, with
    /// [`backward_of_stage`](Self::backward_of_stage). Collective.
    pub(crate) fn in_pipeline(
        &self,
        pipeline: &dyn Pipeline,
        run: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let context = self.context()?;
        {
            let state = &mut *self.lock_state()?;
            // Ranks without the last stage have a loss of zero. In a dry run the last stage does
            // not answer, and a step in which nothing counts would be skipped.
            let zero = Tensor::zeros((), DType::F64, self.tree()?.parameters()[0].device())?;
            let is_last = pipeline.group().rank() == pipeline.last_rank();
            let count = if dry_run::is_on() && !is_last { 1.0 } else { 0.0 };
            let nothing = Loss::new(zero.clone(), count);
            for step in &mut state.steps {
                step.add(&nothing, &zero, true)?;
            }
            state.strategy.begin_backward(context, true)?;
        }
        run()?;
        self.end_backward(&mut *self.lock_state()?, context, true)
    }

    /// Runs a stage's backward of a micro-batch, and returns the gradients of the stage's input.
    /// The stage gets `grads` of its output, and the last stage none. Not collective.
    pub(crate) fn backward_of_stage(
        &self,
        computed: Computed<Loss>,
        grads: Option<Vec<Tensor>>,
    ) -> Result<Option<Vec<Tensor>>> {
        let _phase = self.phase("backward");
        let root = match (&computed.end, grads) {
            (StageEnd::Step(loss), None) => {
                let sharing = self.context_parallel().map_or(1, |context| context.size());
                loss.check_sequence_ranks(sharing)?;
                let (context, state) = (self.context()?, &mut *self.lock_state()?);
                self.note_loss(context, &mut state.steps, loss, true)?;
                Some(match &mut state.loss_scale {
                    Some(scale) => self.scale_loss(loss, scale)?,
                    None => loss.sum().clone(),
                })
            }
            (StageEnd::Border(_), Some(grads)) => computed.seed(grads)?,
            (StageEnd::Step(_), Some(_)) => {
                return Err(Error::other("the last stage of a pipeline got a gradient"));
            }
            (StageEnd::Border(_), None) => {
                return Err(Error::other("a stage of a pipeline got no gradient"));
            }
        };
        let is_audited = self.is_audited()?;
        computed.backward(root.filter(Tensor::track_op), |root, grads| {
            if is_audited {
                return Ok(());
            }
            refuse_variables(root, grads)?;
            refuse_wrong_gradients(root)
        })
    }

    /// Whether the first step's gradients were audited.
    fn is_audited(&self) -> Result<bool> {
        Ok(self.lock_state()?.steps.iter().all(|step| step.audited))
    }
}
