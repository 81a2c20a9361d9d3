//! Norms, updates and averages on GPUs: one launch for many tensors.
//!
//! Tensors that the kernels do not support are computed in candle's operations, as on other
//! devices. **Run on an emulated GPU (`.ci/gpu`), and never on a real one.** The tests of
//! `fulgurite-kernels` execute the plans that this module makes.
#![allow(unsafe_code)] // the launches

use std::collections::BTreeMap;

use candle_core::{CudaDevice, DType, Device, Tensor};
use fulgurite_kernels::cuda::{address, run};
use fulgurite_kernels::plans::{self, Average, Noise, Scale, Sgd, State, Update, Values};
use fulgurite_kernels::{Float, Plan};

use super::state::ParamUpdate;
use super::step_scale::StepScale;
use crate::Result;
use fulgurite_collective::shard::Region;

/// Maximum number of table rows (runs of the owned part) per parameter. A part of more runs is
/// summed in tensor operations.
const MOST_RUNS: usize = 4096;

fn cuda(tensor: &Tensor) -> Option<&CudaDevice> {
    match tensor.device() {
        Device::Cuda(device) if tensor.is_contiguous() => Some(device),
        _ => None,
    }
}

fn float(dtype: DType) -> Option<Float> {
    match dtype {
        DType::F32 => Some(Float::F32),
        DType::BF16 => Some(Float::Bf16),
        DType::F16 => Some(Float::F16),
        DType::F64 => Some(Float::F64),
        _ => None,
    }
}

fn values(tensor: &Tensor, dtype: Float) -> Result<Values> {
    Ok(Values { address: address(tensor)?, length: tensor.elem_count() as u64, dtype })
}

/// Gradients whose squared norm is computed in one launch.
#[derive(Default)]
pub(super) struct SquaredNorm {
    parts: Vec<Values>,
    /// Keeps the gradients' memory alive until the launch.
    grads: Vec<Tensor>,
}

impl SquaredNorm {
    /// Takes the owned part of a gradient. Returns `false` if the kernel cannot sum it.
    pub(super) fn take(&mut self, grad: &Tensor, owned: &Region, outer: &[usize]) -> Result<bool> {
        let Some(dtype) = float(grad.dtype()).filter(|_| cuda(grad).is_some()) else {
            return Ok(false);
        };
        if self.grads.first().is_some_and(|first| !first.device().same_device(grad.device())) {
            return Ok(false);
        }
        let runs = owned.runs(outer);
        if runs.len() > MOST_RUNS {
            return Ok(false);
        }
        let start = address(grad)?;
        self.parts.extend(runs.into_iter().map(|run| Values {
            address: start + (run.outer * dtype.size()) as u64,
            length: run.len as u64,
            dtype,
        }));
        self.grads.push(grad.clone());
        Ok(true)
    }

    /// Returns the sum of squares, an f64 on the device; `None` if nothing was taken.
    pub(super) fn sum(self) -> Result<Option<Tensor>> {
        let Some(first) = self.grads.first() else { return Ok(None) };
        let total = Tensor::zeros((), DType::F64, first.device())?;
        let plan = plans::squared_norm(&self.parts, address(&total)?);
        // SAFETY: the parts lie in the gradients, which are held until this call returns, and
        // `total` has one element.
        unsafe { carry_out(&plan, first) }?;
        Ok(Some(total))
    }
}

/// # Safety
/// As [`run`], on the device of `tensor`.
unsafe fn carry_out(plan: &Plan, tensor: &Tensor) -> Result<()> {
    match tensor.device() {
        // SAFETY: the caller's promise.
        Device::Cuda(device) => unsafe { run(plan, device) },
        _ => Ok(()), // plans exist only for GPUs
    }
}

/// Updates of parameters by step count, because a launch takes one step count.
pub(super) struct UpdatesBySteps<const N: usize>(BTreeMap<u64, Updates<N>>);

impl<const N: usize> Default for UpdatesBySteps<N> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<const N: usize> UpdatesBySteps<N> {
    /// The updates of parameters that have taken `steps` steps.
    pub(super) fn of(&mut self, steps: u64) -> &mut Updates<N> {
        self.0.entry(steps).or_insert_with(Updates::new)
    }

    /// Returns each step count with its updates.
    pub(super) fn into_parts(self) -> impl Iterator<Item = (u64, Updates<N>)> {
        self.0.into_iter()
    }
}

/// Updates of one launch, each with its coefficients.
pub(super) struct Updates<const N: usize>(Vec<Taken<N>>);

struct Taken<const N: usize> {
    update: ParamUpdate<N>,
    dtype: Float,
    state: State,
    noise: Noise,
    step_size: f64,
    decay: f64,
}

impl<const N: usize> Updates<N> {
    fn new() -> Self {
        Self(Vec::new())
    }

    /// Takes an update, or returns it if the kernel does not support it. `step_size` and `decay`
    /// are as in [`Update`].
    pub(super) fn take(
        &mut self,
        update: ParamUpdate<N>,
        step_size: f64,
        decay: f64,
    ) -> Result<Option<ParamUpdate<N>>> {
        let dtype = float(update.values.dtype()).filter(|dtype| *dtype != Float::F64);
        let state = match update.state.first().map(Tensor::dtype) {
            None | Some(DType::F32) => Some(State::F32),
            Some(DType::BF16) => Some(State::Bf16),
            Some(_) => None,
        };
        let all = [&update.values, &update.grad].into_iter().chain(&update.state);
        let first = self.0.first().map_or(&update.values, |first| &first.update.values);
        let together = all
            .into_iter()
            .all(|tensor| cuda(tensor).is_some() && tensor.device().same_device(first.device()));
        let (Some(dtype), Some(state), Some(noise)) = (dtype, state, update.noise.for_kernels())
        else {
            return Ok(Some(update));
        };
        if !together || update.grad.dtype() != DType::F32 {
            return Ok(Some(update));
        }
        self.0.push(Taken { update, dtype, state, noise, step_size, decay });
        Ok(None)
    }

    /// Executes the plan that `plan` makes of the updates, in one launch.
    fn make(self, plan: impl FnOnce(Vec<Update<'_, N>>) -> Plan) -> Result<()> {
        let Some(first) = self.0.first() else { return Ok(()) };
        let mut updates = Vec::with_capacity(self.0.len());
        for taken in &self.0 {
            let ParamUpdate { values: tensor, grad, state, .. } = &taken.update;
            let mut states = [0; N];
            for (to, state) in states.iter_mut().zip(state) {
                *to = address(state)?;
            }
            updates.push(Update {
                values: values(tensor, taken.dtype)?,
                grad: address(grad)?,
                state: states,
                state_dtype: taken.state,
                noise: &taken.noise,
                step_size: taken.step_size as f32,
                decay: taken.decay as f32,
            });
        }
        // SAFETY: values, gradients and state are tensors of one length
        // (`OptimizerState::update_of`) that are held until this call returns; each parameter has
        // its own memory.
        unsafe { carry_out(&plan(updates), &first.update.values) }
    }
}

/// The scale for a kernel. The caller keeps a scale on the device alive until the launch.
fn for_kernel(scale: &StepScale) -> Result<Scale> {
    if let Some(words) = scale.in_kernels() {
        return Ok(Scale::At(address(words)?));
    }
    let scale = scale.known()?;
    let bound = scale.clip_value.unwrap_or(f64::INFINITY) as f32;
    Ok(Scale::Known { factor: scale.factor as f32, bound })
}

/// One step of AdamW.
pub(super) fn adamw(updates: Updates<2>, adamw: plans::AdamW, scale: &StepScale) -> Result<()> {
    let scale = for_kernel(scale)?;
    updates.make(|updates| plans::adamw(updates, adamw, scale))
}

/// One step of stochastic gradient descent, with or without momentum.
pub(super) fn sgd<const N: usize>(
    updates: Updates<N>,
    momentum: Sgd,
    scale: &StepScale,
) -> Result<()> {
    let scale = for_kernel(scale)?;
    updates.make(|updates| {
        let one_state = updates.into_iter().map(|update| Update {
            values: update.values,
            grad: update.grad,
            state: [update.state.first().copied().unwrap_or(0)],
            state_dtype: update.state_dtype,
            noise: update.noise,
            step_size: update.step_size,
            decay: update.decay,
        });
        plans::sgd(one_state, momentum, scale)
    })
}

/// Averages that are updated in one launch.
#[derive(Default)]
pub(super) struct Averages {
    averages: Vec<Average>,
    tensors: Vec<Tensor>,
}

impl Averages {
    /// Takes an average and the values that it follows. Returns `false` if the kernel does not
    /// support them.
    pub(super) fn take(&mut self, average: &Tensor, tensor: &Tensor) -> Result<bool> {
        let dtype = float(tensor.dtype()).filter(|dtype| *dtype != Float::F64);
        let Some(dtype) = dtype.filter(|_| cuda(average).is_some() && cuda(tensor).is_some())
        else {
            return Ok(false);
        };
        let first = self.tensors.first().unwrap_or(average);
        if ![average, tensor].iter().all(|t| t.device().same_device(first.device())) {
            return Ok(false);
        }
        self.averages.push(Average { average: address(average)?, values: values(tensor, dtype)? });
        self.tensors.extend([average.clone(), tensor.clone()]);
        Ok(true)
    }

    /// `average += gain * (values - average)`, unless `scale` skips the step: one launch.
    pub(super) fn update(self, gain: f64, scale: Option<&StepScale>) -> Result<()> {
        let Some(first) = self.tensors.first() else { return Ok(()) };
        let scale = scale.and_then(StepScale::in_kernels).map(address).transpose()?;
        // SAFETY: averages and values are tensors of one length (`WeightAverage::shards`) that
        // are held until this call returns; an average is in f32 unless its values are in f64.
        unsafe { carry_out(&plans::average(&self.averages, gain, scale), first) }
    }
}
