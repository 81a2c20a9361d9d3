//! Execution of a pipeline.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Tensor, WithDType};

use crate::{Error, Result};
use fulgurite_collective::collective::{Collective, ProcessGroup};
use fulgurite_module::module::stage::{Border, BorderTensor, Stage, StageEnd};
use fulgurite_module::parallel::Layout;
use fulgurite_tensor::autograd::storage::{self, HostElement};
use fulgurite_tensor::execution::read;

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

impl dyn Pipeline + '_ {
    /// Runs a forward of the whole model without a backward: `forward` is called for each stage of
    /// this rank, and computes up to the stage's end. Returns its result on the ranks of the last
    /// stage. `forward` gets whether the stage is the last. Collective over the pipeline, and over
    /// the ranks with which its layers compute.
    ///
    /// # Errors
    /// As `forward`, and if a peer fails.
    pub fn forward<R>(&self, forward: impl FnMut(bool) -> Result<R>) -> Result<Option<R>> {
        let mut work = ForwardWork { forward, result: None };
        self.evaluate(&mut work)?;
        Ok(work.result)
    }

    /// Returns the values of the rank that computes the last stage. The others give as many.
    /// Collective over the pipeline.
    ///
    /// # Errors
    /// If a peer fails.
    pub fn share<T: WithDType + HostElement>(&self, values: Vec<T>) -> Result<Vec<T>> {
        if values.is_empty() {
            return Ok(values);
        }
        let count = values.len();
        let shared = Tensor::from_vec(values, count, &Device::Cpu)?;
        self.group().run(Collective::broadcast(&shared, self.last_rank()))?;
        read::host(&shared)
    }
}

/// A forward of the whole model.
struct ForwardWork<F, R> {
    forward: F,
    result: Option<R>,
}

impl<R, F: FnMut(bool) -> Result<R>> StageWork for ForwardWork<F, R> {
    fn forward(
        &mut self,
        (_, stage): (usize, &Stage),
        _: usize,
        input: Option<Border>,
    ) -> Result<Option<Border>> {
        match stage.run(input.as_ref(), || (self.forward)(stage.is_last()))?.end {
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
        _: Option<Vec<Tensor>>,
        _: bool,
    ) -> Result<Option<Vec<Tensor>>> {
        Err(Error::other("a forward alone has no backward"))
    }

    fn weights(&mut self, _: usize, _: usize) -> Result<()> {
        Err(Error::other("a forward alone has no backward"))
    }
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

    /// Computes a stage's backward of a micro-batch, whose forward it has computed. `grads` are the
    /// gradients of the tensors that the forward returned and that [take
    /// one](fulgurite_module::module::stage::BorderTensor::takes_gradient); `None` for the last
    /// stage. Returns those of the input; `None` for the first stage. With `leaves_weights`, layers
    /// may leave gradients of their weights for [`weights`](Self::weights).
    ///
    /// # Errors
    /// If the model fails.
    fn backward(
        &mut self,
        stage: usize,
        micro_batch: usize,
        grads: Option<Vec<Tensor>>,
        leaves_weights: bool,
    ) -> Result<Option<Vec<Tensor>>>;

    /// Computes the gradients that a backward has left.
    ///
    /// # Errors
    /// If the model fails.
    fn weights(&mut self, stage: usize, micro_batch: usize) -> Result<()>;
}

/// The forms of tensors between the stages of a pipeline, for dry runs, in which other ranks send
/// nothing. A value of the [execution context](fulgurite_tensor::execution), for all ranks of a
/// plan.
///
/// A rank that is run dry [notes](Self::note) the outputs of its stages. If the stage before was
/// not run yet, a stage gets the output of the last one that was: in most models all units have one
/// shape. [`are_settled`](Self::are_settled) tells whether that was right.
#[derive(Debug, Clone, Default)]
pub struct DryBorders(Arc<Mutex<BTreeMap<BorderId, Known>>>);

/// Which stage gets a tensor, and when.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BorderId {
    /// Steps of the run before this one.
    pub step: usize,
    /// The micro-batch of the step.
    pub micro_batch: usize,
    /// The stage that gets it.
    pub stage: usize,
}

#[derive(Debug, Default)]
struct Known {
    /// What the stage before gave last.
    given: Option<Vec<TensorForm>>,
    /// What the stage got last.
    got: Option<Vec<TensorForm>>,
}

#[derive(Debug, Clone, PartialEq)]
struct TensorForm {
    dims: Vec<usize>,
    dtype: DType,
    form: Option<(Layout, usize)>,
    takes_gradient: bool,
}

impl DryBorders {
    /// Notes what the stage before gives.
    pub fn note(&self, id: BorderId, border: &Border) {
        let form = |of: &BorderTensor| TensorForm {
            dims: of.tensor.dims().to_vec(),
            dtype: of.tensor.dtype(),
            form: of.form,
            takes_gradient: of.takes_gradient,
        };
        let given = border.tensors.iter().map(form).collect();
        self.all().entry(id).or_default().given = Some(given);
    }

    /// A border of the form that the stage gets, with values of no meaning. `None` if no stage
    /// before it was run. The gradients that come back have its forms too.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub fn border(&self, id: BorderId, device: &Device) -> Result<Option<Border>> {
        let forms = {
            let all = &mut *self.all();
            let mut before = all.range(BorderId { stage: 0, ..id }..=id).rev();
            let Some(forms) = before.find_map(|(_, known)| known.given.clone()) else {
                return Ok(None);
            };
            all.entry(id).or_default().got = Some(forms.clone());
            forms
        };
        let of_form = |TensorForm { dims, dtype, form, takes_gradient }: TensorForm| {
            Ok(BorderTensor { tensor: storage::unset(dims, dtype, device)?, form, takes_gradient })
        };
        Ok(Some(Border { tensors: forms.into_iter().map(of_form).collect::<Result<_>>()? }))
    }

    /// Whether each stage got what the stage before gave. Else the ranks have to be run again.
    pub fn are_settled(&self) -> bool {
        let is_right = |known: &Known| match (&known.got, &known.given) {
            (Some(got), Some(given)) => got == given,
            _ => true,
        };
        self.all().values().all(is_right)
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<BorderId, Known>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn border(rows: usize) -> Border {
        let tensor = Tensor::zeros((rows, 2), DType::F32, &Device::Cpu).unwrap();
        let form = Some((Layout::Replicate, 0));
        Border { tensors: vec![BorderTensor { tensor, form, takes_gradient: true }] }
    }

    fn id(stage: usize, micro_batch: usize) -> BorderId {
        BorderId { step: 1, micro_batch, stage }
    }

    fn rows(borders: &DryBorders, id: BorderId) -> Option<usize> {
        let border = borders.border(id, &Device::Cpu).unwrap();
        border.map(|border| border.tensors[0].tensor.dims()[0])
    }

    #[test]
    fn unknown_borders_are_guessed() {
        let borders = DryBorders::default();
        assert_eq!(rows(&borders, id(1, 0)), None);
        borders.note(id(1, 0), &border(3));
        borders.note(id(1, 1), &border(4));
        let got =
            [id(3, 0), id(3, 1), BorderId { step: 2, ..id(3, 0) }].map(|id| rows(&borders, id));
        assert_eq!(got, [Some(3), Some(4), None], "as stage 1 got in the same step");
        assert!(borders.are_settled());
        borders.note(id(3, 0), &border(3));
        assert!(borders.are_settled());
    }

    #[test]
    fn wrong_guesses_are_known() {
        let borders = DryBorders::default();
        borders.note(id(1, 0), &border(3));
        assert_eq!(rows(&borders, id(2, 0)), Some(3));
        borders.note(id(2, 0), &border(5));
        assert!(!borders.are_settled());
        assert_eq!(rows(&borders, id(2, 0)), Some(5));
        assert!(borders.are_settled());
        // Another round gave something else to a stage that was not run again.
        borders.note(id(2, 0), &border(6));
        assert!(!borders.are_settled());
    }
}
