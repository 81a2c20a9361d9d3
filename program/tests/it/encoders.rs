//! `fulgurite fit` on the encoders of `fulgurite-models`, and decoders that attend to one, from the
//! weights of the fixtures.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use fulgurite::data::Tokenizer;
use serde_json::{Value, json};

use crate::models::{assert_close, losses_of, root};
use crate::tasks::folder;

/// A tiny model of `plugins/models/tests/fixtures`, and what trains it.
pub(crate) struct Encoder {
    pub(crate) name: &'static str,
    sets: &'static [&'static str],
}

const MASKED: &[&str] = &[
    "module.type=masked_lm",
    "model.mask_token_id=4",
    "data.type=lines",
    "data.path=lines.txt",
    "data.tokenizer=tokenizer.json",
    "data.seq_len=8",
    "data.separate_documents=true",
    "data.eos_token='[SEP]'",
];
const CLASSES: &[&str] = &[
    "module.type=sequence_classification",
    "data.type=texts",
    "data.path=classes.jsonl",
    "data.tokenizer=tokenizer.json",
    "data.seq_len=12",
];
const WORDS: &[&str] = &[
    "module.type=token_classification",
    "data.type=words",
    "data.path=tags.jsonl",
    "data.tokenizer=tokenizer.json",
    "data.seq_len=12",
];
const PICTURES: &[&str] =
    &["module.type=image_classification", "data.path=classes", "data.height=12", "data.width=12"];

const PAIRS: &[&str] = &[
    "module.type=reward",
    "model.center_rewards_coefficient=0.1",
    "data.path=judged.jsonl",
    "data.tokenizer=tokenizer.json",
    "data.seq_len=12",
];

const TEXT_TO_TEXT: &[&str] = &[
    "module.type=seq2seq_lm",
    "data.type=text_to_text",
    "data.path=written.jsonl",
    "data.text_prefix='film: '",
    "data.tokenizer=tokenizer.json",
    "data.seq_len=12",
];

pub(crate) const ENCODERS: [Encoder; 14] = [
    Encoder { name: "bert_masked", sets: MASKED },
    Encoder { name: "bert_classes", sets: CLASSES },
    Encoder { name: "bert_tokens", sets: WORDS },
    Encoder { name: "roberta_masked", sets: MASKED },
    Encoder { name: "roberta_classes", sets: CLASSES },
    Encoder { name: "modernbert_masked", sets: MASKED },
    Encoder { name: "modernbert_classes", sets: CLASSES },
    Encoder { name: "modernbert_tokens", sets: WORDS },
    Encoder { name: "vit", sets: PICTURES },
    Encoder { name: "bert_reward", sets: PAIRS },
    // A decoder with a head that the encoders have too.
    Encoder { name: "llama_reward", sets: PAIRS },
    Encoder { name: "t5", sets: TEXT_TO_TEXT },
    Encoder { name: "t5_gated", sets: TEXT_TO_TEXT },
    Encoder { name: "mt5", sets: TEXT_TO_TEXT },
];

impl Encoder {
    pub(crate) fn fixture(&self) -> PathBuf {
        root().join("plugins/models/tests/fixtures").join(self.name)
    }

    /// Trains with these settings too, and returns the loss of each step.
    #[track_caller]
    pub(crate) fn fit(&self, dir: &Path, sets: &[&str]) -> Vec<f64> {
        let own = [
            format!("model.from_pretrained={}", self.fixture().display()),
            "trainer.loggers=[]".to_owned(),
            "scheduler=constant".to_owned(),
        ];
        let sets = own
            .iter()
            .map(String::as_str)
            .chain(self.sets.iter().copied())
            .chain(sets.iter().copied());
        losses_of(dir, sets)
    }
}

/// A folder with data for each of them: five classes, as the fixtures have.
pub(crate) fn data() -> tempfile::TempDir {
    let dir = folder();
    let texts = ["the cat", "good film", "not bad", "run cat run", "the film is bad"];
    let row = |i: usize| json!({"text": texts[i % 5], "label": i * 3 % 5});
    let rows: String = (0..40).map(|i| format!("{}\n", row(i))).collect();
    fs::write(dir.path().join("classes.jsonl"), rows).unwrap();
    let row = |i: usize| {
        json!({"prompt": texts[i % 5], "chosen": format!(" {}", texts[(i + 1) % 4]),
               "rejected": format!(" {}", texts[(i + 2) % 4]), "margin": 0.1 * (i % 3) as f64})
    };
    let rows: String = (0..40).map(|i| format!("{}\n", row(i))).collect();
    fs::write(dir.path().join("judged.jsonl"), rows).unwrap();
    let row = |i: usize| json!({"text": texts[i % 5], "target": texts[(i + i / 5) % 5]});
    let rows: String = (0..40).map(|i| format!("{}\n", row(i))).collect();
    fs::write(dir.path().join("written.jsonl"), rows).unwrap();
    // `transformers` finds the last token of a text by its padding.
    let padding = json!({"pad_token": "[PAD]"}).to_string();
    fs::write(dir.path().join("tokenizer_config.json"), padding).unwrap();
    for class in 0..5 {
        let folder = dir.path().join("classes").join(class.to_string());
        fs::create_dir_all(&folder).unwrap();
        for i in 0..6 {
            let mut file = b"P6\n12 12\n255\n".to_vec();
            file.extend((0..12 * 12 * 3).map(|k| (k * (i + 2) * (class + 1) % 251) as u8));
            fs::write(folder.join(format!("{i}.ppm")), file).unwrap();
        }
    }
    dir
}

/// Trains three steps of four samples on `ranks` ranks, of which `copies` have the same samples.
#[track_caller]
fn on(
    encoder: &Encoder,
    dir: &Path,
    (ranks, copies, strategy): (usize, usize, &str),
    sets: &[&str],
) -> Vec<f64> {
    let mesh = [
        format!("trainer.devices={ranks}"),
        format!("data.batch_size={}", 4 * copies / ranks),
        format!("trainer.strategy={strategy}"),
        "trainer.max_steps=3".to_owned(),
    ];
    let sets: Vec<&str> = mesh.iter().map(String::as_str).chain(sets.iter().copied()).collect();
    encoder.fit(dir, &sets)
}

const ALONE: (usize, usize, &str) = (1, 1, "single_device");

#[test]
fn meshes_train_every_encoder_as_one_device() {
    let dir = data();
    let llama = "{ type = 'model_parallel', tensor_parallel_size = 2, parallelize = 'llama' }";
    let hf = "{ type = 'model_parallel', tensor_parallel_size = 2, parallelize = 'hf' }";
    let pipeline = "{ type = 'model_parallel', pipeline_parallel_size = 2 }";
    for encoder in &ENCODERS {
        let alone = on(encoder, dir.path(), ALONE, &[]);
        if !encoder.name.contains("t5") {
            let parts = ["trainer.micro_batch_size=2"];
            let whole = on(encoder, dir.path(), ALONE, &parts);
            let found = on(encoder, dir.path(), (2, 2, pipeline), &parts);
            // One device adds the gradients of a tied head and its embedding in another order.
            assert_close(&format!("{} in a pipeline", encoder.name), &found, &whole, 1e-6);
        }
        for mesh in [(2, 1, "fsdp"), (2, 2, llama), (2, 2, hf), (4, 2, llama)] {
            let found = on(encoder, dir.path(), mesh, &[]);
            assert_close(&format!("{} on {mesh:?}", encoder.name), &found, &alone, 1e-5);
        }
    }
}

/// LoRA and QLoRA on two ranks, and bf16 beside f32.
#[test]
fn adapters_and_bf16_train_every_encoder() {
    let dir = data();
    let lora = "trainer.adapters={ targets = ['*_proj'], rank = 2 }";
    let packed = "trainer.quantization.block_size=4";
    for encoder in &ENCODERS {
        let whole = on(encoder, dir.path(), ALONE, &[]);
        for sets in [&[lora][..], &[lora, packed]] {
            let alone = on(encoder, dir.path(), ALONE, sets);
            assert!(alone[1..] != whole[1..], "{}: all weights are trained", encoder.name);
            let found = on(encoder, dir.path(), (2, 1, "fsdp"), sets);
            assert_close(&format!("{} with {sets:?}", encoder.name), &found, &alone, 1e-5);
        }
        let half = on(encoder, dir.path(), ALONE, &["trainer.precision=bf16-mixed"]);
        assert_close(&format!("{} in bf16", encoder.name), &half, &whole, 1e-2);
    }
}

/// The lines that `fulgurite predict` writes for some texts.
fn written(dir: &Path, sets: &[&str]) -> String {
    let own = ENCODERS.iter().find(|encoder| encoder.name == "t5_gated").unwrap();
    let from = format!("model.from_pretrained={}", own.fixture().display());
    let sets = [from.as_str(), "data.predict_path=new.jsonl", "model.generation.max_new_tokens=9"]
        .into_iter()
        .chain(own.sets.iter().copied())
        .chain(sets.iter().copied());
    let file = dir.join("out.jsonl");
    let output = Command::new(env!("CARGO_BIN_EXE_fulgurite"))
        .args(["predict", "--output-file", file.to_str().unwrap()])
        .args(sets.flat_map(|set| ["--set", set]))
        .current_dir(dir)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    fs::read_to_string(file).unwrap()
}

#[test]
fn meshes_write_the_same_texts() {
    let dir = data();
    let rows: String = ["the cat", "good film", "not bad", "run cat run", "is"]
        .map(|text| format!("{}\n", json!({ "text": text })))
        .concat();
    fs::write(dir.path().join("new.jsonl"), rows).unwrap();
    let mesh = "trainer.strategy={ type = 'model_parallel', tensor_parallel_size = 2, \
                parallelize = { type = 'llama', loss_parallel = true } }";
    for beams in ["model.generation.num_beams=1", "model.generation.num_beams=3"] {
        let alone = written(dir.path(), &[beams, "data.batch_size=5"]);
        assert_eq!(alone.lines().count(), 5);
        for (strategy, batch) in
            [("trainer.strategy=fsdp", "data.batch_size=2"), (mesh, "data.batch_size=5")]
        {
            let found = written(dir.path(), &[beams, batch, strategy, "trainer.devices=2"]);
            assert_eq!(found, alone, "{beams} with {strategy}");
        }
    }
}

/// `generate` reads a prompt as `predict` reads a text, with the tokens that the tokenizer puts
/// around it.
#[test]
fn generate_writes_what_predict_writes() {
    let dir = data();
    fs::write(dir.path().join("new.jsonl"), json!({ "text": "the cat" }).to_string()).unwrap();
    let predicted = written(dir.path(), &["model.generation.max_new_tokens=9"]);
    let predicted: Value = serde_json::from_str(&predicted).unwrap();
    let own = ENCODERS.iter().find(|encoder| encoder.name == "t5_gated").unwrap();
    let generate = |prompt: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_fulgurite"))
            .args(["generate", "--output", "json", "--max-new-tokens", "9", "--model"])
            .arg(own.fixture())
            .args(["--tokenizer", "tokenizer.json"])
            .args(prompt)
            .current_dir(dir.path())
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        answer["ids"].clone()
    };
    let tokenizer = Tokenizer::from_file_with_start(dir.path().join("tokenizer.json")).unwrap();
    let [start, end] = [tokenizer.start_of_text(), tokenizer.added_end()].map(Option::unwrap);
    let text = tokenizer.encode("film: the cat").unwrap();
    let ids: Vec<String> = [&[start], &*text, &[end]].concat().iter().map(u32::to_string).collect();
    assert_eq!(generate(&["--prompt", "film: the cat"]), predicted["outputs"]["ids"]);
    assert_eq!(generate(&["--prompt-ids", &ids.join(",")]), predicted["outputs"]["ids"]);
}

/// A checkpoint of a run has what `generate` needs.
#[test]
fn checkpoints_of_text_to_text_generate() {
    let dir = data();
    let t5 = ENCODERS.iter().find(|encoder| encoder.name == "t5").unwrap();
    let sets = ["trainer.max_steps=1", "model.generation.num_beams=2", "checkpoint.dir=kept"];
    assert_eq!(t5.fit(dir.path(), &sets).len(), 1);
    let output = Command::new(env!("CARGO_BIN_EXE_fulgurite"))
        .args(["generate", "--model", "kept/step-00000001", "--prompt", "the film"])
        .args(["--max-new-tokens", "3"])
        .current_dir(dir.path())
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    assert!(output.status.success(), "{}", said[1]);
    assert!(said[1].contains("new token"), "{}", said[1]);
}
