//! Weights in MXFP4 and FP8, as models are published.

use std::collections::HashMap;
use std::path::Path;

use fulgurite::core::checkpoint::{self, TensorSource};
use fulgurite::core::shard::Region;
use fulgurite::prelude::*;
use fulgurite_models::{Export, MappedSource, ModelConfig};
use serde_json::{Value, json};

use crate::fixtures::{assert_same, fixture, tensors};
use crate::transformers::{config, ids, load};

const PACKED: [&str; 2] = ["gpt_oss_mxfp4", "deepseek_v3_fp8"];

fn mapped(name: &str) -> impl TensorSource + use<> {
    let layout = config(name).describe().unwrap().weights;
    MappedSource::new(checkpoint::open(fixture(name)).unwrap(), &layout).unwrap()
}

#[test]
fn packed_weights_match_transformers() {
    for name in PACKED {
        let expected = tensors(name, "expected.safetensors");
        let logits = load(name).model.forward(&ids(&expected["input_ids"])).unwrap();
        assert_same(name, &logits, &expected["logits"]);
    }
}

#[test]
fn parts_equal_the_whole_weight() {
    let mut rng = fastrand::Rng::with_seed(7);
    for name in PACKED {
        let source = mapped(name);
        for tensor in source.names() {
            let shape = source.info(tensor).unwrap().shape;
            let whole = source.read(tensor, &Region::full(&shape), DType::F32, &Device::Cpu);
            let whole = whole.unwrap().reshape(shape.as_slice()).unwrap();
            let mut part = whole.clone();
            let mut region = Region::full(&shape);
            for (dim, size) in shape.iter().enumerate() {
                let start = rng.usize(..*size);
                let len = 1 + rng.usize(..size - start);
                part = part.narrow(dim, start, len).unwrap();
                (region.offsets[dim], region.sizes[dim]) = (start, len);
            }
            let found = source.read(tensor, &region, DType::F32, &Device::Cpu).unwrap();
            let values = |tensor: Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(values(found), values(part), "{name}: {tensor}, {region:?}");
        }
    }
}

/// A directory with a fixture's model whose files are changed.
fn changed(
    name: &str,
    into: &Path,
    keys: &Value,
    change: impl FnOnce(&mut HashMap<String, Tensor>),
) -> ModelConfig {
    let file = std::fs::read(fixture(name).join("config.json")).unwrap();
    let mut values: Value = serde_json::from_slice(&file).unwrap();
    for (key, value) in keys.as_object().unwrap() {
        values[key] = value.clone();
    }
    std::fs::write(into.join("config.json"), values.to_string()).unwrap();
    let mut weights = tensors(name, "model.safetensors");
    change(&mut weights);
    candle_core::safetensors::save(&weights, into.join("model.safetensors")).unwrap();
    let mut config = ModelConfig::default();
    config.start_from(into);
    config
}

#[test]
fn scales_that_do_not_fit_are_named() {
    let temp = tempfile::tempdir().unwrap();
    let unreadable = |mut config: ModelConfig, tensor: &str| {
        let layout = config.describe().unwrap().weights;
        let source = MappedSource::new(checkpoint::open(temp.path()).unwrap(), &layout).unwrap();
        source.unreadable(tensor).unwrap().to_owned()
    };
    let path = "model.layers.1.mlp.experts.down_proj";
    let config = changed("gpt_oss_mxfp4", temp.path(), &json!({}), |weights| {
        weights.remove(&format!("{path}_scales"));
    });
    let why = unreadable(config, &format!("{path}.weight"));
    assert_eq!(why, format!("lacks its scales `{path}_scales`: download all files of the model"));

    let query = "model.layers.0.self_attn.q_a_proj.weight";
    let fp8 = |keys: Value| changed("deepseek_v3_fp8", temp.path(), &keys, |_| ());
    let why = unreadable(fp8(json!({ "quantization_config": null })), query);
    assert!(why.contains("no `quantization_config`"), "{why}");
    let quantization = json!({ "quant_method": "fp8", "weight_block_size": [8, 8] });
    let why = unreadable(fp8(json!({ "quantization_config": quantization })), query);
    assert!(why.contains("F8_E4M3 [12, 24] and scales F32 [3, 12], which do not belong"), "{why}");
}

#[test]
fn other_formats_are_refused_by_name() {
    let temp = tempfile::tempdir().unwrap();
    for (quantization, expected) in [
        (json!({ "quant_method": "gptq", "bits": 4 }), "quantised by `gptq`, and only `mxfp4`"),
        (json!({ "bits": 4 }), "quantised by no method"),
        (json!({ "quant_method": "fp8", "fmt": "e5m2" }), "`fmt` is \"e5m2\""),
        (
            json!({ "quant_method": "fp8", "weight_block_size": [128, 0] }),
            "`weight_block_size` is [128,0]; expected two sizes",
        ),
    ] {
        let keys = json!({ "quantization_config": quantization });
        let mut config = changed("gpt_oss_mxfp4", temp.path(), &keys, |_| ());
        let error = config.describe().unwrap_err().to_string();
        assert!(error.contains("config.json: `quantization_config`: "), "{error}");
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn exported_configuration_says_plain() {
    for name in PACKED {
        let run = json!({
            "module": { "type": "causal_lm" },
            "model": config(name),
        });
        let export = Export::of_run(&run).unwrap().unwrap();
        assert!(export.config.get("quantization_config").is_none(), "{}", export.config);
    }
}
