//! The families with routers of DeepSeek-V3, shared experts and stacked files.

use std::collections::HashMap;
use std::path::Path;

use candle_core::IndexOp as _;
use fulgurite::core::checkpoint::{self, TensorSource};
use fulgurite::core::module::ModuleInit;
use fulgurite::core::nn::RopeScaling;
use fulgurite::core::shard::Region;
use fulgurite::prelude::*;
use fulgurite_models::{
    DecoderConfig, ExpertsConfig, LatentConfig, LoadLog, MappedSource, ModelConfig,
    SequenceClassification, WeightLayout,
};
use serde_json::json;

use crate::experts::changed;
use crate::fixtures::{fixture, tensors};
use crate::transformers::config;

fn read(source: &dyn TensorSource, name: &str, region: &Region) -> Vec<f32> {
    let values = source.read(name, region, DType::F32, &Device::Cpu).unwrap();
    values.flatten_all().unwrap().to_vec1().unwrap()
}

fn mapped(directory: &Path, layout: &WeightLayout) -> impl TensorSource + use<> {
    MappedSource::new(checkpoint::open(directory).unwrap(), layout).unwrap()
}

/// The fixture's weights with the experts of a layer as the stacks of `transformers` 5.
fn stack_experts(name: &str, block: &str, projections: [&str; 3], into: &Path) {
    let mut old = tensors(name, "model.safetensors");
    let mut new: HashMap<String, Tensor> = HashMap::new();
    let prefix = |layer: usize| format!("model.layers.{layer}.{block}");
    for layer in 0..8 {
        let mut take = |projection: &str| -> Option<Tensor> {
            let name = |e: usize| format!("{}.experts.{e}.{projection}.weight", prefix(layer));
            let stack: Vec<Tensor> = (0..).map_while(|e| old.remove(&name(e))).collect();
            (!stack.is_empty()).then(|| Tensor::stack(&stack, 0).unwrap())
        };
        let [gate, up, down] = projections.map(&mut take);
        let (Some(gate), Some(up), Some(down)) = (gate, up, down) else { continue };
        let path = format!("model.layers.{layer}.mlp.experts");
        new.insert(format!("{path}.gate_up_proj"), Tensor::cat(&[gate, up], 1).unwrap());
        new.insert(format!("{path}.down_proj"), down);
        if let Some(gate) = old.remove(&format!("{}.gate.weight", prefix(layer))) {
            new.insert(format!("model.layers.{layer}.mlp.gate.weight"), gate);
        }
    }
    assert!(!new.is_empty());
    new.extend(old);
    candle_core::safetensors::save(&new, into.join("model.safetensors")).unwrap();
}

#[test]
fn stacks_of_transformers_5_are_the_same_weights() {
    let own = ["gate_proj", "up_proj", "down_proj"];
    for (name, block, projections) in [
        ("mixtral", "block_sparse_moe", ["w1", "w3", "w2"]),
        ("qwen3_moe", "mlp", own),
        ("qwen2_moe", "mlp", own),
        ("glm4_moe", "mlp", own),
        ("deepseek_v3", "mlp", own),
    ] {
        let temp = tempfile::tempdir().unwrap();
        stack_experts(name, block, projections, temp.path());
        let layout = config(name).describe().unwrap().weights;
        let (files, stacks) = (mapped(&fixture(name), &layout), mapped(temp.path(), &layout));
        assert_eq!(files.names(), stacks.names(), "{name}");
        for tensor in files.names() {
            let info = files.info(tensor).unwrap();
            assert_eq!(stacks.info(tensor), Some(info.clone()), "{name}: {tensor}");
            let whole = Region::full(&info.shape);
            let expected = read(&files, tensor, &whole);
            assert_eq!(read(&stacks, tensor, &whole), expected, "{name}: {tensor}");
        }
    }
}

/// Ranks read parts of stacks whose matrices are transposed, with columns in turn.
#[test]
fn parts_of_stacks_are_read() {
    let layout = config("gpt_oss").describe().unwrap().weights;
    let source = mapped(&fixture("gpt_oss"), &layout);
    let file = &tensors("gpt_oss", "model.safetensors");
    let path = "model.layers.1.mlp.experts";
    let gate_up = &file[&format!("{path}.gate_up_proj")];
    let bias = &file[&format!("{path}.gate_up_proj_bias")];
    for (part, name) in ["gate_proj", "up_proj"].into_iter().enumerate() {
        let region = Region { offsets: vec![1, 5, 2], sizes: vec![3, 7, 4] };
        let found = read(&source, &format!("{path}.{name}.weight"), &region);
        let mut expected = Vec::new();
        for expert in 1..4 {
            for row in 5..12 {
                let column = gate_up.i((expert, 2..6, 2 * row + part)).unwrap();
                expected.extend(column.to_vec1::<f32>().unwrap());
            }
        }
        assert_eq!(found, expected, "{name}");
        let region = Region { offsets: vec![2, 3], sizes: vec![1, 2] };
        let found = read(&source, &format!("{path}.{name}.bias"), &region);
        let expected =
            [3, 4].map(|row| bias.i((2, 2 * row + part)).unwrap().to_scalar::<f32>().unwrap());
        assert_eq!(found, expected, "{name}");
    }
}

fn text(kind: &str, keys: &str) -> String {
    let size = "hidden_size = 64\nintermediate_size = 16\nnum_hidden_layers = 5\nvocab_size = 9\nnum_attention_heads = 16\n";
    format!("type = '{kind}'\n{size}{keys}")
}

fn decoder(kind: &str, keys: &str) -> Result<DecoderConfig> {
    toml::from_str::<ModelConfig>(&text(kind, keys)).unwrap().decoder()
}

fn describe(kind: &str, keys: &str) -> Result<ExpertsConfig> {
    Ok(decoder(kind, keys)?.experts.unwrap())
}

#[test]
fn defaults_are_those_of_transformers() {
    let qwen = describe("qwen2_moe", "").unwrap();
    assert_eq!([qwen.num_experts, qwen.experts_per_token, qwen.intermediate_size], [60, 4, 1408]);
    let shared = qwen.shared.unwrap();
    assert!(shared.gated && shared.intermediate_size == 5632 && !qwen.router.normalize);
    let glm = describe("glm4_moe", "").unwrap();
    assert_eq!([glm.num_experts, glm.experts_per_token, glm.intermediate_size], [128, 8, 1408]);
    assert!(glm.router.normalize && glm.router.groups.is_none() && glm.router.scale == 1.0);
    assert_eq!(glm.shared.unwrap().intermediate_size, 1408);
    assert_eq!(glm.router.correction.unwrap().update_rate, 0.0);
    let deepseek = describe("deepseek_v3", "").unwrap();
    let numbers = [deepseek.num_experts, deepseek.experts_per_token, deepseek.intermediate_size];
    assert_eq!(numbers, [256, 8, 2048]);
    let groups = deepseek.router.groups.unwrap();
    assert_eq!(([groups.count, groups.per_row], deepseek.router.scale), ([8, 4], 2.5));
    let gpt = describe("gpt_oss", "").unwrap();
    assert_eq!([gpt.num_experts, gpt.experts_per_token, gpt.intermediate_size], [128, 4, 16]);
    assert!(gpt.bias && gpt.router.bias && gpt.router.normalize && gpt.shared.is_none());
    for (value, expected) in [
        ("none", LoadLog::None),
        ("summary", LoadLog::Summary),
        ("layers", LoadLog::Layers),
        ("experts", LoadLog::Experts),
    ] {
        let found = describe("mixtral", &format!("log_expert_load = '{value}'"));
        assert_eq!(found.unwrap().load_log, Some(expected));
    }
    for kind in ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss"] {
        let of = |keys: &str| describe(kind, keys).unwrap().capacity_factor;
        assert_eq!(of("expert_capacity_factor = 1.25"), Some(1.25), "{kind}");
        assert_eq!((of(""), of("expert_capacity_factor = false")), (None, None), "{kind}");
    }
    assert_eq!(gpt.load_log, None);
}

#[test]
fn attention_has_the_defaults_of_transformers() {
    let deepseek = decoder("deepseek_v3", "").unwrap();
    let latent = LatentConfig {
        q_lora_rank: Some(1536),
        kv_lora_rank: 512,
        qk_nope_head_dim: 128,
        qk_rope_head_dim: 64,
        v_head_dim: 128,
        rope_interleave: true,
    };
    assert_eq!(deepseek.latent, Some(latent));
    let has_experts = |decoder: &DecoderConfig| -> Vec<bool> {
        decoder.layers.iter().map(|layer| layer.has_experts).collect()
    };
    assert_eq!(has_experts(&deepseek), [false, false, false, true, true]);
    let gpt = decoder("gpt_oss", "").unwrap();
    assert_eq!((gpt.ropes[0].theta, gpt.head_dim, gpt.num_kv_heads), (150_000.0, 64, 8));
    assert!(gpt.sinks && gpt.qkv_bias && gpt.output_bias);
    let RopeScaling::Yarn { factor, original_max_positions, truncate, .. } = gpt.ropes[0].scaling
    else {
        panic!("{:?}", gpt.ropes[0].scaling);
    };
    assert_eq!((factor, original_max_positions, truncate), (32.0, 4096, false));
    let windows: Vec<_> = gpt.layers.iter().map(|layer| layer.window).collect();
    assert_eq!(windows, [Some(128), None, Some(128), None, Some(128)]);
    let glm = decoder("glm4_moe", "").unwrap();
    assert_eq!((glm.head_dim, glm.ropes[0].rotary_dim, glm.num_kv_heads), (4, 2, 8));
    assert!(glm.qk_norm.is_none() && !glm.qkv_bias);
    assert_eq!(has_experts(&glm), [false, true, true, true, true]);
}

#[test]
fn qwen_reads_windows_that_files_have() {
    let windows = |kind: &str, keys: &str| -> Vec<Option<usize>> {
        let decoder = decoder(kind, keys).unwrap();
        decoder.layers.iter().map(|layer| layer.window).collect()
    };
    // `transformers` writes 0 where no layer has a window.
    for name in ["qwen2", "qwen3", "qwen2_moe", "qwen3_moe"] {
        let temp = tempfile::tempdir().unwrap();
        let without =
            json!({ "use_sliding_window": false, "sliding_window": 0, "layer_types": null });
        let decoder = changed(name, &without, temp.path()).decoder().unwrap();
        assert!(decoder.layers.iter().all(|layer| layer.window.is_none()), "{name}");
    }
    let keys = "use_sliding_window = true\nsliding_window = 7\nmax_window_layers = 2\nnum_key_value_heads = 4";
    assert_eq!(windows("qwen2", keys), [None, None, Some(7), Some(7), Some(7)]);
    assert_eq!(windows("qwen3_moe", keys), [Some(7); 5]);
}

#[test]
fn keys_of_other_families_are_refused() {
    for (kind, keys, expected) in [
        ("qwen2_moe", "num_local_experts = 4", "`model.num_local_experts`"),
        ("deepseek_v3", "output_router_logits = true", "set `expert_bias_update_rate` instead"),
        ("glm4_moe", "output_router_logits = true", "set `expert_bias_update_rate` instead"),
        ("mixtral", "expert_bias_update_rate = 0.1", "`model.expert_bias_update_rate`"),
        ("mixtral", "log_expert_load = 'all'", "found \"all\""),
        ("llama", "log_expert_load = 'none'", "`model.log_expert_load`"),
        ("llama", "expert_capacity_factor = 1.0", "`model.expert_capacity_factor`"),
    ] {
        let error = decoder(kind, keys).unwrap_err().to_string();
        assert!(error.contains(expected), "{kind}, {keys}: {error}");
    }
    let temp = tempfile::tempdir().unwrap();
    // In files the key does nothing.
    changed("deepseek_v3", &json!({ "output_router_logits": true }), temp.path())
        .decoder()
        .unwrap();
    let mut config: ModelConfig =
        toml::from_str(&text("glm4_moe", "log_expert_load = 'layers'")).unwrap();
    config.set("num_labels", 2).unwrap();
    let b = ModuleBuilder::new(ModuleInit::default());
    let error = SequenceClassification::configure_model(&config, &b).err().unwrap().to_string();
    assert!(error.contains("`model.log_expert_load`: only modules of a model with"), "{error}");
}

#[test]
fn layers_of_several_tokens_are_left_out() {
    let temp = tempfile::tempdir().unwrap();
    let mut config = changed("deepseek_v3", &json!({ "num_hidden_layers": 2 }), temp.path());
    let layout = config.describe().unwrap().weights;
    let source = mapped(temp.path(), &layout);
    assert!(source.names().iter().any(|name| name.starts_with("model.layers.1.")));
    assert!(!source.names().iter().any(|name| name.starts_with("model.layers.2.")));
}

#[test]
fn keys_that_contradict_are_refused() {
    for (name, keys, expected) in [
        ("glm4_moe", json!({ "n_group": 3 }), "8 experts cannot be divided into 3 groups"),
        ("glm4_moe", json!({ "topk_group": 5 }), "a row cannot use 5 of 4 groups"),
        ("glm4_moe", json!({ "topk_group": 1 }), "cannot use 3 of the 2 experts in its groups"),
        ("glm4_moe", json!({ "n_group": 8 }), "groups of one expert have no two best scores"),
        ("glm4_moe", json!({ "routed_scaling_factor": 0.0 }), "must be above 0, found 0.0"),
        ("glm4_moe", json!({ "n_routed_experts": 2 }), "cannot be computed by 3 of 2 experts"),
        ("deepseek_v3", json!({ "num_key_value_heads": 2 }), "only 4 is supported"),
        ("deepseek_v3", json!({ "qk_rope_head_dim": 3, "head_dim": 3 }), "must be even, found 3"),
        ("gpt_oss", json!({ "swiglu_limit": -7.0 }), "`swiglu_limit`: must be above 0"),
        ("llama", json!({ "kv_lora_rank": 4 }), "`kv_lora_rank`"),
    ] {
        let temp = tempfile::tempdir().unwrap();
        let error = changed(name, &keys, temp.path()).describe().unwrap_err().to_string();
        assert!(error.contains(expected), "{name}: {error}");
    }
    for (keys, expected) in [
        ("expert_bias_update_rate = -1.0", "`model.expert_bias_update_rate`: must be at least 0"),
        ("log_expert_load = 'all'", "expected \"none\", \"summary\", \"layers\" or \"experts\""),
        (
            "expert_capacity_factor = 0",
            "`model.expert_capacity_factor`: must be above 0, found 0.0",
        ),
        ("expert_capacity_factor = -1.0", "`model.expert_capacity_factor`: must be above 0"),
    ] {
        let error = describe("glm4_moe", keys).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let error = describe("qwen2_moe", "expert_bias_update_rate = 0.1").unwrap_err().to_string();
    assert!(error.contains("has no such key"), "{error}");
}
