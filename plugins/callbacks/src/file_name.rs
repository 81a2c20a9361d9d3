//! Checkpoint names with values in them.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A name with values in braces, such as `{epoch}-{step}` or `best-{val_loss:.3}`. A format may
/// follow the colon: the minimum number of digits (`{epoch:04}`) or the number of decimals
/// (`{val_loss:.3}`).
///
/// ```
/// use fulgurite_callbacks::Template;
///
/// let template = Template::parse("{epoch:02}-{val_loss:.2}")?;
/// let value = |name: &str| Some(if name == "epoch" { 3.0 } else { 0.12345 });
/// assert_eq!(template.fill(true, &value)?, "epoch=03-val_loss=0.12");
/// assert_eq!(template.fill(false, &value)?, "03-0.12");
/// # Ok::<(), String>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Template {
    text: String,
    parts: Vec<Part>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Text(String),
    Value { name: String, width: usize, precision: Option<usize> },
}

impl Template {
    /// Parses a template.
    ///
    /// # Errors
    /// Returns a description of the mistake.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some(start) = rest.find('{') {
            let (before, inside) = rest.split_at(start);
            let Some(end) = inside.find('}') else {
                return Err(format!("`{text}` has a `{{` without a `}}`"));
            };
            if !before.is_empty() {
                parts.push(Part::Text(before.to_owned()));
            }
            parts.push(Self::value(&inside[1..end])?);
            rest = &inside[end + 1..];
        }
        if !rest.is_empty() {
            parts.push(Part::Text(rest.to_owned()));
        }
        let unfit = |c: char| c == '/' || c == '\\' || c == '}' || c.is_control();
        for part in &parts {
            if let Part::Text(fixed) = part
                && fixed.contains(unfit)
            {
                return Err(format!("`{text}` is no name: it must have no `/`, `\\` or `}}`"));
            }
        }
        match parts.first() {
            None => Err("a name is needed, such as \"{epoch}-{step}\"".to_owned()),
            Some(Part::Text(fixed)) if fixed.starts_with('.') => {
                Err(format!("`{text}` begins with a point, which names of checkpoints must not"))
            }
            Some(_) => Ok(Self { text: text.to_owned(), parts }),
        }
    }

    fn value(inside: &str) -> Result<Part, String> {
        let (name, format) = inside.split_once(':').unwrap_or((inside, ""));
        let unfit = || format!("`{{{inside}}}`: write {{name}}, {{name:.3}} or {{name:04}}");
        if name.is_empty() {
            return Err(unfit());
        }
        let format = format.strip_suffix('f').unwrap_or(format);
        let format = format.strip_suffix('d').unwrap_or(format);
        let (width, precision) =
            format.split_once('.').map_or((format, None), |(w, p)| (w, Some(p)));
        let number = |digits: &str| match digits {
            "" => Ok(0),
            digits => digits.parse().ok().filter(|n| *n <= 30).ok_or_else(unfit),
        };
        Ok(Part::Value {
            name: name.to_owned(),
            width: number(width)?,
            precision: precision.map(number).transpose()?,
        })
    }

    /// Fills in the values; `with_names` writes them as `name=value`.
    ///
    /// # Errors
    /// If a value is unknown.
    pub fn fill(
        &self,
        with_names: bool,
        value: &dyn Fn(&str) -> Option<f64>,
    ) -> Result<String, String> {
        let mut filled = String::new();
        for part in &self.parts {
            match part {
                Part::Text(text) => filled.push_str(text),
                Part::Value { name, width, precision } => {
                    let number = value(name).ok_or_else(|| {
                        format!("there is no metric `{name}` for `{}`", self.text)
                    })?;
                    if with_names {
                        // Names of metrics may contain a `/`.
                        filled.extend([&*name.replace(['/', '\\'], "_"), "="]);
                    }
                    filled.push_str(&match precision {
                        Some(precision) => format!("{number:0width$.precision$}"),
                        None => format!("{number:0width$}"),
                    });
                }
            }
        }
        Ok(filled)
    }
}

impl fmt::Display for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Serialize for Template {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}

impl<'de> Deserialize<'de> for Template {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::parse(&text).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    #[test]
    fn names_are_filled_as_lightning_does() {
        let fill = |template: &str, with_names| {
            let value = |name: &str| match name {
                "epoch" => Some(7.0),
                "step" => Some(123.0),
                "val_loss" => Some(0.5),
                "val/acc" => Some(0.987_65),
                _ => None,
            };
            Template::parse(template).unwrap().fill(with_names, &value)
        };
        for (template, with_names, name) in [
            ("{epoch}-{step}", true, "epoch=7-step=123"),
            ("{epoch}-{step}", false, "7-123"),
            ("{epoch:03d}", true, "epoch=007"),
            ("{val_loss:.2f}", true, "val_loss=0.50"),
            ("{val_loss}", true, "val_loss=0.5"),
            ("{val/acc:.3}", true, "val_acc=0.988"),
            ("best", true, "best"),
            ("a{epoch}b{step:06}c", false, "a7b000123c"),
        ] {
            assert_eq!(fill(template, with_names).as_deref(), Ok(name), "{template}");
        }
        assert_says!(fill("{loss}", true).unwrap_err(), "there is no metric `loss` for `{loss}`");
    }

    #[test]
    fn mistakes_are_told() {
        let error = |template: &str| Template::parse(template).unwrap_err();
        assert_says!(error(""), r#"a name is needed, such as "{epoch}-{step}""#);
        assert_says!(error("{epoch"), "`{epoch` has a `{` without a `}`");
        assert_says!(error("a/{epoch}"), r#"`a/{epoch}` is no name … no `/`, `\` or `}`"#);
        assert_says!(error(".{epoch}"), "`.{epoch}` begins with a point …");
        assert_says!(error("{}"), "`{}`: write {name}, {name:.3} or {name:04}");
        assert_says!(error("{epoch:x}"), "`{epoch:x}`: write {name}, {name:.3} or {name:04}");
    }
}
