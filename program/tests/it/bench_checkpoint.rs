//! `fulgurite bench checkpoint`, as a program.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// The measurements of this workload on two ranks that share it.
fn measured(workload: &str, dir: &Path, extra: &[&str]) -> Value {
    let output = Command::new(env!("CARGO_BIN_EXE_fulgurite"))
        .args(["bench", "checkpoint", "--ranks", "2", "--strategy", "fsdp", "--repeat", "2"])
        .args(["--workload", workload, "--dir"])
        .arg(dir)
        .args(extra)
        .env("RAYON_NUM_THREADS", "1")
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    // The benchmark leaves no files.
    assert_eq!(std::fs::read_dir(dir).unwrap().count(), 0);
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Asserts that each save and load used at most this much more memory on any rank: the rank's share
/// of the state, the largest tensor, and 64 MiB.
fn assert_rises_are_bounded(measured: &Value) {
    let mib = |key: &str| measured[key].as_f64().unwrap();
    let most = mib("share_mib") + mib("largest_tensor_mib") + 64.0;
    for time in measured["times"].as_array().unwrap() {
        let what = time["what"].as_str().unwrap();
        for rise in time["rise_mib"].as_array().unwrap() {
            assert!(rise.as_f64().unwrap() <= most, "{what}: {rise} MiB, expected {most}");
        }
    }
}

#[test]
fn saves_and_loads_against_machine_limits() {
    let temp = tempfile::tempdir().unwrap();
    let measured = measured("tiny", temp.path(), &["--json"]);
    assert_eq!(measured["bench"], "checkpoint");
    let times = measured["times"].as_array().unwrap();
    let limits: Vec<_> = times
        .iter()
        .map(|time| {
            let (secs, best) = (time["secs"].as_f64().unwrap(), time["secs_min"].as_f64().unwrap());
            assert!(0.0 < best && best <= secs, "{time}");
            let rate = measured["state_gib"].as_f64().unwrap() / secs;
            assert_eq!(time["gib_per_s"].as_f64().unwrap(), rate, "{time}");
            assert_eq!(time["limit"].is_null(), time["of_limit"].is_null(), "{time}");
            (time["what"].as_str().unwrap(), time["limit"].as_str().unwrap_or("-"))
        })
        .collect();
    assert_eq!(
        limits,
        [
            ("raw_write", "-"),
            ("raw_read_warm", "-"),
            ("raw_read_cold", "-"),
            ("save", "raw_write"),
            ("load_warm", "raw_read_warm"),
            ("load_cold", "raw_read_cold"),
            ("memcpy", "-"),
            ("async_block_reserved", "memcpy"),
            ("async_done", "raw_write"),
            ("async_block_first", "memcpy"),
            ("async_block", "memcpy"),
            ("raw_write_by_one", "-"),
            ("full_save", "raw_write_by_one"),
            ("full_load_warm", "raw_read_warm"),
        ]
    );
    for time in times.iter().filter(|time| time["what"] != "async_done") {
        assert_eq!(time["rise_mib"].as_array().unwrap().len(), 2, "{time}");
    }
    assert_rises_are_bounded(&measured);
}

#[test]
#[ignore = "writes 1 GiB twenty times over; with --release a minute, else several"]
fn checkpoint_memory_stays_within_its_bound() {
    let temp = tempfile::tempdir().unwrap();
    let measured = measured("ckpt", temp.path(), &["--json"]);
    assert!(measured["state_gib"].as_f64().unwrap() > 1.0);
    assert_rises_are_bounded(&measured);
}
