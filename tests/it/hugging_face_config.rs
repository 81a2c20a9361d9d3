//! `config.json` as transformers 5 reads it. The expected losses come from transformers 5.24.0 with
//! the weights of `fixtures/hf_llama` and each configuration.

use std::path::{Path, PathBuf};

use candle_core::DType;
use fulgurite::core::checkpoint::load_raw;
use fulgurite::core::strategy::BuildContext;
use fulgurite::prelude::*;
use fulgurite::strategies::SingleDevice;
use fulgurite_models::{Decoder, ModelConfig};
use serde_json::{Value, json};

use crate::interop_peft::expected;
use crate::program::fixture;

/// The loss with the default epsilon.
const DEFAULT_EPS: f64 = 5.050391674041748;
/// The loss with the unchanged configuration.
const PLAIN: f64 = 5.050405979156494;
/// The loss with a theta of 500,000.
const THETA: f64 = 5.026169300079346;

/// Makes a copy of the fixture with this configuration.
fn model(into: &Path, config: &str) -> PathBuf {
    let file = |name: &str| into.join(name);
    std::fs::copy(fixture("hf_llama").join("model.safetensors"), file("model.safetensors"))
        .unwrap();
    std::fs::write(file("config.json"), config).unwrap();
    into.to_owned()
}

/// The fixture's configuration with changes: `null` removes a key, and `"NULL"` sets it to `null`.
fn changed(changes: &Value) -> String {
    let config = std::fs::read(fixture("hf_llama").join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    let table = config.as_object_mut().unwrap();
    for (key, value) in changes.as_object().unwrap() {
        match value {
            Value::Null => drop(table.remove(key)),
            Value::String(text) if text == "NULL" => drop(table.insert(key.clone(), Value::Null)),
            value => drop(table.insert(key.clone(), value.clone())),
        }
    }
    config.to_string()
}

fn loss(config: &str) -> Result<f64> {
    let temp = tempfile::tempdir().unwrap();
    let directory = model(temp.path(), config);
    let mut config = ModelConfig::default();
    config.start_from(&directory);
    let strategy = SingleDevice {}.build(&BuildContext::default())?;
    let mut fabric = Fabric::single(strategy, 1)?;
    let model = fabric.setup_module(|b| Decoder::new(&config.decoder()?, b))?;
    load_raw(&directory, fabric.module_tree()?, true)?;
    fabric.checkpoints().finish_load()?;
    let expected = expected(&fixture("hf_llama").join("expected.safetensors"));
    let ids = expected["input_ids"].to_dtype(DType::U32)?;
    cross_entropy(&model.forward(&ids)?, &expected["targets"])?.mean()
}

#[track_caller]
fn check(config: &str, expected: f64) {
    let found = loss(config).unwrap();
    assert!((found - expected).abs() < 2e-6, "{found} for {expected}");
}

#[test]
fn configurations_are_read_as_by_transformers() {
    for (changes, expected) in [
        (json!({}), PLAIN),
        (json!({ "rms_norm_eps": null }), DEFAULT_EPS),
        (json!({ "max_position_embeddings": null, "hidden_act": null }), PLAIN),
        (json!({ "head_dim": "NULL" }), PLAIN),
        (json!({ "rope_parameters": null, "rope_theta": 500000.0 }), THETA),
        (json!({ "rope_parameters": null, "rope_theta": 500000 }), THETA),
        (json!({ "rope_parameters": { "rope_theta": 500000.0 } }), THETA),
        (json!({ "rope_parameters": { "rope_type": "default" }, "rope_theta": 500000.0 }), THETA),
        (json!({ "rope_parameters": { "rope_theta": 500000.0 }, "rope_theta": 100.0 }), THETA),
        (json!({ "rope_parameters": "NULL", "rope_scaling": "NULL" }), PLAIN),
        (
            json!({
                "rope_parameters": null, "rope_theta": 500000.0, "rope_scaling": { "type": "default" }
            }),
            THETA,
        ),
        // Without a type, nothing is scaled.
        (json!({ "rope_parameters": { "rope_theta": 10000.0, "factor": 2.0 } }), PLAIN),
        (json!({ "rope_parameters": { "rope_type": "default", "type": "linear" } }), PLAIN),
        // A key that no model has.
        (json!({ "pretraining_tp": 2 }), PLAIN),
        // Not tied, because the weights have their own head.
        (json!({ "tie_word_embeddings": true }), PLAIN),
    ] {
        check(&changed(&changes), expected);
    }
    check(&format!("\u{feff}{}", changed(&json!({}))), PLAIN);
    let twice = changed(&json!({ "rope_parameters": null, "rope_theta": 100.0 }));
    check(&format!("{}, \"rope_theta\": 500000.0}}", twice.trim_end_matches('}')), THETA);
}

#[test]
fn other_configurations_are_refused_by_key() {
    for (changes, expected) in [
        (
            json!({ "rope_parameters": { "rope_theta": 10000.0, "type": "linear" } }),
            "`rope_parameters`: `factor` is missing; expected a number",
        ),
        (
            json!({ "rope_parameters": { "rope_type": "llama3", "factor": 8.0 } }),
            "`rope_parameters`: `low_freq_factor` is missing",
        ),
        (
            json!({ "rope_scaling": { "type": "linear", "factor": 0.0 } }),
            "`rope_scaling`: `factor`: expected a number above 0, found 0.0",
        ),
        (
            json!({ "rope_parameters": { "rope_type": "spiral" } }),
            "`rope_type`: expected \"default\", \"linear\"",
        ),
        (json!({ "rope_parameters": [1] }), "`rope_parameters`: expected a table, found [1]"),
        (json!({ "attention_bias": 1 }), "`attention_bias`: expected true or false, found 1"),
        (json!({ "rms_norm_eps": "1e-5" }), "`rms_norm_eps`: expected a number, found \"1e-5\""),
        (json!({ "vocab_size": null }), "`vocab_size`: it is missing"),
        (
            json!({ "hidden_size": 32.5 }),
            "`hidden_size`: expected an integer from 1 to 1048576, found 32.5",
        ),
        (
            json!({ "num_hidden_layers": -1 }),
            "`num_hidden_layers`: expected an integer from 1 to 16384, found -1",
        ),
        (json!({ "num_attention_heads": 1e30 }), "`num_attention_heads`: expected an integer"),
        (json!({ "initializer_range": "NaN" }), "`initializer_range`: expected a number"),
        (
            json!({ "quantization_config": { "quant_method": "bitsandbytes" } }),
            "`quantization_config`: the weights are quantised by `bitsandbytes`, and only `mxfp4`",
        ),
        // Keys that change the results of other models.
        (json!({ "logits_scaling": 8.0 }), "`logits_scaling`: a model of type"),
        (json!({ "sliding_window": 5 }), "`sliding_window`: a model of type"),
        (json!({ "model_type": null }), "there is no `model_type`"),
        (json!({ "model_type": "mamba" }), "models of type \"mamba\" are not known"),
        (json!({ "hidden_act": "softplus" }), "the activation \"softplus\" is not supported"),
    ] {
        let config = changed(&changes).replace("\"NaN\"", "NaN");
        let error = loss(&config).unwrap_err().to_string();
        assert!(error.contains("config.json: ") && error.contains(expected), "{error}");
    }
    for (text, expected) in [
        ("version https://git-lfs.github.com/spec/v1\n", "it is a pointer of Git LFS"),
        ("[]", "expected a table"),
        ("{", "is no JSON that can be read"),
    ] {
        let error = loss(text).unwrap_err().to_string();
        assert!(error.contains("config.json: ") && error.contains(expected), "{error}");
    }
}
