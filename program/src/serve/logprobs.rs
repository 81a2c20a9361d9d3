//! Log-probabilities of tokens.

use std::cmp::Ordering;

use fulgurite::data::Tokenizer;
use fulgurite_error::Result;
use serde_json::{Map, Value, json};

/// Tokens before a token that its text is read after, for the space between them.
const CONTEXT: usize = 8;

/// The value in place of minus infinity, which JSON lacks.
const LEAST: f32 = -9999.0;

/// The log-softmax of some logits, in f32.
pub(super) struct LogSoftmax<'a> {
    logits: &'a [f32],
    largest: f32,
    log_sum: f32,
}

impl<'a> LogSoftmax<'a> {
    pub(super) fn new(logits: &'a [f32]) -> Self {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|logit| f64::from(logit - largest).exp()).sum();
        Self { logits, largest, log_sum: sum.ln() as f32 }
    }

    pub(super) fn of(&self, token: u32) -> f32 {
        (self.logits[token as usize] - self.largest - self.log_sum).max(LEAST)
    }

    /// The `count` most likely tokens, in descending order. Of equal ones the first counts.
    pub(super) fn top(&self, count: usize) -> Vec<(u32, f32)> {
        let order = |a: &u32, b: &u32| {
            let logit = |token: &u32| self.logits[*token as usize];
            logit(b).partial_cmp(&logit(a)).unwrap_or(Ordering::Equal).then(a.cmp(b))
        };
        let mut tokens: Vec<u32> = (0..).take(self.logits.len()).collect();
        if count < tokens.len() {
            tokens.select_nth_unstable_by(count, order);
            tokens.truncate(count);
        }
        tokens.sort_unstable_by(order);
        tokens.into_iter().map(|token| (token, self.of(token))).collect()
    }
}

/// A token of a text, with its log-probability.
#[derive(Debug, Clone)]
pub(super) struct ScoredToken {
    id: u32,
    text: String,
    /// Characters of the text before the token.
    pub(super) offset: usize,
    /// The log-probability, and the most likely tokens; `None` for the first of a prompt.
    score: Option<(f32, Vec<(u32, f32)>)>,
}

/// The text of each token of a sequence, and its place.
pub(super) struct TokenTexts<'a> {
    tokenizer: Option<&'a Tokenizer>,
    ids: Vec<u32>,
    /// The first token of the last text that was complete, and the first after it.
    complete: (usize, usize),
    /// Characters before the next token's text.
    pub(super) offset: usize,
}

impl<'a> TokenTexts<'a> {
    /// The tokens after `context`, whose text begins at `offset`.
    pub(super) fn after(context: &[u32], offset: usize, tokenizer: Option<&'a Tokenizer>) -> Self {
        let ids = context[context.len().saturating_sub(CONTEXT)..].to_vec();
        let complete = (0, ids.len());
        Self { tokenizer, ids, complete, offset }
    }

    /// Adds a token.
    pub(super) fn push(
        &mut self,
        id: u32,
        score: Option<(f32, Vec<(u32, f32)>)>,
    ) -> Result<ScoredToken> {
        self.ids.push(id);
        let offset = self.offset;
        let Some(tokenizer) = self.tokenizer else {
            let text = name(id);
            self.offset += text.len();
            return Ok(ScoredToken { id, text, offset, score });
        };
        let near = &self.ids[self.ids.len().saturating_sub(CONTEXT + 1)..];
        let text = tokenizer.show(near, near.len() - 1..near.len())?;
        // A character may need several tokens.
        let (start, end) = self.complete;
        let before = tokenizer.decode(&self.ids[start..end])?;
        let whole = tokenizer.decode(&self.ids[start..])?;
        if !whole.ends_with(char::REPLACEMENT_CHARACTER) || self.ids.len() - end > CONTEXT {
            let more = whole.chars().count().saturating_sub(before.chars().count());
            self.offset += more;
            self.complete = (end, self.ids.len());
        }
        Ok(ScoredToken { id, text, offset, score })
    }
}

/// The name of a token whose text is unknown or ambiguous.
pub(super) fn name(id: u32) -> String {
    format!("<{id}>")
}

/// The text of a token alone.
fn alone(id: u32, tokenizer: Option<&Tokenizer>) -> Result<String> {
    match tokenizer {
        None => Ok(name(id)),
        Some(tokenizer) => tokenizer.show(&[id], 0..1),
    }
}

/// The object `logprobs` of a completion.
pub(super) fn of_completion(
    tokens: &[ScoredToken],
    tokenizer: Option<&Tokenizer>,
) -> Result<Value> {
    let top = |token: &ScoredToken| -> Result<Value> {
        let Some((own, top)) = &token.score else {
            return Ok(Value::Null);
        };
        let mut named = Map::from_iter([(token.text.clone(), json!(own))]);
        for (id, value) in top.iter().filter(|(id, _)| *id != token.id) {
            let text = alone(*id, tokenizer)?;
            let text = if named.contains_key(&text) { name(*id) } else { text };
            named.insert(text, json!(value));
        }
        Ok(Value::Object(named))
    };
    let top: Vec<Value> = tokens.iter().map(top).collect::<Result<_>>()?;
    let each = |value: fn(&ScoredToken) -> Value| tokens.iter().map(value).collect::<Value>();
    Ok(json!({
        "tokens": each(|token| token.text.clone().into()),
        "token_logprobs": each(|token| json!(token.score.as_ref().map(|(own, _)| own))),
        "top_logprobs": top,
        "text_offset": each(|token| token.offset.into()),
    }))
}

/// The object `logprobs` of a chat.
pub(super) fn of_chat(tokens: &[ScoredToken], tokenizer: Option<&Tokenizer>) -> Result<Value> {
    let entry = |text: &str, value: f32| {
        // A part of a character has no text of its own.
        let bytes = (!text.contains(char::REPLACEMENT_CHARACTER)).then_some(text.as_bytes());
        json!({ "token": text, "logprob": value, "bytes": bytes })
    };
    let mut content = Vec::new();
    for token in tokens {
        let Some((own, top)) = &token.score else {
            continue;
        };
        let mut object = entry(&token.text, *own);
        let top = top.iter().map(|(id, value)| Ok(entry(&alone(*id, tokenizer)?, *value)));
        object["top_logprobs"] = top.collect::<Result<Vec<_>>>()?.into();
        content.push(object);
    }
    Ok(json!({ "content": content }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_softmax_equals_its_definition() {
        let logits = [0.5f32, 2.0, -1.0, 2.0, f32::NEG_INFINITY];
        let found = LogSoftmax::new(&logits);
        let sum: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
        for (token, logit) in (0..4).zip(logits) {
            let expected = f64::from(logit) - sum.ln();
            assert!((f64::from(found.of(token)) - expected).abs() < 1e-6, "{token}");
        }
        assert_eq!(found.of(4), -9999.0);
        let top = |count| found.top(count).into_iter().map(|(id, _)| id).collect::<Vec<_>>();
        assert_eq!(top(2), [1, 3]);
        assert_eq!(top(9), [1, 3, 0, 2, 4]);
        assert!(top(0).is_empty());
    }

    #[test]
    fn offsets_count_whole_characters() {
        let bytes = Tokenizer::bytes();
        let mut texts = TokenTexts::after(b"x".map(u32::from).as_slice(), 3, Some(&bytes));
        let offsets: Vec<usize> =
            "añ✓b".bytes().map(|byte| texts.push(byte.into(), None).unwrap().offset).collect();
        assert_eq!(offsets, [3, 4, 4, 5, 5, 5, 6]);
        let mut unnamed = TokenTexts::after(&[], 0, None);
        let offsets = [7, 11, 3].map(|id| unnamed.push(id, None).unwrap().offset);
        assert_eq!(offsets, [0, 3, 7]);
    }
}
