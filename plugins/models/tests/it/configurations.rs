//! Reading `config.json` and `[model]`.

use std::path::Path;

use fulgurite::prelude::*;
use fulgurite_models::{Architecture, DecoderConfig, Description, Export, FAMILIES, ModelConfig};
use serde_json::{Value, json};

use crate::fixtures::{DECODERS, ENCODERS, SEQ2SEQ, fixture};

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
        .chain(SEQ2SEQ)
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
        ("roberta_masked", json!({ "is_decoder": true }), "`is_decoder`: only false is supported"),
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

/// Keys of transformers 4 and 5 describe the same model.
#[test]
fn old_and_new_keys_are_equal() {
    let llama3 = json!({
        "type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8
    });
    for (name, old) in [
        ("llama", json!({ "rope_theta": 10000.0, "rope_scaling": llama3 })),
        ("llama_linear", json!({ "rope_scaling": { "type": "linear", "factor": 2.5 } })),
        (
            "gemma3_text",
            json!({
                "rope_theta": 1e6, "rope_local_base_freq": 1e4,
                "rope_scaling": { "rope_type": "linear", "factor": 8.0 }
            }),
        ),
        (
            "modernbert_masked",
            json!({ "global_rope_theta": 160000.0, "local_rope_theta": 10000.0 }),
        ),
        ("gpt_neox_sequential", json!({ "rotary_pct": 0.5, "rotary_emb_base": 10000 })),
        (
            "phi3",
            json!({
                "partial_rotary_factor": 0.75,
                "rope_scaling": {
                    "type": "su", "short_factor": [1.0, 1.1, 1.2], "long_factor": [1.5, 2.5, 4.0]
                }
            }),
        ),
    ] {
        let temp = tempfile::tempdir().unwrap();
        let new = changed(name, &json!({}), temp.path()).describe().unwrap();
        let mut old = old;
        old["rope_parameters"] = Value::Null;
        let old = changed(name, &old, temp.path()).describe().unwrap();
        assert_eq!(format!("{old:?}"), format!("{new:?}"), "{name}");
    }
}

/// Whichever version's names the file and the table have, also in a saved configuration and in an
/// exported `config.json`.
#[test]
fn rotations_of_the_table_go_before_the_file() {
    let yarn = json!({ "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8 });
    let with = |table: &Value, theta: f64| {
        let mut table = table.clone();
        table["rope_theta"] = theta.into();
        table
    };
    let linear = json!({ "rope_type": "linear", "factor": 2.0 });
    let default = json!({ "rope_type": "default" });
    let layers = |full: Value, sliding: Value| json!({ "rope_parameters": { "full_attention": full, "sliding_attention": sliding } });
    let one = |table: Value| json!({ "rope_parameters": table });
    for (name, file, set, expected) in [
        (
            "llama_linear",
            json!({ "rope_parameters": null, "rope_theta": 5e5, "rope_scaling": linear }),
            one(yarn.clone()),
            one(with(&yarn, 5e5)),
        ),
        ("llama_linear", one(with(&linear, 5e5)), one(yarn.clone()), one(with(&yarn, 5e5))),
        (
            "llama_linear",
            one(with(&default, 5e5)),
            json!({ "rope_scaling": yarn }),
            one(with(&yarn, 5e5)),
        ),
        ("llama_yarn", json!({}), json!({ "rope_theta": 1e6 }), one(with(&yarn, 1e6))),
        ("llama_yarn", json!({}), json!({ "rope_scaling": false }), one(with(&default, 1e4))),
        (
            "gpt_neox_sequential",
            json!({}),
            json!({ "rotary_pct": 0.25, "rotary_emb_base": 5e5 }),
            one(json!({ "rope_theta": 5e5, "partial_rotary_factor": 0.25 })),
        ),
        (
            "gemma3_text",
            json!({}),
            json!({ "rope_scaling": { "type": "linear", "factor": 2.0 } }),
            layers(with(&linear, 1e6), with(&default, 1e4)),
        ),
        (
            "gemma3_text",
            json!({}),
            json!({ "rope_local_base_freq": 5e3, "rope_theta": 5e5 }),
            layers(
                with(&json!({ "rope_type": "linear", "factor": 8.0 }), 5e5),
                with(&default, 5e3),
            ),
        ),
        (
            "gemma3_text",
            json!({}),
            json!({ "rope_parameters": false }),
            layers(with(&default, 1e6), with(&default, 1e4)),
        ),
        (
            "modernbert_masked",
            json!({}),
            json!({ "rope_scaling": linear }),
            layers(with(&linear, 160000.0), with(&linear, 1e4)),
        ),
        (
            "modernbert_masked",
            json!({}),
            layers(linear.clone(), yarn.clone()),
            layers(with(&linear, 160000.0), with(&yarn, 1e4)),
        ),
    ] {
        let described = |config: &mut ModelConfig| format!("{:?}", config.describe().unwrap());
        let expected = {
            let temp = tempfile::tempdir().unwrap();
            described(&mut changed(name, &expected, temp.path()))
        };
        let temp = tempfile::tempdir().unwrap();
        let mut config = changed(name, &file, temp.path());
        for (key, value) in set.as_object().unwrap() {
            config.set(key, value.clone()).unwrap();
        }
        assert_eq!(described(&mut config), expected, "{name}: {set}");
        let saved = serde_json::to_value(&config).unwrap();
        let mut again: ModelConfig = serde_json::from_value(saved.clone()).unwrap();
        assert_eq!(described(&mut again), expected, "{name}: {saved}");
        let run = json!({ "module": { "type": "causal_lm" }, "model": saved, "data": {} });
        let exported = Export::of_run(&run).unwrap().unwrap().config;
        let temp = tempfile::tempdir().unwrap();
        std::fs::write(temp.path().join("config.json"), exported.to_string()).unwrap();
        let mut config = ModelConfig::default();
        config.start_from(temp.path());
        assert_eq!(described(&mut config), expected, "{name}: {exported}");
    }
}

#[test]
fn rotations_that_models_ignore_are_errors() {
    let temp = tempfile::tempdir().unwrap();
    let half = json!({ "rope_type": "default", "partial_rotary_factor": 0.5 });
    for (name, changes, expected) in [
        ("qwen3", json!({ "rope_parameters": half }), "rotates whole heads; leave it out"),
        ("qwen3", json!({ "partial_rotary_factor": 0.5 }), "has no such key here"),
        ("gemma3_text", json!({ "rope_parameters": half }), "one table for each type of layer"),
        (
            "phi3",
            json!({
                "rope_parameters": null, "partial_rotary_factor": 0.75,
                "rope_scaling": { "type": "yarn", "factor": 4.0 }
            }),
            "the only scaling of models of type \"phi3\" is \"longrope\"",
        ),
    ] {
        let error = changed(name, &changes, temp.path()).describe().unwrap_err().to_string();
        assert!(error.contains(expected), "{name}: {error}");
    }
}

/// What `checkpoint convert --to hugging-face` writes of each module's run.
#[test]
fn runs_of_all_modules_are_exported() {
    for (name, module, own, class) in [
        ("qwen2", "causal_lm", json!({ "dropout": 0.1 }), "Qwen2ForCausalLM"),
        ("gpt2", "causal_lm", json!({}), "GPT2LMHeadModel"),
        ("gemma3_text", "causal_lm", json!({}), "Gemma3ForCausalLM"),
        (
            "gemma3_text",
            "sequence_classification",
            json!({ "num_labels": 2 }),
            "Gemma3TextForSequenceClassification",
        ),
        (
            "bert_masked",
            "masked_lm",
            json!({ "mlm_probability": 0.3, "mask_token_id": 4 }),
            "BertForMaskedLM",
        ),
        (
            "roberta_classes",
            "sequence_classification",
            json!({ "id2label": { "0": "no", "1": "yes" }, "num_labels": 2 }),
            "RobertaForSequenceClassification",
        ),
        (
            "modernbert_tokens",
            "token_classification",
            json!({}),
            "ModernBertForTokenClassification",
        ),
        ("bert_masked", "embedding", json!({ "pooling": "mean", "temperature": 0.1 }), "BertModel"),
        (
            "vit",
            "image_classification",
            json!({ "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "image_size": 12 }),
            "ViTForImageClassification",
        ),
    ] {
        let mut model = json!({ "from_pretrained": fixture(name) });
        for (key, value) in own.as_object().unwrap() {
            model[key] = value.clone();
        }
        let run = json!({ "module": { "type": module }, "model": model, "data": {} });
        let export = Export::of_run(&run).unwrap().expect("a model of this crate");
        assert_eq!(export.config["architectures"], json!([class]), "{name}");
        for key in ["dropout", "mlm_probability", "pooling", "temperature", "image_mean"] {
            assert!(export.config.get(key).is_none(), "{name}: {key}");
        }
        let files: Vec<&str> = export.files.iter().map(|(file, _)| file.as_str()).collect();
        match module {
            "image_classification" => assert_eq!(files, ["preprocessor_config.json"]),
            _ => assert!(export.missing[0].contains("there is no tokenizer"), "{name}"),
        }
    }
    let own = json!({ "module": { "type": "my_gpt" }, "model": { "classes": 5 } });
    for run in [json!({ "model": {} }), own] {
        assert!(Export::of_run(&run).unwrap().is_none());
    }
    let tokens = json!({
        "module": "token_classification",
        "model": { "from_pretrained": fixture("olmo2"), "num_labels": 2 }
    });
    let export = Export::of_run(&tokens).unwrap().unwrap();
    assert!(export.config.get("architectures").is_none());
    let missing = "`transformers` has no class for a model of type \"olmo2\"";
    assert!(export.missing.iter().any(|what| what.contains(missing)), "{:?}", export.missing);
    let size = json!({
        "type": "roberta", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1,
        "intermediate_size": 8, "vocab_size": 16
    });
    let export = Export::of_run(&json!({ "module": "masked_lm", "model": size })).unwrap().unwrap();
    assert_eq!(export.config["pad_token_id"], 1);
}

/// Another mean than that of the directory is in the exported file, beside its other keys.
#[test]
fn exports_normalise_as_in_training() {
    let temp = tempfile::tempdir().unwrap();
    changed("vit", &json!({}), temp.path());
    let file =
        json!({ "image_mean": [0.1, 0.2, 0.3], "image_std": [1.0, 1.0, 1.0], "resample": 3 });
    std::fs::write(temp.path().join("preprocessor_config.json"), file.to_string()).unwrap();
    let model = json!({ "from_pretrained": temp.path(), "image_mean": [0.4, 0.5, 0.6] });
    let run = json!({ "module": "image_classification", "model": model });
    let export = Export::of_run(&run).unwrap().unwrap();
    let (_, bytes) = &export.files[0];
    let expected =
        json!({ "image_mean": [0.4, 0.5, 0.6], "image_std": [1.0, 1.0, 1.0], "resample": 3 });
    assert_eq!(serde_json::from_slice::<Value>(bytes).unwrap(), expected);
}
