//! Runs `gpu-check` as a program, on a CPU.

use std::process::{Command, Output};

use serde_json::Value;

fn gpu_check(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_gpu-check"))
        .args(args)
        .env("RAYON_NUM_THREADS", "1")
        .output()
        .unwrap()
}

#[test]
fn cpu_passes_against_itself() {
    let dir = tempfile::tempdir().unwrap();
    let json = dir.path().join("report.json");
    let output = gpu_check(&["--device", "cpu", "--json", json.to_str().unwrap()]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    let steps = report["steps"].as_array().unwrap();
    let listed = gpu_check(&["--list"]);
    assert_eq!(String::from_utf8_lossy(&listed.stdout).lines().count(), steps.len());
    for step in steps {
        match step["status"].as_str().unwrap() {
            "passed" => assert_eq!(step["wrong"], serde_json::json!([])),
            "skipped" => assert!(step["message"].is_string(), "{step}"),
            other => panic!("{other}: {step}"),
        }
    }
    let of = |name: &str| steps.iter().find(|step| step["step"] == name).unwrap();
    assert_eq!(of("kernels.compile")["status"], "skipped");
    // The CPU against itself in f64: no difference in f64, and rounding in other dtypes.
    let norms = of("functions.norms")["figures"].as_object().unwrap();
    let is_right = |(name, apart): (&String, &Value)| match apart.as_f64().unwrap() {
        apart if name.contains("F64") => apart == 0.0,
        apart => apart < 5e-3,
    };
    assert!(norms.len() > 150 && norms.iter().all(is_right), "{norms:?}");
    assert!(norms.values().any(|apart| *apart != 0.0), "{norms:?}");
    // Each gradient of each case in two dtypes; against output differences, so not all zero.
    let gradients = of("functions.gradients")["figures"].as_object().unwrap();
    assert!(gradients.len() > 150 && gradients.values().any(|it| *it != 0.0), "{gradients:?}");
    assert!(of("training.ranks")["figures"]["fsdp loss_last"].as_f64().unwrap() > 1.0);
}

#[test]
fn impossible_selections_are_refused() {
    let error = |args: &[&str]| {
        let output = gpu_check(args);
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let unknown = error(&["--device", "cpu", "--only", "functoins"]);
    assert!(
        unknown.contains("--only functoins") && unknown.contains("functions.norms"),
        "{unknown}"
    );
    // Every text must match a step, not only one of them.
    let unknown = error(&["--list", "--skip", "speed", "--skip", "sped"]);
    assert!(
        unknown.contains("--skip sped: no step") && unknown.contains("speed.llama"),
        "{unknown}"
    );
    let none = error(&["--list", "--only", "speed", "--skip", "speed."]);
    assert!(none.contains("--skip speed. leaves no step"), "{none}");
    if !cfg!(feature = "cuda") {
        let without = error(&["--only", "platform"]);
        assert!(without.contains("built without CUDA"), "{without}");
    }
}

#[test]
fn only_and_skip_match_parts_of_names() {
    let listed = |args: &[&str]| {
        let output = gpu_check(&[&["--list"], args].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().map(|line| line.split(' ').next().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let all = listed(&[]);
    let left = listed(&["--skip", "speed.", "--skip", "memory.pool"]);
    let is_left = |name: &&String| !name.starts_with("speed.") && *name != "memory.pool";
    assert_eq!(left, all.iter().filter(is_left).cloned().collect::<Vec<_>>());
    assert_eq!(all.len(), left.len() + 6);
    assert_eq!(
        listed(&["--only", "training", "--only", "speed", "--skip", "llama", "--skip", "f"]),
        ["training.ranks", "speed.device", "speed.cudnn"]
    );
}
