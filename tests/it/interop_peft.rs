//! Adapters on a Hugging Face Llama: merged, and exchanged with PEFT. The ignored tests require a
//! Python with torch, transformers, peft and bitsandbytes: see `interop.rs`.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::interop::python;
use crate::program::fixture;
use candle_core::{DType, Device, Tensor};
use fulgurite::core::autograd::{no_grad, storage};
use fulgurite::core::checkpoint::tools::{AnyCheckpoint, ConvertOptions, ConvertTarget, convert};
use fulgurite::core::checkpoint::{FullOptions, ModelConfig};
use fulgurite::core::collective::{ProcessGroup, Solo};
use fulgurite::core::run::{AdapterConfig, AdapterTargets, QuantizationConfig, TrainerConfig};
use fulgurite::prelude::*;
use fulgurite_checkpoint_local::LocalDirectory;
use fulgurite_models::Decoder;
use fulgurite_transports::run_ranks;

fn base() -> PathBuf {
    fixture("hf_llama")
}

/// The fixture's model with these adapters.
pub(crate) fn model(
    world: Arc<dyn ProcessGroup>,
    strategy: &str,
    directory: &Path,
    adapters: Option<AdapterConfig>,
) -> Result<(Fabric, Decoder)> {
    let config = TrainerConfig { adapters, ..TrainerConfig::default() };
    configured(world, strategy, directory, config)
}

/// Like [`model`], with more settings.
fn configured(
    world: Arc<dyn ProcessGroup>,
    strategy: &str,
    directory: &Path,
    config: TrainerConfig,
) -> Result<(Fabric, Decoder)> {
    let strategy = fulgurite::core::config::PluginValue::new(strategy);
    let config = TrainerConfig { strategy, ..config };
    let mut fabric = Fabric::with_world(world, &config, 1, None)?;
    let mut config = fulgurite_models::ModelConfig::default();
    config.start_from(directory);
    let model = fabric.setup_module(|b| Decoder::new(&config.decoder()?, b))?;
    fabric.load_raw(directory, true)?;
    Ok((fabric, model))
}

pub(crate) fn expected(path: &Path) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(path, &Device::Cpu).unwrap()
}

/// The logits of this model and adapter on one device.
pub(crate) fn logits(directory: &Path, adapters: Option<AdapterConfig>) -> Tensor {
    let solo = Arc::new(Solo::new("world", 0));
    let (fabric, model) = model(solo, "single_device", directory, adapters).unwrap();
    let ids = expected(&base().join("expected.safetensors"))["input_ids"].clone();
    let (_no_grad, _scope) = (no_grad(), fabric.forward_scope(false, 0, 0));
    model.forward(&ids.to_dtype(DType::U32).unwrap()).unwrap()
}

pub(crate) fn assert_close(found: &Tensor, expected: &Tensor, tolerance: f64) {
    let values = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let (found, expected) = (values(found), values(expected));
    assert_eq!(found.len(), expected.len());
    let scale = expected.iter().fold(0f32, |scale, x| scale.max(x.abs()));
    for (a, b) in found.iter().zip(&expected) {
        assert!(f64::from((a - b).abs()) <= tolerance * f64::from(scale), "{a} and {b}");
    }
}

/// Trains adapters on two ranks of fsdp and saves them to the directory.
fn train(directory: &Path, dora: bool) {
    let targets: &[&str] = if dora { &["*_proj"] } else { &["*_proj", "embed_tokens"] };
    let adapters = AdapterConfig {
        targets: targets.iter().copied().collect(),
        rank: Some(4),
        alpha: Some(8.0),
        modules_to_save: vec!["lm_head".to_owned()],
        dora,
        ..AdapterConfig::default()
    };
    let config = TrainerConfig { adapters: Some(adapters), ..TrainerConfig::default() };
    train_with(&base(), &config, directory);
}

/// Like [`train`], with this base and these settings.
fn train_with(base: &Path, config: &TrainerConfig, directory: &Path) {
    let losses = run_ranks(2, |world| {
        let (fabric, model) = configured(world, "fsdp", base, config.clone())?;
        let mut optimizer = fabric.setup_optimizer(&AdamW { lr: 0.02, ..AdamW::default() })?;
        let expected = expected(&base.join("expected.safetensors"));
        let row = |name: &str, dtype: DType| {
            expected[name].narrow(0, fabric.global_rank(), 1)?.contiguous()?.to_dtype(dtype)
        };
        let (ids, targets) = (row("input_ids", DType::U32)?, row("targets", DType::I64)?);
        let mut losses = Vec::new();
        for _ in 0..8 {
            fabric.backward(&model.loss(&ids, &targets)?)?;
            losses.push(fabric.step_totals(&[])?.mean());
            optimizer.step()?;
        }
        fabric.checkpoints().save_adapter(directory)?;
        Ok(losses)
    });
    let losses = losses.unwrap().swap_remove(0);
    assert!(losses[7] < 0.8 * losses[0], "{losses:?}");
}

pub(crate) fn from(adapter: &Path) -> Option<AdapterConfig> {
    Some(AdapterConfig { from: Some(adapter.to_owned()), ..AdapterConfig::default() })
}

/// The base with the adapter merged, as a Hugging Face directory.
fn merge(adapter: &Path, into: &Path, name: &str) -> PathBuf {
    merged(&base(), adapter, into, name).unwrap()
}

/// Like [`merge`], with this base.
pub(crate) fn merged(base: &Path, adapter: &Path, into: &Path, name: &str) -> Result<PathBuf> {
    let options = ConvertOptions {
        adapter: Some(adapter.to_owned()),
        ..ConvertOptions::new(ConvertTarget::HuggingFace)
    };
    let input = AnyCheckpoint::open(base)?;
    Ok(convert(&input, &LocalDirectory::new(into), name, &options, &mut |_| {})?.path)
}

#[test]
fn merged_weights_match_base_and_adapter() {
    for dora in [false, true] {
        let temp = tempfile::tempdir().unwrap();
        let adapter = temp.path().join("adapter");
        train(&adapter, dora);
        let apart = logits(&base(), from(&adapter));
        let merged = merge(&adapter, temp.path(), "merged");
        assert_close(&logits(&merged, None), &apart, 1e-5);
        let plain = logits(&base(), None);
        let difference = (plain - apart).unwrap().abs().unwrap().max_all().unwrap();
        assert!(difference.to_scalar::<f32>().unwrap() > 0.01);
    }
}

/// `from_pretrained` loads after initialisation: DoRA magnitudes must match the loaded weights.
#[test]
fn untrained_dora_changes_nothing() {
    let targets = AdapterTargets::from_iter(["*_proj"]);
    let dora = AdapterConfig { targets, dora: true, ..AdapterConfig::default() };
    assert_close(&logits(&base(), Some(dora)), &logits(&base(), None), 1e-6);
}

/// A base loaded after an adapter keeps the head that was trained with the adapter.
#[test]
fn base_keeps_weights_trained_with_adapter() {
    let temp = tempfile::tempdir().unwrap();
    let adapter = temp.path().join("adapter");
    let head = Tensor::ones((67, 32), DType::F32, &Device::Cpu).unwrap();
    let with_head = AdapterConfig {
        targets: AdapterTargets::from_iter(["q_proj"]),
        modules_to_save: vec!["lm_head".to_owned()],
        ..AdapterConfig::default()
    };
    let solo = || Arc::new(Solo::new("world", 0));
    let (fabric, _) = model(solo(), "single_device", &base(), Some(with_head)).unwrap();
    fabric.checkpoints().save_adapter(&adapter).unwrap();
    let weight = |fabric: &Fabric| {
        let weight = fabric.module_tree().unwrap().parameter("lm_head.weight").unwrap().clone();
        weight.value().unwrap().copy().unwrap()
    };
    assert_close(&weight(&fabric), &base_head(), 0.0);
    let file = adapter.join("adapter_model.safetensors");
    let mut tensors = expected(&file);
    tensors.insert("base_model.model.lm_head.weight".to_owned(), head.clone());
    candle_core::safetensors::save(&tensors, &file).unwrap();
    let (by_config, _) = model(solo(), "single_device", &base(), from(&adapter)).unwrap();
    assert_close(&weight(&by_config), &head, 0.0);
    fabric.checkpoints().load_adapter(&adapter).unwrap();
    fabric.load_raw(base(), true).unwrap();
    assert_close(&weight(&fabric), &head, 0.0);
    // The same for a head trained since then.
    let trained = (&head * 2.0).unwrap();
    let parameter = fabric.module_tree().unwrap().parameter("lm_head.weight").unwrap().clone();
    let local = parameter.local().unwrap().values;
    storage::copy_from(&local, &trained.flatten_all().unwrap()).unwrap();
    fabric.load_raw(base(), true).unwrap();
    assert_close(&weight(&fabric), &trained, 0.0);
}

/// The head of the base.
fn base_head() -> Tensor {
    let (fabric, _) =
        model(Arc::new(Solo::new("world", 0)), "single_device", &base(), None).unwrap();
    let head = fabric.module_tree().unwrap().parameter("lm_head.weight").unwrap().clone();
    head.value().unwrap().copy().unwrap()
}

#[test]
fn magnitudes_of_an_embedding_are_refused() {
    let temp = tempfile::tempdir().unwrap();
    let adapter = temp.path().join("adapter");
    train(&adapter, false);
    let file = adapter.join("adapter_model.safetensors");
    let mut tensors = expected(&file);
    let name = "base_model.model.model.embed_tokens.lora_magnitude_vector";
    tensors.insert(name.to_owned(), Tensor::ones(4, DType::F32, &Device::Cpu).unwrap());
    candle_core::safetensors::save(&tensors, &file).unwrap();
    let options = ConvertOptions {
        adapter: Some(adapter),
        ..ConvertOptions::new(ConvertTarget::HuggingFace)
    };
    let input = AnyCheckpoint::open(base()).unwrap();
    let io = LocalDirectory::new(temp.path());
    let error = convert(&input, &io, "merged", &options, &mut |_| {}).map(drop).unwrap_err();
    let expected = "has magnitudes (DoRA) of the embedding `model.embed_tokens.weight`; only those of \
                    linear layers can be merged";
    assert!(error.to_string().contains(expected), "{error}");
}

#[test]
fn adapter_with_unsupported_options_is_refused() {
    let temp = tempfile::tempdir().unwrap();
    let write = |json: &str| std::fs::write(temp.path().join("adapter_config.json"), json).unwrap();
    let check = |json: &str, expected: &str| {
        write(json);
        let error = from(temp.path()).unwrap().adapters().unwrap_err().to_string();
        assert!(error.starts_with("`trainer.adapters.from`: "), "{error}");
        assert!(error.contains(expected), "{error}");
    };
    let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![1], &[0; 4]);
    let tensors = [("base_model.model.a.lora_A.weight", view.unwrap())];
    let bytes = safetensors::serialize(tensors, None).unwrap();
    std::fs::write(temp.path().join("adapter_model.safetensors"), bytes).unwrap();
    let with = |more: &str| format!(r#"{{"peft_type": "LORA", "r": 4, "lora_alpha": 8, {more}}}"#);
    check(&with(r#""target_modules": ["a"], "use_qalora": true"#), "sets `use_qalora`");
    check(&with(r#""target_modules": ["a"], "rank_pattern": {"a": 3}"#), "sets `rank_pattern`");
    let alphas =
        |pattern: &str| with(&format!(r#""target_modules": ["a"], "alpha_pattern": {pattern}"#));
    check(&alphas(r#"{"a": 3}"#), "`alpha_pattern`: the ranks or factors of its layers differ");
    check(&alphas(r#"{"a": "3", "b": 4}"#), "has `alpha_pattern` that is no table of numbers");
    check(&alphas("3"), "has `alpha_pattern` that is no table of numbers");
    check(&alphas(r#"{".*a": 3}"#), "has `.*a` in `alpha_pattern`");
    check(
        &with(r#""target_modules": ["a"], "some_new_key": "on""#),
        "sets `some_new_key` = \"on\"",
    );
    for init in ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "new"] {
        let json = with(&format!(r#""target_modules": ["a"], "init_lora_weights": "{init}""#));
        check(&json, &format!("sets `init_lora_weights` = \"{init}\""));
        check(&json, "path_initial_model_for_weight_conversion");
    }
    check(&with(r#""target_modules": ["a"], "bias": "some""#), "expected none, all or lora_only");
    let ia3 = r#"{"peft_type": "IA3", "r": 4, "lora_alpha": 8, "target_modules": ["a"]}"#;
    check(ia3, "only LORA can be loaded");
    check(r#"{"peft_type": "LORA"}"#, "is no configuration of a LoRA adapter");
    for init in ["true", "false", "null", r#""gaussian""#, r#""orthogonal""#, r#""eva""#] {
        write(&with(&format!(r#""target_modules": ["a"], "init_lora_weights": {init}"#)));
        assert!(from(temp.path()).unwrap().adapters().is_ok(), "{init}");
    }
    write(&with(r#""target_modules": ["a"], "use_dora": true"#));
    assert!(from(temp.path()).unwrap().adapters().unwrap().dora);
    write(&with(r#""target_modules": ["a"], "rank_pattern": {}"#));
    let plain = from(temp.path()).unwrap().adapters().unwrap();
    assert_eq!((plain.scale(), plain.dora), (2.0, false));
    let both = AdapterConfig { rank: Some(2), ..from(temp.path()).unwrap() };
    assert!(both.adapters().unwrap_err().to_string().contains("leave them out"));
}

#[test]
#[ignore = "needs a Python with transformers and peft"]
fn peft_reads_adapter_trained_by_fsdp() {
    for dora in [false, true] {
        peft_reads(dora);
    }
}

fn peft_reads(dora: bool) {
    let temp = tempfile::tempdir().unwrap();
    let adapter = temp.path().join("adapter");
    train(&adapter, dora);
    let ours = temp.path().join("ours.safetensors");
    let ids = expected(&base().join("expected.safetensors"))["input_ids"].clone();
    let tensors = HashMap::from([
        ("input_ids".to_owned(), ids),
        ("logits".to_owned(), logits(&base(), from(&adapter))),
    ]);
    candle_core::safetensors::save(&tensors, &ours).unwrap();
    python("peft_logits.py", &[&base(), &adapter, &ours]);
    let merged = merge(&adapter, temp.path(), "merged");
    python("transformers_logits.py", &[&merged, &ours]);
}

#[test]
#[ignore = "needs a Python with transformers and peft"]
fn peft_adapter_computes_the_same() {
    for kind in ["lora", "dora"] {
        let temp = tempfile::tempdir().unwrap();
        python("write_peft.py", &[&base(), temp.path(), Path::new(kind)]);
        let expected = expected(&temp.path().join("expected.safetensors"));
        let adapter = temp.path().join("adapter");
        assert_close(&logits(&base(), from(&adapter)), &expected["logits"], 1e-5);
        let merged = merge(&adapter, temp.path(), "merged");
        assert_close(&logits(&merged, None), &expected["logits"], 1e-5);
    }
}

/// QLoRA from end to end: base in four bits, adapters trained on two ranks. PEFT computes the same
/// on the dequantised base, and nearly the same on the base that bitsandbytes quantises.
#[test]
#[ignore = "needs a Python with transformers, peft and bitsandbytes"]
fn peft_matches_adapters_on_quantised_base() {
    let temp = tempfile::tempdir().unwrap();
    let (base, adapter) = (temp.path().join("base"), temp.path().join("adapter"));
    python("write_base.py", &[&base]);
    let quantized = || TrainerConfig {
        quantization: Some(QuantizationConfig::default()),
        ..TrainerConfig::default()
    };
    let adapters = AdapterConfig {
        targets: AdapterTargets::from_iter(["*_proj"]),
        rank: Some(4),
        alpha: Some(8.0),
        ..AdapterConfig::default()
    };
    train_with(&base, &TrainerConfig { adapters: Some(adapters), ..quantized() }, &adapter);

    let solo = || Arc::new(Solo::new("world", 0));
    let config = TrainerConfig { adapters: from(&adapter), ..quantized() };
    let (_fabric, model) = configured(solo(), "single_device", &base, config).unwrap();
    let ids = expected(&base.join("expected.safetensors"))["input_ids"].clone();
    let logits = {
        let _no_grad = no_grad();
        model.forward(&ids.to_dtype(DType::U32).unwrap()).unwrap()
    };
    let ours = temp.path().join("ours.safetensors");
    let tensors = HashMap::from([("input_ids".to_owned(), ids), ("logits".to_owned(), logits)]);
    candle_core::safetensors::save(&tensors, &ours).unwrap();

    // Save the four-bit base, dequantised, as a Hugging Face directory.
    let freeze = vec!["weight".to_owned()];
    let config = TrainerConfig { freeze, ..quantized() };
    let (fabric, _model) = configured(solo(), "single_device", &base, config).unwrap();
    let packed = temp.path().join("packed");
    fabric.save_full(&packed, None, &(), &FullOptions::default()).unwrap();
    let config = ModelConfig::from(base.join("config.json"));
    let options =
        ConvertOptions { config: Some(config), ..ConvertOptions::new(ConvertTarget::HuggingFace) };
    let input = AnyCheckpoint::open(&packed).unwrap();
    let place = LocalDirectory::new(temp.path());
    let unpacked = convert(&input, &place, "unpacked", &options, &mut |_| {}).unwrap().path;
    python("peft_logits.py", &[&unpacked, &adapter, &ours]);
    python("qlora_logits.py", &[&base, &adapter, &ours]);
}
