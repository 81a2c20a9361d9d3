use candle_core::{DType, Device, Tensor};
use candle_nn::ModuleT as _;
use fulgurite_core::Result;
use fulgurite_core::module::{ForwardScope, Module as _, ModuleBuilder, ModuleInit};
use fulgurite_core::nn::{BatchNorm, BatchNormConfig, Dropout};
use fulgurite_test_message::assert_says;

use super::harness::{Params, assert_close, builder, check, flat, randn};

fn training<R>(f: impl FnOnce() -> R) -> R {
    ForwardScope { training: true, ..ForwardScope::default() }.run(f)
}

#[test]
fn finite_differences_in_both_modes() {
    for (shape, affine) in [
        (vec![5, 3], true),
        (vec![2, 3, 4], true),
        (vec![3, 2, 2, 3], true),
        (vec![3, 2, 2, 3], false),
        (vec![1, 2, 1, 2, 2], true),
    ] {
        let b = builder(DType::F64);
        let config = BatchNormConfig { eps: 1e-2, affine, ..BatchNormConfig::default() };
        let norm = BatchNorm::with(&b.pp("norm"), shape[1], config).unwrap();
        let params = match affine {
            true => Params::new(&b),
            false => {
                // A module tree needs at least one parameter.
                b.frozen().parameter("other", [1], fulgurite_core::parameter::Init::ONES).unwrap();
                Params::new(&b)
            }
        };
        let x = randn("x", &shape);
        check(std::slice::from_ref(&x), &params, &|x| training(|| norm.forward(&x[0])));
        check(std::slice::from_ref(&x), &params, &|x| {
            ForwardScope::default().run(|| norm.forward(&x[0]))
        });
    }
}

/// As a norm whose whole scope is an evaluation, with the gradients of its weights.
#[test]
fn norm_in_eval_keeps_its_statistics() {
    let b = builder(DType::F64);
    let norm = BatchNorm::new(&b.pp("norm").eval(), 3).unwrap();
    let dropout = Dropout::new(&b.pp("dropout").eval(), 0.5).unwrap();
    let follows = BatchNorm::new(&b.pp("follows"), 3).unwrap();
    let params = Params::new(&b);
    let x = (randn("x", &[4, 3]) + 2.0).unwrap();
    let evaluated = ForwardScope::default().run(|| norm.forward(&x)).unwrap();
    let y = training(|| dropout.forward(&norm.forward(&x)?)).unwrap();
    assert_eq!(flat(&y), flat(&evaluated));
    assert_eq!(flat(&norm.running_mean().value().unwrap()), [0.0; 3]);
    training(|| follows.forward(&x)).unwrap();
    assert_ne!(flat(&follows.running_mean().value().unwrap()), [0.0; 3]);
    check(std::slice::from_ref(&x), &params, &|x| {
        training(|| Ok((norm.forward(&x[0])? + follows.forward(&x[0])?)?))
    });
}

#[test]
fn eval_mode_is_chosen_by_name() {
    let build = |pattern: &str| {
        let eval_mode = vec![pattern.to_owned()];
        let b = ModuleBuilder::new(ModuleInit { eval_mode, ..ModuleInit::default() });
        let norms = ["backbone", "head"].map(|name| BatchNorm::new(&b.pp(name), 3).unwrap());
        (b, norms)
    };
    let (b, norms) = build("backbone");
    let _values = Params::new(&b);
    let x = (randn("x", &[4, 3]) + 2.0).unwrap().to_dtype(DType::F32).unwrap();
    for (norm, follows) in norms.into_iter().zip([false, true]) {
        training(|| norm.forward(&x)).unwrap();
        let mean = norm.running_mean().value().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(mean != [0.0; 3], follows, "{mean:?}");
    }
    let unmatched = build("bakbone").0.finish().unwrap_err().to_string();
    assert!(
        unmatched.starts_with("`trainer.eval_mode`: no layer of the model matches `bakbone`."),
        "{unmatched}"
    );
}

/// candle's forward and its running statistics.
#[test]
fn running_statistics_match_candle() {
    for momentum in [Some(0.1), Some(1.0), None] {
        let b = builder(DType::F64);
        let config = BatchNormConfig { momentum, ..BatchNormConfig::default() };
        let norm = BatchNorm::with(&b.pp("norm"), 3, config).unwrap();
        let params = Params::new(&b);
        let [weight, bias] = [0, 1].map(|i| params.tree.parameters()[i].tensor().unwrap().detach());
        let (zeros, ones) = (
            Tensor::zeros(3, DType::F64, &Device::Cpu).unwrap(),
            Tensor::ones(3, DType::F64, &Device::Cpu).unwrap(),
        );
        let theirs = |mean: &Tensor, var: &Tensor, momentum| {
            candle_nn::BatchNorm::new_with_momentum(
                3,
                mean.copy().unwrap(),
                var.copy().unwrap(),
                weight.clone(),
                bias.clone(),
                1e-5,
                momentum,
            )
            .unwrap()
        };
        let (mut mean, mut var) = (zeros, ones);
        for step in 0..3 {
            let reference = theirs(&mean, &var, momentum.unwrap_or(1.0 / f64::from(step + 1)));
            let x = randn(&format!("x{step}"), &[4, 3, 2, 5]);
            let y = training(|| norm.forward(&x)).unwrap();
            assert_close(
                "training",
                &flat(&y),
                &flat(&reference.forward_t(&x, true).unwrap()),
                1e-12,
            );
            (mean, var) =
                (reference.running_mean().copy().unwrap(), reference.running_var().copy().unwrap());
            assert_close("mean", &flat(&norm.running_mean().value().unwrap()), &flat(&mean), 1e-12);
            assert_close("var", &flat(&norm.running_var().value().unwrap()), &flat(&var), 1e-12);
            let y = ForwardScope::default().run(|| norm.forward(&x)).unwrap();
            assert_close(
                "evaluation",
                &flat(&y),
                &flat(&reference.forward_t(&x, false).unwrap()),
                1e-12,
            );
        }
        let batches = norm.num_batches_tracked().value().unwrap();
        assert_eq!((batches.dtype(), batches.to_scalar::<i64>().unwrap()), (DType::I64, 3));
    }
}

#[test]
fn uncounted_batches_are_not_tracked() {
    let b = builder(DType::F32);
    let norm = BatchNorm::new(&b.pp("norm"), 2).unwrap();
    let params = Params::new(&b);
    let x = randn("x", &[3, 2]).to_dtype(DType::F32).unwrap();
    let scope = ForwardScope { training: true, is_padding: true, ..ForwardScope::default() };
    scope.run(|| norm.forward(&x)).unwrap();
    ForwardScope::default().run(|| norm.forward(&x)).unwrap();
    assert_eq!(norm.running_mean().value().unwrap().to_vec1::<f32>().unwrap(), [0.0, 0.0]);
    assert_eq!(norm.num_batches_tracked().value().unwrap().to_scalar::<i64>().unwrap(), 0);
    assert_eq!(params.tree.buffers().len(), 3);
}

#[test]
fn half_precision_keeps_its_statistics_in_f32() {
    let b = builder(DType::BF16);
    let norm = BatchNorm::new(&b.pp("norm"), 2).unwrap();
    let _params = Params::new(&b);
    let x = randn("x", &[8, 2]).to_dtype(DType::BF16).unwrap();
    let y = training(|| norm.forward(&x)).unwrap();
    assert_eq!((y.dtype(), norm.running_var().dtype()), (DType::BF16, DType::F32));
}

#[test]
fn mistakes_are_named() {
    let b = builder(DType::F32);
    let norm = BatchNorm::new(&b.pp("norm"), 2).unwrap();
    let error = |result: Result<Tensor>| result.unwrap_err().to_string();
    let x = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
    assert_says!(error(training(|| norm.forward(&x(&[3, 2])))), "module `norm` … has no values …");
    let _params = Params::new(&b);
    assert_says!(error(norm.forward(&x(&[3, 3, 2]))), "module `norm` … [batch, 2, ..] … [3, 3, 2]");
    assert_says!(
        error(training(|| norm.forward(&x(&[1, 2])))),
        "module `norm` … [1, 2] … variance"
    );
    let b = builder(DType::F32);
    let with = |config| BatchNorm::with(&b.pp("no"), 2, config).unwrap_err().to_string();
    let config = BatchNormConfig { momentum: Some(1.5), ..BatchNormConfig::default() };
    assert_says!(with(config), "module `no`: the momentum … between 0 and 1; got 1.5");
    let config = BatchNormConfig { eps: -1.0, ..BatchNormConfig::default() };
    assert_says!(with(config), "module `no`: the norm's epsilon … 0 or more … got -1.0");
}
