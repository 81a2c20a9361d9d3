//! Text and token data, through the public interface.

use std::fs;
use std::path::Path;

use candle_core::{DType, Device};
use fulgurite_core::data::{DataContext, DataModule as _, EvalSampler, Split, TokenBatch};
use fulgurite_core::data::{SampleOrder, TrainSampler};
use fulgurite_data::{DataKind, Paths, TextData, TextDataConfig, TokenDtype};
use fulgurite_test_message::assert_says;
use proptest::prelude::*;
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

fn u16s(ids: impl IntoIterator<Item = u16>) -> Vec<u8> {
    ids.into_iter().flat_map(u16::to_le_bytes).collect()
}

/// All of `path`, unshuffled, in samples of `seq_len`.
fn plain(kind: DataKind, path: impl AsRef<Path>, seq_len: usize) -> TextDataConfig {
    TextDataConfig {
        kind,
        path: path.as_ref().into(),
        seq_len,
        shuffle: false,
        validation_fraction: Some(0.0),
        ..TextDataConfig::default()
    }
}

fn setup(config: &TextDataConfig) -> TextData {
    TextData::setup(config, &DataContext::default()).unwrap()
}

/// The error of a setup, with the folder's path as DIR.
fn error(dir: &TempDir, config: &TextDataConfig) -> String {
    let error = TextData::setup(config, &DataContext::default()).unwrap_err();
    error.to_string().replace(dir.path().to_str().unwrap(), "DIR")
}

fn inputs(batch: &TokenBatch) -> Vec<Vec<u32>> {
    batch.inputs.to_vec2().unwrap()
}

/// All samples of a split as (inputs, targets).
fn samples(data: &TextData, split: Split) -> Vec<(Vec<u32>, Vec<i64>)> {
    let indices: Vec<u64> = (0..data.len(split)).collect();
    let batch = data.batch(split, &indices, &Device::Cpu).unwrap();
    inputs(&batch).into_iter().zip(batch.targets.to_vec2().unwrap()).collect()
}

#[test]
fn token_samples_are_shifted_windows() {
    let dir = folder(&[
        ("a.u16", &u16s(0..11)),
        ("b.bin", &u16s([65_535, 7, 8, 9, 10])),
        ("c.u32", &[70_000u32, 1, 2, 3].map(u32::to_le_bytes).concat()),
        ("notes.txt", b"not tokens"),
    ]);
    let data = setup(&plain(DataKind::Tokens, dir.path(), 3));
    let expected: [(&[u32], &[i64]); 5] = [
        (&[0, 1, 2], &[1, 2, 3]),
        (&[3, 4, 5], &[4, 5, 6]),
        (&[6, 7, 8], &[7, 8, 9]),
        (&[65_535, 7, 8], &[7, 8, 9]), // no sample crosses files
        (&[70_000, 1, 2], &[1, 2, 3]),
    ];
    let expected = expected.map(|(x, y)| (x.to_vec(), y.to_vec()));
    assert_eq!(samples(&data, Split::Train), expected);
    assert_eq!(data.len(Split::Validation), 0);
    assert!(data.tokenizer().is_none() && data.vocab_size().is_none());

    let batch = data.batch(Split::Train, &[4, 0], &Device::Cpu).unwrap();
    assert_eq!(inputs(&batch), [[70_000, 1, 2], [0, 1, 2]]);
    assert_eq!((batch.inputs.dtype(), batch.targets.dtype()), (DType::U32, DType::I64));
    assert_eq!((batch.samples(), batch.tokens()), (2, 6));
}

proptest! {
    #[test]
    fn sample_i_starts_at_i_strides(len in 2u16..60, seq_len in 1usize..12, stride in 1usize..15) {
        prop_assume!(usize::from(len) > seq_len);
        let dir = folder(&[("x.u16", &u16s(0..len))]);
        let config = TextDataConfig {
            stride: Some(stride),
            ..plain(DataKind::Tokens, dir.path().join("x.u16"), seq_len)
        };
        let all = samples(&setup(&config), Split::Train);
        let starts: Vec<_> =
            (0..usize::from(len) - seq_len).filter(|start| start % stride == 0).collect();
        prop_assert_eq!(all.len(), starts.len());
        for ((x, y), start) in all.iter().zip(starts) {
            prop_assert!((start..).zip(x).take(seq_len).all(|(e, &id)| e == id as usize));
            prop_assert!((start + 1..).zip(y).take(seq_len).all(|(e, &id)| e as i64 == id));
        }
    }

    #[test]
    fn validation_shares_no_target_with_training(
        len in 30u16..200, seq_len in 1usize..8, stride in 1usize..10, percent in 0u32..60
    ) {
        let dir = folder(&[("x.u16", &u16s(0..len))]);
        let fraction = f64::from(percent) / 100.0;
        let whole = TextDataConfig {
            stride: Some(stride),
            ..plain(DataKind::Tokens, dir.path().join("x.u16"), seq_len)
        };
        let split = TextDataConfig { validation_fraction: Some(fraction), ..whole.clone() };
        let (whole, split) = (setup(&whole), setup(&split));
        let all = samples(&whole, Split::Train);
        let (train, validation) =
            (samples(&split, Split::Train), samples(&split, Split::Validation));
        prop_assert_eq!(validation.len(), (all.len() as f64 * fraction) as usize);
        prop_assert!(all.starts_with(&train) && all.ends_with(&validation));
        prop_assert_eq!(&validation, &samples(&split, Split::Test));
        if let (Some(last), Some(first)) = (train.last(), validation.first()) {
            prop_assert!(last.1.last() < first.1.first());
            // and training is as long as possible
            if train.len() + validation.len() < all.len() {
                prop_assert!(all[train.len()].1.last() >= first.1.first());
            }
        }
    }
}

#[test]
fn separate_documents_have_their_lengths() {
    let dir = folder(&[("x.txt", b"ab\ncd\nefghij\n")]);
    let config = TextDataConfig {
        validation_fraction: Some(0.0),
        separate_documents: true,
        ..plain(DataKind::Lines, dir.path(), 6)
    };
    let data = setup(&config);
    let batch = data.batch(Split::Train, &[0, 1], &Device::Cpu).unwrap();
    let end = 256;
    assert_eq!(inputs(&batch), [[97, 98, end, 99, 100, end], [101, 102, 103, 104, 105, 106]]);
    assert_eq!(batch.targets.to_vec2::<i64>().unwrap()[0], [98, 256, -100, 100, 256, -100]);
    assert_eq!(TextData::documents(&batch), Some([vec![3, 3], vec![6]].as_slice()));
    let joined = setup(&TextDataConfig { separate_documents: false, ..config });
    let batch = joined.batch(Split::Train, &[0], &Device::Cpu).unwrap();
    assert_eq!(
        (TextData::documents(&batch), batch.targets.to_vec2::<i64>().unwrap()[0][2]),
        (None, 99)
    );

    let tokens = folder(&[("x.bin", &u16s(0..9))]);
    let config =
        TextDataConfig { separate_documents: true, ..plain(DataKind::Tokens, tokens.path(), 4) };
    assert_says!(error(&tokens, &config), "data.separate_documents … data.tokenizer … is missing");
}

#[test]
fn steps_take_the_samples_in_order() {
    let dir = folder(&[("x.bin", &u16s(0..200))]);
    let config =
        TextDataConfig { batch_size: 2, ..plain(DataKind::Tokens, dir.path().join("x.bin"), 4) };
    let data = setup(&config);
    let order = SampleOrder::new(0, TextData::shuffle(&config), data.len(Split::Train)).unwrap();
    let sampler = TrainSampler::new(order, TextData::batch_size(&config), 2, 1, 1).unwrap();
    let batch = data.batch(Split::Train, &sampler.indices(3, 0), &Device::Cpu).unwrap();
    // Step 3 has samples 12 to 15; rank 1 has the last two.
    assert_eq!(inputs(&batch), [[56, 57, 58, 59], [60, 61, 62, 63]]);
}

#[test]
fn rank_without_samples_gets_an_empty_batch() {
    let dir = folder(&[("x.bin", &u16s(0..9))]);
    let data = setup(&plain(DataKind::Tokens, dir.path().join("x.bin"), 4));
    let sampler = EvalSampler::new(1, 4, 2, 0).unwrap();
    let indices: Vec<u64> = sampler.indices(0).collect();
    let batch = data.batch(Split::Train, &indices, &Device::Cpu).unwrap();
    assert_eq!((batch.inputs.dims(), batch.targets.dims()), (&[0, 4][..], &[0, 4][..]));
}

#[test]
fn text_folders_are_walked_in_order() {
    let dir = folder(&[
        ("b.txt", b"B"),
        ("a/z.md", b"AZ"),
        ("a/kept.log", b"K"),
        ("c.rs", "ä".as_bytes()),
        (".hidden", b"no"),
        (".config/x.txt", b"no"),
        ("out/result.txt", b"no"),
        ("d.log", b"no"),
        ("image.png", &[0x89, b'P', 0xff, 0xfe]),
        ("nul.dat", b"no\0"),
        ("empty.txt", b""),
        (".gitignore", b"out/\n*.log\n!kept.log\n"),
    ]);
    let data = setup(&plain(DataKind::Text, dir.path(), 1));
    let ids: Vec<u32> = samples(&data, Split::Train).into_iter().flat_map(|(x, _)| x).collect();
    let (end, text) = (256, |s: &str| s.bytes().map(u32::from).collect::<Vec<_>>());
    let mut expected = Vec::new();
    for file in ["K", "AZ", "B", "ä"] {
        expected.extend(text(file));
        expected.push(end);
    }
    expected.pop(); // the last token is a target only
    assert_eq!(ids, expected);
    assert_eq!(data.tokenizer().unwrap().decode(&ids).unwrap(), "KAZBä");
}

#[test]
fn text_keeps_a_twentieth_for_validation() {
    let dir = folder(&[("x.txt", &[b'x'; 1000]), ("v/y.txt", &[b'y'; 100])]);
    let config = TextDataConfig {
        path: dir.path().join("x.txt").as_path().into(),
        seq_len: 10,
        ..TextDataConfig::default()
    };
    let data = setup(&config);
    assert_eq!((data.len(Split::Train), data.len(Split::Validation)), (95, 5));

    let own = Some(Paths::Many(vec![dir.path().join("v")]));
    let data = setup(&TextDataConfig { validation_path: own, ..config });
    assert_eq!((data.len(Split::Train), data.len(Split::Validation)), (100, 10));
    assert!(samples(&data, Split::Validation)[0].0.iter().all(|&id| id == u32::from(b'y')));
}

/// Words, with the space before them, as GPT-2 splits them (a pattern with a look-ahead).
const TOKENIZER: &str = r#"{
    "version": "1.0",
    "added_tokens": [{"id": 4, "content": "<|endoftext|>", "special": true, "single_word": false,
                      "lstrip": false, "rstrip": false, "normalized": false}],
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                      "use_regex": true},
    "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                "use_regex": true},
    "model": {"type": "WordLevel", "unk_token": "?",
              "vocab": {"?": 0, "sand": 1, "Ġglass": 2, "Ġand": 3}}
}"#;

#[test]
fn hugging_face_tokenizer_is_used() {
    let dir = folder(&[
        ("tokenizer.json", TOKENIZER.as_bytes()),
        ("text/1.txt", b"sand and glass"),
        ("text/2.txt", b"sand glass foam"),
    ]);
    let config = TextDataConfig {
        tokenizer: Some(dir.path().to_str().unwrap().to_owned()),
        ..plain(DataKind::Text, dir.path().join("text"), 7)
    };
    let data = setup(&config);
    assert_eq!(
        samples(&data, Split::Train),
        [(vec![1, 3, 2, 4, 1, 2, 0], vec![3, 2, 4, 1, 2, 0, 4])]
    );
    assert_eq!(data.vocab_size(), Some(5));
    let tokenizer = data.tokenizer().unwrap();
    assert_eq!(tokenizer.decode(&[1, 3, 2, 4]).unwrap(), "sand and glass");
    assert_eq!(tokenizer.encode("sand glass").unwrap(), [1, 2]);
    assert_says!(
        error(&dir, &TextDataConfig { vocab_size: Some(4), ..config }),
        "data.vocab_size is 4 … tokenizer has 5 ids …"
    );
}

#[test]
fn configured_by_toml() {
    let text = "type = \"tokens\"\npath = [\"a.bin\", \"b.bin\"]\nseq_len = 64\nstride = 32\n\
                batch_size = 2\nshuffle = false\ntoken_dtype = \"u32\"\ntokenizer = \"bytes\"\n";
    let config: TextDataConfig = toml::from_str(text).unwrap();
    let expected = TextDataConfig {
        kind: DataKind::Tokens,
        path: Paths::Many(vec!["a.bin".into(), "b.bin".into()]),
        tokenizer: Some("bytes".to_owned()),
        seq_len: 64,
        stride: Some(32),
        batch_size: 2,
        shuffle: false,
        token_dtype: Some(TokenDtype::U32),
        ..TextDataConfig::default()
    };
    assert_eq!(config, expected);
    let written = toml::to_string(&config).unwrap();
    assert_eq!(toml::from_str::<TextDataConfig>(&written).unwrap(), expected);
    assert_eq!(toml::from_str::<TextDataConfig>("").unwrap(), TextDataConfig::default());

    let error = |text| toml::from_str::<TextDataConfig>(text).unwrap_err().message().to_owned();
    assert_says!(error("path = 3"), "expected a path or a list of paths");
    assert_says!(error("sequence = 3"), "unknown field `sequence`, expected one of `type` …");
    assert_says!(error("type = \"csv\""), "unknown variant `csv`, expected one of `text` …");
}

#[test]
fn missing_and_unusable_files_are_explained() {
    let dir = folder(&[
        ("short.txt", b"too short"),
        ("short.bin", &u16s(0..8)),
        ("odd.bin", &[1, 2, 3]),
        ("tokens.dat", &u16s(0..80)),
        ("image.png", &[0x89, b'P', 0xff, 0xfe]),
        ("bad.json", b"{}"),
        ("empty/.keep", b""),
    ]);
    let at = |kind, name: &str| plain(kind, dir.path().join(name), 8);
    let (text, tokens) = (DataKind::Text, DataKind::Tokens);
    assert_says!(error(&dir, &at(text, "none.txt")), "data: … no file … DIR/none.txt (data.path)");
    assert_says!(error(&dir, &at(tokens, "none.bin")), "data … no file … DIR/none.bin (data.path)");
    let own = Some(dir.path().join("none").as_path().into());
    assert_says!(
        error(
            &dir,
            &TextDataConfig {
                validation_path: own,
                validation_fraction: None,
                ..at(text, "short.txt")
            }
        ),
        "data: there is no file … DIR/none (data.validation_path)"
    );
    assert_says!(error(&dir, &at(text, "empty")), "data: … DIR/empty … no text … 1 hidden (.keep)");
    assert_says!(error(&dir, &at(tokens, "empty")), "data: … DIR/empty … no files named .u16 …");
    assert_says!(
        error(&dir, &TextDataConfig { seq_len: 10, ..at(text, "short.txt") }),
        "data: the text (data.path) has 10 tokens … needs 11 (data.seq_len = 10 …"
    );
    assert_says!(error(&dir, &at(tokens, "short.bin")), "data: DIR/short.bin … has 8 … needs 9 …");
    assert_says!(error(&dir, &at(tokens, "odd.bin")), "data: DIR/odd.bin has 3 bytes … ids of 2 …");
    assert_says!(error(&dir, &at(tokens, "tokens.dat")), r#"the name of DIR/tokens.dat … "i64""#);
    assert_says!(error(&dir, &at(text, "image.png")), "data: DIR/image.png … UTF-8 … 0x89 …");
    let tokenizer = |name: &str| TextDataConfig {
        tokenizer: Some(dir.path().join(name).to_str().unwrap().to_owned()),
        ..at(text, "short.txt")
    };
    assert_says!(error(&dir, &tokenizer("tokenizer.json")), "data: … file DIR/tokenizer.json …");
    assert_says!(error(&dir, &tokenizer("bad.json")), "data: DIR/bad.json … not … Model missing …");
}

#[test]
fn options_out_of_range_are_explained() {
    let dir = folder(&[("x.txt", &[b'x'; 30])]);
    let base = || plain(DataKind::Text, dir.path().join("x.txt"), 8);
    let error = |config| error(&dir, &config);
    assert_says!(error(TextDataConfig { seq_len: 0, ..base() }), "data.seq_len … least 1, got 0");
    assert_says!(
        error(TextDataConfig { stride: Some(0), ..base() }),
        "data.stride must be at least 1, got 0"
    );
    assert_says!(
        error(TextDataConfig { batch_size: 0, ..base() }),
        "data.batch_size must be at least 1, got 0"
    );
    assert_says!(
        error(TextDataConfig { batch_size: 1_000_000_000_000_000_000, ..base() }),
        "data.batch_size = 1000000000000000000 times data.seq_len = 8 … at most 134217728"
    );
    assert_says!(
        error(TextDataConfig { validation_fraction: Some(1.0), ..base() }),
        "data.validation_fraction … at least 0 and less than 1, got 1"
    );
    assert_says!(
        error(TextDataConfig { path: Paths::Many(vec![]), ..base() }),
        "data.path is an empty list; name a file or folder"
    );
    assert_says!(
        error(TextDataConfig { token_dtype: Some(TokenDtype::U16), ..base() }),
        r#"data.token_dtype is for data.type = "tokens""#
    );
    assert_says!(
        error(TextDataConfig {
            validation_fraction: Some(0.5),
            validation_path: Some("v".into()),
            ..base()
        }),
        "data.validation_path and data.validation_fraction = 0.5 exclude …"
    );
    assert_says!(
        error(TextDataConfig { validation_fraction: Some(0.9), stride: Some(1), ..base() }),
        "data: of 23 samples data.validation_fraction = 0.9 leaves none … lower it …"
    );
}

#[test]
fn preview_has_the_same_errors() {
    let preview = |config: &TextDataConfig| TextData::preview(config, &DataContext::default());
    let text = "x".repeat(3 << 20);
    let dir = folder(&[
        ("1.txt", text.as_bytes()),
        ("2.txt", text.as_bytes()),
        ("3.txt", text.as_bytes()),
        ("x.bin", &u16s((0..40).chain([99]))),
    ]);
    let config = plain(DataKind::Text, dir.path(), 8);
    let (some, all) = (preview(&config).unwrap(), setup(&config));
    assert!(some.len(Split::Train) * 10 < all.len(Split::Train) * 7);
    assert_eq!((some.vocab_size(), some.seq_len()), (all.vocab_size(), all.seq_len()));
    // Reads everything if that much is needed.
    preview(&TextDataConfig { seq_len: 7 << 20, batch_size: 1, ..config.clone() }).unwrap();
    let tokens = plain(DataKind::Tokens, dir.path().join("x.bin"), 8);
    assert_eq!(preview(&tokens).unwrap().largest_first_id(), 99);
    let too_few = TextDataConfig { vocab_size: Some(50), ..tokens };
    setup(&too_few);
    let message = preview(&too_few).unwrap_err().to_string();
    let message = message.replace(&dir.path().display().to_string(), "DIR");
    assert_says!(message, "data: DIR/x.bin … id 99 … beginning … than 50 … data.token_dtype …");
}

#[test]
fn out_of_range_ids_and_samples_are_explained() {
    let dir = folder(&[("x.bin", &u16s(0..40))]);
    let config = TextDataConfig {
        vocab_size: Some(30),
        ..plain(DataKind::Tokens, dir.path().join("x.bin"), 8)
    };
    let data = setup(&config);
    assert_eq!(data.vocab_size(), Some(30));
    data.batch(Split::Train, &[0, 1, 2], &Device::Cpu).unwrap();
    let error = |index| {
        let error = data.batch(Split::Train, &[0, index], &Device::Cpu).unwrap_err();
        error.to_string().replace(dir.path().to_str().unwrap(), "DIR")
    };
    assert_says!(error(3), "data: DIR/x.bin … 30 in train sample 3 … than 30 … data.token_dtype …");
    assert_says!(error(4), "data: there is no train sample 4 of 4");
}

#[test]
fn only_regular_files_are_read() {
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    let dir = folder(&[("none/x.txt", b"text")]);
    for name in ["pipe.txt", "pipe.u16", "tokenizer.json", "folder/pipe.txt", "folder/pipe.u16"] {
        fs::create_dir_all(dir.path().join(name).parent().unwrap()).unwrap();
        let mode = Mode::RUSR | Mode::WUSR;
        mknodat(CWD, dir.path().join(name), FileType::Fifo, mode, 0).unwrap();
    }
    std::os::unix::fs::symlink("/dev/zero", dir.path().join("zeros.u32")).unwrap();
    let path = |name: &str| dir.path().join(name);
    let tokenizer = path("tokenizer.json").to_str().unwrap().to_owned();
    let errors = [
        error(&dir, &plain(DataKind::Text, path("pipe.txt"), 4)),
        error(&dir, &plain(DataKind::Text, "/dev/zero", 4)),
        error(&dir, &plain(DataKind::Text, path("folder"), 4)),
        error(&dir, &plain(DataKind::Tokens, path("pipe.u16"), 4)),
        error(&dir, &plain(DataKind::Tokens, path("zeros.u32"), 4)),
        error(&dir, &plain(DataKind::Tokens, path("folder"), 4)),
        error(
            &dir,
            &TextDataConfig {
                tokenizer: Some(tokenizer),
                ..plain(DataKind::Text, path("none"), 4)
            },
        ),
    ];
    insta::assert_snapshot!(errors.join("\n"), @r#"
data: opening DIR/pipe.txt: it is a named pipe; only regular files are read (data.path)
data: opening /dev/zero: it is a device; only regular files are read (data.path)
data: the folder DIR/folder (data.path) holds no text; left out: 2 neither file nor folder (pipe.txt, pipe.u16)
data: opening DIR/pipe.u16: it is a named pipe; only regular files are read (data.path)
data: opening DIR/zeros.u32: it is a device; only regular files are read (data.path)
data: the folder DIR/folder (data.path) holds no files named .u16, .u32, .bin, .npy; left out: 2 neither file nor folder (pipe.txt, pipe.u16)
data: opening DIR/tokenizer.json: it is a named pipe; only regular files are read (data.tokenizer)
"#);
}

#[test]
fn different_data_changes_the_fingerprint() {
    let ids = |n: u16| u16s((0..n).map(|i| i.wrapping_mul(31) % 1000));
    let long = ids(60_000).repeat(4);
    let mut other = long.clone();
    // In the middle of a long file only some tokens are hashed.
    other[240_000..480_000].fill(7);
    let (mut first, mut last) = (long.clone(), long.clone());
    first[0] ^= 1;
    last[479_998] ^= 1;
    let dir = folder(&[
        ("a.u16", &ids(100)),
        ("same/a.u16", &ids(100)),
        ("b.u16", &ids(101)),
        ("long.u16", &long),
        ("other.u16", &other),
        ("first.u16", &first),
        ("last.u16", &last),
        ("a.txt", b"some text"),
        ("b.txt", b"same text"),
    ]);
    let of = |kind: DataKind, name: &str| {
        setup(&plain(kind, dir.path().join(name), 4)).fingerprint().unwrap().unwrap()
    };
    let tokens = |name: &str| of(DataKind::Tokens, name);
    assert_eq!(tokens("a.u16"), tokens("same/a.u16"));
    assert_eq!(tokens("a.u16"), tokens("same"));
    let mut all: Vec<String> =
        ["a.u16", "b.u16", "long.u16", "other.u16", "first.u16", "last.u16"].map(tokens).into();
    all.extend(["a.txt", "b.txt"].map(|name| of(DataKind::Text, name)));
    let shown = all.join("\n");
    all.sort();
    all.dedup();
    assert_eq!(all.len(), 8, "{shown}");
    insta::assert_snapshot!(shown, @r#"
one file of 100 tokens (f2a5c318aba0e7de)
one file of 101 tokens (bd737c0b03958798)
one file of 240000 tokens (0b63a7b14bdd89ed)
one file of 240000 tokens (db47719d787dfae0)
one file of 240000 tokens (dbdb6fde36d421a2)
one file of 240000 tokens (776821e82ca833de)
a text of 10 tokens (42f8ff13621fc566)
a text of 10 tokens (84638aa302dbe335)
"#);
}

#[test]
fn shrinking_file_is_an_error() {
    let dir = folder(&[("a.u16", &u16s(0..1000))]);
    let path = dir.path().join("a.u16");
    let data = setup(&plain(DataKind::Tokens, &path, 9));
    let read = |sample| data.batch(Split::Train, &[sample], &Device::Cpu);
    read(100).unwrap();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(1000).unwrap();
    read(10).unwrap();
    let error = read(100).unwrap_err().to_string().replace(&path.display().to_string(), "a.u16");
    assert_says!(error, "data: a.u16 had 2000 bytes … has 1000 bytes now … must not change …");
}

#[test]
fn validation_sets_have_names() {
    let files = ["train", "books", "code"].map(|name| (name, u16s(0..100)));
    let dir = folder(&files.each_ref().map(|(name, ids)| (*name, &**ids)));
    let text = format!(
        "type = 'tokens'\ntoken_dtype = 'u16'\nseq_len = 9\npath = {:?}\n[validation_sets]\ncode = {:?}\nbooks = {:?}",
        dir.path().join("train"),
        dir.path().join("code"),
        [dir.path().join("books"), dir.path().join("code")],
    );
    let config: TextDataConfig = toml::from_str(&text).unwrap();
    let data = setup(&config);
    assert_eq!(data.validation_sets(), ["books", "code"]);
    let lens = [Split::Train, Split::ValidationSet(0), Split::ValidationSet(1), Split::Validation]
        .map(|split| data.len(split));
    assert_eq!(lens, [11, 22, 11, 0]);
    let batch = data.batch(Split::ValidationSet(1), &[1], &Device::Cpu).unwrap();
    assert_eq!(inputs(&batch), [(9..18).collect::<Vec<u32>>()]);
    let missing = data.batch(Split::ValidationSet(2), &[1], &Device::Cpu).unwrap_err();
    assert_says!(missing, "data: there is no validation set 2");

    let both = TextDataConfig { validation_path: Some("a".into()), ..config.clone() };
    assert_says!(error(&dir, &both), "data.validation_path and data.validation_sets exclude …");
    let fraction = TextDataConfig { validation_fraction: Some(0.1), ..config };
    assert_says!(error(&dir, &fraction), "data.validation_sets … data.validation_fraction = 0.1 …");
}

#[test]
fn sources_are_mixed_by_weight() {
    let dir = folder(&[("a.u16", &u16s(0..401)), ("b.u16", &u16s(1000..1041))]);
    let text = format!(
        "type = 'tokens'\nseq_len = 4\nvalidation_fraction = 0.1\n\
         mixture = [{{ path = {:?}, weight = 1 }}, {{ path = {:?}, weight = 3 }}]",
        dir.path().join("a.u16"),
        dir.path().join("b.u16"),
    );
    let config: TextDataConfig = toml::from_str(&text).unwrap();
    let data = setup(&config);
    assert_eq!((data.len(Split::Train), data.len(Split::Validation)), (90 + 9, 10 + 1));
    let order = data.train_order(7, true).unwrap();
    assert_eq!(order.epoch_len(), 99);
    let sample = |position| {
        let (_, index) = order.at(position);
        inputs(&data.batch(Split::Train, &[index], &Device::Cpu).unwrap())[0][0]
    };
    let drawn: Vec<u32> = (0..120).map(sample).collect();
    let of_b: Vec<u32> = drawn.iter().copied().filter(|&id| id >= 1000).collect();
    assert_eq!(of_b.len(), 90);
    // Ten rounds of the nine samples that are not for validation.
    for sample in 0..9 {
        assert_eq!(of_b.iter().filter(|&&id| id == 1000 + 4 * sample).count(), 10);
    }
    let validation = samples(&data, Split::Validation);
    assert_eq!(validation.iter().map(|(ids, _)| ids[0]).next_back(), Some(1036));
    let other = text.replace("weight = 3", "weight = 2");
    let fingerprint = |text: &str| setup(&toml::from_str(text).unwrap()).fingerprint().unwrap();
    assert_ne!(fingerprint(&text), fingerprint(&other));

    let error = |old: &str, new: &str| {
        let config = toml::from_str(&text.replace(old, new)).unwrap();
        error(&dir, &config)
    };
    assert_says!(error("weight = 3", "weight = -1"), "source 1 … weight -1.0 … must be above 0 …");
    assert_says!(error("type", "shuffle = false\ntype"), "data.shuffle = false and data.mixture …");
    assert_says!(error("type", "path = 'x'\ntype"), "data.path and data.mixture exclude …");
    assert_says!(error("b.u16", "c.u16"), "data: … no file … DIR/c.u16 (data.mixture[1].path)");
}
