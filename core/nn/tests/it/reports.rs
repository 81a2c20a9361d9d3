//! Bugs that users have reported in other libraries' layers, with the correct values.

use candle_core::{DType, Device, Tensor, Var};
use fulgurite_core::module::Module as _;
use fulgurite_core::nn::functional::{attention, masked_attention};
use fulgurite_core::nn::{
    CrossEntropy, Documents, Embedding, Linear, MultiHeadAttention, MultiHeadAttentionConfig,
    cross_entropy, linear_cross_entropy, predicted_classes,
};
use fulgurite_test_message::assert_says;

use super::gradients::harness::{Params, builder, flat, randn};

/// Other libraries fail with a device-side assert, or return the row of another id.
#[test]
fn ids_outside_the_table_are_named() {
    let b = builder(DType::F32);
    let embed = Embedding::new(&b.pp("embed"), 5, 2).unwrap();
    let _params = Params::new(&b);
    for id in [-1, 5, i64::MIN, i64::MAX, i64::from(u32::MAX) + 1] {
        let ids = Tensor::new(&[[0, id]], &Device::Cpu).unwrap();
        let error = embed.forward(&ids).unwrap_err().to_string();
        assert!(error.starts_with(&format!("module `embed`: id {id} is out of range")), "{error}");
    }
    let ids = Tensor::new(&[u32::MAX], &Device::Cpu).unwrap();
    assert!(embed.forward(&ids).is_err());
    for dtype in [DType::F32, DType::U8] {
        let ids = Tensor::zeros(2, dtype, &Device::Cpu).unwrap();
        let error = embed.forward(&ids).unwrap_err().to_string();
        assert_eq!(error, format!("module `embed`: ids must be u32 or i64, got {dtype:?}"));
    }
}

#[test]
fn targets_that_are_no_class_are_named() {
    let logits = Tensor::zeros((2, 3), DType::F32, &Device::Cpu).unwrap();
    for target in [-1, 3, -99, i64::MIN, i64::MAX] {
        let targets = Tensor::new(&[0, target], &Device::Cpu).unwrap();
        let error = cross_entropy(&logits, &targets).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("target {target} is not one of the 3 classes")),
            "{error}"
        );
        let ignored = CrossEntropy::default().ignore_index(target);
        assert_eq!(ignored.loss(&logits, &targets).unwrap().count(), 1.0);
    }
    for shape in [&[2, 1][..], &[3], &[]] {
        let targets = Tensor::zeros(shape, DType::I64, &Device::Cpu).unwrap();
        assert!(cross_entropy(&logits, &targets).is_err(), "{shape:?}");
    }
    let floats = Tensor::zeros(2, DType::F32, &Device::Cpu).unwrap();
    let error = cross_entropy(&logits, &floats).unwrap_err().to_string();
    assert_eq!(error, "targets must be u32 or i64, got F32");
}

/// Other libraries return NaN, a mean over nothing.
#[test]
fn loss_of_ignored_targets_is_zero() {
    let b = builder(DType::F32);
    let head = Linear::new(&b.pp("head"), 2, 3).unwrap();
    let params = Params::new(&b);
    let targets = Tensor::new(&[-100i64, -100], &Device::Cpu).unwrap();
    let x = Var::ones((2, 2), DType::F32, &Device::Cpu).unwrap();
    for fused in [false, true] {
        let loss = match fused {
            true => linear_cross_entropy(&head, &x, &targets).unwrap(),
            false => cross_entropy(&head.forward(&x).unwrap(), &targets).unwrap(),
        };
        assert_eq!((flat(loss.sum())[0], loss.count()), (0.0, 0.0));
        let grads = loss.sum().backward().unwrap();
        assert_eq!(flat(grads.get(&x).unwrap()), [0.0; 4]);
        assert_eq!(params.take(&params.slots[0]).unwrap(), [0.0; 6]);
    }
}

/// Ids of both dtypes, and logits so far apart that their exponentials overflow.
#[test]
fn labels_and_extreme_logits_have_the_right_loss() {
    let logits = Tensor::new(&[[1e4f32, -1e4, 0.0], [f32::NEG_INFINITY, 0.0, 0.0]], &Device::Cpu);
    let logits = logits.unwrap();
    let signed = cross_entropy(&logits, &Tensor::new(&[2i64, 1], &Device::Cpu).unwrap()).unwrap();
    let unsigned = cross_entropy(&logits, &Tensor::new(&[2u32, 1], &Device::Cpu).unwrap()).unwrap();
    assert_eq!(flat(signed.sum()), flat(unsigned.sum()));
    assert!((flat(signed.sum())[0] - (1e4 + 2f64.ln())).abs() < 1e-2);
    let none = Tensor::zeros((2, 0), DType::F32, &Device::Cpu).unwrap();
    assert!(predicted_classes(&none).is_err());
    let targets = Tensor::new(&[0i64, 0], &Device::Cpu).unwrap();
    assert!(cross_entropy(&none, &targets).is_err());
}

/// Other libraries compute a softmax of nothing, which is NaN and makes all weights NaN.
#[test]
fn queries_without_a_key_get_zeros() {
    let [q, k, v] =
        ["q", "k", "v"].map(|name| Var::from_tensor(&randn(name, &[1, 2, 3, 4])).unwrap());
    let mask = Tensor::new(&[[0u8, 0, 0]], &Device::Cpu).unwrap();
    let y = masked_attention(&q, &k, &v, 0.5, &mask).unwrap();
    assert!(flat(&y).iter().all(|x| *x == 0.0));
    let grads = y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
    for x in [&q, &k, &v] {
        assert!(grads.get(x).is_none_or(|grad| flat(grad).iter().all(|x| *x == 0.0)));
    }
    let none = Tensor::zeros((1, 2, 0, 4), DType::F64, &Device::Cpu).unwrap();
    let y = attention(&q, &none, &none, 0.5, false).unwrap();
    assert_eq!((y.dims(), flat(&y)), (&[1, 2, 3, 4][..], vec![0.0; 24]));
    // The last query is at the last key's position, so the first queries would precede every key.
    let short = k.narrow(2, 0, 1).unwrap();
    assert_says!(
        attention(&q, &short, &short, 0.5, true).unwrap_err(),
        "attention: a causal query needs a key … time 3 … time 1 …"
    );
    let b = builder(DType::F64);
    let layer =
        MultiHeadAttention::new(&b.pp("attn"), &MultiHeadAttentionConfig::new(8, 2)).unwrap();
    let _params = Params::new(&b);
    let x = randn("x", &[2, 3, 8]);
    for mask in [
        Tensor::ones((2, 4), DType::U8, &Device::Cpu).unwrap(),
        Tensor::ones((2, 3), DType::F32, &Device::Cpu).unwrap(),
        Tensor::ones((3, 3, 3), DType::U8, &Device::Cpu).unwrap(),
        Tensor::ones(3, DType::U8, &Device::Cpu).unwrap(),
    ] {
        let error = layer.attend(&x, &x, Some(&mask)).unwrap_err().to_string();
        assert!(error.starts_with("module `attn`: attention of 3 queries"), "{error}");
    }
}

/// Ids of both dtypes mark the same documents.
#[test]
fn documents_of_ids_in_either_dtype_are_the_same() {
    let unsigned = Tensor::new(&[[5u32, 0, 7, 0]], &Device::Cpu).unwrap();
    let signed = unsigned.to_dtype(DType::I64).unwrap();
    let targets = Tensor::new(&[[0i64, 7, 0, 9]], &Device::Cpu).unwrap();
    for inputs in [unsigned, signed] {
        let documents = Documents::ended_by(&inputs, 0).unwrap();
        let positions = documents.positions(&Device::Cpu).unwrap();
        assert_eq!(positions.to_vec2::<u32>().unwrap(), [[0, 1, 0, 1]]);
        let targets = documents.ignore_ends(&inputs, &targets, 0).unwrap();
        assert_eq!(targets.to_vec2::<i64>().unwrap(), [[0, -100, 0, -100]]);
    }
    assert!(Documents::ended_by(&targets.to_dtype(DType::F32).unwrap(), 0).is_err());
}

/// A weight that two layers share has the sum of their gradients, and no gradient if frozen.
#[test]
fn a_tied_weight_is_frozen_as_one() {
    for frozen in [false, true] {
        let b = builder(DType::F32);
        let at = b.pp("embed");
        let embed = Embedding::new(&if frozen { at.frozen() } else { at }, 3, 2).unwrap();
        let head = Linear::tied(&b.pp("head"), embed.weight()).unwrap();
        let params = Params::new(&b);
        let ids = Tensor::new(&[0i64, 2], &Device::Cpu).unwrap();
        let x = embed.forward(&ids).unwrap();
        let y = head.forward(&x).unwrap();
        assert_eq!(y.track_op(), !frozen);
        if !frozen {
            y.sum_all().unwrap().backward().unwrap();
            let weight = flat(&embed.weight().value().unwrap());
            let grad = params.take(&params.slots[0]).unwrap();
            // The head adds the sum of the inputs; the embedding adds the sum of the weight's rows.
            for (row, uses) in [1.0, 0.0, 1.0].into_iter().enumerate() {
                for column in 0..2 {
                    let of_head = weight[column] + weight[4 + column];
                    let of_rows = weight[column] + weight[2 + column] + weight[4 + column];
                    let want = of_head + uses * of_rows;
                    assert!((grad[2 * row + column] - want).abs() < 1e-5);
                }
            }
        }
    }
}
