//! f32 against f64, and bf16 and f16 against f32: the same layers, looser numbers.

use candle_core::{DType, Tensor};
use fulgurite_core::Result;
use fulgurite_core::module::{Module, ModuleBuilder};
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

#[test]
fn narrow_dtypes_follow_the_wide_one() {
    let layers: [Build; 7] = [
        |b| Ok(Box::new(Linear::with_bias(b, 8, 6)?)),
        |b| Ok(Box::new(RmsNorm::new(b, 8, 1e-6)?)),
        |b| Ok(Box::new(LayerNorm::new(b, 8, 1e-6)?)),
        |b| Ok(Box::new(SwiGluMlp::new(b, 8, 12)?)),
        |b| Ok(Box::new(GeluMlp::new(b, 8, 12)?)),
        |b| Ok(Box::new(GeluMlp::with_tanh(b, 8, 12)?)),
        |b| {
            let config = AttentionConfig {
                hidden_size: 8,
                num_heads: 4,
                num_kv_heads: 2,
                head_dim: 4,
                qkv_bias: true,
                rope: Some(Rope::new(4, 1e4)?),
                init: None,
            };
            Ok(Box::new(CausalSelfAttention::new(b, &config)?))
        },
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

/// A gradient buffer may be narrower or wider than what layers compute in.
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
