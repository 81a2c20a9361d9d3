//! Finite differences, and parameters with values and gradient buffers.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor, Var};
use fulgurite_core::Result;
use fulgurite_core::autograd::{no_grad, storage};
use fulgurite_core::module::{ModuleBuilder, ModuleInit, ModuleTree};
use fulgurite_core::nn::force_portable;
use fulgurite_core::parameter::{GradReducer, Init, LocalGrads, ParameterSlot};
use fulgurite_core::random::{Purpose, Stream};
use fulgurite_core::shard::Region;

/// Normally distributed numbers.
pub(crate) fn randn(what: &str, shape: &[usize]) -> Tensor {
    let n = shape.iter().product();
    let mut values = vec![0f64; n];
    Stream::new(11, Purpose::Sample, what).fill_normal(0, &mut values);
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

pub(crate) fn builder(dtype: DType) -> ModuleBuilder {
    ModuleBuilder::new(ModuleInit { dtype, compute_dtype: dtype, ..ModuleInit::default() })
}

/// A model's parameters, with values and a reducer.
pub(crate) struct Params {
    pub(crate) tree: ModuleTree,
    pub(crate) slots: Vec<ParameterSlot>,
    pub(crate) grads: Arc<LocalGrads>,
}

impl Params {
    /// Random values for every parameter that `b` recorded.
    pub(crate) fn new(b: &ModuleBuilder) -> Self {
        let mut tree = b.finish().unwrap();
        let slots = tree.slots();
        let grads = Arc::new(LocalGrads::default());
        for p in &slots {
            let region = Region::full(p.global_shape());
            let init = Init::Normal { mean: 0.1, std: 0.7 };
            let device = p.device();
            let values =
                init.values(5, p.fqn(), p.global_shape(), &region, p.compute_dtype(), device);
            storage::allocate(p.compute().unwrap()).unwrap();
            storage::copy_from(p.compute().unwrap(), &values.unwrap()).unwrap();
            p.set_reducer(grads.clone());
        }
        fulgurite_core::strategy::materialize::buffers(&tree, 5).unwrap();
        Self { tree, slots, grads }
    }

    pub(crate) fn none() -> Self {
        Self { tree: ModuleTree::default(), slots: Vec::new(), grads: Arc::default() }
    }

    /// Takes the accumulated gradient, if any; the next backward starts afresh.
    pub(crate) fn take(&self, p: &ParameterSlot) -> Option<Vec<f64>> {
        p.finish_backward().unwrap();
        let grad = p.has_accumulated().then(|| {
            let buffer = self.grads.buffer(p).unwrap();
            buffer.to_dtype(DType::F64).unwrap().to_vec1().unwrap()
        });
        p.clear_accumulated();
        grad
    }
}

/// The output and all gradients of one run.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) output: Vec<f64>,
    pub(crate) inputs: Vec<Option<Vec<f64>>>,
    pub(crate) params: Vec<Option<Vec<f64>>>,
}

pub(crate) fn flat(t: &Tensor) -> Vec<f64> {
    t.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

/// The scalar whose gradients are checked: the output times fixed random weights, summed.
fn scalar(y: &Tensor) -> Tensor {
    let weights = randn("cotangent", y.dims()).to_dtype(y.dtype()).unwrap();
    (y * weights).unwrap().sum_all().unwrap()
}

fn run(
    vars: &[Var],
    views: &[Tensor],
    params: &Params,
    f: &dyn Fn(&[Tensor]) -> Result<Tensor>,
) -> Run {
    let y = f(views).unwrap();
    let loss = scalar(&y);
    let output = flat(&y);
    let (mut inputs, mut param_grads) = (vec![None; vars.len()], vec![]);
    if loss.track_op() {
        let store = loss.backward().unwrap();
        inputs = vars.iter().map(|v| store.get(v).map(flat)).collect();
    }
    for p in &params.slots {
        param_grads.push(params.take(p));
    }
    Run { output, inputs, params: param_grads }
}

pub(crate) fn analytic(
    inputs: &[Tensor],
    params: &Params,
    f: &dyn Fn(&[Tensor]) -> Result<Tensor>,
) -> Run {
    let vars: Vec<Var> = inputs.iter().map(|x| Var::from_tensor(x).unwrap()).collect();
    let views: Vec<Tensor> = vars.iter().map(|v| v.as_tensor().clone()).collect();
    run(&vars, &views, params, f)
}

/// Repeats the run on views whose last two dimensions are transposed in memory, after an offset.
fn strided(inputs: &[Tensor], params: &Params, f: &dyn Fn(&[Tensor]) -> Result<Tensor>) -> Run {
    let turn = |x: &Tensor| match x.rank() {
        0 | 1 => x.clone(),
        n => x.transpose(n - 2, n - 1).unwrap(),
    };
    let pad = |x: &Tensor| x.contiguous().unwrap().pad_with_zeros(0, 1, 2).unwrap();
    let vars: Vec<Var> = inputs.iter().map(|x| Var::from_tensor(&pad(&turn(x))).unwrap()).collect();
    let view = |v: &Tensor, x: &Tensor| turn(&v.narrow(0, 1, turn(x).dims()[0]).unwrap());
    let views: Vec<Tensor> = vars.iter().zip(inputs).map(|(v, x)| view(v, x)).collect();
    let mut run = run(&vars, &views, params, f);
    for (i, x) in inputs.iter().enumerate() {
        run.inputs[i] = run.inputs[i].take().map(|g| {
            let g = Tensor::from_vec(g, vars[i].dims(), &Device::Cpu).unwrap();
            flat(&view(&g, x).contiguous().unwrap())
        });
    }
    run
}

pub(crate) fn assert_close(what: &str, got: &[f64], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}: length");
    let scale = want.iter().fold(1f64, |m, x| m.max(x.abs()));
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!(
            (g - w).abs() <= tolerance * scale,
            "{what}[{i}]: {g} is not {w} (scale {scale}, tolerance {tolerance})"
        );
    }
}

pub(crate) fn assert_same(what: &str, got: &Run, want: &Run, tolerance: f64) {
    assert_close(&format!("{what} output"), &got.output, &want.output, tolerance);
    let all = |run: &Run| run.inputs.iter().chain(&run.params).cloned().collect::<Vec<_>>();
    for (i, (g, w)) in all(got).iter().zip(&all(want)).enumerate() {
        match (g, w) {
            (Some(g), Some(w)) => assert_close(&format!("{what} gradient {i}"), g, w, tolerance),
            (g, w) => assert_eq!(g.is_some(), w.is_some(), "{what} gradient {i}"),
        }
    }
}

/// Checks `f`, a function of `inputs` (f64) and of parameters, by every method. Returns the run on
/// contiguous input.
pub(crate) fn check(
    inputs: &[Tensor],
    params: &Params,
    f: &dyn Fn(&[Tensor]) -> Result<Tensor>,
) -> Run {
    let plain = analytic(inputs, params, f);
    assert!(plain.inputs.iter().all(Option::is_some), "an input got no gradient");
    for (p, grad) in params.slots.iter().zip(&plain.params) {
        assert_eq!(grad.is_some(), p.requires_grad(), "{} and its gradient", p.fqn());
    }
    assert_same("strided", &strided(inputs, params, f), &plain, 1e-12);
    {
        let _portable = force_portable();
        assert_same("portable", &analytic(inputs, params, f), &plain, 1e-9);
        assert_same("portable strided", &strided(inputs, params, f), &plain, 1e-9);
    }

    let _no_grad = no_grad();
    const H: f64 = 1e-5;
    let value = |inputs: &[Tensor]| scalar(&f(inputs).unwrap()).to_scalar::<f64>().unwrap();
    for (i, input) in inputs.iter().enumerate() {
        let numeric: Vec<f64> = (0..input.elem_count())
            .map(|j| {
                let at = |h: f64| {
                    let mut values = flat(input);
                    values[j] += h;
                    let mut inputs = inputs.to_vec();
                    inputs[i] = Tensor::from_vec(values, input.shape(), &Device::Cpu).unwrap();
                    value(&inputs)
                };
                (at(H) - at(-H)) / (2.0 * H)
            })
            .collect();
        assert_close(&format!("input {i}"), plain.inputs[i].as_ref().unwrap(), &numeric, 1e-7);
    }
    for (p, grad) in params.slots.iter().zip(&plain.params) {
        let Some(grad) = grad else { continue };
        let shift = |j: usize, h: f64| {
            storage::with_host_mut(p.compute().unwrap(), |x: &mut [f64]| x[j] += h).unwrap();
        };
        let numeric: Vec<f64> = (0..p.elem_count())
            .map(|j| {
                shift(j, H);
                let high = value(inputs);
                shift(j, -2.0 * H);
                let low = value(inputs);
                shift(j, H);
                (high - low) / (2.0 * H)
            })
            .collect();
        assert_close(p.fqn(), grad, &numeric, 1e-7);
    }
    plain
}
