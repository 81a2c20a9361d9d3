//! [`ProfilerConfig`].

use std::fmt;

use fulgurite_config::ConfigType;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize, Serializer};

/// The kind of profile: `trainer.profiler`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProfilerConfig {
    /// A table of total times at the end of the run.
    Simple,
    /// The table, and each span of some steps on every rank, in a file for Perfetto and
    /// `chrome://tracing`.
    Trace {
        /// Number of steps before the first traced step.
        skip_steps: u64,
        /// Number of traced steps.
        steps: u64,
    },
}

const NAMES: [&str; 2] = ["simple", "trace"];
/// By default the first steps are skipped: they fill caches and allocate memory.
const SKIP_STEPS: u64 = 3;
const STEPS: u64 = 5;
/// Viewers cannot open larger files.
const MAX_STEPS: u64 = 10_000;

impl ProfilerConfig {
    /// Checks ranges. Error messages do not name the key.
    ///
    /// # Errors
    /// If a value is out of range.
    pub(crate) fn check(&self) -> Result<(), String> {
        match *self {
            Self::Trace { steps, .. } if !(1..=MAX_STEPS).contains(&steps) => Err(format!(
                "`steps` in the trace must be from 1 to {MAX_STEPS}, found {steps}; \"simple\" makes a table \
                 of all steps without a trace"
            )),
            _ => Ok(()),
        }
    }
}

/// The configuration's form in TOML.
#[derive(Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
enum Table {
    Simple {},
    Trace {
        #[serde(default = "default_skip_steps")]
        skip_steps: u64,
        #[serde(default = "default_steps")]
        steps: u64,
    },
}

fn default_skip_steps() -> u64 {
    SKIP_STEPS
}

fn default_steps() -> u64 {
    STEPS
}

impl Serialize for ProfilerConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match *self {
            Self::Simple => serializer.serialize_str("simple"),
            Self::Trace { skip_steps, steps } => {
                Table::Trace { skip_steps, steps }.serialize(serializer)
            }
        }
    }
}

impl<'de> Deserialize<'de> for ProfilerConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct WordOrTable;

        impl<'de> Visitor<'de> for WordOrTable {
            type Value = ProfilerConfig;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("\"simple\", \"trace\" or a table with a `type`")
            }

            fn visit_str<E: serde::de::Error>(self, word: &str) -> Result<Self::Value, E> {
                match word {
                    "simple" => Ok(ProfilerConfig::Simple),
                    "trace" => Ok(ProfilerConfig::Trace { skip_steps: SKIP_STEPS, steps: STEPS }),
                    _ => Err(E::unknown_variant(word, &NAMES)),
                }
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                Ok(match Table::deserialize(MapAccessDeserializer::new(map))? {
                    Table::Simple {} => ProfilerConfig::Simple,
                    Table::Trace { skip_steps, steps } => {
                        ProfilerConfig::Trace { skip_steps, steps }
                    }
                })
            }
        }

        deserializer.deserialize_any(WordOrTable)
    }
}

impl ConfigType for ProfilerConfig {
    fn describe() -> String {
        "`\"simple\"`, `\"trace\"` or a table".to_owned()
    }
}
