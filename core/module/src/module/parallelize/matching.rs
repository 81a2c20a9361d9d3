//! Matches the patterns of a plan with layers.

use std::collections::{BTreeMap, BTreeSet};

use crate::module::{ModuleTree, glob_match, pattern_matches};
use crate::parallel::{ParallelStyle, Plan, Styles};
use crate::parameter::Parameter;
use crate::{Error, Result};
use fulgurite_config::nearest;

impl ModuleTree {
    /// The style of each path named by the plan.
    pub(super) fn styles(&self, plan: &Plan) -> Result<Styles> {
        let paths = self.layer_paths();
        let mut styles: BTreeMap<&str, (usize, ParallelStyle)> = BTreeMap::new();
        for (i, entry) in plan.entries().iter().enumerate() {
            let pattern = entry.pattern.as_str();
            let mut matching = paths.iter().filter(|path| glob_match(pattern, path)).peekable();
            if matching.peek().is_none() {
                return Err(no_match(pattern, &paths));
            }
            for path in matching {
                if let Some((earlier, _)) = styles.insert(path, (i, entry.style)) {
                    let earlier = &plan.entries()[earlier].pattern;
                    let which = match earlier == pattern {
                        true => format!("the plan has the pattern `{pattern}` twice"),
                        false => format!(
                            "two patterns of the plan match it, `{earlier}` and `{pattern}`"
                        ),
                    };
                    return Err(Error::Module {
                        path: (*path).to_owned(),
                        message: format!("{which}; keep one"),
                    });
                }
            }
        }
        Ok(styles.into_iter().map(|(path, (_, style))| (path.to_owned(), style)).collect())
    }

    /// The paths of layers, and of other modules with their own parameters.
    fn layer_paths(&self) -> BTreeSet<&str> {
        // A parameter outside of modules has its name as path.
        let owner = |p| Parameter::fqn(p).rsplit_once('.').map_or(p.fqn(), |(path, _)| path);
        let owners = self.parameters().iter().map(owner);
        self.modules().keys().map(String::as_str).chain(owners).collect()
    }
}

fn no_match(pattern: &str, paths: &BTreeSet<&str>) -> Error {
    // Patterns for other models mostly differ in a prefix, which the list of paths shows.
    let kinds: BTreeSet<String> = paths.iter().map(|path| kind(path)).collect();
    let kinds: Vec<String> = kinds.into_iter().collect();
    let suffix = format!(".{pattern}");
    let hint = if let Some(inner) = kinds.iter().find(|kind| is_inside(kind, pattern)) {
        format!("; it is the path of modules that contain layers, name those, such as `{inner}`")
    } else if let Some(longer) =
        kinds.iter().find(|kind| kind.ends_with(&suffix) || kind.starts_with(pattern))
    {
        format!("; did you mean `{longer}`?")
    } else if let Some(near) = nearest(pattern, &kinds) {
        format!("; did you mean `{near}`?")
    } else {
        String::new()
    };
    Error::Module {
        path: pattern.to_owned(),
        message: format!(
            "no layer matches this pattern of the plan (`*` is one segment){hint} The model's layers \
             are {}",
            kinds.join(", "),
            hint = match hint.ends_with('?') {
                true => hint,
                false => hint + ".",
            },
        ),
    }
}

/// The path with numbers replaced by `*`.
fn kind(path: &str) -> String {
    let number = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
    path.split('.').map(|s| if number(s) { "*" } else { s }).collect::<Vec<_>>().join(".")
}

/// Whether `pattern` matches a module around `path`.
fn is_inside(path: &str, pattern: &str) -> bool {
    !glob_match(pattern, path) && pattern_matches(&format!(".{pattern}"), path)
}
