//! Whether an answer is the expected one.

use fancy_regex::Regex;
use fulgurite_config::ConfigType;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// When an answer is right: `match`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Match {
    /// It is the expected text.
    Exact,
    /// It has the expected text.
    Contains,
    /// The expected regular expression is found in it.
    Regex,
    /// It is the expected number.
    Numeric,
}

/// Which match of the filter is taken: `take`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Take {
    /// The first.
    First,
    /// The last.
    Last,
}

impl ConfigType for Match {
    fn describe() -> String {
        "`\"exact\"`, `\"contains\"`, `\"regex\"` or `\"numeric\"`".to_owned()
    }
}

impl ConfigType for Take {
    fn describe() -> String {
        "`\"first\"` or `\"last\"`".to_owned()
    }
}

/// Compares answers with expected ones.
#[derive(Debug, Clone)]
pub(crate) struct Matcher {
    kind: Match,
    filter: Option<Regex>,
    take: Take,
    ignore_case: bool,
}

/// An expected answer.
#[derive(Debug, Clone)]
pub(crate) enum Expected {
    Exact(String),
    Contains(String),
    Regex(Box<Regex>),
    Number(f64),
}

impl Matcher {
    /// Compares as `kind` says the part of an answer that the regular expression `filter` takes.
    ///
    /// # Errors
    /// If `filter` is no regular expression.
    pub(crate) fn new(
        kind: Match,
        filter: Option<&str>,
        take: Take,
        ignore_case: bool,
    ) -> Result<Self, String> {
        let mut matcher = Self { kind, filter: None, take, ignore_case };
        let filter = filter.map(|filter| matcher.pattern(filter)).transpose();
        matcher.filter =
            filter.map_err(|error| format!("`filter`: is no regular expression: {error}"))?;
        Ok(matcher)
    }

    fn pattern(&self, pattern: &str) -> Result<Regex, Box<fancy_regex::Error>> {
        let flags = if self.ignore_case { "(?i)" } else { "" };
        Regex::new(&format!("{flags}{pattern}")).map_err(Box::new)
    }

    fn folded(&self, text: &str) -> String {
        match self.ignore_case {
            true => text.trim().to_lowercase(),
            false => text.trim().to_owned(),
        }
    }

    /// Returns the accepted answers: a text, a number, or a list of them.
    ///
    /// # Errors
    /// The flaw of an answer, as the end of a sentence.
    pub(crate) fn expected(&self, answer: &Value) -> Result<Vec<Expected>, String> {
        let one = |value: &Value| -> Result<Expected, String> {
            let text = match value {
                Value::String(text) => text.clone(),
                Value::Number(number) => number.to_string(),
                other => {
                    return Err(format!("has the answer {other}: expected a text or a number"));
                }
            };
            if text.trim().is_empty() {
                return Err("has an empty answer".to_owned());
            }
            match self.kind {
                Match::Exact => Ok(Expected::Exact(self.folded(&text))),
                Match::Contains => Ok(Expected::Contains(self.folded(&text))),
                Match::Regex => match self.pattern(&text) {
                    Ok(pattern) => Ok(Expected::Regex(Box::new(pattern))),
                    Err(error) => Err(format!(
                        "has the answer {text:?}, which is no regular expression: {error}"
                    )),
                },
                Match::Numeric => number(&text).map(Expected::Number).ok_or_else(|| {
                    format!("has the answer {text:?}, which is no number (match = \"numeric\")")
                }),
            }
        };
        match answer {
            Value::Array(all) if all.is_empty() => Err("has an empty list of answers".to_owned()),
            Value::Array(all) => all.iter().map(one).collect(),
            answer => one(answer).map(|expected| vec![expected]),
        }
    }

    /// Whether an answer is one of the expected ones.
    pub(crate) fn is_right(&self, expected: &[Expected], answer: &str) -> bool {
        let taken = match &self.filter {
            None => answer,
            Some(filter) => {
                // A pattern that takes too long finds nothing.
                let mut found = filter.captures_iter(answer).map_while(Result::ok);
                let found = match self.take {
                    Take::First => found.next(),
                    Take::Last => found.last(),
                };
                let group = found.and_then(|groups| groups.get(1).or_else(|| groups.get(0)));
                match group {
                    Some(group) => group.as_str(),
                    None => return false,
                }
            }
        };
        let folded = self.folded(taken);
        expected.iter().any(|expected| match expected {
            Expected::Exact(text) => folded == *text,
            Expected::Contains(text) => folded.contains(text),
            Expected::Regex(pattern) => pattern.is_match(taken.trim()).unwrap_or(false),
            Expected::Number(wanted) => number(taken)
                .is_some_and(|found| (found - wanted).abs() <= 1e-6 * wanted.abs().max(1.0)),
        })
    }
}

/// The number that a text is.
fn number(text: &str) -> Option<f64> {
    let text = text.trim().trim_start_matches('$').trim_end_matches(['.', '%']);
    let number: f64 = text.replace(',', "").trim().parse().ok()?;
    number.is_finite().then_some(number)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Whether an answer is right.
    fn is_right(matcher: &Matcher, expected: Value, answer: &str) -> bool {
        matcher.is_right(&matcher.expected(&expected).unwrap(), answer)
    }

    fn matcher(kind: Match) -> Matcher {
        Matcher::new(kind, None, Take::First, false).unwrap()
    }

    #[test]
    fn answers_match_as_they_are_told() {
        let exact = matcher(Match::Exact);
        assert!(is_right(&exact, json!("Paris"), " Paris\n"));
        assert!(!is_right(&exact, json!("Paris"), "paris"));
        let folded = Matcher::new(Match::Exact, None, Take::First, true).unwrap();
        assert!(is_right(&folded, json!(["Rome", "Paris"]), "paris"));
        let contains = matcher(Match::Contains);
        assert!(is_right(&contains, json!("Paris"), "It is Paris."));
        assert!(!is_right(&contains, json!("Paris"), "It is Rome."));
        let regex = matcher(Match::Regex);
        assert!(is_right(&regex, json!("^(3|three)$"), "three"));
        assert!(!is_right(&regex, json!("^(3|three)$"), "thirteen"));
    }

    #[test]
    fn numbers_are_compared_by_value() {
        let numeric = matcher(Match::Numeric);
        assert!(is_right(&numeric, json!(1234), "$1,234.00"));
        assert!(is_right(&numeric, json!("50%"), "50."));
        assert!(!is_right(&numeric, json!(1234), "1235"));
        assert!(!is_right(&numeric, json!(0), "nothing"));
    }

    #[test]
    fn filter_takes_a_part() {
        let text = "2 + 3 = 5, so\n#### 5\n#### 7";
        let taking = |take| Matcher::new(Match::Exact, Some("#### (\\d+)"), take, false).unwrap();
        assert!(is_right(&taking(Take::First), json!("5"), text));
        assert!(is_right(&taking(Take::Last), json!(7), text));
        assert!(!is_right(&taking(Take::Last), json!("5"), text));
        assert!(!is_right(&taking(Take::First), json!("5"), "5"));
    }
}
