//! Cuts of long texts: the pieces, tokenized one by one, have the ids of the whole text.
//!
//! A tokenizer changes the text (normalizer), splits it into words (pre-tokenizer) and looks up the
//! tokens of each word (model). A text is cut before a space or a line end. Both must hold for the
//! character before the cut: no step looks across the cut, and some step splits there. The parts of
//! `tokenizer.json` decide this for each character. Unknown parts allow no cut, and the text is
//! tokenized whole.

use regex_syntax::hir::{ClassUnicode, ClassUnicodeRange, HirKind};
use serde_json::Value;
use tokenizers::models::ModelWrapper;
use tokenizers::{AddedToken, NormalizedString, Normalizer as _, Tokenizer};

use crate::pattern::{Pattern, contains};
use crate::tokenizer_file::TokenizerFile;

/// The words of a `ByteLevel` pre-tokenizer with `use_regex`.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// How sentencepiece writes a space.
const SPACE: char = '▁';
/// Characters on both sides of a cut that are normalized to compare.
const WINDOW: usize = 32;

/// The cuts of a tokenizer.
#[derive(Debug, Clone, Default)]
pub(crate) struct Cuts {
    rules: Vec<Rule>,
    added: Vec<AddedToken>,
    normalizes: bool,
}

/// Text may be cut before `next` if one of `before` precedes it.
#[derive(Debug, Clone)]
struct Rule {
    next: char,
    before: ClassUnicode,
    /// The normalizer puts a space before each text, so the next piece drops its own space.
    drops_next: bool,
}

impl Cuts {
    /// The cuts that the parts of a tokenizer allow.
    pub(crate) fn of(file: &TokenizerFile) -> Self {
        let added: Vec<AddedToken> =
            file.tokenizer.get_added_tokens_decoder().into_values().collect();
        let rules = [' ', '\n'].into_iter().filter_map(|next| Search::rule(file, &added, next));
        Self { rules: rules.collect(), added, normalizes: !file.parts.normalizer.is_null() }
    }

    /// The pieces of a text. Each but the last has at least `size` bytes.
    pub(crate) fn pieces<'a>(
        &'a self,
        tokenizer: &'a Tokenizer,
        text: &'a str,
        size: usize,
    ) -> impl Iterator<Item = &'a str> {
        let mut start = Some(0_usize);
        std::iter::from_fn(move || {
            let from = start?;
            let cut = self.next_cut(tokenizer, text, from.saturating_add(size));
            start = cut.map(|(_, next)| next);
            Some(&text[from..cut.map_or(text.len(), |(end, _)| end)])
        })
    }

    /// The end of a piece, at byte `from` or later, and the start of the next piece.
    fn next_cut(&self, tokenizer: &Tokenizer, text: &str, from: usize) -> Option<(usize, usize)> {
        if self.rules.is_empty() || from >= text.len() {
            return None;
        }
        let start = (from..text.len()).find(|&at| text.is_char_boundary(at))?;
        let mut before = text[..start].chars().next_back();
        for (offset, next) in text[start..].char_indices() {
            let at = start + offset;
            if let Some(rule) = self.rules.iter().find(|rule| rule.next == next)
                && before.is_some_and(|before| contains(&rule.before, before))
                && let Some(next) = self.allows(tokenizer, rule, text, at)
            {
                return Some((at, next));
            }
            before = Some(next);
        }
        None
    }

    /// The start of the next piece if the text may be cut at byte `at`.
    fn allows(&self, tokenizer: &Tokenizer, rule: &Rule, text: &str, at: usize) -> Option<usize> {
        let (left, right) = text.split_at(at);
        let next = if rule.drops_next { at + rule.next.len_utf8() } else { at };
        let rest = &text[next..];
        if rest.is_empty() {
            return None;
        }
        for token in &self.added {
            let content = token.content.as_str();
            let crosses = |(middle, _): (usize, char)| {
                middle > 0
                    && left.ends_with(&content[..middle])
                    && right.starts_with(&content[middle..])
            };
            let ends = (token.rstrip || rule.drops_next) && left.ends_with(content);
            let begins = rule.drops_next && rest.starts_with(content);
            if ends || begins || content.char_indices().any(crosses) {
                return None;
            }
        }
        if !self.normalizes {
            return Some(next);
        }
        let near_left = tail(left);
        let normal = |text: &str| normalized(tokenizer, text);
        let before = normal(near_left)?;
        let same = normal(&format!("{near_left}{}", head(right)))?
            == before.clone() + &normal(&head(right)[next - at..])?;
        (same && contains(&rule.before, before.chars().next_back()?)).then_some(next)
    }
}

fn normalized(tokenizer: &Tokenizer, text: &str) -> Option<String> {
    let mut normalized = NormalizedString::from(text);
    if let Some(normalizer) = tokenizer.get_normalizer() {
        normalizer.normalize(&mut normalized).ok()?;
    }
    Some(normalized.get().to_owned())
}

fn tail(text: &str) -> &str {
    text.char_indices().rev().take(WINDOW).last().map_or("", |(start, _)| &text[start..])
}

fn head(text: &str) -> &str {
    text.char_indices().nth(WINDOW).map_or(text, |(end, _)| &text[..end])
}

/// Follows a cut through the parts of a tokenizer.
struct Search {
    next: char,
    before: ClassUnicode,
    /// The characters that `next` may have become.
    images: Vec<char>,
    /// Whether a step has split the text at the cut.
    split: bool,
    drops_next: bool,
    /// Whether the normalizer has replaced all spaces.
    no_spaces: bool,
}

impl Search {
    fn rule(file: &TokenizerFile, added: &[AddedToken], next: char) -> Option<Rule> {
        let mut search = Self {
            next,
            before: class(r"\S")?,
            images: vec![next],
            split: false,
            drops_next: false,
            no_spaces: false,
        };
        search.normalize(&file.parts.normalizer)?;
        search.pre_tokenize(&file.parts.pre_tokenizer)?;
        if !search.split {
            search.look_up(&file.tokenizer)?;
        }
        for token in added {
            search.add(token, &file.tokenizer)?;
        }
        if search.drops_next && (next != ' ' || search.images != [SPACE]) {
            return None;
        }
        for image in &search.images {
            search.before.difference(&single(*image));
        }
        Some(Rule { next, before: search.before, drops_next: search.drops_next })
    }

    fn normalize(&mut self, part: &Value) -> Option<()> {
        match kind(part) {
            "" if part.is_null() => {}
            "Sequence" => {
                for part in part.get("normalizers")?.as_array()? {
                    self.normalize(part)?;
                }
            }
            "NFC" | "NFD" | "NFKC" | "NFKD" | "Lowercase" | "StripAccents" => {}
            "Precompiled" if self.next == ' ' => {}
            "BertNormalizer" if self.next == ' ' => {}
            // The normalizer adds the space that the piece drops.
            "Prepend" if self.next == ' ' && part.get("prepend")?.as_str()? == "▁" => {
                self.drops_next = true;
            }
            "Replace" => self.replace(part)?,
            _ => return None,
        }
        Some(())
    }

    fn replace(&mut self, part: &Value) -> Option<()> {
        let (pattern, content) = (part.get("pattern")?, part.get("content")?.as_str()?);
        let string = pattern.get("String").and_then(Value::as_str);
        let matches = pattern_of(pattern)?;
        let mut images = Vec::new();
        for &image in &self.images {
            let mut crossing = matches.before(image);
            crossing.difference(&class(r"\s")?);
            crossing.difference(&single(image));
            if !crossing.ranges().is_empty() {
                return None;
            }
            let always = string.is_some_and(|string| string.chars().eq([image]));
            if always || matches.has(image) {
                images.push(content.chars().next()?);
            }
            if !always {
                images.push(image);
            }
        }
        self.no_spaces |= string == Some(" ") && !content.contains(' ');
        images.dedup();
        self.images = images;
        // Other characters may be part of a word.
        self.images.iter().all(|image| [' ', '\n', SPACE].contains(image)).then_some(())
    }

    fn pre_tokenize(&mut self, part: &Value) -> Option<()> {
        let kind = kind(part);
        if kind == "Sequence" {
            for part in part.get("pretokenizers")?.as_array()? {
                self.pre_tokenize(part)?;
            }
            return Some(());
        }
        let text = |key: &str| part.get(key).and_then(Value::as_str);
        let flag = |key: &str| part.get(key).and_then(Value::as_bool);
        if self.split {
            // Both sides are words now. Only `first` still sees which word begins the text.
            return (kind != "Metaspace" || text("prepend_scheme") != Some("first")).then_some(());
        }
        let spaces_only = self.images.iter().all(|image| image.is_whitespace());
        match kind {
            "" if part.is_null() => {}
            "Whitespace" | "WhitespaceSplit" | "BertPreTokenizer" if spaces_only => {
                self.split = true;
            }
            "ByteLevel" if flag("use_regex").unwrap_or(true) => {
                // Adds a space before a text without one.
                if flag("add_prefix_space")? && self.images != [' '] {
                    return None;
                }
                self.split_by(&Pattern::new(GPT2)?);
            }
            "Split" => match text("behavior")? {
                "Isolated" | "Removed" => self.split_by(&pattern_of(part.get("pattern")?)?),
                _ => {
                    let string = part.get("pattern")?.get("String")?.as_str()?;
                    // The normalizer has replaced all spaces.
                    return (self.no_spaces && string.contains(' ')).then_some(());
                }
            },
            // These split at other characters.
            "Digits" => {}
            "Punctuation" => {
                let behavior = text("behavior").unwrap_or("Isolated");
                return ["Isolated", "Removed", "Contiguous"].contains(&behavior).then_some(());
            }
            "CharDelimiterSplit" => {
                let delimiter = text("delimiter")?.chars().next()?;
                self.split = self.images == [delimiter];
                return (self.split || !self.images.contains(&delimiter)).then_some(());
            }
            "Metaspace" => {
                let replacement = text("replacement")?.chars().next()?;
                if !self.images.iter().all(|image| [' ', replacement].contains(image)) {
                    return None;
                }
                self.images = vec![replacement];
                self.split = flag("split").unwrap_or(true);
            }
            _ => return None,
        }
        Some(())
    }

    /// Splits the text into matches of a pattern and the gaps between them.
    fn split_by(&mut self, pattern: &Pattern) {
        for image in &self.images {
            self.before.difference(&pattern.before(*image));
        }
        self.split = self.images.iter().all(|image| pattern.matches_alone(*image));
    }

    /// Removes characters after which a token of the vocabulary can cross the cut.
    fn look_up(&mut self, tokenizer: &Tokenizer) -> Option<()> {
        let ModelWrapper::BPE(model) = tokenizer.get_model() else { return None };
        let affix = model.continuing_subword_prefix.is_some() || model.end_of_word_suffix.is_some();
        if affix || model.ignore_merges {
            return None;
        }
        let tokens = tokenizer.get_vocab(false);
        for image in &self.images {
            // An unknown character may share a token with the character before it.
            tokens.get(image.encode_utf8(&mut [0; 4]) as &str)?;
        }
        for token in tokens.keys() {
            for (first, second) in token.chars().zip(token.chars().skip(1)) {
                if self.images.contains(&second) && !self.images.contains(&first) {
                    self.before.difference(&single(first));
                }
            }
        }
        Some(())
    }

    /// Checks that added tokens cannot cross a cut unseen by [`Cuts::allows`].
    fn add(&self, token: &AddedToken, tokenizer: &Tokenizer) -> Option<()> {
        let is_border = |c: char| c == self.next || self.images.contains(&c);
        if token.single_word && token.content.starts_with(is_border) {
            return None;
        }
        if !token.normalized {
            return Some(());
        }
        let crosses = |content: &str| {
            let mut pairs = content.chars().zip(content.chars().skip(1));
            pairs.any(|(first, second)| is_border(second) && !is_border(first))
        };
        let content = normalized(tokenizer, &token.content)?;
        (!token.rstrip && !crosses(&token.content) && !crosses(&content)).then_some(())
    }
}

fn kind(part: &Value) -> &str {
    part.get("type").and_then(Value::as_str).unwrap_or("")
}

fn pattern_of(pattern: &Value) -> Option<Pattern> {
    match (pattern.get("String"), pattern.get("Regex")) {
        (Some(string), None) => Pattern::of_string(string.as_str()?),
        (None, Some(regex)) => Pattern::new(regex.as_str()?),
        _ => None,
    }
}

fn single(character: char) -> ClassUnicode {
    ClassUnicode::new([ClassUnicodeRange::new(character, character)])
}

fn class(regex: &str) -> Option<ClassUnicode> {
    match regex_syntax::parse(regex).ok()?.into_kind() {
        HirKind::Class(regex_syntax::hir::Class::Unicode(class)) => Some(class),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
