use candle_core::{Device, Tensor, Var};
use fulgurite_core::nn::functional::*;
use fulgurite_test_message::assert_says;

use super::harness::{Params, check, flat, randn};

#[test]
fn softmax() {
    for shape in [&[7][..], &[3, 5], &[2, 3, 11]] {
        let run = check(&[randn("x", shape)], &Params::none(), &|x| softmax_last_dim(&x[0]));
        let rows = run.output.chunks(*shape.last().unwrap());
        rows.for_each(|row| assert!((row.iter().sum::<f64>() - 1.0).abs() < 1e-12));
    }
}

#[test]
fn softmax_survives_large_and_masked_entries() {
    let x = Tensor::new(&[[1e4f32, 1e4, f32::NEG_INFINITY]], &Device::Cpu).unwrap();
    assert_eq!(flat(&softmax_last_dim(&x).unwrap()), [0.5, 0.5, 0.0]);
}

#[test]
fn activations() {
    let x = (randn("x", &[3, 5, 7]) * 2.0).unwrap();
    check(std::slice::from_ref(&x), &Params::none(), &|x| silu(&x[0]));
    check(std::slice::from_ref(&x), &Params::none(), &|x| gelu(&x[0]));
    check(std::slice::from_ref(&x), &Params::none(), &|x| gelu_tanh(&x[0]));
    check(&[x, randn("u", &[3, 5, 7])], &Params::none(), &|x| swiglu(&x[0], &x[1]));
}

#[test]
fn sums() {
    check(&[randn("x", &[3, 5]), randn("u", &[3, 5])], &Params::none(), &|x| add(&x[0], &x[1]));
    check(&[randn("x", &[3, 5])], &Params::none(), &|x| add(&x[0], &x[0]));
}

/// Both terms are outputs of functions, which get one gradient tensor, and one has another user.
#[test]
fn large_sums_share_a_gradient() {
    let x = Var::from_tensor(&randn("x", &[300, 128])).unwrap();
    let gradient = |sum: &dyn Fn(&Tensor, &Tensor) -> Tensor| {
        let (a, b) = (silu(&x).unwrap(), gelu(&x).unwrap());
        let y = sum(&sum(&a, &b), &silu(&a).unwrap());
        let grads = swiglu(&y, &a).unwrap().sum_all().unwrap().backward().unwrap();
        flat(grads.get(&x).unwrap())
    };
    let own = gradient(&|a, b| add(a, b).unwrap());
    let candles = gradient(&|a, b| (a + b).unwrap());
    for (own, candles) in own.iter().zip(candles) {
        assert!((own - candles).abs() <= 1e-12 * candles.abs().max(1.0), "{own} {candles}");
    }
}

/// A formula of `relu` and `abs` has another slope at 0.
#[test]
fn softplus_has_its_slope_at_zero() {
    let x = Tensor::new(&[-30f64, -1.0, 0.0, 0.5, 30.0], &Device::Cpu).unwrap();
    check(std::slice::from_ref(&x), &Params::none(), &|x| softplus(&x[0]));
    let large = Tensor::new(&[-1000f32, 1000.0], &Device::Cpu).unwrap();
    assert_eq!(flat(&softplus(&large).unwrap()), [0.0, 1000.0]);
}

#[test]
fn activations_have_known_values() {
    let x = Tensor::new(&[-1f64, 0., 2.], &Device::Cpu).unwrap();
    let close = |y: Tensor, want: [f64; 3]| {
        for (y, want) in flat(&y).iter().zip(want) {
            assert!((y - want).abs() < 1e-6, "{y} {want}");
        }
    };
    close(silu(&x).unwrap(), [-0.26894142, 0., 1.76159416]);
    close(gelu(&x).unwrap(), [-0.15865525, 0., 1.95449974]);
    close(gelu_tanh(&x).unwrap(), [-0.15880801, 0., 1.95459769]);
}

#[test]
fn one_tensor_as_both_inputs_sums_gradients() {
    check(&[randn("x", &[4, 3])], &Params::none(), &|x| swiglu(&x[0], &x[0]));
}

#[test]
fn norms() {
    for shape in [&[1, 9][..], &[5, 13], &[2, 3, 8], &[67, 3]] {
        let n = shape[shape.len() - 1];
        let (x, w, b) = (randn("x", shape), randn("w", &[n]), randn("b", &[n]));
        let params = Params::none();
        check(&[x.clone(), w.clone()], &params, &|x| rms_norm(&x[0], &x[1], 1e-5));
        check(&[x.clone(), w.clone()], &params, &|x| layer_norm(&x[0], &x[1], None, 1e-5));
        check(&[x, w, b], &params, &|x| layer_norm(&x[0], &x[1], Some(&x[2]), 1e-5));
    }
}

#[test]
fn rotation_by_given_angles() {
    let (angles, x) = (randn("angles", &[5, 3]), randn("x", &[2, 3, 5, 6]));
    let (cos, sin) = (angles.cos().unwrap(), angles.sin().unwrap());
    let run = check(std::slice::from_ref(&x), &Params::none(), &|x| rope(&x[0], &cos, &sin));
    let candle = candle_nn::rotary_emb::rope_slow(&x, &cos, &sin).unwrap();
    super::harness::assert_close("candle_nn", &run.output, &flat(&candle), 1e-12);
}

#[test]
fn integer_casts_keep_the_graph() {
    use super::harness::builder;
    use fulgurite_core::module::Module as _;
    use fulgurite_core::nn::Linear;
    let b = builder(candle_core::DType::F64);
    let linear = Linear::new(&b, 4, 3).unwrap();
    let params = Params::new(&b);
    let run = super::harness::analytic(&[randn("x", &[2, 4])], &params, &|x| {
        let mask = x[0].ge(0.0)?.to_dtype(candle_core::DType::F64)?;
        linear.forward(&mask)
    });
    assert!(run.params[0].is_some());
}

#[test]
fn wrong_shapes_are_named() {
    let x = randn("x", &[2, 4]);
    assert_says!(
        rms_norm(&x, &randn("w", &[3]), 1e-5).unwrap_err(),
        "a norm … dimension of [2, 4] … weight or bias of shape [3]"
    );
    assert_says!(swiglu(&x, &randn("u", &[4, 2])).unwrap_err(), "swiglu … one shape … [4, 2] F64");
    assert_says!(add(&x, &randn("u", &[1, 4])).unwrap_err(), "add takes … one shape … [1, 4] F64");
    assert_says!(
        rope(&x, &randn("c", &[2, 4]), &randn("s", &[2, 2])).unwrap_err(),
        "rope … cos and sin [time, head_dim / 2], got [2, 4], [2, 4] and [2, 2]"
    );
}
