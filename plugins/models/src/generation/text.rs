//! [`AnswerText`].

use fulgurite_data::Tokenizer;
use fulgurite_error::Result;

/// Tokens of the prompt that the text of an answer is read after, for the space between them.
const CONTEXT: usize = 8;

/// The text of an answer while its tokens come.
///
/// A character whose bytes have not all come, and the beginning of a stop text, are held back.
///
/// ```
/// use fulgurite_data::Tokenizer;
/// use fulgurite_models::AnswerText;
///
/// let (bytes, stop) = (Tokenizer::bytes(), ["END".to_owned()]);
/// let mut text = AnswerText::new(&bytes, &[97], &stop);
/// let pieces: Vec<String> = "ñxEEND."
///     .bytes()
///     .map(|byte| text.push(u32::from(byte)))
///     .collect::<Result<_, _>>()?;
/// assert_eq!(pieces, ["", "ñ", "x", "", "E", "", "", ""]);
/// assert!(text.is_stopped());
/// assert_eq!((text.finish()?, text.text()), (String::new(), "ñxE"));
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct AnswerText<'a> {
    tokenizer: &'a Tokenizer,
    stop: &'a [String],
    /// The end of the prompt, and the answer.
    ids: Vec<u32>,
    prompt: usize,
    text: String,
    shown: usize,
    is_stopped: bool,
}

impl<'a> AnswerText<'a> {
    /// The text of an answer to `prompt`, which ends before any of the texts `stop`.
    pub fn new(tokenizer: &'a Tokenizer, prompt: &[u32], stop: &'a [String]) -> Self {
        let ids = prompt[prompt.len().saturating_sub(CONTEXT)..].to_vec();
        let prompt = ids.len();
        let (text, shown, is_stopped) = (String::new(), 0, false);
        Self { tokenizer, stop, ids, prompt, text, shown, is_stopped }
    }

    /// Adds a token, and returns the text to show after the text that was returned before.
    ///
    /// # Errors
    /// If the tokenizer cannot decode the answer.
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        if self.is_stopped {
            return Ok(String::new());
        }
        self.text = self.decode()?;
        let found = self.stop.iter().filter_map(|stop| self.text.find(stop.as_str())).min();
        if let Some(at) = found {
            self.is_stopped = true;
            self.text.truncate(at);
            return Ok(self.show(at));
        }
        let whole = self.text.trim_end_matches(char::REPLACEMENT_CHARACTER).len();
        let begun = |stop: &String| {
            let ends =
                |n: &usize| stop.is_char_boundary(*n) && self.text[..whole].ends_with(&stop[..*n]);
            (1..stop.len()).rev().find(ends).unwrap_or(0)
        };
        let held = self.stop.iter().map(begun).max().unwrap_or(0);
        Ok(self.show(whole - held))
    }

    /// Returns the text that was held back, at the end of the answer.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub fn finish(&mut self) -> Result<String> {
        Ok(self.show(self.text.len()))
    }

    /// The text of the answer so far.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether the answer has reached a stop text.
    pub fn is_stopped(&self) -> bool {
        self.is_stopped
    }

    /// The text of the answer, as it follows the prompt.
    fn decode(&self) -> Result<String> {
        let (prompt, answer) = self.ids.split_at(self.prompt);
        let before = self.tokenizer.decode(prompt)?;
        let all = self.tokenizer.decode(&self.ids)?;
        match all.strip_prefix(&before) {
            Some(text) if !before.is_empty() => Ok(text.to_owned()),
            _ => self.tokenizer.decode(answer),
        }
    }

    fn show(&mut self, end: usize) -> String {
        // A tokenizer may change the end of a text once more tokens follow.
        match self.text.get(self.shown..end) {
            Some(piece) => {
                let piece = piece.to_owned();
                self.shown = end;
                piece
            }
            None => String::new(),
        }
    }
}
