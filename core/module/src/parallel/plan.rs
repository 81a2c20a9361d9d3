//! Plans: the style of each layer.

use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Serialize};

use super::ParallelStyle;

/// One line of a plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanEntry {
    /// A pattern of module paths; `*` is one segment, or a part of one (see
    /// [`glob_match`](crate::module::glob_match)).
    pub pattern: String,
    /// The style of matching layers.
    pub style: ParallelStyle,
}

/// An ordered list of patterns and styles. Every pattern must match a layer, and no layer may match
/// two patterns, so the order has no effect on a model.
///
/// In configuration files a table:
///
/// ```
/// use fulgurite_core::parallel::{Colwise, Layout, Plan, Rowwise};
/// use fulgurite_core::{config, plan};
///
/// let table = toml::toml! {
///     "layers.*.mlp.up_proj" = "colwise"
///     "layers.*.mlp.down_proj" = { type = "rowwise", output = "shard(1)" }
/// };
/// let plan: Plan = config::parse(table)?;
/// let style = plan.style("layers.*.mlp.down_proj");
/// assert_eq!(style, Some(Rowwise { output: Layout::SEQUENCE, ..Rowwise::default() }.into()));
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    entries: Vec<PlanEntry>,
}

impl Plan {
    /// An empty plan.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an entry.
    #[must_use]
    pub fn with(mut self, pattern: impl Into<String>, style: impl Into<ParallelStyle>) -> Self {
        self.entries.push(PlanEntry { pattern: pattern.into(), style: style.into() });
        self
    }

    /// The entries, in order.
    pub fn entries(&self) -> &[PlanEntry] {
        &self.entries
    }

    /// The style of the first entry with exactly this pattern.
    pub fn style(&self, pattern: &str) -> Option<ParallelStyle> {
        self.entries.iter().find(|entry| entry.pattern == pattern).map(|entry| entry.style)
    }
}

impl<P: Into<String>, S: Into<ParallelStyle>> FromIterator<(P, S)> for Plan {
    fn from_iter<I: IntoIterator<Item = (P, S)>>(entries: I) -> Self {
        entries.into_iter().fold(Self::new(), |plan, (pattern, style)| plan.with(pattern, style))
    }
}

impl Serialize for Plan {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.entries.iter().map(|entry| (&entry.pattern, &entry.style)))
    }
}

impl<'de> Deserialize<'de> for Plan {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;

        impl<'de> Visitor<'de> for Entries {
            type Value = Plan;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a table of patterns and styles")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Plan, A::Error> {
                let mut plan = Plan::new();
                while let Some((pattern, style)) = map.next_entry::<String, ParallelStyle>()? {
                    if plan.style(&pattern).is_some() {
                        let message = format!("the plan has the pattern `{pattern}` twice");
                        return Err(A::Error::custom(message));
                    }
                    plan = plan.with(pattern, style);
                }
                Ok(plan)
            }
        }

        deserializer.deserialize_map(Entries)
    }
}

/// Makes a [`Plan`](crate::parallel::Plan): `plan! { "blocks.*.up" => Colwise::default() }`.
#[macro_export]
macro_rules! plan {
    ($($pattern:expr => $style:expr),* $(,)?) => {
        $crate::parallel::Plan::new()$(.with($pattern, $style))*
    };
}
