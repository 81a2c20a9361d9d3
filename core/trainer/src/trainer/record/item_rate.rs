//! The training rate in items per second, named after the items.

use std::borrow::Cow;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};
use serde::ser::{Serialize, SerializeMap as _, Serializer};

/// The items of all ranks per second, in the unit that the module's loss counts: tokens, images,
/// samples. As JSON it is one key with the name of the items, such as `"images_per_s": 1024.0`.
///
/// ```
/// use fulgurite_core::trainer::ItemRate;
/// assert_eq!(ItemRate::new("images", 2.0).name(), "images_per_s");
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct ItemRate {
    items: Cow<'static, str>,
    /// Number of items per second.
    pub per_s: f64,
}

/// The suffix of rates' names.
const SUFFIX: &str = "_per_s";

impl ItemRate {
    /// Creates a rate of items, which are named in the plural.
    pub fn new(items: impl Into<Cow<'static, str>>, per_s: f64) -> Self {
        Self { items: items.into(), per_s }
    }

    /// Returns the name of the items, in the plural.
    pub fn items(&self) -> &str {
        &self.items
    }

    /// Returns the name of the rate, such as `tokens_per_s`.
    pub fn name(&self) -> String {
        format!("{}{SUFFIX}", self.items.replace(' ', "_"))
    }
}

impl Serialize for ItemRate {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(1))?;
        map.serialize_entry(&self.name(), &self.per_s)?;
        map.end()
    }
}

impl<'de> Deserialize<'de> for ItemRate {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Keys;

        impl<'de> Visitor<'de> for Keys {
            type Value = ItemRate;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, "a key that ends in `{SUFFIX}`")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ItemRate, A::Error> {
                let mut rate = None;
                while let Some(key) = map.next_key::<String>()? {
                    match key.strip_suffix(SUFFIX) {
                        Some(items) => {
                            let per_s: Option<f64> = map.next_value()?;
                            rate = Some(ItemRate::new(items.to_owned(), per_s.unwrap_or(f64::NAN)));
                        }
                        None => drop(map.next_value::<serde::de::IgnoredAny>()?),
                    }
                }
                rate.ok_or_else(|| A::Error::custom(format_args!("no key ends in `{SUFFIX}`")))
            }
        }

        deserializer.deserialize_map(Keys)
    }
}
