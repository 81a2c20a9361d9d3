//! Adapters written and read by PEFT. `fixtures/make_peft.py` documents how the files were made.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use fulgurite::core::collective::Solo;
use fulgurite::core::run::{AdapterConfig, AdapterTargets};

use crate::interop_peft::{assert_close, expected, from, logits, merged, model};
use crate::program::fixture;

fn adapter(name: &str) -> PathBuf {
    fixture("peft").join(name)
}

/// A copy of an adapter with one changed value in its configuration.
fn changed(name: &str, into: &Path, key: &str, value: serde_json::Value) -> PathBuf {
    let copy = into.join(name);
    std::fs::create_dir_all(&copy).unwrap();
    for entry in std::fs::read_dir(adapter(name)).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, copy.join(path.file_name().unwrap())).unwrap();
    }
    let path = copy.join("adapter_config.json");
    let mut config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config[key] = value;
    std::fs::write(path, config.to_string()).unwrap();
    copy
}

#[test]
fn adapters_of_peft_match_peft() {
    let temp = tempfile::tempdir().unwrap();
    for (name, base) in
        [("head_emb", "hf_llama"), ("all_norms", "hf_llama"), ("tied", "hf_llama_tied")]
    {
        let base = fixture(base);
        let of_peft = expected(&adapter(name).join("expected.safetensors"));
        let beside = logits(&base, from(&adapter(name)));
        assert_close(&beside, &of_peft["logits"], 1e-5);
        let merged = merged(&base, &adapter(name), temp.path(), name).unwrap();
        assert_close(&logits(&merged, None), &of_peft["logits"], 1e-5);
    }
}

#[test]
fn resaved_peft_adapter_is_the_same() {
    let temp = tempfile::tempdir().unwrap();
    for (name, base) in [("all_norms", "hf_llama"), ("tied", "hf_llama_tied")] {
        let base = fixture(base);
        let solo = Arc::new(Solo::new("world", 0));
        let (fabric, _) = model(solo, "single_device", &base, from(&adapter(name))).unwrap();
        let again = temp.path().join(name);
        fabric.checkpoints().save_adapter(&again).unwrap();
        let of_peft = expected(&adapter(name).join("expected.safetensors"));
        assert_close(&logits(&base, from(&again)), &of_peft["logits"], 1e-5);
    }
}

/// PEFT trains modules with a shared weight separately, so the file must contain all of them.
#[test]
fn shared_weight_is_saved_for_all_modules() {
    let temp = tempfile::tempdir().unwrap();
    let base = fixture("hf_llama_tied");
    let adapters = AdapterConfig {
        targets: AdapterTargets::from_iter(["q_proj"]),
        modules_to_save: vec!["embed_tokens".to_owned()],
        ..AdapterConfig::default()
    };
    let solo = Arc::new(Solo::new("world", 0));
    let (fabric, _) = model(solo, "single_device", &base, Some(adapters)).unwrap();
    fabric.checkpoints().save_adapter(temp.path()).unwrap();
    let saved = expected(&temp.path().join("adapter_model.safetensors"));
    let weight = |name: &str| &saved[&format!("base_model.model.{name}.weight")];
    assert_close(weight("lm_head"), weight("model.embed_tokens"), 0.0);
    let config = std::fs::read(temp.path().join("adapter_config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    assert_eq!(config["modules_to_save"], serde_json::json!(["lm_head", "model.embed_tokens"]));
    assert_eq!(config["ensure_weight_tying"], true);
}

/// `norm` in `trainer.adapters` means one module; PEFT matches name suffixes, so all norms would
/// match.
#[test]
fn saved_module_names_are_unambiguous() {
    let temp = tempfile::tempdir().unwrap();
    let saved = |patterns: &[&str]| {
        let adapters = AdapterConfig {
            targets: AdapterTargets::from_iter(["q_proj"]),
            modules_to_save: patterns.iter().map(|&pattern| pattern.to_owned()).collect(),
            ..AdapterConfig::default()
        };
        let solo = Arc::new(Solo::new("world", 0));
        let base = fixture("hf_llama");
        let (fabric, _) = model(solo, "single_device", &base, Some(adapters)).unwrap();
        fabric.checkpoints().save_adapter(temp.path()).unwrap();
        let config = std::fs::read(temp.path().join("adapter_config.json")).unwrap();
        let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
        config["modules_to_save"].clone()
    };
    // Only `model.norm`.
    assert_eq!(saved(&["norm"]), serde_json::json!(["model.norm"]));
    assert_eq!(saved(&["lm_head"]), serde_json::json!(["lm_head"]));
    assert_eq!(saved(&[]), serde_json::Value::Null);
}

#[test]
fn tied_modules_are_not_trained_apart() {
    let temp = tempfile::tempdir().unwrap();
    let base = fixture("hf_llama_tied");
    let solo = || Arc::new(Solo::new("world", 0));
    let apart = adapter("tied_apart");
    let message = "has `model.embed_tokens.weight` and no `lm_head.weight`, and the two are one weight in the base";
    let error = merged(&base, &apart, temp.path(), "apart").unwrap_err().to_string();
    assert!(error.contains(message), "{error}");
    let error = model(solo(), "single_device", &base, from(&apart)).err().unwrap().to_string();
    assert!(error.contains(message), "{error}");
    // Both weights are in the file, with different values.
    let differ = changed("tied", temp.path(), "revision", serde_json::Value::Null);
    let file = differ.join("adapter_model.safetensors");
    let mut tensors = expected(&file);
    let head = Tensor::ones((67, 32), DType::F32, &Device::Cpu).unwrap();
    tensors.insert("base_model.model.lm_head.weight".to_owned(), head);
    candle_core::safetensors::save(&tensors, &file).unwrap();
    let error = merged(&base, &differ, temp.path(), "differ").unwrap_err().to_string();
    assert!(
        error.contains("`lm_head.weight` and `model.embed_tokens.weight`, which differ"),
        "{error}"
    );
    let error = model(solo(), "single_device", &base, from(&differ)).err().unwrap().to_string();
    assert!(
        error.contains("`model.embed_tokens.weight` and `lm_head.weight`, which differ"),
        "{error}"
    );
}

/// The adapter has one of the two names, independent of the name that its base stores.
#[test]
fn tied_weight_is_merged_under_all_names() {
    let temp = tempfile::tempdir().unwrap();
    let base = fixture("hf_llama_tied");
    let (embedding, head) = ("model.embed_tokens.weight", "lm_head.weight");
    let adapter = changed("tied_apart", temp.path(), "ensure_weight_tying", true.into());
    let file = adapter.join("adapter_model.safetensors");
    let mut tensors = expected(&file);
    let trained = tensors[&format!("base_model.model.{embedding}")].clone();
    let weights = |merged: &Path| expected(&merged.join("model.safetensors"));

    // The base stores both names; the adapter has the embedding.
    let both = merged(&base, &adapter, temp.path(), "both").unwrap();
    let mut stored = weights(&both);
    stored.insert(embedding.to_owned(), trained.zeros_like().unwrap());
    stored.insert(head.to_owned(), trained.zeros_like().unwrap());
    candle_core::safetensors::save(&stored, both.join("model.safetensors")).unwrap();
    let of_both = weights(&merged(&both, &adapter, temp.path(), "of_both").unwrap());
    assert_close(&of_both[embedding], &trained, 0.0);
    assert_close(&of_both[head], &trained, 0.0);

    // The base stores the embedding; the adapter has the head.
    tensors.remove(&format!("base_model.model.{embedding}"));
    tensors.insert(format!("base_model.model.{head}"), trained.clone());
    candle_core::safetensors::save(&tensors, &file).unwrap();
    let of_one = weights(&merged(&base, &adapter, temp.path(), "of_one").unwrap());
    assert_close(&of_one[embedding], &trained, 0.0);
    assert!(!of_one.contains_key(head));
    // A head of another shape does not fit the embedding.
    let wide = Tensor::zeros((70, 32), DType::F32, &Device::Cpu).unwrap();
    tensors.insert(format!("base_model.model.{head}"), wide);
    candle_core::safetensors::save(&tensors, &file).unwrap();
    let error = merged(&base, &adapter, temp.path(), "wide").unwrap_err().to_string();
    assert!(error.contains("has `lm_head.weight` of the shape [70, 32]"), "{error}");
}

#[test]
fn shared_weight_trains_for_all_or_none() {
    let adapters = AdapterConfig {
        targets: AdapterTargets::from_iter(["q_proj"]),
        modules_to_save: vec!["lm_head".to_owned()],
        ..AdapterConfig::default()
    };
    let solo = Arc::new(Solo::new("world", 0));
    let base = fixture("hf_llama_tied");
    let error = model(solo, "single_device", &base, Some(adapters)).err().unwrap().to_string();
    let expected = "is the weight `model.embed_tokens.weight` of another module; name both modules";
    assert!(error.contains(expected), "{error}");
}

/// The adapter's own base weights win over the base, whose head differs.
#[test]
fn weights_from_the_adapter_are_kept() {
    let temp = tempfile::tempdir().unwrap();
    let copy = changed("head_emb", temp.path(), "revision", serde_json::Value::Null);
    let file = copy.join("adapter_model.safetensors");
    let mut tensors = expected(&file);
    let name = "base_model.model.lm_head.base_layer.weight".to_owned();
    tensors.insert(name.clone(), (&tensors[&name] * 2.0).unwrap());
    candle_core::safetensors::save(&tensors, &file).unwrap();
    let base = fixture("hf_llama");
    let merged = merged(&base, &copy, temp.path(), "merged").unwrap();
    let of_peft = expected(&adapter("head_emb").join("expected.safetensors"));
    assert_close(&logits(&base, from(&copy)), &logits(&merged, None), 1e-5);
    let difference = (logits(&merged, None) - &of_peft["logits"]).unwrap().abs().unwrap();
    assert!(difference.max_all().unwrap().to_scalar::<f32>().unwrap() > 0.1);
}

/// For a resized model PEFT also writes the parts of a saved module.
#[test]
fn parts_of_a_saved_module_are_read_as_one() {
    let temp = tempfile::tempdir().unwrap();
    let write = |names: &[&str]| {
        let copy = changed("all_norms", temp.path(), "revision", serde_json::Value::Null);
        let of_torch = candle_core::pickle::read_all(copy.join("adapter_model.bin")).unwrap();
        let mut tensors: HashMap<String, Tensor> = of_torch.into_iter().collect();
        let (name, trained) =
            tensors.iter().find(|(name, _)| name.ends_with("model.norm.weight")).unwrap();
        let (name, trained) = (name.clone(), trained.clone());
        tensors.remove(&name);
        for part in names {
            let factor = if *part == "original_module.weight" { 9.0 } else { 1.0 };
            let part = name.replace("norm.weight", &format!("norm.{part}"));
            tensors.insert(part, (&trained * factor).unwrap());
        }
        let file = copy.join("adapter_model.safetensors");
        candle_core::safetensors::save(&tensors, file).unwrap();
        logits(&fixture("hf_llama"), from(&copy))
    };
    let of_peft = expected(&adapter("all_norms").join("expected.safetensors"));
    let (second, untrained) = ("modules_to_save.weight", "original_module.weight");
    assert_close(&write(&["weight", second, untrained]), &of_peft["logits"], 1e-5);
    assert_close(&write(&[second, untrained]), &of_peft["logits"], 1e-5);
}

/// A checkpoint of a run with adapters contains them beside the base.
#[test]
fn adapters_of_another_step_are_refused() {
    let temp = tempfile::tempdir().unwrap();
    let base = temp.path().join("base");
    std::fs::create_dir_all(&base).unwrap();
    let config = "config.json";
    std::fs::copy(fixture("hf_llama").join(config), base.join(config)).unwrap();
    let of_adapter = expected(&adapter("head_emb").join("adapter_model.safetensors"));
    let name = "lm_head.lora_A.weight";
    let own = &of_adapter[&format!("base_model.model.{name}")];
    for factor in [1.0, 2.0] {
        let mut tensors = expected(&fixture("hf_llama").join("model.safetensors"));
        tensors.insert(name.to_owned(), (own * factor).unwrap());
        candle_core::safetensors::save(&tensors, base.join("model.safetensors")).unwrap();
        let merged = merged(&base, &adapter("head_emb"), temp.path(), "merged");
        match factor {
            1.0 => drop(merged.unwrap()),
            _ => {
                let error = merged.unwrap_err().to_string();
                assert!(error.contains(&format!("has another `{name}` than ")), "{error}");
            }
        }
    }
}

#[test]
fn adapter_for_another_base_is_refused() {
    let temp = tempfile::tempdir().unwrap();
    let base = fixture("hf_llama");
    let write = |tensors: &HashMap<String, Tensor>| {
        let copy = changed("head_emb", temp.path(), "revision", serde_json::Value::Null);
        candle_core::safetensors::save(tensors, copy.join("adapter_model.safetensors")).unwrap();
        merged(&base, &copy, temp.path(), "merged").unwrap_err().to_string()
    };
    let whole = expected(&adapter("head_emb").join("adapter_model.safetensors"));
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
    let with = |name: &str, tensor: Option<Tensor>| {
        let mut tensors = whole.clone();
        let name = format!("base_model.model.{name}");
        tensors.remove(&name);
        tensors.extend(tensor.map(|tensor| (name, tensor)));
        write(&tensors)
    };
    let error = with("lm_head.lora_B.weight", None);
    assert!(
        error.contains("not both of `lm_head.lora_A.weight` and `lm_head.lora_B.weight`"),
        "{error}"
    );
    let error = with("lm_head.lora_A.weight", Some(zeros(&[2, 31])));
    assert!(error.contains("for `lm_head.weight` of 67 outputs and 32 inputs"), "{error}");
    let (a, b) = (zeros(&[2, 32]), zeros(&[16, 2]));
    let mut tensors = whole.clone();
    for (part, tensor) in [("lora_A", a), ("lora_B", b)] {
        let name = format!("base_model.model.model.layers.0.self_attn.k_proj.{part}.weight");
        tensors.insert(name, tensor);
    }
    let error = write(&tensors);
    let expected = "names no layer `model.layers.0.self_attn.k_proj`";
    assert!(error.contains(expected), "{error}");
    let mut tensors = whole.clone();
    for (part, shape) in [("lora_A", [3, 32]), ("lora_B", [67, 3])] {
        tensors.insert(format!("base_model.model.lm_head.{part}.weight"), zeros(&shape));
    }
    let error = write(&tensors);
    let expected = "has `lm_head.lora_A.weight` of the shape [3, 32] and `lm_head.lora_B.weight` of the \
                    shape [67, 3] for `lm_head.weight`";
    assert!(error.contains(expected) && error.contains("says rank 2"), "{error}");
    let error = with("lm_head.lora_A.default.weight", Some(zeros(&[2, 32])));
    assert!(error.contains("`lm_head.lora_A.default.weight`"), "{error}");
    let error = with("lm_head.base_layer.weight", Some(zeros(&[70, 32])));
    assert!(error.contains("of the shape [70, 32]") && error.contains("resized"), "{error}");
    let error = with("lm_head.weight", Some(zeros(&[67, 32])));
    assert!(error.contains("which are both `lm_head.weight`"), "{error}");
    let copy = changed("head_emb", temp.path(), "use_dora", true.into());
    let error = merged(&base, &copy, temp.path(), "merged").unwrap_err().to_string();
    assert!(error.contains("`use_dora` in adapter_config.json is true; set it right"), "{error}");
    let error = with("model.other.weight", Some(zeros(&[1])));
    assert!(
        error.contains("no `model.other.weight`: it is an adapter of another model"),
        "{error}"
    );
}
