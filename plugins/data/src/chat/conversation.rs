//! Rows of several forms as conversations.

use fulgurite_error::Result;
use minijinja::Value;
use minijinja::value::ValueKind;

use crate::rows::Place;

/// Columns of rows, in the order in which [`Conversation::of`] takes them.
pub(super) const COLUMNS: [&str; 15] = [
    "messages",
    "conversations",
    "prompt",
    "completion",
    "instruction",
    "input",
    "output",
    "system",
    "tools",
    "chosen",
    "rejected",
    "reference_chosen_logp",
    "reference_rejected_logp",
    "label",
    "margin",
];

/// Roles of messages, including ShareGPT's.
const ROLES: [(&str, &str); 13] = [
    ("system", "system"),
    ("developer", "developer"),
    ("user", "user"),
    ("human", "user"),
    ("assistant", "assistant"),
    ("gpt", "assistant"),
    ("chatgpt", "assistant"),
    ("model", "assistant"),
    ("tool", "tool"),
    ("function", "tool"),
    ("observation", "tool"),
    ("ipython", "ipython"),
    ("function_call", "assistant"),
];

/// The content of a row.
#[derive(Debug, Clone)]
pub(super) enum Conversation {
    /// Messages, for a chat template.
    Messages {
        messages: Vec<Value>,
        /// The messages from here on are answers to learn.
        from: usize,
        tools: Value,
    },
    /// A text and its continuation, without a template.
    Plain { prompt: String, completion: String },
}

impl Conversation {
    /// Reads the values of a row's [`COLUMNS`].
    ///
    /// # Errors
    /// If the row is not in one of the forms, or a message is without a role or content.
    pub(super) fn of(place: &Place, values: &[Value]) -> Result<Self> {
        let column = |name: &str| column(values, name);
        let tools = match column("tools") {
            None => Value::UNDEFINED,
            Some(tools) => parsed(place, "tools", tools)?,
        };
        let with_system = |mut messages: Vec<Value>| {
            if let Some(system) = column("system").filter(|system| system.as_str() != Some("")) {
                messages.insert(0, message("system", system.clone()));
            }
            messages
        };
        if let Some(list) = column("messages").or_else(|| column("conversations")) {
            let messages = with_system(messages(place, &parsed(place, "messages", list)?)?);
            return Ok(Self::Messages { messages, from: 0, tools });
        }
        match (column("prompt"), column("completion")) {
            (Some(prompt), Some(completion)) => {
                if let (Some(prompt), Some(completion)) = (prompt.as_str(), completion.as_str()) {
                    let (prompt, completion) = (prompt.to_owned(), completion.to_owned());
                    return Ok(Self::Plain { prompt, completion });
                }
                let mut all = with_system(messages(place, prompt)?);
                let from = all.len();
                all.extend(messages(place, completion)?);
                return Ok(Self::Messages { messages: all, from, tools });
            }
            (Some(_), None) if column("chosen").is_some() => {
                return Err(place.wrong(
                    "has a `prompt` with `chosen` and `rejected`, which are for `module.type` = \"preference\"",
                ));
            }
            (Some(_), None) => return Err(place.wrong("has a `prompt` and no `completion`")),
            (None, Some(_)) => return Err(place.wrong("has a `completion` and no `prompt`")),
            (None, None) => {}
        }
        let text = |name: &str| column(name).and_then(|value| value.as_str()).map(str::to_owned);
        match (text("instruction"), text("output")) {
            (Some(instruction), Some(output)) => {
                let input = text("input").filter(|input| !input.is_empty());
                let question = match input {
                    Some(input) => format!("{instruction}\n\n{input}"),
                    None => instruction,
                };
                let messages = vec![
                    message("user", Value::from(question)),
                    message("assistant", Value::from(output)),
                ];
                Ok(Self::Messages { messages: with_system(messages), from: 0, tools })
            }
            _ => Err(place.wrong(
                "is no conversation: expected `messages` (a list of tables with `role` and `content`), `conversations` \
                 (with `from` and `value`), `prompt` and `completion`, or `instruction` and `output`",
            )),
        }
    }

    /// Reads the values of a row's [`COLUMNS`] as a prompt with its answer, which is the last
    /// message.
    ///
    /// # Errors
    /// As [`of`](Self::of), and if the last message is not an answer.
    pub(super) fn with_answer(place: &Place, values: &[Value]) -> Result<Self> {
        let mut conversation = Self::of(place, values)?;
        if let Self::Messages { messages, from, .. } = &mut conversation
            && *from == 0
        {
            *from = messages.len() - 1;
            if *from == 0 || !is_answer(&messages[*from]) {
                return Err(place.wrong("has messages that do not end with an answer to a message"));
            }
        }
        Ok(conversation)
    }
}

/// Two answers to one prompt.
pub(super) struct Pair {
    pub(super) chosen: Conversation,
    pub(super) rejected: Conversation,
    /// The log-probabilities of the answers under the reference model, if the row has them.
    pub(super) reference: Option<[f32; 2]>,
    /// How much better the chosen answer is at least, if the row says it.
    pub(super) margin: Option<f32>,
}

impl Pair {
    /// Reads the values of a row's [`COLUMNS`]: `chosen` and `rejected`, with a `prompt`, or as
    /// conversations that begin alike.
    ///
    /// # Errors
    /// If a column is missing or of another form.
    pub(super) fn of(place: &Place, values: &[Value]) -> Result<Self> {
        let column = |name: &str| column(values, name);
        let (Some(chosen), Some(rejected)) = (column("chosen"), column("rejected")) else {
            return Err(place.wrong(
                "is no preference: expected `chosen` and `rejected`, with a `prompt` or as conversations that begin alike",
            ));
        };
        // Columns of CSV files are texts.
        let number = |name: &str| -> Result<Option<f32>> {
            let Some(value) = column(name) else { return Ok(None) };
            let number = match value.as_str() {
                Some(text) => text.trim().parse().ok(),
                None => f64::try_from(value.clone()).ok(),
            };
            match number.filter(|number: &f64| number.is_finite()) {
                Some(number) => Ok(Some(number as f32)),
                None => Err(place.wrong(format!("has the `{name}` {value}: expected a number"))),
            }
        };
        let chosen_logp = number("reference_chosen_logp")?;
        let reference = chosen_logp.zip(number("reference_rejected_logp")?).map(<[f32; 2]>::from);
        let tools = match column("tools") {
            None => Value::UNDEFINED,
            Some(tools) => parsed(place, "tools", tools)?,
        };
        let margin = number("margin")?;
        let pair = |chosen, rejected| Self { chosen, rejected, reference, margin };
        if let (Some(chosen), Some(rejected)) = (chosen.as_str(), rejected.as_str()) {
            let Some(prompt) = column("prompt").and_then(|prompt| prompt.as_str()) else {
                return Err(
                    place.wrong("has texts as `chosen` and `rejected`, and no text as `prompt`")
                );
            };
            let plain = |completion: &str| Conversation::Plain {
                prompt: prompt.to_owned(),
                completion: completion.to_owned(),
            };
            return Ok(pair(plain(chosen), plain(rejected)));
        }
        let (chosen, rejected) = (messages(place, chosen)?, messages(place, rejected)?);
        let mut prompt = match column("prompt") {
            None => Vec::new(),
            Some(prompt) => match prompt.as_str() {
                Some(text) => vec![message("user", Value::from(text))],
                None => messages(place, prompt)?,
            },
        };
        if let Some(system) = column("system").filter(|system| system.as_str() != Some("")) {
            prompt.insert(0, message("system", system.clone()));
        }
        let shared = chosen.iter().zip(&rejected).take_while(|(a, b)| a == b).count();
        let from = prompt.len() + shared;
        if from == 0 {
            return Err(place
                .wrong("has answers without a prompt: `chosen` and `rejected` begin differently"));
        }
        let conversation = |answer: Vec<Value>| Conversation::Messages {
            messages: prompt.iter().cloned().chain(answer).collect(),
            from,
            tools: tools.clone(),
        };
        Ok(pair(conversation(chosen), conversation(rejected)))
    }
}

/// An answer that is good or bad.
pub(super) struct Judged {
    pub(super) conversation: Conversation,
    pub(super) is_desirable: bool,
}

impl Judged {
    /// Reads the values of a row's [`COLUMNS`]: `label`, and a conversation whose last message is
    /// the answer.
    ///
    /// # Errors
    /// If a column is missing or of another form.
    pub(super) fn of(place: &Place, values: &[Value]) -> Result<Self> {
        let Some(label) = column(values, "label") else {
            return Err(place.wrong(
                "has no `label`: expected true for a good answer, false for a bad one, beside `prompt` and \
                 `completion` or `messages`",
            ));
        };
        let is_desirable = match label.to_string().to_ascii_lowercase().as_str() {
            "true" | "1" => true,
            "false" | "0" => false,
            _ => {
                return Err(place.wrong(format!("has the `label` {label}: expected true or false")));
            }
        };
        Ok(Self { conversation: Conversation::with_answer(place, values)?, is_desirable })
    }
}

/// A value of a row that is not null.
fn column<'a>(values: &'a [Value], name: &str) -> Option<&'a Value> {
    let index = COLUMNS.iter().position(|column| *column == name);
    index.and_then(|i| values.get(i)).filter(|value| !value.is_undefined() && !value.is_none())
}

/// Whether a message is the assistant's.
pub(super) fn is_answer(message: &Value) -> bool {
    message.get_attr("role").is_ok_and(|role| role.as_str() == Some("assistant"))
}

pub(super) fn message(role: &str, content: Value) -> Value {
    Value::from_pairs([("role", Value::from(role)), ("content", content)])
}

/// A value, or the JSON of a text.
pub(super) fn parsed(place: &Place, name: &str, value: &Value) -> Result<Value> {
    match value.as_str() {
        None => Ok(value.clone()),
        Some(text) => serde_json::from_str(text).map_err(|error| {
            place.wrong(format!("has a text as `{name}` that is not JSON: {error}"))
        }),
    }
}

/// A list of messages, with roles and content under the names that templates use.
pub(super) fn messages(place: &Place, list: &Value) -> Result<Vec<Value>> {
    if list.kind() != ValueKind::Seq {
        return Err(place.wrong("has no list of messages where one is expected"));
    }
    let items = list.try_iter().map_err(|error| place.wrong(error))?;
    let all =
        items.enumerate().map(|(i, item)| one(place, i, &item)).collect::<Result<Vec<_>>>()?;
    match all.is_empty() {
        true => Err(place.wrong("has an empty list of messages")),
        false => Ok(all),
    }
}

fn one(place: &Place, i: usize, item: &Value) -> Result<Value> {
    let attribute = |name: &str| item.get_attr(name).ok().filter(|value| !value.is_undefined());
    let is_sharegpt = attribute("role").is_none() && attribute("from").is_some();
    let role = attribute(if is_sharegpt { "from" } else { "role" });
    let Some(role) = role.as_ref().and_then(|role| role.as_str()) else {
        return Err(place.wrong(format!("has a message {i} without a `role`")));
    };
    let Some((_, name)) = ROLES.iter().find(|(known, _)| *known == role) else {
        return Err(place.wrong(format!(
            "has a message {i} of the unknown role {role:?}; the roles are system, developer, user, assistant, tool \
             and ipython"
        )));
    };
    let content = attribute(if is_sharegpt { "value" } else { "content" });
    let has_calls = attribute("tool_calls").is_some_and(|calls| calls.is_true());
    let content = match content {
        Some(content) if !content.is_none() => content,
        _ if has_calls => Value::from(""),
        _ => return Err(place.wrong(format!("has a message {i} without `content`"))),
    };
    let mut pairs = vec![("role".to_owned(), Value::from(*name)), ("content".to_owned(), content)];
    if !is_sharegpt {
        let keys = item.try_iter().map_err(|error| place.wrong(error))?;
        for key in keys.filter_map(|key| key.as_str().map(str::to_owned)) {
            // A null is a column that only other messages have.
            let value = attribute(&key).filter(|value| !value.is_none());
            if let Some(value) = value.filter(|_| key != "role" && key != "content") {
                pairs.push((key, value));
            }
        }
    }
    Ok(Value::from_pairs(pairs))
}
