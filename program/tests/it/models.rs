//! `fulgurite fit` on the models of `fulgurite-models`.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// The largest difference between the losses of two meshes, relative to the loss.
const TOLERANCE: f64 = 1e-5;

pub(crate) fn root() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// Runs a program, which must succeed, and returns its stdout and stderr.
#[track_caller]
pub(crate) fn run(program: impl AsRef<OsStr>, args: &[String]) -> [String; 2] {
    let program = program.as_ref();
    let output = Command::new(program).args(args).env("OMP_NUM_THREADS", "1").output();
    let output = output.unwrap_or_else(|e| panic!("{}: {e}", program.display()));
    let said = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    assert!(output.status.success(), "{args:?}:\n{}\n{}", said[0], said[1]);
    said
}

/// The tiny models of `plugins/models/tests/fixtures` that predict the next token.
pub(crate) fn decoders() -> Vec<PathBuf> {
    let folder = root().join("plugins/models/tests/fixtures");
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let is_decoder = |path: &PathBuf| {
        let Ok(config) = fs::read(path.join("config.json")) else { return false };
        let config: Value = serde_json::from_slice(&config).unwrap();
        let class = config["architectures"][0].as_str().unwrap();
        ["ForCausalLM", "LMHeadModel"].iter().any(|end| class.ends_with(end))
    };
    let mut decoders: Vec<_> = entries.filter(is_decoder).collect();
    decoders.sort();
    assert!(decoders.len() >= 16, "{decoders:?}");
    decoders
}

/// Trains a decoder from its weights with `fulgurite fit`, and returns the loss of each step.
#[track_caller]
pub(crate) fn fit(decoder: &Path, scratch: &Path, sets: &[&str]) -> Vec<f64> {
    let tokens = scratch.join("tokens.bin");
    let ids = (0..400u16).flat_map(|i| (3 + i * 7 % 40).to_le_bytes());
    fs::write(&tokens, ids.collect::<Vec<u8>>()).unwrap();
    let own = [
        "module.type=causal_lm".to_owned(),
        format!("model.from_pretrained={}", decoder.display()),
        "data.type=tokens".to_owned(),
        format!("data.path={}", tokens.display()),
        "data.seq_len=8".to_owned(),
        format!("trainer.default_root_dir={}", scratch.display()),
        "trainer.loggers=[]".to_owned(),
    ];
    losses_of(scratch, own.iter().map(String::as_str).chain(sets.iter().copied()))
}

/// Runs `fulgurite fit` with these settings in a folder, and returns the loss of each step.
#[track_caller]
pub(crate) fn losses_of<'a>(dir: &Path, sets: impl Iterator<Item = &'a str>) -> Vec<f64> {
    let events = events_of(dir, sets);
    events.iter().filter_map(|event| event["train_loss"].as_f64()).collect()
}

/// Runs `fulgurite fit` with these settings in a folder, and returns its events.
#[track_caller]
pub(crate) fn events_of<'a>(dir: &Path, sets: impl Iterator<Item = &'a str>) -> Vec<Value> {
    let output = Command::new(env!("CARGO_BIN_EXE_fulgurite"))
        .args(["fit", "--output", "json"])
        .args(sets.flat_map(|set| ["--set", set]))
        .env("OMP_NUM_THREADS", "1")
        .current_dir(dir)
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    assert!(output.status.success(), "{}\n{}", said[0], said[1]);
    said[0].lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Meshes by their number of ranks, the samples of a rank, and the strategy.
const MESHES: [(usize, usize, &str); 6] = [
    (2, 1, "fsdp"),
    (2, 2, "{ type = 'model_parallel', tensor_parallel_size = 2, parallelize = 'hf' }"),
    (2, 2, "{ type = 'model_parallel', tensor_parallel_size = 2, parallelize = 'llama' }"),
    (
        2,
        2,
        "{ type = 'model_parallel', tensor_parallel_size = 2, \
         parallelize = { type = 'llama', sequence_parallel = true } }",
    ),
    (2, 2, "{ type = 'model_parallel', context_parallel_size = 2 }"),
    (4, 1, "{ type = 'model_parallel', tensor_parallel_size = 2, parallelize = 'llama' }"),
];

/// Trains on a mesh with these settings, and returns the loss of each of three steps.
#[track_caller]
fn losses(
    decoder: &Path,
    scratch: &Path,
    (ranks, samples, strategy): (usize, usize, &str),
    sets: &[&str],
) -> Vec<f64> {
    let own = [
        "trainer.max_steps=3".to_owned(),
        "scheduler=constant".to_owned(),
        format!("trainer.devices={ranks}"),
        format!("data.batch_size={samples}"),
        format!("trainer.strategy={strategy}"),
    ];
    let sets: Vec<&str> = own.iter().map(String::as_str).chain(sets.iter().copied()).collect();
    let losses = fit(decoder, scratch, &sets);
    assert_eq!(losses.len(), 3, "{}", decoder.display());
    losses
}

#[track_caller]
pub(crate) fn assert_close(what: &str, found: &[f64], expected: &[f64], tolerance: f64) {
    let close = |(a, b): (&f64, &f64)| (a - b).abs() <= tolerance * a.abs();
    let as_many = found.len() == expected.len();
    let all = expected.iter().zip(found).all(close);
    assert!(as_many && all, "{what}: {found:?}, expected {expected:?}");
}

const ALONE: (usize, usize, &str) = (1, 2, "single_device");

/// Whether layers of the decoder are mixtures of experts.
pub(crate) fn has_experts(decoder: &Path) -> bool {
    let config = fs::read_to_string(decoder.join("config.json")).unwrap();
    ["num_local_experts", "n_routed_experts", "\"num_experts\""]
        .iter()
        .any(|key| config.contains(key))
}

#[test]
fn meshes_train_every_decoder_as_one_device() {
    let scratch = tempfile::tempdir().unwrap();
    for decoder in decoders() {
        let alone = losses(&decoder, scratch.path(), ALONE, &[]);
        // Experts need whole sequences.
        let is_possible =
            |mesh: &(_, _, &str)| !(has_experts(&decoder) && mesh.2.contains("sequence_parallel"));
        for mesh in MESHES.into_iter().filter(is_possible) {
            let found = losses(&decoder, scratch.path(), mesh, &[]);
            assert_close(&format!("{} on {mesh:?}", decoder.display()), &found, &alone, TOLERANCE);
        }
    }
}

/// LoRA and QLoRA on two ranks, and bf16 beside f32.
#[test]
fn adapters_and_bf16_train_every_decoder() {
    let scratch = tempfile::tempdir().unwrap();
    let all = "trainer.adapters={ targets = ['*_proj'], rank = 2 }";
    let blocks = "trainer.quantization.block_size=4";
    let packed_without_experts =
        "trainer.quantization={ block_size = 4, exclude = ['lm_head', 'experts'] }";
    let linear = "trainer.adapters={ targets = 'all-linear', rank = 2 }";
    for decoder in decoders() {
        let what = |with: &str| format!("{} with {with}", decoder.display());
        // Layers without an end in common.
        let more = match decoder.file_name().unwrap().to_str().unwrap() {
            "qwen2_moe" => ", 'shared_expert_gate'",
            name if name.starts_with("deepseek") => ", 'kv_a_proj_with_mqa'",
            _ => "",
        };
        let without_experts = format!(
            "trainer.adapters={{ targets = ['*_proj'{more}], exclude = ['experts'], rank = 2 }}"
        );
        let (lora, packed) = match has_experts(&decoder) {
            true => (&*without_experts, packed_without_experts),
            false => (all, blocks),
        };
        let train = |mesh, sets: &[&str]| losses(&decoder, scratch.path(), mesh, sets);
        let whole = train(ALONE, &[]);
        for sets in [&[lora][..], &[lora, packed]] {
            let alone = train(ALONE, sets);
            assert!(alone[1..] != whole[1..], "{} trains all weights", decoder.display());
            assert_close(&what(sets[sets.len() - 1]), &train(MESHES[0], sets), &alone, TOLERANCE);
            let cuts_sequences = MESHES[3];
            if sets.len() == 1 && !has_experts(&decoder) {
                let found = train(cuts_sequences, sets);
                assert_close(&what("adapters of parts of a sequence"), &found, &alone, TOLERANCE);
            }
        }
        // All layers of a block are called so.
        let same = train(ALONE, &[linear]);
        assert_close(&what(linear), &same, &train(ALONE, &[lora]), 0.0);
        let half = train(ALONE, &["trainer.precision=bf16-mixed"]);
        assert_close(&what("bf16"), &half, &whole, 1e-2);
    }
}

/// Weights that are damaged or incomplete are refused before a rank starts, in one line.
#[test]
fn damaged_weights_are_refused() {
    let fixture = root().join("plugins/models/tests/fixtures/qwen3");
    let weights = fs::read(fixture.join("model.safetensors")).unwrap();
    let index = br#"{"metadata": {}, "weight_map": {"lm_head.weight": "model-1.safetensors"}}"#;
    for (file, bytes, expected) in [
        ("model.safetensors", &weights[..weights.len() / 2], "model.safetensors"),
        ("model.safetensors", &b"version https://git-lfs.github.com/spec/v1\n"[..], "Git LFS"),
        ("model.safetensors.index.json", &index[..], "model-1.safetensors"),
    ] {
        let temp = tempfile::tempdir().unwrap();
        fs::copy(fixture.join("config.json"), temp.path().join("config.json")).unwrap();
        fs::write(temp.path().join(file), bytes).unwrap();
        fs::write(temp.path().join("ids.bin"), [5u8, 0].repeat(100)).unwrap();
        let ids = temp.path().join("ids.bin");
        let output = Command::new(env!("CARGO_BIN_EXE_fulgurite"))
            .args(["fit", "--set", "trainer.devices=2", "--set", "data.type=tokens"])
            .args(["--set", &format!("model.from_pretrained={}", temp.path().display())])
            .args(["--set", &format!("data.path={}", ids.display()), "--set", "data.seq_len=8"])
            .current_dir(temp.path())
            .output()
            .unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && stderr.contains(expected), "{file}: {stderr}");
        assert!(stderr.lines().count() == 1 && !stderr.contains("rank "), "{file}: {stderr}");
    }
}

#[test]
fn modules_are_chosen_by_name() {
    for (set, expected) in [
        (
            "module.type=spiral",
            "there is no module \"spiral\"; the modules are causal_lm, text_generation, chat",
        ),
        ("module={ type = \"causal_lm\", depth = 3 }", "`module.depth`: unknown key"),
        ("model.type=bert", "needs: a decoder that continues texts"),
    ] {
        let mut args = vec!["config", "check", "--set", set];
        args.extend(["--set", "data.path=Cargo.toml"]);
        let output = Command::new(env!("CARGO_BIN_EXE_fulgurite"))
            .args(args)
            .current_dir(root())
            .output()
            .unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && stderr.contains(expected), "{set}: {stderr}");
    }
}
