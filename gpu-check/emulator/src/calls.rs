//! Counts of driver calls.

use std::backtrace::Backtrace;
use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::json;

/// Counts by kind of call.
#[derive(Debug, Default)]
pub(crate) struct Calls {
    counts: BTreeMap<String, Count>,
    /// The folder for the counts; `None` discards them.
    folder: Option<PathBuf>,
}

#[derive(Debug, Default)]
struct Count {
    calls: u64,
    bytes: u64,
}

impl Calls {
    /// Counts to be written to the folder in `FULGURITE_GPU_EMULATOR_CALLS`.
    pub(crate) fn of_environment() -> Self {
        let folder = std::env::var_os("FULGURITE_GPU_EMULATOR_CALLS").map(PathBuf::from);
        Self { counts: BTreeMap::new(), folder }
    }

    /// Counts a call that a training run should avoid, with the calling line of the program.
    pub(crate) fn count_at_its_place(&mut self, what: &str, bytes: usize) {
        match self.folder {
            Some(_) => self.count(format!("{what}, at {}", place()), bytes),
            None => self.count(what, bytes),
        }
    }

    /// Counts one call that moves `bytes` bytes.
    pub(crate) fn count(&mut self, what: impl Into<String>, bytes: usize) {
        let count = self.counts.entry(what.into()).or_default();
        count.calls += 1;
        count.bytes += bytes as u64;
    }

    /// Writes `PID.json`: number of calls and of bytes for each kind of call.
    pub(crate) fn write(&self) {
        let Some(folder) = &self.folder else { return };
        if self.counts.is_empty() {
            return;
        }
        let counts = self.counts.iter();
        let counts: serde_json::Map<_, _> = counts
            .map(|(what, count)| {
                (what.clone(), json!({ "calls": count.calls, "bytes": count.bytes }))
            })
            .collect();
        let path = folder.join(format!("{}.json", std::process::id()));
        let text = serde_json::Value::Object(counts).to_string();
        if let Err(error) = std::fs::write(&path, text) {
            eprintln!("gpu emulator: writing {}: {error}", path.display());
        }
    }
}

/// The innermost line of the program's own sources, whose paths begin with `./` in a workspace.
fn place() -> String {
    let trace = Backtrace::force_capture().to_string();
    let places = trace.lines().filter_map(|line| line.trim().strip_prefix("at ./"));
    let mut places = places.filter(|place| !place.starts_with("gpu-check/emulator"));
    let place = places.next().and_then(|place| place.rsplit_once(':'));
    place.map_or("an unknown place", |(place, _column)| place).to_owned()
}
