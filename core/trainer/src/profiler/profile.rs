//! Merges the ranks' recordings.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::recorder::Recorded;
use super::{Profiler, trace};
use crate::Result;
use fulgurite_engine::collective::{ProcessGroup, all_gather_object};

/// The kind of a span.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum SpanKind {
    /// A phase of the loop. Phases do not overlap.
    Phase,
    /// The forward or backward of a unit, part of the phase of the same name. A unit's backward
    /// lasts until the next unit's backward begins.
    Unit,
    /// A collective: the time that it blocks its thread.
    Collective,
}

/// All spans of one name, on all ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProfiledSpan {
    /// The kind of the spans.
    pub kind: SpanKind,
    /// The name of the spans.
    pub name: String,
    /// Number of spans, on the rank with most.
    pub calls: u64,
    /// Total seconds: the mean over the ranks.
    pub mean_s: f64,
    /// Total seconds on the slowest rank.
    pub max_s: f64,
    /// Peak memory of a rank's process at the end of the phase, in MiB.
    ///
    /// `None` for other kinds of spans, and if the system does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resident_mib: Option<f64>,
}

/// The time of a run by span, equal on all ranks. Displayed as a table.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Number of optimizer steps measured.
    pub steps: u64,
    /// Seconds from the start of the first phase to the end of the last, the mean over the ranks.
    pub wall_s: f64,
    /// The spans, by kind; within a kind the longest first.
    pub spans: Vec<ProfiledSpan>,
}

impl Profiler {
    /// Merges the recordings of all ranks, and resets the profiler. Collective.
    ///
    /// Returns the table and, if spans were traced, the text of a trace file.
    ///
    /// # Errors
    /// If a peer fails.
    pub(crate) fn finish(&self, group: &dyn ProcessGroup) -> Result<(Profile, Option<String>)> {
        let ranks = all_gather_object(group, &self.take())?;
        // Drops the spans of this function's own collective.
        drop(self.take());
        Ok((Profile::of(&ranks), trace::text(&ranks)?))
    }

    /// Like [`finish`](Self::finish) on this rank alone; `None` if nothing was recorded.
    pub(crate) fn finish_alone(&self) -> Result<Option<(Profile, Option<String>)>> {
        let own = [self.take_past()];
        let profile = Profile::of(&own);
        if profile.spans.is_empty() {
            return Ok(None);
        }
        Ok(Some((profile, trace::text(&own)?)))
    }
}

impl Profile {
    fn of(ranks: &[Recorded]) -> Self {
        let world_size = ranks.len().max(1) as f64;
        let mut spans: BTreeMap<_, ProfiledSpan> = BTreeMap::new();
        let totals = ranks.iter().flat_map(|rank| &rank.totals);
        let totals = totals.flat_map(|(kind, of_kind)| {
            of_kind.iter().map(move |(name, total)| (kind, name, total))
        });
        for (kind, name, total) in totals {
            let span = spans.entry((*kind, name)).or_insert_with(|| ProfiledSpan {
                kind: *kind,
                name: name.clone(),
                calls: 0,
                mean_s: 0.0,
                max_s: 0.0,
                resident_mib: None,
            });
            span.calls = span.calls.max(total.calls);
            span.mean_s += total.secs / world_size;
            span.max_s = span.max_s.max(total.secs);
            if total.resident_mib > 0.0 {
                let most = span.resident_mib.unwrap_or(0.0).max(total.resident_mib);
                span.resident_mib = Some(most);
            }
        }
        let mut spans: Vec<_> = spans.into_values().collect();
        spans.sort_by(|a, b| a.kind.cmp(&b.kind).then(b.mean_s.total_cmp(&a.mean_s)));
        let wall_us = |rank: &Recorded| rank.from_us.map_or(0.0, |from| rank.to_us - from);
        Self {
            steps: ranks.iter().map(|rank| rank.steps).max().unwrap_or(0),
            wall_s: ranks.iter().map(wall_us).sum::<f64>() * 1e-6 / world_size,
            spans,
        }
    }

    /// Returns the spans of a kind.
    pub fn of_kind(&self, kind: SpanKind) -> impl Iterator<Item = &ProfiledSpan> {
        self.spans.iter().filter(move |span| span.kind == kind)
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let longest = self.spans.iter().map(|span| span.name.chars().count()).max().unwrap_or(0);
        let width = longest.max(12);
        write!(f, "{:<width$} {:>9} {:>10} {:>10} {:>6}", "", "calls", "mean s", "max s", "%")?;
        write!(f, " {:>7}", "MiB")?;
        let share = |secs: f64| if self.wall_s > 0.0 { secs / self.wall_s * 100.0 } else { 0.0 };
        let mut row = |name: &str, calls: &str, mean: f64, max: f64, mib: Option<f64>| {
            write!(f, "\n{name:<width$} {calls:>9} {mean:>10.4} {max:>10.4} {:>6.1}", share(mean))?;
            mib.map_or(Ok(()), |mib| write!(f, " {mib:>7.0}"))
        };
        let mut of_phases = 0.0;
        for kind in [SpanKind::Phase, SpanKind::Unit, SpanKind::Collective] {
            for span in self.of_kind(kind) {
                row(
                    &span.name,
                    &span.calls.to_string(),
                    span.mean_s,
                    span.max_s,
                    span.resident_mib,
                )?;
                if kind == SpanKind::Phase {
                    of_phases += span.mean_s;
                }
            }
            if kind == SpanKind::Phase {
                let rest = (self.wall_s - of_phases).max(0.0);
                row("everything else", "", rest, rest, None)?;
                row("in all", &self.steps.to_string(), self.wall_s, self.wall_s, None)?;
            }
        }
        Ok(())
    }
}
