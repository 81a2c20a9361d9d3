//! Plans: which style each layer gets.

use super::ParallelStyle;

/// One line of a plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanEntry {
    /// A pattern of module paths; `*` is one segment, or a part of one (see
    /// [`glob_match`](crate::module::glob_match)).
    pub pattern: String,
    /// What the layers get.
    pub style: ParallelStyle,
}

/// An ordered list of patterns and styles. Every pattern must match a layer, and no layer more than
/// one pattern.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    entries: Vec<PlanEntry>,
}

impl Plan {
    /// A plan that does nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// The plan with one more entry.
    #[must_use]
    pub fn with(mut self, pattern: impl Into<String>, style: impl Into<ParallelStyle>) -> Self {
        self.entries.push(PlanEntry { pattern: pattern.into(), style: style.into() });
        self
    }

    /// The entries, in order.
    pub fn entries(&self) -> &[PlanEntry] {
        &self.entries
    }
}

impl<P: Into<String>, S: Into<ParallelStyle>> FromIterator<(P, S)> for Plan {
    fn from_iter<I: IntoIterator<Item = (P, S)>>(entries: I) -> Self {
        entries.into_iter().fold(Self::new(), |plan, (pattern, style)| plan.with(pattern, style))
    }
}

/// A [`Plan`](crate::parallel::Plan) written down: `plan! { "blocks.*.up" => Colwise::default() }`.
#[macro_export]
macro_rules! plan {
    ($($pattern:expr => $style:expr),* $(,)?) => {
        $crate::parallel::Plan::new()$(.with($pattern, $style))*
    };
}
