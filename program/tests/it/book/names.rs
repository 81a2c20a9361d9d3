//! Types, functions and other names in code.

use super::others;
use super::page::Page;
use super::sources::{Names, Sources};

/// Names of values in pages, with their possible types.
const VALUES: [(&str, &[&str]); 9] = [
    ("b", &["ModuleBuilder"]),
    ("context", &["HookContext", "ExecutionContext"]),
    ("ctx", &["StepContext", "HookContext"]),
    ("fabric", &["Fabric"]),
    ("optimizer", &["FabricOptimizer", "HookContext"]),
    ("trained", &["Trained"]),
    ("trainer", &["Trainer"]),
    ("tree", &["ModuleTree"]),
    ("unit", &["UnitHandle"]),
];

/// Pages about traits: a name with `_` belongs to one of these types unless a type precedes it.
const SUBJECTS: [(&str, &[&str]); 2] = [
    ("docs/src/guides/data-module.md", &["DataModule", "LightningModule"]),
    (
        "docs/src/guides/writing-a-strategy.md",
        &["Capabilities", "Parameter", "ParameterSlot", "Strategy", "StrategyExtensions"],
    ),
];

/// Complaints about a page, with their lines.
pub(super) fn wrong(page: &Page, sources: &Sources) -> Vec<(usize, String)> {
    let code = page.blocks.iter().filter(|block| block.language.starts_with("rust"));
    let code: String = code.map(|block| block.text.as_str()).collect();
    let python = page.blocks.iter().filter(|block| block.language == "python");
    let python: String = python.map(|block| block.text.as_str()).collect();
    let checker = Checker { sources, own: Names::of(&code) };
    let mut wrong = Vec::new();
    for span in &page.spans {
        if others::is_of_others(&span.text) || is_command(&span.text) {
            continue;
        }
        for complaint in checker.complaints(&span.text) {
            wrong.push((span.line, complaint));
        }
        // A single name.
        let text = span.text.trim_end_matches('!');
        let is_word = text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        let is_name = text.contains('_') || is_camel(text);
        let known = || sources.has_word(text) || code.contains(text) || python.contains(text);
        if is_word && is_name && !known() {
            wrong.push((span.line, format!("nothing is called `{text}`")));
        }
        let subject = SUBJECTS.iter().find(|(name, _)| *name == page.name);
        if let Some((_, types)) = subject
            && is_word
            && text.contains('_')
            && !types.iter().any(|of| sources.names.has_member(of, text))
        {
            wrong.push((span.line, format!("{} has no `{text}`", types.join(" or "))));
        }
    }
    wrong
}

/// Whether the name is in camel case, as for a type.
fn is_camel(text: &str) -> bool {
    let mut last = ' ';
    text.chars().any(|c| std::mem::replace(&mut last, c).is_ascii_lowercase() && c.is_uppercase())
}

struct Checker<'a> {
    sources: &'a Sources,
    /// The names in the page's own code.
    own: Names,
}

impl Checker<'_> {
    fn complaints(&self, text: &str) -> Vec<String> {
        mentions(text).iter().filter_map(|mention| self.complaint(text, mention)).collect()
    }

    fn complaint(&self, text: &str, mention: &Mention) -> Option<String> {
        let Mention { path, start, end } = mention;
        let (before, after) = (&text[..*start], &text[*end..]);
        // `register_…!`
        if after.starts_with('…') {
            return None;
        }
        let [name] = path[..] else { return self.path(path) };
        let is_call = after.starts_with('(');
        let of = VALUES.iter().find(|(value, _)| before.strip_suffix('.') == Some(value));
        // `trainer` and `optimizer` are also tables of the configuration.
        let is_table = |value: &str| ["optimizer", "trainer"].contains(&value) && is_key(text);
        match of {
            Some((value, types)) if is_call || !is_table(value) => {
                let known = types.iter().any(|of| self.has_member(of, name));
                (!known).then(|| format!("{} has no `{name}`", types.join(" or ")))
            }
            _ => {
                let is_macro = after.starts_with("!(");
                // A macro may be defined by another macro.
                let known = !(is_call || is_macro)
                    || self.has_callable(name)
                    || is_macro && self.sources.has_word(name);
                (!known).then(|| format!("there is no function `{name}`"))
            }
        }
    }

    /// A path of several names.
    fn path(&self, path: &[&str]) -> Option<String> {
        if others::is_of_others(path[0]) {
            return None;
        }
        let [of, name] = [path[path.len() - 2], path[path.len() - 1]];
        let names = [&self.sources.names, &self.own];
        let known = if of.starts_with(char::is_uppercase) {
            self.has_member(of, name)
        } else {
            path[..path.len() - 1].iter().all(|of| names.iter().any(|names| names.has_module(of)))
                && names.iter().any(|names| {
                    names.has_module(name) || names.has_callable(name) || names.has_type(name)
                })
        };
        (!known).then(|| format!("there is no `{}`", path.join("::")))
    }

    fn has_member(&self, of: &str, name: &str) -> bool {
        self.sources.names.has_member(of, name) || self.own.has_member(of, name)
    }

    fn has_callable(&self, name: &str) -> bool {
        self.sources.names.has_callable(name)
            || self.own.has_callable(name)
            || others::is_of_others(name)
            || STANDARD.contains(&name)
    }
}

/// A name in code, or a path.
struct Mention<'a> {
    /// `["Fabric", "save"]` of `Fabric::save`.
    path: Vec<&'a str>,
    /// Position in the text.
    start: usize,
    end: usize,
}

/// The names in code, except names in strings.
fn mentions(text: &str) -> Vec<Mention<'_>> {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let word_end =
        |from: usize| text[from..].find(|c| !is_word(c)).map_or(text.len(), |length| from + length);
    let mut mentions = Vec::new();
    let (mut at, mut quoted) = (0, false);
    while let Some(c) = text[at..].chars().next() {
        if c == '"' {
            quoted = !quoted;
        }
        if quoted || !is_word(c) {
            at += c.len_utf8();
            continue;
        }
        let start = at;
        let mut path = Vec::new();
        loop {
            let end = word_end(at);
            path.push(&text[at..end]);
            at = end;
            // `::<Net>`
            if text[at..].starts_with("::<") {
                at = text[at..].find('>').map_or(text.len(), |end| at + end + 1);
            }
            match text[at..].strip_prefix("::") {
                Some(rest) if rest.starts_with(is_word) => at += 2,
                _ => break,
            }
        }
        mentions.push(Mention { path, start, end: at });
    }
    mentions
}

/// Whether the text is a shell command, which [`commands`](super::commands) checks.
fn is_command(text: &str) -> bool {
    text.starts_with('-') || text.contains(" --")
}

/// Functions and macros of the standard library, and attributes.
const STANDARD: [&str; 5] = ["Ok", "Some", "derive", "serde", "todo"];

/// Whether this looks like a configuration key, perhaps with a value.
fn is_key(text: &str) -> bool {
    let key = text.split(['=', ' ']).next().unwrap_or_default();
    key.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "._".contains(c))
}
