//! [`Page`]: the checked parts of a Markdown file.

use super::root;

/// A Markdown file.
pub(super) struct Page {
    /// Its path in the repository.
    pub name: String,
    /// Inline code, without its backticks and with single spaces.
    pub spans: Vec<Code>,
    /// Fenced code.
    pub blocks: Vec<Block>,
    /// Targets of links and pictures.
    pub links: Vec<Code>,
    /// The anchors of its headings.
    pub anchors: Vec<String>,
}

/// Code or a link, with its line.
pub(super) struct Code {
    /// Counted from 1.
    pub line: usize,
    pub text: String,
}

pub(super) struct Block {
    /// The number of its first line.
    pub line: usize,
    /// The language after the fence.
    pub language: String,
    pub text: String,
}

impl Page {
    /// The README, the book, and the pages beside them.
    pub(super) fn all() -> Vec<Self> {
        let mut names: Vec<String> =
            ["AGENTS.md", "README.md", "SECURITY.md", "examples/plugin-crate/README.md"]
                .map(str::to_owned)
                .into();
        let mut folders = vec!["docs".to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(root().join(&folder)).unwrap().flatten() {
                let name = format!("{folder}/{}", entry.file_name().to_str().unwrap());
                if entry.path().is_dir() {
                    folders.push(name);
                } else if name.ends_with(".md") {
                    names.push(name);
                }
            }
        }
        names.sort();
        let read = |name: &String| std::fs::read_to_string(root().join(name)).unwrap();
        names.iter().map(|name| Self::of(name, &read(name))).collect()
    }

    pub(super) fn of(name: &str, text: &str) -> Self {
        let mut page = Self {
            name: name.to_owned(),
            spans: Vec::new(),
            blocks: Vec::new(),
            links: Vec::new(),
            anchors: Vec::new(),
        };
        let mut open: Option<(String, Block)> = None;
        let mut paragraph = String::new();
        let mut start = 1;
        for (line, text) in (1..).zip(text.lines()) {
            let trimmed = text.trim_start();
            if let Some((fence, block)) = &mut open {
                if trimmed.starts_with(fence.as_str()) {
                    page.blocks.extend(open.take().map(|(_, block)| block));
                } else {
                    block.text += text;
                    block.text.push('\n');
                }
                continue;
            }
            let ticks = trimmed.len() - trimmed.trim_start_matches('`').len();
            if ticks >= 3 || trimmed.is_empty() {
                page.paragraph(start, &paragraph);
                paragraph.clear();
            }
            if ticks >= 3 {
                let (fence, language) = trimmed.split_at(ticks);
                let language = language.trim().to_owned();
                let block = Block { line: line + 1, language, text: String::new() };
                open = Some((fence.to_owned(), block));
                continue;
            }
            if let Some(heading) = trimmed.strip_prefix('#') {
                page.anchors.push(anchor(heading.trim_start_matches('#')));
            }
            if paragraph.is_empty() {
                start = line;
            }
            paragraph += text;
            paragraph.push('\n');
        }
        page.paragraph(start, &paragraph);
        page
    }

    fn paragraph(&mut self, start: usize, text: &str) {
        let line_at = |at: usize| start + text[..at].matches('\n').count();
        // The text with inline code blotted out, for finding links.
        let mut plain = text.to_owned();
        let mut at = 0;
        while let Some(open) = text[at..].find('`').map(|found| at + found) {
            let ticks = text[open..].len() - text[open..].trim_start_matches('`').len();
            let fence = &text[open..open + ticks];
            let inner = open + ticks;
            let Some(close) = text[inner..].find(fence).map(|found| inner + found) else { break };
            let code = text[inner..close].replace("\\|", "|");
            let code = code.split_whitespace().collect::<Vec<_>>().join(" ");
            self.spans.push(Code { line: line_at(open), text: code });
            at = close + ticks;
            plain.replace_range(open..at, &"x".repeat(at - open));
        }
        let mut at = 0;
        while let Some(open) = plain[at..].find("](").map(|found| at + found + 2) {
            let Some(close) = plain[open..].find(')').map(|found| open + found) else { break };
            self.links.push(Code { line: line_at(open), text: plain[open..close].to_owned() });
            at = close;
        }
    }
}

/// The anchor that a heading gets.
fn anchor(heading: &str) -> String {
    let mut text = String::new();
    let mut rest = heading.trim();
    // For a link, use its text.
    while let Some((before, link)) = rest.split_once('[') {
        let Some((inner, after)) = link.split_once("](") else { break };
        text += before;
        text += inner;
        rest = after.split_once(')').map_or("", |(_, after)| after);
    }
    text += rest;
    let kept = text.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect()
}
