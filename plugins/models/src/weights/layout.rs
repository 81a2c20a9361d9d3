//! Which tensors of a file make which tensors of a model.

use fulgurite_checkpoint::Packing;
use fulgurite_engine::module::{ForeignNames, ForeignPart};
use fulgurite_error::{Error, Result};

use super::view::{Rows, View};

/// How the tensors of a Hugging Face file and of a model correspond.
///
/// In patterns, `*` is one segment of a name; both sides of a rule have as many. The first rule
/// that fits a name counts. Tensors without a rule have the same name on both sides.
///
/// ```
/// use fulgurite_models::WeightLayout;
///
/// let layout = WeightLayout::new("transformer")
///     .ignore("*.attn.mask")
///     .rename("blocks.*.norm.*", "transformer.h.*.ln.*")
///     .split("blocks.*.attn", &[("q_proj", 64), ("k_proj", 64)], "transformer.h.*.qk");
/// # drop(layout);
/// ```
#[derive(Debug, Clone)]
pub struct WeightLayout {
    /// The path of the model without its head in a file. A file of that part alone lacks it.
    prefix: String,
    /// Ends of names of tensors that are ignored in a file.
    ignored: Vec<String>,
    /// Beginnings of names of tensors that are ignored in a file.
    ignored_paths: Vec<String>,
    /// Beginnings of names of tensors of the model that no file has.
    only_in_model: Vec<String>,
    rules: Vec<Rule>,
    stacks: Vec<Stack>,
    packing: Option<Packing>,
}

/// A tensor of the model that is a stack of tensors of a file.
#[derive(Debug, Clone)]
struct Stack {
    model: String,
    /// With `#` for the index.
    file: String,
    count: usize,
}

/// A tensor of a file, and the tensors of the model that it is made of.
#[derive(Debug, Clone)]
struct Rule {
    file: String,
    parts: Vec<(String, View)>,
}

impl WeightLayout {
    /// A layout in which all names are equal, for files in which the model without its head is at
    /// `prefix`; empty if it is at the root beside the head.
    pub fn new(prefix: &str) -> Self {
        Self {
            prefix: prefix.to_owned(),
            ignored: Vec::new(),
            ignored_paths: Vec::new(),
            only_in_model: Vec::new(),
            rules: Vec::new(),
            stacks: Vec::new(),
            packing: None,
        }
    }

    /// The weights of a file are packed like this. A model's weights are saved plain.
    #[must_use]
    pub(crate) fn packed(mut self, packing: Option<Packing>) -> Self {
        self.packing = packing;
        self
    }

    pub(super) fn packing(&self) -> Option<Packing> {
        self.packing
    }

    /// Ignores tensors of a file whose names end like this pattern (`*.attn.bias`).
    #[must_use]
    pub fn ignore(mut self, pattern: &str) -> Self {
        self.ignored.push(pattern.trim_start_matches('*').to_owned());
        self
    }

    /// Ignores the tensors of a file below the module `path`.
    #[must_use]
    pub fn ignore_below(mut self, path: &str) -> Self {
        self.ignored_paths.push(format!("{path}."));
        self
    }

    /// Leaves the tensors below the module `path` of the model out of a file.
    #[must_use]
    pub fn leave_out(mut self, path: &str) -> Self {
        self.only_in_model.push(format!("{path}."));
        self
    }

    /// Whether a tensor of the model is in no file.
    pub(super) fn leaves_out(&self, name: &str) -> bool {
        self.only_in_model.iter().any(|prefix| name.starts_with(prefix.as_str()))
    }

    fn with(mut self, file: String, parts: Vec<(String, View)>) -> Self {
        self.rules.push(Rule { file, parts });
        self
    }

    /// The model's tensor `model` is called `file` in a file.
    #[must_use]
    pub fn rename(self, model: &str, file: &str) -> Self {
        self.with(file.to_owned(), vec![(model.to_owned(), View::WHOLE)])
    }

    /// The model's matrix `model` is the transposed matrix `file`.
    #[must_use]
    pub fn transpose(self, model: &str, file: &str) -> Self {
        let view = View { stacked: false, transposed: true, rows: Rows::All };
        self.with(file.to_owned(), vec![(model.to_owned(), view)])
    }

    /// The layers `parts` below `model`, of so many rows each, are one layer `file`.
    #[must_use]
    pub fn split(self, model: &str, parts: &[(&str, usize)], file: &str) -> Self {
        self.split_rows(model, parts, file, false)
    }

    /// [`split`](Self::split) of a layer whose weight is transposed in a file.
    #[must_use]
    pub fn split_transposed(self, model: &str, parts: &[(&str, usize)], file: &str) -> Self {
        self.split_rows(model, parts, file, true)
    }

    fn split_rows(
        mut self,
        model: &str,
        parts: &[(&str, usize)],
        file: &str,
        transposed: bool,
    ) -> Self {
        for kind in ["weight", "bias"] {
            let mut start = 0;
            let parts = parts.iter().map(|(name, len)| {
                let rows = Rows::Range { start, len: *len };
                start += len;
                let transposed = transposed && kind == "weight";
                let view = View { stacked: false, transposed, rows };
                (format!("{model}.{name}.{kind}"), view)
            });
            let parts = parts.collect();
            self = self.with(format!("{file}.{kind}"), parts);
        }
        self
    }

    /// The layers `parts` below `model` are one layer `file`, in which the rows of a head are
    /// beside each other.
    #[must_use]
    pub fn split_heads(
        mut self,
        model: &str,
        parts: &[&str],
        file: &str,
        [heads, dim]: [usize; 2],
    ) -> Self {
        for kind in ["weight", "bias"] {
            let of = |(part, name): (usize, &&str)| {
                let rows = Rows::PerHead { part, parts: parts.len(), heads, dim };
                (format!("{model}.{name}.{kind}"), View { stacked: false, transposed: false, rows })
            };
            let parts = parts.iter().enumerate().map(of).collect();
            self = self.with(format!("{file}.{kind}"), parts);
        }
        self
    }

    /// The tensors `parts` below `model`, stacks of so many rows each, are one tensor `file`, in
    /// whose matrices the rows of the parts follow each other.
    #[must_use]
    pub fn split_stacked(self, model: &str, parts: &[(&str, usize)], file: &str) -> Self {
        let mut start = 0;
        let parts = parts.iter().map(|(name, len)| {
            let rows = Rows::Range { start, len: *len };
            start += len;
            (format!("{model}.{name}"), View { stacked: true, transposed: false, rows })
        });
        let parts = parts.collect();
        self.with(file.to_owned(), parts)
    }

    /// The tensors `parts` below `model` are one tensor `file` of stacked matrices, whose columns
    /// (elements of stacked vectors) are in turn rows of each part.
    #[must_use]
    pub fn interleave_stacked(self, model: &str, parts: &[&str], file: &str) -> Self {
        let of = |(part, name): (usize, &&str)| {
            let rows = Rows::Interleaved { part, parts: parts.len() };
            (format!("{model}.{name}"), View { stacked: true, transposed: true, rows })
        };
        let parts = parts.iter().enumerate().map(of).collect();
        self.with(file.to_owned(), parts)
    }

    /// The model's stack of matrices `model` has transposed matrices in `file`.
    #[must_use]
    pub fn transpose_stacked(self, model: &str, file: &str) -> Self {
        let view = View { stacked: true, transposed: true, rows: Rows::All };
        self.with(file.to_owned(), vec![(model.to_owned(), view)])
    }

    /// The model's tensor `model` is a stack of `count` tensors of a file. In the pattern `file`,
    /// `#` is the segment with the index of each, from 0 on.
    #[must_use]
    pub fn stack(mut self, model: &str, file: &str, count: usize) -> Self {
        self.stacks.push(Stack { model: model.to_owned(), file: file.to_owned(), count });
        self
    }

    /// # Errors
    /// If the sides of a rule have different numbers of stars.
    pub(super) fn check(&self) -> Result<()> {
        let stars = |pattern: &str| pattern.split('.').filter(|part| *part == "*").count();
        for Rule { file, parts } in &self.rules {
            if let Some((model, _)) = parts.iter().find(|(model, _)| stars(model) != stars(file)) {
                return Err(different_stars(model, file));
            }
        }
        match self.stacks.iter().find(|stack| stars(&stack.model) != stars(&stack.file)) {
            None => Ok(()),
            Some(Stack { model, file, .. }) => Err(different_stars(model, file)),
        }
    }

    /// The path of the model without its head in a file.
    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    pub(super) fn ignores(&self, file: &str) -> bool {
        self.ignored.iter().any(|end| file.ends_with(end.as_str()))
            || self.ignored_paths.iter().any(|start| file.starts_with(start.as_str()))
    }

    /// The tensors of the model that are made of the file's tensor `file`.
    pub(crate) fn of_file(&self, file: &str) -> Vec<(String, View)> {
        for rule in &self.rules {
            if let Some(stars) = matched(&rule.file, file) {
                let part = |(name, view): &(String, View)| (filled(name, &stars), *view);
                return rule.parts.iter().map(part).collect();
            }
        }
        vec![(file.to_owned(), View::WHOLE)]
    }

    /// The stack of the model that the file's tensor `file` belongs to, its index there, and the
    /// number of tensors of the stack. An index that is no number is `None`.
    pub(super) fn stack_of_file(&self, file: &str) -> Option<(String, Option<usize>, usize)> {
        self.stacks.iter().find_map(|stack| {
            let mut stars = matched(&stack.file.replace('#', "*"), file)?;
            let varying = stack.file.split('.').filter(|part| ["*", "#"].contains(part));
            let index = stars.remove(varying.take_while(|part| *part != "#").count());
            Some((filled(&stack.model, &stars), index.parse().ok(), stack.count))
        })
    }

    /// The file's tensors that the model's tensor `model` is a stack of, if it is one.
    pub(super) fn stack_of_model(&self, model: &str) -> Option<Vec<String>> {
        self.stacks.iter().find_map(|stack| {
            let stars = matched(&stack.model, model)?;
            let file = |i: usize| filled(&stack.file.replace('#', &i.to_string()), &stars);
            Some((0..stack.count).map(file).collect())
        })
    }

    /// The file's tensor that the model's tensor `model` is a part of, and all its parts in order.
    pub(crate) fn of_model(&self, model: &str) -> (String, Vec<(String, View)>) {
        for rule in &self.rules {
            for (name, _) in &rule.parts {
                if let Some(stars) = matched(name, model) {
                    let part = |(name, view): &(String, View)| (filled(name, &stars), *view);
                    let parts = rule.parts.iter().map(part).collect();
                    return (filled(&rule.file, &stars), parts);
                }
            }
        }
        (model.to_owned(), vec![(model.to_owned(), View::WHOLE)])
    }
}

impl ForeignNames for WeightLayout {
    fn prefix(&self) -> &str {
        &self.prefix
    }

    fn parts(&self, tensor: &str) -> Vec<ForeignPart> {
        let part = |(parameter, view): (String, View)| ForeignPart {
            parameter,
            rows: view.rows_in_file(),
            is_transposed: view.transposed,
        };
        let parts = self.of_file(tensor);
        // Experts have names of their own.
        let is_stacked = parts.iter().any(|(_, view)| view.stacked);
        let parts = if is_stacked { vec![(tensor.to_owned(), View::WHOLE)] } else { parts };
        parts.into_iter().map(part).collect()
    }

    fn modules(&self, pattern: &str) -> Vec<String> {
        let mut modules = Vec::new();
        for Rule { file, parts } in &self.rules {
            let path = |name: &str| name.rsplit_once('.').map(|(path, _)| path.to_owned());
            let Some(stars) = path(file).and_then(|file| bound(pattern, &file)) else { continue };
            let stars: Vec<&str> = stars.iter().map(String::as_str).collect();
            let own = parts.iter().filter(|(_, view)| !view.stacked);
            let own = own.filter_map(|(name, _)| path(name)).map(|name| filled(&name, &stars));
            modules.extend(own.map(|path| format!(".{path}")));
        }
        modules.sort();
        modules.dedup();
        modules
    }
}

/// The segments for the stars of the path `file`, if a pattern names such a path: the pattern's
/// own, or stars. A pattern is the end of a path, or with a dot in front the whole.
fn bound(pattern: &str, file: &str) -> Option<Vec<String>> {
    let whole = pattern.strip_prefix('.');
    let own: Vec<&str> = whole.unwrap_or(pattern).split('.').collect();
    let path: Vec<&str> = file.split('.').collect();
    if own.len() > path.len() || (whole.is_some() && own.len() != path.len()) {
        return None;
    }
    let before = path.len() - own.len();
    let mut stars = Vec::new();
    for (i, segment) in path.iter().enumerate() {
        let own = i.checked_sub(before).map(|i| own[i]);
        match (*segment, own) {
            ("*", Some(own)) => stars.push(own.to_owned()),
            ("*", None) => stars.push("*".to_owned()),
            (segment, Some(own)) if own != segment && own != "*" => return None,
            _ => {}
        }
    }
    Some(stars)
}

fn different_stars(model: &str, file: &str) -> Error {
    Error::other(format!(
        "weights are mapped by `{model}` and `{file}`, which have different numbers of `*`; each segment that varies \
         needs one on both sides"
    ))
}

/// The segments that the stars of a pattern stand for, if it matches the name.
fn matched<'a>(pattern: &str, name: &'a str) -> Option<Vec<&'a str>> {
    let (mut stars, mut segments) = (Vec::new(), name.split('.'));
    for part in pattern.split('.') {
        let segment = segments.next()?;
        match part {
            "*" => stars.push(segment),
            part if part == segment => {}
            _ => return None,
        }
    }
    segments.next().is_none().then_some(stars)
}

/// The pattern with these segments in place of its stars.
fn filled(pattern: &str, stars: &[&str]) -> String {
    let mut stars = stars.iter();
    let segment = |part: &str| match part {
        "*" => (*stars.next().expect("`check` compared the stars of both sides")).to_owned(),
        part => part.to_owned(),
    };
    pattern.split('.').map(segment).collect::<Vec<_>>().join(".")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_need_equal_stars() {
        let layout = WeightLayout::new("t").rename("norm.weight", "t.h.*.ln.weight");
        let error = layout.check().unwrap_err().to_string();
        assert!(error.contains("`norm.weight` and `t.h.*.ln.weight`"), "{error}");
        assert!(layout.rename("a.*", "b.*").check().is_err());
        assert!(WeightLayout::new("t").rename("a.*", "b.*").check().is_ok());
    }

    #[test]
    fn stacks_name_both_sides() {
        let layout = WeightLayout::new("t").stack("model.*.experts.up", "t.*.experts.#.w3", 2);
        assert!(layout.check().is_ok());
        let found = layout.stack_of_file("t.5.experts.1.w3");
        assert_eq!(found, Some(("model.5.experts.up".to_owned(), Some(1), 2)));
        assert_eq!(layout.stack_of_file("t.5.experts.one.w3").unwrap().1, None);
        assert_eq!(layout.stack_of_file("t.5.experts.w3"), None);
        let files = layout.stack_of_model("model.5.experts.up").unwrap();
        assert_eq!(files, ["t.5.experts.0.w3", "t.5.experts.1.w3"]);
        assert_eq!(layout.stack_of_model("model.5.experts.down"), None);
        let error = layout.stack("model.up", "t.*.#", 1).check().unwrap_err().to_string();
        assert!(error.contains("`model.up` and `t.*.#`"), "{error}");
    }

    #[test]
    fn rules_name_both_sides() {
        let layout = WeightLayout::new("t").rename("model.layers.*.norm.*", "t.h.*.ln.*").split(
            "model.layers.*.a",
            &[("q", 2), ("k", 1)],
            "t.h.*.qk",
        );
        let one = |name: &str| vec![(name.to_owned(), View::WHOLE)];
        assert_eq!(layout.of_file("t.h.3.ln.bias"), one("model.layers.3.norm.bias"));
        assert_eq!(layout.of_model("model.layers.3.norm.bias").0, "t.h.3.ln.bias");
        assert_eq!(layout.of_file("other"), one("other"));
        let (file, parts) = layout.of_model("model.layers.7.a.k.weight");
        assert_eq!(file, "t.h.7.qk.weight");
        let rows = |start, len| View {
            stacked: false,
            transposed: false,
            rows: Rows::Range { start, len },
        };
        let expected = [
            ("model.layers.7.a.q.weight".to_owned(), rows(0, 2)),
            ("model.layers.7.a.k.weight".to_owned(), rows(2, 1)),
        ];
        assert_eq!(parts, expected);
        assert_eq!(layout.of_file("t.h.7.qk.weight"), expected);
    }
}
