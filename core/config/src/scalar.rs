//! Keys whose value may have several scalar types: a number or a word.

use std::fmt;

use serde::de::{Deserializer, Error as _, Unexpected, Visitor};

/// A value that is neither a list nor a table.
#[derive(Debug, Clone, PartialEq)]
pub enum Scalar {
    /// `true` or `false`.
    Bool(bool),
    /// An integer.
    Int(i64),
    /// A number with a point or an exponent.
    Float(f64),
    /// A string.
    Text(String),
}

/// Reads a scalar and converts it.
///
/// `convert` returns `None` for a value that is not allowed; the message then names `expected`.
///
/// # Errors
/// If the value is a list or a table, or `convert` refuses it.
pub fn deserialize_scalar<'de, D: Deserializer<'de>, T>(
    deserializer: D,
    expected: &'static str,
    convert: impl FnOnce(&Scalar) -> Option<T>,
) -> Result<T, D::Error> {
    struct ScalarVisitor(&'static str);

    impl Visitor<'_> for ScalarVisitor {
        type Value = Scalar;

        fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
            f.write_str(self.0)
        }

        fn visit_bool<E>(self, value: bool) -> Result<Scalar, E> {
            Ok(Scalar::Bool(value))
        }

        fn visit_i64<E>(self, value: i64) -> Result<Scalar, E> {
            Ok(Scalar::Int(value))
        }

        fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<Scalar, E> {
            i64::try_from(value)
                .map(Scalar::Int)
                .map_err(|_| E::invalid_value(Unexpected::Unsigned(value), &self.0))
        }

        fn visit_f64<E>(self, value: f64) -> Result<Scalar, E> {
            Ok(Scalar::Float(value))
        }

        fn visit_str<E>(self, value: &str) -> Result<Scalar, E> {
            Ok(Scalar::Text(value.to_owned()))
        }
    }

    let value = deserializer.deserialize_any(ScalarVisitor(expected))?;
    convert(&value).ok_or_else(|| {
        let found = match &value {
            Scalar::Bool(value) => {
                return D::Error::invalid_type(Unexpected::Bool(*value), &expected);
            }
            Scalar::Int(value) => Unexpected::Signed(*value),
            Scalar::Float(value) => Unexpected::Float(*value),
            Scalar::Text(value) => Unexpected::Str(value),
        };
        D::Error::invalid_value(found, &expected)
    })
}
