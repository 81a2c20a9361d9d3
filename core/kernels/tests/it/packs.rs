//! Loads of 16 bytes at once give the same bits as loads of single elements.

use fulgurite_kernels::plans::{
    CrossEntropy, LayerNorm, LayerNormBackward, RmsNorm, RmsNormBackward, cross_entropy,
    cross_entropy_backward, layer_norm, layer_norm_backward, rms_norm, rms_norm_backward,
};
use half::{bf16, f16};

use crate::layers::View;
use crate::numbers::{Dtype, normal};
use crate::shim::Machine;

/// Whole packs, more than fit in registers.
const N: usize = 8456;
const ROWS: usize = 2;

/// The outputs of an RMS norm and its backward, of tensors that begin `skip` elements after an
/// aligned address.
fn rms<T: Dtype>(skip: usize) -> Vec<Vec<f64>> {
    let m = &mut Machine::default();
    let [x, residual, grad, more] = ["x", "residual", "grad", "more"]
        .map(|what| View::put(m, skip, &normal::<T>(what, ROWS * N)));
    let [sum, y, dx] = [(); 3].map(|()| View::garbage::<T>(m, skip, ROWS * N));
    let weight = m.put(&normal::<f32>("weight", N));
    let (rstd, dweight) = (m.garbage::<f32>(ROWS), m.put(&vec![0f32; N]));
    let (rows, n) = (ROWS as u32, N as u32);
    m.run(&rms_norm(RmsNorm {
        dtype: T::FLOAT,
        x: x.address(),
        residual: residual.address(),
        weight,
        sum: sum.address(),
        y: y.address(),
        rstd,
        rows,
        n,
        eps: 1e-5,
    }));
    m.run(&rms_norm_backward(RmsNormBackward {
        dtype: T::FLOAT,
        x: sum.address(),
        weight,
        rstd,
        grad: grad.address(),
        more: more.address(),
        dx: dx.address(),
        dweight,
        rows,
        n,
    }));
    let wide = |view: &View| view.get::<T>(m).iter().map(|x| x.to_f64()).collect();
    let mut all: Vec<Vec<f64>> = [&sum, &y, &dx].map(wide).to_vec();
    all.extend([rstd, dweight].map(|at| m.get::<f32>(at).iter().map(|x| f64::from(*x)).collect()));
    all
}

/// The outputs of a layer norm and its backward, likewise.
fn layer<T: Dtype>(skip: usize) -> Vec<Vec<f64>> {
    let m = &mut Machine::default();
    let [x, grad] = ["x", "grad"].map(|what| View::put(m, skip, &normal::<T>(what, ROWS * N)));
    let [y, dx] = [(); 2].map(|()| View::garbage::<T>(m, skip, ROWS * N));
    let [weight, bias] = ["weight", "bias"].map(|what| m.put(&normal::<f32>(what, N)));
    let [mean, rstd] = [(); 2].map(|()| m.garbage::<f32>(ROWS));
    let [dweight, dbias] = [(); 2].map(|()| m.put(&vec![0f32; N]));
    let (rows, n) = (ROWS as u32, N as u32);
    m.run(&layer_norm(LayerNorm {
        dtype: T::FLOAT,
        x: x.address(),
        residual: 0,
        weight,
        bias,
        sum: 0,
        y: y.address(),
        mean,
        rstd,
        rows,
        n,
        eps: 1e-5,
    }));
    m.run(&layer_norm_backward(LayerNormBackward {
        dtype: T::FLOAT,
        x: x.address(),
        weight,
        mean,
        rstd,
        grad: grad.address(),
        more: 0,
        dx: dx.address(),
        dweight,
        dbias,
        rows,
        n,
    }));
    let wide = |view: &View| view.get::<T>(m).iter().map(|x| x.to_f64()).collect();
    let mut all: Vec<Vec<f64>> = [&y, &dx].map(wide).to_vec();
    let floats = [mean, rstd, dweight, dbias];
    all.extend(floats.map(|at| m.get::<f32>(at).iter().map(|x| f64::from(*x)).collect()));
    all
}

/// The outputs of a cross entropy and its backward, likewise.
fn loss<T: Dtype>(skip: usize) -> Vec<Vec<f64>> {
    let m = &mut Machine::default();
    let logits = View::put(m, skip, &normal::<T>("logits", ROWS * N));
    let (targets, lse) = (m.put(&[8455u32, 1]), m.garbage::<f32>(ROWS));
    let (grad, total) = (m.put(&[0.5f32]), m.garbage::<f64>(1));
    let of = CrossEntropy {
        dtype: T::FLOAT,
        logits: logits.address(),
        targets,
        lse,
        rows: ROWS as u32,
        classes: N as u32,
        smoothing: 0.1,
    };
    m.run(&cross_entropy(of, total));
    m.run(&cross_entropy_backward(of, grad, 0, N as u32));
    let lse = m.get::<f32>(lse).iter().map(|x| f64::from(*x)).collect();
    let gradient = logits.get::<T>(m).iter().map(|x| x.to_f64()).collect();
    vec![m.get::<f64>(total), lse, gradient]
}

#[test]
fn bits_do_not_depend_on_alignment() {
    for of in
        [rms::<f32>, rms::<bf16>, rms::<f16>, layer::<f32>, layer::<bf16>, loss::<f32>, loss::<f16>]
    {
        let (whole, apart) = (of(0), of(3));
        assert!(whole.iter().flatten().all(|x| x.is_finite()));
        assert!(whole == apart);
    }
}
