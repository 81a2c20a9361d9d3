use candle_core::{DType, Device, Tensor};
use fulgurite_core::Result;
use fulgurite_core::autograd::no_grad;
use fulgurite_core::execution::ExecutionContext;
use fulgurite_core::module::{ForwardScope, Module, ModuleBuilder};
use fulgurite_core::nn::*;
use fulgurite_test_message::assert_says;

use super::harness::{Params, analytic, assert_close, assert_same, builder, check, flat, randn};

fn check_module<M: Module>(
    shape: &[usize],
    build: impl FnOnce(&ModuleBuilder) -> Result<M>,
) -> super::harness::Run {
    let b = builder(DType::F64);
    let layer = build(&b.pp("layer")).unwrap();
    check(&[randn("x", shape)], &Params::new(&b), &|x| layer.forward(&x[0]))
}

#[test]
fn linear() {
    for shape in [&[3][..], &[1, 3], &[5, 3], &[2, 5, 3], &[2, 1, 4, 3]] {
        check_module(shape, |b| Linear::new(b, 3, 7));
        check_module(shape, |b| Linear::with_bias(b, 3, 2));
    }
}

#[test]
fn every_combination_of_frozen_weight_and_bias() {
    for frozen in [&["weight"][..], &["bias"], &["weight", "bias"]] {
        let b = ModuleBuilder::new(fulgurite_core::module::ModuleInit {
            dtype: DType::F64,
            compute_dtype: DType::F64,
            frozen: frozen.iter().map(|s| (*s).to_owned()).collect(),
            ..Default::default()
        });
        let linear = Linear::with_bias(&b, 3, 2).unwrap();
        let params = Params::new(&b);
        let x = randn("x", &[4, 3]);
        check(std::slice::from_ref(&x), &params, &|x| linear.forward(&x[0]));
        // With the input outside the graph, only the parameters have gradients.
        let alone = analytic(&[], &params, &|_| linear.forward(&x));
        for (p, grad) in params.slots.iter().zip(alone.params) {
            assert_eq!(grad.is_some(), p.requires_grad(), "{}", p.fqn());
        }
    }
}

#[test]
fn norms_embedding_and_mlps() {
    check_module(&[2, 3, 5], |b| RmsNorm::new(b, 5, 1e-6));
    check_module(&[2, 3, 5], |b| RmsNorm::with_unit_offset(b, 5, 1e-6));
    check_module(&[2, 3, 5], |b| LayerNorm::new(b, 5, 1e-5));
    check_module(&[4, 5], |b| LayerNorm::without_bias(b, 5, 1e-5));
    check_module(&[2, 3, 4], |b| SwiGluMlp::new(b, 4, 5));
    check_module(&[3, 4], |b| GeluMlp::new(b, 4, 5));
    check_module(&[3, 4], |b| GeluMlp::with_tanh(b, 4, 5));
}

#[test]
fn embedding_sums_repeated_ids() {
    let b = builder(DType::F64);
    let embedding = Embedding::new(&b, 9, 4).unwrap();
    let params = Params::new(&b);
    for dtype in [DType::U32, DType::I64] {
        let ids = Tensor::new(&[[1u32, 0, 8], [1, 1, 3]], &Device::Cpu).unwrap();
        let ids = ids.to_dtype(dtype).unwrap();
        let run = check(&[], &params, &|_| embedding.forward(&ids));
        assert_eq!(run.output.len(), 2 * 3 * 4);
        assert_eq!(run.params[0].as_ref().unwrap()[2 * 4..3 * 4], [0.0; 4]);
        let transposed = ids.t().unwrap();
        assert_eq!(embedding.forward(&transposed).unwrap().dims(), [3, 2, 4]);
        check(&[], &params, &|_| embedding.forward(&transposed));
    }
    let ids = Tensor::new(&[3i64, -1], &Device::Cpu).unwrap();
    assert_says!(embedding.forward(&ids).unwrap_err(), "module `(root)`: id -1 … range … 9 rows …");
}

#[test]
fn a_layer_used_twice_sums_both_uses() {
    let b = builder(DType::F64);
    let linear = Linear::with_bias(&b, 3, 3).unwrap();
    let params = Params::new(&b);
    check(&[randn("x", &[4, 3])], &params, &|x| {
        linear.forward(&functional::silu(&linear.forward(&x[0])?)?)
    });
}

// checklist: composer: tied parameters between units
#[test]
fn a_tied_head_gets_the_gradients_of_both_ends() {
    let b = builder(DType::F64);
    let embedding = Embedding::new(&b.pp("embed"), 7, 4).unwrap();
    let head = Linear::tied(&b.pp("head"), embedding.weight()).unwrap();
    let params = Params::new(&b);
    assert_eq!(params.slots.len(), 1);
    let ids = Tensor::new(&[0u32, 3, 3, 6], &Device::Cpu).unwrap();
    check(&[], &params, &|_| head.forward(&functional::gelu(&embedding.forward(&ids)?)?));
}

/// Counts how often each parameter is declared ready.
#[derive(Default)]
struct Ready(fulgurite_core::parameter::LocalGrads, std::sync::atomic::AtomicUsize);

impl fulgurite_core::parameter::GradReducer for Ready {
    fn buffer(&self, p: &fulgurite_core::parameter::ParameterSlot) -> Result<Tensor> {
        self.0.buffer(p)
    }
    fn ready(&self, _: &fulgurite_core::parameter::ParameterSlot) -> Result<()> {
        self.1.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        Ok(())
    }
}

#[test]
fn parameters_are_ready_once_per_backward() {
    let b = builder(DType::F64);
    let embedding = Embedding::new(&b.pp("embed"), 7, 4).unwrap();
    let norm = LayerNorm::new(&b.pp("norm"), 4, 1e-5).unwrap();
    let mlp = SwiGluMlp::new(&b.pp("mlp"), 4, 5).unwrap();
    let head = Linear::tied(&b.pp("head"), embedding.weight()).unwrap();
    let params = Params::new(&b);
    let ready = std::sync::Arc::new(Ready::default());
    params.slots.iter().for_each(|p| p.set_reducer(ready.clone()));
    let ids = Tensor::new(&[[0u32, 3, 3, 6]], &Device::Cpu).unwrap();
    let forward = || {
        let x = embedding.forward(&ids)?;
        head.forward(&mlp.forward(&norm.forward(&x)?)?)
    };
    {
        let _no_grad = no_grad();
        assert!(!forward().unwrap().track_op());
    }
    for _ in 0..2 {
        let before = ready.1.load(std::sync::atomic::Ordering::SeqCst);
        let loss = forward().unwrap().sum_all().unwrap();
        let store = loss.backward().unwrap();
        let after = ready.1.load(std::sync::atomic::Ordering::SeqCst);
        assert_eq!(after - before, params.slots.len());
        for p in &params.slots {
            assert!(store.get(p.token()).is_none());
            assert!(p.finish_backward().unwrap());
        }
    }
}

/// A second backward adds to the buffer; after a reset it overwrites the buffer.
#[test]
fn micro_batches_accumulate() {
    let b = builder(DType::F64);
    let attention = AttentionConfig {
        num_kv_heads: 1,
        head_dim: 2,
        qkv_bias: true,
        ..AttentionConfig::new(4, 2)
    };
    let layer = CausalSelfAttention::new(&b.pp("a"), &attention).unwrap();
    let norm = RmsNorm::new(&b.pp("n"), 4, 1e-6).unwrap();
    let params = Params::new(&b);
    let x = randn("x", &[4, 3, 4]);
    let loss = |x: &Tensor| layer.forward(&norm.forward(x)?)?.sqr()?.sum_all();
    let grads = |parts: &[(usize, usize)]| {
        for &(start, n) in parts {
            loss(&x.narrow(0, start, n).unwrap()).unwrap().backward().unwrap();
            params.slots.iter().for_each(|p| {
                p.finish_backward().unwrap();
            });
        }
        params.slots.iter().map(|p| params.take(p).unwrap()).collect::<Vec<_>>()
    };
    let whole = grads(&[(0, 4)]);
    let parts = grads(&[(0, 1), (1, 2), (3, 1)]);
    for (whole, parts) in whole.iter().zip(&parts) {
        assert_close("micro-batches", parts, whole, 1e-12);
    }
}

/// A strategy that reshards releases values after forward and restores them for backward.
#[test]
fn values_may_be_released_before_backward() {
    use fulgurite_core::autograd::storage;
    let b = builder(DType::F64);
    let mlp = SwiGluMlp::new(&b.pp("mlp"), 4, 5).unwrap();
    let norm = LayerNorm::new(&b.pp("norm"), 4, 1e-5).unwrap();
    let params = Params::new(&b);
    let x = randn("x", &[3, 4]);
    let f = |x: &[Tensor]| mlp.forward(&norm.forward(&x[0])?);
    let want = analytic(std::slice::from_ref(&x), &params, &f);
    let var = candle_core::Var::from_tensor(&x).unwrap();
    let y = f(&[var.as_tensor().clone()]).unwrap();
    let loss = (&y * randn("cotangent", y.dims())).unwrap().sum_all().unwrap();
    let all = &params.slots;
    let away: Vec<_> = all.iter().map(|p| storage::take(p.compute().unwrap()).unwrap()).collect();
    let error = mlp.forward(&x).unwrap_err().to_string();
    assert!(error.contains("mlp.gate_proj.weight") && error.contains("has no values"), "{error}");
    for (p, values) in all.iter().zip(away) {
        storage::replace(p.compute().unwrap(), values).unwrap();
    }
    let store = loss.backward().unwrap();
    let got = super::harness::Run {
        output: flat(&y),
        inputs: vec![store.get(&var).map(flat)],
        params: all.iter().map(|p| params.take(p)).collect(),
    };
    assert_same("after a reshard", &got, &want, 0.0);
}

#[test]
fn dropout_does_not_depend_on_sharding() {
    let b = builder(DType::F64);
    let dropout = Dropout::new(&b.pp("layers.0.drop"), 0.3).unwrap();
    let other = Dropout::new(&b.pp("layers.1.drop"), 0.3).unwrap();
    let scope = ForwardScope { training: true, seed: 7, step: 3, ..ForwardScope::default() };
    let x = randn("x", &[6, 5, 3]);
    let at = |layer: &Dropout, first_sample: u64, step: u64, x: &Tensor| {
        let _scope = ForwardScope { first_sample, step, ..scope.clone() }.enter();
        flat(&layer.forward(x).unwrap())
    };
    let whole = at(&dropout, 0, 3, &x);
    let mut parts = at(&dropout, 0, 3, &x.narrow(0, 0, 2).unwrap());
    parts.extend(at(&dropout, 2, 3, &x.narrow(0, 2, 4).unwrap()));
    assert_eq!(whole, parts);
    assert_ne!(whole, at(&dropout, 0, 4, &x));
    assert_ne!(whole, at(&other, 0, 3, &x));
    for (y, x) in whole.iter().zip(flat(&x)) {
        assert!(*y == 0.0 || (y / x - 1.0 / 0.7).abs() < 1e-12, "{y} {x}");
    }
    let _scope = ForwardScope { training: false, ..scope }.enter();
    assert_eq!(flat(&dropout.forward(&x).unwrap()), flat(&x));
}

#[test]
fn dropout_outside_of_a_scope_refuses_to_train() {
    let b = builder(DType::F64);
    let dropout = Dropout::new(&b.pp("drop"), 0.5).unwrap();
    let x = randn("x", &[6, 5]);
    {
        let _no_grad = no_grad();
        assert_eq!(flat(&dropout.forward(&x).unwrap()), flat(&x));
    }
    let default = ForwardScope::default().run(|| dropout.forward(&x));
    assert_eq!(flat(&default.unwrap()), flat(&x));
    assert_says!(dropout.forward(&x).unwrap_err(), "module `drop` … outside … forward scope …");
}

#[test]
fn worker_thread_dropout_uses_its_context_mask() {
    let b = builder(DType::F64);
    let dropout = Dropout::new(&b.pp("drop"), 0.5).unwrap();
    let x = randn("x", &[6, 5]);
    let forward = || dropout.forward(&x).map(|y| flat(&y));
    let scope = ForwardScope { training: true, seed: 7, step: 3, ..ForwardScope::default() };
    let (here, context) = scope.run(|| (forward().unwrap(), ExecutionContext::current()));
    assert!(here.contains(&0.0));
    let (without, with) = std::thread::scope(|threads| {
        threads.spawn(|| (forward(), context.run(forward))).join().expect("does not panic")
    });
    assert!(without.is_err(), "{without:?}");
    assert_eq!(with.unwrap(), here);
}

#[test]
fn dropout_backward_uses_the_forward_mask() {
    let b = builder(DType::F64);
    let dropout = Dropout::new(&b.pp("drop"), 0.25).unwrap();
    let scope = ForwardScope { training: true, first_sample: 5, ..ForwardScope::default() };
    let _scope = scope.enter();
    check(&[randn("x", &[3, 7])], &Params::none(), &|x| dropout.forward(&x[0]));
    let ones = Tensor::ones((10, 10_000), DType::F64, &Device::Cpu).unwrap();
    let y = flat(&dropout.forward(&ones).unwrap());
    let dropped = y.iter().filter(|y| **y == 0.0).count() as f64 / y.len() as f64;
    assert!((dropped - 0.25).abs() < 0.01, "{dropped}");
    assert_says!(Dropout::new(&b.pp("no"), 1.0).unwrap_err(), "module `no` … 1 is not in [0, 1)");
}

#[test]
fn wrong_inputs_are_explained() {
    let b = builder(DType::F64);
    let linear = Linear::new(&b.pp("up"), 3, 2).unwrap();
    let norm = RmsNorm::new(&b.pp("norm"), 3, 1e-6).unwrap();
    let _params = Params::new(&b);
    assert_says!(
        linear.forward(&randn("x", &[2, 4])).unwrap_err(),
        "module `up`: expected a last dimension of 3, got [2, 4]"
    );
    assert_says!(norm.forward(&randn("x", &[2, 4])).unwrap_err(), "module `norm` … 3, got [2, 4]");
    assert_says!(
        linear.forward(&randn("x", &[2, 3]).to_dtype(DType::U32).unwrap()).unwrap_err(),
        "module `up` … floating-point numbers … casts to F64, got U32 … `to_dtype` …"
    );
}
