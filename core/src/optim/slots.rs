//! The parameters of an optimizer and their state tensors.

use candle_core::{DType, Tensor};

use super::elementwise::state_dtype;
use super::groups::Hyper;
use super::optimizer::StateTensor;
use crate::parameter::Parameter;
use crate::{Error, Result};

/// Parameters, their groups' options, and `N` state tensors each, allocated when first needed.
pub(super) struct Slots<const N: usize> {
    parameters: Vec<Parameter>,
    hypers: Vec<Hyper>,
    states: Vec<Option<[Tensor; N]>>,
    names: [&'static str; N],
}

/// What one parameter's update works on. All tensors are flat and of equal length.
pub(super) struct Work<const N: usize> {
    pub(super) hyper: Hyper,
    /// The values to change in place.
    pub(super) values: Tensor,
    /// The gradient, in the state's dtype.
    pub(super) grad: Tensor,
    /// The state to change in place.
    pub(super) state: [Tensor; N],
}

impl<const N: usize> Slots<N> {
    /// `hypers` is parallel to `parameters`.
    ///
    /// # Errors
    /// If a parameter's dtype is not a float.
    pub(super) fn new(
        parameters: &[Parameter],
        hypers: Vec<Hyper>,
        names: [&'static str; N],
    ) -> Result<Self> {
        for parameter in parameters {
            state_dtype_of(parameter)?;
        }
        let states = parameters.iter().map(|_| None).collect();
        Ok(Self { parameters: parameters.to_vec(), hypers, states, names })
    }

    pub(super) fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// What to update for parameter `index`; `None` without a gradient or without elements here.
    pub(super) fn work(&mut self, index: usize) -> Result<Option<Work<N>>> {
        let parameter = &self.parameters[index];
        let Some(grad) = parameter.local_grad() else { return Ok(None) };
        let values = parameter.local()?.values;
        if grad.elem_count() != values.elem_count() {
            return Err(Error::parameter(
                parameter.fqn(),
                format!(
                    "its local gradient has {} elements, its local shard {}",
                    grad.elem_count(),
                    values.elem_count()
                ),
            ));
        }
        let grad = grad.to_dtype(state_dtype_of(parameter)?)?;
        let state = self.state(index)?.clone();
        if values.elem_count() == 0 {
            return Ok(None);
        }
        Ok(Some(Work { hyper: self.hypers[index], values, grad, state }))
    }

    fn state(&mut self, index: usize) -> Result<&[Tensor; N]> {
        let parameter = &self.parameters[index];
        let values = parameter.local()?.values;
        if let Some(first) = self.states[index].as_ref().and_then(|state| state.first())
            && first.elem_count() != values.elem_count()
        {
            return Err(Error::parameter(
                parameter.fqn(),
                format!(
                    "its local shard has {} elements now, but had {} when the optimizer's state \
                     was made; build the optimizer after the model is set up",
                    values.elem_count(),
                    first.elem_count()
                ),
            ));
        }
        let slot = &mut self.states[index];
        if slot.is_none() {
            let dtype = state_dtype_of(parameter)?;
            let mut tensors = Vec::with_capacity(N);
            for _ in 0..N {
                tensors.push(Tensor::zeros(values.elem_count(), dtype, values.device())?);
            }
            *slot = tensors.try_into().ok();
        }
        slot.as_ref().ok_or_else(|| Error::other("optimizer state was not allocated"))
    }

    /// All state tensors, as [`Optimizer::state_tensors`](super::Optimizer::state_tensors).
    pub(super) fn state_tensors(&mut self) -> Result<Vec<StateTensor>> {
        let mut all = Vec::with_capacity(N * self.parameters.len());
        for index in 0..self.parameters.len() {
            let state = self.state(index)?.clone();
            let parameter = &self.parameters[index];
            let region = parameter.local()?.region;
            for (name, values) in self.names.into_iter().zip(state) {
                all.push(StateTensor {
                    fqn: parameter.fqn().to_owned(),
                    name,
                    values,
                    region: region.clone(),
                    shape: parameter.global_shape().to_vec(),
                });
            }
        }
        Ok(all)
    }
}

fn state_dtype_of(parameter: &Parameter) -> Result<DType> {
    state_dtype(parameter.dtype()).ok_or_else(|| {
        Error::parameter(
            parameter.fqn(),
            format!("is of dtype {:?}; optimizers update floats only", parameter.dtype()),
        )
    })
}

/// Reads the step count that every optimizer here keeps.
pub(super) fn load_step(scalars: &std::collections::BTreeMap<String, f64>) -> Result<u64> {
    match scalars.get("step") {
        Some(&step) if step >= 0.0 && step.fract() == 0.0 => Ok(step as u64),
        Some(step) => Err(Error::other(format!(
            "the optimizer's saved `step` is {step}, not a count of steps; the checkpoint is damaged"
        ))),
        None => Err(Error::other(format!(
            "the optimizer's saved state has no `step` (it has: {}); it was saved by another kind \
             of optimizer",
            scalars.keys().map(String::as_str).collect::<Vec<_>>().join(", ")
        ))),
    }
}
