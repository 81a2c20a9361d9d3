//! [`GenerationObserver`].

/// Follows the answers of a [`Generator`](super::Generator) while they grow.
///
/// Ranks call it for their own prompts. Prompts and samples have the numbers of an
/// [`Answer`](super::Answer).
pub trait GenerationObserver {
    /// Gets the logits of the next token, f32 `[vocabulary]`, before the repetition penalty and the
    /// temperature. Under a pipeline called on ranks of the last stage alone.
    fn logits(&mut self, prompt: u64, sample: usize, logits: &[f32]) {
        let _ = (prompt, sample, logits);
    }

    /// Gets the chosen token, after its logits and before its text.
    fn token(&mut self, prompt: u64, sample: usize, token: u32) {
        let _ = (prompt, sample, token);
    }

    /// Gets a new piece of text, which is not empty. The end of a character and the beginning of a
    /// stop text are held back.
    fn text(&mut self, prompt: u64, sample: usize, piece: &str);

    /// Whether the generation should end without answers, asked before each token but the first.
    fn asks_to_end(&self) -> bool {
        false
    }
}

/// An observer of texts alone.
pub(crate) struct TextObserver<'a>(pub(crate) &'a mut dyn FnMut(u64, usize, &str));

impl GenerationObserver for TextObserver<'_> {
    fn text(&mut self, prompt: u64, sample: usize, piece: &str) {
        (self.0)(prompt, sample, piece);
    }
}
