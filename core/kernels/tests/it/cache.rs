//! The cache of compiled kernels.

use std::cell::Cell;
use std::fs;

use fulgurite_core::Error;
use fulgurite_kernels::cache::Cache;

/// Counts how often two calls make the bytes of a key, with a change of the kept file between them.
fn made_in_two_calls(change: impl Fn(&mut Vec<u8>)) -> u32 {
    // Like a cubin: not text, with zeros and line ends.
    let bytes = b"\x7fELF\0first\nsecond\n\xff\0";
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::new(folder.path().join("new"));
    let mut made = 0;
    for _ in 0..2 {
        let found = cache.bytes("a", "key", || {
            made += 1;
            Ok(bytes.to_vec())
        });
        assert_eq!(found.unwrap(), bytes);
        let files: Vec<_> = fs::read_dir(folder.path().join("new")).unwrap().collect();
        assert_eq!(files.len(), 1, "nothing else is left there");
        let path = files[0].as_ref().unwrap().path();
        let mut kept = fs::read(&path).unwrap();
        change(&mut kept);
        fs::write(path, kept).unwrap();
    }
    made
}

#[test]
fn complete_files_are_reused() {
    assert_eq!(made_in_two_calls(|_| ()), 1);
    assert_eq!(made_in_two_calls(|kept| kept.truncate(kept.len() - 1)), 2);
    assert_eq!(made_in_two_calls(|kept| kept.push(0)), 2);
    assert_eq!(made_in_two_calls(|kept| *kept.last_mut().unwrap() = 1), 2);
    assert_eq!(made_in_two_calls(Vec::clear), 2);
}

#[test]
fn kernels_are_cached_by_key() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::new(folder.path());
    let made = Cell::new(0);
    for key in ["a", "b", "a"] {
        let make = || {
            made.set(made.get() + 1);
            Ok(key.into())
        };
        assert_eq!(cache.bytes("name", key, make).unwrap(), key.as_bytes());
    }
    assert_eq!(made.get(), 2, "the third is kept");
}

#[test]
fn unwritable_cache_is_ignored() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let cache = Cache::new(file.join("below"));
    for text in ["one", "two"] {
        assert_eq!(cache.bytes("a", "key", || Ok(text.into())).unwrap(), text.as_bytes());
    }
}

#[test]
fn failures_are_not_cached() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::new(folder.path());
    let error = cache.bytes("a", "key", || Err(Error::other("refused"))).unwrap_err();
    assert_eq!(error.to_string(), "refused");
    assert_eq!(cache.bytes("a", "key", || Ok("made".into())).unwrap(), b"made");
}
