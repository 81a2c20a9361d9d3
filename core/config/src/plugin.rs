//! Values that select a plugin: `"name"`, or `{ type = "name", option = … }`.
//!
//! A field can have one of two types. A [`PluginValue`] keeps name and options, and is built later.
//! A `Box<dyn Trait>` is built while the configuration is read, with this module's
//! `deserialize_with` function:
//!
//! ```
//! use fulgurite_core::config::{self, plugin};
//! use serde::{Deserialize, Serialize};
//!
//! #[typetag::serde(tag = "type")]
//! trait Lamp: std::fmt::Debug {}
//! fulgurite_core::plugin_kind!(dyn Lamp, "lamp", "lamps.hall");
//!
//! #[derive(Debug, Serialize, Deserialize)]
//! struct Bulb { watts: u32 }
//! #[typetag::serde(name = "bulb")]
//! impl Lamp for Bulb {}
//! fulgurite_core::register_plugin!("lamp", "bulb", "a bulb", "");
//!
//! #[derive(Debug, Deserialize)]
//! struct Lamps {
//!     #[serde(deserialize_with = "plugin::deserialize")]
//!     hall: Box<dyn Lamp>,
//! }
//!
//! let lamps: Lamps = config::parse(toml::toml! { hall = { type = "bulb", watts = 60 } })?;
//! let error = config::parse::<Lamps>(toml::toml! { hall = "candle" }).unwrap_err().to_string();
//! assert!(error.starts_with("`hall`: unknown lamp `candle`; available: bulb."), "{error}");
//! # Ok::<(), fulgurite_core::Error>(())
//! ```

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::{MapAccessDeserializer, MapDeserializer};
use serde::de::{DeserializeOwned, Deserializer, Error as _, IntoDeserializer, MapAccess, Visitor};
use serde::ser::{SerializeMap, Serializer};
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use super::deserializer::{deserialize as deserialize_value, parse_at};
use super::layers::to_table;
use super::problem::Problem;
use crate::registry;
use crate::{Error, Result};

/// A plugin's name and options, as written in the configuration.
///
/// ```
/// # use fulgurite_core::config::PluginValue;
/// # #[derive(serde::Deserialize)] struct Config { strategy: PluginValue }
/// let short: Config = toml::from_str("strategy = 'fsdp'").unwrap();
/// let long: Config = toml::from_str("strategy = { type = 'fsdp' }").unwrap();
/// assert_eq!(short.strategy, long.strategy);
/// assert_eq!(short.strategy, PluginValue::new("fsdp"));
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct PluginValue {
    /// The `type`.
    pub name: String,
    /// All other keys.
    pub options: Table,
}

impl PluginValue {
    /// Selects the plugin of this name with its default options.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), options: Table::new() }
    }

    /// Sets an option.
    pub fn with(mut self, key: impl Into<String>, value: impl Into<Value>) -> Self {
        self.options.insert(key.into(), value.into());
        self
    }

    /// Returns name and options as one table, with the name under `type`.
    pub fn to_table(&self) -> Table {
        let mut table = self.options.clone();
        table.insert("type".to_owned(), Value::String(self.name.clone()));
        table
    }

    /// Builds the plugin's configuration.
    ///
    /// `T` is the `Box<dyn Trait>` of a typetag trait of this [`kind`](registry::kind). `path` is
    /// the key of this value in the configuration, for messages.
    ///
    /// # Errors
    /// [`Error::UnknownPlugin`] if no linked crate provides the plugin; [`Error::Config`] with the
    /// full path for a wrong option.
    pub fn build<T: DeserializeOwned>(&self, kind: &'static str, path: &str) -> Result<T> {
        registry::require(kind, &self.name)?;
        parse_at(path, self.to_table())
    }

    /// Checks that the plugin is linked and takes these options.
    ///
    /// `kind` and `path` are as in [`build`](Self::build).
    ///
    /// # Errors
    /// As [`build`](Self::build).
    pub fn check(&self, kind: &'static str, path: &str) -> Result<()> {
        registry::require(kind, &self.name)?;
        match kind_descriptor(kind) {
            Some(kind) => (kind.options)(self, path).map(drop),
            None => Ok(()),
        }
    }
}

impl From<&str> for PluginValue {
    fn from(name: &str) -> Self {
        Self::new(name)
    }
}

impl Serialize for PluginValue {
    /// Writes a string if there are no options, else a table with `type` first.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.options.is_empty() {
            return serializer.serialize_str(&self.name);
        }
        let mut map = serializer.serialize_map(Some(1 + self.options.len()))?;
        map.serialize_entry("type", &self.name)?;
        for (key, value) in &self.options {
            map.serialize_entry(key, value)?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for PluginValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NameOrTable;

        impl<'de> Visitor<'de> for NameOrTable {
            type Value = PluginValue;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str(EXPECTING)
            }

            fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<PluginValue, E> {
                Ok(PluginValue::new(name))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<PluginValue, A::Error> {
                let mut name = None;
                let mut options = Table::new();
                while let Some(key) = map.next_key::<String>()? {
                    if key == "type" {
                        name = Some(map.next_value()?);
                    } else {
                        options.insert(key, map.next_value()?);
                    }
                }
                let name = name.ok_or_else(|| A::Error::missing_field("type"))?;
                Ok(PluginValue { name, options })
            }
        }

        deserializer.deserialize_any(NameOrTable)
    }
}

const EXPECTING: &str = "a name or a table with a `type`";

/// The trait object of a kind of plugin.
///
/// [`plugin_kind!`](crate::plugin_kind) implements it, beside the trait.
pub trait PluginKind {
    /// The kind, such as one of [`registry::kind`].
    const KIND: &'static str;
}

/// A kind of plugin, as [`plugin_kind!`](crate::plugin_kind) registers it.
#[derive(Debug, Clone, Copy)]
pub struct KindDescriptor {
    /// The kind, such as one of [`registry::kind`].
    pub kind: &'static str,
    /// The configuration key that selects a plugin of this kind.
    pub key: &'static str,
    /// Returns all options of the selected plugin, with defaults where the value leaves them out.
    /// Fails as [`PluginValue::build`] with the same path.
    pub options: fn(&PluginValue, &str) -> Result<Table>,
    /// Returns the names of all options of a plugin, with or without defaults; `None` if unknown.
    pub option_names: fn(&str) -> Option<Vec<String>>,
}

inventory::collect!(KindDescriptor);

/// Returns the descriptor of a kind; `None` if no linked crate declares it.
pub fn kind_descriptor(kind: &str) -> Option<&'static KindDescriptor> {
    inventory::iter::<KindDescriptor>().find(|descriptor| descriptor.kind == kind)
}

/// Returns all kinds that linked crates declare.
pub fn kind_descriptors() -> impl Iterator<Item = &'static KindDescriptor> {
    inventory::iter::<KindDescriptor>()
}

/// [`KindDescriptor::options`] of the kind whose trait is `T`.
#[doc(hidden)]
pub fn options<T>(value: &PluginValue, path: &str) -> Result<Table>
where
    T: ?Sized + PluginKind,
    Box<T>: DeserializeOwned + Serialize,
{
    let built: Box<T> = value.build(T::KIND, path)?;
    let mut options = to_table(&built)?;
    options.remove("type");
    Ok(options)
}

/// [`KindDescriptor::option_names`] of the kind whose trait is `T`.
#[doc(hidden)]
pub fn option_names<T>(name: &str) -> Option<Vec<String>>
where
    T: ?Sized + PluginKind,
    Box<T>: DeserializeOwned,
{
    // The error about the unknown key `?` lists the known keys.
    let value = PluginValue::new(name).with("?", true);
    match deserialize_value::<Box<T>>(Vec::new(), &Value::Table(value.to_table())) {
        Err((_, Problem::UnknownKey { expected, .. })) => Some(expected),
        _ => None,
    }
}

/// Declares a kind of plugin beside its trait, a typetag trait with `tag = "type"`.
///
/// An example is `plugin_kind!(dyn LoggerConfig, "logger", "trainer.loggers")`. The last argument
/// is the configuration key that selects a plugin of the kind.
#[macro_export]
macro_rules! plugin_kind {
    ($ty:ty, $kind:expr, $key:literal) => {
        impl $crate::PluginKind for $ty {
            const KIND: &'static str = $kind;
        }

        $crate::__private::inventory::submit! {
            $crate::plugin::KindDescriptor {
                kind: $kind,
                key: $key,
                options: $crate::plugin::options::<$ty>,
                option_names: $crate::plugin::option_names::<$ty>,
            }
        }
    };
}

/// Reads a field `Box<dyn Trait>` from a name or a table, looking the name up in the registry
/// first.
///
/// Use it as `#[serde(deserialize_with = "plugin::deserialize")]`.
///
/// # Errors
/// The text of [`Error::UnknownPlugin`], or the problem with the options.
pub fn deserialize<'de, D, T>(deserializer: D) -> Result<Box<T>, D::Error>
where
    D: Deserializer<'de>,
    T: ?Sized + PluginKind,
    Box<T>: DeserializeOwned,
{
    deserializer.deserialize_any(PluginVisitor(PhantomData))
}

/// Reads a field `Option<Box<dyn Trait>>` as [`deserialize`] does.
///
/// Add `default` to the attribute so that the key may be left out.
///
/// # Errors
/// As [`deserialize`].
pub fn deserialize_option<'de, D, T>(deserializer: D) -> Result<Option<Box<T>>, D::Error>
where
    D: Deserializer<'de>,
    T: ?Sized + PluginKind,
    Box<T>: DeserializeOwned,
{
    deserializer.deserialize_option(OptionVisitor(PhantomData))
}

struct OptionVisitor<T: ?Sized>(PhantomData<Box<T>>);

impl<'de, T> Visitor<'de> for OptionVisitor<T>
where
    T: ?Sized + PluginKind,
    Box<T>: DeserializeOwned,
{
    type Value = Option<Box<T>>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(EXPECTING)
    }

    fn visit_none<E: serde::de::Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserialize(deserializer).map(Some)
    }
}

struct PluginVisitor<T: ?Sized>(PhantomData<Box<T>>);

impl<'de, T> Visitor<'de> for PluginVisitor<T>
where
    T: ?Sized + PluginKind,
    Box<T>: DeserializeOwned,
{
    type Value = Box<T>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(EXPECTING)
    }

    fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<Box<T>, E> {
        require::<T, E>(name)?;
        Box::<T>::deserialize(MapDeserializer::new(std::iter::once(("type", name))))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Box<T>, A::Error> {
        match map.next_key::<String>()?.as_deref() {
            Some("type") => {
                let name = map.next_value::<String>()?;
                require::<T, A::Error>(&name)?;
                Box::<T>::deserialize(MapAccessDeserializer::new(TagFirst { tag: Some(name), map }))
            }
            None => Err(A::Error::missing_field("type")),
            // This crate's deserializer puts the tag first; others (JSON) keep the order of the
            // text.
            Some(first) => {
                let mut table = Table::from_iter([(first.to_owned(), map.next_value()?)]);
                while let Some((key, value)) = map.next_entry()? {
                    table.insert(key, value);
                }
                let value =
                    PluginValue::deserialize(Value::Table(table)).map_err(A::Error::custom)?;
                require::<T, A::Error>(&value.name)?;
                parse_at("", value.to_table()).map_err(A::Error::custom)
            }
        }
    }
}

fn require<T: ?Sized + PluginKind, E: serde::de::Error>(name: &str) -> Result<(), E> {
    registry::require(T::KIND, name).map_err(|error: Error| E::custom(error))
}

/// A map, preceded by its `type`, which was read already.
struct TagFirst<A> {
    tag: Option<String>,
    map: A,
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for TagFirst<A> {
    type Error = A::Error;

    fn next_key_seed<K: serde::de::DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, A::Error> {
        match self.tag {
            Some(_) => seed.deserialize("type".into_deserializer()).map(Some),
            None => self.map.next_key_seed(seed),
        }
    }

    fn next_value_seed<V: serde::de::DeserializeSeed<'de>>(
        &mut self,
        seed: V,
    ) -> Result<V::Value, A::Error> {
        match self.tag.take() {
            Some(tag) => seed.deserialize(tag.into_deserializer()),
            None => self.map.next_value_seed(seed),
        }
    }
}
