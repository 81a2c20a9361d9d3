//! Chat templates: from messages to the text that a model sees.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use chrono::NaiveDate;
use fulgurite_error::files::read_regular;
use fulgurite_error::{Error, Result};
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, ErrorKind, Output, State, Value};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde::Serialize as _;

use super::conversation;
use crate::rows::Place;
use crate::special_tokens::named_token;
use crate::tokenizer_file::located;

/// Maximum length of a template file.
const MAX_FILE: u64 = 16 << 20;
/// Stand in the text for the ends of an answer. Not characters, so no text has them.
const MARKS: [char; 2] = ['\u{fdd0}', '\u{fdd1}'];
/// Tokens that templates write by name.
const TOKENS: [&str; 6] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token"];
/// The template `chatml`.
const CHATML: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n\
    {% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}\
    {% else %}{{ message.content }}<|im_end|>{% endif %}\n\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// A model's chat template, in Jinja as `transformers` renders it.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// The file, for messages.
    name: String,
    source: String,
    /// Whether the template marks answers.
    has_marks: bool,
}

/// A rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    /// The text that the model sees.
    pub text: String,
    /// The bytes that the template marks as answers (`{% generation %}`); `None` without marks in
    /// the template.
    pub answers: Option<Vec<Range<usize>>>,
}

/// A template's inputs beside the messages.
#[derive(Debug, Clone, Default)]
pub struct TemplateOptions {
    /// Variables by name, such as `enable_thinking`.
    pub variables: Vec<(String, Value)>,
    /// The date of `strftime_now`.
    pub date: Option<NaiveDate>,
}

impl TemplateOptions {
    /// The options of a configuration: `data.template_options` and `data.template_date`.
    ///
    /// # Errors
    /// If the date cannot be read.
    pub fn new(
        variables: &BTreeMap<String, serde_json::Value>,
        date: Option<&str>,
    ) -> Result<Self> {
        let variables = variables
            .iter()
            .map(|(name, value)| Ok((name.clone(), serde_json::from_value(value.clone())?)))
            .collect::<Result<_, serde_json::Error>>()
            .map_err(|error| Error::Config(format!("data.template_options: {error}")))?;
        let date = date.map(|date| {
            date.parse::<NaiveDate>().map_err(|_| {
                Error::Config(format!(
                    "data.template_date: expected a date such as \"2026-01-31\", found {date:?}"
                ))
            })
        });
        Ok(Self { variables, date: date.transpose()? })
    }
}

impl ChatTemplate {
    /// Opens the template of a tokenizer: the file or name `wanted`, or the one beside
    /// `tokenizer.json`, in `chat_template.jinja`, `tokenizer_config.json` or `chat_template.json`.
    ///
    /// `wanted` is `data.chat_template`: a file, or `"chatml"`.
    ///
    /// # Errors
    /// If the template is missing, or cannot be read or parsed.
    pub fn open(
        tokenizer: Option<&Path>,
        wanted: Option<&str>,
        options: &TemplateOptions,
    ) -> Result<Self> {
        let folder = tokenizer.map(located).map(|path| match path.is_dir() {
            true => path,
            false => path.parent().unwrap_or(Path::new(".")).to_owned(),
        });
        let (name, source) = match (wanted, &folder) {
            (Some("chatml"), _) => ("chatml".to_owned(), CHATML.to_owned()),
            (Some(path), _) => {
                let path = Path::new(path);
                if !path.exists() {
                    return Err(Error::Config(format!(
                        "data.chat_template: there is no file {}; name one, or \"chatml\"",
                        path.display()
                    )));
                }
                (path.display().to_string(), read_text(path)?)
            }
            (None, Some(folder)) => beside(folder)?.ok_or_else(|| {
                Error::Config(format!(
                    "there is no chat template in {} (chat_template.jinja, or `chat_template` of \
                     tokenizer_config.json), as for models that were not trained to chat; name the template of another \
                     model with data.chat_template, or \"chatml\"",
                    folder.display()
                ))
            })?,
            (None, None) => {
                return Err(Error::Config(
                    "data.chat_template is missing: without a tokenizer of a model no file has one; name a file, or \
                     \"chatml\""
                        .to_owned(),
                ));
            }
        };
        let mut environment = environment(options)?;
        let tokenizer = folder.map(|folder| folder.join("tokenizer.json"));
        for key in TOKENS {
            let token = tokenizer.as_deref().map(|file| named_token(file, key)).transpose()?;
            if let Some((_, token)) = token.flatten() {
                environment.add_global(key, token);
            }
        }
        for (key, value) in &options.variables {
            environment.add_global(key.clone(), value.clone());
        }
        let (marked, has_marks) = with_marks(&source);
        environment.add_template_owned("chat", marked).map_err(|error| failed(&name, &error))?;
        Ok(Self { environment, name, source, has_marks })
    }

    /// Renders the prompt for the assistant's next message. `messages` is a list of objects with
    /// `role` and `content`; `name` is their place, for messages about mistakes.
    ///
    /// # Errors
    /// If `messages` is not a list of messages, or the template refuses it.
    pub fn prompt(&self, name: &str, messages: &serde_json::Value) -> Result<String> {
        let place = Place::named(name);
        let list: Value = serde_json::from_value(messages.clone()).map_err(Error::other)?;
        let messages = conversation::messages(&place, &list)?;
        let rendered = self.render(&messages, &Value::UNDEFINED, true);
        let rendered =
            rendered.map_err(|error| place.wrong(format!("cannot be rendered: {error}")))?;
        Ok(rendered.text)
    }

    /// The file of the template, or its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The template's source.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders a conversation. `messages` is a list of tables with `role` and `content`, `tools`
    /// a list of tools or undefined.
    ///
    /// `prompt` asks for the beginning of the assistant's next message at the end.
    ///
    /// # Errors
    /// If the template fails, or refuses the conversation.
    pub fn render(&self, messages: &[Value], tools: &Value, prompt: bool) -> Result<Rendered> {
        let messages = Value::from(messages.to_vec());
        let context = minijinja::context! {
            messages,
            tools => if tools.is_undefined() { Value::from(()) } else { tools.clone() },
            documents => Value::from(()),
            add_generation_prompt => prompt,
        };
        let template = self.environment.get_template("chat");
        let text = template.and_then(|template| template.render(context));
        let text = text.map_err(|error| failed(&self.name, &error))?;
        if !self.has_marks {
            return Ok(Rendered { text, answers: None });
        }
        let (text, answers) = without_marks(&text);
        Ok(Rendered { text, answers: Some(answers) })
    }
}

fn failed(name: &str, error: &minijinja::Error) -> Error {
    let mut what = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    if what.contains("strftime_now") {
        what = "it writes the date of today, which would change the data from day to day; set data.template_date"
            .to_owned();
    }
    let line = error.line().map_or_else(String::new, |line| format!(", line {line}"));
    Error::Config(format!("{name}{line} (the chat template): {what}"))
}

fn read_text(path: &Path) -> Result<String> {
    String::from_utf8(read_regular(path, MAX_FILE)?)
        .map_err(|_| Error::Data(format!("{} is not UTF-8 text", path.display())))
}

/// The template beside a tokenizer, with the name of its file.
fn beside(folder: &Path) -> Result<Option<(String, String)>> {
    let file = folder.join("chat_template.jinja");
    if file.is_file() {
        return Ok(Some((file.display().to_string(), read_text(&file)?)));
    }
    for name in ["tokenizer_config.json", "chat_template.json"] {
        let file = folder.join(name);
        if !file.is_file() {
            continue;
        }
        let values: serde_json::Value = serde_json::from_str(&read_text(&file)?)
            .map_err(|error| Error::Data(format!("{}: {error}", file.display())))?;
        let template = match values.get("chat_template") {
            Some(serde_json::Value::String(template)) => Some(template.clone()),
            // Several templates by name.
            Some(serde_json::Value::Array(named)) => {
                let default = named.iter().find(|template| template["name"] == "default");
                default.and_then(|template| template["template"].as_str()).map(str::to_owned)
            }
            _ => None,
        };
        if let Some(template) = template {
            return Ok(Some((file.display().to_string(), template)));
        }
    }
    Ok(None)
}

/// An environment that renders as `transformers` sets up Jinja.
fn environment(options: &TemplateOptions) -> Result<Environment<'static>> {
    let mut environment = Environment::new();
    let syntax = minijinja::syntax::SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()
        .map_err(Error::other)?;
    environment.set_syntax(syntax);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(unknown_method_callback);
    environment.set_formatter(write_like_python);
    environment.add_filter("tojson", to_json);
    environment.add_test("iterable", |value: &Value| {
        !matches!(value.kind(), ValueKind::None | ValueKind::Bool | ValueKind::Number)
    });
    environment.add_function("raise_exception", |message: String| -> Result<String, _> {
        Err::<String, _>(minijinja::Error::new(ErrorKind::InvalidOperation, message))
    });
    if let Some(date) = options.date {
        environment
            .add_function("strftime_now", move |format: &str| date.format(format).to_string());
    }
    Ok(environment)
}

/// Writes values in templates as Python does.
fn write_like_python(
    output: &mut Output<'_>,
    state: &mut State<'_, '_>,
    value: &Value,
) -> Result<(), minijinja::Error> {
    let word = match value.kind() {
        ValueKind::None => "None",
        ValueKind::Bool if value.is_true() => "True",
        ValueKind::Bool => "False",
        _ => return minijinja::escape_formatter(output, state, value),
    };
    output.write_str(word).map_err(minijinja::Error::from)
}

/// `tojson` as `transformers` defines it: Python's separators, and no escapes for HTML.
fn to_json(value: &Value, options: Kwargs) -> Result<String, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    for ignored in ["ensure_ascii", "separators", "sort_keys"] {
        let _: Option<Value> = options.get(ignored)?;
    }
    options.assert_all_used()?;
    let mut bytes = Vec::new();
    let written = match indent {
        Some(indent) => {
            let spaces = " ".repeat(indent);
            let pretty = serde_json::ser::PrettyFormatter::with_indent(spaces.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, pretty))
        }
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, Spaced)),
    };
    let failed = |error: String| minijinja::Error::new(ErrorKind::BadSerialization, error);
    written.map_err(|error| failed(error.to_string()))?;
    String::from_utf8(bytes).map_err(|error| failed(error.to_string()))
}

/// JSON in one line, with spaces behind commas and colons.
struct Spaced;

impl serde_json::ser::Formatter for Spaced {
    fn begin_array_value<W: std::io::Write + ?Sized>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: std::io::Write + ?Sized>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: std::io::Write + ?Sized>(
        &mut self,
        writer: &mut W,
    ) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}

/// Replaces `{% generation %}` and its end, which only `transformers` knows, by marks in the text
/// within blocks, which trim spaces as they do. Returns whether there are any.
fn with_marks(source: &str) -> (String, bool) {
    let (mut marked, mut rest, mut found) = (String::new(), source, false);
    while let Some(begin) = rest.find("{%") {
        let Some(end) = rest[begin..].find("%}").map(|end| begin + end) else { break };
        let inside = &rest[begin + 2..end];
        let name = inside.trim_matches(['-', '+']).trim();
        let mark = ["generation", "endgeneration"].iter().position(|tag| *tag == name);
        marked += &rest[..begin];
        match mark {
            None => marked += &rest[begin..end + 2],
            Some(mark) => {
                let sign = |sign: Option<char>| sign.filter(|sign| ['-', '+'].contains(sign));
                let sign = |at| sign(at).map(String::from).unwrap_or_default();
                let (before, after) = (sign(inside.chars().next()), sign(inside.chars().last()));
                marked += &format!("{{%{before} if true %}}{}{{% endif {after}%}}", MARKS[mark]);
                found = true;
            }
        }
        rest = &rest[end + 2..];
    }
    (marked + rest, found)
}

/// Takes the marks out of a text. Returns the bytes between each two.
fn without_marks(marked: &str) -> (String, Vec<Range<usize>>) {
    let (mut text, mut answers, mut begin) = (String::new(), Vec::new(), None);
    for character in marked.chars() {
        match MARKS.iter().position(|mark| *mark == character) {
            Some(0) => begin = Some(text.len()),
            Some(_) => answers.extend(begin.take().map(|begin| begin..text.len())),
            None => text.push(character),
        }
    }
    (text, answers)
}
