//! The identity of a run's training samples.

use std::collections::BTreeMap;

use crate::Result;
use fulgurite_engine::collective::Agreement;
use fulgurite_engine::data::{DataModule, Split};

/// Identifies the training samples of a run, for comparison between ranks and with a resumed run.
#[derive(Debug, Clone)]
pub(crate) struct SampleIdentity {
    /// [`DataModule::fingerprint`].
    pub(crate) fingerprint: Option<String>,
    /// Names and values that define training sample `n`, besides the data.
    pub(crate) definition: BTreeMap<String, String>,
}

impl SampleIdentity {
    pub(crate) fn of<D: DataModule>(data: &D, shuffle: bool) -> Result<Self> {
        let mut definition: BTreeMap<String, String> =
            data.sample_definition()?.into_iter().collect();
        let order = if shuffle { "shuffled" } else { "in order" };
        definition.insert("the order of training samples".to_owned(), order.to_owned());
        let samples = data.len(Split::Train).to_string();
        definition.insert("the number of training samples".to_owned(), samples);
        Ok(Self { fingerprint: data.fingerprint()?, definition })
    }

    /// Returns the properties of the data that must be equal on all ranks.
    pub(crate) fn agreement<D: DataModule>(&self, data: &D) -> Result<Agreement> {
        let mut agreement = Agreement::on(
            "the data",
            "Every rank must have the same samples in the same order: give all hosts the same files. Paths may \
             differ",
        );
        let fingerprints = [
            ("the training data", self.fingerprint.clone()),
            ("the data for evaluation", data.evaluation_fingerprint()?),
        ];
        for (name, fingerprint) in fingerprints {
            if let Some(fingerprint) = fingerprint {
                agreement.insert(name, fingerprint);
            }
        }
        agreement.extend(self.definition.clone());
        for (split, samples) in [
            (Split::Validation, "validation samples"),
            (Split::Test, "test samples"),
            (Split::Predict, "samples to predict for"),
        ] {
            agreement.insert(format!("the number of {samples}"), data.len(split));
        }
        for (i, name) in data.validation_sets().iter().enumerate() {
            let samples = data.len(Split::ValidationSet(i));
            agreement.insert(
                format!("validation set {i}"),
                format_args!("`{name}` with {samples} samples"),
            );
        }
        Ok(agreement)
    }

    /// Lists differences from a checkpoint's definition:
    /// `the number of training samples was 40 and is 38`.
    ///
    /// Names that are missing on one side are not compared.
    pub(crate) fn differences(&self, before: &BTreeMap<String, String>) -> Vec<String> {
        let differing = before.iter().filter_map(|(name, before)| {
            let now = self.definition.get(name).filter(|now| *now != before)?;
            Some(format!("{name} was {before} and is {now}"))
        });
        differing.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compares_only_recorded_names() {
        let named = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
            pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
        };
        let now = named(&[("`data.seq_len`", "7"), ("the number of training samples", "57")]);
        let now = SampleIdentity { fingerprint: None, definition: now };
        let differences = |before: &[(&str, &str)]| now.differences(&named(before));
        // Checkpoints of versions that recorded nothing, or a name that no longer exists.
        assert!(differences(&[]).is_empty());
        assert!(differences(&[("`data.stride`", "3"), ("`data.seq_len`", "7")]).is_empty());
        assert_eq!(differences(&[("`data.seq_len`", "8")]), ["`data.seq_len` was 8 and is 7"]);
    }
}
