//! What the ranks have recorded, put together.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::recorder::Recorded;
use super::{Profiler, trace};
use crate::Result;
use fulgurite_engine::collective::{ProcessGroup, all_gather_object};

/// What a span is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum SpanKind {
    /// A phase of the loop. Phases do not overlap.
    Phase,
    /// The forward or backward of a unit, a part of the phase of that name. The backward of a unit lasts
    /// until that of the next one begins.
    Unit,
    /// A collective: the time for which its thread was kept from other work.
    Collective,
}

/// The spans of one name, on all ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProfiledSpan {
    /// What it is of.
    pub kind: SpanKind,
    /// Its name.
    pub name: String,
    /// How often it occurred, on the rank where it did most often.
    pub calls: u64,
    /// Seconds in all: the mean over the ranks.
    pub mean_s: f64,
    /// Seconds in all on the rank that took longest.
    pub max_s: f64,
    /// The most memory that a rank's process had at the end of such a phase, in MiB; `None` for what is no
    /// phase, and where the system does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resident_mib: Option<f64>,
}

/// Where the time of a run went. Equal on all ranks.
///
/// Shown as text it is a table.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Optimizer steps that were measured.
    pub steps: u64,
    /// Seconds from the beginning of the first phase to the end of the last, the mean over the ranks.
    pub wall_s: f64,
    /// The spans, by kind; those that took longest come first.
    pub spans: Vec<ProfiledSpan>,
}

impl Profiler {
    /// Puts together what the ranks have recorded, and starts anew: the table and, where spans were
    /// traced, the text of a trace file. Collective.
    ///
    /// # Errors
    /// If a peer fails.
    pub(crate) fn finish(&self, group: &dyn ProcessGroup) -> Result<(Profile, Option<String>)> {
        let ranks = all_gather_object(group, &self.take())?;
        // What was recorded meanwhile is of no run.
        drop(self.take());
        Ok((Profile::of(&ranks), trace::text(&ranks)?))
    }

    /// As [`finish`](Self::finish), of this rank alone; `None` if nothing was recorded.
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

    /// The spans of a kind.
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
