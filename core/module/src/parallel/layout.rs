//! Layouts of activations over tensor-parallel ranks.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// The layout of an activation and its gradient over the ranks of a group (DTensor's placements).
///
/// In configuration files `"replicate"` or `"shard(1)"`; negative dimensions count from the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Layout {
    /// Every rank holds the whole.
    Replicate,
    /// Each rank holds one chunk of the dimension.
    Shard(isize),
    /// Each rank holds a partial sum, and the whole is the sum over the ranks. Only within a layer:
    /// between layers neither activations nor gradients are partial, and plans cannot name this
    /// layout.
    Partial,
}

impl Layout {
    /// Sharded along the sequence, dimension 1 of `[batch, time, ..]`.
    pub const SEQUENCE: Self = Self::Shard(1);
    /// Sharded along the last dimension.
    pub const LAST: Self = Self::Shard(-1);
}

impl std::fmt::Display for Layout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Replicate => f.write_str("replicate"),
            Self::Shard(dim) => write!(f, "shard({dim})"),
            Self::Partial => f.write_str("partial"),
        }
    }
}

impl From<Layout> for String {
    fn from(layout: Layout) -> Self {
        layout.to_string()
    }
}

impl TryFrom<String> for Layout {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl FromStr for Layout {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let dim = text.strip_prefix("shard(").and_then(|rest| rest.strip_suffix(')'));
        match (text, dim.map(|dim| dim.trim().parse())) {
            ("replicate", _) => Ok(Self::Replicate),
            (_, Some(Ok(dim))) => Ok(Self::Shard(dim)),
            _ => Err(Error::Config(format!(
                "`{text}` is not a layout; expected \"replicate\", \"shard(1)\" (the sequence) or \
                 \"shard(-1)\" (the last dimension)"
            ))),
        }
    }
}
