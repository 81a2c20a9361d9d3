//! Configurations with mistakes: each run completes, or is refused before a rank starts. The
//! message of a refusal names a changed key.

use std::collections::BTreeMap;
use std::fs;

use fastrand::Rng;
use toml::{Table, Value};

use super::trials::trials;
use crate::program::{Job, Run, Scratch};

/// Address space of each process, for `ulimit`: enough for a valid run, too little for absurd
/// sizes.
const ADDRESS_SPACE: &str = "-v 16777216";

/// Keys without a default, which no resolved configuration shows. Each has its type and the
/// settings that make the key valid. Keys of `[trainer]` and `[checkpoint]` are read from the
/// reference instead.
const OPTIONAL: [(&str, &str, &str); 41] = [
    ("model.head_dim", "integer", ""),
    ("model.from_pretrained", "string", ""),
    ("data.stride", "integer", ""),
    ("data.tokenizer", "string", ""),
    ("data.token_dtype", "string", ""),
    ("data.vocab_size", "integer", ""),
    ("data.validation_path", "string", ""),
    ("data.validation_fraction", "number", ""),
    ("data.mixture", "list", ""),
    ("data.validation_sets", "list", ""),
    ("scheduler.pct_start", "number", "scheduler.type=one_cycle"),
    ("scheduler.div_factor", "number", "scheduler.type=one_cycle"),
    ("scheduler.final_div_factor", "number", "scheduler.type=one_cycle"),
    ("scheduler.first_steps", "integer", "scheduler.type=cosine_warm_restarts"),
    ("scheduler.multiplier", "integer", "scheduler.type=cosine_warm_restarts"),
    ("scheduler.total_steps", "integer", "scheduler.type=polynomial"),
    ("scheduler.power", "number", "scheduler.type=polynomial"),
    ("scheduler.milestones", "list", "scheduler={ type = 'sequential', schedules = [] }"),
    ("trainer.profiler.steps", "integer", "trainer.profiler.type=trace"),
    ("optimizer.state_dtype", "string", ""),
    ("optimizer.groups", "list", ""),
    ("optimizer.momentum", "number", "optimizer.type=sgd"),
    ("optimizer.dampening", "number", "optimizer.type=sgd"),
    ("optimizer.nesterov", "true or false", "optimizer={ type = 'sgd', momentum = 0.5 }"),
    ("scheduler.decay_steps", "integer", "scheduler.type=linear"),
    ("scheduler.step_size", "integer", "scheduler.type=step"),
    ("scheduler.gamma", "number", "scheduler.type=step"),
    ("trainer.strategy.bucket_cap_mb", "number", "trainer.strategy=ddp"),
    ("trainer.strategy.first_bucket_mb", "number", "trainer.strategy=ddp"),
    ("trainer.strategy.prefetch", "integer", "trainer.strategy=fsdp"),
    ("trainer.strategy.reshard_after_forward", "true or false", "trainer.strategy=fsdp"),
    ("trainer.strategy.shard_conditions", "list", "trainer.strategy=fsdp"),
    ("trainer.strategy.mixed_precision.param_dtype", "string", "trainer.strategy=fsdp"),
    ("trainer.strategy.accumulation_sync", "string", "trainer.strategy=fsdp"),
    ("trainer.strategy.parallelize", "string", "trainer.strategy=model_parallel"),
    ("trainer.strategy.tensor_parallel_size", "integer", "trainer.strategy=model_parallel"),
    ("trainer.strategy.context_parallel_size", "integer", "trainer.strategy=model_parallel"),
    ("trainer.strategy.data_parallel_size", "integer", "trainer.strategy=model_parallel"),
    ("trainer.strategy.timeout_secs", "integer", "trainer.strategy=model_parallel"),
    ("trainer.process_group.chunk_bytes", "integer", "trainer.process_group.type=shm"),
    (
        "trainer.activation_checkpointing.every",
        "integer",
        "trainer.activation_checkpointing.type=selective",
    ),
];

const INTEGERS: [&str; 18] = [
    "0",
    "1",
    "2",
    "3",
    "4",
    "6",
    "8",
    "20",
    "50",
    "-1",
    "2147483648",
    "4294967297",
    "9007199254740993",
    "1000000000000000000",
    "4611686018427387904",
    "9223372036854775807",
    "-9223372036854775808",
    "9223372036854775808",
];

const FLOATS: [&str; 18] = [
    "0.0", "-0.0", "0.01", "0.1", "0.5", "0.9", "1.0", "1.5", "-1.0", "1e-320", "1e18", "1e30",
    "3.5e38", "1e308", "nan", "-nan", "inf", "-inf",
];

const LISTS: [&str; 11] = [
    "[]",
    "[1]",
    "['a']",
    "['*']",
    "['*norm*']",
    "[[]]",
    "[0.9]",
    "[0.9, 1.0]",
    "[nan, 0.9]",
    "['csv', 'csv']",
    "[{ patterns = ['*norm*'], lr = -1 }]",
];

const WORDS: [&str; 44] = [
    "''",
    "' '",
    "'auto'",
    "'last'",
    "'none'",
    "'full'",
    "'selective'",
    "'norm'",
    "'value'",
    "'zero'",
    "'ignore'",
    "'min'",
    "'bf16'",
    "'bf16-mixed'",
    "'64-true'",
    "'text'",
    "'bytes'",
    "'u32'",
    "'no such thing'",
    "'tokens.u16'",
    "'tokens.u16/inside'",
    "'/dev/null'",
    "'/dev/zero'",
    "'/dev/tty'",
    "'/'",
    "'\u{1f980}\u{1b}[31m'",
    "'*'",
    "'val_loss'",
    "'00:00:00:01'",
    "'single_device'",
    "'ddp'",
    "'fsdp'",
    "'hsdp'",
    "'tp'",
    "'fsdp_tp'",
    "'model_parallel'",
    "'llama'",
    "'sgd'",
    "'constant'",
    "'linear'",
    "'step'",
    "'local'",
    "'slurm'",
    "'torchelastic'",
];

const BOOLEANS: [&str; 2] = ["true", "false"];

const OTHERS: [&str; 6] = [
    "2026-01-01",
    "{}",
    "{ a = 1 }",
    "{ type = 3 }",
    "{ type = 'no such thing' }",
    "{ type = 'full', every = 0 }",
];

/// Part of the error of a run that diverged: a valid configuration may still fail to train.
const DIVERGED: &str = "non-finite";

#[test]
fn config_runs_or_is_refused_at_start() {
    let keys = keys();
    let mut counts = BTreeMap::<&str, u64>::new();
    let mut wrong_ones = Vec::new();
    trials(40, |trial| {
        let changes = changes(&keys, &mut trial.rng);
        let scratch = Scratch::with_tokens();
        let job = job(&scratch, &mut trial.rng, &changes);
        let run = job.run();
        let started = has_started(&scratch, &run);
        match outcome(&run, started, &changes) {
            Ok(outcome) => *counts.entry(outcome).or_default() += 1,
            Err(wrong) => wrong_ones.push(format!(
                "{}: {changes:?}: {wrong}, {}\n{}",
                trial.seed, run.status, run.stderr
            )),
        }
    });
    eprintln!("{counts:?}");
    assert!(wrong_ones.is_empty(), "{} trials:\n{}", wrong_ones.len(), wrong_ones.join("\n"));
}

/// Values to assign to a key.
type Pool = &'static [&'static str];

/// Values of a type; the reference states a key's type first.
fn pool(of_type: &str) -> Pool {
    match of_type {
        of if of.starts_with("integer") => &INTEGERS,
        of if of.starts_with("number") => &FLOATS,
        of if of.starts_with("list") => &LISTS,
        of if of.starts_with("true") => &BOOLEANS,
        of if of.starts_with("table") => &OTHERS,
        _ => &WORDS,
    }
}

/// All keys of a run, with values of their types.
fn keys() -> Vec<(String, Pool)> {
    let scratch = Scratch::with_tokens();
    let printed = scratch.small().args(&["--print-config"]).succeed().stdout;
    let mut keys = BTreeMap::new();
    keys.extend(OPTIONAL.map(|(key, of_type, _)| (key.to_owned(), pool(of_type))));
    let reference = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/src/reference/configuration.md");
    let reference = fs::read_to_string(reference).unwrap();
    for table in ["trainer", "checkpoint"] {
        let (_, section) = reference.split_once(&format!("## `[{table}]`")).unwrap();
        let section = section.split("\n## ").next().unwrap();
        for row in section.lines().filter_map(|line| line.strip_prefix("| `")) {
            let (key, rest) = row.split_once("` | ").unwrap();
            keys.insert(format!("{table}.{key}"), pool(rest));
        }
    }
    leaves("", &printed.parse::<Table>().unwrap(), &mut keys);
    keys.into_iter().collect()
}

fn leaves(path: &str, table: &Table, keys: &mut BTreeMap<String, Pool>) {
    for (key, value) in table {
        let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        if let Value::Table(inner) = value {
            leaves(&path, inner, keys);
        }
        let own = match value {
            Value::Integer(_) => &INTEGERS[..],
            Value::Float(_) => &FLOATS,
            Value::Array(_) => &LISTS,
            Value::String(_) | Value::Datetime(_) => &WORDS,
            Value::Boolean(_) => &BOOLEANS,
            Value::Table(_) => &OTHERS,
        };
        keys.insert(path, own);
    }
}

/// Changes of one to three keys, mostly to values of the right type.
fn changes(keys: &[(String, Pool)], rng: &mut Rng) -> BTreeMap<String, String> {
    let mut changes = BTreeMap::new();
    for _ in 0..[1, 1, 1, 2, 3][rng.usize(0..5)] {
        let (key, own) = rng.choice(keys).unwrap();
        let all: [Pool; 6] = [&INTEGERS, &FLOATS, &LISTS, &WORDS, &BOOLEANS, &OTHERS];
        let pool = if rng.u32(0..12) == 0 { rng.choice(all).unwrap() } else { *own };
        let value = rng.choice(pool).unwrap();
        let key = match rng.u32(0..24) {
            0 => misspelt(key, rng),
            1 => format!("{key}.inside"),
            2 => key.rsplit('.').next().unwrap().to_owned(),
            _ => key.clone(),
        };
        changes.insert(key, (*value).to_owned());
    }
    // If `trainer.max_time` changes, keep the step limit: a run needs one of the two to end.
    if changes.contains_key("trainer.max_time") {
        changes.remove("trainer.max_steps");
    }
    changes
}

fn misspelt(key: &str, rng: &mut Rng) -> String {
    let mut letters: Vec<char> = key.chars().collect();
    let at = rng.usize(0..letters.len());
    match rng.u32(0..3) {
        0 => letters.insert(at, 'x'),
        1 if letters.len() > 1 => drop(letters.remove(at)),
        _ => letters[at] = 'x',
    }
    letters.into_iter().collect()
}

/// A run of a few steps on one or two ranks, with the changes.
fn job<'a>(scratch: &'a Scratch, rng: &mut Rng, changes: &BTreeMap<String, String>) -> Job<'a> {
    let mut job = scratch.small().limited(ADDRESS_SPACE).set(&[
        "trainer.max_steps=4",
        "trainer.max_time=3",
        "checkpoint.every_n_steps=3",
    ]);
    if rng.u32(0..4) == 0 {
        let strategy = rng.choice(["ddp", "fsdp", "tp", "model_parallel"]).unwrap();
        job = job.set(&["model.num_key_value_heads=2", "model.vocab_size=54"]).on(strategy, 2, 2);
    }
    for (key, _, needs) in OPTIONAL {
        let within = format!("{key}.inside");
        let is_changed = changes.contains_key(key) || changes.contains_key(&within);
        if is_changed && !needs.is_empty() {
            job = job.set(&[needs]);
        }
    }
    for (key, value) in changes {
        job = job.set(&[&format!("{key}={value}")]);
    }
    job
}

/// Whether a rank has begun to train or to set up training.
fn has_started(scratch: &Scratch, run: &Run) -> bool {
    let made = fs::read_dir(scratch.path()).unwrap().flatten();
    let made = made.filter(|entry| entry.file_name() != "tokens.u16").count();
    made > 0 || run.stdout.contains("\"event\"") || run.stderr.contains("failed:")
}

/// Classifies the result of a run.
///
/// # Errors
/// If the run ended in any other way.
fn outcome(
    run: &Run,
    started: bool,
    changes: &BTreeMap<String, String>,
) -> Result<&'static str, String> {
    match run.code() {
        Some(0) if run.stdout.contains("\"event\":\"summary\"") => Ok("ran"),
        // `--set` itself refuses some values with exit code 2.
        Some(1 | 2) if !started => {
            // `optimizer.type` chooses the optimizer. The keys inside an invalid optimizer are not
            // read.
            let named = |key: &String| {
                let key = key.strip_suffix(".inside").unwrap_or(key);
                let key = key.strip_suffix(".type").unwrap_or(key);
                let key = key.rsplit('.').next().unwrap_or(key);
                run.stderr.contains(key.strip_suffix('s').unwrap_or(key))
            };
            match changes.keys().any(named) {
                true => Ok("refused"),
                false => Err("the message names no key that was changed".to_owned()),
            }
        }
        Some(1) if run.stderr.contains(DIVERGED) => Ok("diverged"),
        Some(1) => Err("it failed after ranks were started".to_owned()),
        _ => Err("it ended in a way that no mistake may end".to_owned()),
    }
}
