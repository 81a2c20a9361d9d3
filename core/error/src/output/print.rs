//! Messages. Text of other processes and of files is escaped, so that it cannot imitate other
//! output.

use std::borrow::Cow;
use std::io::{self, ErrorKind, Write as _};

use super::standard::stderr;
use crate::{Error, Result};

/// Escapes the control characters of `text`, except line ends and tabs.
///
/// Text of other ranks or of files could otherwise move the cursor, change colours or hide earlier
/// output.
pub fn printable(text: &str) -> Cow<'_, str> {
    let is_harmful = |c: char| c.is_control() && c != '\n' && c != '\t';
    if !text.contains(is_harmful) {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match is_harmful(c) {
            true => escaped.extend(c.escape_default()),
            false => escaped.push(c),
        }
    }
    Cow::Owned(escaped)
}

/// Quotes the first `max` characters of foreign text, such as a server's answer, on one line.
///
/// Line ends and control characters are escaped.
///
/// ```
/// # use fulgurite_error::quoted;
/// assert_eq!(quoted("oops\nerror: rank 2 failed", 100), r#""oops\nerror: rank 2 failed""#);
/// assert_eq!(quoted("<html>please log in</html>", 6), r#""<html>"…"#);
/// ```
pub fn quoted(text: &str, max: usize) -> String {
    let mut chars = text.chars();
    let shown: String = chars.by_ref().take(max).collect();
    let more = if chars.next().is_some() { "…" } else { "" };
    format!("{shown:?}{more}")
}

/// Writes a message to standard error, without [waiting](super) for its reader.
///
/// The message is made [`printable`], and its further lines are indented, so that none of them
/// looks like another message.
pub fn print_message(message: &str) {
    stderr().write_message(&format!("{}\n", one_message(message)));
}

pub(crate) fn one_message(text: &str) -> String {
    let text = printable(text.trim_end());
    // All lines or none, so that aligned text stays aligned.
    let is_indented = text.lines().skip(1).all(|line| line.starts_with(' '));
    if is_indented { text.into_owned() } else { text.replace('\n', "\n  ") }
}

/// Writes `text`, made [`printable`], to standard output, and waits for its reader.
///
/// It is for a tool whose output is its result. A broken pipe (`… | head`) is not an error.
///
/// # Errors
/// [`Error::Io`] for any other failure.
pub fn print(text: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(printable(text).as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        result => result.map_err(Error::io("writing to", "stdout")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_prints_the_whole_message() {
        let error = Error::Config("`a`: expected 1\nfound \"2\"\u{7}".to_owned());
        assert_eq!(format!("Error: {error:?}"), "Error: `a`: expected 1\n  found \"2\"\\u{7}");
        assert_eq!(format!("{error:#?}"), format!("{error:?}"));
    }

    #[test]
    fn terminal_controls_are_escaped() {
        let harmless = "loss\t0.5 at step 3:\nno µ, 雪 or é is changed";
        assert!(matches!(printable(harmless), Cow::Borrowed(text) if text == harmless));
        let forged = "disk full\r\u{1b}[2K\u{1b}[31mall is well\u{9b}1m\u{7}\u{0}\u{7f}";
        let escaped = r"disk full\r\u{1b}[2K\u{1b}[31mall is well\u{9b}1m\u{7}\u{0}\u{7f}";
        assert_eq!(printable(forged), escaped);
        assert_eq!(one_message("cut\nerror: mine\n"), "cut\n  error: mine");
        assert_eq!(one_message("list:\n  a\n    b"), "list:\n  a\n    b");
    }
}
