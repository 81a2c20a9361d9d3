//! Compares f32 with f64, and bf16 and f16 with f32, for the same layers at lower tolerance.

use candle_core::{DType, Device, Tensor, Var};
use fulgurite_core::Result;
use fulgurite_core::module::{ForwardScope, Module, ModuleBuilder};
use fulgurite_core::nn::*;

use super::harness::{Params, Run, analytic, assert_same, builder, randn};

type Build = fn(&ModuleBuilder) -> Result<Box<dyn Module>>;

fn run(dtype: DType, build: Build) -> Run {
    let b = builder(dtype);
    let layer = build(&b.pp("layer")).unwrap();
    let params = Params::new(&b);
    let x = randn("x", &[2, 9, 8]).to_dtype(dtype).unwrap();
    let run = analytic(&[x], &params, &|x: &[Tensor]| {
        let y = layer.forward(&x[0])?;
        assert_eq!(y.dtype(), dtype);
        Ok(y)
    });
    assert!(run.params.iter().all(Option::is_some));
    run
}

fn options(scope: QkNormScope) -> Result<AttentionConfig> {
    let rope = RopeConfig { rotary_dim: 2, ..RopeConfig::new(4, 1e4) };
    Ok(AttentionConfig {
        num_kv_heads: 2,
        head_dim: 4,
        causal: scope == QkNormScope::Head,
        output_bias: true,
        rope: Some(Rope::with_config(&rope)?),
        scale: Some(0.7),
        softcap: Some(3.0),
        qk_norm: Some(QkNorm { eps: 1e-3, scope, unit_offset: true }),
        window: Some(2),
        ..AttentionConfig::new(8, 4)
    })
}

#[test]
fn narrow_dtypes_follow_the_wide_one() {
    let layers: [Build; 10] = [
        |b| Ok(Box::new(Linear::with_bias(b, 8, 6)?)),
        |b| Ok(Box::new(RmsNorm::new(b, 8, 1e-6)?)),
        |b| Ok(Box::new(RmsNorm::with_unit_offset(b, 8, 1e-6)?)),
        |b| Ok(Box::new(LayerNorm::new(b, 8, 1e-6)?)),
        |b| Ok(Box::new(SwiGluMlp::new(b, 8, 12)?)),
        |b| Ok(Box::new(GeluMlp::new(b, 8, 12)?)),
        |b| Ok(Box::new(GeluMlp::with_tanh(b, 8, 12)?)),
        |b| {
            let config = AttentionConfig {
                num_kv_heads: 2,
                head_dim: 4,
                qkv_bias: true,
                rope: Some(Rope::new(4, 1e4)?),
                ..AttentionConfig::new(8, 4)
            };
            Ok(Box::new(CausalSelfAttention::new(b, &config)?))
        },
        |b| Ok(Box::new(CausalSelfAttention::new(b, &options(QkNormScope::Head)?)?)),
        |b| Ok(Box::new(CausalSelfAttention::new(b, &options(QkNormScope::Projection)?)?)),
    ];
    for layer in layers {
        let f64 = run(DType::F64, layer);
        assert_same("f32", &run(DType::F32, layer), &f64, 1e-5);
        assert_same("f16", &run(DType::F16, layer), &f64, 6e-3);
        assert_same("bf16", &run(DType::BF16, layer), &f64, 5e-2);
        let _portable = force_portable();
        assert_same("portable f32", &run(DType::F32, layer), &f64, 1e-5);
        assert_same("portable bf16", &run(DType::BF16, layer), &f64, 5e-2);
    }
}

/// A gradient buffer may be narrower or wider than the compute dtype of layers.
#[test]
fn buffers_of_another_dtype() {
    use std::sync::Arc;
    struct In(DType, fulgurite_core::parameter::LocalGrads);
    impl fulgurite_core::parameter::GradReducer for In {
        fn buffer(&self, p: &fulgurite_core::parameter::ParameterSlot) -> Result<Tensor> {
            static BUFFERS: std::sync::Mutex<Vec<(String, Tensor)>> = std::sync::Mutex::new(vec![]);
            let key = format!("{:?} {}", self.0, p.fqn());
            let mut buffers = BUFFERS.lock().unwrap();
            if let Some((_, buffer)) = buffers.iter().find(|(name, _)| *name == key) {
                return Ok(buffer.clone());
            }
            // A view into a larger bucket.
            let bucket = Tensor::zeros(p.elem_count() + 5, self.0, p.device())?;
            let view = bucket.narrow(0, 3, p.elem_count())?;
            buffers.push((key, view.clone()));
            Ok(view)
        }
        fn ready(&self, p: &fulgurite_core::parameter::ParameterSlot) -> Result<()> {
            self.1.ready(p)
        }
    }
    let x = randn("x", &[5, 3]).to_dtype(DType::F32).unwrap();
    let grads = |dtype: DType| {
        let b = builder(DType::F32);
        let layer = Linear::with_bias(&b, 3, 4).unwrap();
        let params = Params::new(&b);
        let reducer = Arc::new(In(dtype, Default::default()));
        params.slots.iter().for_each(|p| p.set_reducer(reducer.clone()));
        for _ in 0..2 {
            layer.forward(&x).unwrap().sqr().unwrap().sum_all().unwrap().backward().unwrap();
            params.slots.iter().for_each(|p| {
                p.finish_backward().unwrap();
            });
        }
        let all = params.slots.iter();
        all.map(|p| {
            super::harness::flat(
                &fulgurite_core::parameter::GradReducer::buffer(&*reducer, p).unwrap(),
            )
        })
        .collect::<Vec<_>>()
    };
    let want = grads(DType::F32);
    for (dtype, tolerance) in [(DType::F64, 1e-6), (DType::BF16, 2e-2)] {
        for (got, want) in grads(dtype).iter().zip(&want) {
            super::harness::assert_close("buffer", got, want, tolerance);
        }
    }
}

/// The shape of an input, and a layer.
type Case = (&'static [usize], Build);

struct Function<F>(F);

impl<F: Fn(&Tensor) -> Result<Tensor>> Module for Function<F> {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        (self.0)(x)
    }
}

fn function(f: impl Fn(&Tensor) -> Result<Tensor> + 'static) -> Result<Box<dyn Module>> {
    Ok(Box::new(Function(f)))
}

fn attention() -> AttentionConfig {
    AttentionConfig {
        num_kv_heads: 2,
        head_dim: 2,
        qkv_bias: true,
        rope: Some(Rope::new(2, 1e4).unwrap()),
        ..AttentionConfig::new(8, 4)
    }
}

/// Every layer that computes in floating point.
const LAYERS: [Case; 13] = [
    (&[2, 3, 8], |b| Ok(Box::new(Linear::with_bias(b, 8, 6)?))),
    (&[2, 3, 8], |b| Ok(Box::new(RmsNorm::new(b, 8, 1e-6)?))),
    (&[2, 3, 8], |b| Ok(Box::new(LayerNorm::new(b, 8, 1e-6)?))),
    (&[2, 4, 3], |b| Ok(Box::new(BatchNorm::new(b, 4)?))),
    (&[2, 4, 3], |b| Ok(Box::new(GroupNorm::new(b, 2, 4, 1e-6)?))),
    (&[2, 2, 5], |b| Ok(Box::new(Conv1d::new(b, 2, 3, 3, Conv1dConfig::default())?))),
    (&[2, 2, 4, 5], |b| Ok(Box::new(Conv2d::new(b, 2, 3, [3, 2], Conv2dConfig::default())?))),
    (&[2, 3, 8], |b| Ok(Box::new(SwiGluMlp::new(b, 8, 12)?))),
    (&[2, 3, 8], |b| Ok(Box::new(GeluMlp::new(b, 8, 12)?))),
    (&[2, 3, 8], |b| Ok(Box::new(CausalSelfAttention::new(b, &attention())?))),
    (&[2, 3, 8], |b| {
        Ok(Box::new(MultiHeadAttention::new(b, &MultiHeadAttentionConfig::new(8, 2))?))
    }),
    (&[2, 3, 8], |b| {
        let norm = RmsNorm::new(&b.pp("norm"), 8, 1e-6)?;
        let mlp = GeluMlp::new(&b.pp("mlp"), 8, 12)?;
        function(move |x| {
            let (y, sum) = norm.forward_residual(x, x)?;
            residual(&(y + sum)?, &norm, &mlp)
        })
    }),
    (&[2, 3, 8], |b| {
        let head = Linear::with_bias(b, 8, 5)?;
        function(move |x| {
            let targets = Tensor::new(&[[1i64, 2, -100], [0, 4, 3]], &Device::Cpu)?;
            Ok(linear_cross_entropy(&head, x, &targets)?.sum().clone())
        })
    }),
];

#[test]
fn other_floats_are_cast_and_gradients_cast_back() {
    let scope = ForwardScope { training: true, ..ForwardScope::default() };
    for (at, (shape, build)) in LAYERS.into_iter().enumerate() {
        for dtype in [DType::BF16, DType::F16, DType::F32, DType::F64] {
            let b = builder(dtype);
            let layer = build(&b.pp("layer")).unwrap();
            let params = Params::new(&b);
            for given in [DType::BF16, DType::F16, DType::F32, DType::F64] {
                let x = randn("x", shape).to_dtype(given).unwrap();
                let run = |cast: bool| {
                    analytic(std::slice::from_ref(&x), &params, &|x: &[Tensor]| {
                        let x = if cast { x[0].to_dtype(dtype)? } else { x[0].clone() };
                        layer.forward(&x)
                    })
                };
                let what = format!("layer {at} in {dtype:?}, input in {given:?}");
                let (own, by_hand) = scope.clone().run(|| (run(false), run(true)));
                assert_same(&what, &own, &by_hand, 0.0);
                assert!(own.params.iter().all(Option::is_some), "{what}");
                let x = Var::from_tensor(&x).unwrap();
                let y = scope.clone().run(|| layer.forward(&x)).unwrap();
                let grads = y.sum_all().unwrap().backward().unwrap();
                params.slots.iter().for_each(|p| drop(params.take(p)));
                assert_eq!(grads.get(&x).unwrap().dtype(), given, "{what}");
                if y.rank() > 0 {
                    assert_eq!(y.dtype(), dtype, "{what}");
                }
            }
        }
    }
}

#[test]
fn integers_are_not_taken_for_activations() {
    let scope = ForwardScope { training: true, ..ForwardScope::default() };
    for (at, (shape, build)) in LAYERS.into_iter().enumerate() {
        let b = builder(DType::F32);
        let layer = build(&b.pp("layer")).unwrap();
        let _params = Params::new(&b);
        for dtype in [DType::U8, DType::U32, DType::I64] {
            let x = Tensor::ones(shape, dtype, &Device::Cpu).unwrap();
            let error = scope.clone().run(|| layer.forward(&x)).unwrap_err().to_string();
            assert!(error.starts_with("module `layer"), "layer {at}: {error}");
            assert!(error.contains(&format!("got {dtype:?}")), "layer {at}: {error}");
        }
    }
}
