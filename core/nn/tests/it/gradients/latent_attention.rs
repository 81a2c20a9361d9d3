//! [`LatentAttention`]: gradients, documents, and a cache of keys and values.

use candle_core::DType;
use fulgurite_core::autograd::no_grad;
use fulgurite_core::module::Module as _;
use fulgurite_core::nn::{
    Documents, KvCache, LatentAttention, LatentAttentionConfig, Rope, RopeConfig, RowTokens,
};

use super::harness::{Params, assert_close, builder, check, flat, randn};

/// Queries by a narrow projection with short values, or directly with long ones.
fn configs() -> [LatentAttentionConfig; 2] {
    let config = |rope: usize, head: usize, v_head_dim| LatentAttentionConfig {
        hidden_size: 5,
        num_heads: 3,
        q_lora_rank: None,
        kv_lora_rank: 4,
        qk_nope_head_dim: 3,
        qk_rope_head_dim: rope,
        v_head_dim,
        rope: Rope::with_config(&RopeConfig { rotary_dim: rope, ..RopeConfig::new(head, 100.0) })
            .unwrap(),
        rope_interleave: false,
        scale: None,
        bias: false,
        norm_eps: 1e-3,
        init: None,
    };
    let narrow = LatentAttentionConfig {
        q_lora_rank: Some(4),
        rope_interleave: true,
        scale: Some(0.7),
        bias: true,
        ..config(4, 7, 2)
    };
    [narrow, config(2, 6, 6)]
}

fn layer(config: &LatentAttentionConfig, dtype: DType) -> (LatentAttention, Params) {
    let b = builder(dtype);
    let layer = LatentAttention::new(&b.pp("attn"), config).unwrap();
    (layer, Params::new(&b))
}

#[test]
fn gradients_are_finite_differences() {
    for config in configs() {
        let (layer, params) = layer(&config, DType::F64);
        let x = [randn("x", &[2, 4, 5])];
        check(&x, &params, &|x| layer.forward(&x[0]));
        let documents = Documents::of_lengths(&[vec![1, 3], vec![2, 2]]).unwrap();
        check(&x, &params, &|x| documents.run(|| layer.forward(&x[0])));
    }
}

#[test]
fn parts_of_a_sequence_equal_the_whole() {
    for config in configs() {
        let (layer, _params) = layer(&config, DType::F64);
        let _no_grad = no_grad();
        let x = randn("x", &[1, 13, 5]);
        let whole = flat(&layer.forward(&x).unwrap());
        let mut cache = KvCache::new(&[13]).unwrap();
        let mut found = Vec::new();
        for (start, count) in [(0, 9), (9, 1), (10, 3)] {
            let part = x.narrow(1, start, count).unwrap();
            let y = cache.forward(&[RowTokens { row: 0, count }], 0, || layer.forward(&part));
            found.extend(flat(&y.unwrap()));
        }
        assert_close("parts", &found, &whole, 1e-12);
    }
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let [config, _] = configs();
    let error = |config: LatentAttentionConfig| {
        LatentAttention::new(&builder(DType::F32).pp("attn"), &config).unwrap_err().to_string()
    };
    let found = error(LatentAttentionConfig { qk_rope_head_dim: 2, ..config.clone() });
    assert!(found.contains("rotates 4 of 7 elements, and should rotate 2 of 5"), "{found}");
    let found = error(LatentAttentionConfig { kv_lora_rank: 0, ..config.clone() });
    assert!(found.contains("kv_lora_rank must be at least 1"), "{found}");
    let found = error(LatentAttentionConfig { scale: Some(-1.0), ..config });
    assert!(found.contains("scale must be a positive number"), "{found}");
}
