//! Reading `config.json` and `[model]`.

use std::path::Path;

use fulgurite::prelude::*;
use fulgurite_models::{Architecture, DecoderConfig, Description, FAMILIES, ModelConfig};
use serde_json::{Value, json};

use crate::fixtures::{DECODERS, ENCODERS, fixture};

fn table(toml: &str) -> Result<ModelConfig> {
    toml::from_str(toml).map_err(|e| Error::other(e.message().to_owned()))
}

/// The fixture's `config.json` with changes, in a directory of its own; `null` removes a key.
fn changed(name: &str, changes: &Value, into: &Path) -> ModelConfig {
    let file = std::fs::read(fixture(name).join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&file).unwrap();
    for (key, value) in changes.as_object().unwrap() {
        match value {
            Value::Null => drop(config.as_object_mut().unwrap().remove(key)),
            value => config[key] = value.clone(),
        }
    }
    std::fs::write(into.join("config.json"), config.to_string()).unwrap();
    let mut config = ModelConfig::default();
    config.start_from(into);
    config
}

fn decoder(description: Description) -> DecoderConfig {
    let Architecture::Decoder(decoder) = description.architecture else { panic!("no decoder") };
    *decoder
}

/// The table `[model]` of a checkpoint describes the model without the directory it came from.
#[test]
fn saved_configurations_are_complete() {
    for name in DECODERS.into_iter().chain(ENCODERS) {
        let temp = tempfile::tempdir().unwrap();
        let mut config = changed(name, &json!({}), temp.path());
        let described = format!("{:?}", config.describe().unwrap());
        let saved = toml::to_string(&config).unwrap();
        drop(temp);
        let mut again = table(&saved).unwrap();
        assert_eq!(format!("{:?}", again.describe().unwrap()), described, "{name}: {saved}");
    }
}

#[test]
fn each_family_has_a_fixture() {
    let types: Vec<String> = DECODERS
        .into_iter()
        .chain(ENCODERS)
        .map(|name| {
            let mut config = ModelConfig::default();
            config.start_from(fixture(name));
            config.read_file().unwrap();
            config.model_type().to_owned()
        })
        .collect();
    for family in FAMILIES {
        // The same code with another name.
        let name = if family.model_type == "xlm-roberta" { "roberta" } else { family.model_type };
        assert!(types.iter().any(|known| known == name), "{name}");
    }
}

#[test]
fn keys_of_the_table_go_before_the_file() {
    let temp = tempfile::tempdir().unwrap();
    let mut config = changed("mistral", &json!({}), temp.path());
    let of_file = decoder(config.clone().describe().unwrap());
    assert_eq!(of_file.layers[0].window, Some(5));
    config.set("sliding_window", false).unwrap();
    config.set("dropout", 0.25).unwrap();
    let set = decoder(config.describe().unwrap());
    assert_eq!((set.layers[0].window, set.residual_dropout), (None, 0.25));
    assert_eq!(set.num_heads, of_file.num_heads);
}

/// `null` and a missing key differ where the default is not `null`.
#[test]
fn null_is_not_the_default() {
    let temp = tempfile::tempdir().unwrap();
    let window = |changes: &Value| {
        decoder(changed("mistral", changes, temp.path()).describe().unwrap()).layers[0].window
    };
    assert_eq!(window(&json!({ "sliding_window": null })), Some(4096));
    let config = changed("mistral", &json!({}), temp.path());
    let text = std::fs::read_to_string(temp.path().join("config.json")).unwrap();
    let text = text.replace("\"sliding_window\":5", "\"sliding_window\":null");
    std::fs::write(temp.path().join("config.json"), text).unwrap();
    assert_eq!(decoder(config.clone().describe().unwrap()).layers[0].window, None);
}

#[test]
fn what_would_change_results_is_an_error() {
    for (name, changes, expected) in [
        (
            "llama",
            json!({ "sliding_window": 7 }),
            "`sliding_window`: a model of type \"llama\" has no such key",
        ),
        ("qwen2", json!({ "num_experts": 8 }), "`num_experts`"),
        (
            "gpt2",
            json!({ "add_cross_attention": true }),
            "`add_cross_attention`: only false is supported",
        ),
        (
            "bert_masked",
            json!({ "position_embedding_type": "relative_key" }),
            "`position_embedding_type`: only \"absolute\"",
        ),
        (
            "smollm3",
            json!({ "no_rope_layers": [1, 0] }),
            "`no_rope_layers`: expected a number for each of 3 layers, found 2",
        ),
        (
            "gemma2",
            json!({ "layer_types": ["full_attention", "chunked_attention", "full_attention"] }),
            "found \"chunked_attention\"",
        ),
        ("qwen3", json!({ "num_hidden_layers": null }), "`num_hidden_layers`: it is missing"),
        (
            "vit",
            json!({ "image_size": 13 }),
            "`image_size`: must be divisible by patch_size = 4, found 13",
        ),
        ("vit", json!({ "num_channels": 0 }), "`num_channels`: expected an integer from 1 to"),
        (
            "modernbert_masked",
            json!({ "classifier_pooling": "max" }),
            "expected \"cls\" or \"mean\"",
        ),
        ("phi3", json!({ "hidden_act": "mish" }), "the activation \"mish\" is not supported"),
        (
            "olmo2",
            json!({ "model_type": "mamba2" }),
            "models of type \"mamba2\" are not known; known are llama",
        ),
    ] {
        let temp = tempfile::tempdir().unwrap();
        let error = changed(name, &changes, temp.path()).describe().unwrap_err().to_string();
        assert!(error.contains("config.json") && error.contains(expected), "{name}: {error}");
    }
}

#[test]
fn tables_are_checked_where_they_are_read() {
    for (text, expected) in [
        ("hiden_size = 4", "unknown field `hiden_size`"),
        ("type = 'llama'\nhidden_size = 0", "expected an integer from 1 to"),
        ("type = 'llama'\nhidden_size = 'wide'", "expected an integer from 1 to"),
        ("type = 'llama'\nrms_norm_eps = true", "expected a number, found true"),
    ] {
        let error = table(text).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let describe = |text: &str| table(text).unwrap().describe().unwrap_err().to_string();
    assert!(describe("hidden_size = 8").contains("needs a type: llama, mistral"));
    let size = "hidden_size = 8\nintermediate_size = 8\nnum_hidden_layers = 1\nvocab_size = 9\n";
    let heads = |n: usize| format!("type = 'llama'\nnum_attention_heads = {n}\n{size}");
    assert!(describe(&heads(3)).contains("8 is not divisible by num_attention_heads = 3"));
    assert!(describe(&heads(8)).contains("rotates 1 elements of heads of 1"));
    let unknown = format!("{}n_embd = 8", heads(2));
    assert!(
        describe(&unknown).contains("`model.n_embd`: a model of type \"llama\" has no such key")
    );
}

#[test]
fn repositories_of_the_hub_cache_are_found() {
    let missing = fulgurite_models::resolve(Path::new("nobody/nothing")).unwrap_err().to_string();
    assert!(missing.contains("no repository of this name in"), "{missing}");
    let missing = fulgurite_models::resolve(Path::new("/no/such/folder")).unwrap_err().to_string();
    assert!(missing.contains("there is no such folder"), "{missing}");
}
