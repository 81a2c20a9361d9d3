//! Optimizers, weight averages and the gradient norm against the CPU.

use candle_core::{DType, Device, Tensor};
use fulgurite::core::execution::read;
use fulgurite::core::module::{ModuleBuilder, ModuleInit};
use fulgurite::core::optim::{
    Adafactor, Adagrad, Adam, AdamW, GradScale, Optimizer, OptimizerConfig, RmsProp, Sgd,
    SquaredNorm, StateDtype, StepScale, WeightAverage, clip_factor,
};
use fulgurite::core::parameter::{Init, LocalShard, Parameter, accumulation_dtype};
use fulgurite::core::shard::Region;
use fulgurite_error::{Error, Result};

use crate::compare::{difference, numbers, randn};
use crate::findings::Findings;
use crate::target::Target;

/// Lengths below and above one block of a kernel, and more parameters than a launch has arguments.
const LENGTHS: [usize; 40] = {
    let mut lengths = [17; 40];
    (lengths[0], lengths[1], lengths[2], lengths[3]) = (1, 70_001, 4096, 1 << 20);
    lengths
};
const STEPS: u64 = 4;
/// Allowed relative difference of values after some steps: same arithmetic in the same order.
const ALLOWED: f64 = 2e-7;
/// Allowed difference where one value may be rounded to the neighbouring bf16.
const ALLOWED_BF16: f64 = 8e-3;

/// Parameters with values on this device.
fn parameters(dtype: DType, device: &Device) -> Result<Vec<Parameter>> {
    let b = ModuleBuilder::new(ModuleInit {
        device: device.clone(),
        dtype,
        compute_dtype: dtype,
        ..ModuleInit::default()
    });
    for (i, n) in LENGTHS.into_iter().enumerate() {
        b.parameter(&format!("p{i}"), [n], Init::ZEROS)?;
    }
    let mut tree = b.finish()?;
    for slot in tree.slots() {
        let values = randn(slot.fqn(), slot.global_shape())?.to_dtype(dtype)?.to_device(device)?;
        slot.set_local(LocalShard { values, region: Region::full(slot.global_shape()) });
    }
    Ok(tree.parameters().to_vec())
}

/// Sets the gradients of a step.
fn set_grads(parameters: &[Parameter], step: u64) -> Result<()> {
    for p in parameters {
        let grad = randn(&format!("{} {step}", p.fqn()), p.global_shape())?;
        let grad = grad.to_dtype(accumulation_dtype(p.dtype()))?.to_device(p.device())?;
        p.set_local_grad(Some(grad));
    }
    Ok(())
}

fn values(parameters: &[Parameter]) -> Result<Vec<f64>> {
    let mut all = Vec::new();
    for p in parameters {
        all.extend(numbers(&p.local()?.values)?);
    }
    Ok(all)
}

/// Values and state after some steps.
fn train(config: &dyn OptimizerConfig, dtype: DType, device: &Device) -> Result<[Vec<f64>; 2]> {
    let parameters = parameters(dtype, device)?;
    let mut optimizer = config.build(&parameters)?;
    optimizer.set_seed(3);
    for step in 1..=STEPS {
        set_grads(&parameters, step)?;
        optimizer.step(&GradScale { factor: 0.5, clip_value: Some(1.2) })?;
    }
    let mut state = Vec::new();
    for tensor in optimizer.state_tensors()? {
        state.extend(numbers(&tensor.values)?);
    }
    Ok([values(&parameters)?, state])
}

fn compare(
    findings: &mut Findings,
    name: &str,
    config: &dyn OptimizerConfig,
    state_is_bf16: bool,
    device: &Device,
) -> Result<()> {
    for dtype in [DType::F32, DType::BF16] {
        let (got, want) = (train(config, dtype, device)?, train(config, dtype, &Device::Cpu)?);
        for ((what, in_bf16), (got, want)) in
            [("values", dtype == DType::BF16), ("state", state_is_bf16)]
                .into_iter()
                .zip(got.iter().zip(&want))
        {
            let name = format!("{name} {dtype:?} {what}");
            let allowed = if in_bf16 || state_is_bf16 { ALLOWED_BF16 } else { ALLOWED };
            findings.difference(&name, difference(got, want), allowed);
            let other = got.iter().zip(want).filter(|(a, b)| a != b).count();
            findings.figure(format!("{name}, elements with other bits"), other as f64);
        }
    }
    Ok(())
}

pub(super) fn adamw(target: &Target) -> Result<Findings> {
    let (device, mut findings) = (target.device()?, Findings::default());
    for (name, state_dtype) in [("f32 states", StateDtype::F32), ("bf16 states", StateDtype::Bf16)]
    {
        let config = AdamW { lr: 1e-2, weight_decay: 0.1, state_dtype, ..AdamW::default() };
        compare(&mut findings, name, &config, state_dtype == StateDtype::Bf16, &device)?;
    }
    Ok(findings)
}

pub(super) fn sgd(target: &Target) -> Result<Findings> {
    let (device, mut findings) = (target.device()?, Findings::default());
    for (name, momentum, nesterov) in
        [("plain", 0.0, false), ("momentum", 0.9, false), ("nesterov", 0.9, true)]
    {
        let config = Sgd { lr: 1e-2, momentum, nesterov, weight_decay: 0.1, ..Sgd::default() };
        compare(&mut findings, name, &config, false, &device)?;
    }
    Ok(findings)
}

/// Optimizers without kernels of their own.
pub(super) fn others(target: &Target) -> Result<Findings> {
    let (device, mut findings) = (target.device()?, Findings::default());
    let configs: [(&str, &dyn OptimizerConfig); 5] = [
        ("adam", &Adam { lr: 1e-2, ..Adam::default() }),
        ("adam with decay", &Adam { lr: 1e-2, weight_decay: 0.1, ..Adam::default() }),
        ("rmsprop", &RmsProp { lr: 1e-3, momentum: 0.9, ..RmsProp::default() }),
        ("adagrad", &Adagrad::default()),
        ("adafactor", &Adafactor::default()),
    ];
    for (name, config) in configs {
        compare(&mut findings, name, config, false, &device)?;
    }
    Ok(findings)
}

pub(super) fn averages(target: &Target) -> Result<Findings> {
    let (device, mut findings) = (target.device()?, Findings::default());
    let average = |exponential: bool, device: &Device| -> Result<Vec<f64>> {
        let parameters = parameters(DType::F32, device)?;
        let mut average = match exponential {
            true => WeightAverage::exponential(&parameters, 0.9)?,
            false => WeightAverage::mean(&parameters)?,
        };
        let mut optimizer = Sgd { lr: 0.1, ..Sgd::default() }.build(&parameters)?;
        for step in 1..=STEPS {
            set_grads(&parameters, step)?;
            optimizer.step(&GradScale::default())?;
            average.update()?;
        }
        average.swap()?;
        values(&parameters)
    };
    for (name, exponential) in [("exponential", true), ("mean", false)] {
        let (got, want) = (average(exponential, &device)?, average(exponential, &Device::Cpu)?);
        findings.difference(name, difference(&got, &want), ALLOWED);
    }
    Ok(findings)
}

const MAX_NORM: f64 = 0.7;

/// Values, state and averages.
fn all(
    parameters: &[Parameter],
    optimizer: &mut dyn Optimizer,
    average: &WeightAverage,
) -> Result<[Vec<f64>; 3]> {
    let of = |tensors: Vec<fulgurite::core::optim::StateTensor>| -> Result<Vec<f64>> {
        let mut all = Vec::new();
        for tensor in tensors {
            all.extend(numbers(&tensor.values)?);
        }
        Ok(all)
    };
    Ok([values(parameters)?, of(optimizer.state_tensors()?)?, of(average.state()?)?])
}

/// Values, state and averages after some steps that are clipped by a norm on the host.
fn clipped(config: &dyn OptimizerConfig, dtype: DType) -> Result<[Vec<f64>; 3]> {
    let parameters = parameters(dtype, &Device::Cpu)?;
    let mut optimizer = config.build(&parameters)?;
    let mut average = WeightAverage::exponential(&parameters, 0.9)?;
    for step in 1..=STEPS {
        set_grads(&parameters, step)?;
        let norm = SquaredNorm::of(&parameters, &|_| 0)?.read()?.sqrt();
        let factor = 0.5 * clip_factor(norm, MAX_NORM);
        optimizer.step(&GradScale { factor, clip_value: Some(1.2) })?;
        average.update()?;
    }
    all(&parameters, &mut *optimizer, &average)
}

/// Like [`clipped`], with a scale on the device. Two more steps must change nothing: the loss of
/// the first is NaN.
pub(super) fn late(target: &Target) -> Result<Findings> {
    let (device, mut findings) = (target.device()?, Findings::default());
    let bf16 = AdamW { state_dtype: StateDtype::Bf16, ..AdamW::default() };
    let momentum = Sgd { lr: 1e-2, momentum: 0.9, ..Sgd::default() };
    let configs: [(&str, &dyn OptimizerConfig); 3] =
        [("adamw", &AdamW::default()), ("adamw, bf16 states", &bf16), ("sgd", &momentum)];
    for (name, config) in configs {
        for dtype in [DType::F32, DType::BF16, DType::F64] {
            let name = format!("{name} {dtype:?}");
            let parameters = parameters(dtype, &device)?;
            let mut optimizer = config.build(&parameters)?;
            let mut average = WeightAverage::exponential(&parameters, 0.9)?;
            let mut before: Option<StepScale> = None;
            let (mut read, mut done) = (Vec::new(), None);
            for step in 1..=STEPS + 2 {
                if step == STEPS + 1 {
                    done = Some(all(&parameters, &mut *optimizer, &average)?);
                }
                set_grads(&parameters, step)?;
                let loss = if step == STEPS + 1 { f64::NAN } else { step as f64 };
                let norm = SquaredNorm::of(&parameters, &|_| 0)?.on(&device)?;
                let sums = (&Tensor::full(loss, (), &device)?, &norm);
                let scale = GradScale { factor: 0.5, clip_value: Some(1.2) };
                let scale = StepScale::on_device(sums, &scale, Some(MAX_NORM), before.as_ref())?;
                let numbers =
                    scale.numbers().ok_or_else(|| Error::other("a scale on the device"))?;
                read.push(read::later(numbers, "gpu-check")?);
                optimizer.step_by(&scale)?;
                average.update_after(&scale)?;
                before = Some(scale);
            }
            let (got, want) = (done.unwrap_or_default(), clipped(config, dtype)?);
            for (what, (got, want)) in
                ["values", "state", "averages"].into_iter().zip(got.iter().zip(&want))
            {
                let rounded = dtype == DType::BF16 || (name.contains("bf16") && what == "state");
                let allowed = if rounded { ALLOWED_BF16 } else { ALLOWED };
                let name = format!("{name} {what}");
                findings.difference(&name, difference(got, want), allowed);
            }
            let same = all(&parameters, &mut *optimizer, &average)? == got;
            findings.require(same, || format!("{name}: steps that are skipped change something"));
            for (step, read) in (1..).zip(&read) {
                let loss = read.numbers()?[0];
                let right = loss == step as f64 || (step == STEPS + 1 && loss.is_nan());
                findings.require(right, || format!("{name}: the loss of step {step} is {loss}"));
            }
        }
    }
    Ok(findings)
}

pub(super) fn norm(target: &Target) -> Result<Findings> {
    let (device, mut findings) = (target.device()?, Findings::default());
    for dtype in [DType::F32, DType::BF16, DType::F64] {
        let squared = |device: &Device| -> Result<f64> {
            let parameters = parameters(dtype, device)?;
            set_grads(&parameters, 1)?;
            SquaredNorm::of(&parameters, &|_| 0)?.read()
        };
        let (got, want) = (squared(&device)?, squared(&Device::Cpu)?);
        findings.difference(&format!("{dtype:?}"), difference(&[got], &[want]), 1e-12);
    }
    // A NaN in one gradient must make the norm NaN.
    let parameters = parameters(DType::F32, &device)?;
    set_grads(&parameters, 1)?;
    let grad = Tensor::full(f32::NAN, LENGTHS[1], &device)?;
    parameters[1].set_local_grad(Some(grad));
    let norm = SquaredNorm::of(&parameters, &|_| 0)?.read()?;
    findings.require(norm.is_nan(), || format!("the squared norm of NaN is {norm}"));
    Ok(findings)
}
