use candle_core::{DType, Tensor};
use fulgurite_core::Result;
use fulgurite_core::module::{Module, ModuleBuilder};
use fulgurite_core::nn::{
    AttentionConfig, CausalSelfAttention, FusedLayer, GeluMlp, LayerNorm, RmsNorm, Rope, SwiGluMlp,
    force_portable, residual,
};

use super::harness::{Params, analytic, assert_same, builder, check, randn};

const WIDTH: usize = 6;
const SHAPE: [usize; 3] = [2, 5, WIDTH];

trait Branch: Module + FusedLayer {}
impl<T: Module + FusedLayer> Branch for T {}

type Half = (Box<dyn Branch>, Box<dyn Branch>);

/// A norm and a branch.
fn half(b: &ModuleBuilder, kind: usize) -> Half {
    let (norm, branch) = (b.pp("norm"), b.pp("branch"));
    let attention = AttentionConfig {
        num_kv_heads: 1,
        head_dim: 2,
        qkv_bias: true,
        rope: Some(Rope::new(2, 100.0).unwrap()),
        ..AttentionConfig::new(WIDTH, 3)
    };
    match kind {
        0 => (
            Box::new(RmsNorm::new(&norm, WIDTH, 1e-5).unwrap()),
            Box::new(CausalSelfAttention::new(&branch, &attention).unwrap()),
        ),
        1 => (
            Box::new(RmsNorm::new(&norm, WIDTH, 1e-5).unwrap()),
            Box::new(SwiGluMlp::new(&branch, WIDTH, 7).unwrap()),
        ),
        _ => (
            Box::new(LayerNorm::new(&norm, WIDTH, 1e-5).unwrap()),
            Box::new(GeluMlp::new(&branch, WIDTH, 7).unwrap()),
        ),
    }
}

fn fused(layers: &[Half], x: &Tensor) -> Result<Tensor> {
    layers.iter().try_fold(x.clone(), |x, (norm, branch)| residual(&x, &**norm, &**branch))
}

#[test]
fn gradients() {
    for kind in 0..3 {
        let b = builder(DType::F64);
        let (layer, params) = ([half(&b, kind)], Params::new(&b));
        check(&[randn("x", &SHAPE)], &params, &|x| fused(&layer, &x[0]));
        // With the input outside the graph, only the parameters have gradients.
        let alone = analytic(&[], &params, &|_| fused(&layer, &randn("x", &SHAPE)));
        assert!(alone.params.iter().all(Option::is_some));
    }
}

#[test]
fn matches_three_operations_to_the_bit() {
    for portable in [false, true] {
        let _portable = portable.then(force_portable);
        for dtype in [DType::F32, DType::F64, DType::BF16] {
            let b = builder(dtype);
            let layers: Vec<Half> = (0..3).map(|i| half(&b.pp(i.to_string()), i)).collect();
            let params = Params::new(&b);
            let x = [randn("x", &SHAPE).to_dtype(dtype).unwrap()];
            let apart = analytic(&x, &params, &|x| {
                layers.iter().try_fold(x[0].clone(), |x, (norm, branch)| {
                    Ok((&x + branch.forward(&norm.forward(&x)?)?)?)
                })
            });
            let one = analytic(&x, &params, &|x| fused(&layers, &x[0]));
            assert_same("residual", &one, &apart, 0.0);
        }
    }
}
