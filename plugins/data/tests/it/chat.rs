//! Conversations as training data.

use std::path::Path;

use candle_core::Device;
use fulgurite_core::Result;
use fulgurite_core::data::{DataContext, DataModule as _, Split};
use fulgurite_data::{CacheDir, ChatData, ChatDataConfig, OnError, TooLong, TrainOn};
use fulgurite_test_message::assert_says;
use serde_json::{Value, json};

/// Writes the rows, and returns a configuration that reads them.
fn config(dir: &Path, rows: &[Value]) -> ChatDataConfig {
    let rows: String = rows.iter().map(|row| format!("{row}\n")).collect();
    std::fs::write(dir.join("rows.jsonl"), rows).unwrap();
    ChatDataConfig {
        path: dir.join("rows.jsonl").as_path().into(),
        tokenizer: Some("bytes".to_owned()),
        chat_template: Some("chatml".to_owned()),
        validation_fraction: Some(0.0),
        packing: false,
        shuffle: false,
        ..ChatDataConfig::default()
    }
}

fn open(config: &ChatDataConfig) -> Result<ChatData> {
    ChatData::setup(config, &DataContext::default())
}

/// Each conversation as text up to the last learned token, with the learned parts in brackets.
fn shown(data: &ChatData) -> Vec<String> {
    let text = |i: u64| {
        let batch = data.batch(Split::Train, &[i], &Device::Cpu).unwrap();
        let inputs = batch.inputs.flatten_all().unwrap().to_vec1::<u32>().unwrap();
        let targets = batch.targets.flatten_all().unwrap().to_vec1::<i64>().unwrap();
        let (mut text, mut inside) = (char::from(inputs[0] as u8).to_string(), false);
        let last = targets.iter().rposition(|target| *target != -100).unwrap();
        for (i, target) in targets[..=last].iter().enumerate() {
            let learned = *target != -100;
            if learned != inside {
                text.push(if inside { ']' } else { '[' });
                inside = learned;
            }
            let next = if learned { *target } else { i64::from(inputs[i + 1]) };
            text.push(u8::try_from(next).map_or('$', char::from));
        }
        text + "]"
    };
    (0..data.len(Split::Train)).map(text).collect()
}

fn shown_rows(rows: &[Value], change: impl Fn(&mut ChatDataConfig)) -> Vec<String> {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path(), rows);
    change(&mut config);
    shown(&open(&config).unwrap())
}

/// The error of rows, without the path.
fn error(rows: &[Value], change: impl Fn(&mut ChatDataConfig)) -> String {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path(), rows);
    change(&mut config);
    let error = open(&config).unwrap_err().to_string();
    error.replace(dir.path().to_str().unwrap(), "DIR")
}

fn turns() -> Value {
    json!({"messages": [
        {"role": "system", "content": "S"}, {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]})
}

#[test]
fn answers_of_each_form_are_learned() {
    let rows = [
        json!({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}]}),
        json!({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "yes"}]}),
        json!({"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "yes"}]}),
        json!({"instruction": "q", "input": "", "output": "yes"}),
    ];
    let expected = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n[yes<|im_end|>]";
    assert_eq!(shown_rows(&rows[..2], |_| {}), [expected; 2]);
    // Without marks for each message, the template's text behind the prompt is learned.
    let behind = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n[yes<|im_end|>\n]";
    assert_eq!(shown_rows(&rows[2..3], |_| {}), [behind]);
    assert_eq!(shown_rows(&rows[3..], |_| {}), [expected]);
    let with_input = json!({"instruction": "Add", "input": "1 2", "output": "3", "system": "S"});
    assert_eq!(
        shown_rows(&[with_input], |_| {}),
        [
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nAdd\n\n1 2<|im_end|>\n<|im_start|>assistant\n[3<|im_end|>]"
        ]
    );
    let plain = json!({"prompt": "2+2=", "completion": "4"});
    assert_eq!(shown_rows(&[plain], |config| config.chat_template = None), ["2+2=[4$]"]);
}

#[test]
fn train_on_chooses_what_is_learned() {
    let learned = |train_on| {
        let shown = shown_rows(&[turns()], |config| config.train_on = train_on).swap_remove(0);
        let parts = shown.split('[').skip(1).filter_map(|part| part.split_once(']'));
        parts.map(|(part, _)| part.to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(learned(TrainOn::Answers), ["b<|im_end|>", "d<|im_end|>"]);
    assert_eq!(learned(TrainOn::Last), ["d<|im_end|>"]);
    let all = shown_rows(&[turns()], |config| config.train_on = TrainOn::All).swap_remove(0);
    assert!(all.starts_with("<[|im_start|>system") && all.ends_with("<|im_end|>\n]"), "{all}");
}

/// Writes a template, and returns its path.
fn template(dir: &Path, text: &str) -> Option<String> {
    let file = dir.join("template.jinja");
    std::fs::write(&file, text).unwrap();
    file.to_str().map(str::to_owned)
}

#[test]
fn prefixes_find_answers_without_marks() {
    let dir = tempfile::tempdir().unwrap();
    let plain = template(
        dir.path(),
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}\
         {% if add_generation_prompt %}<assistant>{% endif %}",
    );
    let shown = shown_rows(&[turns()], |config| config.chat_template = plain.clone());
    assert_eq!(shown, ["<system>S</><user>a</><assistant>[b</>]<user>c</><assistant>[d</>]"]);
    // Only the last answer keeps its thoughts.
    let drops = template(
        dir.path(),
        "{% for m in messages %}<{{ m.role }}>{% if loop.last %}!{% endif %}{{ m.content }}</>{% endfor %}\
         {% if add_generation_prompt %}<assistant>{% endif %}",
    );
    let error = error(&[turns()], |config| config.chat_template = drops.clone());
    let error = error.replace(dir.path().to_str().unwrap(), "DIR");
    assert_says!(error, "data: DIR/rows.jsonl, line 1 … message 2, that cannot be found …");
}

#[test]
fn bad_rows_are_named() {
    let says = |row: Value| error(&[turns(), row], |_| {});
    let user = json!({"role": "user", "content": "q"});
    assert_says!(says(json!({"text": "x"})), "data: DIR/rows.jsonl, line 2 is no conversation …");
    assert_says!(says(json!({"messages": [user]})), "data: DIR/rows.jsonl, line 2 has no answer …");
    assert_says!(says(json!({"messages": []})), "data: DIR/rows.jsonl, line 2 has an empty list …");
    assert_says!(
        says(json!({"messages": [{"role": "robot", "content": "x"}]})),
        r#"data: DIR/rows.jsonl, line 2 … message 0 of the unknown role "robot" …"#
    );
    assert_says!(says(json!({"messages": [{"role": "user"}]})), "… line 2 … 0 without `content`");
    assert_says!(says(json!({"messages": "hello"})), "data: … line 2 … `messages` … not JSON …");
    assert_says!(says(json!({"prompt": "x"})), "data: DIR/rows.jsonl, line 2 … no `completion`");
    let rows = [turns(), json!({"text": "x"})];
    assert_eq!(shown_rows(&rows, |config| config.on_error = OnError::Skip).len(), 1);
    assert_says!(
        error(&rows[1..], |config| config.on_error = OnError::Skip),
        "data: data.path has no conversation … of 1 rows; `fulgurite data inspect` …"
    );
    let refuses = |config: &mut ChatDataConfig| {
        config.chat_template =
            template(config.path_dir(), "{{ raise_exception('no system, please') }}");
    };
    assert_says!(error(&[turns()], refuses), "data: DIR/rows.jsonl, line 1 … no system, please");
    let broken = |config: &mut ChatDataConfig| {
        config.chat_template = template(config.path_dir(), "{% for m in messages %}\n{% if %}");
    };
    assert_says!(error(&[turns()], broken), "DIR/template.jinja, line 2 … unexpected end of block");
    let dated = |config: &mut ChatDataConfig| {
        config.chat_template = template(config.path_dir(), "{{ strftime_now('%Y') }}");
    };
    assert_says!(error(&[turns()], dated), "data: … line 1 … date of today … data.template_date");
    assert_says!(
        error(&[turns()], |config| config.chat_template = None),
        r#"data.chat_template is missing … name a file, or "chatml""#
    );
    assert_says!(
        error(&[turns()], |config| config.template_date = Some("today".into())),
        r#"data.template_date: expected a date … found "today""#
    );
}

trait PathDir {
    /// The folder of the rows.
    fn path_dir(&self) -> &Path;
}

impl PathDir for ChatDataConfig {
    fn path_dir(&self) -> &Path {
        match &self.path {
            fulgurite_data::Paths::One(path) => path.parent().unwrap(),
            fulgurite_data::Paths::Many(_) => unreachable!("one file"),
        }
    }
}

#[test]
fn long_conversations_are_cut_or_left_out() {
    let row = |answer: &str| json!({"prompt": "12345678", "completion": answer});
    let rows = [row("ab"), row("abcdef")];
    let shown = |too_long| {
        shown_rows(&rows, |config| {
            config.seq_len = 12;
            config.too_long = too_long;
        })
    };
    assert_eq!(shown(TooLong::Cut), ["12345678[ab$]", "12345678[abcd]"]);
    assert_eq!(shown(TooLong::Skip), ["12345678[ab$]"]);
    let wrong = error(&rows, |config| {
        config.seq_len = 12;
        config.too_long = TooLong::Error;
    });
    assert_says!(wrong, "data: DIR/rows.jsonl, line 2 has 15 tokens … data.seq_len is 12 …");
    // Nothing of the answer is left.
    let none = error(&rows, |config| config.seq_len = 8);
    assert_says!(none, "data: data.path has no conversation … 2 rows; `fulgurite data inspect` …");
}

#[test]
fn packed_conversations_are_documents() {
    let dir = tempfile::tempdir().unwrap();
    let rows: Vec<Value> =
        ["a", "bbbbbb", "cc"].map(|text| json!({"prompt": text, "completion": "!"})).into();
    let config = ChatDataConfig { seq_len: 8, packing: true, ..config(dir.path(), &rows) };
    let data = open(&config).unwrap();
    // Sizes without the last token: 2, 7, 3.
    assert_eq!(data.len(Split::Train), 2);
    let batch = data.batch(Split::Train, &[0, 1], &Device::Cpu).unwrap();
    assert_eq!(ChatData::documents(&batch).unwrap(), [vec![2, 3, 3], vec![7, 1]]);
    let targets = batch.targets.to_vec2::<i64>().unwrap();
    assert_eq!(targets[0], [33, 256, -100, 33, 256, -100, -100, -100]);
    let inputs = batch.inputs.to_vec2::<u32>().unwrap();
    assert_eq!(inputs[0], [97, 33, 99, 99, 33, 256, 256, 256]);
}

#[test]
fn cached_ids_are_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let words = ["[UNK]", "a", "b", "yes", "no"];
    let vocab: serde_json::Map<String, Value> =
        words.iter().enumerate().map(|(i, word)| ((*word).to_owned(), i.into())).collect();
    let tokenizer = json!({"version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}});
    std::fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let rows: Vec<Value> = (0..50)
        .map(|i| json!({"prompt": "a ".repeat(i % 7 + 1), "completion": "yes no"}))
        .collect();
    let mut config = config(dir.path(), &rows);
    config.tokenizer = dir.path().to_str().map(str::to_owned);
    config.chat_template = None;
    let fresh = shown(&open(&config).unwrap());
    config.cache_dir = CacheDir::At(dir.path().join("cache"));
    let written = shown(&open(&config).unwrap());
    let files = || std::fs::read_dir(dir.path().join("cache")).unwrap().count();
    assert_eq!((fresh.len(), files()), (50, 1));
    let read = shown(&open(&config).unwrap());
    assert_eq!((&written, &read, files()), (&fresh, &fresh, 1));
    config.train_on = TrainOn::All;
    assert_ne!(shown(&open(&config).unwrap()), fresh);
    assert_eq!(files(), 2);
}
