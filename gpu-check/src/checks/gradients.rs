//! Gradients against differences of outputs, without another device: the function itself is the
//! reference.
//!
//! Each input and parameter `x` of a case gets a random direction `d`; the output `f` gets random
//! weights `w`. The central difference `⟨w, f(x + h·d) − f(x − h·d)⟩ / 2h`, in f64 on the device,
//! is compared with `⟨g, d⟩`. Here `g` is the gradient of `⟨w, f⟩` that the device computes, once
//! in f64 and once in f32.
//!
//! For a random direction, `⟨g, d⟩` is about as large as the norm of `g`, and an error `e` of the
//! gradient changes it by about the norm of `e`. The difference is therefore given relative to the
//! norm of `g`, which does not vanish where `⟨g, d⟩` happens to. Some gradients are only rounding
//! of terms that cancel: for example a key bias has no effect on a softmax. Their terms are as
//! large as in other gradients of the case, so [`FLOOR`] times the largest gradient norm of the
//! case is added.

use candle_core::{DType, Device, Tensor, Var};
use fulgurite::core::autograd::storage;
use fulgurite_error::Result;

use super::cases::{Case, Instance, Precision, cotangent, input};
use crate::compare::{numbers, randn};
use crate::findings::Findings;

/// The step `h`. Differences have an error of `h²·f‴/6`, plus the rounding of outputs (about 50 ·
/// 2⁻⁵³ of their size) over `h`. Where functions and derivatives are about 1, this is 2e-11 plus
/// 6e-10.
const STEP: f64 = 1e-5;
/// Share of the case's largest gradient norm that is added to each norm. With the tolerance of f32
/// the floor is 1e-6 of the largest norm, some tens of roundings.
const FLOOR: f64 = 1e-2;

/// Allowed difference, relative to the gradient's norm. In f64 it covers the errors of [`STEP`],
/// with room for third derivatives of tens of thousands (sharp attention has thousands). In f32 it
/// covers sums of some thousand roundings of 6e-8 each.
fn allowed(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-6,
        _ => 1e-4,
    }
}

/// Checks all cases on the device.
pub(super) fn check(cases: &[Case], device: &Device) -> Result<Findings> {
    let mut findings = Findings::default();
    for case in cases {
        match differences(case, device) {
            // Report a failure with the case's name, and go on with the others.
            Err(error) => findings.wrong.push(format!("{}: {error}", case.name)),
            Ok(all) => {
                for (name, dtype, apart) in all {
                    let name = format!("{} {dtype:?} {name}", case.name);
                    findings.difference(&name, apart, allowed(dtype));
                }
            }
        }
    }
    Ok(findings)
}

/// The difference of each gradient from output differences, in each dtype.
fn differences(case: &Case, device: &Device) -> Result<Vec<(String, DType, f64)>> {
    let (instance, vars, output, gradients) = with_gradients(case, DType::F64, device)?;
    let (_, _, _, in_f32) = with_gradients(case, DType::F32, device)?;
    let weights = cotangent(&output, numbers_of_f32(DType::F64))?;
    let inputs: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().detach()).collect();
    let norms = gradients.iter().map(|(_, it)| norm(it)).collect::<Result<Vec<f64>>>()?;
    let floor = FLOOR * norms.iter().copied().fold(0.0, f64::max);
    let mut all = Vec::new();
    for (i, ((name, gradient), (_, in_f32))) in gradients.iter().zip(&in_f32).enumerate() {
        let parameter = i.checked_sub(inputs.len()).map(|at| instance.slots[at].compute());
        let parameter = parameter.transpose()?;
        let values = match parameter {
            Some(parameter) => parameter.copy()?.detach(),
            None => inputs[i].clone(),
        };
        // Parameter gradients are flat.
        let direction = randn(&format!("direction {i}"), values.dims())?.to_device(device)?;
        let moved_by = |by: f64| -> Result<Tensor> {
            let moved = (&values + (&direction * by)?)?;
            let mut inputs = inputs.clone();
            match parameter {
                Some(parameter) => storage::copy_from(parameter, &moved)?,
                None => inputs[i] = moved,
            }
            Ok(instance.forward(&inputs)?.detach())
        };
        let change = (moved_by(STEP)? - moved_by(-STEP)?)?;
        if let Some(parameter) = parameter {
            storage::copy_from(parameter, &values)?;
        }
        let expected = sum(&(change * &weights)?)? / (2.0 * STEP);
        let scale = norms[i] + floor;
        for (dtype, gradient) in [(DType::F64, gradient), (DType::F32, in_f32)] {
            let gradient = gradient.to_dtype(DType::F64)?.reshape(direction.shape())?;
            let got = sum(&(gradient * &direction)?)?;
            all.push((name.clone(), dtype, (got - expected).abs() / scale));
        }
    }
    Ok(all)
}

/// The same f32 values in both dtypes.
fn numbers_of_f32(computes: DType) -> Precision {
    Precision { numbers: DType::F32, computes }
}

/// A case with its inputs, output and all gradients by name.
type WithGradients = (Instance, Vec<Var>, Tensor, Vec<(String, Tensor)>);

fn with_gradients(case: &Case, dtype: DType, device: &Device) -> Result<WithGradients> {
    let precision = numbers_of_f32(dtype);
    let instance = Instance::new(case, precision, device)?;
    let var = |(i, shape): (usize, &&[usize])| -> Result<Var> {
        Ok(Var::from_tensor(&input(i, shape)?.to_dtype(dtype)?.to_device(device)?)?)
    };
    let vars = case.inputs.iter().enumerate().map(var).collect::<Result<Vec<Var>>>()?;
    let inputs: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let output = instance.forward(&inputs)?;
    let gradients = instance.backward(&output, &cotangent(&output, precision)?, &vars)?;
    let output = output.detach();
    Ok((instance, vars, output, gradients))
}

/// The sum of all elements, computed on the device.
fn sum(x: &Tensor) -> Result<f64> {
    Ok(numbers(&x.sum_all()?)?[0])
}

fn norm(x: &Tensor) -> Result<f64> {
    Ok(sum(&x.to_dtype(DType::F64)?.sqr()?)?.sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checks::cases::Of;

    fn wrong(f: fn(&[Tensor]) -> Result<Tensor>) -> Vec<String> {
        let case = Case { name: "f", inputs: &[&[3, 40], &[40]], of: Of::Function(f) };
        let found = check(&[case], &Device::Cpu).unwrap();
        assert_eq!(found.figures.len(), 4, "two inputs, two dtypes: {:?}", found.figures);
        found.wrong
    }

    fn product(x: &[Tensor]) -> Result<Tensor> {
        Ok(x[0].sin()?.broadcast_mul(&x[1])?)
    }

    #[test]
    fn right_gradient_passes() {
        assert_eq!(wrong(product), Vec::<String>::new());
    }

    #[test]
    fn missing_term_is_found_in_both_dtypes() {
        // Backward misses 1/2000 of the second input.
        let found = wrong(|x| {
            let seen = (&x[1] * 0.9995)?;
            product(&[x[0].clone(), (seen + (x[1].detach() * 0.0005)?)?])
        });
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].starts_with("f F64 gradient of input 1: differs by"), "{found:?}");
        assert!(found[1].starts_with("f F32 gradient of input 1: differs by"), "{found:?}");
    }

    #[test]
    fn gradient_wrong_only_in_f32_is_found() {
        let found = wrong(|x| match x[0].dtype() {
            DType::F64 => product(x),
            // As if one operand were rounded to half precision.
            dtype => product(&[x[0].to_dtype(DType::BF16)?.to_dtype(dtype)?, x[1].clone()]),
        });
        assert!(!found.is_empty() && found.iter().all(|it| it.starts_with("f F32")), "{found:?}");
    }

    #[test]
    fn failing_case_does_not_stop_the_others() {
        let case = |f| Case { name: "f", inputs: &[&[4]], of: Of::Function(f) };
        let cases =
            [case(|_| Err(fulgurite_error::Error::other("no kernel"))), case(|x| Ok(x[0].sqr()?))];
        let found = check(&cases, &Device::Cpu).unwrap();
        assert_eq!((found.wrong, found.figures.len()), (vec!["f: no kernel".to_owned()], 2));
    }
}
