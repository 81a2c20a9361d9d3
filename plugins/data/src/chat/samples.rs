//! Reading and tokenizing the conversations of one key.

use std::hash::Hasher as _;

use fulgurite_engine::data::SourceReport;
use fulgurite_error::{Error, Result};
use minijinja::Value;
use rayon::prelude::*;
use twox_hash::XxHash3_64;

use super::config::{ChatDataConfig, TooLong};
use super::conversation::{COLUMNS, Conversation};
use super::encode::{ChatEncoder, Encoded, Text};
use crate::TokenDtype;
use crate::config::{OnError, Paths};
use crate::rows::{self, Column, Place, Row};
use crate::token_cache::{CacheKey, Cached, TokenCache};

/// A conversation with its place in the data.
#[derive(Debug, Clone)]
pub(super) struct Sample {
    pub(super) encoded: Encoded,
    pub(super) place: Place,
}

impl Sample {
    /// Bytes of memory.
    pub(super) fn bytes(&self) -> u64 {
        (size_of::<Self>() + self.encoded.ids.len() * 5) as u64
    }

    pub(super) fn hash(&self, hasher: &mut XxHash3_64) {
        hasher.write_u64(self.encoded.ids.len() as u64);
        self.encoded.ids.iter().for_each(|id| hasher.write_u32(*id));
        self.encoded.learned.iter().for_each(|learned| hasher.write_u8(u8::from(*learned)));
    }
}

/// The conversations of one key.
pub(super) struct Samples {
    pub(super) samples: Vec<Sample>,
    /// Number of rows. A preview tokenizes some of them.
    pub(super) rows: usize,
    /// Warnings for the user.
    pub(super) warnings: Vec<String>,
}

/// Reads the conversations of files, and tokenizes at most `most` of them.
///
/// # Errors
/// The errors of rows with `on_error = "error"`, and of files and the tokenizer.
pub(super) fn read(
    (key, paths): (&str, &Paths),
    config: &ChatDataConfig,
    encoder: &ChatEncoder,
    most: usize,
    report: &mut SourceReport,
) -> Result<Samples> {
    let columns =
        COLUMNS.map(|name| Column { key: "a column of conversations", name: name.into() });
    let rows: Vec<Row<Value>> = rows::read(key, paths.as_slice(), &columns, 0, report)?;
    let count = rows.len();
    let rendered: Vec<(Place, Result<Text>)> = rows
        .into_par_iter()
        .take(most)
        .map(|row| {
            let values: Vec<Value> =
                row.values.into_iter().map(|value| value.unwrap_or(Value::UNDEFINED)).collect();
            let text = Conversation::of(&row.place, &values)
                .and_then(|conversation| encoder.render(&row.place, conversation));
            (row.place, text)
        })
        .collect();
    let mut texts = Vec::new();
    for (place, text) in rendered {
        match text {
            Ok(text) => texts.push((place, text)),
            Err(error @ Error::Data(_)) if config.on_error == OnError::Skip => {
                report.fault("not learned from", &error);
            }
            Err(error) => return Err(error),
        }
    }
    let (encoded, not_kept) = encode(config, encoder, &texts, most == usize::MAX)?;
    let mut warnings: Vec<String> = not_kept
        .map(|why| {
            format!("{key}: ids are not kept in a file, but in the memory of each rank: {why} (data.cache_dir)")
        })
        .into_iter()
        .collect();
    let (mut samples, mut cut) = (Vec::new(), 0);
    for ((place, _), mut encoded) in texts.into_iter().zip(encoded) {
        let (len, limit) = (encoded.ids.len(), config.seq_len);
        if len > limit {
            let what = format!("has {len} tokens, and data.seq_len is {limit}");
            match config.too_long {
                TooLong::Error => {
                    return Err(place.wrong(format!(
                        "{what}; raise it, or set data.too_long to \"cut\" or \"skip\""
                    )));
                }
                TooLong::Skip => {
                    report.leave_out("longer than data.seq_len", format_args!("{place} {what}"));
                    continue;
                }
                TooLong::Cut => {
                    cut += 1;
                    encoded.cut(limit);
                }
            }
        }
        if !encoded.teaches() {
            report.leave_out("with the answer behind data.seq_len", &place);
            continue;
        }
        samples.push(Sample { encoded, place });
    }
    if cut > 0 {
        report.count("cut to data.seq_len", cut);
        warnings.push(format!(
            "{key}: the ends of {cut} of {count} conversations are left out, for they have more than data.seq_len = {} \
             tokens (data.too_long)",
            config.seq_len
        ));
    }
    let learned =
        |sample: &Sample| sample.encoded.learned.iter().filter(|learned| **learned).count();
    report.count("tokens", samples.iter().map(|sample| sample.encoded.ids.len() as u64).sum());
    report.count("tokens of answers", samples.iter().map(|sample| learned(sample) as u64).sum());
    if samples.is_empty() {
        return Err(Error::Data(format!(
            "{key} has no conversation to learn from, of {count} rows; `fulgurite data inspect` shows what is left out"
        )));
    }
    Ok(Samples { samples, rows: count, warnings })
}

/// Tokenizes texts, or reads their ids from the cache. Returns also the reason for not caching
/// them.
fn encode(
    config: &ChatDataConfig,
    encoder: &ChatEncoder,
    texts: &[(Place, Text)],
    whole: bool,
) -> Result<(Vec<Encoded>, Option<String>)> {
    let tokenize = || -> Result<Vec<Encoded>> {
        texts.par_iter().map(|(_, text)| encoder.encode(text)).collect()
    };
    let identity = encoder.tokenizer.identity().filter(|_| whole);
    let (Some(identity), Some(cache)) = (identity, TokenCache::in_dir(&config.cache_dir)) else {
        return Ok((tokenize()?, None));
    };
    let mut key = CacheKey::new(&format!("conversations {identity}"));
    for (_, text) in texts {
        key.add_document(&text.text);
        key.add_document(&format!("{:?} {}", text.learned, text.is_plain));
    }
    if !cache.keeps(key.bytes) {
        return Ok((tokenize()?, None));
    }
    let cached = cache.get(&key, TokenDtype::U32, &mut |writer| {
        for encoded in tokenize()? {
            let tokens = encoded.ids.iter().zip(&encoded.learned);
            let mut words = vec![encoded.ids.len() as u32];
            words.extend(tokens.map(|(id, learned)| id << 1 | u32::from(*learned)));
            writer.push(&words)?;
        }
        Ok(())
    })?;
    let file = match cached {
        Cached::Ids(file, _) => file,
        Cached::Not(why) => return Ok((tokenize()?, Some(why))),
    };
    let mut words = vec![0; file.len() as usize];
    file.read(0, &mut words)?;
    let mut all = Vec::with_capacity(texts.len());
    let mut rest = &*words;
    while let Some((len, behind)) = rest.split_first() {
        let Some((tokens, behind)) = behind.split_at_checked(*len as usize) else { break };
        all.push(Encoded {
            ids: tokens.iter().map(|word| word >> 1).collect(),
            learned: tokens.iter().map(|word| word & 1 == 1).collect(),
        });
        rest = behind;
    }
    Ok((all, None))
}
