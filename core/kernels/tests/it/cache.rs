//! The cache of compiled kernels.

use std::fs;

use fulgurite_core::Error;
use fulgurite_kernels::cache::Cache;

/// How often the text of a key is made in two calls, between which the kept file is changed.
fn made_in_two_calls(change: impl Fn(&mut String)) -> u32 {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::new(folder.path().join("new"));
    let mut made = 0;
    for _ in 0..2 {
        let text = cache.text("a", "key", || {
            made += 1;
            Ok("first\nsecond\n".to_owned())
        });
        assert_eq!(text.unwrap(), "first\nsecond\n");
        let files: Vec<_> = fs::read_dir(folder.path().join("new")).unwrap().collect();
        assert_eq!(files.len(), 1, "nothing else is left there");
        let path = files[0].as_ref().unwrap().path();
        let mut kept = fs::read_to_string(&path).unwrap();
        change(&mut kept);
        fs::write(path, kept).unwrap();
    }
    made
}

#[test]
fn what_is_kept_whole_is_made_once() {
    assert_eq!(made_in_two_calls(|_| ()), 1);
    assert_eq!(made_in_two_calls(|kept| kept.truncate(kept.len() - 1)), 2);
    assert_eq!(made_in_two_calls(|kept| *kept = kept.replace("first", "other")), 2);
    assert_eq!(made_in_two_calls(String::clear), 2);
}

#[test]
fn another_key_is_another_text() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::new(folder.path());
    for key in ["a", "b", "a"] {
        assert_eq!(
            cache.text("name", key, || Ok(format!("of {key}"))).unwrap(),
            format!("of {key}")
        );
    }
}

#[test]
fn a_cache_that_cannot_be_written_is_none() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let cache = Cache::new(file.join("below"));
    for text in ["one", "two"] {
        assert_eq!(cache.text("a", "key", || Ok(text.to_owned())).unwrap(), text);
    }
}

#[test]
fn what_fails_is_not_kept() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::new(folder.path());
    let error = cache.text("a", "key", || Err(Error::other("refused"))).unwrap_err();
    assert_eq!(error.to_string(), "refused");
    assert_eq!(cache.text("a", "key", || Ok("made".to_owned())).unwrap(), "made");
}
