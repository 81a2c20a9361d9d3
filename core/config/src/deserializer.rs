//! A serde deserializer over TOML values that reports the path of an error.
//!
//! toml's deserializer loses the path of an error inside a plugin's table, because typetag passes
//! errors on as text. And serde's derive ignores unknown keys by default. This deserializer records
//! the path and a structured [`Problem`] where an error arises, and makes every unknown key an
//! error.

use std::cell::RefCell;
use std::fmt;
use std::marker::PhantomData;

use serde::de::value::{StrDeserializer, StringDeserializer};
use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, EnumAccess, Error as _, IntoDeserializer,
    MapAccess, SeqAccess, Unexpected, VariantAccess, Visitor,
};
use serde::forward_to_deserialize_any;
use toml::{Table, Value};

use super::problem::{PathSegment, Problem, one_of_words, parse_path, render};
use crate::{Error, Result};

/// Turns a whole configuration into `T`.
///
/// # Errors
/// [`Error::Config`] with the full path of the wrong key, the expectation and, for a misspelt key,
/// the nearest key.
pub fn parse<T: DeserializeOwned>(table: Table) -> Result<T> {
    parse_at("", table)
}

/// Turns the table at `path` of a configuration into `T`.
///
/// The path (`trainer.loggers[0]`; may be empty) is only for messages.
///
/// # Errors
/// As for [`parse`].
pub fn parse_at<T: DeserializeOwned>(path: &str, table: Table) -> Result<T> {
    deserialize(parse_path(path), &Value::Table(table))
        .map_err(|(p, problem)| Error::Config(render(&p, &problem, &[])))
}

/// Parses a value at `base`; the error is the path and the problem, not yet a message.
pub(crate) fn deserialize<T: DeserializeOwned>(
    base: Vec<PathSegment>,
    value: &Value,
) -> Result<T, (Vec<PathSegment>, Problem)> {
    let context = Context { path: RefCell::new(base), first: RefCell::new(None) };
    T::deserialize(Node { value, context: &context }).map_err(|problem| {
        let recorded = context.first.take();
        recorded.unwrap_or_else(|| (context.path.take(), problem))
    })
}

struct Context {
    /// The path of the value that is being deserialized.
    path: RefCell<Vec<PathSegment>>,
    /// The innermost error so far and its path; typetag turns errors into text on the way out.
    first: RefCell<Option<(Vec<PathSegment>, Problem)>>,
}

impl Context {
    fn record<T>(&self, result: Result<T, Problem>) -> Result<T, Problem> {
        match &result {
            // The caller recovered from the inner error, as untagged enums do.
            Ok(_) => drop(self.first.take()),
            Err(problem) => {
                let mut first = self.first.borrow_mut();
                if first.is_none() {
                    let mut path = self.path.borrow().clone();
                    let mut problem = problem.clone();
                    if let Problem::UnknownKey { key: key @ None, .. } = &mut problem
                        && let Some(PathSegment::Key(last)) = path.last().cloned()
                    {
                        *key = Some(last);
                        path.pop();
                    }
                    *first = Some((path, problem));
                }
            }
        }
        result
    }

    fn inside<T>(
        &self,
        segment: PathSegment,
        body: impl FnOnce() -> Result<T, Problem>,
    ) -> Result<T, Problem> {
        self.path.borrow_mut().push(segment);
        let result = self.record(body());
        self.path.borrow_mut().pop();
        result
    }
}

#[derive(Clone, Copy)]
struct Node<'de> {
    value: &'de Value,
    context: &'de Context,
}

impl<'de> Node<'de> {
    fn visit_table<V: Visitor<'de>>(
        self,
        table: &'de Table,
        visitor: V,
    ) -> Result<V::Value, Problem> {
        // typetag streams the keys after the tag, but buffers the keys before it and loses their
        // paths.
        let tag = table.get_key_value("type");
        let rest = table.iter().filter(|(key, _)| *key != "type");
        visitor.visit_map(Entries {
            entries: tag.into_iter().chain(rest),
            value: None,
            context: self.context,
        })
    }
}

impl<'de> Deserializer<'de> for Node<'de> {
    type Error = Problem;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Problem> {
        match self.value {
            Value::String(text) => visitor.visit_borrowed_str(text),
            Value::Integer(value) => visitor.visit_i64(*value),
            Value::Float(value) => visitor.visit_f64(*value),
            Value::Boolean(value) => visitor.visit_bool(*value),
            // No key takes a date; `00:12:00` is a duration written without quotes.
            Value::Datetime(value) => visitor.visit_string(value.to_string()),
            Value::Array(elements) => visitor.visit_seq(Elements {
                elements: elements.iter().enumerate(),
                context: self.context,
            }),
            Value::Table(table) => self.visit_table(table, visitor),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Problem> {
        visitor.visit_some(self).map_err(Problem::optional)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Problem> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Problem> {
        let Value::Table(table) = self.value else { return self.deserialize_any(visitor) };
        if let Some(key) = table.keys().find(|key| !fields.contains(&key.as_str())) {
            return self.context.record(Err(Problem::unknown_field(key, fields)));
        }
        self.visit_table(table, visitor)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Problem> {
        match self.value {
            Value::String(word) => visitor.visit_enum(word.as_str().into_deserializer()),
            Value::Table(table) if table.len() == 1 => {
                let (variant, value) = table.iter().next().expect("it has one entry");
                visitor.visit_enum(Variant { variant, node: Node { value, ..self } })
            }
            _ => self.deserialize_any(Words(variants, PhantomData::<V::Value>)),
        }
    }

    /// serde calls this for keys that the type does not have.
    fn deserialize_ignored_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Problem> {
        Err(Problem::UnknownKey { key: None, expected: Vec::new() })
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit
        unit_struct seq tuple tuple_struct map identifier
    }
}

/// A visitor that accepts nothing in an enum's place; its error lists the enum's words.
struct Words<T>(&'static [&'static str], PhantomData<T>);

impl<T> Visitor<'_> for Words<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&one_of_words(self.0))
    }
}

struct Entries<'de, I> {
    entries: I,
    value: Option<(&'de String, &'de Value)>,
    context: &'de Context,
}

impl<'de, I: Iterator<Item = (&'de String, &'de Value)>> MapAccess<'de> for Entries<'de, I> {
    type Error = Problem;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, Problem> {
        self.value = self.entries.next();
        let Some((key, _)) = self.value else { return Ok(None) };
        let key: StrDeserializer<'_, Problem> = key.as_str().into_deserializer();
        self.context.record(seed.deserialize(key)).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Problem> {
        let (key, value) =
            self.value.take().ok_or_else(|| Problem::custom("a value was asked for twice"))?;
        let node = Node { value, context: self.context };
        self.context.inside(PathSegment::Key(key.clone()), || seed.deserialize(node))
    }
}

struct Elements<'de, I> {
    elements: I,
    context: &'de Context,
}

impl<'de, I: Iterator<Item = (usize, &'de Value)>> SeqAccess<'de> for Elements<'de, I> {
    type Error = Problem;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, Problem> {
        let Some((index, value)) = self.elements.next() else { return Ok(None) };
        let node = Node { value, context: self.context };
        self.context.inside(PathSegment::Index(index), || seed.deserialize(node)).map(Some)
    }
}

/// An enum variant with content, `{ variant = content }`.
struct Variant<'de> {
    variant: &'de str,
    node: Node<'de>,
}

impl<'de> EnumAccess<'de> for Variant<'de> {
    type Error = Problem;
    type Variant = Self;

    fn variant_seed<V: DeserializeSeed<'de>>(self, seed: V) -> Result<(V::Value, Self), Problem> {
        let variant = StringDeserializer::<Problem>::new(self.variant.to_owned());
        Ok((seed.deserialize(variant)?, self))
    }
}

impl<'de> VariantAccess<'de> for Variant<'de> {
    type Error = Problem;

    fn unit_variant(self) -> Result<(), Problem> {
        Err(Problem::invalid_type(Unexpected::Map, &"a word"))
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, Problem> {
        let segment = PathSegment::Key(self.variant.to_owned());
        self.node.context.inside(segment, || seed.deserialize(self.node))
    }

    fn tuple_variant<V: Visitor<'de>>(self, len: usize, visitor: V) -> Result<V::Value, Problem> {
        let segment = PathSegment::Key(self.variant.to_owned());
        self.node.context.inside(segment, || self.node.deserialize_tuple(len, visitor))
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Problem> {
        let segment = PathSegment::Key(self.variant.to_owned());
        self.node.context.inside(segment, || self.node.deserialize_struct("", fields, visitor))
    }
}
