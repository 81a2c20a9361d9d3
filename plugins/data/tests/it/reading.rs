//! Files and lines that are read or skipped, and the report about them.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use candle_core::Device;
use fulgurite_core::Result;
use fulgurite_core::data::{DataContext, DataModule as _, Split};
use fulgurite_data::{JsonLines, Lines, TextData, TextDataConfig};
use fulgurite_test_message::assert_says;
use tempfile::TempDir;

/// Creates a folder with these files.
fn folder(files: &[(&str, &[u8])]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, content) in files {
        let path = dir.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    dir
}

fn setup(path: &Path, keys: &str) -> Result<TextData> {
    let text = format!("seq_len = 1\nvalidation_fraction = 0.0\npath = {path:?}\n{keys}");
    TextData::setup(&toml::from_str::<TextDataConfig>(&text).unwrap(), &DataContext::default())
}

/// The text of the training samples, with `|` for each end of a document except the last.
fn text(data: &TextData) -> String {
    let indices: Vec<u64> = (0..data.len(Split::Train)).collect();
    let batch = data.batch(Split::Train, &indices, &Device::Cpu).unwrap();
    let ids = batch.inputs.to_vec2::<u32>().unwrap().concat();
    let bytes: Vec<u8> = ids.into_iter().map(|id| u8::try_from(id).unwrap_or(b'|')).collect();
    String::from_utf8(bytes).unwrap()
}

fn report(data: &TextData) -> String {
    data.report().unwrap().to_string()
}

fn error(dir: &TempDir, name: &str, keys: &str) -> String {
    let error = setup(&dir.path().join(name), keys).unwrap_err();
    error.to_string().replace(dir.path().to_str().unwrap(), "DIR")
}

fn utf16(text: &str) -> Vec<u8> {
    text.encode_utf16().flat_map(u16::to_le_bytes).collect()
}

const KINDS: [&str; 3] = ["type = 'text'", "type = 'lines'", "type = 'jsonl'"];

#[test]
fn byte_order_marks_are_not_text() {
    let dir = folder(&[
        ("text/a.txt", b"\xef\xbb\xbfab"),
        ("lines/a.txt", b"\xef\xbb\xbfab\ncd\n"),
        ("json/a.jsonl", b"\xef\xbb\xbf{\"text\": \"ab\"}\r\n{\"text\": \"cd\"}\r\n"),
    ]);
    let of = |name: &str, keys| text(&setup(&dir.path().join(name), keys).unwrap());
    assert_eq!(of("text", KINDS[0]), "ab");
    assert_eq!(of("lines", KINDS[1]), "ab|cd");
    assert_eq!(of("json", KINDS[2]), "ab|cd");
    assert_eq!(Lines::open(&[dir.path().join("lines")]).unwrap().get(0).unwrap(), "ab");
    let values = JsonLines::open(&[dir.path().join("json")]).unwrap();
    assert_eq!(values.get::<serde_json::Value>(0).unwrap()["text"], "ab");
    let error = values.get::<u32>(0).unwrap_err().to_string();
    assert!(error.contains("a.jsonl, line 1 does not parse: "), "{error}");
    // As concatenated by `cat`.
    let joined = folder(&[("a.txt", b"\xef\xbb\xbfab\n\xef\xbb\xbfcd\n")]);
    assert_eq!(text(&setup(joined.path(), KINDS[1]).unwrap()), "ab|cd");
}

#[test]
fn skipped_files_are_counted_and_named() {
    let dir = folder(&[
        ("a.txt", b"hello world"),
        ("b.txt", b"caf\xe9"),
        ("c.txt", &utf16("\u{feff}hello")),
        ("d.dat", b"a\0b"),
        ("empty.txt", b""),
        (".hidden/x.txt", b"no"),
        ("out/y.txt", b"no"),
        (".gitignore", b"out/\n[z-a]"),
        (".ignore", b"a.txt"),
        ("x.gz", b"\x1f\x8b\x08\0"),
        ("y.parquet", b"PAR1\x15"),
    ]);
    let data = setup(dir.path(), "").unwrap();
    let expected = "data.path: 1 document, 1 file, 11 bytes, 12 tokens; left out: 3 hidden (.gitignore, .hidden, \
                    .ignore), 1 excluded by .gitignore (out), 1 not UTF-8 (b.txt), 1 UTF-16 (c.txt), 2 binary \
                    (d.dat, y.parquet), 1 empty (empty.txt), 1 compressed (x.gz)";
    assert_eq!(report(&data), expected);
    let faults = "data.path: 1 not UTF-8 (b.txt), 1 UTF-16 (c.txt)";
    assert_eq!(data.report().unwrap().faults().unwrap(), faults);
}

#[test]
fn only_ignore_files_within_the_folder_count() {
    let dir = folder(&[
        (".gitignore", b"*"),
        ("data/a.txt", b"ab"),
        ("data/b.jsonl", b"no"),
        ("data/.gitignore", b"*l"),
    ]);
    assert_eq!(text(&setup(&dir.path().join("data"), KINDS[0]).unwrap()), "ab");
    // Files chosen by extension are read even if git ignores them.
    let json = folder(&[(".gitignore", b"*"), ("a.jsonl", b"{\"text\": \"ab\"}")]);
    assert_eq!(text(&setup(json.path(), KINDS[2]).unwrap()), "ab");
}

#[test]
fn named_file_must_be_text() {
    let dir = folder(&[
        ("latin.txt", b"caf\xe9 au lait"),
        ("utf16.txt", &utf16("\u{feff}hello")),
        ("plain16.txt", &utf16("hello world, hello")),
        ("nul.txt", b"a\0b"),
        ("a.jsonl.gz", b"\x1f\x8b\x08\0\0\0\0\0"),
        ("a.arrow", b"ARROW1\0\0"),
        ("lfs.txt", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n"),
    ]);
    let errors: Vec<String> = [
        ("latin.txt", KINDS[0]),
        ("latin.txt", KINDS[1]),
        ("utf16.txt", KINDS[0]),
        ("utf16.txt", KINDS[2]),
        ("plain16.txt", KINDS[0]),
        ("nul.txt", KINDS[0]),
        ("a.jsonl.gz", KINDS[2]),
        ("a.arrow", KINDS[0]),
        ("lfs.txt", KINDS[0]),
        ("lfs.txt", KINDS[1]),
    ]
    .map(|(name, kind)| error(&dir, name, kind))
    .into();
    insta::assert_snapshot!(errors.join("\n"), @r#"
data: DIR/latin.txt (data.path) is not UTF-8 text: byte 3 is 0xe9; convert it, from Latin-1 for example with `iconv -f LATIN1 -t UTF-8`; or set data.on_error = "skip", which leaves out what cannot be used
data: DIR/latin.txt, line 1 (data.path) is not UTF-8 text: byte 3 is 0xe9; convert it, from Latin-1 for example with `iconv -f LATIN1 -t UTF-8`; or set data.on_error = "skip", which leaves out what cannot be used
data: DIR/utf16.txt (data.path) is UTF-16, not UTF-8 text; convert it with `iconv -f UTF-16 -t UTF-8`; or set data.on_error = "skip", which leaves out what cannot be used
data: DIR/utf16.txt (data.path) is UTF-16, not UTF-8 text; convert it with `iconv -f UTF-16 -t UTF-8`; or set data.on_error = "skip", which leaves out what cannot be used
data: DIR/plain16.txt (data.path) is UTF-16 without a byte-order mark, not UTF-8 text; convert it with `iconv -f UTF-16LE -t UTF-8`; or set data.on_error = "skip", which leaves out what cannot be used
data: DIR/nul.txt (data.path) is binary: byte 1 is 0, which no text has; for token ids set data.type = "tokens"; or set data.on_error = "skip", which leaves out what cannot be used
data: DIR/a.jsonl.gz (data.path) is compressed with gzip; unpack it with `gunzip`; or set data.on_error = "skip", which leaves out what cannot be used
data: DIR/a.arrow (data.path) is an Arrow file; write it as Parquet and set data.type = "parquet"; or set data.on_error = "skip", which leaves out what cannot be used
data: DIR/lfs.txt (data.path) is a pointer of git-lfs in place of the file; fetch the file with `git lfs pull`; or set data.on_error = "skip", which leaves out what cannot be used
data: DIR/lfs.txt (data.path) is a pointer of git-lfs in place of the file; fetch the file with `git lfs pull`; or set data.on_error = "skip", which leaves out what cannot be used
"#);
    let all = error(&dir, "latin.txt", "on_error = 'skip'");
    assert_says!(all, "data: DIR/latin.txt (data.path): there is no text … 1 not UTF-8 …");
}

#[test]
fn links_are_followed_and_cycles_found() {
    let dir =
        folder(&[("data/a.txt", b"aa\n"), ("data/sub/b.txt", b"bb\n"), ("far/c.txt", b"cc\n")]);
    let data = dir.path().join("data");
    symlink(dir.path().join("far"), data.join("far")).unwrap();
    symlink(dir.path().join("far/c.txt"), data.join("linked.txt")).unwrap();
    symlink(&data, data.join("sub/up")).unwrap();
    symlink(dir.path().join("far"), data.join("sub/again")).unwrap();
    symlink("nowhere", data.join("z.txt")).unwrap();
    symlink("zz.txt", data.join("zz.txt")).unwrap();
    for kind in &KINDS[..2] {
        let read = setup(&data, kind).unwrap();
        assert_eq!(text(&read).replace('\n', ""), "aa|cc|bb", "{kind}");
        let left_out = "left out: 2 linked twice (linked.txt, sub/again), 1 linked in a circle (sub/up), 2 linked to nothing (z.txt, zz.txt)";
        assert!(report(&read).ends_with(left_out), "{}", report(&read));
    }
}

#[test]
fn subfolders_and_uppercase_extensions() {
    let json = b"{\"text\": \"ab\"}\n";
    let dir = folder(&[
        ("a.JSONL", json),
        ("sub/b.jsonl", json),
        ("sub/.c.jsonl", json),
        ("README.md", b"no"),
        ("d.jsonl.gz", b"no"),
    ]);
    let data = setup(dir.path(), KINDS[2]).unwrap();
    let expected = "data.path: 2 documents, 2 files, 4 bytes, 6 tokens; left out: 1 of another type (README.md), \
                    1 compressed (d.jsonl.gz), 1 hidden (sub/.c.jsonl)";
    assert_eq!(report(&data), expected);
    let none = folder(&[("a.jsonl.gz", b"no"), ("b.json", b"no")]);
    assert_says!(error(&none, "", KINDS[2]), "data: the folder DIR/ … no files … 1 compressed …");
}

#[test]
fn broken_lines_are_errors_or_counted() {
    let good = b"{\"text\": \"ab\"}\n";
    let broken: &[&[u8]] = &[
        b"{\"text\": \"bad \\ud800 surrogate\"}\n",
        b"{\"text\": \"bad \\udc00\"}\n",
        b"{\"score\": NaN, \"text\": \"ab\"}\n",
        b"{\"text\": null}\n",
        b"{\"text\": [\"ab\"]}\n",
        b"{\"body\": \"x\", \"id\": 3}\n",
        b"{\"text\": \"caf\xe9\"}\n",
        b"{\"text\": \"cut",
    ];
    let mut errors = Vec::new();
    for line in broken {
        let dir = folder(&[("a.jsonl", &[good, &b"\n"[..], line].concat())]);
        errors.push(error(&dir, "a.jsonl", KINDS[2]));
    }
    insta::assert_snapshot!(errors.join("\n"), @r#"
data: DIR/a.jsonl, line 3 (data.path) does not parse: unexpected end of hex escape at column 21; an escape such as \ud800 is half of a character, and the other half is missing; or set data.on_error = "skip", which leaves out what cannot be used
data: DIR/a.jsonl, line 3 (data.path) does not parse: lone leading surrogate in hex escape at column 20; an escape such as \ud800 is half of a character, and the other half is missing; or set data.on_error = "skip", which leaves out what cannot be used
data: DIR/a.jsonl, line 3 (data.path) does not parse: expected value at column 11; NaN and Infinity are no JSON, where Python writes them: write null; or set data.on_error = "skip", which leaves out what cannot be used
data: DIR/a.jsonl, line 3 (data.path) has no text under the key "text" (data.text_key), but null; or set data.on_error = "skip", which leaves out what cannot be used
data: DIR/a.jsonl, line 3 (data.path) has no text under the key "text" (data.text_key), but a list; or set data.on_error = "skip", which leaves out what cannot be used
data: DIR/a.jsonl, line 3 (data.path) has no key "text" (data.text_key); it has body, id; or set data.on_error = "skip", which leaves out what cannot be used
data: DIR/a.jsonl, line 3 (data.path) is not UTF-8 text: byte 29 is 0xe9; convert it, from Latin-1 for example with `iconv -f LATIN1 -t UTF-8`; or set data.on_error = "skip", which leaves out what cannot be used
data: DIR/a.jsonl, line 3 (data.path) does not parse: EOF while parsing a string at column 13; the file is cut off, or has a value on several lines, which `jq -c .` joins; or set data.on_error = "skip", which leaves out what cannot be used
"#);

    let lines = [good, &b" \n{\"text\": \"\"}\n"[..], &broken.concat()].concat();
    let dir = folder(&[("a.jsonl", &lines)]);
    let data = setup(&dir.path().join("a.jsonl"), "type = 'jsonl'\non_error = 'skip'").unwrap();
    let report = report(&data).replace(dir.path().to_str().unwrap(), "DIR");
    insta::assert_snapshot!(report, @"data.path: 1 document, 1 file, 2 bytes, 3 tokens; left out: 1 blank (DIR/a.jsonl line 2), 1 empty (DIR/a.jsonl line 3), 4 broken JSON (DIR/a.jsonl line 4, DIR/a.jsonl line 5, DIR/a.jsonl line 6, …), 2 without a text (DIR/a.jsonl line 7, DIR/a.jsonl line 8), 1 without the key (DIR/a.jsonl line 9), 1 not UTF-8 (DIR/a.jsonl line 10)");
    assert_eq!(text(&data), "ab");

    let list = folder(&[("a.jsonl", b"[{\"text\": \"ab\"},\n{\"text\": \"cd\"}]\n")]);
    assert_says!(error(&list, "a.jsonl", KINDS[2]), "data: DIR/a.jsonl, line 1 … a list …");
    let pretty = folder(&[("a.jsonl", b"{\n\"text\": \"ab\"\n}\n")]);
    assert_says!(error(&pretty, "a.jsonl", KINDS[2]), "data: DIR/a.jsonl, line 1 … not parse …");
    let mac = folder(&[("a.txt", b"ab\rcd\ref")]);
    assert_says!(error(&mac, "a.txt", KINDS[1]), "data: DIR/a.txt, line 1 … carriage return …");
}

#[test]
fn last_of_two_equal_keys_wins() {
    let dir = folder(&[("a.jsonl", b"{\"text\": \"first\", \"text\": \"second\"}\n")]);
    assert_eq!(text(&setup(dir.path(), KINDS[2]).unwrap()), "second");
}

#[test]
fn preview_reads_only_the_beginning() {
    let text = "ä".repeat(3 << 20);
    // Later text is not checked: here it is not UTF-8.
    let dir = folder(&[("a.txt", &[text.as_bytes(), b"\xff"].concat())]);
    let config = toml::from_str(&format!("path = {:?}", dir.path().join("a.txt"))).unwrap();
    let preview = TextData::preview(&config, &DataContext::default()).unwrap();
    assert!(preview.len(Split::Train) > 10_000);
    let error = TextData::setup(&config, &DataContext::default()).unwrap_err().to_string();
    assert!(error.contains("is not UTF-8 text: byte 6291456 is 0xff"), "{error}");
}

#[test]
fn preview_estimates_the_memory_of_all_text() {
    let dir = tempfile::tempdir().unwrap();
    // Half of the files have no text, and come late.
    for i in 0..200 {
        let byte = if (80..180).contains(&i) { 0 } else { b'a' };
        std::fs::write(dir.path().join(format!("{i:03}")), vec![byte; 100_000]).unwrap();
    }
    let text = format!("cache_dir = false\npath = {:?}", dir.path());
    let config = toml::from_str(&text).unwrap();
    let planned = TextData::preview(&config, &DataContext::default()).unwrap().memory();
    let taken = TextData::setup(&config, &DataContext::default()).unwrap().memory();
    assert!(planned.abs_diff(taken) < taken / 100, "{planned} planned, {taken} taken");
}

#[test]
fn every_source_is_reported() {
    let dir = folder(&[("a/a.txt", b"aaaa"), ("b/b.txt", b"bbbb"), ("v/v.txt", b"vvvvv")]);
    let text = format!(
        "seq_len = 2\nvalidation_path = {:?}\nmixture = [{{ path = {:?}, weight = 1 }}, {{ path = {:?}, weight = 2 }}]",
        dir.path().join("v"),
        dir.path().join("a"),
        dir.path().join("b"),
    );
    let config = toml::from_str(&text).unwrap();
    let data = TextData::setup(&config, &DataContext::default()).unwrap();
    insta::assert_snapshot!(report(&data), @r#"
data.mixture[0].path: 1 document, 1 file, 4 bytes, 5 tokens
data.mixture[1].path: 1 document, 1 file, 4 bytes, 5 tokens
data.validation_path: 1 document, 1 file, 5 bytes, 6 tokens
"#);
}

#[test]
fn tails_of_many_files_are_counted() {
    let ids: Vec<u8> = (0..31_u16).flat_map(u16::to_le_bytes).collect();
    let dir = folder(&[("a.u16", &ids), ("b.u16", &ids)]);
    let text =
        format!("type = 'tokens'\nseq_len = 16\nvocab_size = 70000\npath = {:?}", dir.path());
    let data = TextData::setup(&toml::from_str(&text).unwrap(), &DataContext::default()).unwrap();
    assert_says!(report(&data), "data.path: 2 files, 28 tokens in no sample, 62 tokens");
}
