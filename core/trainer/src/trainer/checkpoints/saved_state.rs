//! [`SavedState`].

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{Error, Result};

/// A callback's state in a checkpoint.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct CallbackState {
    pub(crate) key: String,
    pub(crate) state: SavedState,
}

/// The state that a module or a callback saves in a checkpoint besides weights: values by name.
///
/// ```
/// use fulgurite_core::trainer::SavedState;
///
/// let mut state = SavedState::default();
/// state.set("seen", &[1, 2, 3])?;
/// assert_eq!(state.get::<Vec<u64>>("seen")?, Some(vec![1, 2, 3]));
/// assert_eq!(state.get::<u64>("unknown")?, None);
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SavedState(Map<String, Value>);

impl SavedState {
    /// Sets a value. Numbers that are not finite are saved as null.
    ///
    /// # Errors
    /// If the value cannot be written as JSON.
    pub fn set(&mut self, name: &str, value: &(impl Serialize + ?Sized)) -> Result<()> {
        let value = serde_json::to_value(value)
            .map_err(|error| Error::other(format!("saving the state `{name}`: {error}")))?;
        self.0.insert(name.to_owned(), value);
        Ok(())
    }

    /// Returns a value, or `None` if the name is unknown.
    ///
    /// # Errors
    /// If the value is of another type.
    pub fn get<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>> {
        let Some(value) = self.0.get(name) else { return Ok(None) };
        let value = T::deserialize(value);
        value.map(Some).map_err(|error| Error::other(format!("the saved state `{name}`: {error}")))
    }

    /// Returns whether nothing is saved.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
