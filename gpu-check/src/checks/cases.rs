//! A function or layer on two devices: output and gradients.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor, Var};
use fulgurite::core::autograd::storage;
use fulgurite::core::module::{ForwardScope, ModuleBuilder, ModuleInit};
use fulgurite::core::parameter::{GradReducer as _, Init, LocalGrads, ParameterSlot};
use fulgurite::core::shard::Region;
use fulgurite::core::strategy::materialize;
use fulgurite_error::{Error, Result};

use crate::compare::{difference, numbers, randn};
use crate::findings::Findings;

/// What is computed, of the inputs.
pub(super) type Function = Box<dyn Fn(&[Tensor]) -> Result<Tensor>>;

/// A function or layer, and the shapes of its inputs.
pub(super) struct Case {
    pub(super) name: &'static str,
    pub(super) inputs: &'static [&'static [usize]],
    pub(super) of: Of,
}

/// What a case is of.
pub(super) enum Of {
    /// A function of the inputs alone.
    Function(fn(&[Tensor]) -> Result<Tensor>),
    /// A layer: makes it, with its parameters.
    Layer(fn(&ModuleBuilder) -> Result<Function>),
}

/// How inputs lie in memory.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Form {
    Contiguous,
    /// Views after an offset, whose last two dimensions are transposed.
    Strided,
}

/// Differences that are allowed from what f64 gives of the same numbers, relative to the largest. Half precision is computed in
/// f32 and rounded at the edges of an operation.
fn allowed(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-10,
        DType::F32 => 1e-4,
        DType::F16 => 8e-3,
        _ => 4e-2,
    }
}

/// An output or gradient.
type Named = (String, Vec<f64>);

fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |most, x| most.max(x.abs()))
}

/// The dtype that inputs and parameters are rounded to, and the one that is computed in.
#[derive(Debug, Clone, Copy)]
pub(super) struct Precision {
    pub(super) numbers: DType,
    pub(super) computes: DType,
}

impl Precision {
    fn of(dtype: DType) -> Self {
        Self { numbers: dtype, computes: dtype }
    }

    pub(super) fn round(self, values: &Tensor) -> Result<Tensor> {
        Ok(values.to_dtype(DType::F32)?.to_dtype(self.numbers)?.to_dtype(self.computes)?)
    }
}

/// What a case gives, by f64 on the CPU with the same numbers.
struct Reference {
    exact: Vec<Named>,
    /// What a gradient is measured by that is 0 but for rounding: the largest of all.
    largest_gradient: f64,
}

impl Reference {
    fn of(case: &Case, dtype: DType, form: Form) -> Result<Self> {
        let exact =
            run(case, Precision { numbers: dtype, computes: DType::F64 }, form, &Device::Cpu)?;
        let gradients = exact.iter().skip(1).map(|(_, values)| largest(values));
        let largest_gradient = gradients.fold(0.0, f64::max);
        Ok(Self { exact, largest_gradient })
    }

    /// How far each result is from the reference.
    fn apart(&self, results: &[Named]) -> Vec<f64> {
        let apart = |((_, got), (_, want)): (&Named, &Named)| {
            let (apart, own) = (difference(got, want), largest(want));
            match own < 1e-9 * self.largest_gradient {
                true => apart * own.max(1e-30) / self.largest_gradient,
                false => apart,
            }
        };
        results.iter().zip(&self.exact).map(apart).collect()
    }
}

/// Compares all cases in all dtypes and forms with f64 on the CPU.
pub(super) fn compare(cases: &[Case], device: &Device) -> Result<Findings> {
    compare_in(&[DType::F32, DType::BF16, DType::F16, DType::F64], cases, device)
}

/// The same in these dtypes.
pub(super) fn compare_in(dtypes: &[DType], cases: &[Case], device: &Device) -> Result<Findings> {
    let mut findings = Findings::default();
    for case in cases {
        for &dtype in dtypes {
            for form in [Form::Contiguous, Form::Strided] {
                let name = format!("{} {dtype:?} {form:?}", case.name);
                let reference = Reference::of(case, dtype, form)?;
                // What fails is told with what it is, and the others are looked at.
                match run(case, Precision::of(dtype), form, device) {
                    Err(error) => findings.wrong.push(format!("{name}: {error}")),
                    Ok(got) => {
                        let apart = reference.apart(&got);
                        for ((what, _), apart) in got.iter().zip(apart) {
                            findings.difference(&format!("{name} {what}"), apart, allowed(dtype));
                        }
                    }
                }
            }
        }
    }
    Ok(findings)
}

/// A case in one dtype, on one device.
pub(super) struct Instance {
    function: Function,
    /// Its parameters, with values.
    pub(super) slots: Vec<ParameterSlot>,
    grads: Arc<LocalGrads>,
}

impl Instance {
    pub(super) fn new(case: &Case, precision: Precision, device: &Device) -> Result<Self> {
        match case.of {
            Of::Function(f) => {
                Ok(Self { function: Box::new(f), slots: Vec::new(), grads: Arc::default() })
            }
            Of::Layer(make) => {
                let b = ModuleBuilder::new(ModuleInit {
                    device: device.clone(),
                    dtype: precision.computes,
                    compute_dtype: precision.computes,
                    ..ModuleInit::default()
                });
                let function = make(&b)?;
                let (slots, grads) = with_values(&b, precision)?;
                Ok(Self { function, slots, grads })
            }
        }
    }

    /// The output, the same each time.
    pub(super) fn forward(&self, inputs: &[Tensor]) -> Result<Tensor> {
        let scope = ForwardScope { training: true, seed: 7, step: 3, ..ForwardScope::default() };
        scope.run(|| (self.function)(inputs))
    }

    /// The gradients of the sum of output times weights, by name: of inputs, then of parameters.
    pub(super) fn backward(
        &self,
        output: &Tensor,
        weights: &Tensor,
        vars: &[Var],
    ) -> Result<Vec<(String, Tensor)>> {
        let all = (output * weights)?;
        let all = match all.dtype() {
            DType::F64 => all,
            _ => all.to_dtype(DType::F32)?,
        };
        let store = all.sum_all()?.backward()?;
        let mut gradients = Vec::new();
        for (i, var) in vars.iter().enumerate() {
            let grad =
                store.get(var).ok_or_else(|| Error::other(format!("input {i} has no gradient")))?;
            gradients.push((format!("gradient of input {i}"), grad.clone()));
        }
        for slot in &self.slots {
            slot.finish_backward()?;
            gradients.push((format!("gradient of {}", slot.fqn()), self.grads.buffer(slot)?));
        }
        Ok(gradients)
    }
}

/// What outputs are multiplied with before they are summed up.
pub(super) fn cotangent(output: &Tensor, precision: Precision) -> Result<Tensor> {
    let weights = precision.round(&randn("cotangent", output.dims())?)?;
    Ok(weights.to_dtype(output.dtype())?.to_device(output.device())?)
}

/// The output and all gradients, by name.
fn run(case: &Case, precision: Precision, form: Form, device: &Device) -> Result<Vec<Named>> {
    let instance = Instance::new(case, precision, device)?;
    let mut vars = Vec::new();
    let mut views = Vec::new();
    for (i, shape) in case.inputs.iter().enumerate() {
        let values = precision.round(&input(i, shape)?)?;
        let var = match form {
            Form::Contiguous => values.clone(),
            Form::Strided => turned(&values)?.contiguous()?.pad_with_zeros(0, 1, 2)?,
        };
        let var = Var::from_tensor(&var.to_device(device)?)?;
        views.push(match form {
            Form::Contiguous => var.as_tensor().clone(),
            Form::Strided => turned(&var.narrow(0, 1, turned(&values)?.dim(0)?)?)?,
        });
        vars.push(var);
    }
    let output = instance.forward(&views)?;
    let mut results = vec![("output".to_owned(), numbers(&output)?)];
    for (name, gradient) in instance.backward(&output, &cotangent(&output, precision)?, &vars)? {
        results.push((name, numbers(&gradient)?));
    }
    Ok(results)
}

/// Values of an input, in f32 on the host.
pub(super) fn input(i: usize, shape: &[usize]) -> Result<Tensor> {
    Ok(randn(&format!("input {i}"), shape)?.to_dtype(DType::F32)?)
}

fn turned(x: &Tensor) -> Result<Tensor> {
    Ok(match x.rank() {
        0 | 1 => x.clone(),
        n => x.transpose(n - 2, n - 1)?,
    })
}

/// Gives all parameters values, the same on every device, and a place for their gradients.
fn with_values(
    b: &ModuleBuilder,
    precision: Precision,
) -> Result<(Vec<ParameterSlot>, Arc<LocalGrads>)> {
    let mut tree = b.finish()?;
    let (slots, grads) = (tree.slots(), Arc::new(LocalGrads::default()));
    for p in &slots {
        let region = Region::full(p.global_shape());
        let init = Init::Normal { mean: 0.1, std: 0.5 };
        let values = init.values(5, p.fqn(), p.global_shape(), &region, DType::F32, p.device())?;
        let values = precision.round(&values)?;
        storage::allocate(p.compute()?)?;
        storage::copy_from(p.compute()?, &values)?;
        p.set_reducer(grads.clone());
    }
    materialize::buffers(&tree, 5)?;
    Ok((slots, grads))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Another function each second time, as that of a device with a fault.
    fn faulty(x: &[Tensor]) -> Result<Tensor> {
        static CALLS: AtomicUsize = AtomicUsize::new(0);
        let factor = 1.0 + (CALLS.fetch_add(1, Ordering::Relaxed) % 2) as f64;
        Ok((&x[0] * factor)?)
    }

    /// A gradient of zero but for rounding, and another one.
    fn cancels(x: &[Tensor]) -> Result<Tensor> {
        static CALLS: AtomicUsize = AtomicUsize::new(0);
        let rounding = [1e-20, 3e-8][CALLS.fetch_add(1, Ordering::Relaxed) % 2];
        Ok((&x[0] + (&x[1] * rounding)?)?)
    }

    #[test]
    fn a_device_that_computes_something_else_is_found_out_in_output_and_gradients() {
        let case = |f| Case { name: "f", inputs: &[&[3, 4]], of: Of::Function(f) };
        let found = compare(&[case(faulty)], &Device::Cpu).unwrap();
        // Four dtypes, two forms, output and gradient.
        assert_eq!((found.wrong.len(), found.figures.len()), (16, 16), "{:?}", found.wrong);
        assert!(
            found.wrong[0].starts_with("f F32 Contiguous output: differs by 1"),
            "{:?}",
            found.wrong
        );
        let found = compare(&[case(|x| Ok(x[0].sqr()?))], &Device::Cpu).unwrap();
        assert_eq!((found.wrong.len(), found.figures.len()), (0, 16), "{:?}", found.wrong);
    }

    #[test]
    fn a_gradient_of_zero_is_measured_by_the_largest() {
        let case = Case { name: "f", inputs: &[&[3, 4], &[3, 4]], of: Of::Function(cancels) };
        let found = compare(&[case], &Device::Cpu).unwrap();
        let apart = found.figures["f F32 Contiguous gradient of input 1"];
        assert!(apart > 1e-8 && apart < 1e-7, "{apart}");
        assert!(!found.wrong.iter().any(|wrong| wrong.contains("F32")), "{:?}", found.wrong);
    }
}
