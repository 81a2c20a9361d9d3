//! Chat templates of released models against `transformers`. Needs a Python with both:
//!
//! ```sh
//! target/interop/bin/pip install transformers && target/interop/bin/pip install --no-deps trl
//! FULGURITE_PYTHON=target/interop/bin/python cargo test -p fulgurite-data --test it chat_interop -- --ignored
//! ```

use std::path::PathBuf;
use std::process::Command;

use fulgurite_data::{ChatTemplate, TemplateOptions};
use serde::Deserialize;

#[derive(Deserialize)]
struct Line {
    name: String,
    template: String,
    messages: Vec<minijinja::Value>,
    tools: Option<minijinja::Value>,
    prompt: bool,
    text: Option<String>,
    answers: Option<Vec<[usize; 2]>>,
    error: Option<String>,
}

/// The characters of a range of bytes.
fn characters(text: &str, bytes: &std::ops::Range<usize>) -> [usize; 2] {
    [bytes.start, bytes.end].map(|byte| text[..byte].chars().count())
}

#[test]
#[ignore = "needs a Python with transformers and trl"]
fn templates_render_as_in_transformers() {
    let python = std::env::var("FULGURITE_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("rendered.jsonl");
    let script =
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/interop/chat_templates.py");
    let status = Command::new(&python).arg(script).arg(&output).status();
    assert!(status.unwrap_or_else(|e| panic!("{python}: {e}")).success());
    let (mut same, mut refused, mut templates, mut different) =
        (0, 0, std::collections::BTreeSet::new(), Vec::new());
    for line in std::fs::read_to_string(output).unwrap().lines() {
        let line: Line = serde_json::from_str(line).unwrap();
        let tokens = [
            ("bos_token", "<s>"),
            ("eos_token", "</s>"),
            ("pad_token", "<pad>"),
            ("unk_token", "<unk>"),
        ];
        let options = TemplateOptions {
            variables: tokens.map(|(name, token)| (name.to_owned(), token.into())).into(),
            date: "2026-01-31".parse().ok(),
        };
        let file = dir.path().join("template.jinja");
        std::fs::write(&file, &line.template).unwrap();
        let wanted = file.to_str();
        let tools = line.tools.unwrap_or_default();
        let rendered = ChatTemplate::open(None, wanted, &options)
            .and_then(|template| template.render(&line.messages, &tools, line.prompt));
        let what =
            format!("{} of {} messages, prompt {}", line.name, line.messages.len(), line.prompt);
        match (rendered, line.text) {
            (Ok(rendered), Some(text)) => {
                let answers: Vec<[usize; 2]> = rendered
                    .answers
                    .iter()
                    .flatten()
                    .map(|answer| characters(&rendered.text, answer))
                    .collect();
                if rendered.text != text {
                    different.push(format!("{what}:\n{:?}\n{text:?}", rendered.text));
                } else if answers != line.answers.unwrap_or_default() {
                    different.push(format!("{what}: answers {answers:?}"));
                } else {
                    same += 1;
                    templates.insert(line.name);
                }
            }
            (Err(_), None) => refused += 1,
            (Ok(_), None) => {
                different.push(format!("{what}: only transformers refuses: {:?}", line.error))
            }
            (Err(error), Some(_)) => {
                different.push(format!("{what}: only transformers renders: {error}"))
            }
        }
    }
    println!(
        "{same} texts of {} templates are equal, {refused} are refused by both",
        templates.len()
    );
    assert!(different.is_empty(), "{} differ:\n{}", different.len(), different.join("\n"));
    assert!(templates.len() >= 15 && refused < same / 4);
}
