use candle_core::{DType, Device, Tensor};
use fulgurite_core::module::Module as _;
use fulgurite_core::nn::{Conv1d, Conv1dConfig, Conv2d, Conv2dConfig, GroupNorm};
use fulgurite_test_message::assert_says;

use super::harness::{Params, analytic, assert_close, builder, check, flat, randn};

/// candle's convolution with the layer's parameters, plus the bias.
fn reference(params: &Params, x: &Tensor, config: Conv2dConfig) -> Tensor {
    let [weight, bias] = [0, 1].map(|i| params.tree.parameters()[i].tensor().unwrap().detach());
    let [stride, padding, dilation] =
        [config.stride, config.padding, config.dilation].map(|x| x[0]);
    let y = x.conv2d(&weight, padding, stride, dilation, config.groups).unwrap();
    y.broadcast_add(&bias.reshape((1, (), 1, 1)).unwrap()).unwrap()
}

#[test]
fn finite_differences_of_two_dimensions() {
    let plain = Conv2dConfig::default();
    for (sizes, channels, kernel, config) in [
        ([4, 5], [2, 3], [2, 2], plain),
        ([4, 4], [1, 2], [1, 1], plain),
        ([5, 7], [2, 2], [3, 3], Conv2dConfig { stride: [2; 2], padding: [1; 2], ..plain }),
        // The remainder at the end differs by dimension.
        ([6, 5], [2, 2], [3, 3], Conv2dConfig { stride: [2; 2], ..plain }),
        ([5, 4], [4, 6], [2, 2], Conv2dConfig { groups: 2, padding: [1; 2], ..plain }),
        ([4, 4], [3, 3], [2, 2], Conv2dConfig { groups: 3, stride: [2; 2], ..plain }),
        ([6, 6], [1, 2], [2, 2], Conv2dConfig { dilation: [2; 2], stride: [2; 2], ..plain }),
    ] {
        let b = builder(DType::F64);
        let conv = Conv2d::new(&b.pp("conv"), channels[0], channels[1], kernel, config).unwrap();
        let params = Params::new(&b);
        let x = randn("x", &[2, channels[0], sizes[0], sizes[1]]);
        let run = check(std::slice::from_ref(&x), &params, &|x| conv.forward(&x[0]));
        assert_close("candle", &run.output, &flat(&reference(&params, &x, config)), 1e-12);
    }
}

#[test]
fn finite_differences_of_oblong_windows() {
    let b = builder(DType::F64);
    let config = Conv2dConfig {
        stride: [2, 1],
        padding: [0, 2],
        dilation: [1, 2],
        bias: false,
        ..Conv2dConfig::default()
    };
    let conv = Conv2d::new(&b.pp("conv"), 2, 1, [3, 2], config).unwrap();
    let params = Params::new(&b);
    let x = randn("x", &[1, 2, 6, 3]);
    check(std::slice::from_ref(&x), &params, &|x| conv.forward(&x[0]));
    assert_eq!(conv.forward(&x).unwrap().dims(), [1, 1, 2, 5]);
}

#[test]
fn finite_differences_of_one_dimension() {
    let plain = Conv1dConfig::default();
    for (time, channels, kernel, config) in [
        (6, [2, 3], 3, plain),
        (7, [4, 2], 3, Conv1dConfig { stride: 2, padding: 2, groups: 2, ..plain }),
        (6, [2, 2], 2, Conv1dConfig { dilation: 3, bias: false, ..plain }),
    ] {
        let b = builder(DType::F64);
        let conv = Conv1d::new(&b.pp("conv"), channels[0], channels[1], kernel, config).unwrap();
        let params = Params::new(&b);
        let x = randn("x", &[2, channels[0], time]);
        let run = check(std::slice::from_ref(&x), &params, &|x| conv.forward(&x[0]));
        let weight = conv.weight().tensor().unwrap().detach();
        let Conv1dConfig { stride, padding, dilation, groups, .. } = config;
        let mut want = x.conv1d(&weight, padding, stride, dilation, groups).unwrap();
        if let Some(bias) = conv.bias() {
            let bias = bias.tensor().unwrap().detach().reshape((1, (), 1)).unwrap();
            want = want.broadcast_add(&bias).unwrap();
        }
        assert_close("candle", &run.output, &flat(&want), 1e-12);
    }
}

#[test]
fn low_precision_is_computed_in_f32() {
    let run = |dtype| {
        let b = builder(dtype);
        let config = Conv2dConfig { padding: [1; 2], ..Conv2dConfig::default() };
        let conv = Conv2d::new(&b.pp("conv"), 3, 4, [3, 3], config).unwrap();
        let norm = GroupNorm::new(&b.pp("norm"), 2, 4, 1e-5).unwrap();
        let params = Params::new(&b);
        let x = randn("x", &[2, 3, 5, 4]).to_dtype(dtype).unwrap();
        analytic(&[x], &params, &|x| norm.forward(&conv.forward(&x[0])?))
    };
    let (exact, low) = (run(DType::F32), run(DType::BF16));
    let scale = exact.output.iter().fold(0f64, |m, x| m.max(x.abs()));
    for (got, want) in low.output.iter().zip(&exact.output) {
        assert!((got - want).abs() < 0.05 * scale, "{got} and {want}");
    }
    assert!(low.inputs[0].is_some() && low.params.iter().all(Option::is_some));
}

#[test]
fn group_norm() {
    for (groups, dims) in [(1, &[2, 4, 3][..]), (2, &[2, 4, 2, 3]), (4, &[3, 4]), (4, &[1, 4, 5])] {
        let b = builder(DType::F64);
        let norm = GroupNorm::new(&b.pp("norm"), groups, 4, 1e-2).unwrap();
        let params = Params::new(&b);
        let x = randn("x", dims);
        let run = check(std::slice::from_ref(&x), &params, &|x| norm.forward(&x[0]));
        if dims.len() < 3 {
            continue; // candle_nn needs three dimensions
        }
        let [weight, bias] = [norm.weight(), norm.bias()].map(|p| p.tensor().unwrap().detach());
        let theirs = candle_nn::GroupNorm::new(weight, bias, 4, groups, 1e-2).unwrap();
        let want = candle_core::Module::forward(&theirs, &x).unwrap();
        assert_close("candle_nn", &run.output, &flat(&want), 1e-10);
    }
}

#[test]
fn wrong_shapes_and_inputs_are_explained() {
    let b = builder(DType::F64);
    let config = Conv2dConfig::default();
    let conv = Conv2d::new(&b.pp("conv"), 3, 4, [3, 3], config).unwrap();
    let line = Conv1d::new(&b.pp("line"), 3, 4, 2, Conv1dConfig::default()).unwrap();
    let norm = GroupNorm::new(&b.pp("norm"), 2, 4, 1e-5).unwrap();
    let error = |groups| {
        let config = Conv2dConfig { groups, ..config };
        Conv2d::new(&b.pp("no"), 3, 4, [3, 3], config).unwrap_err()
    };
    assert_says!(error(3), "module `no`: 3 groups do not divide 3 input and 4 output …");
    assert_says!(
        Conv2d::new(&b.pp("no"), 3, 4, [3, 0], config).unwrap_err(),
        "module `no`: kernel [3, 0], stride [1, 1] and dilation [1, 1] … at least 1"
    );
    assert_says!(
        GroupNorm::new(&b.pp("no"), 3, 4, 1e-5).unwrap_err(),
        "module `no`: 3 groups do not divide 4 channels"
    );
    let _params = Params::new(&b);
    let x = |dims: &[usize]| Tensor::zeros(dims, DType::F64, &Device::Cpu).unwrap();
    assert_says!(conv.forward(&x(&[2, 32, 32, 3])).unwrap_err(), "module `conv` … [2, 32, 32, 3]");
    assert_says!(conv.forward(&x(&[2, 3, 32, 2])).unwrap_err(), "module `conv`: a window of 3 …");
    assert_says!(line.forward(&x(&[2, 5, 3])).unwrap_err(), "module `line` … [batch, 3, time] …");
    assert_says!(norm.forward(&x(&[2, 5, 4])).unwrap_err(), "module `norm` … [batch, 4, ..] …");
}
