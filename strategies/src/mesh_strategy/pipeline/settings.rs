//! The schedule of a pipeline, and the units of its stages.

use std::fmt;
use std::ops::Range;
use std::path::Path;

use fulgurite_config::ConfigType;
use fulgurite_error::{Error, Result, counted};
use serde::de::{self, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::balance::balanced;
use crate::schedule::pipeline::{Schedule, Type};

/// The origin of the schedule.
#[derive(Debug, Clone)]
pub(crate) enum ScheduleSource {
    /// A known one, with this many stages on each rank.
    Known { kind: Type, stages_per_rank: usize },
    /// A file's lists, for its number of micro-batches alone.
    File { path: String, schedule: Schedule },
}

/// The pipeline of a strategy.
#[derive(Debug, Clone)]
pub(crate) struct PipelineSettings {
    /// Number of ranks with stages of their own.
    pub(crate) ranks: usize,
    pub(crate) source: ScheduleSource,
    /// The number of units of each stage; by default even ones.
    pub(crate) units: Option<PipelineUnits>,
}

/// The units of each stage of a pipeline.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PipelineUnits {
    /// Stages of about equal work: the matrices that multiply a row of activations, with the head.
    Balanced,
    /// The number of units of each stage.
    Counts(Vec<usize>),
}

impl Serialize for PipelineUnits {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        match self {
            Self::Balanced => serializer.serialize_str(BALANCED),
            Self::Counts(counts) => counts.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for PipelineUnits {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Units;

        impl<'de> Visitor<'de> for Units {
            type Value = PipelineUnits;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "\"{BALANCED}\" or a list of numbers of units")
            }

            fn visit_str<E: de::Error>(self, word: &str) -> std::result::Result<PipelineUnits, E> {
                match word {
                    BALANCED => Ok(PipelineUnits::Balanced),
                    other => Err(E::invalid_value(de::Unexpected::Str(other), &self)),
                }
            }

            fn visit_seq<A: SeqAccess<'de>>(
                self,
                mut list: A,
            ) -> std::result::Result<PipelineUnits, A::Error> {
                let mut counts = Vec::new();
                while let Some(count) = list.next_element()? {
                    counts.push(count);
                }
                Ok(PipelineUnits::Counts(counts))
            }
        }

        deserializer.deserialize_any(Units)
    }
}

impl ConfigType for PipelineUnits {
    fn describe() -> String {
        format!("`\"{BALANCED}\"` or list of integers")
    }
}

const BALANCED: &str = "balanced";

impl ScheduleSource {
    /// The schedule of this name, or in the file at this path if it ends in `.csv`.
    ///
    /// # Errors
    /// If the name is unknown, or the numbers of stages and ranks do not fit the schedule.
    pub(crate) fn new(name: &str, stages_per_rank: Option<usize>, ranks: usize) -> Result<Self> {
        if Path::new(name).extension().is_some_and(|end| end.eq_ignore_ascii_case("csv")) {
            let path = Path::new(name);
            let text = std::fs::read_to_string(path)
                .map_err(Error::io("reading the pipeline's schedule", path))?;
            let schedule = Schedule::from_csv(&text)?;
            if schedule.ranks() != ranks {
                return Err(Error::Config(format!(
                    "`trainer.strategy.pipeline_schedule`: {name} has lists for {}, and `pipeline_parallel_size` is \
                     {ranks}",
                    counted(schedule.ranks(), "rank")
                )));
            }
            if stages_per_rank.is_some() {
                return Err(Error::Config(
                    "`trainer.strategy.pipeline_stages_per_rank`: the schedule's file says which stages a rank has; \
                     leave the key out"
                        .to_owned(),
                ));
            }
            schedule.simulate(&crate::schedule::pipeline::Costs::default())?;
            return Ok(Self::File { path: name.to_owned(), schedule });
        }
        let Some(kind) = Type::ALL.into_iter().find(|kind| kind.name() == name) else {
            let known: Vec<String> =
                Type::ALL.iter().map(|kind| format!("\"{}\"", kind.name())).collect();
            return Err(Error::Config(format!(
                "`trainer.strategy.pipeline_schedule`: there is no \"{name}\"; expected {} or a file that ends in .csv",
                known.join(", ")
            )));
        };
        let stages_per_rank = stages_per_rank.unwrap_or(kind.stages_per_rank());
        // The message of a wrong number of stages; micro-batches are checked later.
        Schedule::new(kind, ranks, stages_per_rank, 2 * ranks)?;
        Ok(Self::Known { kind, stages_per_rank })
    }

    /// The lists for steps of this many micro-batches.
    ///
    /// # Errors
    /// If the schedule does not exist for this number.
    pub(crate) fn schedule(&self, ranks: usize, micro_batches: usize) -> Result<Schedule> {
        match self {
            Self::Known { kind, stages_per_rank } => {
                Schedule::new(*kind, ranks, *stages_per_rank, micro_batches).map_err(|error| {
                    Error::Config(format!(
                        "{error}. The number of micro-batches is `trainer.accumulate_grad_batches`, times the parts \
                         into which `trainer.micro_batch_size` cuts a batch"
                    ))
                })
            }
            Self::File { schedule, .. } if schedule.micro_batches() == micro_batches => {
                Ok(schedule.clone())
            }
            Self::File { path, schedule } => Err(Error::Config(format!(
                "`trainer.strategy.pipeline_schedule`: the lists of {path} are for {} micro-batches, and a step has \
                 {micro_batches}: `trainer.accumulate_grad_batches`, times the parts into which \
                 `trainer.micro_batch_size` cuts a batch",
                schedule.micro_batches()
            ))),
        }
    }

    /// The pipeline's rank of each stage.
    pub(super) fn rank_of_stages(&self, ranks: usize) -> Result<Vec<usize>> {
        let schedule = match self {
            Self::Known { kind, stages_per_rank } => {
                Schedule::new(*kind, ranks, *stages_per_rank, 2 * ranks)?
            }
            Self::File { schedule, .. } => schedule.clone(),
        };
        Ok((0..schedule.stages()).map(|stage| schedule.rank_of_stage(stage)).collect())
    }
}

impl PipelineSettings {
    /// The places of each stage's units, by the [work](super::balance::work) of what is before the
    /// units, of each of them and of what is behind them.
    ///
    /// # Errors
    /// If there are fewer units than stages, or the given numbers do not add up.
    pub(super) fn split(&self, stages: usize, work: &[f64]) -> Result<Vec<Range<usize>>> {
        let units = work.len().saturating_sub(2);
        let too_few = || {
            Error::Config(format!(
                "the pipeline has {}, and the model {} to cut between: each stage needs at least one. Set \
                 `trainer.strategy.pipeline_parallel_size` (times the stages of a rank) to at most {units}",
                counted(stages, "stage"),
                counted(units, "unit"),
            ))
        };
        let counts = match &self.units {
            Some(PipelineUnits::Balanced) => balanced(stages, work).ok_or_else(too_few)?,
            Some(PipelineUnits::Counts(counts)) if counts.contains(&0) => {
                return Err(Error::Config(format!(
                    "`trainer.strategy.pipeline_units` = {counts:?}: each stage needs at least one unit"
                )));
            }
            Some(PipelineUnits::Counts(counts))
                if counts.len() == stages && counts.iter().sum::<usize>() == units =>
            {
                counts.clone()
            }
            Some(PipelineUnits::Counts(counts)) => {
                return Err(Error::Config(format!(
                    "`trainer.strategy.pipeline_units` = {counts:?} names {} for {}; the pipeline has {}, and the \
                     model {} to cut between",
                    counted(counts.iter().sum::<usize>(), "unit"),
                    counted(counts.len(), "stage"),
                    counted(stages, "stage"),
                    counted(units, "unit"),
                )));
            }
            None => even(stages, units).ok_or_else(too_few)?,
        };
        let mut end = 0;
        Ok(counts
            .into_iter()
            .map(|count| {
                end += count;
                end - count..end
            })
            .collect())
    }
}

/// Even numbers of units. The first and the last stage have one less where that leaves each stage
/// one, because they also compute the embedding and the head (as torchtitan's
/// `pipeline_parallel_first_stage_less_layers`).
fn even(stages: usize, units: usize) -> Option<Vec<usize>> {
    let spread = |units: usize| -> Vec<usize> {
        (0..stages).map(|stage| units / stages + usize::from(stage < units % stages)).collect()
    };
    if stages == 0 || units < stages {
        return None;
    }
    let mut lighter = spread(units + 2);
    lighter[0] = lighter[0].saturating_sub(1);
    lighter[stages - 1] = lighter[stages - 1].saturating_sub(1);
    let fits = lighter.iter().all(|count| *count > 0) && lighter.iter().sum::<usize>() == units;
    Some(if fits { lighter } else { spread(units) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(units: Option<Vec<usize>>) -> PipelineSettings {
        let source = ScheduleSource::new("1f1b", None, 2).unwrap();
        PipelineSettings { ranks: 2, source, units: units.map(PipelineUnits::Counts) }
    }

    /// The work of units alone.
    fn work(units: usize) -> Vec<f64> {
        [&[0.0][..], &vec![1.0; units], &[0.0]].concat()
    }

    fn split(stages: usize, units: usize) -> Vec<usize> {
        let ranges = settings(None).split(stages, &work(units)).unwrap();
        ranges.into_iter().map(|range| range.len()).collect()
    }

    #[test]
    fn outer_stages_have_fewer_units() {
        assert_eq!(split(4, 32), [8, 9, 8, 7]);
        assert_eq!(split(2, 2), [1, 1]);
        assert_eq!(split(4, 4), [1, 1, 1, 1]);
        assert_eq!(split(2, 5), [3, 2]);
        assert_eq!(split(1, 3), [3]);
    }

    #[test]
    fn splits_that_cannot_be_are_refused() {
        let error = settings(None).split(4, &work(3)).unwrap_err().to_string();
        assert!(error.contains("4 stages, and the model 3 units"), "{error}");
        let given = |counts: &[usize]| settings(Some(counts.to_vec())).split(2, &work(5));
        assert_eq!(given(&[4, 1]).unwrap(), [0..4, 4..5]);
        let error = given(&[4, 2]).unwrap_err().to_string();
        assert!(error.contains("[4, 2] names 6 units for 2 stages"), "{error}");
        assert!(given(&[5]).is_err());
        assert!(given(&[5, 0]).unwrap_err().to_string().contains("at least one unit"));
    }
}
