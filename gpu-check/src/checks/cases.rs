//! Functions and layers to compare on two devices: output and gradients.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor, Var};
use fulgurite::core::autograd::storage;
use fulgurite::core::module::{ForwardScope, Module as _, ModuleBuilder, ModuleInit};
use fulgurite::core::parameter::{GradReducer as _, Init, LocalGrads, ParameterSlot};
use fulgurite::core::shard::Region;
use fulgurite::core::strategy::materialize;
use fulgurite::nn::layer_table::{Docs, Input as RowInput, LayerRow};
use fulgurite_error::{Error, Result};

use crate::compare::{difference, numbers, randn};
use crate::findings::Findings;

/// A computation on the inputs of a case.
pub(super) type Function = Box<dyn Fn(&[Tensor]) -> Result<Tensor>>;

/// A function or layer, and the shapes of its inputs.
pub(super) struct Case {
    pub(super) name: &'static str,
    pub(super) inputs: &'static [&'static [usize]],
    pub(super) of: Of,
}

/// The computation of a case.
pub(super) enum Of {
    /// A function of the inputs only.
    Function(fn(&[Tensor]) -> Result<Tensor>),
    /// A layer: builds it with its parameters.
    Layer(fn(&ModuleBuilder) -> Result<Function>),
    /// A layer of the table of all layers.
    Row(&'static LayerRow),
}

impl Case {
    /// The case of a layer of the table.
    pub(super) fn of_row(row: &'static LayerRow) -> Self {
        let inputs = match row.input {
            RowInput::Floats => std::slice::from_ref(&row.shape),
            RowInput::Ids(_) => &[],
        };
        let name = match &row.docs {
            Docs::Parameters([name, ..]) | Docs::Plain([name, _]) => name,
        };
        Self { name, inputs, of: Of::Row(row) }
    }
}

/// Scales inputs down so that no softmax saturates. A saturated softmax leaves gradients that are
/// small differences of larger values, and devices round those differently.
pub(super) fn mild(x: &Tensor) -> Result<Tensor> {
    Ok((x * 0.25)?)
}

/// Memory layout of inputs.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Form {
    Contiguous,
    /// Views with an offset, whose last two dimensions are transposed.
    Strided,
}

/// Allowed difference from the f64 result on the same values, relative to the largest value. Half
/// precision is computed in f32 and rounded at the edges of an operation.
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

/// The dtype that inputs and parameters are rounded to, and the dtype of the computation.
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

/// Results of a case in f64 on the CPU, from the same values.
struct Reference {
    exact: Vec<Named>,
    /// The largest gradient element. Gradients that are zero up to rounding are compared relative
    /// to it.
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

    /// Difference of each result from the reference.
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

/// Like [`compare`], in the given dtypes.
pub(super) fn compare_in(dtypes: &[DType], cases: &[Case], device: &Device) -> Result<Findings> {
    let mut findings = Findings::default();
    for case in cases {
        for &dtype in dtypes {
            for form in [Form::Contiguous, Form::Strided] {
                let name = format!("{} {dtype:?} {form:?}", case.name);
                let reference = Reference::of(case, dtype, form)?;
                // Report a failure with the case's name, and go on with the others.
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
    /// Parameters of the layer, with values.
    pub(super) slots: Vec<ParameterSlot>,
    grads: Arc<LocalGrads>,
}

impl Instance {
    pub(super) fn new(case: &Case, precision: Precision, device: &Device) -> Result<Self> {
        let b = ModuleBuilder::new(ModuleInit {
            device: device.clone(),
            dtype: precision.computes,
            compute_dtype: precision.computes,
            ..ModuleInit::default()
        });
        let (function, has_parameters): (Function, bool) = match case.of {
            Of::Function(f) => (Box::new(f), false),
            Of::Layer(make) => (make(&b)?, true),
            Of::Row(row) => {
                let (layer, ids) = (row.build(&b.pp("layer"))?, row.ids(device)?);
                let function: Function = match ids {
                    Some(ids) => Box::new(move |_| layer.forward(&ids)),
                    None => Box::new(move |x| layer.forward(&mild(&x[0])?)),
                };
                (function, row.has_parameters())
            }
        };
        let (slots, grads) = match has_parameters {
            true => with_values(&b, precision)?,
            false => Default::default(),
        };
        Ok(Self { function, slots, grads })
    }

    /// Computes the output; repeated calls give the same output.
    pub(super) fn forward(&self, inputs: &[Tensor]) -> Result<Tensor> {
        let scope = ForwardScope { training: true, seed: 7, step: 3, ..ForwardScope::default() };
        scope.run(|| (self.function)(inputs))
    }

    /// Gradients of `sum(output * weights)` by name: inputs first, then parameters.
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

/// Weights for the sum over an output.
pub(super) fn cotangent(output: &Tensor, precision: Precision) -> Result<Tensor> {
    let weights = precision.round(&randn("cotangent", output.dims())?)?;
    Ok(weights.to_dtype(output.dtype())?.to_device(output.device())?)
}

/// Output and all gradients, by name.
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

/// Gives each parameter values, the same on every device, and a gradient buffer.
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

    /// Doubles its output at every second call, like a faulty device.
    fn faulty(x: &[Tensor]) -> Result<Tensor> {
        static CALLS: AtomicUsize = AtomicUsize::new(0);
        let factor = 1.0 + (CALLS.fetch_add(1, Ordering::Relaxed) % 2) as f64;
        Ok((&x[0] * factor)?)
    }

    /// Gives the second input a gradient of rounding size, a different one at every second call.
    fn cancels(x: &[Tensor]) -> Result<Tensor> {
        static CALLS: AtomicUsize = AtomicUsize::new(0);
        let rounding = [1e-20, 3e-8][CALLS.fetch_add(1, Ordering::Relaxed) % 2];
        Ok((&x[0] + (&x[1] * rounding)?)?)
    }

    #[test]
    fn faulty_device_is_found() {
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
    fn zero_gradient_is_compared_to_the_largest() {
        let case = Case { name: "f", inputs: &[&[3, 4], &[3, 4]], of: Of::Function(cancels) };
        let found = compare(&[case], &Device::Cpu).unwrap();
        let apart = found.figures["f F32 Contiguous gradient of input 1"];
        assert!(apart > 1e-8 && apart < 1e-7, "{apart}");
        assert!(!found.wrong.iter().any(|wrong| wrong.contains("F32")), "{:?}", found.wrong);
    }
}
