//! Cached token ids.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use candle_core::Device;
use fulgurite_core::data::{DataContext, DataModule as _, Split};
use fulgurite_data::{TextData, TextDataConfig};

const TOKENIZER: &str = r#"{
    "version": "1.0",
    "added_tokens": [{"id": 1, "content": "</s>", "special": true, "single_word": false,
                      "lstrip": false, "rstrip": false, "normalized": false}],
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "unk_token": "?",
              "vocab": {"?": 0, "</s>": 1, "sand": 2, "glass": 3, "and": 4}}
}"#;

/// Two documents, and a tokenizer.
fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("docs")).unwrap();
    fs::write(dir.path().join("docs/a.txt"), "sand and glass and sand ".repeat(1000)).unwrap();
    fs::write(dir.path().join("docs/b.txt"), "glass and foam").unwrap();
    fs::write(dir.path().join("tokenizer.json"), TOKENIZER).unwrap();
    dir
}

fn config(dir: &Path, keys: &str) -> TextDataConfig {
    let text = format!(
        "path = {:?}\ntokenizer = {:?}\nseq_len = 4\nvalidation_fraction = 0\nshuffle = false\n{keys}",
        dir.join("docs"),
        dir.join("tokenizer.json")
    );
    toml::from_str(&text).unwrap()
}

fn setup(dir: &Path, keys: &str) -> TextData {
    TextData::setup(&config(dir, keys), &DataContext::default()).unwrap()
}

/// Sets up the data with `dir/cache` as its cache.
fn setup_kept(dir: &Path, keys: &str) -> TextData {
    setup(dir, &format!("cache_dir = {:?}\n{keys}", dir.join("cache")))
}

fn ids(data: &TextData) -> Vec<u32> {
    let indices: Vec<u64> = (0..data.len(Split::Train)).collect();
    let batch = data.batch(Split::Train, &indices, &Device::Cpu).unwrap();
    batch.inputs.flatten_all().unwrap().to_vec1().unwrap()
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir.join("cache")).unwrap();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

#[test]
fn ids_are_cached_and_read_again() {
    let dir = folder();
    let expected = setup(dir.path(), "cache_dir = false");
    let kept = setup_kept(dir.path(), "");
    assert_eq!(ids(&kept), ids(&expected));
    assert_eq!(kept.fingerprint().unwrap(), expected.fingerprint().unwrap());
    let [file] = &*files(dir.path()) else { panic!("{:?}", files(dir.path())) };
    let inode = fs::metadata(file).unwrap().ino();
    // 5000 words and their end, three words and an end, two bytes each, behind the header.
    assert_eq!(fs::metadata(file).unwrap().len(), 80 + 2 * 5005);
    let again = setup_kept(dir.path(), "");
    assert_eq!(ids(&again), ids(&expected));
    assert_eq!(fs::metadata(file).unwrap().ino(), inode, "it was written again");
    // The file is read from an open handle: it may be removed meanwhile.
    fs::remove_dir_all(dir.path().join("cache")).unwrap();
    assert_eq!(ids(&again), ids(&expected));
}

#[test]
fn cache_key_covers_text_tokenizer_and_settings() {
    let dir = folder();
    let check = |keys: &str, number: usize| {
        let kept = ids(&setup_kept(dir.path(), keys));
        assert_eq!(kept, ids(&setup(dir.path(), &format!("cache_dir = false\n{keys}"))));
        assert_eq!(files(dir.path()).len(), number, "{keys}");
    };
    check("", 1);
    check("eos_token = 'sand'", 2);
    check("add_bos_token = true\nbos_token = 'and'", 3);
    fs::write(dir.path().join("docs/b.txt"), "glass and sand").unwrap();
    check("", 4);
    // The same text in different documents.
    fs::write(dir.path().join("docs/b.txt"), "glass and").unwrap();
    fs::write(dir.path().join("docs/c.txt"), " sand").unwrap();
    check("", 5);
    let other = TOKENIZER.replace("\"sand\": 2, \"glass\": 3", "\"sand\": 3, \"glass\": 2");
    fs::write(dir.path().join("tokenizer.json"), other).unwrap();
    check("", 6);
    // The cut of samples is not in the files.
    check("stride = 2", 6);
}

#[test]
fn damaged_files_are_written_again() {
    let dir = folder();
    let expected = ids(&setup_kept(dir.path(), ""));
    let file = files(dir.path())[0].clone();
    let whole = fs::read(&file).unwrap();
    let flipped = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 4;
        bytes
    };
    let damaged = [
        Vec::new(),
        whole[..20].to_vec(),
        whole[..whole.len() - 2].to_vec(),
        [&whole[..], &[0, 0]].concat(),
        flipped(7),
        flipped(12),
        flipped(25),
        flipped(33),
        flipped(50),
        flipped(70),
        flipped(79),
        flipped(81),
        flipped(whole.len() - 1),
    ];
    for bytes in damaged {
        fs::write(&file, &bytes).unwrap();
        // Left by a process that was killed.
        fs::write(file.with_extension("partial"), &whole[..100]).unwrap();
        assert_eq!(ids(&setup_kept(dir.path(), "")), expected);
        assert!(fs::read(&file).unwrap() == whole);
        assert_eq!(files(dir.path()).len(), 1);
    }
}

#[test]
fn ranks_tokenize_a_text_once() {
    let dir = folder();
    let expected = ids(&setup(dir.path(), "cache_dir = false"));
    std::thread::scope(|scope| {
        let ranks: Vec<_> =
            (0..8).map(|_| scope.spawn(|| ids(&setup_kept(dir.path(), "")))).collect();
        for rank in ranks {
            assert_eq!(rank.join().unwrap(), expected);
        }
    });
    assert_eq!(files(dir.path()).len(), 1);
}

#[test]
fn unwritable_cache_keeps_ids_in_memory() {
    let dir = folder();
    fs::write(dir.path().join("cache"), "no folder").unwrap();
    let data = setup_kept(dir.path(), "");
    assert_eq!(ids(&data), ids(&setup(dir.path(), "cache_dir = false")));
}
