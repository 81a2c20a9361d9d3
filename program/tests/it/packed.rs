//! Published weights in FP8 and MXFP4: converted, and beside adapters.

use std::fs;
use std::path::Path;

use fulgurite::core::checkpoint::{self, TensorSource};
use serde_json::Value;

use crate::models::{losses_of, root, run};

/// Runs a command of the program, which must succeed, and returns what it prints.
#[track_caller]
fn succeed(args: &[&str]) -> String {
    let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
    let [stdout, _] = run(env!("CARGO_BIN_EXE_fulgurite"), &args);
    stdout
}

/// The ids that a model continues three tokens with.
#[track_caller]
fn answer(args: &[&str]) -> Value {
    let own = ["generate", "--prompt-ids", "7,3,11", "--max-new-tokens", "8", "--temperature", "0"];
    let printed = succeed(&[&own[..], &["--output", "json"], args].concat());
    serde_json::from_str::<Value>(&printed).unwrap()["ids"].clone()
}

fn dtypes(directory: &Path) -> Vec<String> {
    let source = checkpoint::open(directory).unwrap();
    let dtype = |name: &str| source.info(name).unwrap().dtype.to_string();
    let mut dtypes: Vec<String> = source.names().into_iter().map(dtype).collect();
    dtypes.sort();
    dtypes.dedup();
    dtypes
}

#[test]
fn packed_models_become_plain_ones() {
    let temp = tempfile::tempdir().unwrap();
    let ids: Vec<u8> = (0..600u16).flat_map(|i| (i * 7 % 41).to_le_bytes()).collect();
    fs::write(temp.path().join("ids.u16"), ids).unwrap();
    for (name, targets) in
        [("deepseek_v3_fp8", "['q_a_proj', 'o_proj']"), ("gpt_oss_mxfp4", "['q_proj', 'o_proj']")]
    {
        let base = root().join("plugins/models/tests/fixtures").join(name);
        let base = base.to_str().unwrap();
        let path = |part: &str| temp.path().join(format!("{name}-{part}"));
        let convert = |to: &Path, more: &[&str]| {
            let own = ["checkpoint", "convert", base, to.to_str().unwrap(), "--to", "hugging-face"];
            succeed(&[&own[..], more].concat());
        };
        let config = |directory: &Path| {
            let file = fs::read(directory.join("config.json")).unwrap();
            serde_json::from_slice::<Value>(&file).unwrap()
        };

        convert(&path("copy"), &[]);
        assert!(dtypes(&path("copy")).len() > 1, "{name}");
        assert!(config(&path("copy")).get("quantization_config").is_some());

        convert(&path("plain"), &["--dtype", "f32"]);
        assert_eq!(dtypes(&path("plain")), ["F32"], "{name}");
        assert!(config(&path("plain")).get("quantization_config").is_none());
        let plain = answer(&["--model", base]);
        assert_eq!(answer(&["--model", path("plain").to_str().unwrap()]), plain, "{name}");

        // The file alone, with config.json beside it.
        let file = Path::new(base).join("model.safetensors");
        let single = path("single");
        let [file, to] = [&file, &single].map(|path| path.to_str().unwrap());
        succeed(&["checkpoint", "convert", file, to, "--to", "hugging-face", "--dtype", "f32"]);
        assert_eq!(dtypes(&single), ["F32"], "{name}");

        let sets = [
            "module.type=causal_lm".to_owned(),
            format!("model.from_pretrained={base}"),
            "data={ type = 'tokens', path = 'ids.u16', seq_len = 16, batch_size = 2 }".to_owned(),
            format!("trainer.adapters={{ targets = {targets}, rank = 2, alpha = 16 }}"),
            "trainer.max_steps=4".to_owned(),
            "optimizer.lr=0.05".to_owned(),
            "scheduler=constant".to_owned(),
            format!("trainer.default_root_dir={name}"),
        ];
        losses_of(temp.path(), sets.iter().map(String::as_str));
        let adapter = temp.path().join(name).join("version_0/adapter");
        let adapter = adapter.to_str().unwrap();
        convert(&path("merged"), &["--adapter", adapter, "--dtype", "f32"]);
        let expected = answer(&["--model", base, "--adapter", adapter]);
        assert_ne!(expected, plain, "{name}: the adapter changes nothing");
        assert_eq!(answer(&["--model", path("merged").to_str().unwrap()]), expected, "{name}");
    }
}
