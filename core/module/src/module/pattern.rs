//! The pattern language for names of parameters, layers and units, in configurations and code.
//!
//! A pattern consists of segments separated by dots. It names consecutive segments anywhere in a
//! path. `*` stands for any part of one segment, including all of it or an empty part, but never
//! for a dot. With a leading dot, a pattern begins at the root of the model.
//!
//! | pattern | names |
//! |---|---|
//! | `encoder` | every module or parameter `encoder` |
//! | `bert.encoder` | every `encoder` in a `bert` |
//! | `*norm*` | everything with `norm` in its own name |
//! | `layers.*.mlp` | the `mlp` of every layer |
//! | `.norm` | the `norm` of the model itself, not a layer's |
//!
//! Functions choose paths by a pattern in four ways:
//!
//! - [`pattern_matches`]: the named path and everything under it. For `trainer.freeze`,
//!   `optimizer.no_decay`, `optimizer.groups`, optimizers of a part of the model,
//!   `trainer.adapters`, `trainer.quantization`, `trainer.keep_in_fp32`, `ignored`, and
//!   `checkpoint.load.include` and `exclude`.
//! - [`pattern_names`]: the named path itself. For units and layers in `mixed_precision.overrides`,
//!   and for units in `activation_checkpointing` and `shard_conditions`. In the latter two, a
//!   pattern that names no unit means the units under it.
//! - [`find_pattern`]: the first segments it names. For `checkpoint.load.rename`.
//! - [`glob_match`]: a layer by its whole path. For plans, in which a layer has one style.

/// The explanation of patterns in messages.
pub const PATTERN_HELP: &str = "A pattern names segments that follow each other anywhere in a path, and means \
    everything under them too; `*` stands for any part of a segment, and a dot in front for the root";

/// Whether a pattern names this path or a module around it.
///
/// ```
/// use fulgurite_core::module::pattern_matches;
///
/// assert!(pattern_matches("*norm*", "layers.0.input_layernorm.weight"));
/// assert!(pattern_matches("bias", "layers.0.mlp.up.bias"));
/// assert!(pattern_matches("layers.*.mlp", "model.layers.0.mlp.up.bias"));
/// assert!(!pattern_matches("layers.*.up", "layers.0.mlp.up.bias")); // `*` is one segment
/// assert!(pattern_matches(".norm", "norm.weight"));
/// assert!(!pattern_matches(".norm", "layers.0.norm.weight"));
/// ```
pub fn pattern_matches(pattern: &str, path: &str) -> bool {
    find_pattern(pattern, path).is_some()
}

/// Whether a pattern names this path itself.
///
/// ```
/// use fulgurite_core::module::pattern_names;
///
/// assert!(pattern_names("q_proj", "layers.0.self_attn.q_proj"));
/// assert!(pattern_names("layers.*", "layers.0"));
/// assert!(!pattern_names("layers.*", "layers.0.self_attn"));
/// ```
pub fn pattern_names(pattern: &str, path: &str) -> bool {
    starts(pattern, path).any(|(pattern, start)| {
        match_at(pattern, path, start).is_some_and(|found| found.rest.is_empty())
    })
}

/// Whether any of the patterns [matches](pattern_matches) the path.
pub fn any_pattern_matches<P: AsRef<str>>(patterns: &[P], path: &str) -> bool {
    patterns.iter().any(|pattern| pattern_matches(pattern.as_ref(), path))
}

/// The first pattern that [matches](pattern_matches) none of the paths.
pub fn idle_pattern<'p, 'n>(
    patterns: &'p [String],
    paths: impl Iterator<Item = &'n str> + Clone,
) -> Option<&'p str> {
    let is_idle = |pattern: &&String| !paths.clone().any(|path| pattern_matches(pattern, path));
    patterns.iter().find(is_idle).map(String::as_str)
}

/// Whether a pattern matches the whole path, as in plans.
///
/// ```
/// use fulgurite_core::module::glob_match;
/// assert!(glob_match("layers.*.mlp.up", "layers.10.mlp.up"));
/// assert!(!glob_match("layers.*", "layers.10.mlp")); // never more than one segment
/// assert!(glob_match("*norm.weight", "norm.weight"));
/// ```
pub fn glob_match(pattern: &str, name: &str) -> bool {
    let pattern = pattern.strip_prefix('.').unwrap_or(pattern);
    match_at(pattern, name, 0).is_some_and(|found| found.rest.is_empty())
}

/// The result of [`find_pattern`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PatternMatch<'n> {
    /// The path before the match: empty, or segments with a trailing dot.
    pub before: &'n str,
    /// The text that each `*` of the pattern stands for.
    pub captures: Vec<&'n str>,
    /// The path after the match: empty, or a dot and more segments.
    pub rest: &'n str,
}

/// Finds the first segments of a path that a pattern names.
///
/// ```
/// use fulgurite_core::module::find_pattern;
/// let found = find_pattern("layers.*.attn", "model.layers.3.attn.q.weight").unwrap();
/// assert_eq!((found.before, found.rest), ("model.", ".q.weight"));
/// assert_eq!(found.captures, ["3"]);
/// assert_eq!(find_pattern("layers.*.at", "layers.3.attn.q.weight"), None);
/// ```
pub fn find_pattern<'n>(pattern: &str, path: &'n str) -> Option<PatternMatch<'n>> {
    starts(pattern, path).find_map(|(pattern, start)| match_at(pattern, path, start))
}

/// Checks that a pattern is well-formed.
///
/// # Errors
/// A message, if the pattern has an empty segment.
pub fn check_pattern(pattern: &str) -> std::result::Result<(), String> {
    let from_root = pattern.strip_prefix('.').unwrap_or(pattern);
    match from_root.split('.').any(str::is_empty) {
        false => Ok(()),
        true => Err(format!("the pattern `{pattern}` has an empty segment")),
    }
}

/// The offsets in a path where a pattern may begin, and the pattern without its leading dot.
fn starts<'p>(pattern: &'p str, path: &str) -> impl Iterator<Item = (&'p str, usize)> {
    let from_root = pattern.strip_prefix('.');
    let later = path.match_indices('.').map(|(at, _)| at + 1);
    let places = std::iter::once(0).chain(later);
    let count = if from_root.is_some() { 1 } else { usize::MAX };
    let pattern = from_root.unwrap_or(pattern);
    places.take(count).map(move |place| (pattern, place))
}

/// Matches a pattern against whole segments from `start`.
fn match_at<'n>(pattern: &str, path: &'n str, start: usize) -> Option<PatternMatch<'n>> {
    let mut captures = Vec::new();
    let mut rest = &path[start..];
    for (i, pattern) in pattern.split('.').enumerate() {
        if i > 0 {
            rest = rest.strip_prefix('.')?;
        }
        let (segment, after) = rest.split_at(rest.find('.').unwrap_or(rest.len()));
        if !capture(pattern, segment, &mut captures) {
            return None;
        }
        rest = after;
    }
    Some(PatternMatch { before: &path[..start], captures, rest })
}

/// Matches one segment and captures the text of each `*`: the shortest text with which the rest
/// matches. Searches once for each literal part, from left to right, so the time is linear.
fn capture<'n>(pattern: &str, segment: &'n str, captures: &mut Vec<&'n str>) -> bool {
    let Some((head, tail)) = pattern.split_once('*') else { return pattern == segment };
    let Some(mut rest) = segment.strip_prefix(head) else { return false };
    let (middle, last) = match tail.rsplit_once('*') {
        Some((middle, last)) => (Some(middle), last),
        None => (None, tail),
    };
    let before = captures.len();
    for part in middle.into_iter().flat_map(|middle| middle.split('*')) {
        let Some(at) = rest.find(part) else {
            captures.truncate(before);
            return false;
        };
        captures.push(&rest[..at]);
        rest = &rest[at + part.len()..];
    }
    let Some(captured) = rest.strip_suffix(last) else {
        captures.truncate(before);
        return false;
    };
    captures.push(captured);
    true
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn whole_paths_match() {
        for (pattern, name) in [("", ""), ("*", ""), ("*", "a"), ("a.*", "a."), ("*.*", "a.b")] {
            assert!(glob_match(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in [("", "a"), ("*", "a.b"), ("a.*", "a"), ("a*c", "ab"), ("a", "")] {
            assert!(!glob_match(pattern, name), "{pattern} {name}");
        }
        assert!(glob_match("*ä*", "xäy") && !glob_match("*ö*", "xäy"));
    }

    #[test]
    fn pattern_matches_everything_under_a_path() {
        let yes = [
            ("bert.encoder", "bert.encoder.layer.0.weight"),
            ("bert.encoder", "model.bert.encoder.bias"),
            ("encoder", "bert.encoder.layer.0.weight"),
            ("q_proj", "layers.0.self_attn.q_proj.weight"),
            ("*norm*", "layers.0.input_layernorm.weight"),
            ("layers.1*.mlp", "layers.10.mlp"),
            (".norm", "norm.weight"),
            ("*", "a.b"),
        ];
        for (pattern, path) in yes {
            assert!(pattern_matches(pattern, path), "{pattern} {path}");
        }
        let no = [
            ("bert.encoder", "bert.encoders.weight"),
            ("encoder.bert", "bert.encoder.weight"),
            ("q", "a.q_proj"),
            ("b.head", "head"),
            (".norm", "layers.0.norm.weight"),
            ("layers.*.up", "layers.0.mlp.up"),
            ("", "a"),
        ];
        for (pattern, path) in no {
            assert!(!pattern_matches(pattern, path), "{pattern} {path}");
        }
    }

    #[test]
    fn a_name_is_the_end_of_a_path() {
        for (pattern, path) in [("q", "a.q"), ("a.*", "a.q"), (".a.q", "a.q"), ("*.q", "b.a.q")] {
            assert!(pattern_names(pattern, path), "{pattern} {path}");
        }
        for (pattern, path) in [("a", "a.q"), ("*.q", "q"), (".q", "a.q"), ("a.q", "q")] {
            assert!(!pattern_names(pattern, path), "{pattern} {path}");
        }
    }

    #[test]
    fn find_pattern_returns_first_match() {
        let find = |pattern, name| {
            find_pattern(pattern, name).map(|found| (found.before, found.captures, found.rest))
        };
        assert_eq!(find("a.*.c", "a.10.c.w"), Some(("", vec!["10"], ".w")));
        assert_eq!(find("a.*_*", "b.a.x_y_z"), Some(("b.", vec!["x", "y_z"], "")));
        assert_eq!(find("*", "a.b"), Some(("", vec!["a"], ".b")));
        assert_eq!(find("b", "a.b.b"), Some(("a.", vec![], ".b")));
        for (pattern, name) in [("a", "ab"), ("a.b", "a"), ("a.*.c", "a.b.d"), ("", "a")] {
            assert_eq!(find(pattern, name), None, "{pattern} {name}");
        }
    }

    /// With backtracking, this would take exponential time.
    #[test]
    fn many_stars_take_linear_time() {
        let pattern = format!("{}b", "a*".repeat(500));
        let name = "a".repeat(5000);
        assert!(!pattern_matches(&pattern, &name));
        assert!(pattern_matches(&pattern, &format!("{name}b")));
    }

    #[test]
    fn each_star_takes_the_shortest_text() {
        let find = |pattern, name| find_pattern(pattern, name).map(|found| found.captures);
        assert_eq!(find("*a*a", "xaaa"), Some(vec!["x", "a"]));
        assert_eq!(find("**b*", "abbc"), Some(vec!["", "a", "bc"]));
        assert_eq!(find("a*ab", "ab"), None);
        assert_eq!(find("x*y*y", "xyy"), Some(vec!["", ""]));
        assert_eq!(find("x*y*y", "xy"), None);
    }

    /// A model of one segment that uses backtracking.
    fn naive(pattern: &[u8], segment: &[u8]) -> bool {
        match (pattern.first(), segment.first()) {
            (None, _) => segment.is_empty(),
            (Some(b'*'), _) => (0..=segment.len()).any(|i| naive(&pattern[1..], &segment[i..])),
            (Some(a), Some(b)) => a == b && naive(&pattern[1..], &segment[1..]),
            (Some(_), None) => false,
        }
    }

    proptest! {
        #[test]
        fn segments_match_as_with_backtracking(pattern in "[ab*]{0,6}", segment in "[ab]{0,8}") {
            let expected = naive(pattern.as_bytes(), segment.as_bytes());
            prop_assert_eq!(glob_match(&pattern, &segment), expected);
        }
    }

    #[test]
    fn empty_segments_are_refused() {
        for pattern in ["", ".", "a..b", "a.", "..a"] {
            assert!(check_pattern(pattern).is_err(), "{pattern}");
        }
        for pattern in ["a", ".a", "a.*", "*"] {
            assert!(check_pattern(pattern).is_ok(), "{pattern}");
        }
    }
}
