//! [`assert_says!`]: tests of messages by kind, key, value and remedy, whatever words are around
//! them.
//!
//! ```
//! use fulgurite_test_message::assert_says;
//!
//! let error = "data: a.jsonl, line 2 has no key \"text\" (data.text_key); it has id, body";
//! assert_says!(error, "data: a.jsonl, line 2 … (data.text_key) … id, body");
//! ```
//!
//! Tables, files and reports are snapshots of `insta`.

use std::fmt::Display;

/// Asserts that a message matches a pattern, in which `…` stands for any text, also none.
///
/// The text between two `…` must be in the message, in this order. With a space beside the `…`,
/// which does not count, it must begin or end with a whole word or number there. A pattern without
/// `…` is the whole message.
#[macro_export]
macro_rules! assert_says {
    ($message:expr, $pattern:expr $(,)?) => {
        $crate::assert_message_says(&$message, $pattern)
    };
}

/// The function of [`assert_says!`].
///
/// # Panics
/// If the message does not match. The panic shows both, in the place of the call.
#[track_caller]
pub fn assert_message_says(message: &dyn Display, pattern: &str) {
    let message = message.to_string();
    assert!(says(message.trim(), pattern), "expected: {pattern}\n   found: {message}");
}

fn says(message: &str, pattern: &str) -> bool {
    let parts: Vec<&str> = pattern.split('…').collect();
    let (mut from, last) = (0, parts.len() - 1);
    for (i, part) in parts.into_iter().enumerate() {
        let text = part.trim();
        let whole = [part.starts_with(' '), part.ends_with(' ')];
        let fits = |at: usize| {
            let (before, rest) = message.split_at(at);
            rest.strip_prefix(text).is_some_and(|after| {
                (i > 0 || at == 0)
                    && (i < last || after.is_empty())
                    && !(whole[0] && i > 0 && joins(before, text))
                    && !(whole[1] && i < last && joins(text, after))
            })
        };
        let mut places = (from..=message.len()).filter(|&at| message.is_char_boundary(at));
        match places.find(|&at| fits(at)) {
            Some(at) => from = at + text.len(),
            None => return false,
        }
    }
    true
}

/// Whether one word or number goes across the border of two texts.
fn joins(before: &str, after: &str) -> bool {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    before.chars().next_back().is_some_and(is_word) && after.chars().next().is_some_and(is_word)
}

#[cfg(test)]
mod tests {
    use super::says;

    const MESSAGE: &str = "unknown key `lr`; did you mean `optimizer.lr`? The keys are a, b";

    #[test]
    fn parts_are_found_in_order() {
        assert!(says(MESSAGE, MESSAGE));
        assert!(says(MESSAGE, "unknown key `lr` … `optimizer.lr`?…"));
        assert!(says(MESSAGE, "… `lr` … `optimizer.lr`? … a, b"));
        assert!(says(MESSAGE, "…"));
        assert!(says("a…b", "a…b"));
        assert!(says("the end: x", "the … x") && says("x", "… x …"));
    }

    #[test]
    fn what_is_missing_is_noticed() {
        // The end, the start, the order, a word, a part that is named twice.
        assert!(!says(MESSAGE, "unknown key `lr`"));
        assert!(!says(MESSAGE, "`lr` … `optimizer.lr`? …"));
        assert!(!says(MESSAGE, "… `optimizer.lr`? … `lr` …"));
        assert!(!says(MESSAGE, "unknown key `lr` … `trainer.lr` …"));
        assert!(!says(MESSAGE, "… `lr` … `lr` …"));
        assert!(!says(MESSAGE, "unknown key `lr` … a, b, c"));
    }

    #[test]
    fn words_and_numbers_are_whole() {
        assert!(says("it is 1; write 2", "it is 1 … 2"));
        assert!(!says("it is 1000; write 2", "it is 1 … 2"));
        assert!(says("not 11, but 1 of 2", "… 1 of …"));
        assert!(!says("lr_decay is 3", "… decay is …"));
        assert!(says("step-10", "step-… 10") && says("step-10", "step-1…"));
        assert!(says("1000", "1…00"));
    }

    #[test]
    fn parts_do_not_overlap() {
        assert!(!says("abc", "ab … bc"));
        assert!(says("ab bc", "ab … bc"));
    }

    #[test]
    #[should_panic(expected = "expected: the pattern …\n   found: the message")]
    fn both_texts_are_shown() {
        crate::assert_says!("the message", "the pattern …");
    }
}
