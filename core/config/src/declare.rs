//! Declaring a configuration table once: for serde, for rustdoc and for the reference.

use std::any::TypeId;
use std::borrow::Cow;
use std::marker::PhantomData;
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::PathBuf;

use super::PluginValue;

/// A key of a table, for the reference.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyDoc {
    /// The key, without its table.
    pub name: Cow<'static, str>,
    /// The type of its values, in words: `integer`, `list of string`.
    pub ty: String,
    /// The documentation comment of the field.
    pub doc: &'static str,
}

/// A configuration table that can describe its keys, for `--help`, the reference and the JSON
/// schema.
///
/// `#[derive(Documented)]` beside serde's derives implements it from the fields' documentation
/// comments. With `#[default(…)]` on a field it implements [`Default`] too.
///
/// ```
/// use fulgurite_core::config::{self, Documented};
/// use serde::{Deserialize, Serialize};
///
/// /// The table `[data]`.
/// #[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Documented)]
/// #[serde(deny_unknown_fields, default)]
/// struct DataConfig {
///     /// Tokens in a sample.
///     #[default(128)]
///     seq_len: usize,
///     /// Where the text is.
///     path: Option<std::path::PathBuf>,
/// }
///
/// let data: DataConfig = config::parse(toml::toml! { path = "notes.txt" })?;
/// assert_eq!(data, DataConfig { path: Some("notes.txt".into()), ..Default::default() });
/// assert_eq!(data.seq_len, 128);
/// assert_eq!(DataConfig::keys()[1].ty, "path, optional");
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
pub trait Documented {
    /// All keys, in order of declaration.
    fn keys() -> Vec<KeyDoc>;
}

/// A [`Documented`] type of this program, which can be found by its type id.
///
/// The derive macro submits one.
pub struct DocumentedType {
    id: fn() -> TypeId,
    keys: fn() -> Vec<KeyDoc>,
}

inventory::collect!(DocumentedType);

impl DocumentedType {
    /// Describes `T`.
    pub const fn new<T: Documented + 'static>() -> Self {
        Self { id: TypeId::of::<T>, keys: T::keys }
    }
}

/// Returns the keys of `T` if it is [`Documented`].
pub fn documented_keys<T: 'static>() -> Option<Vec<KeyDoc>> {
    let mut documented = inventory::iter::<DocumentedType>();
    documented.find(|of| (of.id)() == TypeId::of::<T>()).map(|of| (of.keys)())
}

/// For the derive macro: the description of a type, empty if the type lacks one.
#[doc(hidden)]
#[derive(Debug)]
pub struct Words<T>(PhantomData<T>);

impl<T> Words<T> {
    pub const NEW: Self = Self(PhantomData);
}

#[doc(hidden)]
pub trait KnownWords {
    fn words(&self) -> String;
}

impl<T: ConfigType> KnownWords for Words<T> {
    fn words(&self) -> String {
        T::describe()
    }
}

/// The second choice of the method lookup: it takes one more reference.
#[doc(hidden)]
pub trait UnknownWords {
    fn words(&self) -> String;
}

impl<T> UnknownWords for &Words<T> {
    fn words(&self) -> String {
        String::new()
    }
}

/// A type that values of the configuration can have.
pub trait ConfigType {
    /// The type in words, for the reference: `integer`, `list of string`.
    fn describe() -> String;
}

macro_rules! config_types {
    ($($ty:ty => $words:literal),* $(,)?) => { $(
        impl ConfigType for $ty {
            fn describe() -> String {
                $words.to_owned()
            }
        }
    )* };
}

config_types! {
    bool => "true or false",
    u32 => "integer",
    u64 => "integer",
    usize => "integer",
    NonZeroU64 => "integer",
    NonZeroUsize => "integer",
    i32 => "signed integer",
    i64 => "signed integer",
    f32 => "number",
    f64 => "number",
    String => "string",
    PathBuf => "path",
    PluginValue => "plugin",
    toml::Table => "table",
}

impl<T: ConfigType> ConfigType for Option<T> {
    fn describe() -> String {
        format!("{}, optional", T::describe())
    }
}

impl<T: ConfigType> ConfigType for Vec<T> {
    fn describe() -> String {
        format!("list of {}", T::describe())
    }
}

impl<T: ConfigType, const N: usize> ConfigType for [T; N] {
    fn describe() -> String {
        format!("list of {N} {}", T::describe())
    }
}

impl<T: ConfigType> ConfigType for (T, T) {
    fn describe() -> String {
        format!("list of 2 {}", T::describe())
    }
}
