//! [`Sequences`]: sources, cut into samples.

use std::hash::Hasher as _;

use fulgurite_error::{Error, Result};
use twox_hash::XxHash3_64;

use crate::source::Source;

/// Sources, cut into samples of equal length. Samples do not cross sources.
#[derive(Debug)]
pub(crate) struct Sequences {
    sources: Vec<Source>,
    /// The index of each source's first sample.
    firsts: Vec<u64>,
    len: u64,
    seq_len: usize,
    stride: usize,
}

impl Sequences {
    /// Cuts samples of `seq_len` tokens plus the following token, `stride` tokens apart. `key`
    /// names the sources in the configuration.
    ///
    /// # Errors
    /// If a source is too short for one sample.
    pub(crate) fn new(
        key: &str,
        sources: Vec<Source>,
        seq_len: usize,
        stride: usize,
    ) -> Result<Self> {
        let (mut firsts, mut len) = (Vec::new(), 0);
        for source in &sources {
            let needed = seq_len as u64 + 1;
            let Some(spare) = source.len().checked_sub(needed) else {
                return Err(Error::Data(format!(
                    "{} ({key}) has {} tokens, but one sample needs {needed} (data.seq_len = {seq_len}, and \
                     the token after it); give more data or lower data.seq_len",
                    source.name(),
                    source.len()
                )));
            };
            firsts.push(len);
            len += spare / stride as u64 + 1;
        }
        Ok(Self { sources, firsts, len, seq_len, stride })
    }

    /// The sources of the samples.
    pub(crate) fn sources(&self) -> &[Source] {
        &self.sources
    }

    /// Tokens between the starts of two samples.
    pub(crate) fn stride(&self) -> usize {
        self.stride
    }

    /// Number and kind of tokens, and a hash of all tokens of text and of samples of token files.
    pub(crate) fn fingerprint(&self) -> Result<String> {
        let mut hasher = XxHash3_64::default();
        for source in &self.sources {
            hasher.write(&source.len().to_le_bytes());
            source.hash(&mut hasher)?;
        }
        let tokens: u64 = self.sources.iter().map(Source::len).sum();
        let what = match &*self.sources {
            [Source::U16(_) | Source::U32(_) | Source::Kept(_)] => "a text".to_owned(),
            [_] => "one file".to_owned(),
            files => format!("{} files", files.len()),
        };
        Ok(format!("{what} of {tokens} tokens ({:016x})", hasher.finish()))
    }

    /// Targets at the ends of sources that belong to no sample.
    pub(crate) fn unused_targets(&self) -> u64 {
        let left = |source: &Source| {
            let spare = source.len() - 1 - self.seq_len as u64;
            spare % self.stride as u64
        };
        self.sources.iter().map(left).sum()
    }

    /// Number of samples.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// The number of samples, from the start, without targets in common with the samples from
    /// `first` on.
    pub(crate) fn disjoint_from(&self, first: u64) -> u64 {
        let overlapping = self.seq_len.div_ceil(self.stride) as u64 - 1;
        first.saturating_sub(overlapping)
    }

    /// Fills `out`, of `seq_len + 1` ids, with sample `index`, and returns its source.
    ///
    /// # Errors
    /// If the sample does not exist, or the file cannot be read.
    pub(crate) fn read(&self, index: u64, out: &mut [u32]) -> Result<&Source> {
        let which = self.firsts.partition_point(|&first| first <= index);
        if index >= self.len || which == 0 {
            return Err(Error::Data(format!("there is no sample {index} of {}", self.len)));
        }
        let source = &self.sources[which - 1];
        source.read((index - self.firsts[which - 1]) * self.stride as u64, out)?;
        Ok(source)
    }
}
