//! `fulgurite bench collectives` with ranks started by `mpirun`, or by the command in
//! FULGURITE_MPIRUN. Built with the feature `mpi`; run by `.ci/mpi`.

use std::process::Command;

use serde_json::Value;

#[test]
fn mpi_collectives_are_measured_too() {
    let mpirun = std::env::var("FULGURITE_MPIRUN").unwrap_or_else(|_| "mpirun".to_owned());
    let output = Command::new(mpirun)
        .args(["-n", "2", env!("CARGO_BIN_EXE_fulgurite"), "bench", "collectives", "--json"])
        .args(["--process-group", "mpi", "--sizes", "4096,100000"])
        // Allow root to run the tests.
        .envs(["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"].map(|name| (name, "1")))
        .envs([("RAYON_NUM_THREADS", "1"), ("OMPI_MCA_rmaps_base_oversubscribe", "1")])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines = String::from_utf8(output.stdout).unwrap();
    let rows: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let ops: Vec<_> = rows.iter().map(|row| row["op"].as_str().unwrap()).collect();
    let twice = ["all_reduce", "all_gather", "reduce_scatter", "broadcast"].map(|op| [op; 2]);
    assert_eq!(ops, [twice.as_flattened(), &["barrier"]].concat());
    for row in &rows {
        assert_eq!((&row["transport"], &row["ranks"]), (&"mpi".into(), &2.into()), "{row}");
        let secs = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key}: {row}"));
        for key in ["", "mpi_"] {
            let (median, least) = (format!("{key}latency_s"), format!("{key}latency_min_s"));
            assert!(0.0 < secs(&least) && secs(&least) <= secs(&median), "{row}");
            assert!(0.0 < secs(&format!("{key}loop_s")), "{row}");
        }
    }
}
