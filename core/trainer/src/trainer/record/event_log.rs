//! `events.jsonl` in a run's directory: the events without metrics, texts and histograms, and the
//! outcome.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::trainer::{Event, EventSink, RunStatus};
use crate::{Error, Result};

/// Writes the data report, resumes, checkpoints, tables, the profile, the summary, and the outcome
/// of a run.
///
/// One JSON object per line, in the form of `--output json`. Reports read the file.
pub(crate) struct EventLog {
    path: PathBuf,
    file: File,
}

/// The last line, missing if the run was killed.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum Last {
    End { status: RunStatus },
}

impl EventLog {
    /// Creates the log of the run with this directory.
    pub(crate) fn create(dir: &Path) -> Result<Self> {
        let path = dir.join("events.jsonl");
        let file = OpenOptions::new()
            .append(true)
            .create(true)
            .open(&path)
            .map_err(Error::io("opening the log", &path))?;
        Ok(Self { path, file })
    }

    fn write(&mut self, event: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_string(event).map_err(Error::other)?;
        line.push('\n');
        self.file.write_all(line.as_bytes()).map_err(Error::io("writing the log", &self.path))
    }
}

impl EventSink for EventLog {
    fn event(&mut self, event: &Event) -> Result<()> {
        match event {
            Event::Data(_)
            | Event::Resume { .. }
            | Event::Generation { .. }
            | Event::Checkpoint { .. }
            | Event::SaveFailed { .. }
            | Event::Table { .. }
            | Event::Profile(_)
            | Event::Summary { .. } => self.write(event),
            _ => Ok(()),
        }
    }

    fn finish(&mut self, status: RunStatus) -> Result<()> {
        self.write(&Last::End { status })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulgurite_engine::data::{DataReport, SourceReport};

    #[test]
    fn it_has_what_loggers_do_not_get() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = EventLog::create(dir.path()).unwrap();
        let mut source = SourceReport::new("data.path");
        source.count("files", 2);
        source.leave_out("hidden", ".x");
        log.event(&Event::Data(DataReport { sources: vec![source] })).unwrap();
        log.event(&Event::Resume { step: 3, path: "a/step-3".into() }).unwrap();
        log.event(&Event::Metrics { step: 4, metrics: Default::default() }).unwrap();
        log.event(&Event::Checkpoint { step: 6, path: "step-6".into(), blocked_s: 0.5 }).unwrap();
        log.finish(RunStatus::Interrupted).unwrap();
        let text = std::fs::read_to_string(dir.path().join("events.jsonl")).unwrap();
        insta::assert_snapshot!(text, @r#"
        {"event":"data","sources":[{"source":"data.path","counts":{"files":2},"left_out":[{"reason":"hidden","count":1,"examples":[".x"],"fault":false}]}]}
        {"event":"resume","step":3,"path":"a/step-3"}
        {"event":"checkpoint","step":6,"path":"step-6","blocked_s":0.5}
        {"event":"end","status":"interrupted"}
        "#);
    }
}
