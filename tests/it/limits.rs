//! Programs under system limits that are too low: the first line of the error names the limit.

use fulgurite_test_message::assert_says;

use crate::program::{Job, Scratch};

/// The first error of a run under a limit of `ulimit`, with variable parts removed; `None` if the
/// run succeeds.
fn first_error(job: &Job, limit: &str) -> Option<String> {
    let run = job.clone().limited(limit).run();
    if run.code() == Some(0) {
        return None;
    }
    assert_eq!(run.code(), Some(1), "{limit}: {}", run.stderr);
    Some(run.first_error().to_owned())
}

#[test]
fn too_few_open_files_are_named() {
    let scratch = Scratch::with_tokens();
    let job = scratch.small().on("fsdp", 2, 3).set(&["trainer.max_steps=1"]);
    let mut enough = false;
    for files in [4, 9, 12, 64] {
        let error = first_error(&job, &format!("-n {files}"));
        enough = error.is_none();
        if let Some(error) = error {
            let named =
                error.contains("Too many open files") || error.contains("No file descriptors");
            assert!(named && error.contains("ulimit -n"), "{files}: {error}");
        }
    }
    assert!(enough, "64 files are enough");
}

#[test]
fn too_few_threads_are_named() {
    let mut scratch = Scratch::with_tokens();
    // A user without other processes.
    let uid = 400_000 + std::process::id() % 100_000;
    if !scratch.give_to(uid) {
        eprintln!("not tested: only root can run the program as somebody else, if all can read it");
        return;
    }
    let job = scratch.small().on("fsdp", 2, 3).set(&["trainer.max_steps=1"]);
    for processes in [2, 4, 6, 9, 14, 100] {
        match first_error(&job, &format!("-u {processes}")) {
            Some(error) => assert!(error.contains("ulimit -u"), "{processes}: {error}"),
            None => assert!(processes > 14, "{processes} are enough"),
        }
    }
}

#[test]
fn too_little_memory_is_named() {
    let scratch = Scratch::with_tokens();
    let job = scratch.small().on("fsdp", 2, 3).set(&["trainer.max_steps=1"]);
    for kib in [80_000, 150_000, 300_000] {
        let error = first_error(&job, &format!("-v {kib}")).expect("too little");
        assert!(error.contains("memory"), "{kib}: {error}");
    }
}

#[test]
fn file_size_limit_is_named() {
    let scratch = Scratch::with_tokens();
    let job = scratch.small().set(&["checkpoint.dir=kept", "checkpoint.every_n_steps=1"]);
    let error = first_error(&job, "-f 8").expect("checkpoints are larger");
    let (place, what) = error.split_once(".safetensors: ").unwrap();
    assert!(place.starts_with("error: writing kept/step-00000001.tmp-"), "{error}");
    assert_says!(what, "File too large (os error 27) … (ulimit -f)");
}
