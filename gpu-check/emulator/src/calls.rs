//! What a program has asked of its device, counted.

use std::backtrace::Backtrace;
use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::json;

/// Counts by what was asked.
#[derive(Debug, Default)]
pub(crate) struct Calls {
    counts: BTreeMap<String, Count>,
    /// Where they are written; `None`: nobody wants them.
    folder: Option<PathBuf>,
}

#[derive(Debug, Default)]
struct Count {
    calls: u64,
    bytes: u64,
}

impl Calls {
    /// Written to the folder that `FULGURITE_GPU_EMULATOR_CALLS` names.
    pub(crate) fn of_environment() -> Self {
        let folder = std::env::var_os("FULGURITE_GPU_EMULATOR_CALLS").map(PathBuf::from);
        Self { counts: BTreeMap::new(), folder }
    }

    /// Counts a call that a training should do without, with the place in the program that it comes from.
    pub(crate) fn count_at_its_place(&mut self, what: &str, bytes: usize) {
        match self.folder {
            Some(_) => self.count(format!("{what}, at {}", place()), bytes),
            None => self.count(what, bytes),
        }
    }

    /// Counts one call, of that many bytes.
    pub(crate) fn count(&mut self, what: impl Into<String>, bytes: usize) {
        let count = self.counts.entry(what.into()).or_default();
        count.calls += 1;
        count.bytes += bytes as u64;
    }

    /// Writes `PID.json`: for each kind of call how many there were, and of how many bytes.
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

/// The innermost place in the sources of the program, which begin with `./` in a workspace.
fn place() -> String {
    let trace = Backtrace::force_capture().to_string();
    let places = trace.lines().filter_map(|line| line.trim().strip_prefix("at ./"));
    let mut places = places.filter(|place| !place.starts_with("gpu-check/emulator"));
    let place = places.next().and_then(|place| place.rsplit_once(':'));
    place.map_or("an unknown place", |(place, _column)| place).to_owned()
}
