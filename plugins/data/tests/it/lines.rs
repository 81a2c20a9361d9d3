//! Files of lines and of JSON lines.

use candle_core::Device;
use fulgurite_core::data::{DataContext, DataModule as _, Split};
use fulgurite_data::{DataKind, JsonLines, Lines, TextData, TextDataConfig};
use fulgurite_test_message::assert_says;
use proptest::prelude::*;
use tempfile::TempDir;

fn folder(files: &[(&str, &str)]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, content) in files {
        std::fs::write(dir.path().join(name), content).unwrap();
    }
    dir
}

fn named(dir: &TempDir, error: fulgurite_core::Error) -> String {
    error.to_string().replace(dir.path().to_str().unwrap(), "DIR")
}

proptest! {
    #[test]
    fn lines_equal_the_text(texts in prop::collection::vec("([a-zé]{0,9} ?\r?\n?){0,8}", 1..4)) {
        let names = ["a.txt", "b.txt", "c.txt"];
        let files: Vec<_> = names.into_iter().zip(texts.iter().map(String::as_str)).collect();
        let dir = folder(&files);
        let expected: Vec<&str> =
            texts.iter().flat_map(|text| text.lines()).filter(|line| !line.trim().is_empty()).collect();
        match Lines::open(&[dir.path()]) {
            Err(error) => {
                prop_assert!(expected.is_empty());
                prop_assert!(error.to_string().ends_with("there are no lines"));
            }
            Ok(lines) => {
                let read: Vec<String> = (0..lines.len()).map(|i| lines.get(i).unwrap()).collect();
                prop_assert_eq!(read, expected);
                prop_assert!(lines.get(lines.len()).is_err());
            }
        }
    }
}

#[test]
fn bad_line_is_named_by_file_and_number() {
    let dir = folder(&[
        ("a.jsonl", "{\"text\": \"one\", \"n\": 1}\n\n{\"text\": 2}\n[3]\n{\"text\": \"four\"\n"),
        ("b.jsonl", "{\"n\": 5, \"content\": \"x\"}\n"),
    ]);
    let lines = JsonLines::open(&[dir.path()]).unwrap();
    #[derive(Debug, serde::Deserialize, PartialEq)]
    struct Row {
        n: u32,
    }
    assert_eq!(lines.len(), 5);
    assert_eq!(lines.get::<Row>(0).unwrap(), Row { n: 1 });
    let error = |i| named(&dir, lines.get::<Row>(i).unwrap_err());
    assert_says!(error(1), "data: DIR/a.jsonl, line 3 does not parse … `n` at column 11");
    assert_says!(error(3), "data: DIR/a.jsonl, line 5 does not parse … column 15 … `jq -c .` …");

    let texts = |keys: &str| {
        let text = format!("type = 'jsonl'\nseq_len = 2\npath = {:?}\n{keys}", dir.path());
        let config: TextDataConfig = toml::from_str(&text).unwrap();
        named(&dir, TextData::setup(&config, &DataContext::default()).unwrap_err())
    };
    assert_says!(texts(""), "data: DIR/a.jsonl, line 3 … no text … (data.text_key), but 2 …");
    assert_says!(texts("text_key = 'content'"), r#"data: DIR/a.jsonl … no key "content" …"#);
    let empty = folder(&[("x.txt", "")]);
    assert_says!(
        named(&empty, JsonLines::open(&[empty.path()]).unwrap_err()),
        "data: the folder DIR (the given path) holds no files … 1 of another type (x.txt)"
    );

    // A file that changes while it is read.
    let path = dir.path().join("a.jsonl");
    std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(3).unwrap();
    assert_says!(error(0), "data: DIR/a.jsonl had 57 bytes … has 3 bytes now … must not change …");
}

#[test]
fn every_document_gets_an_end_token() {
    let dir =
        folder(&[("a.txt", "ab\ncd\n"), ("a.jsonl", "{\"body\": \"ab\"}\n{\"body\": \"cd\"}\n")]);
    for keys in ["type = 'lines'", "type = 'jsonl'\ntext_key = 'body'"] {
        let text =
            format!("seq_len = 5\nvalidation_fraction = 0.0\npath = {:?}\n{keys}", dir.path());
        let data =
            TextData::setup(&toml::from_str(&text).unwrap(), &DataContext::default()).unwrap();
        let batch = data.batch(Split::Train, &[0], &Device::Cpu).unwrap();
        let (a, b, c, d) = (97, 98, 99, 100);
        assert_eq!(batch.inputs.to_vec2::<u32>().unwrap(), [[a, b, 256, c, d]], "{keys}");
        assert_eq!(batch.targets.to_vec2::<i64>().unwrap()[0][4], 256);
    }
    let config = TextDataConfig { text_key: Some("a".into()), ..TextDataConfig::default() };
    let error = TextData::setup(&config, &DataContext::default()).unwrap_err();
    assert_says!(error, r#"data.text_key is for data.type = "jsonl" or "parquet""#);
    if !cfg!(feature = "parquet") {
        let config = TextDataConfig { kind: DataKind::Parquet, ..TextDataConfig::default() };
        let error = TextData::setup(&config, &DataContext::default()).unwrap_err();
        assert_says!(error, r#"data.type = "parquet" … compiled in … feature `parquet`"#);
    }
}
