//! Batches of an evaluation whose ranks compute different stages of the model.

use candle_core::Tensor;

use crate::{Error, Result};
use fulgurite_engine::module::stage::{Border, Stage, StageEnd};
use fulgurite_engine::strategy::{Pipeline, StageWork};

/// Whether a step logs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Logs {
    Yes,
    /// The stage does not end the step.
    No,
}

/// Runs a batch of an evaluation through the stages. `step` computes on the whole model. Returns
/// its result on the ranks of the last stage. Collective.
pub(crate) fn evaluate_in_pipeline<R>(
    pipeline: &dyn Pipeline,
    step: &mut dyn FnMut(Logs) -> Result<R>,
) -> Result<Option<R>> {
    let mut work = EvaluationWork { step, result: None };
    pipeline.evaluate(&mut work)?;
    Ok(work.result)
}

/// The computation of a batch of an evaluation.
struct EvaluationWork<'a, R> {
    step: &'a mut dyn FnMut(Logs) -> Result<R>,
    result: Option<R>,
}

impl<R> StageWork for EvaluationWork<'_, R> {
    fn forward(
        &mut self,
        (_, stage): (usize, &Stage),
        _: usize,
        input: Option<Border>,
    ) -> Result<Option<Border>> {
        let logs = if stage.is_last() { Logs::Yes } else { Logs::No };
        match stage.run(input.as_ref(), || (self.step)(logs))?.end {
            StageEnd::Border(border) => Ok(Some(border.detach())),
            StageEnd::Step(result) => {
                self.result = Some(result);
                Ok(None)
            }
        }
    }

    fn backward(
        &mut self,
        _: usize,
        _: usize,
        _: Option<Tensor>,
        _: bool,
    ) -> Result<Option<Tensor>> {
        Err(Error::other("an evaluation has no backward"))
    }

    fn weights(&mut self, _: usize, _: usize) -> Result<()> {
        Err(Error::other("an evaluation has no backward"))
    }
}
