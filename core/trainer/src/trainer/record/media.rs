//! What a run logs beside numbers.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::metric::MetricTable;
use crate::trainer::Histogram;
use crate::{Error, Result};
use fulgurite_engine::collective::{ProcessGroup, all_gather_object};

/// Texts, histograms and tables that steps and hooks have logged.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Media {
    pub(crate) texts: Vec<(String, String)>,
    pub(crate) tables: Vec<(String, MetricTable)>,
    histograms: BTreeMap<String, Histogram>,
    /// Whether the histograms cover all ranks.
    is_reduced: bool,
}

impl Media {
    /// Merges a histogram with the values logged under its name.
    pub(crate) fn add_histogram(&mut self, name: &str, histogram: &Histogram) {
        self.histograms.entry(name.to_owned()).or_default().merge(histogram);
    }

    /// Appends `suffix` to every name.
    pub(crate) fn add_suffix(&mut self, suffix: &str) {
        let names = self.texts.iter_mut().map(|(name, _)| name);
        names.chain(self.tables.iter_mut().map(|(name, _)| name)).for_each(|name| *name += suffix);
        let histograms = std::mem::take(&mut self.histograms).into_iter();
        self.histograms = histograms.map(|(name, of)| (name + suffix, of)).collect();
    }

    /// Like [`reduce_histograms`](Self::reduce_histograms), and keeps the result.
    pub(crate) fn reduce_in_place(&mut self, group: &dyn ProcessGroup) -> Result<()> {
        self.histograms = self.reduce_histograms(group)?;
        self.is_reduced = true;
        Ok(())
    }

    /// Merges the histograms over all ranks of `group`. Collective if there are any.
    ///
    /// # Errors
    /// If the ranks have logged different names.
    pub(crate) fn reduce_histograms(
        &mut self,
        group: &dyn ProcessGroup,
    ) -> Result<BTreeMap<String, Histogram>> {
        let own = std::mem::take(&mut self.histograms);
        if own.is_empty() || group.size() == 1 || self.is_reduced {
            return Ok(own);
        }
        let mut all = all_gather_object(group, &own)?.into_iter();
        let mut merged = all.next().unwrap_or_default();
        for histograms in all {
            if !histograms.keys().eq(merged.keys()) {
                let names: Vec<&str> = own.keys().map(String::as_str).collect();
                return Err(Error::other(format!(
                    "the ranks have logged different histograms, this one {}. All ranks must log \
                     the same names",
                    names.join(", ")
                )));
            }
            for (sum, histogram) in merged.values_mut().zip(histograms.values()) {
                sum.merge(histogram);
            }
        }
        Ok(merged)
    }
}
