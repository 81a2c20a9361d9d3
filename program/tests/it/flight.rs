//! `fulgurite flight` on records of ranks.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use fulgurite_test_message::assert_says;
use serde_json::{Value, json};

fn flight(arguments: &[&str], dir: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fulgurite"));
    command.arg("flight").args(arguments).current_dir(dir).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Writes the record of a rank that has begun a number of all-reduces, the last at 7 s.
fn write(dir: &Path, rank: usize, begun: u64, ended: u64) {
    let group = json!({"kind": "group", "id": 0, "name": "world", "ranks": [0, 1, 2]});
    let channel = json!({"kind": "channel", "group": 0, "channel": "all", "calls": begun});
    let head = json!({"kind": "rank", "rank": rank, "world_size": 3, "host": "a-host", "written": 10.0, "calls": begun});
    let call = |number: u64| {
        let mut call = json!({
            "kind": "call", "group": 0, "number": number, "op": "all_reduce", "bytes": 4096,
            "label": "unit `layers.3`", "begun": 7.0 - (begun - number) as f64,
        });
        if number <= ended {
            call["ended"] = json!(7.5);
        }
        call
    };
    let lines = [head, group, channel].into_iter().chain((1..=begun).map(call));
    fs::create_dir_all(dir).unwrap();
    let path = dir.join(format!("rank-{rank:05}.jsonl"));
    fs::write(path, lines.map(|line| format!("{line}\n")).collect::<String>()).unwrap();
}

#[test]
fn rank_behind_is_named() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("version_0/flight");
    for (rank, begun, ended) in [(0, 3, 2), (1, 2, 2), (2, 3, 2)] {
        write(&dir, rank, begun, ended);
    }
    // The run's directory has the folder.
    let output = flight(&["version_0/flight"], temp.path());
    assert_eq!(output.stdout, flight(&["version_0"], temp.path()).stdout);
    assert_eq!(output.status.code(), Some(0));
    let found = text(&output.stdout);
    let first = found.lines().next().unwrap();
    assert_says!(first, "rank 1 is behind … all_reduce 3 of `world` … `layers.3` … 0 and 2 …");
    assert_eq!(found.matches("a-host").count(), 3);
    let output = flight(&["version_0", "--calls", "1"], temp.path());
    assert_eq!(text(&output.stdout).matches("\nrank ").count(), 4);
    let output = flight(&["version_0", "--json"], temp.path());
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(found["troubles"].as_array().unwrap().len(), 1);
    assert_eq!(found["troubles"][0]["behind"], json!([1]));
    assert_eq!(found["ranks"].as_array().unwrap().len(), 3);
    fs::remove_file(dir.join("rank-00001.jsonl")).unwrap();
    let found = text(&flight(&["version_0"], temp.path()).stdout);
    assert_says!(
        found.lines().next().unwrap(),
        "ranks 0 and 2 … all_reduce 3 … rank 1 … not known"
    );
    assert!(found.contains("there is no record of rank 1"), "{found}");
}

/// Rank 0 waits in `world`, and rank 1 in `replicas`.
#[test]
fn ranks_that_wait_for_each_other_are_named() {
    let temp = tempfile::tempdir().unwrap();
    for (rank, name) in [(0, "world"), (1, "replicas")] {
        let lines = [
            json!({"kind": "rank", "rank": rank, "world_size": 2, "host": "a-host", "written": 10.0, "calls": 1}),
            json!({"kind": "group", "id": 0, "name": name, "ranks": [0, 1]}),
            json!({"kind": "channel", "group": 0, "channel": "all", "calls": 1}),
            json!({"kind": "call", "group": 0, "number": 1, "op": "barrier", "bytes": 0, "begun": 7.0}),
        ];
        let path = temp.path().join(format!("rank-{rank:05}.jsonl"));
        fs::write(path, lines.map(|line| format!("{line}\n")).concat()).unwrap();
    }
    let found = text(&flight(&["."], temp.path()).stdout);
    insta::assert_snapshot!(found.lines().take(3).collect::<Vec<_>>().join("\n"), @r"
    ranks wait for each other:
      rank 1 for 3.0 s in barrier 1 of `replicas`, which rank 0 has not begun
      rank 0 for 3.0 s in barrier 1 of `world`, which rank 1 has not begun
    ");
}

#[test]
fn complete_records_have_no_trouble() {
    let temp = tempfile::tempdir().unwrap();
    (0..3).for_each(|rank| write(temp.path(), rank, 2, 2));
    let output = flight(&["."], temp.path());
    assert_eq!(output.status.code(), Some(0));
    assert!(text(&output.stdout).starts_with("no rank is behind"));
}

#[test]
fn files_that_are_no_records_are_refused() {
    let temp = tempfile::tempdir().unwrap();
    let error = |arguments: &[&str]| {
        let output = flight(arguments, temp.path());
        assert_eq!(output.status.code(), Some(1));
        text(&output.stderr)
    };
    assert!(error(&["."]).contains("there is no record of a rank"));
    assert!(error(&["missing"]).contains("missing"));
    fs::write(temp.path().join("rank-00000.jsonl"), "{}\n").unwrap();
    let found = error(&["."]);
    assert!(found.contains("rank-00000.jsonl: line 1"), "{found}");
    write(temp.path(), 0, 1, 1);
    let twice = error(&["rank-00000.jsonl", "rank-00000.jsonl"]);
    assert!(twice.contains("two records of rank 0"), "{twice}");
}
