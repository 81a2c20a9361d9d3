//! Compares f32 with f64, and bf16 and f16 with f32, for the same layers at lower tolerance.

use candle_core::{DType, Device, Tensor, Var};
use fulgurite_core::Result;
use fulgurite_core::module::{ForwardScope, Module, ModuleBuilder, ModuleInit};
use fulgurite_core::nn::layer_table::{LAYERS, LayerRow, TableLayer};
use fulgurite_core::nn::*;

use super::harness::{Params, Run, analytic, assert_same, builder, randn};

type Build = dyn Fn(&ModuleBuilder) -> Result<TableLayer>;

fn run(dtype: DType, row: &LayerRow) -> Run {
    let b = builder(dtype);
    let layer = row.build(&b.pp("layer")).unwrap();
    let params = Params::new(&b);
    let x = (randn("x", row.shape) * 0.5).unwrap().to_dtype(dtype).unwrap();
    let scope = ForwardScope { training: true, ..ForwardScope::default() };
    let run = analytic(&[x], &params, &|x: &[Tensor]| {
        let y = scope.clone().run(|| layer.forward(&x[0]))?;
        assert_eq!(y.dtype(), dtype);
        Ok(y)
    });
    assert!(run.params.iter().all(Option::is_some));
    run
}

#[test]
fn narrow_dtypes_follow_the_wide_one() {
    for row in LAYERS.iter().filter(|row| row.casts) {
        let name = |dtype: &str| format!("{} in {dtype}", row.layer);
        // An attention of several operations rounds between them.
        let several = ["MultiHeadAttention", "RelativePositionBias", "LatentAttention"];
        let most = if several.contains(&row.layer) { 4.0 } else { 1.0 };
        let f64 = run(DType::F64, row);
        assert_same(&name("f32"), &run(DType::F32, row), &f64, most * 1e-5);
        assert_same(&name("f16"), &run(DType::F16, row), &f64, most * 6e-3);
        assert_same(&name("bf16"), &run(DType::BF16, row), &f64, most * 5e-2);
        let _portable = force_portable();
        assert_same(&name("portable f32"), &run(DType::F32, row), &f64, most * 1e-5);
        assert_same(&name("portable bf16"), &run(DType::BF16, row), &f64, most * 5e-2);
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

/// A layer that casts, and the shape of its input.
struct Case {
    name: String,
    shape: &'static [usize],
    build: Box<Build>,
}

/// The layers of the table that cast, and operations of several layers.
fn casting_cases() -> Vec<Case> {
    let rows = LAYERS.iter().filter(|row| row.casts).map(|row| Case {
        name: format!("{} {:?}", row.layer, row.docs),
        shape: row.shape,
        build: Box::new(|b| row.build(b)),
    });
    let fused: [(&str, Box<Build>); 2] = [
        (
            "norm of a sum, residual",
            Box::new(|b| {
                let norm = RmsNorm::new(&b.pp("norm"), 8, 1e-6)?;
                let mlp = GeluMlp::new(&b.pp("mlp"), 8, 12)?;
                Ok(TableLayer::new(move |x| {
                    let (y, sum) = norm.forward_residual(x, x)?;
                    residual(&(y + sum)?, &norm, &mlp)
                }))
            }),
        ),
        (
            "linear_cross_entropy",
            Box::new(|b| {
                let head = Linear::with_bias(b, 8, 5)?;
                Ok(TableLayer::new(move |x| {
                    let targets = Tensor::new(&[[1i64, 2, -100], [0, 4, 3]], &Device::Cpu)?;
                    Ok(linear_cross_entropy(&head, x, &targets)?.sum().clone())
                }))
            }),
        ),
    ];
    let fused = fused.map(|(name, build)| Case { name: name.to_owned(), shape: &[2, 3, 8], build });
    rows.chain(fused).collect()
}

/// A builder of a model with parameters in the first dtype that computes in the second:
/// `bf16-mixed` is (F32, BF16), `bf16-true` is (BF16, BF16).
fn builder_of([dtype, compute_dtype]: [DType; 2]) -> ModuleBuilder {
    ModuleBuilder::new(ModuleInit { dtype, compute_dtype, ..ModuleInit::default() })
}

const PRECISIONS: [[DType; 2]; 6] = [
    [DType::F32, DType::BF16],
    [DType::BF16, DType::BF16],
    [DType::F32, DType::F16],
    [DType::F16, DType::F16],
    [DType::F32, DType::F32],
    [DType::F64, DType::F64],
];

#[test]
fn other_floats_are_cast_and_gradients_cast_back() {
    let scope = ForwardScope { training: true, ..ForwardScope::default() };
    for Case { name, shape, build } in casting_cases() {
        for precision in PRECISIONS {
            let (b, dtype) = (builder_of(precision), precision[1]);
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
                let what = format!("{name} in {precision:?}, input in {given:?}");
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
    for Case { name, shape, build } in casting_cases() {
        let b = builder(DType::F32);
        let layer = build(&b.pp("layer")).unwrap();
        let _params = Params::new(&b);
        for dtype in [DType::U8, DType::U32, DType::I64] {
            let x = Tensor::ones(shape, dtype, &Device::Cpu).unwrap();
            let error = scope.clone().run(|| layer.forward(&x)).unwrap_err().to_string();
            assert!(error.starts_with("module `layer"), "{name}: {error}");
            assert!(error.contains(&format!("got {dtype:?}")), "{name}: {error}");
        }
    }
}

/// Ids stay ids, and layers without a dtype of their own compute in the input's.
#[test]
fn layers_that_do_not_cast_keep_the_dtype() {
    let scope = ForwardScope { training: true, ..ForwardScope::default() };
    for row in LAYERS.iter().filter(|row| !row.casts) {
        for precision in PRECISIONS {
            let b = builder_of(precision);
            let layer = row.build(&b.pp("layer")).unwrap();
            let ids = row.ids(&Device::Cpu).unwrap();
            let _params = row.has_parameters().then(|| Params::new(&b));
            for given in [DType::BF16, DType::F16, DType::F32, DType::F64] {
                let x =
                    ids.clone().unwrap_or_else(|| randn("x", row.shape).to_dtype(given).unwrap());
                let y = scope.clone().run(|| layer.forward(&x)).unwrap();
                let expected = if ids.is_some() { precision[1] } else { given };
                assert_eq!(y.dtype(), expected, "{} in {precision:?}", row.layer);
            }
        }
    }
}
