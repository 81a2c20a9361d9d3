//! Data reports: counts of entries that a data module has read and left out.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

/// Limit of names kept for each reason.
const EXAMPLES: usize = 3;

/// Counts of entries read and left out, by source. As text, one line for each source.
///
/// ```
/// use fulgurite_core::data::{DataReport, SourceReport};
///
/// let mut books = SourceReport::new("data.path");
/// books.count("files", 2);
/// books.count("tokens", 70_500);
/// books.leave_out("hidden", ".DS_Store");
/// books.fault("not UTF-8", "old.txt");
/// let report = DataReport { sources: vec![books] };
/// assert_eq!(
///     report.to_string(),
///     "data.path: 2 files, 70,500 tokens; left out: 1 hidden (.DS_Store), 1 not UTF-8 (old.txt)"
/// );
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataReport {
    /// The sources, in the order of the configuration.
    pub sources: Vec<SourceReport>,
}

/// Counts of one source.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceReport {
    /// The key of the configuration that names the source, such as `data.path`.
    pub source: String,
    /// Amounts read, by unit in the plural: `files`, `documents`, `tokens`, `bytes`, `images`, ….
    pub counts: BTreeMap<String, u64>,
    /// Files, lines and rows left out, by reason, in order of first occurrence.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<LeftOut>,
}

/// Files, lines or rows left out for one reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut {
    /// The reason, in a few words that follow a number: `hidden`, `not UTF-8`.
    pub reason: String,
    /// The number of entries.
    pub count: u64,
    /// The names of the first entries.
    pub examples: Vec<String>,
    /// Whether the entries were probably meant to be data. The trainer then warns.
    pub fault: bool,
}

impl DataReport {
    /// The sources' faults as text; `None` without faults.
    pub fn faults(&self) -> Option<String> {
        let sources = self.sources.iter().filter_map(|source| {
            let faults = source.left_out.iter().filter(|left_out| left_out.fault);
            let faults: Vec<String> = faults.map(LeftOut::to_string).collect();
            (!faults.is_empty()).then(|| format!("{}: {}", source.source, faults.join(", ")))
        });
        let sources: Vec<String> = sources.collect();
        (!sources.is_empty()).then(|| sources.join("; "))
    }
}

impl SourceReport {
    /// An empty report of the source named by a configuration key.
    pub fn new(source: impl Into<String>) -> Self {
        Self { source: source.into(), ..Self::default() }
    }

    /// Adds `number` to the count of `unit`, a plural.
    pub fn count(&mut self, unit: &str, number: u64) {
        match self.counts.get_mut(unit) {
            Some(count) => *count += number,
            None => drop(self.counts.insert(unit.to_owned(), number)),
        }
    }

    /// Counts an entry other than data, such as a hidden file or a blank line.
    pub fn leave_out(&mut self, reason: &str, name: impl fmt::Display) {
        self.add(reason, &name, false);
    }

    /// Counts an unusable entry that was probably meant to be data.
    pub fn fault(&mut self, reason: &str, name: impl fmt::Display) {
        self.add(reason, &name, true);
    }

    /// The counts of `left_out` as the end of a sentence, `; left out: 1 hidden (.x)`, or empty.
    pub fn left_out_in_words(&self) -> String {
        let left_out: Vec<String> = self.left_out.iter().map(LeftOut::to_string).collect();
        match &*left_out {
            [] => String::new(),
            left_out => format!("; left out: {}", left_out.join(", ")),
        }
    }

    fn add(&mut self, reason: &str, name: &dyn fmt::Display, fault: bool) {
        let known = self.left_out.iter().position(|known| known.reason == reason);
        let index = known.unwrap_or_else(|| {
            let reason = reason.to_owned();
            self.left_out.push(LeftOut { reason, count: 0, examples: Vec::new(), fault });
            self.left_out.len() - 1
        });
        let left_out = &mut self.left_out[index];
        left_out.count += 1;
        left_out.fault |= fault;
        if left_out.examples.len() < EXAMPLES {
            left_out.examples.push(one_line(&name.to_string()));
        }
    }
}

impl fmt::Display for DataReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines: Vec<String> = self.sources.iter().map(SourceReport::to_string).collect();
        f.write_str(&lines.join("\n"))
    }
}

impl fmt::Display for SourceReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // In ascending order: files, documents, tokens.
        let mut counts: Vec<_> = self.counts.iter().collect();
        counts.sort_by_key(|(_, count)| **count);
        let counts: Vec<String> =
            counts.into_iter().map(|(unit, count)| in_words(*count, unit)).collect();
        write!(f, "{}: {}", self.source, counts.join(", "))?;
        f.write_str(&self.left_out_in_words())
    }
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let more = if self.count > self.examples.len() as u64 { ", …" } else { "" };
        let examples = self.examples.join(", ");
        write!(f, "{} {} ({examples}{more})", with_commas(self.count), self.reason)
    }
}

/// `1 file`, `2,000 files`.
fn in_words(count: u64, unit: &str) -> String {
    let unit = match (count, unit) {
        (1, "classes") => "class",
        (1, unit) => unit.strip_suffix('s').unwrap_or(unit),
        (_, unit) => unit,
    };
    format!("{} {unit}", with_commas(count))
}

fn with_commas(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Escapes control characters, so that a name cannot look like a line of the program's output.
fn one_line(name: &str) -> String {
    name.chars()
        .flat_map(|c| {
            let escaped = c.is_control().then(|| c.escape_default());
            let plain = (!c.is_control()).then_some(c);
            escaped.into_iter().flatten().chain(plain)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_names_are_cut_and_escaped() {
        let mut source = SourceReport::new("data.path");
        source.count("files", 1);
        source.count("images", 1_234_567);
        source.count("classes", 1);
        for name in ["a", "b\nerror: rank 2 failed", "c", "d"] {
            source.fault("broken", name);
        }
        source.leave_out("hidden", ".x");
        let report = DataReport { sources: vec![source] };
        let expected = "data.path: 1 class, 1 file, 1,234,567 images; left out: 4 broken \
                        (a, b\\nerror: rank 2 failed, c, …), 1 hidden (.x)";
        assert_eq!(report.to_string(), expected);
        let faults = "data.path: 4 broken (a, b\\nerror: rank 2 failed, c, …)";
        assert_eq!(report.faults().unwrap(), faults);
        let json = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<DataReport>(&json).unwrap(), report);
    }
}
