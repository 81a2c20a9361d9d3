//! Helpers of the optimizers' tests.

use candle_core::{DType, Device, Tensor};

use super::{GradScale, Optimizer, StepScale};
use fulgurite_collective::shard::Region;
use fulgurite_module::module::{ModuleBuilder, ModuleInit};
use fulgurite_module::parameter::{Init, LocalShard, Parameter, ParameterSlot, accumulation_dtype};
use fulgurite_tensor::random::{Purpose, Stream};

/// Builds parameters of these names and lengths on the CPU, with random values.
pub(super) fn parameters(declared: &[(&str, usize)], dtype: DType) -> Vec<Parameter> {
    let declared: Vec<_> =
        declared.iter().map(|&(fqn, n)| (fqn, vec![n], numbers(fqn, 0, n))).collect();
    shaped(&declared, dtype)
}

/// Builds parameters of these names, shapes and values on the CPU.
pub(super) fn shaped(declared: &[(&str, Vec<usize>, Vec<f64>)], dtype: DType) -> Vec<Parameter> {
    let b = ModuleBuilder::new(ModuleInit { dtype, ..ModuleInit::default() });
    let make = |(fqn, shape, values): &(&str, Vec<usize>, Vec<f64>)| {
        let p = b.parameter(fqn, shape.clone(), Init::ZEROS).unwrap();
        let values = Tensor::from_vec(values.clone(), values.len(), &Device::Cpu).unwrap();
        let values = values.to_dtype(dtype).unwrap();
        slot(&p).set_local(LocalShard { values, region: Region::full(shape) });
        p
    };
    declared.iter().map(make).collect()
}

/// Random numbers: the values at step 0, gradients at later steps.
pub(super) fn numbers(fqn: &str, step: u64, n: usize) -> Vec<f64> {
    let stream = Stream::new(9, Purpose::Sample, fqn).child(step);
    // Rounded to f32, so that references in f64 start from the same numbers.
    (0..n as u64).map(|i| f64::from(stream.normal(i) as f32)).collect()
}

/// Gives every parameter the gradient of `step`, in f64 for f64 parameters, else in f32.
pub(super) fn set_grads(parameters: &[Parameter], step: u64) {
    for p in parameters {
        let n = p.elem_count();
        let grad = Tensor::from_vec(numbers(p.fqn(), step, n), n, &Device::Cpu).unwrap();
        p.set_local_grad(Some(grad.to_dtype(accumulation_dtype(p.dtype())).unwrap()));
    }
}

/// Takes steps 1 to `steps`, with the learning rate falling by a tenth a step.
pub(super) fn train(optimizer: &mut dyn Optimizer, steps: u64, scale: &GradScale) {
    let parameters = optimizer.parameters().to_vec();
    for step in 1..=steps {
        set_grads(&parameters, step);
        optimizer.set_schedule_factor(schedule(step));
        optimizer.step(scale).unwrap();
    }
}

/// The schedule that [`train`] follows.
pub(super) fn schedule(step: u64) -> f64 {
    1.0 - 0.1 * (step - 1) as f64
}

/// `scale` on the device, for a step with this loss.
pub(super) fn late_scale(scale: &GradScale, loss: f64) -> StepScale {
    let [loss, norm] = [loss, 1.0].map(|x| Tensor::new(x, &Device::Cpu).unwrap());
    StepScale::on_device((&loss, &norm), scale, None, None).unwrap()
}

/// The parameter's slot.
pub(super) fn slot(parameter: &Parameter) -> ParameterSlot {
    ParameterSlot::new(parameter.clone())
}

/// A parameter's values.
pub(super) fn values(parameter: &Parameter) -> Vec<f64> {
    let values = parameter.local().unwrap().values;
    values.to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

/// Asserts that two lists of numbers agree.
#[track_caller]
pub(super) fn assert_close(actual: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(actual.len(), expected.len());
    for (i, (a, e)) in actual.iter().zip(expected).enumerate() {
        assert!((a - e).abs() <= tolerance * e.abs().max(1.0), "element {i}: {a}, not {e}");
    }
}
