//! `fulgurite schedule`, as a user runs it.

use std::process::{Command, Output};

use insta::assert_snapshot;

fn schedule(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_fulgurite"))
        .args(["schedule", "show"])
        .args(args)
        .output()
        .unwrap()
}

fn shown(args: &[&str]) -> String {
    let output = schedule(args);
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn refused(args: &[&str]) -> String {
    let output = schedule(args);
    assert!(!output.status.success(), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn schedules_are_drawn() {
    assert_snapshot!(shown(&["--type", "1f1b", "--stages", "2", "--micro-batches", "3"]), @r"
    rank 0  0F0 0F1 ·   ·   0B0 ──  0F2 0B1 ──  ·   0B2 ──
    rank 1  ·   1F0 1B0 ──  1F1 1B1 ──  1F2 1B2 ──  ·   ·

    2 ranks, 2 stages, 3 micro-batches: time 12, of which ranks wait 25.0 %
    micro-batches held at once, by rank: 2 1
    ");
    assert_snapshot!(shown(&["--type", "zb_v", "--stages", "4", "--micro-batches", "3"]), @r"
    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2 ·
    rank 1  ·   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

    2 ranks, 4 stages, 3 micro-batches: time 19, of which ranks wait 5.3 %
    micro-batches held at once, by rank: 4 4
    ");
}

#[test]
fn times_without_a_grid_are_listed() {
    let shown =
        shown(&["--type", "gpipe", "--ranks", "1", "--micro-batches", "2", "--costs", "1,0,0"]);
    assert!(shown.starts_with("rank 0  0F0 0F1 0B0 0B1\n\n1 ranks"), "{shown}");
}

#[test]
fn lists_go_out_and_come_back() {
    let folder = tempfile::tempdir().unwrap();
    let (csv, svg) = (folder.path().join("mine.csv"), folder.path().join("mine.svg"));
    let sizes = ["--type", "interleaved_1f1b", "--ranks", "2", "--micro-batches", "4"];
    std::fs::write(&csv, shown(&[&sizes[..], &["--csv", "--gathered", "2"]].concat())).unwrap();
    let (csv, svg) = (csv.to_str().unwrap(), svg.to_str().unwrap());
    let args = ["--type", csv, "--transfer", "0.5", "--json", "--svg", svg];
    let json: serde_json::Value = serde_json::from_str(&shown(&args)).unwrap();
    assert_eq!(json["rank_of_stage"], serde_json::json!([0, 1, 0, 1]));
    assert_eq!(json["ranks"][0]["actions"][0]["action"], "0UNSHARD");
    assert!(json["duration"].as_f64().unwrap() > 24.0, "{json}");
    let picture = std::fs::read_to_string(svg).unwrap();
    assert!(picture.starts_with("<svg") && picture.contains("<title>3B3</title>"), "{picture}");
}

#[test]
fn what_cannot_be_is_refused() {
    for (args, said) in [
        (&["--type", "1f2b"][..], "expected one of gpipe, 1f1b"),
        (&["--type", "zb_v", "--stages", "5"], "--stages is 5 with 2 stages a rank"),
        (
            &["--type", "dual_pipe_v", "--stages", "8", "--micro-batches", "4"],
            "at least two a rank, 8",
        ),
        (&["--type", "gpipe", "--costs", "1,2"], "--costs has 2 numbers"),
        (&["--type", "missing.csv"], "missing.csv"),
        (&["--type", "mine.csv", "--micro-batches", "4"], "leave out --stages"),
        (
            &["--type", "gpipe", "--micro-batches", "4000000000"],
            "expected at most 1048576 forwards",
        ),
    ] {
        let error = refused(args);
        assert!(error.starts_with("error: ") && error.contains(said), "{error}");
    }
}
