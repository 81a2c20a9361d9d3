//! Patterns of parameters' and modules' names, in configurations and in code.
//!
//! A pattern is compared with a dotted name segment by segment. `*` stands for any part of one segment,
//! also for all of it or none, and never for a dot: `layers.*.norm*.weight`. What a pattern has to match:
//!
//! | | |
//! |---|---|
//! | [`glob_match`] | the whole name: modules, in plans and for units |
//! | [`pattern_matches`] | the whole name or, if the pattern has no dot, any one segment: parameters, in `optimizer.no_decay`, `optimizer.groups` and `trainer.freeze` |
//! | [`prefix_match`] | the name, or a module around it: parameters of a checkpoint, in filters and when they are renamed |

/// Whether a pattern matches a whole name.
///
/// ```
/// use fulgurite_core::module::glob_match;
/// assert!(glob_match("layers.*.mlp.up", "layers.10.mlp.up"));
/// assert!(!glob_match("layers.*", "layers.10.mlp")); // never more than one segment
/// assert!(glob_match("*norm.weight", "norm.weight"));
/// ```
pub fn glob_match(pattern: &str, name: &str) -> bool {
    prefix_match(pattern, name).is_some_and(|found| found.rest.is_empty())
}

/// Whether a pattern matches a parameter: one with dots the whole name, one without dots any segment.
///
/// ```
/// use fulgurite_core::module::pattern_matches;
///
/// assert!(pattern_matches("*norm*", "layers.0.input_layernorm.weight"));
/// assert!(pattern_matches("bias", "layers.0.mlp.up.bias"));
/// assert!(pattern_matches("layers.*.mlp.up.bias", "layers.0.mlp.up.bias"));
/// assert!(!pattern_matches("mlp.up.bias", "layers.0.mlp.up.bias")); // not the whole name
/// ```
pub fn pattern_matches(pattern: &str, fqn: &str) -> bool {
    if pattern.contains('.') {
        glob_match(pattern, fqn)
    } else {
        fqn.split('.').any(|segment| glob_match(pattern, segment))
    }
}

/// What [`prefix_match`] found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefixMatch<'n> {
    /// What each `*` of the pattern stands for.
    pub captures: Vec<&'n str>,
    /// What follows in the name: nothing, or a dot and more segments.
    pub rest: &'n str,
}

/// Matches a pattern with the name, or with whole segments at its front: a module that it is in.
///
/// ```
/// use fulgurite_core::module::prefix_match;
/// let found = prefix_match("layers.*.attn", "layers.3.attn.q.weight").unwrap();
/// assert_eq!((found.captures, found.rest), (vec!["3"], ".q.weight"));
/// assert_eq!(prefix_match("layers.*.at", "layers.3.attn.q.weight"), None);
/// ```
pub fn prefix_match<'n>(pattern: &str, name: &'n str) -> Option<PrefixMatch<'n>> {
    let mut captures = Vec::new();
    let mut rest = name;
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
    Some(PrefixMatch { captures, rest })
}

/// Matches one segment, adding what each `*` stands for.
fn capture<'n>(pattern: &str, segment: &'n str, captures: &mut Vec<&'n str>) -> bool {
    let Some((head, tail)) = pattern.split_once('*') else { return pattern == segment };
    let Some(rest) = segment.strip_prefix(head) else { return false };
    let before = captures.len();
    for end in (0..=rest.len()).filter(|&i| rest.is_char_boundary(i)) {
        captures.push(&rest[..end]);
        if capture(tail, &rest[end..], captures) {
            return true;
        }
        captures.truncate(before);
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_names_match() {
        for (pattern, name) in [("", ""), ("*", ""), ("*", "a"), ("a.*", "a."), ("*.*", "a.b")] {
            assert!(glob_match(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in [("", "a"), ("*", "a.b"), ("a.*", "a"), ("a*c", "ab"), ("a", "")] {
            assert!(!glob_match(pattern, name), "{pattern} {name}");
        }
        assert!(glob_match("*ä*", "xäy") && !glob_match("*ö*", "xäy"));
    }

    #[test]
    fn patterns_match_names_and_the_modules_they_are_in() {
        let find = |pattern, name| {
            prefix_match(pattern, name).map(|PrefixMatch { captures, rest }| (captures, rest))
        };
        assert_eq!(find("a.*.c", "a.10.c.w"), Some((vec!["10"], ".w")));
        assert_eq!(find("a.*_*", "a.x_y_z"), Some((vec!["x", "y_z"], "")));
        assert_eq!(find("*", "a.b"), Some((vec!["a"], ".b")));
        for (pattern, name) in [("a", "ab"), ("a.b", "a"), ("a.*.c", "a.b.d"), ("", "a")] {
            assert_eq!(find(pattern, name), None, "{pattern} {name}");
        }
    }
}
