//! `fulgurite bench train`, `pipeline`, `collectives`, `overlap` and `overhead`, as programs.

use std::process::{Command, Output};

use fulgurite_test_message::assert_says;
use serde_json::Value;

fn bench(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_fulgurite"))
        .arg("bench")
        .args(args)
        .env("RAYON_NUM_THREADS", "1")
        .output()
        .unwrap()
}

/// The printed JSON objects, one per line.
fn measured(args: &[&str]) -> Vec<Value> {
    let output = bench(args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines = String::from_utf8(output.stdout).unwrap();
    lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn pipelines_against_their_simulation() {
    let size = ["pipeline", "--json", "--workload", "tiny", "--seq", "16", "--batch", "1"];
    let steps = ["--steps", "2", "--warmup", "1", "--micro-batches", "4"];
    let rows = measured(&[&size[..], &steps].concat());
    let [report] = rows.as_slice() else { panic!("{rows:?}") };
    let schedules = report["schedules"].as_array().unwrap();
    assert_eq!(schedules.len(), 6);
    for row in schedules {
        let number = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key}: {row}"));
        assert!(number("step_s") > 0.0 && number("simulated_s") > 0.0, "{row}");
        assert!((0.0..1.0).contains(&number("bubble")), "{row}");
        assert!((0.0..1.0).contains(&number("simulated_bubble")), "{row}");
        assert_eq!(number("loss"), schedules[0]["loss"].as_f64().unwrap(), "{row}");
        let held = row["held_mib"].as_array().unwrap();
        assert!(held.len() == 2 && held.iter().all(|mib| mib.as_f64().unwrap() > 0.0), "{row}");
    }
    assert_eq!(schedules[0]["in_flight"], serde_json::json!([4, 4]));
    for (wrong, said) in [
        (&["--micro-batches", "3", "--schedules", "dual_pipe_v"][..], "at least two a rank"),
        (&["--ranks", "1"], "--ranks 2 or more"),
        (&["--layers", "3", "--schedules", "zb_v"], "4 stages, and the decoder 3 layers"),
    ] {
        let output = bench(&[&["pipeline"], wrong].concat());
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && message.contains(said), "{message}");
        assert!(!message.contains("rank 0"), "{message}");
    }
}

#[test]
fn steps_against_their_matrix_products() {
    let size = ["--workload", "tiny", "--layers", "2", "--kv-heads", "2", "--seq", "32"];
    let steps = ["train", "--json", "--warmup", "2", "--steps", "3", "--accumulate", "2"];
    let mut losses = Vec::new();
    for (strategy, ranks, data_parallel) in
        [("single_device", "1", 1), ("fsdp", "2", 2), ("tp", "2", 1)]
    {
        let place = ["--strategy", strategy, "--ranks", ranks];
        let rows = measured(&[&steps[..], &size, &place].concat());
        let [row] = rows.as_slice() else { panic!("{rows:?}") };
        let number = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key}: {row}"));
        assert_eq!((&row["kv_heads"], &row["steps"]), (&2.into(), &3.into()));
        assert_eq!(row["tokens_per_step"], 4 * 32 * 2 * data_parallel);
        assert_eq!(number("tokens_per_s"), number("tokens_per_step") / number("step_s"));
        assert!(
            number("step_s_min") <= number("step_s") && number("step_s") <= number("step_s_max")
        );
        assert_eq!(number("of_floor"), number("step_s") / number("gemm_floor_s"));
        assert!(number("startup_s") > 0.0 && number("gemm_floor_s") > 0.0);
        assert_eq!(row["peak_rss_mib"].as_array().unwrap().len(), ranks.parse::<usize>().unwrap());
        if data_parallel == 1 {
            losses.push((number("loss_first"), number("loss_last")));
        }
    }
    // Recomputed units give the same bits.
    let one = ["--strategy", "single_device", "--ranks", "1", "--no-floor"];
    let again = ["--activation-checkpointing", "full"];
    let rows = measured(&[&steps[..], &size, &one, &again].concat());
    assert_eq!(rows[0]["activation_checkpointing"], "full");
    let loss = |key: &str| rows[0][key].as_f64().unwrap();
    assert_eq!((loss("loss_first"), loss("loss_last")), losses[0]);
    let again = ["--activation-checkpointing", r#"{ type = "full", offload = "disk" }"#];
    let offloaded = [&steps[..], &size, &one, &again].concat();
    assert_eq!(measured(&offloaded)[0]["loss_last"], rows[0]["loss_last"]);
    // In bf16 without the floor, which is in f32. On a GPU only if the program supports it.
    let half =
        [&steps[..], &size, &one[..4], &["--precision", "bf16-mixed", "--accelerator", "cpu"]]
            .concat();
    let rows = measured(&half);
    let row = &rows[0];
    assert_eq!((&row["gemm_floor_s"], &row["precision"]), (&Value::Null, &"bf16-mixed".into()));
    assert_eq!(row["peak_device_mib"], serde_json::json!([null]));
    let loss = row["loss_last"].as_f64().unwrap();
    assert!(loss != losses[0].1 && (loss - losses[0].1).abs() < 1e-2, "{loss} {losses:?}");
    let refused = bench(&[&steps[..], &size, &one, &["--accelerator", "cuda"]].concat());
    if !cfg!(feature = "cuda") {
        let error = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success() && error.contains("built without CUDA"), "{error}");
    }
    // The same model and batches.
    assert!((losses[0].0 - losses[1].0).abs() < 1e-5 && (losses[0].1 - losses[1].1).abs() < 1e-4);
    assert!(losses[0].1 < losses[0].0, "{losses:?}");
}

#[test]
fn products_are_measured_alone() {
    let rows =
        measured(&["gemm", "--json", "--repeat", "1", "--size", "8,16,24", "--size", "5,1,7"]);
    let products: Vec<_> = rows.iter().map(|row| row["product"].as_str().unwrap()).collect();
    assert_eq!(products, ["forward", "input_grad", "weight_grad"].repeat(2));
    let bf16 =
        measured(&["gemm", "--json", "--repeat", "1", "--size", "8,16,24", "--dtype", "bf16"]);
    assert!(bf16.len() == 3 && bf16[0]["dtype"] == "bf16", "{bf16:?}");
    for row in rows.iter().chain(&bf16) {
        let number = |key: &str| row[key].as_f64().unwrap();
        let operations = 2.0 * number("tokens") * number("inputs") * number("outputs");
        let rate = operations / number("seconds") / 1e9;
        assert!((number("gflops_per_core") / rate - 1.0).abs() < 1e-12, "{row}");
    }
    let table = bench(&["gemm", "--repeat", "1", "--size", "8,16,24", "--threads", "2"]);
    let table = String::from_utf8(table.stdout).unwrap();
    assert!(table.contains("2 threads") && table.contains("8, 16, 24"), "{table}");
    for wrong in ["8,16", "8,0,24", "8,a,24"] {
        let refused = bench(&["gemm", "--size", wrong]);
        let error = String::from_utf8_lossy(&refused.stderr);
        assert!(error.contains("three positive numbers"), "{error}");
    }
    let huge = bench(&["gemm", "--size", "4294967296,4294967296,1"]);
    assert!(String::from_utf8_lossy(&huge.stderr).contains("is too large"), "{huge:?}");
}

#[test]
fn unwritable_activations_end_the_run() {
    let output = Command::new(env!("CARGO_BIN_EXE_fulgurite"))
        .args(["bench", "train", "--workload", "tiny", "--ranks", "1"])
        .args(["--strategy", "single_device"])
        .args(["--activation-checkpointing", r#"{ type = "full", offload = "disk" }"#])
        .env("TMPDIR", "/no such directory")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8(output.stderr).unwrap();
    assert_says!(error.trim(), "error: offloading activations … /no such directory … (os error 2)");
}

#[test]
fn collectives_are_measured_at_each_size() {
    let rows = measured(&["collectives", "--json", "--ranks", "2", "--sizes", "4096,65536"]);
    let seen: Vec<_> = rows
        .iter()
        .map(|row| (row["op"].as_str().unwrap(), row["bytes"].as_u64().unwrap()))
        .collect();
    assert_eq!(seen.len(), 9);
    assert_eq!(seen[..2], [("all_reduce", 4096), ("all_reduce", 65536)]);
    assert_eq!(seen[8], ("barrier", 0));
    for row in &rows {
        let secs = |key: &str| row[key].as_f64().unwrap();
        assert!(0.0 < secs("latency_min_s") && secs("latency_min_s") <= secs("latency_s"), "{row}");
        // The ranks use shared memory.
        assert!(row.get("mpi_latency_s").is_none(), "{row}");
    }
}

#[test]
fn overlap_of_communication_is_measured() {
    let few = ["overlap", "--json", "--workload", "tiny", "--seq", "16", "--steps", "2"];
    for (strategy, ranks) in [("single_device", 1), ("ddp", 2), ("fsdp", 2)] {
        let place = ["--strategy", strategy, "--ranks", &ranks.to_string()];
        let rows = measured(&[&few[..], &place, &["--process-group", "tcp"]].concat());
        let [row] = rows.as_slice() else { panic!("{rows:?}") };
        assert_eq!((&row["ranks"], &row["steps"]), (&ranks.into(), &2.into()), "{row}");
        let number = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key}: {row}"));
        let (step, compute) = (number("step_s"), number("compute_s"));
        let (parameters, bytes) = (4.0 * number("parameters"), number("collective_bytes"));
        assert!(0.0 < step && 0.0 < compute, "{row}");
        // The loss and the item count are summed too.
        let totals = 16.0;
        match strategy {
            "single_device" => {
                assert_eq!((number("collectives"), bytes), (0.0, 0.0));
                assert!(row["hidden"].is_null(), "{row}");
                continue;
            }
            "ddp" => assert_eq!(bytes, parameters + totals),
            // FSDP gathers once, units twice, and reduces once.
            _ => assert!(2.0 * parameters < bytes && bytes < 3.0 * parameters, "{row}"),
        }
        assert_eq!(row["transport"], "tcp");
        let communication = number("communication_s");
        let hidden = (compute + communication - step) / communication;
        assert!((number("hidden") - hidden).abs() < 1e-6, "{row}");
    }
}

#[test]
fn three_loops_measure_framework_overhead() {
    let few = ["overhead", "--json", "--warmup", "2", "--steps", "3", "--rounds", "2"];
    for (ranks, models) in [(1, "one,small"), (2, "tiny,small,one")] {
        let place = ["--ranks", &ranks.to_string(), "--models", models];
        let rows = measured(&[&few[..], &place].concat());
        let [whole] = rows.as_slice() else { panic!("{rows:?}") };
        for (key, value) in [("ranks", ranks), ("warmup", 2), ("steps", 3), ("rounds", 2)] {
            assert_eq!(whole[key], value, "{key}");
        }
        let loops = whole["loops"].as_array().unwrap();
        let text = |row: &Value, key: &str| row[key].as_str().unwrap().to_owned();
        let names: Vec<String> = loops
            .iter()
            .map(|row| ["model", "strategy", "loop"].map(|key| text(row, key)).join(" "))
            .collect();
        let mut expected = Vec::new();
        for model in models.split(',') {
            for by in ["trainer", "fabric", "bare"] {
                expected.push(format!("{model} single_device {by}"));
            }
            for strategy in ["ddp", "fsdp"].into_iter().take(if ranks > 1 { 2 } else { 0 }) {
                for by in ["trainer", "fabric"] {
                    expected.push(format!("{model} {strategy} {by}"));
                }
            }
        }
        assert_eq!(names, expected);
        for row in loops {
            let number = |row: &Value, key: &str| {
                row[key].as_f64().unwrap_or_else(|| panic!("{key}: {row}"))
            };
            let same = |key: &str, other: &Value| other[key] == row[key];
            let by = |name: &str| {
                loops.iter().find(|other| {
                    same("model", other) && same("strategy", other) && other["loop"] == *name
                })
            };
            let step = number(row, "step_us");
            assert!(0.0 < number(row, "step_us_min") && number(row, "step_us_min") <= step);
            assert!(number(row, "step_us_min") <= number(row, "mean_us"), "{row}");
            let single = row["strategy"] == "single_device";
            assert_eq!(row["ranks"], if single { 1 } else { ranks });
            for (key, name) in [("of_fabric", "fabric"), ("of_bare", "bare")] {
                let other = by(name).map(|other| step / number(other, "step_us"));
                assert_eq!(row[key].is_null(), name == "bare" && !single, "{row}");
                if let Some(ratio) = other {
                    assert!((number(row, key) - ratio).abs() < 1e-9, "{key}: {row}");
                }
            }
            // The loops train the same model on the same batches.
            let loss = number(by("fabric").unwrap(), "loss");
            assert!((number(row, "loss") - loss).abs() < 1e-6 * loss, "{row}, not {loss}");
        }
        let startup = &whole["startup"];
        let part = |key: &str| startup[key].as_f64().unwrap_or_else(|| panic!("{key}: {startup}"));
        for key in ["rendezvous", "strategy", "build", "materialize", "optimizer", "data"] {
            assert!(0.0 < part(&format!("{key}_s")) && part(&format!("{key}_s")) < part("total_s"));
        }
        assert!(0.0 < part("first_step_s") && part("process_s") < part("total_s"));
    }
}

#[test]
fn misfit_sizes_are_explained() {
    let message = |args: &str| {
        let args: Vec<&str> = args.split(' ').collect();
        let output = bench(&args);
        assert!(!output.status.success());
        // All ranks fail alike; any of them may be first.
        let errors =
            String::from_utf8_lossy(&output.stderr).replace("error: rank 1", "error: rank 0");
        errors.lines().next().unwrap().to_owned()
    };
    assert_says!(
        message("train --workload tiny --heads 3 --ranks 1"),
        "error: --dim 128 does not divide into --heads 3 …"
    );
    assert_says!(
        message("train --workload tiny --kv-heads 3 --ranks 1"),
        "error: module `model.layers.0.self_attn`: 4 attention heads cannot share 3 …"
    );
    for zero in ["vocab", "dim", "layers", "heads", "kv-heads", "ffn", "seq", "batch", "ranks"] {
        let message = message(&format!("train --{zero} 0"));
        assert!(message.contains(zero) && message.ends_with("it must be 1 or more"), "{message}");
    }
    assert_says!(message("train --steps 0"), "error: invalid value '0' for '--steps <STEPS>' …");
    assert_says!(message("collectives --ranks 2 --sizes 4"), "error: … --sizes 4 … least 8 bytes");
    for zero in ["--ranks 0", "--rounds 0"] {
        let message = message(&format!("overhead {zero}"));
        assert!(message.contains(zero.split(' ').next().unwrap()), "{message}");
        assert!(message.ends_with("it must be 1 or more"), "{message}");
    }
    assert_says!(message("overhead --models two"), "error: … value 'two' for '--models <MODELS>'");
}
