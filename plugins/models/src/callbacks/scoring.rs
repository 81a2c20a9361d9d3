//! Code that callbacks share which score a model on the lines of a file.

use std::fmt::{Debug, Display};
use std::path::Path;

use candle_core::{Device, Tensor};
use fulgurite_data::Tokenizer;
use fulgurite_engine::execution::{read, transfer};
use fulgurite_engine::module::ForwardScope;
use fulgurite_error::files::read_regular;
use fulgurite_error::{Error, Result};
use fulgurite_trainer::fabric::Fabric;
use fulgurite_trainer::trainer::HookContext;
use serde::de::DeserializeOwned;

use crate::decoder::Decoder;

/// The largest file, in bytes.
const MAX_FILE: u64 = 1 << 30;
/// A target that losses leave out.
const IGNORED: i64 = -100;

/// An error of the callback `callback`.
pub(super) fn wrong(callback: &str, message: impl Display) -> Error {
    Error::Config(format!("`trainer.callbacks`, {callback}: {message}"))
}

/// The name in metrics: the given one, or the file's without its extension.
pub(super) fn name(given: Option<&str>, path: &Path) -> String {
    let stem = || path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
    given.map(str::to_owned).or_else(stem).unwrap_or_default()
}

/// Reads a file of JSON lines. `form` says what a line is, and `flaw` returns what is wrong with
/// one.
///
/// # Errors
/// If the file cannot be read, is empty, or has a wrong line.
pub(super) fn read_lines<L: DeserializeOwned>(
    callback: &str,
    path: &Path,
    form: &str,
    flaw: impl Fn(&L) -> Option<String>,
) -> Result<Vec<L>> {
    let bytes = read_regular(path, MAX_FILE).map_err(|error| wrong(callback, error))?;
    let text = String::from_utf8(bytes)
        .map_err(|_| wrong(callback, format!("{} is not UTF-8 text", path.display())))?;
    let mut lines = Vec::new();
    for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()) {
        let at =
            |what: String| wrong(callback, format!("{}, line {number} {what}", path.display()));
        let line: L = serde_json::from_str(line)
            .map_err(|error| at(format!("is no object with {form}: {error}")))?;
        match flaw(&line) {
            Some(flaw) => return Err(at(flaw)),
            None => lines.push(line),
        }
    }
    match lines.is_empty() {
        true => Err(wrong(callback, format!("{} has no questions", path.display()))),
        false => Ok(lines),
    }
}

/// Checks that all ranks have read the same lines. Collective.
///
/// # Errors
/// If not, or a peer fails.
pub(super) fn check_ranks(callback: &str, lines: &impl Debug, ctx: &HookContext) -> Result<()> {
    let digest = twox_hash::XxHash3_64::oneshot(format!("{lines:?}").as_bytes());
    let of_ranks = ctx.fabric().all_gather_object(&digest)?;
    if of_ranks.iter().any(|other| *other != digest) {
        return Err(wrong(
            callback,
            "the ranks read different questions; give all hosts the same file",
        ));
    }
    Ok(())
}

/// The tokens of a context and the text behind it.
#[derive(Debug, Clone)]
pub(super) struct Continuation {
    pub(super) ids: Vec<u32>,
    /// The number of the text's tokens that follow another.
    pub(super) count: usize,
}

impl Continuation {
    /// Tokenizes as `lm-eval`: spaces at the end of the context belong to the text.
    ///
    /// # Errors
    /// If the tokenizer cannot encode them.
    pub(super) fn new(context: &str, text: &str, tokenizer: &Tokenizer) -> Result<Self> {
        let trimmed = context.trim_end();
        let spaces = &context[trimmed.len()..];
        let start = || tokenizer.start_of_text().into_iter();
        let before = start().count() + tokenizer.encode(trimmed)?.len();
        let whole = tokenizer.encode(&format!("{trimmed}{spaces}{text}"))?;
        let ids: Vec<u32> = start().chain(whole).collect();
        let count = ids.len().saturating_sub(before.max(1));
        Ok(Self { ids, count })
    }

    /// Why the model cannot score it. `what` names the context with the text.
    pub(super) fn problem(&self, decoder: &Decoder, what: &str) -> Option<String> {
        if let Some(id) = self.ids.iter().find(|&&id| id as usize >= decoder.vocab_size()) {
            return Some(format!("has the token {id}, which the model lacks"));
        }
        // The last token is not an input.
        let most = decoder.max_positions();
        (self.ids.len() > most + 1).then(|| {
            format!("has {what} of {} tokens, and the model {most} positions", self.ids.len())
        })
    }
}

/// The log-probability of each text behind its context. Every data-parallel rank calls this alike,
/// and the ranks of a pipeline together.
///
/// # Errors
/// If the model cannot compute them.
pub(super) fn log_probabilities(
    decoder: &Decoder,
    continuations: &[Continuation],
    fabric: &Fabric,
) -> Result<Vec<f64>> {
    let device = fabric.device();
    // Ranks that share sequences in a training compute them whole here, all the same.
    let _scope = ForwardScope { context: None, ..ForwardScope::current() }.enter();
    let longest = continuations.iter().map(|one| one.ids.len()).max().unwrap_or(0);
    let (rows, time) = (continuations.len(), longest.saturating_sub(1).max(1));
    let (mut inputs, mut targets) = (Vec::new(), Vec::new());
    for (row, Continuation { ids, count }) in continuations.iter().enumerate() {
        inputs.extend_from_slice(&ids[..ids.len() - 1]);
        inputs.resize(time * (row + 1), ids[0]);
        let first = ids.len() - count;
        let target = |(i, id): (usize, &u32)| if i >= first { i64::from(*id) } else { IGNORED };
        targets.extend(ids.iter().enumerate().skip(1).map(target));
        targets.resize(time * (row + 1), IGNORED);
    }
    let send = |tensor: Tensor| transfer::to_device(&tensor, device, "questions");
    let inputs = send(Tensor::from_vec(inputs, (rows, time), &Device::Cpu)?)?;
    let targets = Tensor::from_vec(targets, (rows, time), &Device::Cpu)?;
    let sums = || sums_of(decoder, &inputs, &targets);
    let Some(pipeline) = fabric.pipeline()? else { return sums() };
    let of_last = pipeline.forward(|_| sums())?;
    pipeline.share(of_last.unwrap_or_else(|| vec![0.0; rows]))
}

/// The sum of the log-probabilities of each row's targets.
fn sums_of(decoder: &Decoder, inputs: &Tensor, targets: &Tensor) -> Result<Vec<f64>> {
    let hidden = decoder.hidden(inputs)?;
    let of_row = |row: usize| -> Result<Tensor> {
        let hidden = hidden.narrow(0, row, 1)?.contiguous()?;
        let loss = decoder.loss_of(&hidden, &targets.narrow(0, row, 1)?.contiguous()?)?;
        loss.sum_tensor()
    };
    let sums = (0..inputs.dim(0)?).map(of_row).collect::<Result<Vec<_>>>()?;
    let sums = read::vec1::<f64>(&Tensor::stack(&sums, 0)?, "questions")?;
    Ok(sums.into_iter().map(|sum| -sum).collect())
}
