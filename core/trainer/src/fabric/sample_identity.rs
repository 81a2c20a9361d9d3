//! [`SampleIdentity`]: what tells the samples of a run from others.

use std::collections::BTreeMap;

use crate::Result;
use fulgurite_engine::collective::Agreement;
use fulgurite_engine::data::{DataModule, Split};

/// What tells the training samples of a run from others, for other ranks and for a resumed run.
#[derive(Debug, Clone)]
pub(crate) struct SampleIdentity {
    /// [`DataModule::fingerprint`].
    pub(crate) fingerprint: Option<String>,
    /// What defines sample `n` of the training data besides the data, by name.
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

    /// What all ranks must have alike of the data.
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

    /// What a checkpoint's definition has otherwise than this run: `the number of training samples was 40
    /// and is 38`. Names that only one of them has are not compared.
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
    fn only_what_a_checkpoint_records_is_compared() {
        let named = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
            pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
        };
        let now = named(&[("`data.seq_len`", "7"), ("the number of training samples", "57")]);
        let now = SampleIdentity { fingerprint: None, definition: now };
        let differences = |before: &[(&str, &str)]| now.differences(&named(before));
        // Of versions that recorded nothing, or something that there is no more.
        assert!(differences(&[]).is_empty());
        assert!(differences(&[("`data.stride`", "3"), ("`data.seq_len`", "7")]).is_empty());
        assert_eq!(differences(&[("`data.seq_len`", "8")]), ["`data.seq_len` was 8 and is 7"]);
    }
}
