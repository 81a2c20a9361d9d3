//! Rules that map the names in a source to names in a model.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};

use super::{TensorInfo, TensorSource, optimizer_key, parse_optimizer_key};
use crate::{Error, Result};
use fulgurite_engine::module::{PatternMatch, find_pattern, pattern_matches};
use fulgurite_engine::shard::Region;

/// Segments that PyTorch's wrappers insert into names: FSDP, activation checkpointing,
/// `torch.compile`.
const WRAPPERS: [&str; 3] = ["_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"];

/// Removes the segments that PyTorch's wrappers insert from a parameter's name.
///
/// They are `_fsdp_wrapped_module`, `_checkpoint_wrapped_module` and `_orig_mod` anywhere, and
/// `module` at the beginning (`DistributedDataParallel`, `DataParallel`).
///
/// ```
/// use fulgurite_core::checkpoint::clean_tensor_name;
/// assert_eq!(clean_tensor_name("module._orig_mod.layers.0._fsdp_wrapped_module.up")?, "layers.0.up");
/// assert_eq!(clean_tensor_name("encoder.module.weight")?, "encoder.module.weight");
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
///
/// # Errors
/// For the flat parameters of FSDP 1 (`_flat_param`), which hold several parameters without their
/// shapes.
pub fn clean_tensor_name(name: &str) -> Result<String> {
    let mut segments: Vec<&str> = name.split('.').filter(|s| !WRAPPERS.contains(s)).collect();
    if segments.iter().any(|s| matches!(*s, "_flat_param" | "flat_param")) {
        let message = "is a flat parameter of FSDP 1, which holds several parameters in one tensor. \
                       Save with `StateDictType.FULL_STATE_DICT` there";
        return Err(Error::parameter(name, message));
    }
    if segments.len() > 1 && segments[0] == "module" {
        segments.remove(0);
    }
    if segments.is_empty() {
        return Err(Error::parameter(name, "has no name besides those of wrappers"));
    }
    Ok(segments.join("."))
}

/// Rules that map the names in a source to names in a model.
///
/// They are applied in this order: [`clean`](Self::clean), [`prefix_strip`](Self::prefix_strip),
/// [`rename`](Self::rename), [`prefix_add`](Self::prefix_add).
///
/// ```
/// use fulgurite_core::checkpoint::NameRules;
///
/// let rules = NameRules {
///     prefix_strip: Some("model.".into()),
///     rename: vec![("layers.*.attn".into(), "blocks.*.self_attn".into())],
///     ..NameRules::default()
/// };
/// assert_eq!(rules.apply("model.layers.3.attn.q.weight")?, "blocks.3.self_attn.q.weight");
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NameRules {
    /// Whether the segments of PyTorch's wrappers are removed; see [`clean_tensor_name`].
    pub clean: bool,
    /// A prefix that is removed from names, such as `model.`.
    pub prefix_strip: Option<String>,
    /// Patterns and their replacements; the first pattern that matches is applied. A pattern that
    /// stands there several times gives a tensor several names, so that it fills several
    /// parameters: see [`apply_all`](Self::apply_all). A replacement takes the place of the
    /// first segments that the pattern names, as [`find_pattern`] finds them, and the rest of the
    /// name stays. Each `*` of the replacement stands for the match of its counterpart. An empty
    /// replacement takes the segments away, `*` to `model.*` puts `model` in front, and a pattern
    /// with a dot in front matches from the beginning alone.
    pub rename: Vec<(String, String)>,
    /// A prefix that is added to every name, such as `model.`.
    pub prefix_add: Option<String>,
}

impl NameRules {
    /// Whether no name is changed.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the first pattern of [`rename`](Self::rename) that matches none of these names of a
    /// source. The rules before renaming are applied first.
    pub(super) fn idle_pattern(&self, names: &[&str]) -> Option<&str> {
        let before_renaming = Self { rename: Vec::new(), prefix_add: None, ..self.clone() };
        let names: Vec<String> =
            names.iter().filter_map(|name| before_renaming.apply(name).ok()).collect();
        let is_idle = |from: &&str| !names.iter().any(|name| pattern_matches(from, name));
        self.rename.iter().map(|(from, _)| from.as_str()).find(is_idle)
    }

    /// Returns the model's name for the tensor `name` of the source, the first of several.
    ///
    /// # Errors
    /// As [`apply_all`](Self::apply_all).
    pub fn apply(&self, name: &str) -> Result<String> {
        Ok(self.apply_all(name)?.swap_remove(0))
    }

    /// Returns the model's names for the tensor `name` of the source, at least one.
    ///
    /// ```
    /// use fulgurite_core::checkpoint::NameRules;
    ///
    /// let to = |name: &str| ("model".to_owned(), name.to_owned());
    /// let rules = NameRules { rename: vec![to("online"), to("target")], ..NameRules::default() };
    /// assert_eq!(rules.apply_all("model.up.weight")?, ["online.up.weight", "target.up.weight"]);
    /// # Ok::<(), fulgurite_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`clean_tensor_name`]; if a replacement has more `*` than its pattern; if a resulting
    /// name is empty.
    pub fn apply_all(&self, name: &str) -> Result<Vec<String>> {
        let mut new = if self.clean { clean_tensor_name(name)? } else { name.to_owned() };
        if let Some(rest) = self.prefix_strip.as_deref().and_then(|p| new.strip_prefix(p)) {
            new = rest.to_owned();
        }
        for (pattern, replacement) in &self.rename {
            let wildcards = |text: &str| text.matches('*').count();
            if wildcards(replacement) > wildcards(pattern) {
                return Err(Error::other(format!(
                    "renaming `{pattern}` to `{replacement}`: the replacement has more `*` than \
                     the pattern, so that nothing is known to put there"
                )));
            }
        }
        let mut all = Vec::new();
        let matching = self
            .rename
            .iter()
            .filter(|_| !new.is_empty())
            .find_map(|(pattern, _)| find_pattern(pattern, &new).map(|found| (pattern, found)));
        let Some((pattern, PatternMatch { before, captures, rest })) = matching else {
            return Ok(vec![self.finished(name, new)?]);
        };
        for (_, replacement) in self.rename.iter().filter(|(from, _)| from == pattern) {
            let mut captures = captures.iter();
            let mut parts = replacement.split('*');
            let mut renamed = parts.next().unwrap_or_default().to_owned();
            for part in parts {
                renamed.push_str(captures.next().copied().unwrap_or_default());
                renamed.push_str(part);
            }
            let new = match (renamed.is_empty(), before) {
                (false, _) => format!("{before}{renamed}{rest}"),
                (true, "") => rest.trim_start_matches('.').to_owned(),
                (true, _) => format!("{}{rest}", before.trim_end_matches('.')),
            };
            all.push(self.finished(name, new)?);
        }
        Ok(all)
    }

    /// Adds the prefix to a new name of the tensor `name`.
    fn finished(&self, name: &str, mut new: String) -> Result<String> {
        if let Some(prefix) = &self.prefix_add {
            new.insert_str(0, prefix);
        }
        if new.is_empty() {
            return Err(Error::parameter(name, "has no name left after renaming"));
        }
        Ok(new)
    }
}

/// A source whose tensors are renamed.
///
/// ```no_run
/// use fulgurite_core::checkpoint::{self, NameRules, RenamedSource};
/// # fn load(tree: &fulgurite_core::module::ModuleTree) -> fulgurite_core::Result<()> {
/// let rules = NameRules { prefix_strip: Some("model.".into()), ..NameRules::default() };
/// let source = RenamedSource::new(checkpoint::open("epoch=3.ckpt")?, &rules)?;
/// checkpoint::load_into(&source, tree, true)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct RenamedSource<S> {
    inner: S,
    /// Names in `inner`, by new name.
    names: BTreeMap<String, String>,
}

impl<S: TensorSource> RenamedSource<S> {
    /// Renames the tensors of `inner` by `rules`.
    ///
    /// # Errors
    /// If two tensors get the same name, naming both; as [`NameRules::apply`].
    pub fn new(inner: S, rules: &NameRules) -> Result<Self> {
        Self::with(inner, |name| rules.apply_all(name))
    }

    /// Renames an optimizer's tensors, whose names are [`optimizer_key`]s; the rules apply to the
    /// parameters' names.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn optimizer(inner: S, rules: &NameRules) -> Result<Self> {
        Self::with(inner, |key| match parse_optimizer_key(key) {
            Some((fqn, name)) => {
                let names = rules.apply_all(fqn)?;
                Ok(names.iter().map(|fqn| optimizer_key(fqn, name)).collect())
            }
            None => Ok(vec![key.to_owned()]),
        })
    }

    /// Renames the tensors of `inner` by the closure `rename`.
    pub(crate) fn with(inner: S, rename: impl Fn(&str) -> Result<Vec<String>>) -> Result<Self> {
        let mut names = BTreeMap::new();
        for old in inner.names() {
            let all = rename(old)
                .map_err(|error| Error::checkpoint(inner.location(), error.to_string()))?;
            for new in all {
                if let Some(other) = names.insert(new.clone(), old.to_owned()) {
                    let message = format!("`{other}` and `{old}` would both be called `{new}`");
                    return Err(Error::checkpoint(inner.location(), message));
                }
            }
        }
        Ok(Self { inner, names })
    }

    fn inner_name(&self, name: &str) -> Result<&str> {
        self.names.get(name).map(String::as_str).ok_or_else(|| {
            let message = format!("tensor `{name}`: there is none of this name");
            Error::checkpoint(self.inner.location(), message)
        })
    }
}

impl<S: TensorSource> TensorSource for RenamedSource<S> {
    fn location(&self) -> &Path {
        self.inner.location()
    }

    fn names(&self) -> Vec<&str> {
        self.names.keys().map(String::as_str).collect()
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        self.inner.info(self.names.get(name)?)
    }

    fn read(&self, name: &str, region: &Region, dtype: DType, device: &Device) -> Result<Tensor> {
        self.inner.read(self.inner_name(name)?, region, dtype, device)
    }

    fn read_into(&self, name: &str, region: &Region, target: &Tensor) -> Result<()> {
        self.inner.read_into(self.inner_name(name)?, region, target)
    }

    fn read_into_unverified(&self, name: &str, region: &Region, target: &Tensor) -> Result<()> {
        self.inner.read_into_unverified(self.inner_name(name)?, region, target)
    }

    fn read_codes(&self, name: &str, region: &Region) -> Result<Vec<u8>> {
        self.inner.read_codes(self.inner_name(name)?, region)
    }

    fn read_stored(&self, name: &str) -> Result<Vec<u8>> {
        self.inner.read_stored(self.inner_name(name)?)
    }

    fn unreadable(&self, name: &str) -> Option<&str> {
        self.inner.unreadable(self.names.get(name)?)
    }

    fn filtered(&self) -> Option<&str> {
        self.inner.filtered()
    }

    fn warning(&self) -> Option<String> {
        self.inner.warning()
    }
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    #[test]
    fn wrapper_segments_are_removed() {
        let clean = |name: &str| clean_tensor_name(name).unwrap();
        assert_eq!(clean("_fsdp_wrapped_module.a._checkpoint_wrapped_module.w"), "a.w");
        assert_eq!(clean("_orig_mod.module.a.w"), "a.w");
        assert_eq!(clean("module.module.w"), "module.w");
        assert_eq!(clean("module"), "module");
        let error = clean_tensor_name("layers.0._fsdp_wrapped_module._flat_param").unwrap_err();
        assert_says!(error, "parameter `layers.0._fsdp_wrapped_module._flat_param` … FSDP 1 …");
        assert_says!(
            clean_tensor_name("_orig_mod").unwrap_err(),
            "parameter `_orig_mod` … wrappers"
        );
    }

    #[test]
    fn pattern_gives_several_names() {
        let tensor = Tensor::new(&[1f32, 2.0], &Device::Cpu).unwrap();
        let source = || crate::TensorMap::new([("model.norm.w".to_owned(), tensor.clone())]);
        let rules = |names: &[&str]| NameRules {
            rename: names.iter().map(|to| ("model".to_owned(), (*to).to_owned())).collect(),
            prefix_add: Some("net.".into()),
            ..NameRules::default()
        };
        let renamed = RenamedSource::new(source(), &rules(&["online", "target"])).unwrap();
        assert_eq!(renamed.names(), ["net.online.norm.w", "net.target.norm.w"]);
        for name in renamed.names() {
            let read = renamed.read(name, &Region::full(&[2]), DType::F32, &Device::Cpu).unwrap();
            assert_eq!(read.to_vec1::<f32>().unwrap(), [1.0, 2.0]);
        }
        let twice = RenamedSource::new(source(), &rules(&["online", "online"])).unwrap_err();
        assert_says!(twice, "checkpoint … `model.norm.w` … both be called `net.online.norm.w`");
    }

    #[test]
    fn rules_apply_in_order() {
        let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        let mut rules = NameRules {
            clean: true,
            prefix_strip: Some("model.".into()),
            rename: vec![pair("a.*.x_*", "*.*.y"), pair("a", "never after the first")],
            prefix_add: Some("net.".into()),
        };
        assert_eq!(rules.apply("module.model.a.1.x_q.w").unwrap(), "net.1.q.y.w");
        assert_eq!(rules.apply("module.model.b.a.1.x_q.w").unwrap(), "net.b.1.q.y.w");
        assert_eq!(rules.apply("b").unwrap(), "net.b");
        rules.rename.push(pair("b", "*"));
        assert_says!(rules.apply("c").unwrap_err(), "renaming `b` to `*` … more `*` than …");
        let strip = NameRules { prefix_strip: Some("w".into()), ..NameRules::default() };
        assert_says!(strip.apply("w").unwrap_err(), "parameter `w`: has no name … renaming");
        assert!(NameRules::default().is_empty() && !strip.is_empty());
    }
}
