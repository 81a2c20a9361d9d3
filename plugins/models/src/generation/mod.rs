//! Generation: sequences continued token by token.
//!
//! [`Decoder::generate`](crate::Decoder::generate) continues prompts by the options of a
//! [`Generation`]. [`Sampling`] chooses tokens. Random numbers depend on the seed, the prompt, the
//! sample and the token's place alone, so the same tokens come on any mesh and in any batch.

mod answer;
mod beams;
mod generate;
mod observer;
mod options;
mod prompt_logits;
mod prompts;
mod sampling;
mod stop_tokens;
mod text;
mod writer;

pub use answer::{Answer, End};
pub use beams::BeamSearch;
pub(crate) use beams::Beams;
pub use generate::Generator;
pub use observer::GenerationObserver;
pub(crate) use observer::TextObserver;
pub use options::Generation;
pub use prompts::{PromptBatch, PromptSettings, Prompts, PromptsConfig};
pub use sampling::Sampling;
pub use stop_tokens::end_tokens;
pub use text::AnswerText;
pub use writer::{GenerationRanks, Prompt};
pub(crate) use writer::{NextLogits, Writer, whole_scope};
