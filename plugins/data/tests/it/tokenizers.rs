//! Hugging Face tokenizers, and the tokens around texts.

use std::fs;
use std::path::Path;

use candle_core::Device;
use fulgurite_core::data::{DataContext, DataModule as _, Split};
use fulgurite_data::{TextData, TextDataConfig, Tokenizer};
use fulgurite_test_message::assert_says;
use serde_json::{Value, json};
use tempfile::TempDir;

/// A tokenizer with these special tokens and w0, w1, …
fn words(specials: &[&str]) -> Value {
    let added = specials.iter().enumerate().map(|(id, content)| {
        json!({"id": id, "content": content, "special": true, "single_word": false,
               "lstrip": false, "rstrip": false, "normalized": false})
    });
    let names = specials.iter().map(|&name| name.to_owned());
    let names = names.chain((0..61).map(|i| format!("w{i}")));
    let vocab: serde_json::Map<String, Value> =
        names.enumerate().map(|(id, name)| (name, id.into())).collect();
    json!({"version": "1.0", "truncation": null, "padding": null, "normalizer": null,
           "added_tokens": added.collect::<Vec<_>>(), "pre_tokenizer": {"type": "Whitespace"},
           "post_processor": null, "decoder": null,
           "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}})
}

/// A post-processor that puts a token before each text.
fn begins_with(token: &str, id: u32) -> Value {
    json!({"type": "TemplateProcessing",
           "single": [{"SpecialToken": {"id": token, "type_id": 0}},
                      {"Sequence": {"id": "A", "type_id": 0}}],
           "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
           "special_tokens": {token: {"id": token, "ids": [id], "tokens": [token]}}})
}

fn write(folder: &Path, name: &str, content: &Value) {
    fs::create_dir_all(folder).unwrap();
    fs::write(folder.join(name), content.to_string()).unwrap();
}

/// Writes `documents` files of `words` words each.
fn documents(folder: &Path, documents: usize, words: usize) {
    fs::create_dir_all(folder).unwrap();
    for k in 0..documents {
        let words: Vec<String> = (0..words).map(|i| format!("w{}", (k + i) % 60)).collect();
        fs::write(folder.join(format!("{k:02}.txt")), words.join(" ")).unwrap();
    }
}

/// The configuration for `docs` in a folder, with more keys.
fn config(dir: &Path, tokenizer: &str, keys: &str) -> TextDataConfig {
    let text = format!(
        "path = {:?}\ntokenizer = {:?}\nseq_len = 1\nvalidation_fraction = 0\nshuffle = false\n{keys}",
        dir.join("docs"),
        dir.join(tokenizer)
    );
    toml::from_str(&text).unwrap()
}

fn setup(dir: &Path, tokenizer: &str, keys: &str) -> fulgurite_core::Result<TextData> {
    TextData::setup(&config(dir, tokenizer, keys), &DataContext::default())
}

/// All ids: the samples of one token, and the target of the last one.
fn ids(data: &TextData) -> Vec<u32> {
    let indices: Vec<u64> = (0..data.len(Split::Train)).collect();
    let batch = data.batch(Split::Train, &indices, &Device::Cpu).unwrap();
    let mut ids: Vec<u32> = batch.inputs.flatten_all().unwrap().to_vec1().unwrap();
    let targets: Vec<i64> = batch.targets.flatten_all().unwrap().to_vec1().unwrap();
    ids.extend(targets.last().map(|&id| id as u32));
    ids
}

fn error(dir: &TempDir, tokenizer: &str, keys: &str) -> String {
    let error = setup(dir.path(), tokenizer, keys).unwrap_err();
    error.to_string().replace(dir.path().to_str().unwrap(), "DIR")
}

#[test]
fn truncation_and_padding_are_ignored() {
    let dir = tempfile::tempdir().unwrap();
    documents(&dir.path().join("docs"), 1, 2000);
    fs::write(dir.path().join("docs/short.txt"), ["w1"; 20].join(" ")).unwrap();
    let truncation = |max_length: u64, stride: u64| {
        json!({"direction": "Right", "max_length": max_length,
            "strategy": "LongestFirst", "stride": stride})
    };
    let padding = |strategy: Value| {
        json!({"strategy": strategy, "direction": "Right", "pad_id": 2,
        "pad_to_multiple_of": null, "pad_type_id": 0, "pad_token": "<pad>"})
    };
    for (truncation, padding) in [
        (Value::Null, Value::Null),
        (truncation(32, 0), Value::Null),
        (truncation(1, 1 << 40), Value::Null),
        (truncation(0, 0), Value::Null),
        (Value::Null, padding(json!("BatchLongest"))),
        (Value::Null, padding(json!({"Fixed": 512}))),
        (Value::Null, padding(json!({"Fixed": 1_u64 << 62}))),
    ] {
        let mut tokenizer = words(&["<unk>", "</s>", "<pad>"]);
        tokenizer["truncation"] = truncation;
        tokenizer["padding"] = padding;
        write(dir.path(), "tokenizer.json", &tokenizer);
        let data = setup(dir.path(), "tokenizer.json", "").unwrap();
        assert_eq!(ids(&data).len(), 2022, "{tokenizer}");
        let tokenizer = Tokenizer::from_file(dir.path()).unwrap();
        assert_eq!(tokenizer.encode("w1 w0").unwrap(), [4, 3]);
    }
}

#[test]
fn end_token_from_files_beside_the_tokenizer() {
    let dir = tempfile::tempdir().unwrap();
    documents(&dir.path().join("docs"), 50, 9);
    let specials = ["<unk>", "<|endoftext|>", "</s>", "<｜end▁of▁sentence｜>"];
    let content = json!({"__type": "AddedToken", "content": "</s>", "lstrip": false});
    let cases: [(&[(&str, Value)], u32); 10] = [
        (&[("tokenizer_config.json", json!({"eos_token": "<｜end▁of▁sentence｜>"}))], 3),
        (&[("tokenizer_config.json", json!({"eos_token": content}))], 2),
        (&[("special_tokens_map.json", json!({"eos_token": "</s>"}))], 2),
        (&[("special_tokens_map.json", json!({"eos_token": content}))], 2),
        (&[("config.json", json!({"eos_token_id": 3}))], 3),
        (&[("generation_config.json", json!({"eos_token_id": [900, 2, 1]}))], 2),
        // From another vocabulary.
        (&[("config.json", json!({"eos_token_id": 50256}))], 1),
        // From another program.
        (&[("config.json", json!(["no", "keys"]))], 1),
        (
            &[
                ("tokenizer_config.json", json!({"eos_token": null, "add_bos_token": true})),
                ("special_tokens_map.json", json!({"pad_token": "</s>"})),
                ("generation_config.json", json!({"eos_token_id": null})),
                ("config.json", json!({"eos_token_id": 2})),
            ],
            2,
        ),
        (
            &[
                ("tokenizer_config.json", json!({"eos_token": "</s>"})),
                ("config.json", json!({"eos_token_id": 1})),
            ],
            2,
        ),
    ];
    for (number, (files, end)) in cases.into_iter().enumerate() {
        let folder = format!("case{number}");
        write(&dir.path().join(&folder), "tokenizer.json", &words(&specials));
        for (name, content) in files {
            write(&dir.path().join(&folder), name, content);
        }
        // The files beside it are found by a file path as by a folder path.
        for tokenizer in [folder.clone(), format!("{folder}/tokenizer.json")] {
            let ids = ids(&setup(dir.path(), &tokenizer, "").unwrap());
            assert_eq!(ids.len(), 500, "{files:?}");
            assert!(ids.iter().skip(9).step_by(10).all(|&id| id == end), "{files:?}");
        }
        let named = setup(dir.path(), &folder, "eos_token = \"<|endoftext|>\"").unwrap();
        assert_eq!(ids(&named)[9], 1);
    }
}

#[test]
fn end_token_from_post_processor() {
    let dir = tempfile::tempdir().unwrap();
    documents(&dir.path().join("docs"), 2, 3);
    let bert = json!({"type": "BertProcessing", "sep": ["[SEP]", 2], "cls": ["[CLS]", 1]});
    let nested = json!({"type": "Sequence", "processors": [
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        {"type": "TemplateProcessing",
         "single": [{"Sequence": {"id": "A", "type_id": 0}},
                    {"SpecialToken": {"id": "[SEP]", "type_id": 0}}],
         "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
         "special_tokens": {"[SEP]": {"id": "[SEP]", "ids": [2], "tokens": ["[SEP]"]}}}]});
    for post_processor in [bert, nested] {
        let mut tokenizer = words(&["<unk>", "[CLS]", "[SEP]"]);
        tokenizer["post_processor"] = post_processor;
        write(dir.path(), "tokenizer.json", &tokenizer);
        let data = setup(dir.path(), "tokenizer.json", "").unwrap();
        assert_eq!(ids(&data), [3, 4, 5, 2, 4, 5, 6, 2]);
    }
}

#[test]
fn start_token_on_demand() {
    let dir = tempfile::tempdir().unwrap();
    documents(&dir.path().join("docs"), 2, 2);
    let specials = ["<unk>", "<s>", "</s>", "<bos>"];
    let mut begins = words(&specials);
    begins["post_processor"] = begins_with("<bos>", 3);
    write(&dir.path().join("template"), "tokenizer.json", &begins);
    write(&dir.path().join("plain"), "tokenizer.json", &words(&specials));
    for folder in ["template", "plain"] {
        let config =
            json!({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": folder == "plain"});
        write(&dir.path().join(folder), "tokenizer_config.json", &config);
    }
    write(&dir.path().join("none"), "tokenizer.json", &words(&specials));
    let config = json!({"bos_token": null, "add_bos_token": true});
    write(&dir.path().join("none"), "tokenizer_config.json", &config);
    let ids = |folder: &str, keys: &str| ids(&setup(dir.path(), folder, keys).unwrap());
    let without = [4, 5, 2, 5, 6, 2];
    let with = |id| [id, 4, 5, 2, id, 5, 6, 2];
    for folder in ["template", "plain"] {
        assert_eq!(ids(folder, ""), without);
        assert_eq!(ids(folder, "add_bos_token = false"), without);
        assert_eq!(ids(folder, "add_bos_token = true"), with(1));
        assert_eq!(ids(folder, "add_bos_token = true\nbos_token = '<bos>'"), with(3));
    }
    // The post-processor decides; without one, tokenizer_config.json does.
    assert_eq!(ids("template", "add_bos_token = 'auto'"), with(1));
    assert_eq!(ids("plain", "add_bos_token = 'auto'"), with(1));
    assert_eq!(ids("none", "add_bos_token = 'auto'"), without);
    let data = setup(dir.path(), "plain", "add_bos_token = true").unwrap();
    assert_eq!(data.tokenizer().unwrap().start_of_text(), Some(1));
    assert_says!(error(&dir, "none", "add_bos_token = true"), "data.add_bos_token: no file says …");
}

#[test]
fn special_tokens_in_the_text_are_tokens() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "tokenizer.json", &words(&["<unk>", "</s>"]));
    let tokenizer = Tokenizer::from_file(dir.path()).unwrap();
    assert_eq!(tokenizer.encode("w0</s>w1").unwrap(), [2, 1, 3]);
}

#[test]
fn mistakes_about_special_tokens_are_explained() {
    let dir = tempfile::tempdir().unwrap();
    documents(&dir.path().join("docs"), 2, 2);
    write(dir.path(), "tokenizer.json", &words(&["<unk>", "</s>"]));
    let wrong = |name: &str, content: &str, keys: &str| {
        fs::write(dir.path().join(name), content).unwrap();
        let error = error(&dir, "tokenizer.json", keys);
        fs::remove_file(dir.path().join(name)).unwrap();
        error
    };
    let config = "tokenizer_config.json";
    let errors = [
        wrong(config, "{}", "eos_token = \"w1 w2\""),
        wrong(config, "{\"eos_token\": \"<|im_end|>\"}", ""),
        wrong(config, "[1]", ""),
        wrong(config, "{}", "bos_token = '<s>'"),
        wrong(config, "{}", "bos_token = '<s>'\nadd_bos_token = 'auto'\ntype = 'tokens'"),
        toml::from_str::<TextDataConfig>("add_bos_token = 'yes'").unwrap_err().message().to_owned(),
    ];
    insta::assert_snapshot!(errors.join("\n"), @r#"
data.eos_token = "w1 w2" is not one token of DIR/tokenizer.json; name one that it has
DIR/tokenizer_config.json: eos_token = "<|im_end|>" is not one token of DIR/tokenizer.json; name one that it has, or set `data.eos_token`
data: DIR/tokenizer_config.json (beside data.tokenizer) is not an object of JSON: invalid type: sequence, expected a map at line 1 column 0
data.bos_token is added with data.add_bos_token = true or "auto" only
data.add_bos_token is for text with a Hugging Face tokenizer (data.tokenizer)
invalid value: string "yes", expected `true`, `false` or `"auto"`
"#);
    let bytes =
        TextDataConfig { tokenizer: None, ..self::config(dir.path(), "", "eos_token = 'x'") };
    let bytes = TextData::setup(&bytes, &DataContext::default()).unwrap_err();
    assert_says!(bytes, "data.eos_token is for … Hugging Face tokenizer (data.tokenizer)");
}

#[test]
fn unsupported_tokenizer_folders_are_explained() {
    let dir = tempfile::tempdir().unwrap();
    documents(&dir.path().join("docs"), 2, 2);
    for (folder, files) in [
        ("spm", &["tokenizer.model", "tokenizer_config.json"][..]),
        ("gpt2", &["vocab.json", "merges.txt"]),
    ] {
        for file in files {
            write(&dir.path().join(folder), file, &json!({}));
        }
    }
    let errors = ["spm", "gpt2"].map(|folder| error(&dir, folder, ""));
    insta::assert_snapshot!(errors.join("\n"), @r#"
data: the folder DIR/spm (data.tokenizer) has tokenizer.model and no tokenizer.json; write one with transformers: AutoTokenizer.from_pretrained("DIR/spm").save_pretrained("DIR/spm")
data: the folder DIR/gpt2 (data.tokenizer) has vocab.json, merges.txt and no tokenizer.json; write one with transformers: AutoTokenizer.from_pretrained("DIR/gpt2").save_pretrained("DIR/gpt2")
"#);
}

#[test]
fn dropout_does_not_count() {
    let dir = tempfile::tempdir().unwrap();
    let merges: Vec<String> = (0..10).map(|i| format!("w {i}")).collect();
    let mut vocab: serde_json::Map<String, Value> =
        (0..10).map(|i| (i.to_string(), i.into())).collect();
    vocab.extend((0..10).map(|i| (format!("w{i}"), (10 + i).into())));
    vocab.insert("w".to_owned(), 20.into());
    let mut tokenizer = words(&[]);
    tokenizer["model"] = json!({"type": "BPE", "dropout": 0.5, "vocab": vocab, "merges": merges});
    write(dir.path(), "tokenizer.json", &tokenizer);
    let tokenizer = Tokenizer::from_file(dir.path()).unwrap();
    let text: Vec<String> = (0..100).map(|i| format!("w{}", i % 10)).collect();
    let expected: Vec<u32> = (0..100).map(|i| 10 + i % 10).collect();
    assert_eq!(tokenizer.encode(&text.join(" ")).unwrap(), expected);
}

#[test]
fn unknown_text_is_counted() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("docs")).unwrap();
    fs::write(dir.path().join("docs/a.txt"), "café caf x c").unwrap();
    let counts = |tokenizer: &Value, keys: &str| {
        write(dir.path(), "tokenizer.json", tokenizer);
        let data = setup(dir.path(), "tokenizer.json", keys).unwrap();
        data.report().unwrap().sources.remove(0).counts
    };
    let mut letters = words(&[]);
    letters["model"] = json!({"type": "BPE", "unk_token": null, "merges": [],
        "vocab": {"c": 0, "a": 1, "f": 2, "</s>": 3}});
    let kept = format!("cache_dir = {:?}", dir.path().join("cache"));
    for keys in ["cache_dir = false", &kept, &kept] {
        let found = counts(&letters, keys);
        assert_eq!(found.get("characters without a token"), Some(&2));
        assert_eq!(found.get("tokens"), Some(&8));
        let found = counts(&words(&["<unk>", "</s>"]), keys);
        assert_eq!(found.get("unknown tokens"), Some(&4));
        assert_eq!(found.get("characters without a token"), None);
    }
}

#[test]
fn hostile_tokenizers_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    documents(&dir.path().join("docs"), 2, 2);
    let replace = |from: &str, to: &str| json!({"type": "Replace", "pattern": {"String": from}, "content": to});
    let doubling: Vec<Value> = vec![replace("w", "ww"); 40];
    let regex = json!({"type": "Replace", "pattern": {"Regex": "\\w?"}, "content": "www"});
    let sequence =
        |normalizers: Vec<Value>| json!({"type": "Sequence", "normalizers": normalizers});
    let harmless: Vec<Value> = vec![replace("q", "qq"); 40];
    let mut errors = Vec::new();
    for normalizer in [sequence(doubling), sequence(vec![regex; 4]), sequence(harmless.clone())] {
        let mut tokenizer = words(&["<unk>", "</s>"]);
        tokenizer["normalizer"] = normalizer;
        write(dir.path(), "tokenizer.json", &tokenizer);
        errors.push(match setup(dir.path(), "tokenizer.json", "") {
            Ok(data) => format!("{} ids", ids(&data).len()),
            Err(_) => error(&dir, "tokenizer.json", ""),
        });
    }
    let mut tokenizer = words(&["<unk>", "</s>", "q"]);
    tokenizer["normalizer"] = sequence(harmless);
    write(dir.path(), "tokenizer.json", &tokenizer);
    errors.push(error(&dir, "tokenizer.json", ""));
    let mut tokenizer = words(&["<unk>", "</s>"]);
    tokenizer["model"] =
        json!({"type": "Unigram", "unk_id": 7, "vocab": [["<unk>", 0.0], ["w", 0.0]]});
    write(dir.path(), "tokenizer.json", &tokenizer);
    errors.push(error(&dir, "tokenizer.json", ""));
    // The library removes the prefix from a shorter token, and panics.
    tokenizer["model"] = json!({"type": "BPE", "continuing_subword_prefix": "####",
        "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]});
    write(dir.path(), "tokenizer.json", &tokenizer);
    let panic = error(&dir, "tokenizer.json", "");
    let (panicked, _) = panic.split_once(" panicked").expect(&panic);
    errors.push(format!("{panicked} panicked"));
    insta::assert_snapshot!(errors.join("\n"), @"
data: DIR/tokenizer.json (data.tokenizer): its normalizer makes a text more than 64 times as long
data: DIR/tokenizer.json (data.tokenizer): its normalizer can make a text 256 times as long; at most 64 times is allowed
6 ids
data: DIR/tokenizer.json (data.tokenizer): its normalizer makes a text more than 64 times as long
data: DIR/tokenizer.json (data.tokenizer) is not a Hugging Face tokenizer.json: Unable to load vocab UnkIdNotInVocabulary at line 1 column 325
data: DIR/tokenizer.json (data.tokenizer) is not a Hugging Face tokenizer.json: the library that reads it panicked
");
}
