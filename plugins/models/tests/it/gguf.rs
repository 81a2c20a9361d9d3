//! GGUF files against what llama.cpp's own converter writes (`fixtures/make_gguf_record.py`).

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::path::Path;

use candle_core::quantized::gguf_file::{Content, Value};
use fulgurite::core::checkpoint;
use fulgurite::prelude::*;
use fulgurite_models::{GgufAdapter, GgufDtype, GgufModel, GgufOptions, GgufWritten};
use serde_json::{Value as Json, json};
use tempfile::TempDir;

use crate::fixtures::fixture;

fn record() -> Json {
    let text = fs::read_to_string(fixture("gguf.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// A copy of a fixture with changes to its `config.json`; `null` takes a key out of it.
fn changed(name: &str, changes: &Json) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::copy(fixture(name).join("model.safetensors"), dir.path().join("model.safetensors"))
        .unwrap();
    let text = fs::read_to_string(fixture(name).join("config.json")).unwrap();
    let mut config: Json = serde_json::from_str(&text).unwrap();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    write_json(&dir.path().join("config.json"), &config);
    dir
}

fn write_json(path: &Path, value: &Json) {
    fs::write(path, serde_json::to_vec(value).unwrap()).unwrap();
}

fn options(dtype: GgufDtype) -> GgufOptions {
    GgufOptions { dtype: Some(dtype), name: None, without_tokenizer: true }
}

/// Writes the model of a directory to `model.gguf` in it.
fn write(dir: &Path, options: GgufOptions) -> Result<GgufWritten> {
    let model = GgufModel::of_directory(dir, options)?;
    let weights = checkpoint::open(dir)?;
    model.write(&*model.named(&weights)?, &dir.join("model.gguf"), &mut |_| {})
}

/// A GGUF file, read by candle.
struct Read {
    content: Content,
    bytes: Vec<u8>,
}

impl Read {
    fn new(path: &Path) -> Self {
        let content = Content::read(&mut File::open(path).unwrap()).unwrap();
        Self { content, bytes: fs::read(path).unwrap() }
    }

    /// Type, shape and bytes of a tensor.
    fn tensor(&self, name: &str) -> (String, Vec<usize>, &[u8]) {
        let info = &self.content.tensor_infos[name];
        let start = (self.content.tensor_data_offset + info.offset) as usize;
        let dtype = info.ggml_dtype;
        let len = info.shape.elem_count() / dtype.block_size() * dtype.type_size();
        assert_eq!(start % 32, 0, "{name}");
        (format!("{dtype:?}"), info.shape.dims().to_vec(), &self.bytes[start..start + len])
    }

    fn values(&self, name: &str) -> Vec<f32> {
        let tensor = self.content.tensor(&mut self.reader(), name, &Device::Cpu).unwrap();
        tensor.dequantize(&Device::Cpu).unwrap().flatten_all().unwrap().to_vec1().unwrap()
    }

    fn reader(&self) -> std::io::Cursor<&[u8]> {
        std::io::Cursor::new(self.bytes.as_slice())
    }
}

fn fnv(bytes: &[u8]) -> String {
    let step = |digest: u64, byte: &u8| (digest ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    format!("{:016x}", bytes.iter().fold(0xcbf2_9ce4_8422_2325, step))
}

/// Asserts that a value of the metadata is the recorded one.
#[track_caller]
fn assert_value(what: &str, found: Option<&Value>, expected: &Json) {
    let same = match (found, expected) {
        (Some(Value::U32(x)), Json::Number(y)) => y.as_u64() == Some(u64::from(*x)),
        (Some(Value::I32(x)), Json::Number(y)) => y.as_i64() == Some(i64::from(*x)),
        (Some(Value::F32(x)), Json::Number(y)) => {
            let y = y.as_f64().unwrap();
            (f64::from(*x) - y).abs() <= 1e-6 * y.abs()
        }
        (Some(Value::Bool(x)), Json::Bool(y)) => x == y,
        (Some(Value::String(x)), Json::String(y)) => x == y,
        (Some(Value::Array(x)), Json::Array(y)) => {
            assert_eq!(x.len(), y.len(), "{what}");
            for (i, (x, y)) in x.iter().zip(y).enumerate() {
                assert_value(&format!("{what}[{i}]"), Some(x), y);
            }
            true
        }
        _ => false,
    };
    assert!(same, "{what}: found {found:?}, expected {expected}");
}

#[test]
fn files_equal_those_of_llama_cpp() {
    let record = record();
    let models = record["models"].as_object().unwrap();
    assert_eq!(models.len(), 15);
    for (name, case) in models {
        let dir = changed(case["fixture"].as_str().unwrap(), &case["changes"]);
        for (dtype, kind) in [(GgufDtype::F32, "f32"), (GgufDtype::F16, "f16")] {
            let written = write(dir.path(), options(dtype)).unwrap();
            assert_eq!(written.architecture, metadata_prefix(&case["metadata"]), "{name}");
            let read = Read::new(&dir.path().join("model.gguf"));
            for (key, value) in case["metadata"].as_object().unwrap() {
                assert_value(&format!("{name}: {key}"), read.content.metadata.get(key), value);
            }
            let expected = case["tensors"][kind].as_object().unwrap();
            let mut found: Vec<&String> = read.content.tensor_infos.keys().collect();
            found.sort();
            if name == "gpt_neox_sequential" {
                // llama.cpp's reader asks for it, and its converter leaves it out if it is tied.
                found.retain(|tensor| *tensor != "output.weight");
                let [head, embedding] = ["output.weight", "token_embd.weight"];
                assert_eq!(read.tensor(head), read.tensor(embedding));
            }
            let mut names: Vec<&String> = expected.keys().collect();
            names.sort();
            assert_eq!(found, names, "{name}");
            for (tensor, expected) in expected {
                let what = format!("{name}: {kind}: {tensor}");
                let (dtype, shape, bytes) = read.tensor(tensor);
                assert_eq!(dtype, expected["type"], "{what}");
                assert_eq!(json!(shape), expected["shape"], "{what}");
                match expected.get("values") {
                    None => assert_eq!(fnv(bytes), expected["fnv"], "{what}"),
                    Some(values) => {
                        let values = values.as_array().unwrap();
                        for (x, y) in read.values(tensor).into_iter().zip(values) {
                            let y = y.as_f64().unwrap();
                            assert!((f64::from(x) - y).abs() <= 2e-6 * y.abs(), "{what}: {x}, {y}");
                        }
                    }
                }
            }
        }
    }
}

fn metadata_prefix(metadata: &Json) -> &str {
    metadata.as_object().unwrap().keys().next().unwrap().split_once('.').unwrap().0
}

/// A directory with a tokenizer of the fixtures, and a model of its vocabulary.
fn with_tokenizer(name: &str, config: &Json) -> TempDir {
    let kind = match config["model_type"].as_str().unwrap() {
        "gemma" => "gemma",
        "mistral" => "mistral",
        _ => "llama",
    };
    let dir = changed(kind, config);
    for entry in fs::read_dir(fixture("tokenizers").join(name)).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    let file = dir.path().join("model.safetensors");
    let mut tensors = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
    let size = config["vocab_size"].as_u64().unwrap() as usize;
    for (name, tensor) in &mut tensors {
        if name.contains("embed_tokens") || name.contains("lm_head") {
            *tensor = Tensor::zeros((size, 24), DType::F32, &Device::Cpu).unwrap();
        }
    }
    candle_core::safetensors::save(&tensors, file).unwrap();
    dir
}

#[test]
fn tokenizers_equal_those_of_llama_cpp() {
    let record = record();
    for (name, case) in record["tokenizers"].as_object().unwrap() {
        let dir = with_tokenizer(name, &case["config"]);
        write(dir.path(), GgufOptions::default()).unwrap();
        let read = Read::new(&dir.path().join("model.gguf"));
        let metadata = &read.content.metadata;
        let expected = case["metadata"].as_object().unwrap();
        for (key, value) in expected {
            let what = format!("{name}: {key}");
            match (name.as_str(), key.as_str()) {
                // Readers of decoders take no separators, and 107 is Gemma's own.
                (_, "tokenizer.ggml.add_sep_token" | "tokenizer.ggml.eot_token_id") => {}
                // llama.cpp's converter gives all pieces one score, and leaves the rest out.
                ("pieces", "tokenizer.ggml.scores") => {}
                ("pieces", "tokenizer.ggml.tokens" | "tokenizer.ggml.token_type") => {
                    let found = metadata[key].to_vec().unwrap();
                    let value = value.as_array().unwrap();
                    for (id, (found, value)) in found.iter().zip(value).enumerate().skip(1) {
                        assert_value(&format!("{what}[{id}]"), Some(found), value);
                    }
                    assert_eq!(found.len() as u64, case["vocab_size"].as_u64().unwrap(), "{what}");
                }
                _ => assert_value(&what, metadata.get(key), value),
            }
        }
    }
}

/// The merges of `tokenizer.json` order pieces as the recorded scores of `tokenizer.model` do.
#[test]
fn merges_have_the_order_of_scores() {
    let record = record();
    let scores = |name: &str| -> Vec<(String, f32)> {
        let config = &record["tokenizers"][name]["config"];
        let dir = with_tokenizer(name, config);
        if name == "sentencepiece" {
            // Its tokenizer.json has the merges that were made of the scores.
            fs::remove_file(dir.path().join("tokenizer.model")).unwrap();
        }
        write(dir.path(), GgufOptions::default()).unwrap();
        let read = Read::new(&dir.path().join("model.gguf"));
        let list = |key: &str| read.content.metadata[key].to_vec().unwrap().clone();
        let (texts, scores) = (list("tokenizer.ggml.tokens"), list("tokenizer.ggml.scores"));
        let pair = |(text, score): (Value, Value)| {
            (text.to_string().unwrap().clone(), score.to_f32().unwrap())
        };
        texts.into_iter().zip(scores).map(pair).collect()
    };
    let found = scores("sentencepiece");
    let recorded = record["tokenizers"]["sentencepiece"]["metadata"].clone();
    let recorded = recorded["tokenizer.ggml.scores"].as_array().unwrap();
    // Pieces of several characters are joined in the order of their scores.
    let mut joined: Vec<(f64, f32)> = Vec::new();
    for ((text, score), recorded) in found.iter().zip(recorded) {
        if text.chars().count() > 1 && !text.starts_with(['<', '[']) {
            joined.push((recorded.as_f64().unwrap(), *score));
        }
    }
    assert!(joined.len() > 50);
    joined.sort_by(|a, b| b.0.total_cmp(&a.0));
    assert!(joined.windows(2).all(|pair| pair[0].1 > pair[1].1), "{joined:?}");
    assert!(scores("pieces").iter().any(|(_, score)| *score < -50.0));
}

/// A Llama with rows of 256 elements, a bit of noise, and one large value in each row.
fn wide() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let config = json!({
        "model_type": "llama", "vocab_size": 32, "hidden_size": 256, "intermediate_size": 96,
        "num_hidden_layers": 1, "num_attention_heads": 4, "rms_norm_eps": 1e-5,
    });
    write_json(&dir.path().join("config.json"), &config);
    let layer = |name: &str| format!("model.layers.0.{name}.weight");
    let mut shapes: Vec<(String, Vec<usize>)> = vec![
        ("model.embed_tokens.weight".to_owned(), vec![32, 256]),
        ("lm_head.weight".to_owned(), vec![32, 256]),
        ("model.norm.weight".to_owned(), vec![256]),
        (layer("mlp.down_proj"), vec![256, 96]),
    ];
    for name in ["q_proj", "k_proj", "v_proj", "o_proj"] {
        shapes.push((layer(&format!("self_attn.{name}")), vec![256, 256]));
    }
    for name in ["gate_proj", "up_proj"] {
        shapes.push((layer(&format!("mlp.{name}")), vec![96, 256]));
    }
    for name in ["input_layernorm", "post_attention_layernorm"] {
        shapes.push((layer(name), vec![256]));
    }
    let tensors: HashMap<String, Tensor> = shapes
        .into_iter()
        .enumerate()
        .map(|(seed, (name, shape))| {
            let value = |i: usize| {
                let noise = ((i * 7919 + seed * 104_729) % 1009) as f32 / 1009.0 - 0.5;
                if i % 256 == 17 { 3.0 } else { noise }
            };
            let values: Vec<f32> = (0..shape.iter().product()).map(value).collect();
            (name, Tensor::from_vec(values, shape, &Device::Cpu).unwrap())
        })
        .collect();
    candle_core::safetensors::save(&tensors, dir.path().join("model.safetensors")).unwrap();
    dir
}

#[test]
fn quantised_values_stay_near() {
    let dir = wide();
    let read = |dtype| {
        let written = write(dir.path(), options(dtype)).unwrap();
        (Read::new(&dir.path().join("model.gguf")), written)
    };
    let (exact, plain) = read(GgufDtype::F32);
    assert_eq!(plain.notes.len(), 1, "{:?}", plain.notes);
    let (q8, written) = read(GgufDtype::Q8_0);
    assert_eq!(written.notes.len(), 1, "{:?}", written.notes);
    let (q4, written) = read(GgufDtype::Q4K);
    // `ffn_down` has rows of 96.
    let note = "1 of 9 matrices have rows that q4_k cannot hold, such as `blk.0.ffn_down.weight`, which is q5_0";
    assert_eq!(written.notes[1], note);
    let kinds: BTreeMap<&str, &str> = BTreeMap::from([
        ("token_embd.weight", "Q4K"),
        ("output.weight", "Q6K"),
        ("blk.0.attn_q.weight", "Q4K"),
        ("blk.0.ffn_down.weight", "Q5_0"),
        ("output_norm.weight", "F32"),
    ]);
    for (name, kind) in kinds {
        let (found, shape, _) = q4.tensor(name);
        assert_eq!(found, kind, "{name}");
        assert_eq!(q8.tensor(name).0, if shape.len() == 1 { "F32" } else { "Q8_0" }, "{name}");
        let values = exact.values(name);
        // Half a step: of 254 steps of blocks of 32, and of 15, 63 or 31 between least and largest.
        let error = |found: &[f32], block: usize, steps: f32| {
            let mut largest = 0_f32;
            for (found, exact) in found.chunks(block).zip(values.chunks(block)) {
                let ends = |f: fn(f32, f32) -> f32| exact.iter().copied().fold(0.0, f);
                let step = (ends(f32::max) - ends(f32::min)) / steps;
                for (x, y) in found.iter().zip(exact) {
                    largest = largest.max((x - y).abs() / step);
                }
            }
            largest
        };
        if shape.len() == 1 {
            assert_eq!(q4.values(name), values, "{name}");
            continue;
        }
        let eight = error(&q8.values(name), 32, 127.0);
        assert!(eight <= 0.51, "{name}: {eight}");
        assert!(eight > 0.1, "{name}: {eight}");
        // The scales of small blocks are rounded, too, most beside a large value.
        let (steps, most) = if kind == "Q6K" { (63.0, 2.0) } else { (15.0, 1.2) };
        let four = error(&q4.values(name), 32, steps);
        assert!((0.1..=most).contains(&four), "{name}: {four}");
    }
}

#[test]
fn weights_choose_the_default_type() {
    let dir = wide();
    let file = dir.path().join("model.safetensors");
    let tensors = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
    for (dtype, kind) in [(DType::F32, "F32"), (DType::F16, "F16"), (DType::BF16, "BF16")] {
        let cast =
            |(name, tensor): (&String, &Tensor)| (name.clone(), tensor.to_dtype(dtype).unwrap());
        let tensors: HashMap<String, Tensor> = tensors.iter().map(cast).collect();
        candle_core::safetensors::save(&tensors, &file).unwrap();
        let options = GgufOptions { without_tokenizer: true, ..GgufOptions::default() };
        write(dir.path(), options).unwrap();
        let read = Read::new(&dir.path().join("model.gguf"));
        assert_eq!(read.tensor("blk.0.ffn_up.weight").0, kind);
        assert_eq!(read.tensor("output_norm.weight").0, "F32");
        let (_, _, bytes) = read.tensor("blk.0.ffn_up.weight");
        let expected = tensors["model.layers.0.mlp.up_proj.weight"].to_dtype(DType::F32).unwrap();
        let expected: Vec<f32> = expected.flatten_all().unwrap().to_vec1().unwrap();
        assert_eq!(read.values("blk.0.ffn_up.weight"), expected);
        assert_eq!(bytes.len(), 96 * 256 * dtype.size_in_bytes());
    }
}

#[test]
fn context_is_limited_where_both_agree() {
    let length = |name: &str, changes: Json| {
        let dir = changed(name, &changes);
        let written = write(dir.path(), options(GgufDtype::F32)).unwrap();
        let read = Read::new(&dir.path().join("model.gguf"));
        let key = format!("{}.context_length", written.architecture);
        let mut notes = written.notes;
        notes.pop();
        (read.content.metadata[&key].to_u32().unwrap(), notes.pop().unwrap_or_default())
    };
    let (limited, note) = length("mistral", json!({}));
    assert_eq!(limited, 5);
    assert!(note.contains("5 of 64 tokens") && note.contains("sliding_window"), "{note}");
    assert_eq!(length("mistral", json!({ "sliding_window": 64 })), (64, String::new()));
    let (limited, note) = length("llama_dynamic", json!({}));
    assert_eq!(limited, 8);
    assert!(note.contains("dynamic"), "{note}");
    // Gemma's windows are in the file.
    assert_eq!(length("gemma2", json!({ "query_pre_attn_scalar": 8 })).0, 64);
}

#[test]
fn models_beyond_llama_cpp_are_refused() {
    let cases = [
        ("gemma2", json!({}), "`query_pre_attn_scalar`"),
        (
            "gemma2",
            json!({ "query_pre_attn_scalar": 8, "final_logit_softcapping": null }),
            "`final_logit_softcapping`",
        ),
        (
            "gemma3_text",
            json!({ "query_pre_attn_scalar": 8, "sliding_window": null }),
            "`sliding_window`",
        ),
        ("gpt2", json!({}), "`scale_attn_by_inverse_layer_idx`"),
        ("smollm3", json!({}), "`no_rope_layers`"),
        ("qwen3", json!({ "attention_bias": true }), "`attention_bias`"),
        ("gpt_neox", json!({ "attention_bias": false }), "`attention_bias`"),
        ("llama", json!({ "hidden_act": "gelu" }), "`hidden_act`"),
        (
            "qwen2",
            json!({ "sliding_window": null, "rope_parameters": { "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8 } }),
            "\"llama3\"",
        ),
        (
            "llama_yarn",
            json!({ "rope_parameters": { "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 16.0 } }),
            "beta_fast",
        ),
        ("llama_classes", json!({}), "`lm_head.weight`"),
        ("bert_masked", json!({}), "of another kind"),
        ("t5", json!({}), "of another kind"),
        ("llama", json!({ "intermediate_size": 40 }), "config.json describes"),
    ];
    for (name, changes, expected) in cases {
        let dir = changed(name, &changes);
        let error = write(dir.path(), options(GgufDtype::F32)).unwrap_err().to_string();
        assert!(error.contains(expected), "{name}: {error}");
        assert!(!dir.path().join("model.gguf").exists(), "{name}");
    }
}

#[test]
fn missing_or_foreign_tokenizers_are_refused() {
    let record = record();
    let config = &record["tokenizers"]["byte_level"]["config"];
    let dir = with_tokenizer("byte_level", config);
    let file = dir.path().join("tokenizer.json");
    let json: Json = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let fails = |change: &dyn Fn(&mut Json), expected: &str| {
        let mut json = json.clone();
        change(&mut json);
        write_json(&file, &json);
        let error = write(dir.path(), GgufOptions::default()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    fails(&|json| json["model"]["type"] = "Unigram".into(), "Unigram");
    fails(&|json| json["pre_tokenizer"] = Json::Null, "no pre-tokenizer");
    fails(&|json| json["normalizer"] = json!({ "type": "Lowercase" }), "Lowercase");
    fails(&|json| json["model"]["merges"][0] = json!(7), "`model.merges`");
    fails(&|json| json["model"]["vocab"]["x"] = json!(5), "the id 5");
    fails(&|json| json["added_tokens"][0]["id"] = json!(9999), "`vocab_size` is 348");
    fs::write(&file, "{").unwrap();
    let error = write(dir.path(), GgufOptions::default()).unwrap_err().to_string();
    assert!(error.contains("tokenizer.json"), "{error}");
    fs::remove_file(&file).unwrap();
    let error = write(dir.path(), GgufOptions::default()).unwrap_err().to_string();
    assert!(error.contains("no tokenizer") && error.contains("--without-tokenizer"), "{error}");
    fs::write(dir.path().join("tokenizer.model"), b"\x0a\xff").unwrap();
    let error = write(dir.path(), GgufOptions::default()).unwrap_err().to_string();
    assert!(error.contains("tokenizer.model"), "{error}");
}

/// Writes an adapter in PEFT's format for these layers, each of rank 2 and of these sizes.
fn adapter(dir: &Path, config: &Json, layers: &[(&str, usize, usize)]) {
    fs::create_dir_all(dir).unwrap();
    write_json(&dir.join("adapter_config.json"), config);
    let mut tensors = HashMap::new();
    for (i, (layer, rows, columns)) in layers.iter().enumerate() {
        let matrix = |rows: usize, columns: usize, seed: usize| {
            let values = (0..rows * columns).map(|k| ((k * 31 + seed) % 17) as f32 / 17.0 - 0.5);
            Tensor::from_vec(values.collect::<Vec<_>>(), (rows, columns), &Device::Cpu).unwrap()
        };
        let name = |kind: &str| format!("base_model.model.{layer}.lora_{kind}.weight");
        tensors.insert(name("A"), matrix(2, *columns, i));
        tensors.insert(name("B"), matrix(*rows, 2, i + 5));
    }
    candle_core::safetensors::save(&tensors, dir.join("adapter_model.safetensors")).unwrap();
}

/// The product of an adapter's matrices in a GGUF file with llama.cpp's factor, `alpha / rank`.
fn product(read: &Read, name: &str) -> Tensor {
    let matrix = |kind: &str| {
        let name = format!("{name}.lora_{kind}");
        let (_, shape, _) = read.tensor(&name);
        Tensor::from_vec(read.values(&name), shape, &Device::Cpu).unwrap()
    };
    let alpha = read.content.metadata["adapter.lora.alpha"].to_f32().unwrap();
    let (a, b) = (matrix("a"), matrix("b"));
    (b.matmul(&a).unwrap() * f64::from(alpha / a.dims()[0] as f32)).unwrap()
}

#[test]
fn adapters_change_fused_layers_alike() {
    let config = |rslora: bool| json!({ "peft_type": "LORA", "r": 2, "lora_alpha": 3.0, "use_rslora": rslora });
    let dir = tempfile::tempdir().unwrap();
    let open = |base: &str, config: &Json, layers: &[(&str, usize, usize)]| {
        adapter(dir.path(), config, layers);
        let changes = match base {
            "gpt2" => json!({ "scale_attn_by_inverse_layer_idx": false }),
            _ => json!({ "sliding_window": null }),
        };
        let base = changed(base, &changes);
        let adapter = GgufAdapter::open(dir.path(), Some(base.path()), GgufOptions::default())?;
        adapter.write(&dir.path().join("a.gguf"), &mut |_| {})?;
        Ok::<_, Error>(Read::new(&dir.path().join("a.gguf")))
    };
    let own = |layer: &str, scale: f64| {
        let file = dir.path().join("adapter_model.safetensors");
        let tensors = candle_core::safetensors::load(file, &Device::Cpu).unwrap();
        let of = |kind: &str| &tensors[&format!("base_model.model.{layer}.lora_{kind}.weight")];
        (of("B").matmul(of("A")).unwrap() * scale).unwrap()
    };
    let assert_near = |found: &Tensor, expected: &Tensor| {
        assert_eq!(found.dims(), expected.dims());
        let difference = (found - expected).unwrap().abs().unwrap().max_all().unwrap();
        assert!(difference.to_scalar::<f32>().unwrap() < 1e-6);
    };

    // Parts of a fused projection, under the model's own names, one of them without an adapter.
    let parts = ["model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.v_proj"];
    let read = open("phi3", &config(true), &[(parts[0], 32, 32), (parts[1], 16, 32)]).unwrap();
    assert_eq!(read.content.metadata["general.type"].to_string().unwrap(), "adapter");
    assert_eq!(read.content.metadata["adapter.type"].to_string().unwrap(), "lora");
    assert_eq!(read.content.metadata["general.architecture"].to_string().unwrap(), "phi3");
    assert_eq!(read.content.tensor_infos.len(), 2);
    let found = product(&read, "blk.1.attn_qkv.weight");
    let zeros = Tensor::zeros((16, 32), DType::F32, &Device::Cpu).unwrap();
    let scale = 3.0 / 2_f64.sqrt();
    let expected = Tensor::cat(&[own(parts[0], scale), zeros, own(parts[1], scale)], 0).unwrap();
    assert_near(&found, &expected);

    // The fused layer of the files, in which GPT-NeoX has the rows of a head beside each other.
    let fused = "gpt_neox.layers.0.attention.query_key_value";
    let read = open("gpt_neox", &config(false), &[(fused, 96, 32)]).unwrap();
    let expected = own(fused, 1.5).reshape((4, 3, 8, 32)).unwrap().transpose(0, 1).unwrap();
    let expected = expected.contiguous().unwrap().reshape((96, 32)).unwrap();
    assert_near(&product(&read, "blk.0.attn_qkv.weight"), &expected);

    let error = |base: &str, config: Json, layers: &[(&str, usize, usize)]| {
        open(base, &config, layers).map(|_| ()).unwrap_err().to_string()
    };
    let wrong = error("phi3", config(false), &[("model.layers.9.self_attn.o_proj", 32, 32)]);
    assert!(wrong.contains("`model.layers.9.self_attn.o_proj.weight`"), "{wrong}");
    let wrong = error("phi3", config(false), &[("model.layers.0.self_attn.o_proj", 30, 32)]);
    assert!(wrong.contains("attn_output") && wrong.contains("[30, 2]"), "{wrong}");
    let mut dora = config(false);
    dora["use_dora"] = true.into();
    let wrong = error("phi3", dora, &[("model.layers.0.self_attn.o_proj", 32, 32)]);
    assert!(wrong.contains("DoRA") && wrong.contains("--adapter DIR"), "{wrong}");
    let error =
        GgufAdapter::open(dir.path(), None, GgufOptions::default()).map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("DoRA"), "{error}");
    adapter(dir.path(), &config(false), &[("model.layers.0.self_attn.o_proj", 32, 32)]);
    let error =
        GgufAdapter::open(dir.path(), None, GgufOptions::default()).map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("--base DIR"), "{error}");
}

#[test]
fn runs_that_predict_tokens_are_taken() {
    let run = |module: &str, model: &str| {
        let model = json!({ "from_pretrained": fixture(model) });
        let run = json!({ "module": { "type": module }, "model": model });
        GgufModel::of_run(&run, options(GgufDtype::F32)).map(|_| ()).map_err(|e| e.to_string())
    };
    assert_eq!(run("causal_lm", "llama"), Ok(()));
    assert_eq!(run("chat", "llama"), Ok(()));
    let error = run("sequence_classification", "llama").unwrap_err();
    assert!(error.contains("\"sequence_classification\""), "{error}");
    let error = run("mine", "llama").unwrap_err();
    assert!(error.contains("module.type"), "{error}");
    let error = run("causal_lm", "gpt2").unwrap_err();
    assert!(error.contains("scale_attn_by_inverse_layer_idx"), "{error}");
}
