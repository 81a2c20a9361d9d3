//! The names that files of another library have for a model's parameters.

use std::fmt::Debug;
use std::ops::Range;

/// The names that files of another library, such as `transformers`, have for a model's parameters.
/// Adapters and their patterns are translated by it. Other names are the model's own.
pub trait ForeignNames: Debug + Send + Sync {
    /// The path of the model without its head in a file. A file of that part alone lacks it.
    fn prefix(&self) -> &str;

    /// The parameters that the file's tensor is made of, in the order of their rows.
    fn parts(&self, tensor: &str) -> Vec<ForeignPart>;

    /// Patterns of the model's modules for a [pattern](super::pattern_matches) of the file's; empty
    /// if it names none that has another name.
    fn modules(&self, pattern: &str) -> Vec<String>;
}

/// A parameter that is a file's tensor or a part of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForeignPart {
    /// The parameter's FQN.
    pub parameter: String,
    /// The rows of the file's layer that the parameter has; `None` for all.
    pub rows: Option<Vec<Range<usize>>>,
    /// Whether the file's matrix is transposed.
    pub is_transposed: bool,
}
