//! Runs `fulgurite checkpoint` as a program.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use fulgurite::core::strategy::BuildContext;
use fulgurite::prelude::*;
use fulgurite::strategies::SingleDevice;
use fulgurite_test_message::assert_says;
use serde_json::Value;
use tempfile::TempDir;

/// A working folder for commands.
struct Scratch(TempDir);

/// The result of a command.
struct Ran {
    code: i32,
    stdout: String,
    stderr: String,
}

impl Scratch {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Runs `fulgurite checkpoint` with these words.
    fn run(&self, line: &str) -> Ran {
        let output = Command::new(env!("CARGO_BIN_EXE_fulgurite"))
            .arg("checkpoint")
            .args(line.split_whitespace())
            .current_dir(self.0.path())
            .output()
            .unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        let code = output.status.code().unwrap();
        Ran { code, stdout: text(output.stdout), stderr: text(output.stderr) }
    }

    /// The output of a command, which must succeed.
    #[track_caller]
    fn ok(&self, line: &str) -> String {
        let Ran { code, stdout, stderr } = self.run(line);
        assert!(code == 0 && stderr.is_empty(), "{line}: {code}\n{stdout}\n{stderr}");
        stdout
    }

    /// The output of a command, which must report findings.
    #[track_caller]
    fn finds(&self, line: &str) -> String {
        let Ran { code, stdout, stderr } = self.run(line);
        assert!(code == 1 && stderr.is_empty(), "{line}: {code}\n{stdout}\n{stderr}");
        stdout
    }

    /// The error of a command, which must fail.
    #[track_caller]
    fn fails(&self, line: &str) -> String {
        let Ran { code, stdout, stderr } = self.run(line);
        assert!(code == 1 && stdout.is_empty(), "{line}: {code}\n{stdout}\n{stderr}");
        stderr
    }

    fn json(&self, line: &str) -> Value {
        serde_json::from_str(&self.run(line).stdout).unwrap()
    }

    fn list(&self, name: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(name)).unwrap().map(|entry| entry.unwrap());
        let mut names: Vec<_> =
            entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Saves a distributed checkpoint with optimizer state, of a model with a tied embedding.
    fn checkpoint(&self, name: &str, seed: u64) {
        let strategy = SingleDevice {}.build(&BuildContext::default()).unwrap();
        let mut fabric = Fabric::single(strategy, seed).unwrap();
        let build = |b: &ModuleBuilder| {
            let embedding = Embedding::new(&b.pp("model.embed"), 7, 4)?;
            let up = Linear::with_bias(&b.pp("model.up"), 4, 6)?;
            let head = Linear::tied(&b.pp("head"), embedding.weight())?;
            Ok((embedding, up, head))
        };
        let (_model, mut optimizer) = fabric.setup(build, &AdamW::default()).unwrap();
        fabric.save(self.path(name), &mut optimizer, &"state").unwrap();
    }

    fn fixture(&self) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/hf_llama_tied")
    }
}

#[test]
fn inspect_lists_the_contents() {
    let scratch = Scratch::new();
    scratch.checkpoint("step-00000000", 1);
    insta::assert_snapshot!(scratch.ok("inspect step-00000000"), @r#"
step-00000000: distributed checkpoint, format 3, written by Fulgurite 0.1.0
step 0, saved by 1 rank
2 safetensors files
model: 3 tensors (3 F32), 58 elements, 232 B
optimizer: 6 tensors (6 F32), 116 elements, 464 B
"#);
    scratch.ok("consolidate step-00000000 full --model-only --dtype bf16");
    insta::assert_snapshot!(scratch.ok("inspect full --tensors"), @r#"
full: full checkpoint, format 3, written by Fulgurite 0.1.0
step 0, saved by 1 rank
1 safetensors file
model: 3 tensors (3 BF16), 58 elements, 116 B
  model.embed.weight  [7, 4]  BF16  56 B  1 part
  model.up.bias       [6]     BF16  12 B  1 part
  model.up.weight     [6, 4]  BF16  48 B  1 part
"#);
    let weights = format!("inspect {}", scratch.fixture().display());
    let shown = scratch.ok(&weights).replace(&scratch.fixture().display().to_string(), "LLAMA");
    insta::assert_snapshot!(shown, @r#"
LLAMA: safetensors weights
model: 29 tensors (29 F32), 27,712 elements, 108.25 KiB
"#);
    let json = scratch.json("inspect step-00000000 --json");
    assert_eq!((&json["kind"], &json["step"]), (&"distributed".into(), &0.into()));
    assert_eq!(json["model"]["tensors"]["model.up.weight"]["shape"], serde_json::json!([6, 4]));
    assert_eq!(json["optimizer"]["elements"], 2 * (28 + 24 + 6));
}

#[test]
fn not_a_checkpoint_is_refused() {
    let scratch = Scratch::new();
    assert_says!(scratch.fails("inspect nothing"), "error: checkpoint nothing … no such file …");
    fs::create_dir(scratch.path("empty")).unwrap();
    assert_says!(scratch.fails("verify empty"), "error: checkpoint empty … no weights here …");
    scratch.checkpoint("runs/step-00000000", 1);
    assert_says!(scratch.fails("verify runs"), "error: checkpoint runs … no checkpoint but has …");
    fs::write(scratch.path("runs/step-00000000/manifest.json"), "{\"format\": ").unwrap();
    assert_says!(scratch.fails("inspect runs/step-00000000"), "error: … the manifest is damaged …");
    let usage = scratch.run("convert a b");
    assert_eq!(usage.code, 2);
    insta::assert_snapshot!(usage.stderr, @r#"
error: the following required arguments were not provided:
  --to <TO>

Usage: fulgurite checkpoint convert --to <TO> <INPUT> <OUTPUT>

For more information, try '--help'.
"#);
}

#[test]
fn verify_names_damaged_files() {
    let scratch = Scratch::new();
    scratch.checkpoint("c", 1);
    assert_says!(scratch.ok("verify c"), "c: 9 tensors, 696 B, all as written");
    let shard = "c/model/shard-00001-model-00001-of-00001.safetensors";
    let whole = fs::read(scratch.path(shard)).unwrap();
    let mut damaged = whole.clone();
    *damaged.last_mut().unwrap() ^= 1;
    let header = damaged.windows(5).position(|w| w == b"[6,4]").unwrap();
    damaged[header + 1] = b'4';
    damaged[header + 3] = b'6';
    fs::write(scratch.path(shard), &damaged).unwrap();
    insta::assert_snapshot!(scratch.finds("verify c"), @r#"
c/model/shard-00001-model-00001-of-00001.safetensors: tensor `model.up.weight`: the file's header says something else of it
c/model/shard-00001-model-00001-of-00001.safetensors: tensor `model.up.bias`: the bytes of [0..6] do not match their checksum
c is damaged in 2 places
"#);
    let json = scratch.json("verify c --json");
    assert_eq!(json["damages"][0]["file"], shard);
    assert_eq!(json["damages"].as_array().unwrap().len(), 2);
    fs::write(scratch.path(shard), &whole[..whole.len() - 1]).unwrap();
    assert_says!(scratch.fails("verify c"), "error: checkpoint … truncated … 671 bytes of 672 …");
    assert!(scratch.json("verify c --json")["error"].as_str().unwrap().contains("truncated"));
    fs::remove_file(scratch.path(shard)).unwrap();
    assert!(scratch.fails("verify c").contains("is missing"));
    // Damaged input is not converted.
    fs::write(scratch.path(shard), &damaged).unwrap();
    for to in ["consolidate c out", "reshard c out --shards 2"] {
        let error = scratch.fails(to);
        assert!(error.contains("do not match their checksum"), "{error}");
        assert_eq!(scratch.list("."), ["c"]);
    }
    let weights = format!("verify {}", scratch.fixture().display());
    assert!(scratch.ok(&weights).contains("there are no checksums"));
}

#[test]
fn diff_finds_every_kind_of_difference() {
    let scratch = Scratch::new();
    scratch.checkpoint("a", 1);
    scratch.checkpoint("b", 2);
    insta::assert_snapshot!(scratch.ok("diff a a"), @"the same: 9 tensors");
    insta::assert_snapshot!(scratch.finds("diff a b"), @r#"
model model.embed.weight: 28 of 28 values differ, by 2.646e0 at most
model model.up.bias: 6 of 6 values differ, by 4.151e-1 at most
model model.up.weight: 24 of 24 values differ, by 7.839e-1 at most
different: 3 tensors; the same: 6
"#);
    assert_eq!(scratch.ok("diff a b --atol 10"), "the same: 9 tensors\n");
    scratch.ok("consolidate a full --dtype bf16 --rename model.up.=up. --model-only");
    insta::assert_snapshot!(scratch.finds("diff a full"), @r#"
model model.embed.weight: F32 in A, BF16 in B; 28 of 28 values differ, by 3.172e-3 at most
model model.up.bias: only in A
model model.up.weight: only in A
model up.bias: only in B
model up.weight: only in B
optimizer state.model.embed.weight.exp_avg: only in A
optimizer state.model.embed.weight.exp_avg_sq: only in A
optimizer state.model.up.bias.exp_avg: only in A
optimizer state.model.up.bias.exp_avg_sq: only in A
optimizer state.model.up.weight.exp_avg: only in A
optimizer state.model.up.weight.exp_avg_sq: only in A
different: 11 tensors; the same: 0
"#);
    assert!(!scratch.finds("diff a full --model-only").contains("optimizer"));
    let json = scratch.json("diff a b --json");
    assert_eq!(json["same"], 6);
    assert_eq!(json["differences"][0]["change"], "values");
    assert_eq!(json["differences"][0]["of"], 28);
}

#[test]
fn formats_go_round_without_loss() {
    let scratch = Scratch::new();
    scratch.checkpoint("step-00000000", 1);
    insta::assert_snapshot!(scratch.ok("reshard step-00000000 eight --shards 8"), @"wrote eight: 9 tensors, 696 B, in 14 files");
    insta::assert_snapshot!(scratch.ok("consolidate eight full --max-shard-size 150"), @"wrote full: 9 tensors, 696 B, in 6 files");
    assert_eq!(
        scratch.list("full"),
        [
            "fulgurite.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "optimizer-00001-of-00004.safetensors",
            "optimizer-00002-of-00004.safetensors",
            "optimizer-00003-of-00004.safetensors",
            "optimizer-00004-of-00004.safetensors",
            "optimizer.safetensors.index.json",
        ]
    );
    scratch.ok("convert full one --to distributed");
    for name in ["eight", "full", "one"] {
        scratch.ok(&format!("verify {name}"));
        assert_eq!(scratch.ok(&format!("diff step-00000000 {name}")), "the same: 9 tensors\n");
    }
    let manifest = |name: &str| -> Value {
        serde_json::from_slice(&fs::read(scratch.path(name).join("manifest.json")).unwrap())
            .unwrap()
    };
    let (before, after) = (manifest("step-00000000"), manifest("one"));
    for key in ["step", "state", "config"] {
        assert_eq!(before[key], after[key], "{key}");
    }
    // Resuming from the output gives the same result.
    let strategy = SingleDevice {}.build(&BuildContext::default()).unwrap();
    let mut fabric = Fabric::single(strategy, 3).unwrap();
    let build = |b: &ModuleBuilder| {
        let embedding = Embedding::new(&b.pp("model.embed"), 7, 4)?;
        let up = Linear::with_bias(&b.pp("model.up"), 4, 6)?;
        Ok((embedding, up))
    };
    let (_model, mut optimizer) = fabric.setup(build, &AdamW::default()).unwrap();
    let state: String = fabric.load(scratch.path("one"), Some(&mut optimizer)).unwrap();
    assert_eq!(state, "state");
}

#[test]
fn warnings_of_a_merge_are_shown() {
    let scratch = Scratch::new();
    let (from, adapter) = (scratch.fixture().with_file_name("hf_llama"), scratch.path("adapter"));
    fs::create_dir(&adapter).unwrap();
    let of_peft = from.with_file_name("peft").join("head_emb");
    let weights = "adapter_model.safetensors";
    fs::copy(of_peft.join(weights), adapter.join(weights)).unwrap();
    let config = fs::read(of_peft.join("adapter_config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    config["target_modules"].as_array_mut().unwrap().push("k_proj".into());
    fs::write(adapter.join("adapter_config.json"), config.to_string()).unwrap();
    let line = format!("convert {} merged --to hugging-face --adapter adapter", from.display());
    let Ran { code, stderr, .. } = scratch.run(&line);
    assert_eq!(code, 0, "{stderr}");
    let says = "has no tensors for 3 of the layers in `target_modules`, which stay as in the base";
    assert!(stderr.contains(says), "{stderr}");
}

#[test]
fn hugging_face_directories_go_through() {
    let scratch = Scratch::new();
    let fixture = scratch.fixture();
    let from = fixture.display();
    scratch.ok(&format!("convert {from} sharded --to distributed --shards 3"));
    assert_eq!(scratch.list("sharded/model").len(), 3);
    scratch.ok(&format!("convert {from} full --to full"));
    let config = fixture.join("config.json");
    let config = config.display();
    scratch.ok(&format!("convert sharded hf --to hugging-face --config {config}"));
    assert_eq!(scratch.list("hf"), ["config.json", "model.safetensors"]);
    assert_eq!(
        scratch.list("full"),
        ["config.json", "fulgurite.json", "generation_config.json", "model.safetensors"]
    );
    for name in ["sharded", "full", "hf", "hf/model.safetensors"] {
        scratch.ok(&format!("diff {from} {name}"));
    }
    let original = fs::read(fixture.join("config.json")).unwrap();
    assert_eq!(fs::read(scratch.path("hf/config.json")).unwrap(), original);
    scratch.ok("convert hf renamed --to hugging-face --rename model.= --dtype f16");
    let json = scratch.json("inspect renamed --json");
    let tensors = json["model"]["tensors"].as_object().unwrap();
    assert_eq!(tensors["norm.weight"]["dtype"], "F16");
    scratch.ok("convert renamed back --to hugging-face --rename =model.");
    scratch.ok(&format!("convert {from} adapted --to full --rename model.norm=model.norm.lora_A"));
    let error = scratch.fails("convert adapted lost --to hugging-face");
    assert!(
        error.contains("`model.norm.lora_A.weight` is of an adapter that is not merged"),
        "{error}"
    );
    assert_eq!(scratch.finds("diff hf back").lines().count(), tensors.len() + 1);
    scratch.ok("convert renamed again --to full --dtype f32 --rename =model.");
    assert_eq!(scratch.ok("diff hf back --atol 1e-2"), "the same: 29 tensors\n");
    assert!(scratch.finds("diff hf again --json").contains("\"change\": \"values\""));
    let error =
        scratch.fails("convert hf x --to full --rename model.layers.0=a --rename model.layers.1=a");
    assert_says!(error, "error: checkpoint hf … would both be called `a.input_layernorm.weight`");
}

#[test]
fn nothing_is_overwritten_unasked() {
    let scratch = Scratch::new();
    scratch.checkpoint("c", 1);
    scratch.checkpoint("other", 2);
    assert_says!(scratch.fails("consolidate c other"), "error: checkpoint ./other: exists …");
    scratch.ok("diff other other");
    scratch.ok("consolidate c other --overwrite");
    scratch.ok("diff c other");
    fs::create_dir(scratch.path("thesis")).unwrap();
    fs::write(scratch.path("thesis/chapter"), "1").unwrap();
    assert_says!(
        scratch.fails("consolidate c thesis --overwrite"),
        "error: checkpoint ./thesis … no checkpoint … not overwritten …"
    );
    assert_says!(scratch.fails("consolidate c c/full"), "error: checkpoint c/full … inside of …");
    assert_says!(scratch.fails("reshard c x --shards 0"), "error: a distributed … least one shard");
    assert_says!(
        scratch.fails("convert c x --to full --shards 2"),
        "error: --shards means nothing for this format …"
    );
    // In-place output: the replaced checkpoint is read completely first.
    scratch.ok("reshard c c --shards 2 --overwrite");
    scratch.ok("diff c other");
    assert_eq!(scratch.list("."), ["c", "other", "thesis"]);
}

#[test]
fn help_lists_the_commands() {
    let scratch = Scratch::new();
    insta::assert_snapshot!(scratch.ok("--help"), @r#"
Checkpoints on disk: look into, verify, compare and convert them

Usage: fulgurite checkpoint <COMMAND>

Commands:
  inspect      Say what is in a checkpoint, without reading its values
  verify       Read all of a checkpoint and compare it with its checksums
  diff         Compare the tensors of two checkpoints: names, shapes, dtypes, values
  consolidate  Make a full checkpoint: whole tensors in files that `transformers` and candle load
  convert      Make a checkpoint of another format, dtype or with other names, a GGUF file or PEFT's adapter
  reshard      Make a distributed checkpoint of another number of shards
  help         Print this message or the help of the given subcommand(s)

Options:
  -h, --help  Print help
"#);
    insta::assert_snapshot!(scratch.ok("convert -h"), @"
    Make a checkpoint of another format, dtype or with other names, a GGUF file or PEFT's adapter

    Usage: fulgurite checkpoint convert [OPTIONS] --to <TO> <INPUT> <OUTPUT>

    Arguments:
      <INPUT>   A checkpoint's directory, a Hugging Face directory, a file of safetensors or of `torch.save`
      <OUTPUT>  The directory to write, or the file for GGUF; it appears when it is complete

    Options:
          --overwrite              Replace a checkpoint or a GGUF file that is there already
          --json                   Write the result as JSON
      -q, --quiet                  Show no progress bar
          --to <TO>                What to make [possible values: distributed, full, hugging-face, gguf, peft]
          --shards <N>             Number of shards of a distributed checkpoint [default: 1]
          --base <DIR>             The directory of an adapter's base, for GGUF and PEFT [default: as `adapter_config.json` says]
          --without-tokenizer      Write a GGUF file without a tokenizer
          --dtype <DTYPE>          Convert the model's floating-point tensors; those in MXFP4 or FP8 are unpacked [possible values: f64, f32, f16, bf16, q8_0, q4_k]
          --model-only             Leave the optimizer's state out
          --average                Take the average of the weights that training kept (`trainer.ema_decay`, `stochastic_weight_averaging`) instead of them, without the optimizer's state
          --adapter <DIR>          Merge the adapter in this directory, in PEFT's format, into the model
          --rename <FROM=TO>       Give names that begin with FROM the beginning TO: `model.=`, `=model.`; the first rule that fits a name counts
          --max-shard-size <SIZE>  Begin another file beyond this size [default: 5GB]
          --config <FILE>          The model's `config.json`, instead of the input's
      -h, --help                   Print help (see more with '--help')
    ");
}

#[test]
fn adapters_are_converted_for_peft() {
    let scratch = Scratch::new();
    scratch.checkpoint("c", 1);
    let fixture = |name: &str| {
        format!("{}/../plugins/models/tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR"))
    };
    let error = scratch.fails("convert c x --to peft");
    assert!(error.contains("`--to peft` is for adapters"), "{error}");
    let convert = format!("convert {} out --to peft", fixture("gpt2_peft"));
    let error = scratch.fails(&format!("{convert} --dtype bf16"));
    assert!(error.contains("--dtype means nothing for this format"), "{error}");
    let convert = format!("{convert} --base {}", fixture("gpt2"));
    let said = scratch.ok(&convert);
    assert!(said.contains("wrote out: adapters of"), "{said}");
    assert_eq!(scratch.list("out"), ["adapter_config.json", "adapter_model.safetensors"]);
    let error = scratch.fails(&convert);
    assert!(error.contains("exists already"), "{error}");
    scratch.ok(&format!("{convert} --overwrite"));
    let error =
        scratch.fails(&format!("convert out out --to peft --overwrite --base {}", fixture("gpt2")));
    assert!(error.contains("is the input"), "{error}");
    let error = scratch.fails(&format!("convert out y --to peft --base {}", fixture("missing")));
    assert!(error.contains("missing"), "{error}");
}

#[test]
fn results_as_json() {
    let scratch = Scratch::new();
    scratch.checkpoint("c", 1);
    insta::assert_snapshot!(scratch.ok("consolidate c full --json --quiet"), @r#"
{
  "path": "full",
  "tensors": 9,
  "bytes": 696,
  "files": 2
}
"#);
}
