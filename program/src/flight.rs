//! `fulgurite flight`: the rank that fell behind, from the records of the ranks' last collectives.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use fulgurite::core::collective::flight::{Call, Channel, FlightLog, Lag, Trouble, lags};
use fulgurite_error::{Error, Result, counted, print};
use serde_json::json;

/// Records to compare.
#[derive(Debug, Args)]
pub(crate) struct Flight {
    /// The directory of a run, its folder `flight`, or records of ranks
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,
    /// Also print the last calls of each rank
    #[arg(long, value_name = "NUMBER")]
    calls: Option<usize>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Flight {
    pub(crate) fn run(&self) -> Result<ExitCode> {
        let mut logs = Vec::new();
        for path in files(&self.paths)? {
            let file = File::open(&path).map_err(Error::io("opening", &path))?;
            let log = FlightLog::read(BufReader::new(file));
            logs.push(log.map_err(|error| Error::other(format!("{}: {error}", path.display())))?);
        }
        logs.sort_by_key(|log| log.head.rank);
        if let Some(pair) = logs.windows(2).find(|pair| pair[0].head.rank == pair[1].head.rank) {
            return Err(Error::other(format!(
                "there are two records of rank {}: give those of one run",
                pair[0].head.rank
            )));
        }
        let troubles = Trouble::find(&logs);
        match self.json {
            true => print(&format!("{}\n", as_json(&logs, &troubles)))?,
            false => {
                let mut text = describe(&logs, &troubles);
                logs.iter().for_each(|log| text += &last_calls(log, self.calls.unwrap_or(0)));
                print(&text)?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// The records at these paths.
fn files(paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in paths {
        if !path.is_dir() {
            files.push(path.clone());
            continue;
        }
        let inner = path.join("flight");
        let dir = if inner.is_dir() { &inner } else { path };
        let entries = std::fs::read_dir(dir).map_err(Error::io("reading the directory", dir))?;
        let found = entries.flatten().map(|entry| entry.path());
        let before = files.len();
        files.extend(found.filter(|path| is_record(path)));
        if files.len() == before {
            return Err(Error::other(format!(
                "{}: there is no record of a rank, such as rank-00000.jsonl. A run of several ranks writes them if \
                 ranks waited too long or made different calls, unless `trainer.flight_recorder` is 0",
                dir.display()
            )));
        }
    }
    Ok(files)
}

fn is_record(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    name.starts_with("rank-") && name.ends_with(".jsonl")
}

/// `rank 2`, or `ranks 0, 1 and 3`.
fn named(ranks: &[usize]) -> String {
    let names: Vec<String> = ranks.iter().map(usize::to_string).collect();
    match &names[..] {
        [] => "no rank".to_owned(),
        [one] => format!("rank {one}"),
        [first @ .., last] => format!("ranks {} and {last}", first.join(", ")),
    }
}

/// `all_reduce 12 of data_parallel, 1,024 bytes, unit layers.3`.
fn name_of(call: &Call, group: &str) -> String {
    let mut text = format!("{} {} ", call.op, call.number);
    let _ = match call.channel {
        Channel::All => write!(text, "of `{group}`"),
        Channel::To(peer) => write!(text, "to rank {peer} of `{group}`"),
        Channel::From(peer) => write!(text, "from rank {peer} of `{group}`"),
    };
    if call.bytes > 0 {
        let _ = write!(text, ", {}", counted(call.bytes, "byte"));
    }
    if let Some(label) = &call.label {
        let _ = write!(text, ", {label}");
    }
    text
}

fn describe(logs: &[FlightLog], troubles: &[Trouble]) -> String {
    let mut text = match troubles {
        [] => "no rank is behind: all ranks have ended the calls that they began together\n"
            .to_owned(),
        [trouble] => verdict(logs, trouble),
        circle => {
            let lines = circle.iter().map(|trouble| in_circle(logs, trouble));
            format!("ranks wait for each other:\n{}", lines.collect::<String>())
        }
    };
    let world = logs.iter().map(|log| log.head.world_size).max().unwrap_or(0);
    let missing: Vec<usize> =
        (0..world).filter(|rank| logs.iter().all(|log| log.head.rank != *rank)).collect();
    if !missing.is_empty() {
        let _ = writeln!(text, "there is no record of {}", named(&missing));
    }
    text += "\nrank  host              calls  last of its group   s behind  last call\n";
    for (log, Lag { last, secs, .. }) in logs.iter().zip(lags(logs)) {
        let head = &log.head;
        let call = log.calls.last().map_or_else(String::new, |call| {
            format!("{}, {}", name_of(call, &log.groups[call.group].name), state(log, call))
        });
        let _ = writeln!(
            text,
            "{:>4}  {:<16} {:>6} {last:>18} {secs:>10.3}  {call}",
            head.rank, head.host, head.calls
        );
    }
    text
}

/// How far the call is, and how long ago seen from the record's end.
fn state(log: &FlightLog, call: &Call) -> String {
    let ago = |at: f64| format!("{:.1} s before the record's end", log.head.written - at);
    match call.ended {
        Some(at) if call.failed => format!("failed {}", ago(at)),
        Some(at) => format!("ended {}", ago(at)),
        None => format!("begun {}", ago(call.begun)),
    }
}

/// A call of ranks that wait for each other.
fn in_circle(logs: &[FlightLog], trouble: &Trouble) -> String {
    let Trouble { group, calls, behind, .. } = trouble;
    let what = calls.values().next().map(|call| name_of(call, group)).unwrap_or_default();
    let (has, secs) = (if behind.len() == 1 { "has" } else { "have" }, waited_secs(logs, trouble));
    let waiting = named(&waiting(trouble));
    format!("  {waiting} for {secs:.1} s in {what}, which {} {has} not begun\n", named(behind))
}

/// The ranks that have begun the call and not ended it.
fn waiting(trouble: &Trouble) -> Vec<usize> {
    let stuck = trouble.calls.iter().filter(|(_, call)| call.is_stuck());
    stuck.map(|(rank, _)| *rank).collect()
}

/// How long the first of them has waited, in seconds.
fn waited_secs(logs: &[FlightLog], trouble: &Trouble) -> f64 {
    let for_secs = |(rank, call): (&usize, &Call)| {
        let log = logs.iter().find(|log| log.head.rank == *rank);
        log.map_or(0.0, |log| call.ended.unwrap_or(log.head.written) - call.begun)
    };
    trouble.calls.iter().filter(|(_, call)| call.is_stuck()).map(for_secs).fold(0.0, f64::max)
}

fn verdict(logs: &[FlightLog], trouble: &Trouble) -> String {
    let Trouble { group, calls, behind, unknown, .. } = trouble;
    let begun: Vec<usize> = calls.keys().copied().collect();
    let what = calls.values().next().map(|call| name_of(call, group)).unwrap_or_default();
    let mut text = String::new();
    if trouble.differs {
        let _ = writeln!(text, "ranks make different calls:");
        for (rank, call) in calls {
            let _ = writeln!(text, "  rank {rank}: {}", name_of(call, group));
        }
        return text;
    }
    if behind.is_empty() && unknown.is_empty() {
        let _ = writeln!(text, "all of {} have begun {what}, and it has not ended", named(&begun));
        return text;
    }
    let (waiting, secs) = (waiting(trouble), waited_secs(logs, trouble));
    let waits = if waiting.len() == 1 { "waits" } else { "wait" };
    if !behind.is_empty() {
        let (has, its) = if behind.len() == 1 { ("is", "it has") } else { ("are", "they have") };
        let _ = writeln!(
            text,
            "{} {has} behind: {its} not begun {what}, in which {} {waits} for {secs:.1} s",
            named(behind),
            named(&waiting)
        );
    } else {
        let _ = writeln!(
            text,
            "{} {waits} for {secs:.1} s in {what}; whether {} began it is not known",
            named(&waiting),
            named(unknown)
        );
    }
    text
}

fn last_calls(log: &FlightLog, count: usize) -> String {
    let calls = &log.calls[log.calls.len().saturating_sub(count)..];
    let mut text = String::new();
    if !calls.is_empty() {
        let _ = writeln!(text, "\nrank {}", log.head.rank);
    }
    for call in calls {
        let group = &log.groups[call.group].name;
        let _ = writeln!(text, "  {}, {}", name_of(call, group), state(log, call));
    }
    text
}

fn as_json(logs: &[FlightLog], troubles: &[Trouble]) -> serde_json::Value {
    let as_json = |trouble: &Trouble| {
        let calls: BTreeMap<String, &Call> =
            trouble.calls.iter().map(|(rank, call)| (rank.to_string(), call)).collect();
        json!({
            "group": trouble.group,
            "members": trouble.members,
            "number": trouble.number,
            "calls": calls,
            "behind": trouble.behind,
            "unknown": trouble.unknown,
            "differs": trouble.differs,
        })
    };
    let troubles: Vec<_> = troubles.iter().map(as_json).collect();
    let ranks: Vec<_> = logs
        .iter()
        .zip(lags(logs))
        .map(|(log, lag)| {
            json!({
                "rank": log.head.rank,
                "host": log.head.host,
                "calls": log.head.calls,
                "last_of_its_group": lag.last,
                "secs_behind": lag.secs,
            })
        })
        .collect();
    json!({ "troubles": troubles, "ranks": ranks })
}
