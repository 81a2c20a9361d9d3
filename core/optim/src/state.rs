//! The parameters of an optimizer and their state tensors.

use std::collections::BTreeMap;

use candle_core::{DType, Tensor};

use super::elementwise::arithmetic_dtype;
use super::groups::{self, Hyper, ParamGroup};
use super::optimizer::StateTensor;
use super::state_dtype::{Noise, StateDtype};
use crate::{Error, Result};
use fulgurite_module::parameter::{LocalShard, Parameter};
use fulgurite_tensor::autograd::storage;
use fulgurite_tensor::execution::transfer;
use fulgurite_tensor::memory::{self, MemoryKind};

/// Parameters, their options, and `N` state tensors each, allocated when first needed.
pub(super) struct OptimizerState<const N: usize> {
    parameters: Vec<Parameter>,
    hypers: Vec<Hyper>,
    states: Vec<Option<[Tensor; N]>>,
    /// Number of steps in which each parameter had no gradient: torch counts steps per parameter.
    missed: Vec<u64>,
    names: [&'static str; N],
    /// The value of each element of a new state tensor.
    initial: [f64; N],
    dtype: StateDtype,
    seed: u64,
}

/// The operands of one parameter's update. All tensors are flat and of equal length.
pub(super) struct ParamUpdate<const N: usize> {
    pub(super) hyper: Hyper,
    /// The values to change in place.
    pub(super) values: Tensor,
    /// The gradient, in the dtype of the arithmetic.
    pub(super) grad: Tensor,
    /// The state to change in place.
    pub(super) state: [Tensor; N],
    /// The random words that round the state, if it is rounded.
    pub(super) noise: Noise,
}

impl<const N: usize> OptimizerState<N> {
    /// `hypers` is parallel to `parameters`.
    ///
    /// # Errors
    /// If a parameter's dtype is not a float.
    pub(super) fn new(
        parameters: &[Parameter],
        hypers: Vec<Hyper>,
        names: [&'static str; N],
        dtype: StateDtype,
    ) -> Result<Self> {
        for parameter in parameters {
            arithmetic_dtype_of(parameter)?;
        }
        let states = parameters.iter().map(|_| None).collect();
        let missed = vec![0; parameters.len()];
        let initial = [0.0; N];
        let parameters = parameters.to_vec();
        Ok(Self { parameters, hypers, states, missed, names, initial, dtype, seed: 0 })
    }

    /// Sets the value of each element of a new state tensor, which is otherwise zero.
    pub(super) fn with_initial(self, initial: [f64; N]) -> Self {
        Self { initial, ..self }
    }

    /// Sets the seed of the state's rounding.
    pub(super) fn set_seed(&mut self, seed: u64) {
        self.seed = seed;
    }

    pub(super) fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// Returns the options of parameter `index`.
    pub(super) fn hyper(&self, index: usize) -> Hyper {
        self.hypers[index]
    }

    /// Returns the dtype of the arithmetic of parameter `index`.
    ///
    /// # Errors
    /// If the parameter's dtype is not a float.
    pub(super) fn arithmetic_dtype(&self, index: usize) -> Result<DType> {
        arithmetic_dtype_of(&self.parameters[index])
    }

    /// Returns whether any parameter's values are in host memory.
    pub(super) fn has_values_on_host(&self) -> bool {
        let on_host = |p: &Parameter| p.local().is_ok_and(|local| local.values.device().is_cpu());
        self.parameters.iter().any(on_host)
    }

    /// Returns the groups, as [`Optimizer::param_groups`](super::Optimizer::param_groups).
    pub(super) fn param_groups(&self, base: Hyper, common: &[(&str, f64)]) -> Vec<ParamGroup> {
        groups::param_groups(&self.parameters, &self.hypers, base, common)
    }

    /// Sets the parameters' options from the groups, and returns the optimizer's own options.
    ///
    /// # Errors
    /// As [`Optimizer::load_param_groups`](super::Optimizer::load_param_groups).
    pub(super) fn load_param_groups(
        &mut self,
        groups: &[ParamGroup],
        common: &[&str],
    ) -> Result<Hyper> {
        let (base, hypers) =
            groups::load_param_groups(groups, &self.parameters, &self.hypers, common)?;
        self.hypers = hypers;
        Ok(base)
    }

    /// Of the optimizer's `steps`, returns how many had a gradient of parameter `index`.
    pub(super) fn steps_of(&self, index: usize, steps: u64) -> u64 {
        steps.saturating_sub(self.missed[index])
    }

    /// Returns the scalars to save after `steps` steps.
    pub(super) fn scalars(&self, steps: u64) -> BTreeMap<String, f64> {
        let missed = self.parameters.iter().zip(&self.missed).filter(|(_, missed)| **missed > 0);
        let missed = missed.map(|(parameter, missed)| (missed_key(parameter), *missed as f64));
        missed.chain([("step".to_owned(), steps as f64)]).collect()
    }

    /// Restores the state that [`scalars`](Self::scalars) returned, and returns the number of
    /// steps.
    ///
    /// # Errors
    /// If the number of steps is missing or invalid.
    pub(super) fn load_scalars(&mut self, scalars: &BTreeMap<String, f64>) -> Result<u64> {
        let steps = load_step(scalars)?;
        for (parameter, missed) in self.parameters.iter().zip(&mut self.missed) {
            *missed = scalars.get(&missed_key(parameter)).map_or(0, |missed| *missed as u64);
        }
        Ok(steps)
    }

    /// Returns the operands of the update of parameter `index` in optimizer step `step`.
    ///
    /// `None` if the parameter has no gradient, or no elements on this rank.
    pub(super) fn update_of(&mut self, index: usize, step: u64) -> Result<Option<ParamUpdate<N>>> {
        let parameter = &self.parameters[index];
        let Some(grad) = parameter.local_grad() else {
            self.missed[index] += 1;
            return Ok(None);
        };
        let LocalShard { values, region } = parameter.local()?;
        let counts = [grad.elem_count(), values.elem_count(), region.elem_count()];
        if counts.iter().any(|count| *count != counts[0]) {
            let [grad, values, region] = counts;
            return Err(Error::parameter(
                parameter.fqn(),
                format!(
                    "its local gradient has {grad} elements, its local shard {values}, and the \
                     region that the strategy gave it {region}"
                ),
            ));
        }
        let grad = storage::cast(&grad, arithmetic_dtype_of(parameter)?)?;
        let shape = parameter.global_shape();
        let noise = Noise::new(self.seed, parameter.fqn(), step, &region, shape);
        let state = self.state(index)?.clone();
        if values.elem_count() == 0 {
            return Ok(None);
        }
        Ok(Some(ParamUpdate { hyper: self.hypers[index], values, grad, state, noise }))
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
        let state = &mut self.states[index];
        if state.is_none() {
            let dtype = self.dtype.of(arithmetic_dtype_of(parameter)?);
            let mut tensors = Vec::with_capacity(N);
            let _place = transfer::beside(&values);
            for initial in self.initial {
                let _kind = memory::of_kind(MemoryKind::OptimizerState);
                let tensor = storage::zeros(values.elem_count(), dtype, values.device())?;
                if initial != 0.0 {
                    let initial = Tensor::full(initial, values.elem_count(), values.device())?;
                    storage::copy_from(&tensor, &initial)?;
                }
                tensors.push(tensor);
            }
            *state = tensors.try_into().ok();
        }
        state.as_ref().ok_or_else(|| Error::other("optimizer state was not allocated"))
    }

    /// Returns all state tensors, as [`Optimizer::state_tensors`](super::Optimizer::state_tensors).
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

/// Bytes of one state tensor per element of a parameter of `dtype`.
pub(super) fn state_bytes(state: StateDtype, dtype: DType) -> usize {
    arithmetic_dtype(dtype).map_or(0, |arithmetic| state.of(arithmetic).size_in_bytes())
}

fn arithmetic_dtype_of(parameter: &Parameter) -> Result<DType> {
    arithmetic_dtype(parameter.dtype()).ok_or_else(|| {
        Error::parameter(
            parameter.fqn(),
            format!("is of dtype {:?}; optimizers update floats only", parameter.dtype()),
        )
    })
}

/// The scalar's name for the number of steps in which a parameter had no gradient.
fn missed_key(parameter: &Parameter) -> String {
    format!("missed.{}", parameter.fqn())
}

/// Reads the number of steps.
fn load_step(scalars: &BTreeMap<String, f64>) -> Result<u64> {
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
