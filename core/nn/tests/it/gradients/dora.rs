//! Adapters with magnitudes. The norm is a constant in backward, so finite differences cannot check
//! the gradients of `A` and `B`. Instead, the tests compare with PEFT's formula in candle's
//! operations, and with adapters without magnitudes on rescaled weights.

use candle_core::{DType, Device, Tensor, Var};
use fulgurite_core::Result;
use fulgurite_core::autograd::storage;
use fulgurite_core::module::{Adapters, ForwardScope, Module, ModuleBuilder, ModuleInit};
use fulgurite_core::nn::*;
use fulgurite_test_message::assert_says;

use super::harness::{Params, analytic, assert_close, assert_same, check, flat, randn};

const SCALE: f64 = 1.5;

fn adapters(targets: &[&str], rank: usize, dora: bool, dropout: f64) -> Adapters {
    let alpha = SCALE * rank as f64;
    Adapters { rank, alpha, dora, dropout, ..Adapters::new(targets.iter().copied()) }
}

fn builder(adapters: Adapters, dtype: DType, frozen: &[&str]) -> ModuleBuilder {
    ModuleBuilder::new(ModuleInit {
        dtype,
        compute_dtype: dtype,
        adapters: Some(adapters),
        frozen: frozen.iter().map(|&pattern| pattern.to_owned()).collect(),
        ..ModuleInit::default()
    })
}

fn in_training<T>(f: impl FnOnce() -> T) -> T {
    let scope = ForwardScope { training: true, seed: 3, step: 5, ..ForwardScope::default() };
    let _scope = scope.enter();
    f()
}

fn value(params: &Params, fqn: &str) -> Tensor {
    params.tree.parameter(fqn).expect("declared").value().unwrap().copy().unwrap()
}

fn set(params: &Params, fqn: &str, values: &Tensor) {
    let slot = params.slots.iter().find(|p| p.fqn() == fqn).expect("declared");
    storage::copy_from(slot.compute().unwrap(), values).unwrap();
}

/// `[rows, 1]`
fn norms(weight: &Tensor) -> Tensor {
    weight.sqr().unwrap().sum_keepdim(1).unwrap().sqrt().unwrap()
}

/// Returns the factor that `dropout` applies to a layer's input: the output of a plain adapter at
/// this path that is the identity.
fn mask(path: &str, dims: &[usize], dropout: f64) -> Tensor {
    let width = dims[dims.len() - 1];
    let adapters = Adapters { alpha: width as f64, ..adapters(&[path], width, false, dropout) };
    let b = builder(adapters, DType::F64, &[]);
    let layer = Linear::new(&b.pp(path), width, width).unwrap();
    let params = Params::new(&b);
    let identity = Tensor::eye(width, DType::F64, &Device::Cpu).unwrap();
    set(&params, &format!("{path}.weight"), &identity.zeros_like().unwrap());
    for name in ["lora_A", "lora_B"] {
        set(&params, &format!("{path}.{name}.weight"), &identity);
    }
    let ones = Tensor::ones(dims, DType::F64, &Device::Cpu).unwrap();
    in_training(|| layer.forward(&ones)).unwrap().detach()
}

/// Checks the input and the magnitudes, which the norm does not depend on.
#[test]
fn finite_differences_with_constant_norm() {
    for dropout in [0.0, 0.4] {
        for shape in [&[1, 3][..], &[5, 3], &[2, 4, 3]] {
            for bias in [false, true] {
                let fixed = ["lora_A", "lora_B"];
                let b = builder(adapters(&["layer"], 2, true, dropout), DType::F64, &fixed);
                let layer = match bias {
                    true => Linear::with_bias(&b.pp("layer"), 3, 4),
                    false => Linear::new(&b.pp("layer"), 3, 4),
                };
                let (layer, params) = (layer.unwrap(), Params::new(&b));
                let x = randn("x", shape);
                in_training(|| check(&[x], &params, &|x| layer.forward(&x[0])));
            }
        }
    }
}

/// `peft/tuners/lora/dora.py`, with candle's autograd.
fn peft(x: &Tensor, dropped: Option<&Tensor>, w: [&Tensor; 4], bias: &Tensor) -> Tensor {
    let [weight, a, b, magnitude] = w;
    let linear = |x: &Tensor, w: &Tensor| x.matmul(&w.t().unwrap()).unwrap();
    let result = linear(x, weight).broadcast_add(bias).unwrap();
    let delta = (b.detach().matmul(&a.detach()).unwrap() * SCALE).unwrap();
    let norm = norms(&(weight + delta).unwrap()).squeeze(1).unwrap().detach();
    let factor = (magnitude / norm).unwrap();
    let (base, x) = match dropped {
        None => (result.broadcast_sub(bias).unwrap(), x.clone()),
        Some(mask) => {
            let x = (x * mask).unwrap();
            (linear(&x, weight), x)
        }
    };
    let added = (linear(&linear(&x, a), b).broadcast_mul(&factor).unwrap() * SCALE).unwrap();
    let base = base.broadcast_mul(&(&factor - 1.0).unwrap()).unwrap();
    ((result + base).unwrap() + added).unwrap()
}

#[test]
fn matches_peft_with_and_without_dropout() {
    for dropout in [0.0, 0.4] {
        let b = builder(adapters(&["layer"], 2, true, dropout), DType::F64, &[]);
        let layer = Linear::with_bias(&b.pp("layer"), 3, 4).unwrap();
        let params = Params::new(&b);
        let x = randn("x", &[5, 3]);
        let found =
            in_training(|| analytic(std::slice::from_ref(&x), &params, &|x| layer.forward(&x[0])));

        let names = ["weight", "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"];
        let vars = names.map(|name| Var::from_tensor(&value(&params, &format!("layer.{name}"))));
        let vars = vars.map(std::result::Result::unwrap);
        let x = Var::from_tensor(&x).unwrap();
        let mask = (dropout > 0.0).then(|| mask("layer", x.dims(), dropout));
        if let Some(mask) = &mask {
            assert!(flat(mask).contains(&0.0), "nothing is dropped");
        }
        let tensors = [0, 1, 2, 3].map(|i| vars[i].as_tensor());
        let y = peft(x.as_tensor(), mask.as_ref(), tensors, &value(&params, "layer.bias"));
        assert_close("output", &found.output, &flat(&y), 1e-12);
        let weights = randn("cotangent", y.dims());
        let store = (y * weights).unwrap().sum_all().unwrap().backward().unwrap();
        let expected = |var: &Var| flat(store.get(var).unwrap());
        assert_close("x", found.inputs[0].as_ref().unwrap(), &expected(&x), 1e-12);
        for (name, var) in names.iter().zip(&vars).skip(1) {
            let i = params.slots.iter().position(|p| p.fqn() == format!("layer.{name}")).unwrap();
            assert_close(name, found.params[i].as_ref().unwrap(), &expected(var), 1e-12);
        }
    }
}

/// With rescaled rows of the weight and of `B`, a plain adapter has the same output. `B`'s gradient
/// is then a multiple of the plain adapter's.
fn check_block<M: Module>(
    targets: &[&str],
    shape: &[usize],
    build: impl Fn(&ModuleBuilder) -> Result<M>,
) {
    let run = |dora: bool| {
        let b = builder(adapters(targets, 2, dora, 0.0), DType::F64, &[]);
        let block = build(&b.pp("block")).unwrap();
        (block, Params::new(&b))
    };
    let ((block, params), (plain, plain_params)) = (run(true), run(false));
    let mut factors = Vec::new();
    for (magnitude, weight) in params.tree.magnitudes() {
        let path = magnitude.fqn().strip_suffix(".lora_magnitude_vector").unwrap();
        let (a, b) = (format!("{path}.lora_A.weight"), format!("{path}.lora_B.weight"));
        let delta = (value(&params, &b).matmul(&value(&params, &a)).unwrap() * SCALE).unwrap();
        let own = weight.value().unwrap();
        let norms = norms(&(&own + delta).unwrap());
        let factor = (magnitude.value().unwrap().unsqueeze(1).unwrap() / norms).unwrap();
        set(&plain_params, weight.fqn(), &own.broadcast_mul(&factor).unwrap());
        set(&plain_params, &b, &value(&params, &b).broadcast_mul(&factor).unwrap());
        factors.push((b, factor));
    }
    assert!(!factors.is_empty());
    let x = randn("x", shape);
    let found = analytic(std::slice::from_ref(&x), &params, &|x| block.forward(&x[0]));
    let expected = analytic(&[x], &plain_params, &|x| plain.forward(&x[0]));
    assert_close("output", &found.output, &expected.output, 1e-11);
    let input = |run: &super::harness::Run| run.inputs[0].clone().unwrap();
    assert_close("input", &input(&found), &input(&expected), 1e-11);
    for (p, grad) in params.slots.iter().zip(&found.params) {
        let Some(i) = plain_params.slots.iter().position(|q| q.fqn() == p.fqn()) else {
            assert!(grad.as_ref().unwrap().iter().any(|g| *g != 0.0), "{}", p.fqn());
            continue;
        };
        let (Some(grad), Some(other)) = (grad, &expected.params[i]) else {
            assert_eq!(grad.is_some(), expected.params[i].is_some(), "{}", p.fqn());
            continue;
        };
        let other = match factors.iter().find(|(b, _)| b == p.fqn()) {
            None => other.clone(),
            Some((_, factor)) => {
                let other =
                    Tensor::from_vec(other.clone(), p.global_shape(), &Device::Cpu).unwrap();
                flat(&other.broadcast_mul(factor).unwrap())
            }
        };
        assert_close(p.fqn(), grad, &other, 1e-11);
    }
}

#[test]
fn blocks_of_linear_layers() {
    check_block(&["*_proj"], &[2, 3, 4], |b| SwiGluMlp::new(b, 4, 5));
    check_block(&["up_proj", "down_proj"], &[3, 4], |b| GeluMlp::new(b, 4, 5));
    let attention = AttentionConfig {
        num_kv_heads: 2,
        head_dim: 2,
        qkv_bias: true,
        ..AttentionConfig::new(5, 4)
    };
    check_block(&["*_proj"], &[2, 3, 5], |b| CausalSelfAttention::new(b, &attention));
    let config = MultiHeadAttentionConfig::new(4, 2);
    check_block(&["*_proj"], &[2, 3, 4], |b| MultiHeadAttention::new(b, &config));
}

#[test]
fn branch_and_head_with_loss_in_pieces() {
    let run = |fused: bool| {
        let targets = ["mlp.*_proj", "head"];
        let b = builder(adapters(&targets, 2, true, 0.3), DType::F64, &[]);
        let norm = RmsNorm::new(&b.pp("norm"), 4, 1e-6).unwrap();
        let mlp = SwiGluMlp::new(&b.pp("mlp"), 4, 5).unwrap();
        let head = Linear::new(&b.pp("head"), 4, 5).unwrap();
        let params = Params::new(&b);
        let targets = Tensor::new(&[[1i64, 2, -100], [0, 4, 3]], &Device::Cpu).unwrap();
        let f = |x: &[Tensor]| -> Result<Tensor> {
            let x = match fused {
                true => residual(&x[0], &norm, &mlp)?,
                false => (&x[0] + mlp.forward(&norm.forward(&x[0])?)?)?,
            };
            let options = LinearCrossEntropy::default().logits_bytes(40);
            Ok(match fused {
                true => options.loss(&head, &x, &targets)?.sum().clone(),
                false => CrossEntropy::default().loss(&head.forward(&x)?, &targets)?.sum().clone(),
            })
        };
        in_training(|| analytic(&[randn("x", &[2, 3, 4])], &params, &f))
    };
    assert_same("fused", &run(true), &run(false), 1e-11);
}

/// The magnitudes are the norms of the weight, and `B` is zero, as at the beginning.
#[test]
fn adapters_start_without_effect() {
    for (dtype, tolerance) in [(DType::F64, 1e-14), (DType::F32, 1e-6), (DType::BF16, 1e-2)] {
        let b = builder(adapters(&["layer"], 2, true, 0.5), dtype, &[]);
        let layer = Linear::with_bias(&b.pp("layer"), 16, 8).unwrap();
        let params = Params::new(&b);
        let weight = value(&params, "layer.weight");
        // A row of zeros has no direction.
        let kept = Tensor::new(&[1f64, 1., 0., 1., 1., 1., 1., 1.], &Device::Cpu).unwrap();
        let kept = kept.to_dtype(dtype).unwrap().unsqueeze(1).unwrap();
        let weight = weight.broadcast_mul(&kept).unwrap();
        set(&params, "layer.weight", &weight);
        let b = value(&params, "layer.lora_B.weight");
        set(&params, "layer.lora_B.weight", &b.zeros_like().unwrap());
        let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        set(&params, "layer.lora_magnitude_vector", &norms(&weight.to_dtype(wide).unwrap()));
        let x = randn("x", &[4, 16]).to_dtype(dtype).unwrap();
        let base = x.matmul(&weight.t().unwrap()).unwrap();
        let base = flat(&base.broadcast_add(&value(&params, "layer.bias")).unwrap());
        let run =
            in_training(|| analytic(std::slice::from_ref(&x), &params, &|x| layer.forward(&x[0])));
        assert_close("training", &run.output, &base, tolerance);
        for grad in run.params.iter().chain(&run.inputs).flatten() {
            assert!(grad.iter().all(|g| g.is_finite()));
        }
        let _no_grad = fulgurite_core::autograd::no_grad();
        assert_close("inference", &flat(&layer.forward(&x).unwrap()), &base, tolerance);
    }
}

#[test]
fn bf16_is_close_to_f32() {
    let run = |dtype: DType| {
        let b = builder(adapters(&["layer"], 2, true, 0.0), dtype, &[]);
        let layer = Linear::new(&b.pp("layer"), 16, 8).unwrap();
        let params = Params::new(&b);
        let x = randn("x", &[4, 16]).to_dtype(dtype).unwrap();
        analytic(&[x], &params, &|x| layer.forward(&x[0]))
    };
    assert_same("bf16", &run(DType::BF16), &run(DType::F32), 3e-2);
}

#[test]
fn embeddings_are_refused() {
    let b = builder(adapters(&["embed"], 2, true, 0.0), DType::F32, &[]);
    let error = Embedding::new(&b.pp("embed"), 5, 4).unwrap_err();
    assert_says!(error, "module `embed`: is an embedding … (DoRA) … `trainer.adapters.exclude` …");
}
