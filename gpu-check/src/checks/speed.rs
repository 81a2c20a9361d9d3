//! Speed of the device, alone and with the framework's functions; these steps judge nothing.

use std::time::Instant;

use candle_core::{DType, Device, Tensor, Var};
use fulgurite::core::execution::transfer;
use fulgurite::nn::{cross_entropy, functional};
use fulgurite_error::Result;

use crate::compare::randn;
use crate::findings::Findings;
use crate::target::Target;

/// The shortest time of one call of `f` in seconds, over several rounds of `calls` calls.
fn time<T>(device: &Device, calls: usize, mut f: impl FnMut() -> Result<T>) -> Result<f64> {
    f()?;
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        device.synchronize()?;
        let started = Instant::now();
        for _ in 0..calls {
            f()?;
        }
        device.synchronize()?;
        best = best.min(started.elapsed().as_secs_f64() / calls as f64);
    }
    Ok(best)
}

/// The size for the device: smaller on a CPU, which only tries out this program.
fn size(device: &Device, on_gpu: usize, on_cpu: usize) -> usize {
    if device.is_cpu() { on_cpu } else { on_gpu }
}

/// Random values, which repeat after 65,536 elements.
fn random(shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    let n = shape.iter().product::<usize>();
    let values = randn("speed", &[n.min(1 << 16)])?;
    let values = values.repeat(n.div_ceil(values.elem_count()))?.narrow(0, 0, n)?.reshape(shape)?;
    Ok(values.to_dtype(dtype)?.to_device(device)?)
}

pub(super) fn device(target: &Target) -> Result<Findings> {
    let (device, mut findings) = (target.device()?, Findings::default());
    let one = Tensor::zeros(1, DType::F32, &device)?;
    let launch = time(&device, 1000, || Ok((&one + 1.)?))?;
    findings.figure("launch_us", launch * 1e6);

    let n = size(&device, 8192, 256);
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        // Random, because a GPU multiplies equal numbers faster.
        let a = random(&[n, n], dtype, &device)?;
        let b = a.t()?;
        let secs = time(&device, 5, || Ok(a.matmul(&b)?))?;
        findings.figure(
            format!("matmul_{n}_{}_tflops", dtype.as_str()),
            2.0 * (n as f64).powi(3) / secs / 1e12,
        );
    }

    let bytes = size(&device, 256 << 20, 1 << 20);
    let there = Tensor::zeros(bytes / 4, DType::F32, &Device::Cpu)?;
    let on_device = transfer::to_device(&there, &device, "speed")?;
    let secs = time(&device, 2, || transfer::to_device(&there, &device, "speed"))?;
    findings.figure("to_device_gb_per_s", bytes as f64 / secs / 1e9);
    let secs = time(&device, 2, || transfer::to_host(&on_device, "speed"))?;
    findings.figure("to_host_gb_per_s", bytes as f64 / secs / 1e9);
    let secs = time(&device, 10, || Ok(on_device.affine(1.5, 0.5)?))?;
    findings.figure("affine_gb_per_s", 2.0 * bytes as f64 / secs / 1e9);
    Ok(findings)
}

/// A function to measure.
type Function<'a> = dyn Fn(&[Tensor]) -> Result<Tensor> + 'a;

/// Measures a function in bf16: forward, and forward with backward.
fn measure(
    device: &Device,
    findings: &mut Findings,
    name: &str,
    shapes: &[&[usize]],
    f: &Function<'_>,
) -> Result<()> {
    let vars =
        shapes.iter().map(|shape| Ok(Var::from_tensor(&random(shape, DType::BF16, device)?)?));
    let vars = vars.collect::<Result<Vec<Var>>>()?;
    let inputs: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let forward = time(device, 3, || f(&inputs))?;
    let both = time(device, 3, || Ok(f(&inputs)?.backward()?))?;
    findings.figure(format!("{name}_forward_ms"), forward * 1e3);
    findings.figure(format!("{name}_forward_backward_ms"), both * 1e3);
    Ok(())
}

/// Measured attentions: name, shape of queries, and shape of keys and values.
fn attention_shapes(device: &Device) -> [(&'static str, [usize; 4], [usize; 4]); 3] {
    let (batch, time) = (size(device, 8, 2), size(device, 2048, 64));
    let shapes =
        |name, heads, dim| (name, [batch, heads, time, dim], [batch, heads / 4, time, dim]);
    [
        shapes("causal_attention", 32, 64),
        shapes("causal_attention_of_128", 16, 128),
        shapes("causal_attention_of_256", 8, 256),
    ]
}

fn causal_attention(x: &[Tensor]) -> Result<Tensor> {
    functional::attention(&x[0], &x[1], &x[2], 0.125, true)
}

/// Attention alone.
pub(super) fn attention(target: &Target) -> Result<Findings> {
    let (device, mut findings) = (target.device()?, Findings::default());
    for (name, q, kv) in attention_shapes(&device) {
        measure(&device, &mut findings, name, &[&q, &kv, &kv], &causal_attention)?;
    }
    Ok(findings)
}

pub(super) fn functions(target: &Target) -> Result<Findings> {
    let (device, mut findings) = (target.device()?, Findings::default());
    let (rows, width) = (size(&device, 16384, 64), size(&device, 2048, 128));
    let mut measure = |name: &str, shapes: &[&[usize]], f: &Function| {
        measure(&device, &mut findings, name, shapes, f)
    };
    measure("rms_norm", &[&[rows, width], &[width]], &|x| {
        functional::rms_norm(&x[0], &x[1], 1e-5)
    })?;
    measure("layer_norm", &[&[rows, width], &[width], &[width]], &|x| {
        functional::layer_norm(&x[0], &x[1], Some(&x[2]), 1e-5)
    })?;
    measure("swiglu", &[&[rows, 4 * width], &[rows, 4 * width]], &|x| {
        functional::swiglu(&x[0], &x[1])
    })?;
    measure("gelu", &[&[rows, 4 * width]], &|x| functional::gelu(&x[0]))?;
    for (name, q, kv) in attention_shapes(&device) {
        measure(name, &[&q, &kv, &kv], &causal_attention)?;
    }
    let targets: Vec<i64> = (0..rows as i64).map(|i| i % 100).collect();
    let targets = Tensor::from_vec(targets, rows, &device)?;
    measure("cross_entropy", &[&[rows, size(&device, 32768, 512)]], &|x| {
        Ok(cross_entropy(&x[0], &targets)?.sum().clone())
    })?;
    Ok(findings)
}
