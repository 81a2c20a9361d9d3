//! Prompts whose answers are rewarded.

use std::path::Path;

use candle_core::Device;
use fulgurite_core::Result;
use fulgurite_core::data::{DataContext, DataModule as _, Split};
use fulgurite_data::{OnError, PromptData, PromptDataConfig};
use serde_json::{Value, json};

fn config(dir: &Path, rows: &[Value]) -> PromptDataConfig {
    let rows: String = rows.iter().map(|row| format!("{row}\n")).collect();
    std::fs::write(dir.join("rows.jsonl"), rows).unwrap();
    PromptDataConfig {
        path: dir.join("rows.jsonl").as_path().into(),
        tokenizer: Some("bytes".to_owned()),
        chat_template: Some("chatml".to_owned()),
        validation_fraction: Some(0.0),
        ..PromptDataConfig::default()
    }
}

fn open(rows: &[Value], change: impl Fn(&mut PromptDataConfig)) -> Result<PromptData> {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path(), rows);
    change(&mut config);
    PromptData::setup(&config, &DataContext::default())
}

/// The text of each prompt.
fn texts(data: &PromptData) -> Vec<String> {
    let indices: Vec<u64> = (0..data.len(Split::Train)).collect();
    let batch = data.batch(Split::Train, &indices, &Device::Cpu).unwrap();
    batch.rows.iter().map(|row| data.tokenizer().decode(&row.ids).unwrap()).collect()
}

#[test]
fn prompts_of_each_form_are_read() {
    let messages = json!([{"role": "user", "content": "2+2"}]);
    let rows = [
        json!({"prompt": "2+2=", "answer": 4, "level": "easy"}),
        json!({"prompt": messages, "answer": "4"}),
        json!({"messages": messages, "system": "Be brief."}),
    ];
    let data = open(&rows, |config| config.columns = vec!["level".to_owned()]).unwrap();
    let user = "<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n";
    let system = "<|im_start|>system\nBe brief.<|im_end|>\n";
    assert_eq!(texts(&data), ["2+2=".to_owned(), user.to_owned(), format!("{system}{user}")]);
    let batch = data.batch(Split::Train, &[0], &Device::Cpu).unwrap();
    let columns = Value::Object(batch.rows[0].columns.clone());
    assert_eq!(columns, json!({"prompt": "2+2=", "answer": 4, "level": "easy"}));
    let flaw = data.flaw(|columns| (!columns.contains_key("answer")).then(|| "is open".to_owned()));
    let (place, flaw) = flaw.unwrap();
    assert!(place.ends_with("rows.jsonl, line 3") && flaw == "is open", "{place} {flaw}");
}

#[test]
fn long_prompts_are_left_out_and_counted() {
    let rows = ["short", "a longer prompt", "brief"].map(|text| json!({"prompt": text}));
    let data = open(&rows, |config| config.seq_len = 8).unwrap();
    assert_eq!(texts(&data), ["short", "brief"]);
    let report = data.report().unwrap().to_string();
    assert!(report.contains("longer than data.seq_len"), "{report}");
    assert_eq!(data.longest(), 5);
    let none = open(&rows, |config| config.seq_len = 2).unwrap_err().to_string();
    assert!(none.contains("no prompt to answer, of 3 rows"), "{none}");
}

#[test]
fn rows_that_are_no_prompts_are_named() {
    let good = json!({"prompt": "2+2="});
    let answered =
        json!([{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]);
    for (bad, text) in [
        (json!({"answer": 4}), "has neither `prompt`"),
        (json!({"prompt": "a", "messages": answered}), "has both `prompt` and `messages`"),
        (json!({"prompt": ""}), "has an empty prompt"),
        (json!({"prompt": 5}), "no list of messages"),
        (json!({"messages": answered}), "messages that end with one of the assistant"),
        (json!({"messages": [{"role": "robot", "content": "2"}]}), "unknown role"),
    ] {
        let rows = [good.clone(), bad];
        let error = open(&rows, |_| ()).unwrap_err().to_string();
        assert!(error.contains("rows.jsonl, line 2") && error.contains(text), "{error}");
        let data = open(&rows, |config| config.on_error = OnError::Skip).unwrap();
        assert_eq!(texts(&data), ["2+2="]);
    }
}
