use candle_core::{DType, Device, Tensor, Var};
use fulgurite_core::Result;
use fulgurite_core::module::{Module, ModuleBuilder, ModuleInit};
use fulgurite_core::nn::{
    CrossEntropy, Linear, LinearCrossEntropy, cross_entropy, force_portable, linear_cross_entropy,
    log_probability,
};
use fulgurite_test_message::assert_says;

use super::harness::{Params, Run, analytic, assert_same, builder, check, flat, randn};

const CLASSES: usize = 5;

fn targets() -> Tensor {
    Tensor::new(&[[4i64, -100, 0], [2, -100, 2]], &Device::Cpu).unwrap()
}

/// All rows at once, a few rows at a time, and one row at a time.
fn bounds() -> [usize; 3] {
    [1 << 20, 4 * CLASSES * size_of::<f64>(), 1]
}

#[test]
fn gradients_whole_and_in_pieces() {
    for bytes in bounds() {
        for (bias, smoothing) in [(false, 0.0), (true, 0.1)] {
            let b = builder(DType::F64);
            let head = match bias {
                true => Linear::with_bias(&b, 3, CLASSES),
                false => Linear::new(&b, 3, CLASSES),
            };
            let (head, params) = (head.unwrap(), Params::new(&b));
            let options = LinearCrossEntropy::default()
                .cross_entropy(CrossEntropy::default().label_smoothing(smoothing))
                .logits_bytes(bytes);
            let loss = |x: &Tensor| Ok(options.loss(&head, x, &targets())?.sum().clone());
            check(&[randn("hidden", &[2, 3, 3])], &params, &|x| loss(&x[0]));
            // With the hidden states outside the graph, only the parameters have gradients.
            let alone = analytic(&[], &params, &|_| loss(&randn("hidden", &[2, 3, 3])));
            assert!(alone.params.iter().all(Option::is_some));
        }
    }
}

#[test]
fn gradients_of_single_losses() {
    for bytes in bounds() {
        let b = builder(DType::F64);
        let head = Linear::with_bias(&b, 3, CLASSES).unwrap();
        let params = Params::new(&b);
        let options = LinearCrossEntropy::default().logits_bytes(bytes);
        let hidden = [randn("hidden", &[2, 3, 3])];
        let one = check(&hidden, &params, &|x| options.losses(&head, &x[0], &targets()));
        assert_eq!([one.output[1], one.output[4]], [0.0; 2], "ignored targets");
        let apart = analytic(&hidden, &params, &|x| {
            CrossEntropy::default().losses(&head.forward(&x[0])?, &targets())
        });
        assert_same("head and losses", &one, &apart, 1e-12);
        let sum = options.loss(&head, &hidden[0], &targets()).unwrap();
        let total = one.output.iter().sum::<f64>();
        assert!((total - sum.sum_value().unwrap()).abs() < 1e-12);
    }
    let t = Tensor::new(&[4i64, -100, 0], &Device::Cpu).unwrap();
    let smoothed = CrossEntropy::default().label_smoothing(0.1);
    check(&[randn("logits", &[3, 5])], &Params::none(), &|x| smoothed.losses(&x[0], &t));
}

#[test]
fn log_probability_has_the_bits_of_losses() {
    let logits = randn("logits", &[7, 133]).to_dtype(DType::F32).unwrap();
    let targets = Tensor::new(&[0u32, 132, 5, 64, 99, 1, 7], &Device::Cpu).unwrap();
    let losses = CrossEntropy::default().losses(&logits, &targets).unwrap();
    let rows = logits.to_vec2::<f32>().unwrap();
    let classes = targets.to_vec1::<u32>().unwrap();
    let alone = rows.iter().zip(classes).map(|(row, class)| -log_probability(row, class as usize));
    assert_eq!(losses.to_vec1::<f32>().unwrap(), alone.collect::<Vec<_>>());
}

#[test]
fn a_frozen_head_passes_the_gradient_on() {
    let b = ModuleBuilder::new(ModuleInit {
        dtype: DType::F64,
        compute_dtype: DType::F64,
        frozen: vec!["weight".to_owned()],
        ..Default::default()
    });
    let (head, params) = (Linear::new(&b, 3, CLASSES).unwrap(), Params::new(&b));
    check(&[randn("hidden", &[2, 3, 3])], &params, &|x| {
        Ok(linear_cross_entropy(&head, &x[0], &targets())?.sum().clone())
    });
}

/// Returns the output of `loss`, and the gradients of the hidden states and the head.
fn run(dtype: DType, loss: &dyn Fn(&Linear, &Tensor) -> Result<Tensor>) -> Run {
    let b = builder(dtype);
    let (head, params) = (Linear::new(&b, 16, 33).unwrap(), Params::new(&b));
    let x = randn("hidden", &[4, 9, 16]).to_dtype(dtype).unwrap();
    analytic(&[x], &params, &|x| loss(&head, &x[0]))
}

#[test]
fn matches_head_and_loss_to_the_bit() {
    let ids: Vec<i64> = (0..36).map(|i| if i % 7 == 3 { -100 } else { i % 33 }).collect();
    let ids = Tensor::from_vec(ids, (4, 9), &Device::Cpu).unwrap();
    for portable in [false, true] {
        let _portable = portable.then(force_portable);
        for dtype in [DType::F32, DType::F64, DType::BF16] {
            let apart =
                run(dtype, &|head, x| Ok(cross_entropy(&head.forward(x)?, &ids)?.sum().clone()));
            let one = run(dtype, &|head, x| Ok(linear_cross_entropy(head, x, &ids)?.sum().clone()));
            assert_same("one operation", &one, &apart, 0.0);
            let pieces = LinearCrossEntropy::default().logits_bytes(5 * 33 * 4);
            let pieces = run(dtype, &|head, x| Ok(pieces.loss(head, x, &ids)?.sum().clone()));
            let tolerance = if dtype == DType::BF16 { 2e-2 } else { 1e-5 };
            assert_same("in pieces", &pieces, &apart, tolerance);
        }
    }
}

/// The first backward overwrites the logits, so a second one must not read them.
#[test]
fn backward_may_run_twice() {
    let b = builder(DType::F64);
    let head = Linear::new(&b, 3, CLASSES).unwrap();
    let _params = Params::new(&b);
    let x = Var::from_tensor(&randn("hidden", &[2, 3, 3])).unwrap();
    let loss = linear_cross_entropy(&head, &x, &targets()).unwrap();
    let grad = || flat(loss.sum().backward().unwrap().get(&x).unwrap());
    assert_eq!(grad(), grad());
}

#[test]
fn wrong_use_is_explained() {
    let b = builder(DType::F64);
    let head = Linear::new(&b, 3, CLASSES).unwrap();
    let _params = Params::new(&b);
    let error = |x: &[usize], t: &Tensor| {
        linear_cross_entropy(&head, &randn("hidden", x), t).map(drop).unwrap_err()
    };
    assert_says!(error(&[2, 4, 3], &targets()), "cross entropy … targets … [2, 4, 5] and [2, 3]");
    assert_says!(error(&[2, 3, 4], &targets()), "module `(root)` … dimension of 3, got [2, 3, 4]");
    assert_says!(error(&[], &targets()), "the head's input is a scalar; it takes [.., inputs]");
    assert_says!(
        error(&[1, 3], &Tensor::new(&[7u32], &Device::Cpu).unwrap()),
        "target 7 is not one of the 5 classes … `ignore_index` (-100)"
    );
}
