//! The key `prefetch`: a number, or a table with a number for each direction.

use std::fmt;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, Unexpected, Visitor};
use serde::ser::SerializeStruct as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::schedule::fsdp::Prefetch;

impl Serialize for Prefetch {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.forward == self.backward {
            return serializer.serialize_u64(self.forward as u64);
        }
        let mut table = serializer.serialize_struct("Prefetch", 2)?;
        table.serialize_field("forward", &self.forward)?;
        table.serialize_field("backward", &self.backward)?;
        table.end()
    }
}

impl<'de> Deserialize<'de> for Prefetch {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        /// A missing direction takes its default.
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Table {
            #[serde(default = "one")]
            forward: usize,
            #[serde(default = "one")]
            backward: usize,
        }

        fn one() -> usize {
            Prefetch::default().forward
        }

        struct NumberOrTable;

        impl<'de> Visitor<'de> for NumberOrTable {
            type Value = Prefetch;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of units, or a table of `forward` and `backward`")
            }

            fn visit_u64<E: Error>(self, units: u64) -> Result<Prefetch, E> {
                usize::try_from(units)
                    .map(Prefetch::from)
                    .map_err(|_| E::invalid_value(Unexpected::Unsigned(units), &self))
            }

            fn visit_i64<E: Error>(self, units: i64) -> Result<Prefetch, E> {
                usize::try_from(units)
                    .map(Prefetch::from)
                    .map_err(|_| E::invalid_value(Unexpected::Signed(units), &self))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Prefetch, A::Error> {
                let Table { forward, backward } =
                    Table::deserialize(MapAccessDeserializer::new(map))?;
                Ok(Prefetch { forward, backward })
            }
        }

        deserializer.deserialize_any(NumberOrTable)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_a_number_or_a_table() {
        let read = |text: &str| serde_json::from_str::<Prefetch>(text);
        for (text, prefetch, written) in [
            ("2", Prefetch { forward: 2, backward: 2 }, "2"),
            (
                r#"{"backward": 2}"#,
                Prefetch { forward: 1, backward: 2 },
                r#"{"forward":1,"backward":2}"#,
            ),
            (r#"{"forward": 0, "backward": 0}"#, Prefetch { forward: 0, backward: 0 }, "0"),
        ] {
            assert_eq!(read(text).unwrap(), prefetch, "{text}");
            assert_eq!(serde_json::to_string(&prefetch).unwrap(), written);
        }
        let form = "expected a number of units, or a table of `forward` and `backward`";
        for (text, message) in [
            ("-1", format!("invalid value: integer `-1`, {form}")),
            (r#""2""#, format!("invalid type: string \"2\", {form}")),
            (
                r#"{"foward": 1}"#,
                "unknown field `foward`, expected `forward` or `backward`".to_owned(),
            ),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(&message), "{error}");
        }
    }
}
