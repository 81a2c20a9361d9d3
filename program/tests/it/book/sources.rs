//! [`Sources`]: the names in the workspace's code, as rustfmt formats it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use super::root;

/// Folders with code. This test is excluded: it contains wrong names, and names of other projects.
const FOLDERS: [&str; 13] = [
    ".ci",
    "bench",
    "benches",
    "core",
    "docker",
    "examples",
    "gpu-check",
    "plugins",
    "program",
    "src",
    "strategies",
    "test-support",
    "tests",
];
const ENDINGS: [&str; 7] = ["", "cpp", "cu", "h", "py", "rs", "toml"];

/// Members that every type gets from derives and the language.
const DERIVED: [&str; 7] = ["clone", "default", "eq", "fmt", "from", "into", "to_string"];

/// The names in Rust code.
#[derive(Default)]
pub(super) struct Names {
    /// Functions, fields, constants and variants, by their type, trait or enum.
    members: BTreeMap<String, BTreeSet<String>>,
    /// The traits that a type implements.
    traits: BTreeMap<String, BTreeSet<String>>,
    /// Types by their other names: `type SwiGluMlp = GatedMlp`.
    aliases: BTreeMap<String, String>,
    /// Functions, macros, and types that are built by a call.
    callable: BTreeSet<String>,
    /// Modules, and the names of folders and files.
    modules: BTreeSet<String>,
}

pub(super) struct Sources {
    pub names: Names,
    /// Every word in code, scripts and configuration.
    words: BTreeSet<String>,
    /// Contents of files that are programs or parts of programs.
    pub files: BTreeMap<String, String>,
}

impl Sources {
    pub(super) fn read() -> Self {
        let mut sources =
            Self { names: Names::default(), words: BTreeSet::new(), files: BTreeMap::new() };
        for folder in FOLDERS {
            sources.folder(folder);
        }
        for file in ["Cargo.toml", "clippy.toml", "deny.toml"] {
            sources.file(file);
        }
        sources.names.modules.extend(["core", "fulgurite"].map(str::to_owned));
        sources
    }

    fn folder(&mut self, folder: &str) {
        for entry in fs::read_dir(root().join(folder)).unwrap().flatten() {
            let name = entry.file_name().to_str().unwrap().to_owned();
            let path = format!("{folder}/{name}");
            if !entry.path().is_dir() {
                self.file(&path);
            } else if name != "target" && path != "program/tests/it/book" {
                self.names.modules.insert(name.replace('-', "_"));
                self.folder(&path);
            }
        }
    }

    fn file(&mut self, path: &str) {
        let ending = Path::new(path).extension().map_or("", |ending| ending.to_str().unwrap());
        if !ENDINGS.contains(&ending) {
            return;
        }
        let Ok(text) = fs::read_to_string(root().join(path)) else { return };
        self.words.extend(words(&text).map(str::to_owned));
        if ending == "rs" {
            let stem = Path::new(path).file_stem().unwrap().to_str().unwrap();
            self.names.modules.insert(stem.to_owned());
            self.names.read(&text);
        }
        if path.ends_with("/Cargo.toml")
            && let Some(name) =
                text.split("name = \"").nth(1).and_then(|rest| rest.split('"').next())
        {
            self.names.modules.insert(name.replace('-', "_"));
        }
        self.files.insert(path.to_owned(), text);
    }

    /// Whether some file has this word.
    pub(super) fn has_word(&self, word: &str) -> bool {
        self.words.contains(word)
    }
}

/// The words of a text: letters, digits and `_`.
pub(super) fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

impl Names {
    /// The names in a page's own code.
    pub(super) fn of(code: &str) -> Self {
        let mut names = Self::default();
        names.read(code);
        names
    }

    fn read(&mut self, code: &str) {
        // The enclosing blocks of a line: indentation and type of each.
        let mut blocks: Vec<(usize, String)> = Vec::new();
        for line in code.lines() {
            let text = line.trim_start();
            // Hidden lines of an example.
            let text = text.strip_prefix("# ").map_or(text, str::trim_start);
            let indent = line.len() - text.len();
            if text.is_empty() || text.starts_with("//") || text.starts_with('#') {
                continue;
            }
            if text.starts_with('}') {
                blocks.retain(|(of, _)| *of < indent);
                continue;
            }
            let item = item(text);
            let owner = blocks.last().map(|(_, owner)| owner.clone());
            let mut words = item.splitn(2, ' ');
            let (keyword, rest) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
            match keyword {
                "fn" => {
                    let name = first_word(rest);
                    self.callable.insert(name.to_owned());
                    self.member(owner, name);
                }
                "impl" | "impl<'a>" => self.implementation(rest, indent, text, &mut blocks),
                keyword if keyword.starts_with("impl<") => {
                    let rest = item.trim_start_matches("impl");
                    self.implementation(after_generics(rest), indent, text, &mut blocks);
                }
                "struct" | "enum" | "trait" | "mod" | "union" => {
                    let name = first_word(rest);
                    match keyword {
                        "mod" => _ = self.modules.insert(name.to_owned()),
                        _ => _ = self.members.entry(name.to_owned()).or_default(),
                    }
                    self.callable.insert(name.to_owned());
                    if !text.ends_with(';') && !text.ends_with('}') {
                        blocks.retain(|(of, _)| *of < indent);
                        let owner = if keyword == "mod" { String::new() } else { name.to_owned() };
                        blocks.push((indent, owner));
                    }
                    // `struct Net { first: Linear, … }` in one line.
                    if text.ends_with('}') {
                        for field in text.split(['{', ',']).skip(1) {
                            self.member(Some(name.to_owned()), first_word(item_of_field(field)));
                        }
                    }
                }
                "macro_rules!" => _ = self.callable.insert(first_word(rest).to_owned()),
                "const" | "static" | "type" => {
                    let name = first_word(rest);
                    self.callable.insert(name.to_owned());
                    if let (None, "type", Some((_, of))) = (&owner, keyword, rest.split_once(" = "))
                    {
                        self.aliases.insert(name.to_owned(), type_name(of));
                    }
                    self.member(owner, name);
                }
                _ => {
                    let name = first_word(item);
                    let ends = &item[name.len()..];
                    let is_field = [":", ",", "(", " {", " =", ""].iter().any(|end| match *end {
                        "" => ends.is_empty(),
                        end => ends.starts_with(end),
                    });
                    let direct = blocks.last().is_some_and(|(of, _)| indent == of + 4);
                    if is_field && direct {
                        if name.starts_with(char::is_uppercase) {
                            self.callable.insert(name.to_owned());
                        }
                        self.member(owner, name);
                    }
                }
            }
        }
    }

    fn member(&mut self, owner: Option<String>, name: &str) {
        if let Some(owner) = owner.filter(|owner| !owner.is_empty()) {
            self.members.entry(owner).or_default().insert(name.to_owned());
        }
    }

    /// `Trait for Type {`, or `Type {`.
    fn implementation(
        &mut self,
        rest: &str,
        indent: usize,
        text: &str,
        blocks: &mut Vec<(usize, String)>,
    ) {
        let (of_trait, of_type) = match rest.split_once(" for ") {
            Some((of_trait, of_type)) => (Some(type_name(of_trait)), type_name(of_type)),
            None => (None, type_name(rest)),
        };
        if let Some(of_trait) = of_trait {
            self.traits.entry(of_type.clone()).or_default().insert(of_trait);
        }
        self.members.entry(of_type.clone()).or_default();
        blocks.retain(|(of, _)| *of < indent);
        if !text.ends_with('}') {
            blocks.push((indent, of_type.clone()));
        } else if let Some((_, body)) = text.split_once('{') {
            // An implementation on one line.
            for function in body.split("fn ").skip(1) {
                let name = first_word(function);
                self.callable.insert(name.to_owned());
                self.member(Some(of_type.clone()), name);
            }
        }
    }

    pub(super) fn has_type(&self, name: &str) -> bool {
        self.members.contains_key(name)
    }

    /// Whether a type, trait or enum has this function, field, constant or variant.
    pub(super) fn has_member(&self, of: &str, name: &str) -> bool {
        let of = self.aliases.get(of).map_or(of, String::as_str);
        DERIVED.contains(&name)
            || self.members.get(of).is_some_and(|members| members.contains(name))
            || self
                .traits
                .get(of)
                .into_iter()
                .flatten()
                .any(|of| self.members.get(of).is_some_and(|members| members.contains(name)))
    }

    /// The members of a type as configuration keys.
    pub(super) fn members(&self, of: &str) -> impl Iterator<Item = &String> {
        self.members.get(of).into_iter().flatten()
    }

    pub(super) fn has_callable(&self, name: &str) -> bool {
        self.callable.contains(name)
    }

    pub(super) fn has_module(&self, name: &str) -> bool {
        self.modules.contains(name)
    }
}

/// A line without everything before the keyword.
fn item(mut text: &str) -> &str {
    loop {
        let rest = ["pub ", "unsafe ", "async ", "extern \"C\" ", "default "]
            .iter()
            .find_map(|word| text.strip_prefix(word))
            .or_else(|| Some(text.strip_prefix("pub(")?.split_once(") ")?.1))
            .or_else(|| text.strip_prefix("const ").filter(|rest| rest.starts_with("fn ")))
            .or_else(|| text.strip_prefix("const ").filter(|rest| rest.starts_with("unsafe ")));
        match rest {
            Some(rest) => text = rest,
            None => return text,
        }
    }
}

fn item_of_field(field: &str) -> &str {
    item(field.trim())
}

fn first_word(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(text.len());
    &text[..end]
}

/// The text after `<…>`.
fn after_generics(text: &str) -> &str {
    let mut depth = 0;
    for (at, c) in text.char_indices() {
        match c {
            '<' => depth += 1,
            '>' if !text[..at].ends_with('-') => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return text[at + c.len_utf8()..].trim_start();
        }
    }
    ""
}

/// The name of a type, without its path, generics and references.
fn type_name(text: &str) -> String {
    let text = text.trim_start_matches(['&', '!', '(']);
    let text = ["'a ", "'_ ", "mut ", "dyn "]
        .iter()
        .fold(text, |text, word| text.strip_prefix(word).unwrap_or(text));
    let end = text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != ':');
    let path = &text[..end.unwrap_or(text.len())];
    path.rsplit("::").next().unwrap_or(path).to_owned()
}
