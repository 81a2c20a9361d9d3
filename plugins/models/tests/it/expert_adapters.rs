//! Adapters of experts: on any mesh as on one device, and in the files of PEFT.

use std::path::Path;
use std::sync::Arc;

use candle_core::IndexOp as _;
use fulgurite::core::checkpoint::{self, AdapterSource, FullOptions, MergedModel, TensorSource};
use fulgurite::core::collective::{ProcessGroup, Solo};
use fulgurite::core::module::{Adapters, ModuleInit, Quantization};
use fulgurite::core::quantization::WeightFormat;
use fulgurite::prelude::*;
use fulgurite_models::{Decoder, MappedSource, ModelConfig};
use fulgurite_test_support::training::{init, strategy};
use fulgurite_transports::run_ranks;
use safetensors::Dtype;

use crate::fixtures::{assert_same, fixture, tensors};
use crate::transformers::{config, ids, single};

const ALONE: &str = r#"{"type": "single_device"}"#;
const ADAPTER: &str = "qwen3_moe_adapter";

/// A model with the weights of the directory and, in it, adapters. Those of a file have its values.
fn load(
    world: Arc<dyn ProcessGroup>,
    mesh: &str,
    config: ModelConfig,
    directory: &Path,
    adapters: Option<Adapters>,
    file: Option<&Path>,
) -> Result<(Fabric, Decoder)> {
    load_packed(world, mesh, config, directory, adapters, file, None)
}

/// [`load`], with frozen weights in a format.
fn load_packed(
    world: Arc<dyn ProcessGroup>,
    mesh: &str,
    mut config: ModelConfig,
    directory: &Path,
    adapters: Option<Adapters>,
    file: Option<&Path>,
    format: Option<WeightFormat>,
) -> Result<(Fabric, Decoder)> {
    let quantization = format.map(Quantization::new);
    let init = ModuleInit { adapters, quantization, ..init(mesh)? };
    let mut fabric = Fabric::new(world, strategy(mesh)?, init, 5)?;
    let (decoder, weights) = (config.decoder()?, config.describe()?.weights);
    let model = fabric.setup_module(|b| Decoder::new(&decoder, b))?;
    match directory.join("config.json").exists() {
        true => {
            let source = MappedSource::new(checkpoint::open(directory)?, &weights)?;
            checkpoint::load_into(&source, fabric.module_tree()?, false)?;
        }
        // A checkpoint of this test.
        false => {
            let source = checkpoint::open(directory)?;
            checkpoint::load_into(&*source, fabric.module_tree()?, false)?;
        }
    }
    fabric.checkpoints().finish_load()?;
    if let Some(file) = file {
        fabric.checkpoints().load_adapter(file)?;
    }
    Ok((fabric, model))
}

fn solo() -> Arc<dyn ProcessGroup> {
    Arc::new(Solo::new("world", 0))
}

/// The logits of `qwen3_moe` with the adapter in a directory.
fn logits(file: &Path, ids: &Tensor) -> Tensor {
    let base = fixture("qwen3_moe");
    let adapters = Some(AdapterSource::open(file).unwrap().adapters().unwrap());
    let (_fabric, model) =
        load(solo(), ALONE, config("qwen3_moe"), &base, adapters, Some(file)).unwrap();
    model.forward(ids).unwrap()
}

#[test]
fn adapters_of_peft_compute_as_there() {
    let expected = tensors(ADAPTER, "expected.safetensors");
    let ids = ids(&expected["input_ids"]);
    assert_same(ADAPTER, &logits(&fixture(ADAPTER), &ids), &expected["logits"]);

    // Merged into tensors of each expert.
    let base = checkpoint::open(fixture("qwen3_moe")).unwrap();
    let merged = MergedModel::new(&base, &fixture(ADAPTER)).unwrap();
    let (_fabric, model) = with_weights(&merged);
    assert_same("merged", &model.forward(&ids).unwrap(), &expected["logits"]);

    // Merged into stacks.
    let layout = config("qwen3_moe").describe().unwrap().weights;
    let stacks = MappedSource::new(&base, &layout).unwrap();
    let merged = MergedModel::new(&stacks, &fixture(ADAPTER)).unwrap();
    let (_fabric, model) = with_weights(&merged);
    assert_same("merged stacks", &model.forward(&ids).unwrap(), &expected["logits"]);
}

/// `qwen3_moe` with these weights.
fn with_weights(weights: &dyn TensorSource) -> (Fabric, Decoder) {
    let mut fabric = single();
    let mut config = config("qwen3_moe");
    let (decoder, layout) = (config.decoder().unwrap(), config.describe().unwrap().weights);
    let model = fabric.setup_module(|b| Decoder::new(&decoder, b)).unwrap();
    let weights = MappedSource::new(weights, &layout).unwrap();
    checkpoint::load_into(&weights, fabric.module_tree().unwrap(), true).unwrap();
    fabric.checkpoints().finish_load().unwrap();
    (fabric, model)
}

/// The losses of four steps of the experts' adapters, which are saved to the directory. Each of
/// `replicas` has a row of the fixture's batches, or both.
fn train(name: &str, ranks: [usize; 2], mesh: &str, into: &Path) -> Result<Vec<f64>> {
    train_packed(name, ranks, mesh, into, (&fixture(name), None))
}

/// [`train`], from the weights of a directory, in a format. With a format, saves a checkpoint of it
/// beside the adapters.
fn train_packed(
    name: &str,
    [ranks, replicas]: [usize; 2],
    mesh: &str,
    into: &Path,
    (base, format): (&Path, Option<WeightFormat>),
) -> Result<Vec<f64>> {
    let mut runs = run_ranks(ranks, |world| {
        let samples = 2 / replicas;
        let first = world.rank() * replicas / ranks * samples;
        let adapters = Adapters { rank: 2, alpha: 4.0, ..Adapters::new(["experts"]) };
        let (fabric, model) =
            load_packed(world, mesh, config(name), base, Some(adapters), None, format)?;
        if format.is_some() {
            fabric.save_full(into.join("packed"), None, &(), &FullOptions::default())?;
        }
        let mut optimizer = fabric.setup_optimizer(&AdamW { lr: 0.02, ..AdamW::default() })?;
        let batches = &tensors(name, "expected.safetensors")["train_ids"];
        let mut found = Vec::new();
        for step in 0..4 {
            let batch = batches.i(step)?;
            let own = |start| batch.narrow(1, start, 12)?.narrow(0, first, samples)?.contiguous();
            let (inputs, targets) = (ids(&own(0)?), own(1)?);
            let _scope = fabric.forward_scope(true, step as u64, first as u64);
            let loss = model.loss(&inputs, &targets)?;
            fabric.backward(&loss)?;
            found.push(fabric.step_totals(&[])?.mean());
            optimizer.step()?;
        }
        fabric.checkpoints().save_adapter(into)?;
        Ok(found)
    })?;
    Ok(runs.swap_remove(0))
}

/// Meshes that train a model's experts: `first` on two ranks, and others. Ranks, and how many of
/// them have batches of their own.
fn meshes(name: &str, first: &'static str) -> Vec<([usize; 2], &'static str)> {
    let mut meshes = vec![
        ([2, 2], first),
        ([2, 2], r#"{"type": "fsdp", "activation_checkpointing": "full"}"#),
        ([2, 1], r#"{"type": "model_parallel", "tensor_parallel_size": 2}"#),
    ];
    // The others have 5 and 7 experts.
    if ["deepseek_v3", "gpt_oss"].contains(&name) {
        let divided = r#"{"type": "model_parallel", "data_parallel_shard_size": 2,
            "tensor_parallel_size": 1, "expert_parallel_size": 2}"#;
        meshes.push(([2, 2], divided));
    }
    meshes
}

/// Asserts that training has changed the adapters of each projection, which start without effect.
#[track_caller]
fn assert_changed(dir: &Path) {
    let file = dir.join("adapter_model.safetensors");
    let tensors = candle_core::safetensors::load(file, &Device::Cpu).unwrap();
    for projection in ["gate_proj", "up_proj", "down_proj"] {
        let suffix = format!("{projection}.lora_B.weight");
        let trained = tensors.iter().filter(|(name, _)| name.ends_with(&suffix));
        let largest = trained
            .map(|(_, b)| b.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap())
            .fold(0.0, f32::max);
        assert!(largest > 0.0, "{projection} in {}", dir.display());
    }
}

#[test]
fn ranks_train_adapters_as_one_device() {
    let temp = tempfile::tempdir().unwrap();
    for name in ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"] {
        let alone_dir = temp.path().join(name);
        let alone = train(name, [1, 1], ALONE, &alone_dir).unwrap();
        assert_changed(&alone_dir);
        let names = |dir: &Path| {
            let source = AdapterSource::open(dir).unwrap();
            source.names().into_iter().map(str::to_owned).collect::<Vec<_>>()
        };
        for (ranks, mesh) in meshes(name, r#"{"type": "ddp"}"#) {
            let dir = temp.path().join("other");
            let found = train(name, ranks, mesh, &dir).unwrap();
            for (a, b) in found.iter().zip(&alone) {
                assert!((a - b).abs() < 2e-5 * b.abs(), "{name}, {mesh}: {found:?}, {alone:?}");
            }
            assert_eq!(names(&dir), names(&alone_dir));
            assert_changed(&dir);
        }
    }
}

/// Beside experts in four and in eight bits. The same training beside the unpacked values, which
/// the checkpoint gives a model without quantisation, has the same bits.
#[test]
fn quantised_experts_compute_as_unpacked_ones() {
    let temp = tempfile::tempdir().unwrap();
    for (name, format) in [
        ("mixtral", WeightFormat::Nf4 { block_size: 4 }),
        ("qwen3_moe", WeightFormat::Int8),
        ("deepseek_v3", WeightFormat::Nf4 { block_size: 2 }),
        ("gpt_oss", WeightFormat::Nf4 { block_size: 2 }),
    ] {
        let base = fixture(name);
        let dir = temp.path().join(name);
        let alone = train_packed(name, [1, 1], ALONE, &dir, (&base, Some(format))).unwrap();
        assert_changed(&dir);
        let other = temp.path().join("other");
        assert_ne!(alone, train(name, [1, 1], ALONE, &other).unwrap(), "{name} is not packed");
        let unpacked =
            train_packed(name, [1, 1], ALONE, &other, (&dir.join("packed"), None)).unwrap();
        assert_eq!(alone, unpacked, "{name} in {format:?}");
        for (ranks, mesh) in meshes(name, r#"{"type": "fsdp"}"#) {
            let other = temp.path().join("meshed");
            let found = train_packed(name, ranks, mesh, &other, (&base, Some(format))).unwrap();
            for (a, b) in found.iter().zip(&alone) {
                assert!((a - b).abs() < 2e-5 * b.abs(), "{name}, {mesh}: {found:?}, {alone:?}");
            }
            // Rows have their codes on every mesh.
            let codes = |dir: &Path| {
                let source = checkpoint::open(dir.join("packed")).unwrap();
                let packed = source.names().into_iter().filter(|name| name.contains("experts"));
                let packed = packed.filter(|name| source.info(name).unwrap().dtype == Dtype::U8);
                packed.map(|name| (name.to_owned(), source.read_stored(name).unwrap())).collect()
            };
            let (of_mesh, of_alone): (Codes, Codes) = (codes(&other), codes(&dir));
            assert!(of_mesh == of_alone && of_alone.len() >= 3, "{name}, {mesh}");
            std::fs::remove_dir_all(&other).unwrap();
        }
        std::fs::remove_dir_all(&other).unwrap();
    }
}

/// The codes of weights by name.
type Codes = std::collections::BTreeMap<String, Vec<u8>>;

#[test]
fn saved_adapters_start_again_to_the_bit() {
    let temp = tempfile::tempdir().unwrap();
    let saved = temp.path().join("saved");
    train("qwen3_moe", [2, 2], r#"{"type": "fsdp"}"#, &saved).unwrap();
    let source = AdapterSource::open(&saved).unwrap();
    let name = "model.layers.0.mlp.experts.6.gate_proj.lora_A.weight";
    assert_eq!(source.info(name).unwrap().shape[0], 2);
    let again = temp.path().join("again");
    let adapters = Some(source.adapters().unwrap());
    let (fabric, _model) =
        load(solo(), ALONE, config("qwen3_moe"), &fixture("qwen3_moe"), adapters, Some(&saved))
            .unwrap();
    fabric.checkpoints().save_adapter(&again).unwrap();
    for file in ["adapter_model.safetensors", "adapter_config.json"] {
        let read = |dir: &Path| std::fs::read(dir.join(file)).unwrap();
        assert!(read(&saved) == read(&again), "{file} differs");
    }
}

#[test]
fn incomplete_adapters_of_experts_are_named() {
    let temp = tempfile::tempdir().unwrap();
    let mut weights = tensors(ADAPTER, "adapter_model.safetensors");
    let lacking = "model.layers.0.mlp.experts.3.up_proj";
    weights.remove(&format!("base_model.model.{lacking}.lora_A.weight"));
    candle_core::safetensors::save(&weights, temp.path().join("adapter_model.safetensors"))
        .unwrap();
    std::fs::copy(
        fixture(ADAPTER).join("adapter_config.json"),
        temp.path().join("adapter_config.json"),
    )
    .unwrap();
    let adapters = AdapterSource::open(temp.path()).unwrap().adapters().unwrap();
    let base = fixture("qwen3_moe");
    let error = load(solo(), ALONE, config("qwen3_moe"), &base, Some(adapters), Some(temp.path()));
    let error = error.err().unwrap().to_string();
    assert!(
        error.contains("experts.4.up_proj.lora_A.weight`, and no such tensor of expert 3"),
        "{error}"
    );
}

#[test]
fn stacks_take_plain_adapters_alone() {
    let temp = tempfile::tempdir().unwrap();
    let mut weights = tensors(ADAPTER, "adapter_model.safetensors");
    let layers: Vec<String> = weights
        .keys()
        .filter_map(|name| name.strip_suffix(".lora_A.weight").map(str::to_owned))
        .collect();
    for layer in layers {
        let outputs = weights[&format!("{layer}.lora_B.weight")].dim(0).unwrap();
        let ones = Tensor::ones(outputs, DType::F32, &Device::Cpu).unwrap();
        weights.insert(format!("{layer}.lora_magnitude_vector"), ones);
    }
    candle_core::safetensors::save(&weights, temp.path().join("adapter_model.safetensors"))
        .unwrap();
    let file = std::fs::read(fixture(ADAPTER).join("adapter_config.json")).unwrap();
    let mut keys: serde_json::Value = serde_json::from_slice(&file).unwrap();
    keys["use_dora"] = true.into();
    std::fs::write(temp.path().join("adapter_config.json"), keys.to_string()).unwrap();
    let layout = config("qwen3_moe").describe().unwrap().weights;
    let base = checkpoint::open(fixture("qwen3_moe")).unwrap();
    let stacks = MappedSource::new(&base, &layout).unwrap();
    let error = MergedModel::new(&stacks, temp.path()).err().unwrap().to_string();
    assert!(error.contains("only plain LoRA can be merged"), "{error}");
}
