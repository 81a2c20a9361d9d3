//! Execution of a pipeline.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Tensor};

use crate::{Error, Result};
use fulgurite_collective::collective::ProcessGroup;
use fulgurite_module::module::stage::{Border, Stage};
use fulgurite_module::parallel::Layout;

/// A strategy's pipeline: the model's stages on this rank, and the order of their work.
///
/// The trainer computes, and the pipeline decides what and when, and passes tensors between ranks.
/// A training step under a pipeline has one backward of the strategy: it begins before the first
/// micro-batch's backward and ends with a reduction after the last one's.
pub trait Pipeline: Send + Sync {
    /// Runs the forwards and backwards of a training step on this rank. Collective over all ranks.
    ///
    /// # Errors
    /// If the work or a peer fails.
    fn train(&self, micro_batches: usize, work: &mut dyn StageWork) -> Result<()>;

    /// Runs the forward of one batch through all stages. Collective over all ranks.
    ///
    /// # Errors
    /// If the work or a peer fails.
    fn evaluate(&self, work: &mut dyn StageWork) -> Result<()>;

    /// The ranks of the pipeline.
    fn group(&self) -> &Arc<dyn ProcessGroup>;

    /// The rank in [`group`](Self::group) that computes the last stage, whose step has a result.
    fn last_rank(&self) -> usize;
}

/// A rank's computation in a pipeline.
pub trait StageWork {
    /// Computes a stage's forward of a micro-batch. Stages but the first get what the stage before
    /// gave. Returns what the next stage gets; `None` for the last stage.
    ///
    /// # Errors
    /// If the model fails.
    fn forward(
        &mut self,
        stage: (usize, &Stage),
        micro_batch: usize,
        input: Option<Border>,
    ) -> Result<Option<Border>>;

    /// Computes a stage's backward of a micro-batch, whose forward it has computed. `grad` is the
    /// gradient of what the forward returned; `None` for the last stage. Returns the gradient of
    /// the input; `None` for the first stage. With `leaves_weights`, layers may leave gradients of
    /// their weights for [`weights`](Self::weights).
    ///
    /// # Errors
    /// If the model fails.
    fn backward(
        &mut self,
        stage: usize,
        micro_batch: usize,
        grad: Option<Tensor>,
        leaves_weights: bool,
    ) -> Result<Option<Tensor>>;

    /// Computes the gradients that a backward has left.
    ///
    /// # Errors
    /// If the model fails.
    fn weights(&mut self, stage: usize, micro_batch: usize) -> Result<()>;
}

/// What the stages of a pipeline give each other, for dry runs: other ranks send nothing there. A
/// value of the [execution context](fulgurite_tensor::execution), for all ranks of a plan.
///
/// A rank that is run dry notes what its stages give. A stage whose predecessor was not run yet
/// gets what the last known stage before it gives, as in models whose units have one shape.
/// [`were_guessed_wrong`](Self::were_guessed_wrong) tells whether a rank has to be run again.
#[derive(Debug, Clone, Default)]
pub struct DryBorders(Arc<Mutex<BorderForms>>);

/// By the stage that gets it, and micro-batch.
type BorderForms = BTreeMap<(usize, usize), Known>;

#[derive(Debug, Default)]
struct Known {
    /// What the stage before gives.
    given: Option<BorderForm>,
    /// What the stage got while that was unknown.
    guessed: Option<BorderForm>,
}

#[derive(Debug, Clone, PartialEq)]
struct BorderForm {
    dims: Vec<usize>,
    dtype: DType,
    form: Option<(Layout, usize)>,
}

impl DryBorders {
    /// Notes what `stage` gets for a micro-batch.
    pub fn note(&self, stage: usize, micro_batch: usize, border: &Border) {
        let (dims, dtype) = (border.tensor.dims().to_vec(), border.tensor.dtype());
        let given = Some(BorderForm { dims, dtype, form: border.form });
        self.forms().entry((stage, micro_batch)).or_default().given = given;
    }

    /// A border of the form that `stage` gets for a micro-batch, with values of no meaning. The
    /// gradient that comes back has its form too.
    ///
    /// # Errors
    /// If no stage before `stage` was run.
    pub fn border(&self, stage: usize, micro_batch: usize, device: &Device) -> Result<Border> {
        let mut forms = self.forms();
        let before = forms.iter().rev().filter(|((_, of), _)| *of == micro_batch);
        let known = before.skip_while(|((at, _), _)| *at > stage).find_map(|(at, known)| {
            let given = known.given.clone()?;
            Some((at.0, given))
        });
        let Some((at, form)) = known else {
            return Err(Error::Config(
                "`trainer.strategy.pipeline_schedule`: a plan begins with rank 0, which does not compute the first \
                 stage in this schedule"
                    .to_owned(),
            ));
        };
        if at < stage {
            forms.entry((stage, micro_batch)).or_default().guessed = Some(form.clone());
        }
        drop(forms);
        Ok(Border { tensor: Tensor::zeros(form.dims, form.dtype, device)?, form: form.form })
    }

    /// Whether a stage got something else than what the stage before gave later. Forgets the
    /// guesses.
    pub fn were_guessed_wrong(&self) -> bool {
        let mut wrong = false;
        for known in self.forms().values_mut() {
            let guessed = known.guessed.take();
            wrong |= guessed.zip(known.given.as_ref()).is_some_and(|(a, b)| a != *b);
        }
        wrong
    }

    fn forms(&self) -> MutexGuard<'_, BorderForms> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn border(rows: usize) -> Border {
        let tensor = Tensor::zeros((rows, 2), DType::F32, &Device::Cpu).unwrap();
        Border { tensor, form: Some((Layout::Replicate, 0)) }
    }

    fn rows(borders: &DryBorders, stage: usize, micro_batch: usize) -> usize {
        borders.border(stage, micro_batch, &Device::Cpu).unwrap().tensor.dims()[0]
    }

    #[test]
    fn unknown_borders_are_guessed() {
        let borders = DryBorders::default();
        assert!(borders.border(1, 0, &Device::Cpu).is_err());
        borders.note(1, 0, &border(3));
        borders.note(1, 1, &border(4));
        assert_eq!((rows(&borders, 3, 0), rows(&borders, 3, 1)), (3, 4), "as stage 1 got");
        borders.note(2, 0, &border(3));
        borders.note(3, 0, &border(3));
        borders.note(3, 1, &border(4));
        assert!(!borders.were_guessed_wrong());
    }

    #[test]
    fn wrong_guesses_are_known() {
        let borders = DryBorders::default();
        borders.note(1, 0, &border(3));
        assert_eq!(rows(&borders, 2, 0), 3);
        borders.note(2, 0, &border(5));
        assert!(borders.were_guessed_wrong());
        assert_eq!(rows(&borders, 2, 0), 5);
        assert!(!borders.were_guessed_wrong());
    }
}
