//! Adapters under the names that PEFT has for a model's layers (`fixtures/make_adapters.py`).

use std::path::Path;
use std::sync::Arc;

use fulgurite::core::checkpoint::{self, AdapterSource, MergedModel};
use fulgurite::core::collective::Solo;
use fulgurite::core::module::{Adapters, ForeignNames as _, ForeignPart, ModuleInit};
use fulgurite::core::trainer::LightningModule;
use fulgurite::prelude::*;
use fulgurite_models::{
    CausalLm, GgufAdapter, GgufOptions, MappedSource, ModelConfig, PeftAdapter, Seq2SeqLm,
    SequenceClassification, SourceTexts,
};
use fulgurite_test_support::training::strategy;

use crate::fixtures::{assert_same, fixture, tensors};
use crate::modules::texts;
use crate::transformers::{config, ids};

const DECODERS: [&str; 3] = ["gpt2", "phi3", "gpt_neox"];

/// The module with the weights of a fixture or of `source`, and the adapter in `file`.
fn load<M: LightningModule<Config = ModelConfig>>(
    name: &str,
    source: Option<Box<dyn checkpoint::TensorSource>>,
    adapters: Option<Adapters>,
    file: Option<&Path>,
) -> Result<(Fabric, M)> {
    let init = ModuleInit { adapters, ..ModuleInit::default() };
    let strategy = strategy(r#"{"type": "single_device"}"#)?;
    let mut fabric = Fabric::new(Arc::new(Solo::new("world", 0)), strategy, init, 5)?;
    let config = config(name);
    let module = fabric.setup_module(|b| M::configure_model(&config, b))?;
    let source = match source {
        Some(source) => source,
        None => checkpoint::open(fixture(name))?,
    };
    checkpoint::load_into(&*M::map_weights(&config, source)?, fabric.module_tree()?, false)?;
    if let Some(file) = file {
        fabric.checkpoints().load_adapter(file)?;
    }
    fabric.checkpoints().finish_load()?;
    Ok((fabric, module))
}

fn adapters(directory: &Path) -> Option<Adapters> {
    Some(AdapterSource::open(directory).unwrap().adapters().unwrap())
}

#[test]
fn adapters_of_decoders_compute_as_in_peft() {
    for name in DECODERS {
        let directory = fixture(&format!("{name}_peft"));
        let expected = tensors(&format!("{name}_peft"), "expected.safetensors");
        let inputs = ids(&tensors(name, "expected.safetensors")["input_ids"]);
        let (fabric, module) =
            load::<CausalLm>(name, None, adapters(&directory), Some(&directory)).unwrap();
        assert_same(name, &module.model().forward(&inputs).unwrap(), &expected["logits"]);

        // Written under this crate's names, and read again.
        let temp = tempfile::tempdir().unwrap();
        fabric.checkpoints().save_adapter(temp.path()).unwrap();
        let (_, again) =
            load::<CausalLm>(name, None, adapters(temp.path()), Some(temp.path())).unwrap();
        assert_same(name, &again.model().forward(&inputs).unwrap(), &expected["logits"]);

        // llama.cpp computes the other models otherwise.
        let gguf = |directory: &Path| {
            let path = temp.path().join("adapter.gguf");
            let adapter =
                GgufAdapter::open(directory, Some(&fixture(name)), GgufOptions::default()).unwrap();
            adapter.write(&path, &mut |_| ()).unwrap();
            std::fs::read(path).unwrap()
        };
        if name == "gpt_neox" {
            // A fused layer of PEFT's adapter is one pair of matrices.
            assert!(gguf(&directory).len() < gguf(temp.path()).len());
        }

        // Merged into the file of the base, whose matrices GPT-2 has transposed.
        let base = checkpoint::open(fixture(name)).unwrap();
        let merged = MergedModel::new(&base, &directory).unwrap();
        let config = config(name);
        let layout = config.clone().describe().unwrap().weights;
        let (fabric, module) = load::<CausalLm>(name, None, None, None).unwrap();
        let source = MappedSource::new(&merged, &layout).unwrap();
        checkpoint::load_into(&source, fabric.module_tree().unwrap(), false).unwrap();
        fabric.checkpoints().finish_load().unwrap();
        assert_same(name, &module.model().forward(&inputs).unwrap(), &expected["logits"]);
    }
}

#[test]
fn adapters_of_classifiers_compute_as_in_peft() {
    for name in ["bert_classes", "roberta_classes", "modernbert_classes"] {
        let directory = fixture(&format!("{name}_peft"));
        let expected = tensors(&format!("{name}_peft"), "expected.safetensors");
        let (_fabric, module) =
            load::<SequenceClassification>(name, None, adapters(&directory), Some(&directory))
                .unwrap();
        assert_same(name, &module.forward(&texts(name)).unwrap(), &expected["logits"]);
    }
}

#[test]
fn adapters_of_t5_compute_as_in_peft() {
    let directory = fixture("t5_peft");
    let expected = tensors("t5_peft", "expected.safetensors");
    let recorded = tensors("t5", "expected.safetensors");
    let (_fabric, module) =
        load::<Seq2SeqLm>("t5", None, adapters(&directory), Some(&directory)).unwrap();
    let tokens = ids(&recorded["input_ids"]);
    let mask = recorded["mask"].to_dtype(DType::U8).unwrap();
    let source = SourceTexts { ids: &tokens, mask: Some(&mask) };
    let logits = module.model().forward(source, &recorded["targets"]).unwrap();
    assert_same("t5", &logits, &expected["logits"]);
    // PEFT's default targets of T5, in all attentions.
    let targets = Adapters::new(["q", "v"]);
    let (fabric, _) = load::<Seq2SeqLm>("t5", None, Some(targets), None).unwrap();
    let trained = fabric.module_tree().unwrap().trainable();
    let layers = trained.filter(|p| p.fqn().ends_with("lora_A.weight")).map(|p| p.fqn());
    let layers: Vec<&str> = layers.map(|name| name.rsplit_once(".lora_A").unwrap().0).collect();
    assert_eq!(layers.len(), 2 * (2 + 2 * 2), "{layers:?}");
    assert!(layers.contains(&"model.decoder.layers.1.cross_attn.v_proj"), "{layers:?}");
}

#[test]
fn magnitudes_of_fused_layers_are_divided() {
    let directory = fixture("gpt_neox_dora_peft");
    let expected = tensors("gpt_neox_dora_peft", "expected.safetensors");
    let inputs = ids(&tensors("gpt_neox", "expected.safetensors")["input_ids"]);
    let (_fabric, module) =
        load::<CausalLm>("gpt_neox", None, adapters(&directory), Some(&directory)).unwrap();
    let logits = module.model().forward(&inputs).unwrap();
    assert_same("gpt_neox_dora", &logits, &expected["logits"]);
}

/// As of a model that was opened without its head: names and layers lack the first segment.
#[test]
fn adapters_of_headless_models_are_read() {
    for (name, adapter, prefix) in
        [("gpt_neox", "gpt_neox_peft", "gpt_neox."), ("llama", "llama_adapter", "model.")]
    {
        let temp = tempfile::tempdir().unwrap();
        let directory = fixture(adapter);
        let whole = format!("base_model.model.{prefix}");
        let headless: std::collections::HashMap<String, Tensor> =
            tensors(adapter, "adapter_model.safetensors")
                .into_iter()
                .map(|(name, tensor)| {
                    let rest = name.strip_prefix(&whole).unwrap_or_else(|| panic!("{name}"));
                    (format!("base_model.model.{rest}"), tensor)
                })
                .collect();
        candle_core::safetensors::save(&headless, temp.path().join("adapter_model.safetensors"))
            .unwrap();
        let json = std::fs::read_to_string(directory.join("adapter_config.json")).unwrap();
        let json = json.replace(&format!("\"{prefix}"), "\"");
        std::fs::write(temp.path().join("adapter_config.json"), json).unwrap();
        let inputs = ids(&tensors(name, "expected.safetensors")["input_ids"]);
        let logits = |directory: &Path| {
            let (_fabric, module) =
                load::<CausalLm>(name, None, adapters(directory), Some(directory)).unwrap();
            module.model().forward(&inputs).unwrap()
        };
        assert_same(name, &logits(temp.path()), &logits(&directory));
    }
}

/// A layer with other heads has as many inputs.
#[test]
fn rows_of_another_model_are_refused() {
    let temp = tempfile::tempdir().unwrap();
    let directory = fixture("gpt_neox_peft");
    std::fs::copy(directory.join("adapter_config.json"), temp.path().join("adapter_config.json"))
        .unwrap();
    let mut tensors = tensors("gpt_neox_peft", "adapter_model.safetensors");
    let name = "base_model.model.gpt_neox.layers.0.attention.query_key_value.lora_B.weight";
    let more = Tensor::cat(&[&tensors[name], &tensors[name]], 0).unwrap();
    tensors.insert(name.to_owned(), more);
    candle_core::safetensors::save(&tensors, temp.path().join("adapter_model.safetensors"))
        .unwrap();
    let loaded =
        load::<CausalLm>("gpt_neox", None, adapters(temp.path()), Some(temp.path())).map(|_| ());
    let error = loaded.unwrap_err().to_string();
    assert!(error.contains("of the shape [192, 2], and the layer has 96 outputs"), "{error}");
}

#[cfg(feature = "images")]
#[test]
fn adapters_of_pictures_compute_as_in_peft() {
    let directory = fixture("vit_peft");
    let expected = tensors("vit_peft", "expected.safetensors");
    let (_fabric, module) = load::<fulgurite_models::ImageClassification>(
        "vit",
        None,
        adapters(&directory),
        Some(&directory),
    )
    .unwrap();
    // The fixture's pictures are normalised.
    let pixels = &tensors("vit", "expected.safetensors")["pictures"];
    let pixels = ((pixels * 0.5).unwrap() + 0.5).unwrap();
    assert_same("vit", &module.forward(&pixels).unwrap(), &expected["logits"]);
}

/// Layers are trained by their names here, too, and PEFT's names are of several tasks.
#[test]
fn patterns_keep_their_own_meaning() {
    let built = |targets: &[&str], saved: &[&str]| {
        let modules_to_save = saved.iter().map(ToString::to_string).collect();
        let adapters = Adapters { modules_to_save, ..Adapters::new(targets.iter().copied()) };
        let b =
            ModuleBuilder::new(ModuleInit { adapters: Some(adapters), ..ModuleInit::default() });
        let _module = SequenceClassification::configure_model(&config("bert_classes"), &b)?;
        let tree = b.finish()?;
        let names: Vec<String> = tree.trainable().map(|p| p.fqn().to_owned()).collect();
        Ok::<_, Error>(names.join(" "))
    };
    let trained = built(&["query", "dense"], &["classifier"]).unwrap();
    for name in [
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.layers.2.self_attn.o_proj.lora_B.weight",
        "model.layers.1.mlp.up_proj.lora_A.weight",
        "model.layers.1.mlp.down_proj.lora_A.weight",
        "classifier.dense.weight",
        "classifier.out_proj.weight",
    ] {
        assert!(trained.contains(name), "{name} in {trained}");
    }
    assert!(!trained.contains("k_proj"), "{trained}");
    let error = built(&["query", "keys"], &[]).unwrap_err().to_string();
    assert!(error.contains("no layer of the model matches `keys`"), "{error}");
    let error = built(&["query"], &["pooling"]).unwrap_err().to_string();
    assert!(error.contains("no module with parameters matches `pooling`"), "{error}");
}

#[test]
fn patterns_are_translated() {
    let modules = |name: &str, pattern: &str| {
        config(name).describe().unwrap().weights.modules(pattern).join(" ")
    };
    let layers = ".model.layers.*.self_attn";
    let qkv = format!("{layers}.k_proj {layers}.q_proj {layers}.v_proj");
    assert_eq!(modules("gpt_neox", "query_key_value"), qkv);
    assert_eq!(modules("gpt2", "c_attn"), qkv);
    // PEFT means both of this name.
    assert_eq!(modules("gpt2", "c_proj"), format!(".model.layers.*.mlp.down_proj {layers}.o_proj"));
    assert_eq!(modules("gpt2", "attn.c_proj"), format!("{layers}.o_proj"));
    assert_eq!(modules("gpt2", "h.1.attn.c_proj"), ".model.layers.1.self_attn.o_proj");
    assert_eq!(modules("gpt2", ".transformer.h.1.mlp.c_fc"), ".model.layers.1.mlp.up_proj");
    assert_eq!(modules("gpt2", ".h.1.mlp.c_fc"), "");
    let decoder = ".model.decoder.layers.*";
    assert_eq!(modules("t5", "EncDecAttention.q"), format!("{decoder}.cross_attn.q_proj"));
    // These are the model's own names.
    for (name, pattern) in
        [("llama", "q_proj"), ("gpt2", "q_proj"), ("gpt2", "fc"), ("phi3", "mlp")]
    {
        assert_eq!(modules(name, pattern), "", "{name} {pattern}");
    }
}

#[test]
fn parts_of_layers_have_their_rows() {
    let layout = config("gpt_neox").describe().unwrap().weights;
    let parts = layout.parts("gpt_neox.layers.2.attention.query_key_value.weight");
    let (heads, dim) = (4, 8);
    let rows = |part: usize| {
        (0..heads).map(move |head| (head * 3 + part) * dim).map(move |row| row..row + dim)
    };
    for (i, (name, part)) in ["q_proj", "k_proj", "v_proj"].into_iter().zip(parts).enumerate() {
        let expected = ForeignPart {
            parameter: format!("model.layers.2.self_attn.{name}.weight"),
            rows: Some(rows(i).collect()),
            is_transposed: false,
        };
        assert_eq!(part, expected);
    }
    // A name that is equal on both sides.
    let one = |name: &str| layout.parts(name)[0].parameter.clone();
    assert_eq!(
        one("model.layers.1.self_attn.o_proj.weight"),
        "model.layers.1.self_attn.o_proj.weight"
    );
}

/// The tensors of an adapter's directory.
fn of_adapter(directory: &Path) -> std::collections::BTreeMap<String, Tensor> {
    let file = directory.join("adapter_model.safetensors");
    candle_core::safetensors::load(file, &Device::Cpu).unwrap().into_iter().collect()
}

fn json(directory: &Path) -> serde_json::Value {
    let text = std::fs::read_to_string(directory.join("adapter_config.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// Loads PEFT's adapter, saves it under this crate's names in `own`, and writes it for PEFT.
fn written_again<M: LightningModule<Config = ModelConfig>>(
    name: &str,
    adapter: &str,
    own: &Path,
    change: impl Fn(&Fabric),
) -> Result<tempfile::TempDir> {
    let directory = fixture(adapter);
    let (fabric, _) = load::<M>(name, None, adapters(&directory), Some(&directory))?;
    change(&fabric);
    fabric.checkpoints().save_adapter(own)?;
    let written = tempfile::tempdir().unwrap();
    PeftAdapter::open(own, Some(&fixture(name)))?.write(written.path())?;
    Ok(written)
}

/// What PEFT wrote is written again to the bit, under PEFT's names.
#[test]
fn adapters_are_written_as_peft_writes_them() {
    let case = |name: &str, adapter: &str, written: tempfile::TempDir| {
        let (theirs, ours) = (of_adapter(&fixture(adapter)), of_adapter(written.path()));
        let names = |all: &std::collections::BTreeMap<String, Tensor>| {
            all.keys().cloned().collect::<Vec<_>>()
        };
        assert_eq!(names(&ours), names(&theirs), "{adapter}");
        for (name, tensor) in &theirs {
            let values = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(ours[name].dims(), tensor.dims(), "{name}");
            assert_eq!(values(&ours[name]), values(tensor), "{name}");
        }
        let (theirs, ours) = (json(&fixture(adapter)), json(written.path()));
        for key in ["r", "use_dora", "fan_in_fan_out", "bias"] {
            assert_eq!(ours[key], theirs[key], "{adapter}: {key}");
        }
        assert_eq!(ours["lora_alpha"].as_f64(), theirs["lora_alpha"].as_f64());
        assert!(ours["rank_pattern"].is_null(), "{name}: no layer needs another rank");
    };
    let own = tempfile::tempdir().unwrap();
    for (name, adapter) in [
        ("gpt2", "gpt2_peft"),
        ("phi3", "phi3_peft"),
        ("gpt_neox", "gpt_neox_peft"),
        ("gpt_neox", "gpt_neox_dora_peft"),
        ("llama", "llama_adapter"),
    ] {
        case(name, adapter, written_again::<CausalLm>(name, adapter, own.path(), |_| ()).unwrap());
    }
    for name in ["bert_classes", "roberta_classes", "modernbert_classes"] {
        let adapter = format!("{name}_peft");
        let written =
            written_again::<SequenceClassification>(name, &adapter, own.path(), |_| ()).unwrap();
        case(name, &adapter, written);
    }
    case("t5", "t5_peft", written_again::<Seq2SeqLm>("t5", "t5_peft", own.path(), |_| ()).unwrap());
}

/// Parts of a fused layer that were trained apart have blocks of their own.
#[test]
fn parts_trained_apart_are_written_in_blocks() {
    for name in DECODERS {
        let own = tempfile::tempdir().unwrap();
        // As training does, which changes each first matrix otherwise.
        let change = |fabric: &Fabric| {
            for (i, parameter) in fabric.module_tree().unwrap().parameters().iter().enumerate() {
                if parameter.fqn().ends_with(".lora_A.weight") {
                    let values = parameter.local().unwrap().values;
                    let other = (&values * (1.0 + 0.01 * i as f64)).unwrap();
                    values.slice_set(&other, 0, 0).unwrap();
                }
            }
            fabric.checkpoints().finish_load().unwrap();
        };
        let adapter = format!("{name}_peft");
        let written = written_again::<CausalLm>(name, &adapter, own.path(), change).unwrap();
        let (keys, parts) = (json(written.path()), if name == "phi3" { 2 } else { 3 });
        let ranks = keys["rank_pattern"].as_object().unwrap();
        let rank = keys["r"].as_u64().unwrap();
        assert!(ranks.values().any(|of| of.as_u64() == Some(parts * rank)), "{keys}");
        assert_eq!(ranks.len(), keys["alpha_pattern"].as_object().unwrap().len());

        // Merged, both compute the same.
        let inputs = ids(&tensors(name, "expected.safetensors")["input_ids"]);
        let base = checkpoint::open(fixture(name)).unwrap();
        let merged = MergedModel::new(&base, written.path()).unwrap();
        let layout = config(name).describe().unwrap().weights;
        let (fabric, module) = load::<CausalLm>(name, None, None, None).unwrap();
        let source = MappedSource::new(&merged, &layout).unwrap();
        checkpoint::load_into(&source, fabric.module_tree().unwrap(), false).unwrap();
        fabric.checkpoints().finish_load().unwrap();
        let (_fabric, own) =
            load::<CausalLm>(name, None, adapters(own.path()), Some(own.path())).unwrap();
        let expected = own.model().forward(&inputs).unwrap();
        assert_same(name, &module.model().forward(&inputs).unwrap(), &expected);
        // Ranks of a layer that differ from the others' cannot be trained further.
        let source = AdapterSource::open(written.path()).unwrap();
        assert!(source.adapters().unwrap_err().to_string().contains("`alpha_pattern`"));
    }
}

/// PEFT has one magnitude for each output of a fused layer.
#[test]
fn parts_without_their_neighbours_are_refused() {
    let own = tempfile::tempdir().unwrap();
    let dora = Adapters { dora: true, ..Adapters::new(["q_proj"]) };
    let (fabric, _) = load::<CausalLm>("gpt_neox", None, Some(dora), None).unwrap();
    fabric.checkpoints().save_adapter(own.path()).unwrap();
    let write = |base: Option<&Path>| {
        PeftAdapter::open(own.path(), base)?.write(&own.path().join("written"))
    };
    let error = write(Some(&fixture("gpt_neox"))).unwrap_err().to_string();
    assert!(error.contains("query_key_value.lora_magnitude_vector"), "{error}");
    let error = write(None).unwrap_err().to_string();
    assert!(error.contains("--base DIR"), "{error}");
    let plain = Adapters::new(["q_proj"]);
    let (fabric, _) = load::<CausalLm>("gpt_neox", None, Some(plain), None).unwrap();
    fabric.checkpoints().save_adapter(own.path()).unwrap();
    let written = write(Some(&fixture("gpt_neox"))).unwrap();
    assert!(written.layers > 0 && written.layers == written.fused, "{written:?}");
}
