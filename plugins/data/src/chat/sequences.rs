//! Tokenized answers of rows: limits of their length, and batches of them.

use candle_core::{Device, Tensor};
use fulgurite_engine::data::SourceReport;
use fulgurite_engine::execution::transfer;
use fulgurite_error::{Error, Result};

use super::config::TooLong;
use super::encode::Encoded;
use super::preference_config::PreferenceDataConfig;
use crate::config::OnError;
use crate::rows::Place;

/// A target that losses leave out.
const IGNORED: i64 = -100;

/// A row's sequences of prompt and answer.
pub(super) trait Sequences {
    /// One sequence, or two that must differ.
    fn sequences(&mut self) -> &mut [Encoded];

    /// The place of the row.
    fn place(&self) -> &Place;
}

/// Applies `on_error` and `too_long` to the rows of a key.
///
/// # Errors
/// If a row is wrong or too long and the configuration does not skip it, or no row is left.
pub(super) fn limited<S: Sequences>(
    key: &str,
    config: &PreferenceDataConfig,
    rows: Vec<Result<S>>,
    report: &mut SourceReport,
    warnings: &mut Vec<String>,
) -> Result<Vec<S>> {
    let (mut samples, mut cut, count) = (Vec::new(), 0, rows.len());
    for row in rows {
        let mut sample = match row {
            Ok(sample) => sample,
            Err(error @ Error::Data(_)) if config.on_error == OnError::Skip => {
                report.fault("not learned from", &error);
                continue;
            }
            Err(error) => return Err(error),
        };
        let limit = config.seq_len;
        let longest = sample.sequences().iter().map(|answer| answer.ids.len()).max().unwrap_or(0);
        if longest > limit {
            let what = format!("has {longest} tokens, and data.seq_len is {limit}");
            let place = sample.place();
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
                    sample.sequences().iter_mut().for_each(|answer| answer.cut(limit));
                }
            }
        }
        let all = sample.sequences();
        let lack = match all {
            [one] => (!one.teaches()).then_some("without an answer within data.seq_len"),
            all => (!all.iter().all(Encoded::teaches)
                || all.windows(2).any(|two| two[0] == two[1]))
            .then_some("with answers that do not differ within data.seq_len"),
        };
        match lack {
            Some(lack) => report.leave_out(lack, sample.place()),
            None => samples.push(sample),
        }
    }
    if cut > 0 {
        report.count("cut to data.seq_len", cut);
        warnings.push(format!(
            "{key}: answers of {cut} of {count} rows are cut, for they have more than data.seq_len = {} tokens \
             (data.too_long)",
            config.seq_len
        ));
    }
    match samples.is_empty() {
        true => Err(Error::Data(format!("{key} has no preference to learn from, of {count} rows"))),
        false => Ok(samples),
    }
}

/// Returns sequences side by side, `[sequences, time]` each: the inputs (u32) and the next token at
/// each learned position (i64, and -100 elsewhere). `time` is a multiple of `multiple`.
///
/// # Errors
/// If the device lacks the memory.
pub(super) fn padded(
    sequences: &[&Encoded],
    multiple: usize,
    padding: u32,
    device: &Device,
) -> Result<(Tensor, Tensor)> {
    let longest = sequences.iter().map(|of| of.ids.len() - 1).max().unwrap_or(1);
    let time = longest.next_multiple_of(multiple);
    let (mut inputs, mut targets) = (Vec::new(), Vec::new());
    for (row, Encoded { ids, learned }) in sequences.iter().enumerate() {
        inputs.extend_from_slice(&ids[..ids.len() - 1]);
        inputs.resize(time * (row + 1), padding);
        let next = ids.iter().zip(learned).skip(1);
        targets.extend(next.map(|(&id, &learned)| if learned { id.into() } else { IGNORED }));
        targets.resize(time * (row + 1), IGNORED);
    }
    let shape = (sequences.len(), time);
    let send = |tensor: Tensor| transfer::to_device(&tensor, device, "batch");
    Ok((
        send(Tensor::from_vec(inputs, shape, &Device::Cpu)?)?,
        send(Tensor::from_vec(targets, shape, &Device::Cpu)?)?,
    ))
}
