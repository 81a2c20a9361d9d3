//! The plan of the README's run.

use std::process::Command;

use serde_json::Value;

use crate::program::program;

/// A change of these numbers is a change of what the example sends.
#[test]
fn readme_run_has_its_plan() {
    let output = Command::new(program())
        .args(["plan", "--json"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("the example starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let plan: Value = serde_json::from_slice(&output.stdout).expect("one object");
    let number = |key: &str| plan[key].as_u64().unwrap_or_else(|| panic!("no {key} in {plan}"));
    assert_eq!((number("world_size"), number("calls_per_step")), (2, 34));
    assert_eq!(number("traffic_bytes_per_step"), 18_802_742);
    assert!(number("peak_bytes") > 4 * number("parameters"), "weights in f32 and more");
    assert!(plan["step_s"].as_f64().is_some_and(|secs| secs > 0.0));
}
