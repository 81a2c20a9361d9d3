//! Options of full checkpoints.

use std::path::PathBuf;
use std::sync::Arc;

use candle_core::DType;

use super::super::weights::MAX_COMPANION;
use crate::{Error, Result};
use fulgurite_error::files::read_regular;

/// Decides by FQN whether a parameter is gathered.
pub type NameFilter = Arc<dyn Fn(&str) -> bool + Send + Sync>;

/// The choice of tensors to gather, and their dtype. Must be the same on every rank.
#[derive(Clone, Default)]
pub struct GatherOptions {
    /// The dtype that floating-point tensors of the model are converted to before they are sent;
    /// `None` keeps their dtypes. The optimizer's tensors are never converted.
    pub dtype: Option<DType>,
    /// Whether frozen parameters are left out.
    pub trainable_only: bool,
    /// Called with every parameter's FQN; rejected parameters are not gathered.
    pub filter: Option<NameFilter>,
}

impl GatherOptions {
    /// Sets the filter, such as `|fqn| fqn.contains("lora_")`.
    #[must_use]
    pub fn with_filter(self, filter: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        Self { filter: Some(Arc::new(filter)), ..self }
    }

    pub(super) fn wants(&self, fqn: &str, trainable: bool) -> bool {
        (trainable || !self.trainable_only) && self.filter.as_ref().is_none_or(|f| f(fqn))
    }
}

impl std::fmt::Debug for GatherOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GatherOptions")
            .field("dtype", &self.dtype)
            .field("trainable_only", &self.trainable_only)
            .field("filter", &self.filter.as_ref().map(|_| "…"))
            .finish()
    }
}

/// Options for writing a full checkpoint. Must be the same on every rank.
#[derive(Debug, Clone)]
pub struct FullOptions {
    /// Which tensors, and their dtype.
    pub gather: GatherOptions,
    /// Maximum bytes of tensors in a file; a larger tensor gets its own file. The default is 5 GB,
    /// as in Hugging Face's libraries.
    pub max_shard_bytes: u64,
    /// The model's `config.json`, for `transformers`. Rank 0's is written.
    pub config: Option<ModelConfig>,
}

impl Default for FullOptions {
    fn default() -> Self {
        Self { gather: GatherOptions::default(), max_shard_bytes: 5_000_000_000, config: None }
    }
}

/// A `config.json` for a full checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub enum ModelConfig {
    /// Its content.
    Json(serde_json::Value),
    /// A file that is copied.
    File(PathBuf),
}

impl ModelConfig {
    /// Its bytes.
    ///
    /// # Errors
    /// If the file cannot be read or is not JSON.
    pub(crate) fn bytes(&self) -> Result<Vec<u8>> {
        match self {
            Self::Json(value) => serde_json::to_vec_pretty(value)
                .map_err(|e| Error::other(format!("encoding config.json: {e}"))),
            Self::File(path) => {
                let bytes = read_regular(path, MAX_COMPANION)?;
                match serde_json::from_slice::<serde_json::Value>(&bytes) {
                    Ok(_) => Ok(bytes),
                    Err(e) => Err(Error::checkpoint(path, format!("is not JSON: {e}"))),
                }
            }
        }
    }
}

impl From<serde_json::Value> for ModelConfig {
    fn from(value: serde_json::Value) -> Self {
        Self::Json(value)
    }
}

impl From<PathBuf> for ModelConfig {
    fn from(path: PathBuf) -> Self {
        Self::File(path)
    }
}
