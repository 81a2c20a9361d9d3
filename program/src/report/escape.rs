//! Escaping of text for HTML.

use std::fmt;

/// Displays a text verbatim, in elements and in quoted attributes.
pub(super) struct Escaped<T>(pub(super) T);

impl<T: fmt::Display> fmt::Display for Escaped<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.to_string().chars() {
            match c {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                '\'' => f.write_str("&#39;")?,
                // Control characters are invisible, and not allowed in HTML.
                c if c.is_control() && !matches!(c, '\n' | '\t') => f.write_str("\u{fffd}")?,
                c => write!(f, "{c}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn html_is_escaped() {
        let text = Escaped("</script><img src=x onerror='a(\"b\")'>&amp;\0").to_string();
        assert_eq!(
            text,
            "&lt;/script&gt;&lt;img src=x onerror=&#39;a(&quot;b&quot;)&#39;&gt;&amp;amp;\u{fffd}"
        );
    }
}
