use candle_core::{DType, Device, Tensor, Var};
use fulgurite_core::module::Module as _;
use fulgurite_core::nn::{
    AdaptiveAvgPool2d, AdaptiveMaxPool2d, AvgPool2d, AvgPool2dConfig, MaxPool2d, MaxPool2dConfig,
    force_portable,
};
use fulgurite_test_message::assert_says;

use super::harness::{Params, assert_close, check, flat, randn};
use super::recorded::{numbers, read, values};

/// Input size, kernel, stride and padding.
type Case = ([usize; 2], [usize; 2], Option<[usize; 2]>, [usize; 2]);

/// With and without a remainder, and with and without overlap.
const CASES: [Case; 7] = [
    ([4, 6], [2, 2], None, [0, 0]),
    ([5, 7], [2, 3], None, [0, 0]),
    ([7, 5], [3, 3], Some([2, 2]), [1, 1]),
    ([5, 6], [3, 2], Some([1, 1]), [0, 1]),
    ([6, 4], [2, 2], Some([3, 1]), [0, 0]),
    ([3, 4], [1, 4], Some([2, 2]), [0, 2]),
    ([1, 1], [2, 2], None, [1, 1]),
];

/// Returns the input's elements in each window, and the window's number of padding elements.
fn windows(x: &Tensor, case: usize) -> Vec<(Vec<f64>, usize)> {
    let (_, kernel, stride, padding) = CASES[case];
    let stride = stride.unwrap_or(kernel);
    let (batch, channels, height, width) = x.dims4().unwrap();
    let (x, mut windows) = (flat(x), Vec::new());
    let outputs =
        |dim: usize, size: usize| (size + 2 * padding[dim] - kernel[dim]) / stride[dim] + 1;
    for plane in x.chunks(height * width).take(batch * channels) {
        for row in 0..outputs(0, height) {
            for column in 0..outputs(1, width) {
                let mut window = Vec::new();
                for i in 0..kernel[0] {
                    for j in 0..kernel[1] {
                        let y = (row * stride[0] + i).checked_sub(padding[0]);
                        let x = (column * stride[1] + j).checked_sub(padding[1]);
                        let (y, x) = (y.filter(|y| *y < height), x.filter(|x| *x < width));
                        window.extend(y.zip(x).map(|(y, x)| plane[y * width + x]));
                    }
                }
                let padding = kernel[0] * kernel[1] - window.len();
                windows.push((window, padding));
            }
        }
    }
    windows
}

#[test]
fn finite_differences_of_the_maximum() {
    for (case, (sizes, kernel, stride, padding)) in CASES.into_iter().enumerate() {
        let pool = MaxPool2d::new(kernel, MaxPool2dConfig { stride, padding }).unwrap();
        let x = randn("x", &[2, 3, sizes[0], sizes[1]]);
        let run = check(std::slice::from_ref(&x), &Params::none(), &|x| pool.forward(&x[0]));
        let largest = |(window, _): (Vec<f64>, _)| window.into_iter().fold(f64::MIN, f64::max);
        let want: Vec<f64> = windows(&x, case).into_iter().map(largest).collect();
        assert_close("by hand", &run.output, &want, 0.0);
    }
}

#[test]
fn finite_differences_of_the_mean() {
    for (case, (sizes, kernel, stride, padding)) in CASES.into_iter().enumerate() {
        for count_include_pad in [true, false] {
            let config = AvgPool2dConfig { stride, padding, count_include_pad };
            let pool = AvgPool2d::new(kernel, config).unwrap();
            let x = randn("x", &[2, 3, sizes[0], sizes[1]]);
            let run = check(std::slice::from_ref(&x), &Params::none(), &|x| pool.forward(&x[0]));
            let mean = |(window, padding): (Vec<f64>, usize)| {
                let padding = if count_include_pad { padding } else { 0 };
                window.iter().sum::<f64>() / (window.len() + padding) as f64
            };
            let want: Vec<f64> = windows(&x, case).into_iter().map(mean).collect();
            assert_close("by hand", &run.output, &want, 1e-12);
        }
    }
}

/// Outputs that divide the input, that do not, and that are larger.
#[test]
fn adaptive_pooling_follows_pytorch() {
    let recorded = read(include_str!("../../fixtures/pytorch.toml"));
    for [rows, columns] in [[3, 2], [7, 5], [1, 1], [9, 4]] {
        for kind in ["avg", "max"] {
            let forward = |x: &Tensor| match kind {
                "avg" => AdaptiveAvgPool2d::new([rows, columns])?.forward(x),
                _ => AdaptiveMaxPool2d::new([rows, columns])?.forward(x),
            };
            let name = format!("{kind}_{rows}_{columns}");
            let want = recorded[&name].as_table().unwrap();
            let x = Var::from_tensor(&values(0.0, &[2, 2, 7, 5])).unwrap();
            let y = forward(&x).unwrap();
            assert_eq!(y.dims(), [2, 2, rows, columns]);
            assert_close(&name, &flat(&y), &numbers(want, "output"), 1e-8);
            let loss = (&y * values(1.0, y.dims())).unwrap().sum_all().unwrap();
            let grads = loss.backward().unwrap();
            let grad = flat(grads.get(&x).unwrap());
            assert_close(&name, &grad, &numbers(want, "input_grad"), 1e-8);
            check(&[randn("x", &[2, 1, 7, 5])], &Params::none(), &|x| forward(&x[0]));
        }
    }
}

/// As in PyTorch, the first of equal elements gets the gradient, and a NaN is not hidden.
#[test]
fn ties_and_nan_go_to_the_first() {
    let both = || {
        let pool = MaxPool2d::new([2, 2], MaxPool2dConfig::default()).unwrap();
        let x = Var::new(&[[[[1f32, 1., 0., 2.], [1., 1., 2., 2.]]]], &Device::Cpu).unwrap();
        let y = pool.forward(&x).unwrap();
        assert_eq!(flat(&y), [1.0, 2.0]);
        let grads = (y * 3.0).unwrap().sum_all().unwrap().backward().unwrap();
        assert_eq!(flat(grads.get(&x).unwrap()), [3., 0., 0., 3., 0., 0., 0., 0.]);
        for at in 0..4 {
            let mut x = [f32::NEG_INFINITY, 5.0, 1.0, 7.0];
            x[at] = f32::NAN;
            let x = Tensor::from_slice(&x, (1, 1, 2, 2), &Device::Cpu).unwrap();
            assert!(flat(&pool.forward(&x).unwrap())[0].is_nan(), "{at}");
        }
        let config = MaxPool2dConfig { padding: [1, 1], ..MaxPool2dConfig::default() };
        let pool = MaxPool2d::new([2, 2], config).unwrap();
        let low =
            Var::from_tensor(&Tensor::full(f32::NEG_INFINITY, (1, 1, 2, 2), &Device::Cpu).unwrap())
                .unwrap();
        let y = pool.forward(&low).unwrap();
        let grads = y.sum_all().unwrap().backward().unwrap();
        assert_eq!(flat(grads.get(&low).unwrap()), [1.0; 4]);
    };
    both();
    let _portable = force_portable();
    both();
}

#[test]
fn half_precision_and_empty_batches_are_pooled() {
    let largest = MaxPool2d::new([2, 2], MaxPool2dConfig::default()).unwrap();
    let mean = AvgPool2d::new([2, 2], AvgPool2dConfig::default()).unwrap();
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        let x = Tensor::arange(0f32, 16.0, &Device::Cpu).unwrap().reshape((1, 1, 4, 4)).unwrap();
        let x = Var::from_tensor(&x.to_dtype(dtype).unwrap()).unwrap();
        let (y, z) = (largest.forward(&x).unwrap(), mean.forward(&x).unwrap());
        assert_eq!((y.dtype(), flat(&y)), (dtype, vec![5.0, 7.0, 13.0, 15.0]));
        assert_eq!((z.dtype(), flat(&z)), (dtype, vec![2.5, 4.5, 10.5, 12.5]));
        let grads = (y + z).unwrap().sum_all().unwrap().backward().unwrap();
        assert_eq!(flat(grads.get(&x).unwrap()).iter().sum::<f64>(), 8.0);
    }
    let empty = Tensor::zeros((0, 3, 4, 4), DType::F32, &Device::Cpu).unwrap();
    assert_eq!(largest.forward(&empty).unwrap().dims(), [0, 3, 2, 2]);
    assert_eq!(mean.forward(&empty).unwrap().dims(), [0, 3, 2, 2]);
    let adaptive = AdaptiveAvgPool2d::new([3, 5]).unwrap();
    assert_eq!(adaptive.forward(&empty).unwrap().dims(), [0, 3, 3, 5]);
    let _portable = force_portable();
    assert_eq!(largest.forward(&empty).unwrap().dims(), [0, 3, 2, 2]);
}

#[test]
fn sizes_that_cannot_be_pooled_are_explained() {
    let config = MaxPool2dConfig::default();
    assert_says!(MaxPool2d::new([2, 0], config).unwrap_err(), "MaxPool2d: kernel [2, 0] … 1 to …");
    assert_says!(
        MaxPool2d::new([3, 3], MaxPool2dConfig { padding: [2, 1], ..config }).unwrap_err(),
        "MaxPool2d: padding [2, 1] … at most half of the kernel [3, 3] …"
    );
    let pool = MaxPool2d::new([3, 3], config).unwrap();
    let x = |dims: &[usize], dtype| Tensor::zeros(dims, dtype, &Device::Cpu).unwrap();
    assert_says!(
        pool.forward(&x(&[1, 1, 2, 4], DType::F32)).unwrap_err(),
        "a pooling window of 3 elements is larger than the input, 2 … [1, 1, 2, 4]"
    );
    assert_says!(
        pool.forward(&x(&[1, 4, 4], DType::F32)).unwrap_err(),
        "pooling takes … [batch, channels, height, width], got [1, 4, 4] in F32"
    );
    assert_says!(
        pool.forward(&x(&[1, 1, 4, 4], DType::U8)).unwrap_err(),
        "pooling takes floating-point numbers … got [1, 1, 4, 4] in U8"
    );
    assert_says!(
        AdaptiveAvgPool2d::new([0, 2]).unwrap_err(),
        "AdaptiveAvgPool2d … least 1 … [0, 2]"
    );
    AdaptiveMaxPool2d::new([1 << 16, 1 << 16]).unwrap_err();
    let pool = AdaptiveMaxPool2d::new([2, 2]).unwrap();
    assert_says!(
        pool.forward(&x(&[1, 1, 0, 4], DType::F32)).unwrap_err(),
        "adaptive pooling needs … at least one element … [1, 1, 0, 4]"
    );
}
