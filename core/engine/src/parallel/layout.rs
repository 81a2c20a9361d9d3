//! How tensor-parallel ranks hold an activation.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// How the ranks of a group hold an activation and its gradient (DTensor's placements).
///
/// In configuration files `"replicate"` or `"shard(1)"`; negative dimensions count from the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Layout {
    /// Every rank holds the whole.
    Replicate,
    /// The dimension is cut into one chunk a rank.
    Shard(isize),
    /// Each rank holds a partial sum; the whole is the sum over the ranks. Within a layer only:
    /// between layers neither an activation nor its gradient is partial, and no plan can say so.
    Partial,
}

impl Layout {
    /// Cut along the sequence, dimension 1 of `[batch, time, ..]`.
    pub const SEQUENCE: Self = Self::Shard(1);
    /// Cut along the last dimension.
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
