//! Activation functions, and gates with them, against their formulas in f64, in every dtype.

use fulgurite_kernels::plans::{
    Activation, activation, activation_backward, gated, gated_backward, swiglu, swiglu_backward,
};
use half::{bf16, f16};

use crate::layers::{View, close, in_every_dtype};
use crate::numbers::{Dtype, normal};
use crate::shim::Machine;

in_every_dtype! {
    activations_have_their_formulas_and_gradients(activated);
    swiglu_has_its_formula_and_gradient(swiglued);
    gates_have_their_formulas_and_gradients(gates);
}

const ALL: [Activation; 4] =
    [Activation::Silu, Activation::Gelu, Activation::GeluTanh, Activation::Relu];

/// The normal distribution function, integrated from its derivative with sufficient precision.
fn normal_distribution(x: f64) -> f64 {
    let (steps, peak) = (4000, 1.0 / (2.0 * std::f64::consts::PI).sqrt());
    let density = |t: f64| peak * (-0.5 * t * t).exp();
    let step = x / f64::from(steps);
    // Simpson's rule from 0 to x.
    let inner = |i: i32| density(step * f64::from(i)) * if i % 2 == 1 { 4.0 } else { 2.0 };
    let sum = density(0.0) + density(x) + (1..steps).map(inner).sum::<f64>();
    0.5 + sum * step / 3.0
}

fn value(function: Activation, x: f64) -> f64 {
    match function {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::Gelu => x * normal_distribution(x.clamp(-40.0, 40.0)),
        Activation::GeluTanh => {
            let root = (2.0 / std::f64::consts::PI).sqrt();
            0.5 * x * (1.0 + (root * (x + 0.044715 * x.powi(3))).tanh())
        }
        Activation::Relu => x.max(0.0),
    }
}

fn slope(function: Activation, x: f64) -> f64 {
    (value(function, x + 1e-5) - value(function, x - 1e-5)) / 2e-5
}

/// Values of which some are so large that exponentials overflow.
fn with_large<T: Dtype>(n: usize) -> Vec<T> {
    let values = normal::<T>("x", n).into_iter().enumerate();
    values.map(|(i, x)| T::from_f64(x.to_f64() * if i % 1000 == 7 { 200.0 } else { 1.0 })).collect()
}

fn activated<T: Dtype>() {
    for (n, skip) in [(1, 1), (8193, 3), (0, 0), (8256, 0)] {
        let (x, grad) = (with_large::<T>(n), normal::<T>("grad", n));
        for function in ALL {
            let mut m = Machine::default();
            let [x_at, grad_at] = [&x, &grad].map(|v| View::put(&mut m, skip, v));
            let [y, dx] = [(); 2].map(|()| View::garbage::<T>(&mut m, skip, n));
            let (x_at, grad_at, count) = (x_at.address(), grad_at.address(), n as u64);
            m.run(&activation(T::FLOAT, function, x_at, y.address(), count));
            let backward =
                activation_backward(T::FLOAT, function, [x_at, grad_at], dx.address(), count);
            m.run(&backward);
            let expected: Vec<f64> = x.iter().map(|x| value(function, x.to_f64())).collect();
            let expected_dx: Vec<f64> = x
                .iter()
                .zip(&grad)
                .map(|(x, g)| g.to_f64() * slope(function, x.to_f64()))
                .collect();
            close("y", &y.get::<T>(&m), &expected, 1.0);
            close("dx", &dx.get::<T>(&m), &expected_dx, 1.0);
        }
    }
}

fn gates<T: Dtype>() {
    for (n, skip) in [(1, 1), (8193, 3), (0, 0), (8256, 0)] {
        let (gate, [up, grad]) =
            (with_large::<T>(n), ["up", "grad"].map(|what| normal::<T>(what, n)));
        for function in ALL {
            let mut m = Machine::default();
            let at = [&gate, &up, &grad].map(|v| View::put(&mut m, skip, v));
            let [y, dgate, dup] = [(); 3].map(|()| View::garbage::<T>(&mut m, skip, n));
            let [g, u, d] = [&at[0], &at[1], &at[2]].map(View::address);
            m.run(&gated(T::FLOAT, function, [g, u], y.address(), n as u64));
            let grads = [dgate.address(), dup.address()];
            m.run(&gated_backward(T::FLOAT, function, [g, u, d], grads, n as u64));
            let each = |f: &dyn Fn(f64, f64, f64) -> f64| -> Vec<f64> {
                let wide = |i: usize| f(gate[i].to_f64(), up[i].to_f64(), grad[i].to_f64());
                (0..n).map(wide).collect()
            };
            close("y", &y.get::<T>(&m), &each(&|g, u, _| value(function, g) * u), 1.0);
            let expected = each(&|g, u, d| d * u * slope(function, g));
            close("dgate", &dgate.get::<T>(&m), &expected, 4.0);
            close("dup", &dup.get::<T>(&m), &each(&|g, _, d| d * value(function, g)), 1.0);
        }
    }
}

#[test]
fn relu_keeps_nan_and_is_flat_at_zero() {
    let x = [f32::NAN, f32::NEG_INFINITY, -0.0, 0.0, 2.0];
    let mut m = Machine::default();
    let [x_at, ones] = [m.put(&x), m.put(&[1f32; 5])];
    let [y, dx] = [(); 2].map(|()| m.garbage::<f32>(5));
    let (dtype, relu) = (fulgurite_kernels::Float::F32, Activation::Relu);
    m.run(&activation(dtype, relu, x_at, y, 5));
    m.run(&activation_backward(dtype, relu, [x_at, ones], dx, 5));
    let y = m.get::<f32>(y);
    assert!(y[0].is_nan() && y[1..] == [0.0, 0.0, 0.0, 2.0], "{y:?}");
    assert_eq!(m.get::<f32>(dx), [0.0, 0.0, 0.0, 0.0, 1.0]);
}

fn swiglued<T: Dtype>() {
    for (n, skip) in [(1, 1), (8193, 3), (0, 0), (8256, 0)] {
        let mut m = Machine::default();
        let [gate, up, grad] = ["gate", "up", "grad"].map(|what| normal::<T>(what, n));
        let at = [&gate, &up, &grad].map(|v| View::put(&mut m, skip, v));
        let [y, dgate, dup] = [(); 3].map(|()| View::garbage::<T>(&mut m, skip, n));
        let [g, u, d] = [&at[0], &at[1], &at[2]].map(View::address);
        m.run(&swiglu(T::FLOAT, [g, u], y.address(), n as u64));
        m.run(&swiglu_backward(T::FLOAT, [g, u, d], [dgate.address(), dup.address()], n as u64));
        let each = |f: &dyn Fn(f64, f64, f64, f64) -> f64| -> Vec<f64> {
            let value = |i: usize| {
                let (g, u, d) = (gate[i].to_f64(), up[i].to_f64(), grad[i].to_f64());
                f(g, u, d, 1.0 / (1.0 + (-g).exp()))
            };
            (0..n).map(value).collect()
        };
        close("y", &y.get::<T>(&m), &each(&|g, u, _, s| g * s * u), 1.0);
        close(
            "dgate",
            &dgate.get::<T>(&m),
            &each(&|g, u, d, s| d * u * s * (1.0 + g * (1.0 - s))),
            1.0,
        );
        close("dup", &dup.get::<T>(&m), &each(&|g, _, d, s| d * g * s), 1.0);
    }
}
