use candle_core::{DType, Device, Tensor, Var};
use fulgurite_core::nn::{CrossEntropy, Loss, Reduction, cross_entropy};
use fulgurite_test_message::assert_says;

use super::harness::{Params, assert_close, check, flat, randn};

fn targets(values: &[i64], shape: &[usize]) -> Tensor {
    Tensor::from_slice(values, shape, &Device::Cpu).unwrap()
}

#[test]
fn gradients_with_ignored_targets_and_smoothing() {
    for smoothing in [0.0, 0.1, 1.0] {
        let options = CrossEntropy::default().label_smoothing(smoothing);
        for reduction in [Reduction::Sum, Reduction::Mean] {
            let t = targets(&[4, -100, 0, 2, -100, 2], &[2, 3]);
            check(&[randn("logits", &[2, 3, 5])], &Params::none(), &|x| {
                options.reduce(&x[0], &t, reduction)
            });
        }
        let t = targets(&[4, 1, 0], &[3]);
        let options = options.ignore_index(1);
        check(&[randn("logits", &[3, 5])], &Params::none(), &|x| {
            options.reduce(&x[0], &t, Reduction::Sum)
        });
    }
}

#[test]
fn equals_the_definition() {
    let logits = randn("logits", &[3, 5]);
    let smoothing = 0.2;
    let p = flat(&candle_nn::ops::log_softmax(&logits, 1).unwrap());
    let want: f64 = [4, 1, 0]
        .iter()
        .enumerate()
        .map(|(row, &class)| {
            let row = &p[row * 5..][..5];
            -(1.0 - smoothing) * row[class] - smoothing / 5.0 * row.iter().sum::<f64>()
        })
        .sum();
    let options = CrossEntropy::default().label_smoothing(smoothing);
    let loss = options.loss(&logits, &targets(&[4, 1, 0], &[3])).unwrap();
    assert_close("loss", &[loss.sum().to_scalar::<f64>().unwrap()], &[want], 1e-12);
    assert_eq!(loss.count(), 3.0);
}

#[test]
fn every_kind_of_ignored_target() {
    let logits = randn("logits", &[4, 5]);
    let count = |t: Tensor| cross_entropy(&logits, &t).unwrap().count();
    assert_eq!(count(targets(&[0, -100, -100, 1], &[4])), 2.0);
    assert_eq!(count(Tensor::new(&[0u32, u32::MAX, 2, 1], &Device::Cpu).unwrap()), 3.0);
    let none = cross_entropy(&logits, &targets(&[-100; 4], &[4])).unwrap();
    assert_eq!((none.count(), flat(none.sum())), (0.0, vec![0.0]));
    assert!(none.mean().unwrap().is_nan());
}

#[test]
fn infinities_in_ignored_rows_do_no_harm() {
    for portable in [false, true] {
        let _portable = portable.then(fulgurite_core::nn::force_portable);
        let values = [[1.0, 2.0], [f64::NAN, f64::INFINITY]];
        let logits = Var::from_tensor(&Tensor::new(&values, &Device::Cpu).unwrap()).unwrap();
        let loss = cross_entropy(&logits, &targets(&[0, -100], &[2])).unwrap();
        let grads = loss.sum().backward().unwrap();
        assert!(loss.mean().unwrap().is_finite());
        let grad = flat(grads.get(&logits).unwrap());
        assert!(grad.iter().all(|g| g.is_finite()), "{grad:?}");
        assert_eq!(grad[2..], [0.0, 0.0]);
    }
}

#[test]
fn non_finite_logits_are_not_hidden() {
    for portable in [false, true] {
        let _portable = portable.then(fulgurite_core::nn::force_portable);
        for bad in [f32::NAN, f32::INFINITY] {
            let logits = Tensor::new(&[[1f32, bad, 0.0]], &Device::Cpu).unwrap();
            let loss = cross_entropy(&logits, &targets(&[0], &[1])).unwrap();
            assert!(!loss.mean().unwrap().is_finite(), "{bad}: {:?}", loss.mean());
        }
    }
}

// checklist: PyTorch: _override_module_mixed_precision
#[test]
fn half_precision_logits_accumulate_in_f32() {
    let logits = randn("logits", &[7, 33]).to_dtype(DType::F32).unwrap();
    let t = targets(&[0, 32, 5, -100, 7, 8, 9], &[7]);
    let want = cross_entropy(&logits, &t).unwrap().mean().unwrap();
    for dtype in [DType::BF16, DType::F16] {
        let logits = Var::from_tensor(&logits.to_dtype(dtype).unwrap()).unwrap();
        let loss = cross_entropy(&logits, &t).unwrap();
        assert_eq!(loss.sum().dtype(), DType::F32);
        assert!((loss.mean().unwrap() - want).abs() < 0.02);
        assert_eq!(loss.sum().backward().unwrap().get(&logits).unwrap().dtype(), dtype);
    }
}

#[test]
fn losses_add_up_by_items() {
    let scalar = |x: f64| Tensor::new(x, &Device::Cpu).unwrap();
    let sum = (&Loss::new(scalar(6.0), 3.0) + &Loss::from(scalar(2.0))).unwrap();
    assert_eq!((sum.count(), sum.mean().unwrap()), (4.0, 2.0));
    let v = Var::from_tensor(&scalar(3.0)).unwrap();
    let loss = Loss::from_mean(v.sqr().unwrap());
    assert_eq!(loss.count(), 1.0);
    assert!(loss.sum().track_op() && !loss.detach().sum().track_op());
    assert_says!(
        Loss::from(randn("x", &[2])).mean().unwrap_err(),
        "a loss is one number, got a tensor of shape [2] …"
    );
}

#[test]
fn wrong_use_is_explained() {
    let logits = randn("logits", &[2, 5]);
    assert_says!(
        cross_entropy(&logits, &targets(&[1, 5], &[2])).unwrap_err(),
        "target 5 is not one of the 5 classes … `ignore_index` (-100)"
    );
    assert_says!(
        cross_entropy(&logits, &targets(&[1, -3], &[2])).unwrap_err(),
        "target -3 is not one of the 5 classes … `ignore_index` (-100)"
    );
    assert_says!(
        cross_entropy(&logits, &targets(&[1], &[1])).unwrap_err(),
        "cross entropy takes logits … targets of the same shape … got [2, 5] and [1]"
    );
    assert_says!(
        cross_entropy(&logits, &randn("t", &[2])).unwrap_err(),
        "targets must be u32 or i64, got F64"
    );
    assert_says!(
        CrossEntropy::default()
            .label_smoothing(1.5)
            .loss(&logits, &targets(&[1, 0], &[2]))
            .unwrap_err(),
        "label_smoothing 1.5 is not in [0, 1]"
    );
}
