//! Labels: class names, integers, numbers, and lists of them.

use std::collections::BTreeMap;

use fulgurite_error::{Error, Result};
use serde_json::Value;

use super::config::{LabelledTextsConfig, RowKind};
use crate::rows::{Column, Place, Row};

/// The most classes that integers may name; larger ones are ids or numbers to predict.
const MAX_CLASSES: i64 = 1 << 20;

/// The labels of rows, as [`LabelledTexts`](super::LabelledTexts) finds them in its files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LabelKind {
    /// Rows without labels.
    None,
    /// One class for each text, or for each word.
    Classes,
    /// Several classes for each text.
    Sets,
    /// So many numbers for each text.
    Numbers(usize),
}

/// The label of a row.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Label {
    None,
    /// The class of the text, or of each word.
    Classes(Box<[u32]>),
    Set(Box<[u32]>),
    Numbers(Box<[f32]>),
}

/// A class, and the first row that has it.
#[derive(Debug)]
pub(super) struct Class {
    pub(super) name: Option<String>,
    pub(super) place: Option<Place>,
}

/// Reads the values of the column of labels.
#[derive(Debug)]
pub(super) struct LabelReader {
    kind: LabelKind,
    column: Column,
    scalar: Scalar,
    pub(super) classes: Vec<Class>,
    index: BTreeMap<String, u32>,
}

/// A value other than a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Scalar {
    Integer,
    /// An integer below 0: not a class, but a number if other labels have a decimal point.
    Negative,
    Number,
    Name,
}

impl Scalar {
    fn words(self) -> &'static str {
        match self {
            Self::Integer => "an integer from 0 on",
            Self::Negative | Self::Number => "a number",
            Self::Name => "a name",
        }
    }

    /// The kind of a value; `None` for lists and tables.
    fn of(value: &Value, is_text: bool) -> Option<Self> {
        let of_integer = |n: i64| if n < 0 { Self::Negative } else { Self::Integer };
        Some(match value {
            Value::String(text) if is_text => match (text.parse::<i64>(), text.parse::<f64>()) {
                (Ok(n), _) => of_integer(n),
                (_, Ok(number)) if number.is_finite() => Self::Number,
                _ => Self::Name,
            },
            Value::String(_) => Self::Name,
            Value::Bool(_) => Self::Integer,
            Value::Number(number) => match number.as_i64() {
                Some(n) => of_integer(n),
                None => Self::Number,
            },
            Value::Null | Value::Array(_) | Value::Object(_) => return None,
        })
    }
}

impl LabelReader {
    /// Finds out from training rows how labels are read; `None` for rows without labels.
    ///
    /// # Errors
    /// If a row has no label, or labels are of several kinds.
    pub(super) fn of(
        config: &LabelledTextsConfig,
        rows: &[Row],
        at: usize,
    ) -> Result<Option<Self>> {
        let Some(column) = config.label_column() else { return Ok(None) };
        let (mut lists, mut kinds) = (0, Vec::new());
        for row in rows {
            let value = label_of(row, at, &column)?;
            let items = match value {
                Value::Array(items) => items.as_slice(),
                value => std::slice::from_ref(value),
            };
            lists += usize::from(value.is_array());
            let of_items = items.iter().map(|item| Scalar::of(item, row.is_text));
            let of_items: Option<Vec<Scalar>> = of_items.collect();
            let Some(of_items) = of_items else {
                return Err(row.place.wrong(format!(
                    "has {value} under {:?} ({}), which is no label: labels are names, numbers, and lists of them",
                    column.name, column.key
                )));
            };
            kinds.extend(of_items.into_iter().map(|kind| (kind, row)));
        }
        if lists > 0 && lists < rows.len() {
            let row = &rows[first_unlike(rows, at, &column)?];
            return Err(row.place.wrong(format!(
                "differs from the rows before it: some have a list under {:?} ({}) and others have none",
                column.name, column.key
            )));
        }
        let named = |(kind, row): &&(Scalar, &Row)| *kind == Scalar::Name && !row.is_text;
        let scalar = kinds.iter().map(|(kind, _)| *kind).max().unwrap_or(Scalar::Integer);
        if let (Some(_), Some((_, row))) = (
            kinds.iter().find(named),
            kinds.iter().find(|(kind, row)| *kind != Scalar::Name && !row.is_text),
        ) {
            return Err(row.place.wrong(format!(
                "has a number under {:?} ({}), where other rows have names",
                column.name, column.key
            )));
        }
        // Names that look like numbers are names if the configuration lists them.
        let is_listed = |value: &Value| {
            value.as_str().is_some_and(|text| config.labels.iter().any(|label| label == text))
        };
        let first = rows.first().and_then(|row| row.values[at].as_ref());
        let scalar = if first.is_some_and(is_listed) { Scalar::Name } else { scalar };
        let negative = kinds.iter().find(|(kind, _)| *kind == Scalar::Negative);
        if let (Scalar::Negative, RowKind::Texts, Some((_, row))) = (scalar, config.kind, negative)
        {
            return Err(row.place.wrong(format!(
                "has an integer below 0 under {:?} ({}): integers are classes from 0 on; write numbers to predict with \
                 a decimal point",
                column.name, column.key
            )));
        }
        if scalar == Scalar::Number && !config.labels.is_empty() {
            return Err(Error::Config(format!(
                "data.labels names classes, and there are numbers to predict under {:?} ({}); leave data.labels out",
                column.name, column.key
            )));
        }
        let kind = match (config.kind, lists > 0, scalar) {
            (RowKind::Words, true, Scalar::Integer | Scalar::Name) => LabelKind::Classes,
            (RowKind::Words, ..) => {
                let message = "expected a list of tags, each a name or an integer from 0 on";
                return Err(wrong_kind(rows, &column, message));
            }
            (_, true, Scalar::Integer | Scalar::Name) => LabelKind::Sets,
            (_, false, Scalar::Integer | Scalar::Name) => LabelKind::Classes,
            (_, false, Scalar::Negative | Scalar::Number) => LabelKind::Numbers(1),
            (_, true, Scalar::Negative | Scalar::Number) => LabelKind::Numbers(match first {
                Some(Value::Array(items)) if !items.is_empty() => items.len(),
                _ => return Err(wrong_kind(rows, &column, "expected a list of numbers")),
            }),
        };
        let mut reader = Self { kind, column, scalar, classes: Vec::new(), index: BTreeMap::new() };
        if matches!(kind, LabelKind::Classes | LabelKind::Sets) {
            reader.find_classes(config, rows, at)?;
        }
        let is_full = |row: &Row| {
            let list = row.values[at].as_ref().and_then(Value::as_array);
            list.is_some_and(|list| list.len() == reader.classes.len())
        };
        if kind == LabelKind::Sets && reader.classes.len() > 1 && rows.iter().all(is_full) {
            let message = "expected lists of classes, and all rows have as many as there are classes; write 0 and 1 \
                           for each class with a decimal point";
            return Err(wrong_kind(rows, &reader.column, message));
        }
        Ok(Some(reader))
    }

    pub(super) fn kind(&self) -> LabelKind {
        self.kind
    }

    /// Collects the classes of training rows, in order.
    fn find_classes(
        &mut self,
        config: &LabelledTextsConfig,
        rows: &[Row],
        at: usize,
    ) -> Result<()> {
        let items = rows.iter().flat_map(|row| {
            let items = match &row.values[at] {
                Some(Value::Array(items)) => items.as_slice(),
                Some(value) => std::slice::from_ref(value),
                None => &[],
            };
            items.iter().map(move |item| (item, row))
        });
        if self.scalar == Scalar::Name {
            let mut first: BTreeMap<String, Place> = BTreeMap::new();
            for (item, row) in items {
                first.entry(name_of(item)).or_insert_with(|| row.place.clone());
            }
            let names = match config.labels.as_slice() {
                [] => first.keys().cloned().collect(),
                labels => labels.to_vec(),
            };
            let class =
                |name: &String| Class { name: Some(name.clone()), place: first.get(name).cloned() };
            self.classes = names.iter().map(class).collect();
            self.index = names.into_iter().zip(0..).collect();
            return Ok(());
        }
        let name = |i: usize| config.labels.get(i).cloned();
        self.classes.extend((0..config.labels.len()).map(|i| Class { name: name(i), place: None }));
        for (item, row) in items {
            let class = integer_of(item);
            let (listed, most) = (config.labels.len() as i64, MAX_CLASSES);
            if listed > 0 && class >= listed {
                return Err(row.place.wrong(format!(
                    "has the class {class} under {:?} ({}), and data.labels names {listed} classes, from 0 on",
                    self.column.name, self.column.key
                )));
            }
            if class >= most {
                return Err(row.place.wrong(format!(
                    "has the label {class} under {:?} ({}): integers are classes from 0 on, at most {most}; write \
                     numbers to predict with a decimal point",
                    self.column.name, self.column.key
                )));
            }
            let class = class as usize;
            while self.classes.len() <= class {
                self.classes.push(Class { name: None, place: None });
            }
            self.classes[class].place.get_or_insert_with(|| row.place.clone());
        }
        Ok(())
    }

    /// Reads the label of a row.
    ///
    /// # Errors
    /// If the row has no label, or its kind or class is not among the training rows'.
    pub(super) fn read(&self, row: &Row, at: usize) -> Result<Label> {
        let value = label_of(row, at, &self.column)?;
        let is_list = value.is_array();
        let expects_list = match self.kind {
            LabelKind::Sets => true,
            LabelKind::Numbers(width) => is_list && width > 0,
            _ => is_list,
        };
        let items = match value {
            Value::Array(items) if expects_list => items.as_slice(),
            value if !is_list && !expects_list => std::slice::from_ref(value),
            _ => return Err(self.wrong(row, value)),
        };
        match self.kind {
            LabelKind::None => Ok(Label::None),
            LabelKind::Numbers(width) if items.len() != width => Err(row.place.wrong(format!(
                "has {} numbers under {:?} ({}), and the first row has {width}",
                items.len(),
                self.column.name,
                self.column.key
            ))),
            LabelKind::Numbers(_) => {
                let number = |item: &Value| match item {
                    Value::String(text) if row.is_text => {
                        text.parse().ok().filter(|x: &f32| x.is_finite())
                    }
                    Value::Bool(value) => Some(f32::from(u8::from(*value))),
                    item => item.as_f64().map(|x| x as f32).filter(|x| x.is_finite()),
                };
                let numbers: Option<Box<[f32]>> = items.iter().map(number).collect();
                Ok(Label::Numbers(numbers.ok_or_else(|| self.wrong(row, value))?))
            }
            LabelKind::Classes | LabelKind::Sets => {
                let classes = items.iter().map(|item| self.class(row, item));
                let classes = classes.collect::<Result<Box<[u32]>>>()?;
                let repeated = classes.iter().enumerate().find(|(i, c)| classes[..*i].contains(c));
                Ok(match self.kind {
                    LabelKind::Sets if repeated.is_some() => {
                        return Err(row.place.wrong(format!(
                            "has a class twice in {value} under {:?} ({}); lists name the classes of a text, and a 0 or \
                             1 for each class needs a decimal point",
                            self.column.name, self.column.key
                        )));
                    }
                    LabelKind::Sets => Label::Set(classes),
                    _ => Label::Classes(classes),
                })
            }
        }
    }

    fn class(&self, row: &Row, item: &Value) -> Result<u32> {
        if self.scalar == Scalar::Name {
            return self.index.get(&name_of(item)).copied().ok_or_else(|| {
                let names: Vec<&str> = self.index.keys().map(String::as_str).collect();
                row.place.wrong(format!(
                    "has the label {item} under {:?} ({}), which is none of the classes {}",
                    self.column.name,
                    self.column.key,
                    names.join(", ")
                ))
            });
        }
        if Scalar::of(item, row.is_text) != Some(Scalar::Integer) {
            return Err(self.wrong(row, item));
        }
        let (class, known) = (integer_of(item), self.classes.len());
        match class < known as i64 {
            true => Ok(class as u32),
            false => Err(row.place.wrong(format!(
                "has the class {class} under {:?} ({}), and the training rows have {known}, from 0 on",
                self.column.name, self.column.key
            ))),
        }
    }

    fn wrong(&self, row: &Row, value: &Value) -> Error {
        let expected = self.scalar.words();
        let expected = match self.kind {
            LabelKind::Sets => format!("a list, each {expected}"),
            LabelKind::Numbers(width) if width > 1 => format!("a list of {width} numbers"),
            _ => expected.to_owned(),
        };
        row.place.wrong(format!(
            "has the label {value} under {:?} ({}); expected {expected}, as in the training rows",
            self.column.name, self.column.key
        ))
    }
}

/// The label of a row, which must have one.
fn label_of<'a>(row: &'a Row, at: usize, column: &Column) -> Result<&'a Value> {
    row.values[at].as_ref().ok_or_else(|| {
        row.place.wrong(format!("has no label under {:?} ({})", column.name, column.key))
    })
}

/// The index of the first row that has a list if row 0 has a single value, or the reverse.
fn first_unlike(rows: &[Row], at: usize, column: &Column) -> Result<usize> {
    let first = label_of(&rows[0], at, column)?.is_array();
    let unlike = rows
        .iter()
        .position(|row| row.values[at].as_ref().is_some_and(|value| value.is_array() != first));
    Ok(unlike.unwrap_or(0))
}

fn wrong_kind(rows: &[Row], column: &Column, message: &str) -> Error {
    let message = format!("has something else under {:?} ({}): {message}", column.name, column.key);
    match rows.first() {
        Some(row) => row.place.wrong(message),
        None => Error::Data(message),
    }
}

/// The name of a class.
fn name_of(value: &Value) -> String {
    match value {
        Value::String(name) => name.clone(),
        other => other.to_string(),
    }
}

/// The integer of a value whose kind is [`Scalar::Integer`].
fn integer_of(value: &Value) -> i64 {
    match value {
        Value::String(text) => text.parse().unwrap_or(0),
        Value::Bool(value) => i64::from(*value),
        value => value.as_i64().unwrap_or(0),
    }
}
