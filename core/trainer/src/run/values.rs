//! Types of configuration values that are numbers or words.

use std::path::PathBuf;
use std::time::Duration;

use candle_core::{DType, Device};
use serde::de::Deserializer;
use serde::ser::Serializer;
use serde::{Deserialize, Serialize};

use fulgurite_config::{ConfigType, Scalar, deserialize_scalar};

/// The number of ranks per node: `trainer.devices`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Devices {
    /// This many.
    Count(usize),
    /// `"auto"`: one per core.
    Auto,
}

impl Serialize for Devices {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Count(count) => serializer.serialize_u64(*count as u64),
            Self::Auto => serializer.serialize_str("auto"),
        }
    }
}

impl<'de> Deserialize<'de> for Devices {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_scalar(deserializer, "a number of ranks, at least 1, or \"auto\"", |value| {
            match value {
                Scalar::Int(count) if *count >= 1 => usize::try_from(*count).ok().map(Self::Count),
                Scalar::Text(text) if text == "auto" => Some(Self::Auto),
                _ => None,
            }
        })
    }
}

impl ConfigType for Devices {
    fn describe() -> String {
        "integer or `\"auto\"`".to_owned()
    }
}

/// The number of samples that are computed at a time: `trainer.micro_batch_size`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MicroBatchSize {
    /// This many, which must divide the batch.
    Samples(usize),
    /// `"auto"`: the whole batch; each time a rank runs out of memory, half as many samples.
    Auto,
}

impl Serialize for MicroBatchSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Samples(samples) => serializer.serialize_u64(*samples as u64),
            Self::Auto => serializer.serialize_str("auto"),
        }
    }
}

impl<'de> Deserialize<'de> for MicroBatchSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_scalar(deserializer, "a number of samples, at least 1, or \"auto\"", |value| {
            match value {
                Scalar::Int(samples) if *samples >= 1 => {
                    usize::try_from(*samples).ok().map(Self::Samples)
                }
                Scalar::Text(text) if text == "auto" => Some(Self::Auto),
                _ => None,
            }
        })
    }
}

impl ConfigType for MicroBatchSize {
    fn describe() -> String {
        "integer or `\"auto\"`".to_owned()
    }
}

/// The devices on which a step's loss and norm are read one step later: `trainer.late_reads`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LateReads {
    /// `"auto"`: on devices other than the CPU.
    #[default]
    Auto,
    /// `true`: on every device.
    Always,
    /// `false`: on none.
    Never,
}

impl LateReads {
    /// Returns whether loss and norm are read later on this device.
    pub(crate) fn on(self, device: &Device) -> bool {
        match self {
            Self::Auto => !device.is_cpu(),
            Self::Always => true,
            Self::Never => false,
        }
    }
}

impl Serialize for LateReads {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => serializer.serialize_str("auto"),
            Self::Always => serializer.serialize_bool(true),
            Self::Never => serializer.serialize_bool(false),
        }
    }
}

impl<'de> Deserialize<'de> for LateReads {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_scalar(deserializer, "true, false or \"auto\"", |value| match value {
            Scalar::Bool(true) => Some(Self::Always),
            Scalar::Bool(false) => Some(Self::Never),
            Scalar::Text(text) if text == "auto" => Some(Self::Auto),
            _ => None,
        })
    }
}

impl ConfigType for LateReads {
    fn describe() -> String {
        "`true`, `false` or `\"auto\"`".to_owned()
    }
}

/// A count or a fraction. In TOML an integer is a count and a float is a fraction: `1` is one,
/// `1.0` is all.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum CountOrFraction {
    /// An integer: a number of steps or batches.
    Count(u64),
    /// A float between 0 and 1: a fraction of an epoch, or of the data.
    Fraction(f64),
}

impl CountOrFraction {
    /// Returns the number of items out of `whole`.
    ///
    /// A fraction is rounded down, but to at least one unless it is zero.
    pub fn of(self, whole: u64) -> u64 {
        match self {
            Self::Count(count) => count,
            Self::Fraction(fraction) if fraction > 0.0 && whole > 0 => {
                ((whole as f64 * fraction) as u64).max(1)
            }
            Self::Fraction(_) => 0,
        }
    }
}

impl Serialize for CountOrFraction {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Count(count) => serializer.serialize_u64(*count),
            Self::Fraction(fraction) => serializer.serialize_f64(*fraction),
        }
    }
}

impl<'de> Deserialize<'de> for CountOrFraction {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let expected = "a count (an integer, at least 0) or a fraction (a float from 0.0 to 1.0)";
        deserialize_scalar(deserializer, expected, |value| match value {
            Scalar::Int(count) => u64::try_from(*count).ok().map(Self::Count),
            Scalar::Float(part) => (0.0..=1.0).contains(part).then_some(Self::Fraction(*part)),
            Scalar::Bool(_) | Scalar::Text(_) => None,
        })
    }
}

impl ConfigType for CountOrFraction {
    fn describe() -> String {
        "integer (a count) or float (a fraction)".to_owned()
    }
}

/// A trial of everything: `trainer.fast_dev_run`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FastDevRun {
    /// `false`: a run as configured.
    #[default]
    Off,
    /// An integer: this many batches; `true` is one.
    Batches(u64),
}

impl FastDevRun {
    /// Returns the number of batches, if the run is a trial.
    pub fn batches(self) -> Option<u64> {
        match self {
            Self::Off => None,
            Self::Batches(batches) => Some(batches),
        }
    }
}

impl Serialize for FastDevRun {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Off => serializer.serialize_bool(false),
            Self::Batches(batches) => serializer.serialize_u64(*batches),
        }
    }
}

impl<'de> Deserialize<'de> for FastDevRun {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let expected = "true, false or a number of batches, at least 1";
        deserialize_scalar(deserializer, expected, |value| match value {
            Scalar::Bool(trial) => Some(if *trial { Self::Batches(1) } else { Self::Off }),
            Scalar::Int(count) => {
                u64::try_from(*count).ok().filter(|count| *count > 0).map(Self::Batches)
            }
            Scalar::Float(_) | Scalar::Text(_) => None,
        })
    }
}

impl ConfigType for FastDevRun {
    fn describe() -> String {
        "boolean or integer (batches)".to_owned()
    }
}

/// The dtypes of parameters and computation: `trainer.precision`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// `"32-true"`, or 32: everything in f32.
    #[default]
    F32True,
    /// `"bf16-true"`: everything in bf16.
    Bf16True,
    /// `"bf16-mixed"`, or `"bf16"`: parameters in f32, computation in bf16.
    Bf16Mixed,
    /// `"16-mixed"`, or 16: parameters in f32, computation in f16, with a
    /// [loss scale](fulgurite_engine::optim::LossScale).
    F16Mixed,
    /// `"16-true"`: everything in f16, with a loss scale.
    F16True,
    /// `"64-true"`, or 64: everything in f64.
    F64True,
}

impl Precision {
    /// Returns its name in a configuration.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::F32True => "32-true",
            Self::Bf16True => "bf16-true",
            Self::Bf16Mixed => "bf16-mixed",
            Self::F16Mixed => "16-mixed",
            Self::F16True => "16-true",
            Self::F64True => "64-true",
        }
    }

    /// Returns the dtype of the parameters, which the optimizer updates.
    pub fn param_dtype(self) -> DType {
        match self {
            Self::F32True | Self::Bf16Mixed | Self::F16Mixed => DType::F32,
            Self::Bf16True => DType::BF16,
            Self::F16True => DType::F16,
            Self::F64True => DType::F64,
        }
    }

    /// Returns the dtype of forward and backward.
    pub fn compute_dtype(self) -> DType {
        match self {
            Self::F32True => DType::F32,
            Self::Bf16True | Self::Bf16Mixed => DType::BF16,
            Self::F16True | Self::F16Mixed => DType::F16,
            Self::F64True => DType::F64,
        }
    }
}

impl Serialize for Precision {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl<'de> Deserialize<'de> for Precision {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let expected =
            "\"32-true\", \"bf16-mixed\", \"bf16-true\", \"16-mixed\", \"16-true\" or \"64-true\"";
        deserialize_scalar(deserializer, expected, |value| match value {
            Scalar::Int(16) => Some(Self::F16Mixed),
            Scalar::Int(32) => Some(Self::F32True),
            Scalar::Int(64) => Some(Self::F64True),
            Scalar::Text(text) => match text.as_str() {
                "32-true" | "32" => Some(Self::F32True),
                "bf16-true" => Some(Self::Bf16True),
                "bf16-mixed" | "bf16" => Some(Self::Bf16Mixed),
                "16-mixed" | "16" => Some(Self::F16Mixed),
                "16-true" => Some(Self::F16True),
                "64-true" | "64" => Some(Self::F64True),
                _ => None,
            },
            _ => None,
        })
    }
}

impl ConfigType for Precision {
    fn describe() -> String {
        "`\"32-true\"`, `\"bf16-mixed\"`, `\"bf16-true\"`, `\"16-mixed\"`, `\"16-true\"` or `\"64-true\"`".to_owned()
    }
}

/// A length of time: `"DD:HH:MM:SS"`, or seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimeLimit(pub Duration);

impl TimeLimit {
    fn from_clock(text: &str) -> Option<Self> {
        let parts = text.split(':').map(|part| part.parse::<u64>().ok());
        let parts: [u64; 4] = parts.collect::<Option<Vec<_>>>()?.try_into().ok()?;
        let [days, hours, minutes, seconds] = parts;
        if hours >= 24 || minutes >= 60 || seconds >= 60 {
            return None;
        }
        let seconds = days.checked_mul(86_400)?.checked_add(hours * 3600 + minutes * 60 + seconds);
        seconds.map(Duration::from_secs).map(Self)
    }
}

impl Serialize for TimeLimit {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0.subsec_nanos() != 0 {
            return serializer.serialize_f64(self.0.as_secs_f64());
        }
        let all = self.0.as_secs();
        let (days, hours) = (all / 86_400, all / 3600 % 24);
        serializer.collect_str(&format_args!(
            "{days:02}:{hours:02}:{:02}:{:02}",
            all / 60 % 60,
            all % 60
        ))
    }
}

impl<'de> Deserialize<'de> for TimeLimit {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_scalar(deserializer, "\"DD:HH:MM:SS\" or a number of seconds", |value| {
            match value {
                Scalar::Int(seconds) => {
                    u64::try_from(*seconds).ok().map(|seconds| Self(Duration::from_secs(seconds)))
                }
                Scalar::Float(seconds) => Duration::try_from_secs_f64(*seconds).ok().map(Self),
                Scalar::Text(text) => Self::from_clock(text),
                Scalar::Bool(_) => None,
            }
        })
    }
}

impl ConfigType for TimeLimit {
    fn describe() -> String {
        "`\"DD:HH:MM:SS\"` or seconds".to_owned()
    }
}

/// The checkpoint that a run starts from: `trainer.ckpt_path`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CkptPath {
    /// `"last"`: the checkpoint that was saved last, if any.
    Last,
    /// `"best"`: the best checkpoint by `checkpoint.monitor` that the most recently saving run
    /// keeps.
    Best,
    /// This path or name.
    Path(PathBuf),
}

impl Serialize for CkptPath {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Last => serializer.serialize_str("last"),
            Self::Best => serializer.serialize_str("best"),
            Self::Path(path) => path.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for CkptPath {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_scalar(deserializer, "a path, \"last\" or \"best\"", |value| match value {
            Scalar::Text(text) if text == "last" => Some(Self::Last),
            Scalar::Text(text) if text == "best" => Some(Self::Best),
            Scalar::Text(text) if !text.is_empty() => Some(Self::Path(text.into())),
            _ => None,
        })
    }
}

impl ConfigType for CkptPath {
    fn describe() -> String {
        "path, `\"last\"` or `\"best\"`".to_owned()
    }
}

/// The algorithm of gradient clipping: `trainer.gradient_clip_algorithm`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ClipAlgorithm {
    /// All gradients are scaled so that their joint norm is at most the limit.
    #[default]
    Norm,
    /// Each element is clamped to plus or minus the limit.
    Value,
}

impl ConfigType for ClipAlgorithm {
    fn describe() -> String {
        "`\"norm\"` or `\"value\"`".to_owned()
    }
}

/// The reaction to a model that is too large for the machine: `trainer.memory_check`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryCheck {
    /// Refuses the run if the model is far too large, and warns if it exceeds the available memory.
    #[default]
    Error,
    /// Only warns.
    Warn,
    /// Does nothing.
    Off,
}

impl ConfigType for MemoryCheck {
    fn describe() -> String {
        "`\"error\"`, `\"warn\"` or `\"off\"`".to_owned()
    }
}

#[cfg(test)]
mod tests {
    use std::fmt;

    use fulgurite_test_message::assert_says;

    use super::*;
    use crate::runtime::UnusedParameters;
    use fulgurite_config::{parse, to_table};
    use toml::{Table, Value};

    fn read<T: serde::de::DeserializeOwned>(text: &str) -> Result<T, String> {
        #[derive(Deserialize)]
        struct Wrap<T> {
            key: T,
        }
        let table = format!("key = {text}").parse::<Table>().unwrap();
        parse::<Wrap<T>>(table).map(|wrap| wrap.key).map_err(|error| error.to_string())
    }

    fn written(value: impl Serialize) -> Value {
        #[derive(Serialize)]
        struct Wrap<T> {
            key: T,
        }
        to_table(&Wrap { key: value }).unwrap()["key"].clone()
    }

    // checklist: composer: mixed-precision presets
    #[test]
    fn precision_sets_parameter_and_compute_dtypes() {
        let dtypes = |name: &str| {
            let precision: Precision = read(name).unwrap();
            (precision.param_dtype(), precision.compute_dtype())
        };
        for (names, expected) in [
            (&["\"32-true\"", "32"][..], (DType::F32, DType::F32)),
            (&["\"bf16-mixed\"", "\"bf16\""], (DType::F32, DType::BF16)),
            (&["\"bf16-true\""], (DType::BF16, DType::BF16)),
            (&["\"64-true\"", "64"], (DType::F64, DType::F64)),
        ] {
            assert!(names.iter().all(|name| dtypes(name) == expected), "{names:?}");
        }
    }

    #[test]
    fn values_survive_a_round_trip() {
        fn check<T: Serialize + serde::de::DeserializeOwned + PartialEq + fmt::Debug>(
            text: &str,
            value: T,
        ) {
            assert_eq!(read::<T>(text).as_ref(), Ok(&value), "{text}");
            assert_eq!(read::<T>(&written(&value).to_string()), Ok(value), "{text}");
        }
        check("4", Devices::Count(4));
        check("'auto'", Devices::Auto);
        check("1", CountOrFraction::Count(1));
        check("1.0", CountOrFraction::Fraction(1.0));
        check("'01:02:03:04'", TimeLimit(Duration::from_secs(93_784)));
        check("90", TimeLimit(Duration::from_secs(90)));
        check("0.5", TimeLimit(Duration::from_millis(500)));
        check("true", FastDevRun::Batches(1));
        check("false", FastDevRun::Off);
        check("3", FastDevRun::Batches(3));
        check("'last'", CkptPath::Last);
        check("'best'", CkptPath::Best);
        check("'runs/last'", CkptPath::Path("runs/last".into()));
        for (text, precision) in [
            ("32", Precision::F32True),
            ("'bf16'", Precision::Bf16Mixed),
            ("'bf16-true'", Precision::Bf16True),
            ("64", Precision::F64True),
        ] {
            check(text, precision);
        }
        check("'value'", ClipAlgorithm::Value);
        check("'ignore'", UnusedParameters::Ignore);
    }

    #[test]
    fn errors_name_the_expected_values() {
        assert_says!(
            read::<Devices>("0").unwrap_err(),
            r#"`key`: expected … ranks, at least 1, or "auto", found `0`"#
        );
        assert_says!(
            read::<Devices>("'all'").unwrap_err(),
            r#"`key`: expected … ranks, at least 1, or "auto", found the string "all""#
        );
        assert_says!(
            read::<FastDevRun>("0").unwrap_err(),
            "`key`: expected true, false … batches, at least 1, found `0`"
        );
        assert_says!(
            read::<CountOrFraction>("1.5").unwrap_err(),
            "`key`: expected a count … at least 0) or a fraction … 0.0 to 1.0), found `1.5`"
        );
        assert_says!(
            read::<CountOrFraction>("true").unwrap_err(),
            "`key`: expected a count … or a fraction … found `true`"
        );
        assert_says!(
            read::<Precision>("'fp16'").unwrap_err(),
            r#"`key` … "32-true", "bf16-mixed" … "16-true" or "64-true" … "fp16" … "16-mixed"?"#
        );
        assert_says!(
            read::<TimeLimit>("'12:00'").unwrap_err(),
            r#"`key`: expected "DD:HH:MM:SS" … found the string "12:00""#
        );
        assert_says!(
            read::<TimeLimit>("'00:25:00:00'").unwrap_err(),
            r#"`key`: expected "DD:HH:MM:SS" … found the string "00:25:00:00""#
        );
        for text in ["'00:18446744073709551615:00:00'", "'00:00:18446744073709551615:00'"] {
            assert!(read::<TimeLimit>(text).unwrap_err().contains("expected \"DD:HH:MM:SS\""));
        }
        assert_says!(read::<TimeLimit>("-1").unwrap_err(), r#"`key` … "DD:HH:MM:SS" … found `-1`"#);
        assert_says!(
            read::<TimeLimit>("12:00:00").unwrap_err(),
            r#"`key`: expected "DD:HH:MM:SS" … found the string "12:00:00""#
        );
        assert_says!(read::<CkptPath>("{}").unwrap_err(), r#"`key` … "last" or "best" … a table"#);
        assert_says!(
            read::<ClipAlgorithm>("'nrom'").unwrap_err(),
            r#"`key`: expected "norm" … found "nrom"; did you mean "norm"?"#
        );
    }

    #[test]
    fn positive_fractions_give_at_least_one() {
        assert_eq!(CountOrFraction::Fraction(0.5).of(7), 3);
        assert_eq!(CountOrFraction::Fraction(0.01).of(7), 1);
        assert_eq!(CountOrFraction::Fraction(0.0).of(7), 0);
        assert_eq!(CountOrFraction::Fraction(1.0).of(0), 0);
        assert_eq!(CountOrFraction::Count(9).of(7), 9);
    }
}
