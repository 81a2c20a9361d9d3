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
/// comments, and so does [`config_struct!`](crate::config_struct).
pub trait Documented {
    /// All keys, in order of declaration.
    fn keys() -> Vec<KeyDoc>;
}

/// A [`Documented`] type of this program, which can be found by its type id.
///
/// The derive macro and [`config_struct!`](crate::config_struct) submit one.
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

/// Declares a configuration table: a struct whose fields have documentation and defaults.
///
/// The struct is `Serialize`, `Deserialize` (every key optional, unknown keys refused), `Default`
/// and [`Documented`](crate::Documented). The calling crate needs `serde` with `derive`.
///
/// ```
/// use fulgurite_core::config::{self, Documented as _};
///
/// fulgurite_core::config_struct! {
///     /// The table `[data]`.
///     #[derive(Debug, Clone, PartialEq)]
///     pub struct DataConfig {
///         /// Tokens in a sample.
///         pub seq_len: usize = 128,
///         /// Where the text is.
///         pub path: Option<std::path::PathBuf> = None,
///     }
/// }
///
/// let data: DataConfig = config::parse(toml::toml! { seq_len = 64 })?;
/// assert_eq!(data, DataConfig { seq_len: 64, ..Default::default() });
/// assert_eq!(DataConfig::keys()[1].ty, "path, optional");
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[macro_export]
macro_rules! config_struct {
    (
        $(#[$meta:meta])*
        $vis:vis struct $name:ident {
            $( $(#[doc = $doc:expr])+ $field_vis:vis $field:ident: $ty:ty = $default:expr ),* $(,)?
        }
    ) => {
        $(#[$meta])*
        #[derive(::serde::Serialize, ::serde::Deserialize)]
        #[serde(deny_unknown_fields, default)]
        $vis struct $name {
            $( $(#[doc = $doc])+ $field_vis $field: $ty, )*
        }

        impl ::std::default::Default for $name {
            fn default() -> Self {
                Self { $( $field: $default, )* }
            }
        }

        $crate::__private::inventory::submit! { $crate::DocumentedType::new::<$name>() }

        impl $crate::Documented for $name {
            fn keys() -> ::std::vec::Vec<$crate::KeyDoc> {
                ::std::vec![ $(
                    $crate::KeyDoc {
                        name: ::std::borrow::Cow::Borrowed(::std::stringify!($field)),
                        ty: <$ty as $crate::ConfigType>::describe(),
                        doc: ::std::concat!($($doc, "\n"),+),
                    },
                )* ]
            }
        }
    };
}
