//! [`Generation`].

use fulgurite_error::{Error, Result};

use super::Sampling;

/// The options of a generation.
///
/// ```
/// use fulgurite_models::{Generation, Sampling};
///
/// let generation = Generation {
///     max_new_tokens: 20,
///     sampling: Sampling { temperature: 0.8, top_p: 0.95, ..Sampling::default() },
///     ..Generation::default()
/// };
/// assert!(generation.check().is_ok());
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Generation {
    /// The most tokens of an answer.
    pub max_new_tokens: usize,
    /// The choice of each token.
    pub sampling: Sampling,
    /// Answers to each prompt.
    pub samples: usize,
    /// The seed of the random numbers.
    pub seed: u64,
    /// Tokens that end an answer, which has them as its last token.
    pub end_tokens: Vec<u32>,
    /// Texts that end an answer, whose text ends before them. They need a tokenizer.
    pub stop: Vec<String>,
}

impl Default for Generation {
    /// 64 tokens, each the most likely one, one answer to a prompt.
    fn default() -> Self {
        Self {
            max_new_tokens: 64,
            sampling: Sampling::default(),
            samples: 1,
            seed: 0,
            end_tokens: Vec::new(),
            stop: Vec::new(),
        }
    }
}

impl Generation {
    /// Checks the options.
    ///
    /// # Errors
    /// Names the first that is wrong.
    pub fn check(&self) -> Result<()> {
        for (name, value) in [("max_new_tokens", self.max_new_tokens), ("samples", self.samples)] {
            if value == 0 {
                return Err(Error::Config(format!("`{name}`: must be at least 1, found 0")));
            }
        }
        if self.stop.iter().any(String::is_empty) {
            return Err(Error::Config(
                "`stop`: a text that ends an answer must not be empty".into(),
            ));
        }
        self.sampling.check()
    }
}
