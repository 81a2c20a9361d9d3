//! Log-probabilities of answers under a reference model, in a file.

use std::collections::{BTreeMap, HashMap};

use fulgurite_engine::data::SourceReport;
use fulgurite_error::Result;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::config::Paths;
use crate::rows::{self, Column, Place, Row};

/// The log-probability of an answer, as a prediction of a `preference` or `kto` has it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AnswerLogp {
    /// A hash of the tokens of the prompt and the answer, in hexadecimal digits.
    key: String,
    /// The log-probability, summed over the answer's tokens.
    logp: f32,
}

impl AnswerLogp {
    /// The log-probability of the sequence with this key ([`PreferenceBatch::keys`] or
    /// [`UnpairedBatch::keys`]).
    ///
    /// [`PreferenceBatch::keys`]: super::PreferenceBatch::keys
    /// [`UnpairedBatch::keys`]: super::UnpairedBatch::keys
    pub fn new(key: u64, logp: f32) -> Self {
        Self { key: digits(key), logp }
    }
}

fn digits(key: u64) -> String {
    format!("{key:016x}")
}

/// The files of `data.reference_path`.
pub(super) struct ReferenceFile {
    logps: HashMap<String, f32>,
}

impl ReferenceFile {
    /// Reads the files.
    ///
    /// # Errors
    /// If one cannot be read, or a row is another prediction.
    pub(super) fn open(paths: &Paths) -> Result<Self> {
        let key = "data.reference_path";
        let outputs = Column { key, name: "outputs".to_owned() };
        let mut logps = HashMap::new();
        for Row { place, values, .. } in
            rows::read::<Value>(key, paths.as_slice(), &[outputs], 1, &mut SourceReport::new(key))?
        {
            let outputs = values.into_iter().next().flatten().unwrap_or_default();
            let answers: BTreeMap<String, AnswerLogp> =
                serde_json::from_value(outputs).map_err(|error| {
                    place.wrong(format!(
                        "has no log-probabilities of answers, as `fulgurite predict` writes them for a `preference` or \
                         `kto`: {error}"
                    ))
                })?;
            logps.extend(answers.into_values().map(|AnswerLogp { key, logp }| (key, logp)));
        }
        Ok(Self { logps })
    }

    /// The log-probability of the sequence with this key, of a row.
    ///
    /// # Errors
    /// If the files lack it.
    pub(super) fn log_probability(&self, place: &Place, key: u64) -> Result<f32> {
        self.logps.get(&digits(key)).copied().ok_or_else(|| {
            place.wrong(
                "has an answer whose log-probability is not in data.reference_path; predict all rows of each key, with \
                 the same options of `[data]`, such as data.tokenizer and data.seq_len",
            )
        })
    }
}
