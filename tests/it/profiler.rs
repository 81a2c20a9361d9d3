//! Profiles of runs of the `pretrain` program.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::program::{Job, Scratch};

/// A run of a small model with this profiler.
fn job<'a>(scratch: &'a Scratch, profiler: &str) -> Job<'a> {
    let profiler = format!("trainer.profiler={profiler}");
    scratch.small().on("fsdp", 2, 2).set(&[
        &profiler,
        "trainer.val_check_interval=4",
        "data.validation_fraction=0.2",
        "checkpoint.every_n_steps=4",
    ])
}

fn text<'a>(event: &'a Value, key: &str) -> &'a str {
    event[key].as_str().unwrap_or_else(|| panic!("no `{key}` in {event}"))
}

fn number(event: &Value, key: &str) -> f64 {
    event[key].as_f64().unwrap_or_else(|| panic!("no `{key}` in {event}"))
}

#[test]
fn profile_table_covers_phases_and_units() {
    let scratch = Scratch::with_tokens();
    let run = job(&scratch, "\"simple\"").succeed();
    let [profile] = &run.events_of("profile")[..] else { panic!("one profile") };
    assert_eq!(number(profile, "steps"), 8.0);
    let spans = profile["spans"].as_array().unwrap();
    let of = |kind: &str| -> BTreeMap<&str, &Value> {
        let of_kind = spans.iter().filter(|span| span["kind"] == kind);
        of_kind.map(|span| (text(span, "name"), span)).collect()
    };
    let phases = of("phase");
    for (name, calls) in [
        ("data", 8),
        ("forward", 8),
        ("backward", 8),
        ("gradient norm", 8),
        ("optimizer", 8),
        // Includes the sanity check.
        ("validation", 3),
    ] {
        assert_eq!(phases[name]["calls"], calls, "{name}");
    }
    assert!(number(phases["checkpoint"], "calls") >= 2.0 && phases.contains_key("logging"));
    assert!(phases.values().all(|span| number(span, "resident_mib") > 1.0), "{profile}");
    // Phases do not overlap, so their sum is at most the total.
    let sum: f64 = phases.values().map(|span| number(span, "mean_s")).sum();
    assert!(sum > 0.0 && sum <= number(profile, "wall_s") * 1.000_001, "{profile}");
    let units = of("unit");
    assert_eq!(units["backward model.layers.0"]["calls"], 8);
    // Validations add forward passes.
    assert!(number(units["forward model.layers.1"], "calls") > 8.0);
    let collectives = of("collective");
    assert!(collectives.keys().any(|name| name.starts_with("all_gather_into")), "{collectives:?}");
    assert!(collectives.keys().any(|name| name.starts_with("reduce_scatter")), "{collectives:?}");
    for span in spans {
        assert!(number(span, "max_s") >= number(span, "mean_s") * 0.999_999, "{span}");
    }
    assert!(!scratch.path().join("fulgurite_logs/version_0/trace.json").exists());

    let without = scratch.small().on("fsdp", 2, 2).set(&[
        "trainer.val_check_interval=4",
        "data.validation_fraction=0.2",
        "checkpoint.every_n_steps=4",
    ]);
    let without = without.succeed();
    assert_eq!(run.losses(), without.losses(), "to the bit");
    assert!(without.events_of("profile").is_empty());
}

#[test]
fn trace_opens_in_viewers() {
    let scratch = Scratch::with_tokens();
    job(&scratch, "{ type = \"trace\", skip_steps = 2, steps = 3 }").succeed();
    let file = scratch.path().join("fulgurite_logs/version_0/trace.json");
    let trace: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let named = |what: &str| -> BTreeSet<(u64, String)> {
        let of = events.iter().filter(|event| event["ph"] == "M" && event["name"] == what);
        of.map(|e| (e["pid"].as_u64().unwrap(), text(&e["args"], "name").to_owned())).collect()
    };
    let ranks = BTreeSet::from([(0, "rank 0".to_owned()), (1, "rank 1".to_owned())]);
    assert_eq!(named("process_name"), ranks);
    assert!(named("thread_name").contains(&(1, "main".to_owned())));
    let mut open = BTreeMap::new();
    let mut complete: BTreeMap<(u64, u64), Vec<(f64, f64)>> = BTreeMap::new();
    for event in events {
        let (pid, tid) = (event["pid"].as_u64().unwrap(), event["tid"].as_u64().unwrap());
        assert!(pid < 2, "{event}");
        match text(event, "ph") {
            "M" => {}
            "X" => {
                assert!(!text(event, "name").is_empty() && !text(event, "cat").is_empty());
                let (from, length) = (number(event, "ts"), number(event, "dur"));
                assert!(from >= 0.0 && length >= 0.0, "{event}");
                complete.entry((pid, tid)).or_default().push((from, from + length));
            }
            // The end of an asynchronous span has the category, id and name of its start.
            "b" => {
                let key = (text(event, "cat").to_owned(), event["id"].as_u64().unwrap());
                let before = open.insert(key, (text(event, "name"), number(event, "ts")));
                assert!(before.is_none(), "{event}");
            }
            "e" => {
                let key = (text(event, "cat").to_owned(), event["id"].as_u64().unwrap());
                let (name, from) = open.remove(&key).expect("it has begun");
                assert!(name == text(event, "name") && from <= number(event, "ts"), "{event}");
            }
            other => panic!("{other}: {event}"),
        }
    }
    assert!(open.is_empty(), "{open:?}");
    // Spans of a thread are nested or disjoint, up to rounding to nanoseconds.
    for spans in complete.values_mut() {
        spans.sort_by(|a, b| a.0.total_cmp(&b.0).then(b.1.total_cmp(&a.1)));
        let mut around: Vec<f64> = Vec::new();
        for &(from, to) in &*spans {
            around.retain(|&end| end > from + 0.002);
            assert!(
                around.last().is_none_or(|&end| to <= end + 0.002),
                "{from} to {to} in {around:?}"
            );
            around.push(to);
        }
    }
    let forwards = |rank: u64| {
        let of = |event: &&Value| event["name"] == "forward" && event["pid"] == rank;
        events.iter().filter(of).count()
    };
    assert_eq!((forwards(0), forwards(1)), (3, 3), "of the third, fourth and fifth step");
    assert!(events.iter().any(|event| event["name"] == "backward model.layers.1"));
}

#[test]
fn failing_run_still_writes_its_profile() {
    let scratch = Scratch::with_tokens();
    let profiler = "{ type = \"trace\", skip_steps = 0, steps = 3 }";
    let failing = ["optimizer.lr=1e30", "checkpoint.every_n_steps=100"];
    let run = job(&scratch, profiler).set(&failing).run();
    assert_eq!(run.code(), Some(1), "{}", run.stderr);
    let [profile] = &run.events_of("profile")[..] else { panic!("one profile: {}", run.stdout) };
    let spans = profile["spans"].as_array().unwrap();
    assert!(spans.iter().any(|span| span["name"] == "forward"), "{profile}");
    let trace = scratch.path().join("fulgurite_logs/version_0/trace.json");
    let trace: Value = serde_json::from_slice(&std::fs::read(trace).unwrap()).unwrap();
    assert!(!trace["traceEvents"].as_array().unwrap().is_empty());
}
