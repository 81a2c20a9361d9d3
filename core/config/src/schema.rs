//! A JSON schema of the configuration, for completion, descriptions and checks in editors.
//!
//! ```
//! use fulgurite_core::config::schema::json_schema;
//! use fulgurite_core::run::reference_sections;
//!
//! let schema = json_schema("a run", &reference_sections()?, &fulgurite_core::registry::plugins());
//! let max_steps = &schema["properties"]["trainer"]["properties"]["max_steps"];
//! assert_eq!(max_steps["type"], "integer");
//! # Ok::<(), fulgurite_core::Error>(())
//! ```

use serde_json::{Map, Value, json};

use super::KeyDoc;
use super::plugin::{KindDescriptor, kind_descriptors};
use super::reference::{Section, one_line, option_keys};
use crate::registry::PluginDescriptor;

/// Returns the schema (draft 7) of a configuration with these sections.
///
/// Keys that select a plugin take one of `plugins`.
pub fn json_schema(title: &str, sections: &[Section], plugins: &[PluginDescriptor]) -> Value {
    let mut schema = match sections.iter().find(|section| section.path.is_empty()) {
        Some(top) => table(top, sections, plugins),
        None => json!({ "type": "object" }),
    };
    schema["$schema"] = "http://json-schema.org/draft-07/schema#".into();
    schema["title"] = title.into();
    schema
}

fn table(section: &Section, sections: &[Section], plugins: &[PluginDescriptor]) -> Value {
    let mut properties = Map::new();
    for key in &section.keys {
        let path = match section.path.as_str() {
            "" => key.name.to_string(),
            path => format!("{path}.{}", key.name),
        };
        let kind = kind_descriptors().find(|kind| kind.key == path);
        let inner = sections.iter().find(|inner| !inner.path.is_empty() && inner.path == path);
        let mut schema = match (inner, kind) {
            (Some(inner), _) => table(inner, sections, plugins),
            (None, Some(kind)) if key.ty.starts_with("list") => {
                json!({ "type": "array", "items": plugin(kind, plugins, None) })
            }
            (None, Some(kind)) => {
                let default = value_of(section.defaults.get(key.name.as_ref()));
                plugin(kind, plugins, default.as_ref())
            }
            (None, None) => of_words(&key.ty),
        };
        describe(&mut schema, key, section.defaults.get(key.name.as_ref()));
        properties.insert(key.name.to_string(), schema);
    }
    // An undocumented table may have keys that its defaults do not show.
    let closed = section.keys.iter().any(|key| !key.doc.is_empty()) || section.keys.is_empty();
    json!({ "type": "object", "properties": properties, "additionalProperties": !closed })
}

fn describe(schema: &mut Value, key: &KeyDoc, default: Option<&String>) {
    let doc = one_line(key.doc);
    if !doc.is_empty() {
        // When completing, editors show the alternative's description.
        let alternatives = schema.get_mut("anyOf").and_then(Value::as_array_mut);
        for alternative in alternatives.into_iter().flatten() {
            if alternative.get("description").is_none() {
                alternative["description"] = doc.clone().into();
            }
        }
        schema["description"] = doc.into();
    }
    if let Some(value) = value_of(default) {
        schema["default"] = value;
    }
}

/// Parses a value written in TOML.
fn value_of(text: Option<&String>) -> Option<Value> {
    let table = format!("value = {}", text?).parse::<toml::Table>().ok()?;
    serde_json::to_value(&table["value"]).ok()
}

/// Describes a name, or a table with `type` and the plugin's options.
///
/// The `default` plugin does not need a `type`: its options are merged into the default's table.
fn plugin(kind: &KindDescriptor, plugins: &[PluginDescriptor], default: Option<&Value>) -> Value {
    let default = default.and_then(|value| value.as_str().or_else(|| value.get("type")?.as_str()));
    let of_kind: Vec<_> = plugins.iter().filter(|plugin| plugin.kind == kind.kind).collect();
    let names: Vec<_> = of_kind.iter().map(|plugin| plugin.name).collect();
    let tables = of_kind.iter().map(|plugin| {
        let mut properties = Map::from_iter([(
            "type".to_owned(),
            json!({ "const": plugin.name, "description": plugin.summary }),
        )]);
        let (keys, all) = option_keys(plugin);
        for (key, default) in keys {
            // Such an option may be the function that a strategy takes.
            let path = format!("{}.{}", kind.key, key.name);
            let inner = kind_descriptors().find(|inner| inner.key == path);
            let mut schema = match inner {
                Some(inner) => self::plugin(inner, plugins, None),
                None => of_words(&key.ty),
            };
            describe(&mut schema, &key, default.as_ref());
            properties.insert(key.name.to_string(), schema);
        }
        let required: &[&str] = if default == Some(plugin.name) { &[] } else { &["type"] };
        json!({
            "type": "object",
            "title": plugin.name,
            "description": plugin.summary,
            "properties": properties,
            "required": required,
            "additionalProperties": !all,
        })
    });
    let mut choices = vec![json!({ "enum": names })];
    choices.extend(tables);
    json!({ "anyOf": choices })
}

/// Returns the schema of a type described by a [`KeyDoc`]; for unknown words, of any value.
fn of_words(words: &str) -> Value {
    let words = words.trim().trim_end_matches(", optional");
    if let Some(items) = words.strip_prefix("list of ") {
        let (count, of) = match items.split_once(' ') {
            Some((count, of)) if count.parse::<u32>().is_ok() => (count.parse::<u32>().ok(), of),
            _ => (None, items),
        };
        let mut schema = json!({ "type": "array", "items": of_words(of) });
        if let Some(count) = count {
            schema["minItems"] = count.into();
            schema["maxItems"] = count.into();
        }
        return schema;
    }
    if words == "true or false" {
        return json!({ "type": "boolean" });
    }
    let alternatives: Option<Vec<Value>> =
        words.replace(" or ", ", ").split(", ").map(alternative).collect();
    match alternatives {
        Some(mut one) if one.len() == 1 => one.remove(0),
        Some(all) if all.iter().all(|one| one.get("const").is_some()) => {
            let values: Vec<_> = all.into_iter().map(|mut one| one["const"].take()).collect();
            json!({ "enum": values })
        }
        Some(all) => json!({ "anyOf": all }),
        None => json!({}),
    }
}

fn alternative(words: &str) -> Option<Value> {
    if words.starts_with("list of ") {
        return Some(of_words(words));
    }
    // Text in parentheses is an explanation.
    let words = words.split(" (").next().unwrap_or(words).trim();
    if let Some(quoted) = words.strip_prefix("`\"").and_then(|rest| rest.strip_suffix("\"`")) {
        // `"DD:HH:MM:SS"` shows a format.
        let is_form = quoted.contains(':');
        return Some(if is_form {
            json!({ "type": "string" })
        } else {
            json!({ "const": quoted })
        });
    }
    let named = match words {
        "integer" => return Some(json!({ "type": "integer", "minimum": 0 })),
        "signed integer" => "integer",
        "number" | "float" | "seconds" => "number",
        "string" | "path" => "string",
        "table" => "object",
        _ => return None,
    };
    Some(json!({ "type": named }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_alternative_is_described() {
        let key =
            KeyDoc { name: "x".into(), ty: "integer or `\"auto\"`".to_owned(), doc: "How many." };
        let mut schema = of_words(&key.ty);
        describe(&mut schema, &key, Some(&"\"auto\"".to_owned()));
        insta::assert_snapshot!(schema.to_string(), @r#"{"anyOf":[{"description":"How many.","minimum":0,"type":"integer"},{"const":"auto","description":"How many."}],"default":"auto","description":"How many."}"#);
    }

    #[test]
    fn words_are_schemas() {
        let schema = |words| of_words(words).to_string();
        insta::assert_snapshot!(schema("integer, optional"), @r#"{"minimum":0,"type":"integer"}"#);
        insta::assert_snapshot!(schema("signed integer"), @r#"{"type":"integer"}"#);
        insta::assert_snapshot!(schema("integer or `\"auto\"`"), @r#"{"anyOf":[{"minimum":0,"type":"integer"},{"const":"auto"}]}"#);
        insta::assert_snapshot!(schema("`\"norm\"` or `\"value\"`"), @r#"{"enum":["norm","value"]}"#);
        insta::assert_snapshot!(schema("`\"DD:HH:MM:SS\"` or seconds, optional"), @r#"{"anyOf":[{"type":"string"},{"type":"number"}]}"#);
        insta::assert_snapshot!(schema("list of 2 number"), @r#"{"items":{"type":"number"},"maxItems":2,"minItems":2,"type":"array"}"#);
        insta::assert_snapshot!(schema("path or list of path"), @r#"{"anyOf":[{"type":"string"},{"items":{"type":"string"},"type":"array"}]}"#);
        insta::assert_snapshot!(schema("true or false"), @r#"{"type":"boolean"}"#);
        insta::assert_snapshot!(schema("something else"), @"{}");
    }
}
