//! The data report of a run, and keys that meet a program's defaults.

use std::fs;

use fulgurite_test_message::assert_says;

use crate::program::Scratch;

#[test]
fn run_reports_its_data() {
    let scratch = Scratch::new();
    fs::create_dir(scratch.path().join("books")).unwrap();
    scratch.file("books/a.txt", "all that is read of it, ".repeat(20));
    scratch.file("books/latin.txt", b"caf\xe9");
    scratch.file("books/.hidden", "no");
    let run = scratch
        .small()
        .set(&[
            "data={ type = 'text', path = 'books', seq_len = 7, batch_size = 2 }",
            "model.vocab_size=264",
            "trainer.max_steps=1",
            "trainer.loggers=['jsonl']",
        ])
        .succeed();
    let expected = "data.path: 1 document, 1 file, 480 bytes, 481 tokens; left out: 1 hidden (.hidden), 1 not UTF-8 \
                    (latin.txt)";
    assert!(run.stderr.lines().any(|line| line == expected), "{}", run.stderr);
    let warning =
        "some of the data cannot be used and was left out: data.path: 1 not UTF-8 (latin.txt)";
    assert!(run.stderr.contains(warning), "{}", run.stderr);
    let event = "{\"event\":\"data\",\"sources\":[{\"source\":\"data.path\",\"counts\":{\"bytes\":480,\
                 \"documents\":1,\"files\":1,\"tokens\":481},\"left_out\":[";
    assert!(run.stdout.starts_with(event), "{}", run.stdout);
    let logs = scratch.path().join("fulgurite_logs/version_0");
    assert!(fs::read_to_string(logs.join("events.jsonl")).unwrap().starts_with(event));
    let metrics = fs::read_to_string(logs.join("metrics.jsonl")).unwrap();
    assert!(metrics.starts_with(&format!("{{\"step\":0,\"data\":\"{expected}\"}}\n")), "{metrics}");
}

#[test]
fn mixture_replaces_the_default_path() {
    let scratch = Scratch::new();
    for name in ["a", "b", "val"] {
        scratch.file(&format!("{name}.txt"), name.repeat(300));
    }
    let mixture =
        "data.mixture=[{ path = 'a.txt', weight = 1.0 }, { path = 'b.txt', weight = 1.0 }]";
    let job = scratch.small();
    let others = job.assignments("data.type", "data.path");
    let job = scratch.job(&["fit"]).set(&others).set(&[
        mixture,
        "data.shuffle=true",
        "data.validation_path=val.txt",
        "model.vocab_size=264",
        "trainer.max_steps=1",
    ]);
    let run = job.succeed();
    let expected = "data.mixture[0].path: 1 document, 1 file, 300 bytes, 301 tokens\n\
                    data.mixture[1].path: 1 document, 1 file, 300 bytes, 301 tokens\n\
                    data.validation_path: 1 document, 1 file, 900 bytes, 901 tokens\n";
    assert!(run.stderr.contains(expected), "{}", run.stderr);
    // Both keys in one layer contradict each other.
    assert_says!(job.set(&["data.path=a.txt"]).fail(), "error: data.path … data.mixture exclude …");
}
