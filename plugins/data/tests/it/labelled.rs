//! Labelled texts, tagged words and pairs of texts.

use std::fs;
use std::path::Path;

use candle_core::Device;
use fulgurite_core::Result;
use fulgurite_core::data::{DataContext, DataModule as _, Split};
use fulgurite_data::{LabelKind, LabelledTexts, Labels, TextBatch};
use fulgurite_test_message::assert_says;
use serde_json::{Value, json};
use tempfile::TempDir;

/// A tokenizer of word pieces with BERT's special tokens.
fn tokenizer() -> Value {
    let specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"];
    let words = ["the", "cat", "##s", "run", "##ning", "good", "bad"];
    let added = specials.iter().enumerate().map(|(id, content)| {
        json!({"id": id, "content": content, "special": true, "single_word": false,
               "lstrip": false, "rstrip": false, "normalized": false})
    });
    let vocab: serde_json::Map<String, Value> = specials
        .iter()
        .chain(&words)
        .enumerate()
        .map(|(id, name)| ((*name).to_owned(), id.into()))
        .collect();
    let special = |name: &str, id: u32| json!({"id": name, "ids": [id], "tokens": [name]});
    let (token, a, b) = (
        |name: &str, segment: u32| json!({"SpecialToken": {"id": name, "type_id": segment}}),
        json!({"Sequence": {"id": "A", "type_id": 0}}),
        json!({"Sequence": {"id": "B", "type_id": 1}}),
    );
    json!({"version": "1.0", "truncation": null, "padding": null, "normalizer": null,
           "added_tokens": added.collect::<Vec<_>>(), "pre_tokenizer": {"type": "Whitespace"},
           "post_processor": {"type": "TemplateProcessing",
               "single": [token("[CLS]", 0), a.clone(), token("[SEP]", 0)],
               "pair": [token("[CLS]", 0), a, token("[SEP]", 0), b, token("[SEP]", 1)],
               "special_tokens": {"[CLS]": special("[CLS]", 2), "[SEP]": special("[SEP]", 3)}},
           "decoder": null,
           "model": {"type": "WordPiece", "vocab": vocab, "unk_token": "[UNK]",
                     "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}})
}

/// A folder with the tokenizer and these files.
fn folder(files: &[(&str, &str)]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("tokenizer.json"), tokenizer().to_string()).unwrap();
    for (name, content) in files {
        fs::write(dir.path().join(name), content).unwrap();
    }
    dir
}

fn setup(dir: &Path, file: &str, keys: &str) -> Result<LabelledTexts> {
    let fraction = match keys.contains("validation_") {
        true => "",
        false => "validation_fraction = 0.0\n",
    };
    let text = format!(
        "path = {:?}\ntokenizer = {:?}\n{fraction}{}",
        dir.join(file),
        dir.join("tokenizer.json"),
        keys.replace("DIR", &dir.display().to_string())
    );
    LabelledTexts::setup(&toml::from_str(&text).unwrap(), &DataContext::default())
}

fn batch(data: &LabelledTexts, split: Split) -> TextBatch {
    let indices: Vec<u64> = (0..data.len(split)).collect();
    data.batch(split, &indices, &Device::Cpu).unwrap()
}

fn error(dir: &TempDir, file: &str, keys: &str) -> String {
    let error = setup(dir.path(), file, keys).unwrap_err().to_string();
    error.replace(&dir.path().display().to_string(), "DIR")
}

#[test]
fn formats_have_the_same_rows() {
    let dir = folder(&[
        (
            "a.jsonl",
            "{\"text\": \"the cats\", \"label\": \"pos\"}\n\n{\"label\": \"neg\", \"text\": \"bad\"}\n",
        ),
        ("a.csv", "label,text\npos,\"the cats\"\nneg,bad\n"),
        ("a.tsv", "text\tlabel\nthe cats\tpos\nbad\tneg\n"),
    ]);
    for file in ["a.jsonl", "a.csv", "a.tsv"] {
        let data = setup(dir.path(), file, "pad_to_multiple_of = 4").unwrap();
        assert_eq!(data.class_names().unwrap(), ["neg", "pos"], "{file}");
        assert_eq!((data.vocab_size(), data.num_segments()), (12, 1));
        let batch = batch(&data, Split::Train);
        let expected = [[2, 5, 6, 7, 3, 0, 0, 0], [2, 11, 3, 0, 0, 0, 0, 0]];
        assert_eq!(batch.texts.ids.to_vec2::<u32>().unwrap(), expected, "{file}");
        let mask = [[1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0]];
        assert_eq!(batch.texts.mask.to_vec2::<u8>().unwrap(), mask);
        assert_eq!(batch.texts.lengths, [5, 3]);
        assert_eq!(batch.labels, Labels::Classes(vec![1, 0]));
    }
}

#[test]
fn pairs_of_texts_have_segments_and_are_cut() {
    let rows = "{\"text\": \"the cat run good\", \"b\": \"bad\", \"label\": 0}\n{\"text\": \"the\", \"b\": \"cat\", \"label\": 1}\n";
    let dir = folder(&[("a.jsonl", rows)]);
    let data = setup(dir.path(), "a.jsonl", "text_pair_key = 'b'\nseq_len = 6").unwrap();
    let batch = batch(&data, Split::Train);
    // The longer text loses its end.
    let expected = [[2, 5, 6, 3, 11, 3], [2, 5, 3, 6, 3, 0]];
    assert_eq!(batch.texts.ids.to_vec2::<u32>().unwrap(), expected);
    let segments = [[0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 0]];
    assert_eq!(batch.texts.segments.to_vec2::<u32>().unwrap(), segments);
    assert_eq!((data.num_segments(), data.num_classes(), batch.longest), (2, 2, 6));
    assert_eq!(data.class_names(), None);
    let report = data.report().unwrap().to_string();
    assert_eq!(report, "data.path: 1 cut to data.seq_len, 1 file, 2 rows");
}

#[test]
fn first_piece_of_a_word_has_its_tag() {
    let rows = "{\"tokens\": [\"the\", \"cats\", \"running\"], \"tags\": [\"O\", \"B\", \"O\"]}\n{\"tokens\": [\"cat\"], \"tags\": [\"B\"]}\n";
    let dir = folder(&[("a.jsonl", rows)]);
    let data = setup(dir.path(), "a.jsonl", "type = 'words'").unwrap();
    let all = batch(&data, Split::Train);
    let expected = [[2, 5, 6, 7, 8, 9, 3], [2, 6, 3, 0, 0, 0, 0]];
    assert_eq!(all.texts.ids.to_vec2::<u32>().unwrap(), expected);
    let i = -100;
    let tags = [i, 1, 0, i, 1, i, i, i, 0, i, i, i, i, i];
    assert_eq!(all.labels, Labels::Classes(tags.into()));
    let cut = setup(dir.path(), "a.jsonl", "type = 'words'\nseq_len = 5").unwrap();
    let tags = [i, 1, 0, i, i, i, 0, i, i, i];
    assert_eq!(batch(&cut, Split::Train).labels, Labels::Classes(tags.into()));
}

#[test]
fn pairs_have_other_texts() {
    let rows = "anchor,positive,wrong\nthe cat,cats,bad\ngood,the,run\n";
    let dir = folder(&[("a.csv", rows)]);
    let data = setup(dir.path(), "a.csv", "type = 'pairs'\nnegative_key = 'wrong'").unwrap();
    let batch = batch(&data, Split::Train);
    let ids = |texts: &fulgurite_data::PaddedTexts| texts.ids.to_vec2::<u32>().unwrap();
    assert_eq!(ids(&batch.texts), [[2, 5, 6, 3], [2, 10, 3, 0]]);
    assert_eq!(ids(&batch.others[0]), [[2, 6, 7, 3], [2, 5, 3, 0]]);
    assert_eq!(ids(&batch.others[1]), [[2, 11, 3], [2, 8, 3]]);
    assert_eq!((batch.labels, data.label_kind()), (Labels::None, LabelKind::None));
}

#[test]
fn labels_of_all_kinds() {
    let rows = |labels: [&str; 2]| {
        labels.map(|label| format!("{{\"text\": \"cat\", \"label\": {label}}}\n")).concat()
    };
    let read = |labels, keys: &str| {
        let dir = folder(&[("a.jsonl", &rows(labels))]);
        let data = setup(dir.path(), "a.jsonl", keys).unwrap();
        (data.label_kind(), batch(&data, Split::Train).labels)
    };
    let classes = |classes: [i64; 2]| (LabelKind::Classes, Labels::Classes(classes.into()));
    assert_eq!(read(["\"b\"", "\"a\""], ""), classes([1, 0]));
    assert_eq!(read(["\"b\"", "\"a\""], "labels = ['b', 'x', 'a']"), classes([0, 2]));
    assert_eq!(read(["3", "0"], ""), classes([3, 0]));
    assert_eq!(read(["true", "false"], ""), classes([1, 0]));
    let numbers = |width, rows: [&[f32]; 2]| {
        (LabelKind::Numbers(width), Labels::Numbers(rows.map(<[f32]>::to_vec).into()))
    };
    assert_eq!(read(["0.5", "2"], ""), numbers(1, [&[0.5], &[2.0]]));
    assert_eq!(read(["-1", "2.0"], ""), numbers(1, [&[-1.0], &[2.0]]));
    assert_eq!(read(["[1.0, 0.0]", "[0.0, 0.5]"], ""), numbers(2, [&[1.0, 0.0], &[0.0, 0.5]]));
    let sets =
        |rows: [&[u32]; 2]| (LabelKind::Sets, Labels::Sets(rows.map(<[u32]>::to_vec).into()));
    assert_eq!(read(["[\"b\", \"a\"]", "[]"], ""), sets([&[1, 0], &[]]));
    assert_eq!(read(["[2]", "[0, 1]"], ""), sets([&[2], &[0, 1]]));

    let csv = |labels: &str, keys| {
        let dir = folder(&[("a.csv", &format!("text,label\n{labels}"))]);
        let data = setup(dir.path(), "a.csv", keys).unwrap();
        (data.label_kind(), batch(&data, Split::Train).labels)
    };
    assert_eq!(csv("cat,1\ncat,0\n", ""), classes([1, 0]));
    assert_eq!(csv("cat,1\ncat,0\n", "labels = ['1', '0']"), classes([0, 1]));
    assert_eq!(csv("cat,1\ncat,0.5\n", ""), numbers(1, [&[1.0], &[0.5]]));
    assert_eq!(csv("cat,1\ncat,x\n", ""), classes([0, 1]));
}

#[test]
fn splits_have_their_rows() {
    let rows: String =
        (0..20).map(|i| format!("{{\"text\": \"cat\", \"label\": {i}}}\n")).collect();
    let dir = folder(&[
        ("a.jsonl", &rows),
        ("b.jsonl", "{\"text\": \"bad\", \"label\": 1}\n"),
        ("c.jsonl", "{\"text\": \"good\"}\n"),
    ]);
    let lens = |data: &LabelledTexts| {
        [Split::Train, Split::Validation, Split::Test, Split::Predict].map(|split| data.len(split))
    };
    let a = setup(dir.path(), "a.jsonl", "validation_fraction = 0.25").unwrap();
    assert_eq!(lens(&a), [15, 5, 5, 5]);
    let again = setup(dir.path(), "a.jsonl", "validation_fraction = 0.25").unwrap();
    assert_eq!(batch(&a, Split::Validation).labels, batch(&again, Split::Validation).labels);
    assert_ne!(batch(&a, Split::Validation).labels, Labels::Classes((15..20).collect()));
    let keys = "validation_path = 'DIR/b.jsonl'\npredict_path = 'DIR/c.jsonl'";
    let data = setup(dir.path(), "a.jsonl", keys).unwrap();
    assert_eq!(lens(&data), [20, 1, 1, 1]);
    assert_eq!(batch(&data, Split::Predict).labels, Labels::None);
    assert_ne!(a.fingerprint().unwrap(), data.fingerprint().unwrap());
}

#[test]
fn mistakes_are_explained() {
    let dir = folder(&[
        (
            "a.jsonl",
            "{\"text\": \"cat\", \"label\": \"pos\"}\n{\"text\": \"cat\", \"label\": \"neg\"}\n",
        ),
        ("b.jsonl", "\n{\"text\": \"bad\", \"label\": \"odd\"}\n"),
        ("c.jsonl", "{\"body\": \"bad\", \"label\": 1}\n"),
        ("d.jsonl", "{\"text\": \"bad\", \"label\": null}\n"),
        ("e.jsonl", "{\"text\": \"bad\", \"label\": 1}\n{\"text\": \"bad\", \"label\": \"x\"}\n"),
        ("f.jsonl", "{\"text\": 7, \"label\": 1}\n"),
        ("g.jsonl", "{\"text\": \"bad\", \"label\": [1]}\n{\"text\": \"bad\", \"label\": 1}\n"),
        ("h.jsonl", "{\"tokens\": [\"bad\", \"cat\"], \"tags\": [1]}\n"),
        ("i.jsonl", "{\"text\": \"bad\", \"label\": 1\n"),
        ("negative.csv", "text,label\nbad,1\nbad,-1\n"),
        ("numbers.csv", "text,label\nbad,1\nbad,-0.5\n"),
        ("hot.jsonl", "{\"text\": \"bad\", \"label\": [0, 1, 1]}\n"),
        (
            "all.jsonl",
            "{\"text\": \"bad\", \"label\": [0, 1]}\n{\"text\": \"bad\", \"label\": [1, 0]}\n",
        ),
        ("empty.jsonl", ""),
        ("header.csv", "text,label\n"),
        ("short.csv", "text,label\nbad,1\nbad\n"),
        ("other.csv", "body,label\nbad,1\n"),
        ("a.txt", "text"),
    ]);
    let plain = |file| error(&dir, file, "");
    assert_says!(
        error(&dir, "a.jsonl", "validation_path = 'DIR/b.jsonl'"),
        r#"data: DIR/b.jsonl, line 2 … "odd" … (data.label_key) … none of … neg, pos"#
    );
    assert_says!(
        error(&dir, "a.jsonl", "labels = ['neg', 'other']"),
        r#"data: DIR/a.jsonl, line 1 … "pos" … (data.label_key) … none of … neg, other"#
    );
    assert_says!(plain("c.jsonl"), "data: DIR/c.jsonl, line 1 … no column … (data.text_key) …");
    assert_says!(plain("d.jsonl"), "data: DIR/d.jsonl, line 1 has no label … (data.label_key)");
    assert_says!(plain("e.jsonl"), r#"data: DIR/e.jsonl, line 1 … a number … "label" … names"#);
    assert_says!(plain("f.jsonl"), r#"data: DIR/f.jsonl, line 1 has no text under "text" … but 7"#);
    assert_says!(plain("g.jsonl"), r#"data: DIR/g.jsonl, line 2 differs … a list … "label" …"#);
    assert_says!(error(&dir, "h.jsonl", "type = 'words'"), "data: … line 1 … 2 words and 1 tags …");
    assert_says!(plain("i.jsonl"), "data: DIR/i.jsonl, line 1 does not parse: EOF … `jq -c .` …");
    assert_says!(plain("negative.csv"), "data: DIR/negative.csv, line 3 … integer below 0 …");
    assert_says!(
        error(&dir, "numbers.csv", "labels = ['neg', 'pos']"),
        "data.labels names classes … numbers … (data.label_key); leave data.labels out"
    );
    assert_says!(plain("hot.jsonl"), "data: DIR/hot.jsonl, line 1 … class twice in [0,1,1] …");
    assert_says!(plain("all.jsonl"), "data: DIR/all.jsonl, line 1 … lists of classes …");
    assert_says!(plain("empty.jsonl"), "data: DIR/empty.jsonl (data.path) has no rows");
    assert_says!(plain("header.csv"), "data: DIR/header.csv (data.path) has no rows");
    assert_says!(plain("short.csv"), "data: DIR/short.csv, line 3 has 1 values … names 2 columns");
    assert_says!(plain("other.csv"), r#"data: DIR/other.csv … no column "text" (data.text_key) …"#);
    assert_says!(plain("a.txt"), "data: DIR/a.txt (data.path) … read from files named .jsonl …");
    assert_says!(error(&dir, "a.jsonl", "seq_len = 2"), "data.seq_len = 2 leaves no place …");
    assert_says!(
        error(&dir, "a.jsonl", "tokens_key = 'words'"),
        r#"data.tokens_key is for data.type = "words" … "texts""#
    );
    assert_says!(error(&dir, "a.jsonl", "labels = ['a', 'a']"), r#"data.labels names "a" twice"#);
    assert_says!(error(&dir, "a.jsonl", "pad_token = 'x'"), r#"data.pad_token = "x" is not one …"#);
}

#[cfg(feature = "parquet")]
#[test]
fn parquet_has_lists_of_words() {
    use std::sync::Arc;

    use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::parser::parse_message_type;

    // The shape that pyarrow gives lists.
    let schema = "message schema {
        optional group tokens (LIST) { repeated group list { optional binary element (UTF8); } }
        optional group tags (LIST) { repeated group list { optional int64 element; } }
    }";
    let dir = folder(&[]);
    let path = dir.path().join("a.parquet");
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let file = fs::File::create(&path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema, Arc::default()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let (present, repeated) = ([3; 3], [0, 1, 0]);
    let mut column = group.next_column().unwrap().unwrap();
    let words = ["the", "cats", "bad"].map(ByteArray::from);
    column.typed::<ByteArrayType>().write_batch(&words, Some(&present), Some(&repeated)).unwrap();
    column.close().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    let tags = [0, 2, 1];
    column.typed::<Int64Type>().write_batch(&tags, Some(&present), Some(&repeated)).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();
    let data = setup(dir.path(), "a.parquet", "type = 'words'").unwrap();
    let all = batch(&data, Split::Train);
    let expected = [[2, 5, 6, 7, 3], [2, 11, 3, 0, 0]];
    assert_eq!(all.texts.ids.to_vec2::<u32>().unwrap(), expected);
    assert_eq!(
        all.labels,
        Labels::Classes(vec![-100, 0, 2, -100, -100, -100, 1, -100, -100, -100])
    );
    let keys = "type = 'words'\ntags_key = 'ner'";
    assert_says!(error(&dir, "a.parquet", keys), r#"data: DIR/a.parquet … no column "ner" …"#);
}
