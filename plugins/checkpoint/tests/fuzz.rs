//! Fuzzing of damaged files. Reading them returns an error that names the file and never panics. It
//! takes no more memory than a small multiple of the files' size.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use candle_core::{DType, Device};
use fulgurite_core::Error;
use fulgurite_core::checkpoint::{
    DistributedCheckpoint, Manifest, SafetensorsSource, TensorSource, TorchSource, open,
};
use fulgurite_core::shard::Region;
use fulgurite_test_support::allocator::{Counting, thread_peak};
use fulgurite_test_support::checkpoints::{SEED, save_all, without_digest};
use proptest::prelude::*;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A byte of JSON takes twelve bytes as nested values of the manifest's free fields, and twice as
/// many while vectors grow. The rest is for directories, paths and messages.
fn allowed(bytes: usize) -> usize {
    64 * bytes + (256 << 10)
}

/// One way to damage a file.
#[derive(Debug, Clone)]
enum Damage {
    Flip {
        at: prop::sample::Index,
        bit: u8,
    },
    Truncate {
        at: prop::sample::Index,
    },
    Insert {
        at: prop::sample::Index,
        bytes: Vec<u8>,
    },
    Overwrite {
        at: prop::sample::Index,
        bytes: Vec<u8>,
    },
    /// Replaces a number in the text.
    Number {
        which: prop::sample::Index,
        text: String,
    },
    /// Replaces a value in the text by deeply nested values.
    Deep {
        which: prop::sample::Index,
        depth: usize,
        open: char,
    },
    Delete {
        at: prop::sample::Index,
        len: usize,
    },
    Repeat {
        at: prop::sample::Index,
        len: usize,
    },
}

fn damage() -> impl Strategy<Value = Damage> {
    let at = any::<prop::sample::Index>;
    let bytes = || prop::collection::vec(any::<u8>(), 1..16);
    let number = prop::sample::select(vec![
        "NaN",
        "-1",
        "1e400",
        "0",
        "1.5",
        "18446744073709551615",
        "18446744073709551616",
        "null",
        "9223372036854775807",
        "4611686018427387904",
        "\"x\"",
        "[]",
        "{}",
        "1",
        "7",
        "true",
    ]);
    prop_oneof![
        3 => (at(), 0u8..8).prop_map(|(at, bit)| Damage::Flip { at, bit }),
        1 => at().prop_map(|at| Damage::Truncate { at }),
        1 => (at(), bytes()).prop_map(|(at, bytes)| Damage::Insert { at, bytes }),
        1 => (at(), bytes()).prop_map(|(at, bytes)| Damage::Overwrite { at, bytes }),
        4 => (at(), number).prop_map(|(which, text)| Damage::Number { which, text: text.into() }),
        1 => (at(), 1usize..5000, prop::sample::select(vec!['[', '{']))
            .prop_map(|(which, depth, open)| Damage::Deep { which, depth, open }),
        1 => (at(), 1usize..200).prop_map(|(at, len)| Damage::Delete { at, len }),
        1 => (at(), 1usize..200).prop_map(|(at, len)| Damage::Repeat { at, len }),
    ]
}

/// Returns the ranges of digits.
fn numbers(bytes: &[u8]) -> Vec<(usize, usize)> {
    let mut found = Vec::new();
    let mut start = None;
    for (i, byte) in bytes.iter().chain(b" ").enumerate() {
        match (byte.is_ascii_digit(), start) {
            (true, None) => start = Some(i),
            (false, Some(from)) => {
                found.push((from, i));
                start = None;
            }
            _ => {}
        }
    }
    found
}

impl Damage {
    fn apply(&self, bytes: &mut Vec<u8>) {
        if bytes.is_empty() {
            return;
        }
        let len = bytes.len();
        match self {
            Self::Flip { at, bit } => bytes[at.index(len)] ^= 1 << bit,
            Self::Truncate { at } => bytes.truncate(at.index(len)),
            Self::Insert { at, bytes: new } => {
                let at = at.index(len);
                bytes.splice(at..at, new.iter().copied());
            }
            Self::Overwrite { at, bytes: new } => {
                let at = at.index(len);
                let end = (at + new.len()).min(len);
                bytes.splice(at..end, new.iter().copied());
            }
            Self::Number { which, text } => {
                let numbers = numbers(bytes);
                if !numbers.is_empty() {
                    let (from, to) = numbers[which.index(numbers.len())];
                    bytes.splice(from..to, text.bytes());
                }
            }
            Self::Deep { which, depth, open } => {
                let numbers = numbers(bytes);
                if !numbers.is_empty() {
                    let (from, to) = numbers[which.index(numbers.len())];
                    let (left, right) = if *open == '[' { ("[", "]") } else { ("{\"a\":", "}") };
                    let deep = [left.repeat(*depth), "1".into(), right.repeat(*depth)].concat();
                    bytes.splice(from..to, deep.into_bytes());
                }
            }
            Self::Delete { at, len: n } => {
                let at = at.index(len);
                bytes.drain(at..(at + n).min(len));
            }
            Self::Repeat { at, len: n } => {
                let at = at.index(len);
                let part = bytes[at..(at + n).min(len)].to_vec();
                bytes.splice(at..at, part);
            }
        }
    }
}

/// A checkpoint of three ranks, made once.
fn saved() -> &'static Path {
    static SAVED: OnceLock<tempfile::TempDir> = OnceLock::new();
    SAVED
        .get_or_init(|| {
            let temp = tempfile::tempdir().unwrap();
            save_all(temp.path(), "c", [1, 3, 1], 1, SEED);
            temp
        })
        .path()
}

const SHARD: &str = "model/shard-00002-model-00001-of-00001.safetensors";

/// Copies the checkpoint, with `bytes` as the content of one file.
fn copy(file: &str, bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
    let temp = tempfile::tempdir().unwrap();
    let to = temp.path().join("c");
    for folder in ["model", "optimizer"] {
        fs::create_dir_all(to.join(folder)).unwrap();
        for entry in fs::read_dir(saved().join("c").join(folder)).unwrap() {
            let name = entry.unwrap().file_name();
            let path = Path::new(folder).join(name);
            fs::hard_link(saved().join("c").join(&path), to.join(&path)).unwrap();
        }
    }
    fs::copy(saved().join("c/manifest.json"), to.join("manifest.json")).unwrap();
    fs::remove_file(to.join(file)).unwrap();
    fs::write(to.join(file), bytes).unwrap();
    (temp, to)
}

/// Returns the total size of all files below a directory, in bytes.
fn size(path: &Path) -> usize {
    let entries = fs::read_dir(path).unwrap().map(|entry| entry.unwrap());
    entries
        .map(
            |e| {
                if e.path().is_dir() {
                    size(&e.path())
                } else {
                    e.metadata().unwrap().len() as usize
                }
            },
        )
        .sum()
}

fn names_a_file_of(error: &Error, root: &Path) {
    let text = error.to_string();
    assert!(text.contains(root.to_str().unwrap()), "it does not name the file: {text}");
}

/// Reads all tensors that a source lists.
fn read_all(source: &dyn TensorSource, root: &Path) {
    for name in source.names() {
        let info = source.info(name).unwrap();
        let region = Region::full(&info.shape);
        // A view may repeat its elements any number of times; such tensors are skipped.
        if region.elem_count() > 1 << 20 {
            continue;
        }
        if let Err(error) = source.read(name, &region, DType::F32, &Device::Cpu) {
            names_a_file_of(&error, root);
        }
    }
}

fn damaged(original: &[u8], damages: &[Damage]) -> Vec<u8> {
    let mut bytes = original.to_vec();
    for damage in damages {
        damage.apply(&mut bytes);
    }
    bytes
}

/// Opens and reads a checkpoint with one damaged file.
fn check_checkpoint(file: &str, bytes: &[u8]) {
    let (_temp, path) = copy(file, bytes);
    let size = size(&path);
    let (opened, taken) = thread_peak(|| DistributedCheckpoint::open(&path));
    assert!(taken <= allowed(size), "opening took {taken} bytes for {size}");
    match opened {
        Err(error) => names_a_file_of(&error, &path),
        Ok(checkpoint) => {
            let ((), taken) = thread_peak(|| {
                read_all(checkpoint.model(), &path);
                read_all(checkpoint.optimizer(), &path);
                if let Err(error) = checkpoint.verify() {
                    assert!(error.to_string().contains(path.to_str().unwrap()));
                }
            });
            // Verifying has a buffer of 4 MiB.
            assert!(taken <= allowed(size) + (4 << 20), "reading took {taken} bytes for {size}");
        }
    }
}

/// Does the same for a directory of shards without a manifest, and for a single file.
fn check_shards(bytes: &[u8]) {
    let (_temp, path) = copy(SHARD, bytes);
    for path in [path.join("model"), path.join(SHARD)] {
        let size = if path.is_dir() { size(&path) } else { bytes.len() };
        let (opened, taken) = thread_peak(|| SafetensorsSource::open(&path));
        assert!(taken <= allowed(size), "opening took {taken} bytes for {size}");
        match opened {
            Err(error) => names_a_file_of(&error, &path),
            Ok(source) => {
                let ((), taken) = thread_peak(|| read_all(&source, &path));
                assert!(taken <= allowed(size) + (4 << 20), "reading took {taken} for {size}");
            }
        }
    }
}

proptest! {
    #[test]
    fn manifests(damages in prop::collection::vec(damage(), 1..4)) {
        let original = fs::read_to_string(saved().join("c/manifest.json")).unwrap();
        check_checkpoint("manifest.json", &damaged(original.as_bytes(), &damages));
        // Damages without the digest, which would find them all.
        let original = without_digest(&original);
        check_checkpoint("manifest.json", &damaged(original.as_bytes(), &damages));
    }

    #[test]
    fn shards(damages in prop::collection::vec(damage(), 1..4)) {
        let original = fs::read(saved().join("c").join(SHARD)).unwrap();
        let bytes = damaged(&original, &damages);
        check_shards(&bytes);
        check_checkpoint(SHARD, &bytes);
    }

    /// Damages the text of a header; its length is correct.
    #[test]
    fn headers(damages in prop::collection::vec(damage(), 1..4)) {
        let original = fs::read(saved().join("c").join(SHARD)).unwrap();
        let (len, rest) = original.split_at(8);
        let (header, data) = rest.split_at(u64::from_le_bytes(len.try_into().unwrap()) as usize);
        let header = damaged(header, &damages);
        check_shards(&[&(header.len() as u64).to_le_bytes(), &header[..], data].concat());
    }

    #[test]
    fn state_dicts(damages in prop::collection::vec(damage(), 1..4)) {
        let original = include_bytes!("fixtures/lightning.ckpt");
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("x.ckpt");
        let bytes = damaged(original, &damages);
        fs::write(&path, &bytes).unwrap();
        let (opened, taken) = thread_peak(|| TorchSource::open(&path));
        prop_assert!(taken <= allowed(bytes.len()), "opening took {taken} bytes for {}", bytes.len());
        match opened {
            Err(error) => names_a_file_of(&error, &path),
            Ok(source) => read_all(&source, &path),
        }
        if let Err(error) = open(&path) {
            names_a_file_of(&error, &path);
        }
    }
}

/// Regression cases from earlier fuzzing.
#[test]
fn the_corpus() {
    let manifest = without_digest(&fs::read_to_string(saved().join("c/manifest.json")).unwrap());
    let long = "1,".repeat(5000);
    for (from, to) in [
        ("\"shape\": [\n", "\"shape\": [\n18446744073709551615,"),
        ("\"shape\": [\n", "\"shape\": [\n0,"),
        ("\"shape\": [\n", &format!("\"shape\": [\n{long}")),
        ("\"offsets\": [\n", "\"offsets\": [\n18446744073709551615,"),
        ("\"sizes\": [\n", "\"sizes\": [\n9223372036854775807,"),
        ("\"sizes\": [\n", "\"sizes\": [\n0,"),
        ("\"bytes\": [\n", "\"bytes\": [\n18446744073709551615,"),
        ("\"dtype\": \"F32\"", "\"dtype\": \"F4\""),
        ("\"dtype\": \"F32\"", "\"dtype\": \"F64\""),
        ("\"xxh3\": \"", "\"xxh3\": \"+"),
        ("\"step\": 1", "\"step\": NaN"),
        ("\"state\": {", "\"state\": {\"a\": 1e999, "),
        ("model/shard-00001", "../shard-00001"),
        (
            "\"model\": {",
            "\"model\": {\"x\": {\"shape\": [1000000, 1000000], \"dtype\": \"F32\", \"chunks\": []}, ",
        ),
        ("\"chunks\": [", "\"boxes\": [], \"chunks\": ["),
    ] {
        assert!(manifest.contains(from), "{from}");
        check_checkpoint("manifest.json", manifest.replacen(from, to, 1).as_bytes());
        check_checkpoint("manifest.json", manifest.replace(from, to).as_bytes());
    }
    for json in ["[".repeat(1 << 20), "{\"a\":".repeat(1 << 18), String::new(), "null".into()] {
        check_checkpoint("manifest.json", json.as_bytes());
    }
    let header = |json: &str| {
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend(json.as_bytes());
        bytes
    };
    let max = usize::MAX;
    for json in [
        "{}".to_owned(),
        "[".repeat(1 << 20),
        format!("{{\"a\":{{\"dtype\":\"F32\",\"shape\":[{max},{max}],\"data_offsets\":[0,0]}}}}"),
        format!("{{\"a\":{{\"dtype\":\"F32\",\"shape\":[0,{max}],\"data_offsets\":[0,0]}}}}"),
        format!("{{\"a\":{{\"dtype\":\"F32\",\"shape\":[{max},0],\"data_offsets\":[{max},{max}]}}}}"),
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}".into(),
        format!("{{\"__metadata__\":{{\"DCP_SHARDING_INFO\":\"{{\\\"a\\\":{{\\\"saved_offsets\\\":[{max}]}}}}\"}},\"a\":{{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}}}}"),
        "{\"__metadata__\":{\"DCP_SHARDING_INFO\":\"{\\\"a\\\":{\\\"saved_offsets\\\":[]}}\"},\"a\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}}".into(),
    ] {
        check_shards(&header(&json));
    }
    check_shards(&u64::MAX.to_le_bytes());
    check_shards(&[(1u64 << 40).to_le_bytes(), [b'{'; 8]].concat());
    // The parser alone, without a file.
    let path = Path::new("somewhere/manifest.json");
    let error = Manifest::parse(b"{\"format\": 1e400}", path).unwrap_err();
    names_a_file_of(&error, Path::new("somewhere"));
}

/// Headers with many dimensions, or many tensors without elements.
#[test]
fn empty_tensor_headers_take_little_memory() {
    let with_header = |json: &str| {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("x.safetensors");
        let header = [&(json.len() as u64).to_le_bytes(), json.as_bytes()].concat();
        fs::write(&path, header).unwrap();
        (temp, path)
    };
    let zeros = vec!["0"; 100_000].join(",");
    let dims =
        format!("{{\"a\":{{\"dtype\":\"F32\",\"shape\":[{zeros}],\"data_offsets\":[0,0]}}}}");
    let (_temp, path) = with_header(&dims);
    let (opened, taken) = thread_peak(|| SafetensorsSource::open(&path));
    assert!(taken < 10 * dims.len(), "{taken} bytes for {}", dims.len());
    let error = opened.unwrap_err().to_string();
    assert!(error.ends_with("has tensor `a` of 100000 dimensions; 64 are the most"), "{error}");
    let tensor =
        |i: usize| format!("\"{i}\":{{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}}");
    let tensors: Vec<String> = (0..400_000).map(tensor).collect();
    let json = format!("{{{}}}", tensors.join(","));
    let (_temp, path) = with_header(&json);
    let (opened, taken) = thread_peak(|| SafetensorsSource::open(&path));
    assert!(taken < 8 * json.len(), "{taken} bytes for {}", json.len());
    assert_eq!(opened.unwrap().names().len(), 400_000);
}
