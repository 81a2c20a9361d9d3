//! Units that are gathered separately: PyTorch's `fully_shard`.
//!
//! ```
//! use std::sync::Arc;
//!
//! use fulgurite_core::collective::Solo;
//! use fulgurite_core::mesh::{DP_CP, DeviceMesh};
//! use fulgurite_core::module::{FullyShard, ModuleBuilder, ModuleInit};
//! use fulgurite_core::nn::Linear;
//!
//! let b = ModuleBuilder::new(ModuleInit::default());
//! let blocks = (0..3).map(|i| b.unit(&format!("blocks.{i}"), |b| Linear::new(b, 8, 8)));
//! let blocks = blocks.collect::<fulgurite_core::Result<Vec<_>>>()?;
//! let mut model = b.finish()?;
//! let mesh = DeviceMesh::new(
//!     DeviceMesh::layout_for(1, None, None, None, None)?,
//!     Arc::new(Solo::new("world", 0)),
//! )?;
//!
//! for unit in model.units_matching("blocks.*") {
//!     unit.fully_shard(&mesh.get(DP_CP)?, FullyShard::default())?;
//! }
//! model.fully_shard(&mesh.get(DP_CP)?, FullyShard::default())?;
//! assert!(model.is_fully_sharded("blocks.2"));
//! # Ok::<(), fulgurite_core::Error>(())
//! ```

use super::pattern::{pattern_matches, pattern_names};
use super::tree::ModuleTree;
use super::unit::UnitHandle;
use crate::{Error, Result};
use fulgurite_collective::mesh::{
    DATA_PARALLEL, DATA_PARALLEL_REPLICATE, DATA_PARALLEL_SHARD, DP_CP, DP_SHARD_CP, DeviceMesh,
};

/// The part of a unit's gathered parameters that stays between forward and backward (PyTorch's
/// `reshard_after_forward`).
///
/// ```
/// use fulgurite_core::module::Reshard;
/// assert_eq!((Reshard::from(true), Reshard::from(8)), (Reshard::Always, Reshard::Ranks(8)));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reshard {
    /// Nothing (`true`): the parameters are freed, and gathered again from all ranks.
    Always,
    /// Everything (`false`): nothing is gathered for backward.
    Never,
    /// A part, over this number of neighbouring ranks of the ranks that share the parameters. For
    /// example the ranks of a host, so that backward gathers within the host. The value must divide
    /// the number of sharing ranks. 1 equals [`Never`](Self::Never), and the full number equals
    /// [`Always`](Self::Always).
    Ranks(usize),
}

impl From<bool> for Reshard {
    fn from(reshard: bool) -> Self {
        if reshard { Self::Always } else { Self::Never }
    }
}

impl From<usize> for Reshard {
    fn from(ranks: usize) -> Self {
        Self::Ranks(ranks)
    }
}

/// Options of PyTorch's `fully_shard` for a single unit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FullyShard {
    /// The part of the unit's parameters that stays between forward and backward. `None` leaves the
    /// choice to the strategy.
    pub reshard_after_forward: Option<Reshard>,
}

/// The mesh dimensions and views over which parameters can be sharded.
const VIEWS: [&str; 4] = [DP_CP, DATA_PARALLEL, DATA_PARALLEL_SHARD, DP_SHARD_CP];
/// PyTorch's mesh for replicated shards (hybrid sharding).
const HYBRID: [&str; 2] = [DATA_PARALLEL_REPLICATE, DATA_PARALLEL_SHARD];

/// Checks that parameters can be sharded over `mesh`.
fn check_mesh(mesh: &DeviceMesh) -> Result<()> {
    match mesh.layout().names() {
        [name] if VIEWS.contains(&name.as_str()) => Ok(()),
        names if names == HYBRID => Ok(()),
        names => Err(Error::Mesh(format!(
            "fully_shard works along one dimension or view, {} or {}; got a mesh of {}. Take one \
             with `mesh.get({DP_CP:?})`",
            VIEWS[..3].join(", "),
            VIEWS[3],
            names.join(", ")
        ))),
    }
}

impl UnitHandle {
    /// Gathers this unit separately. A later call replaces the options. `mesh` is
    /// `mesh.get("dp_cp")`, or the same with `data_parallel`, `data_parallel_shard` or
    /// `dp_shard_cp`. All are equivalent: the strategy's own mesh decides which ranks share
    /// parameters. Call it before any values exist, alike on every rank; it communicates nothing.
    ///
    /// # Errors
    /// If `mesh` is another mesh, or the unit has computed.
    pub fn fully_shard(&self, mesh: &DeviceMesh, options: FullyShard) -> Result<()> {
        check_mesh(mesh)?;
        self.set_fully_shard(options)
    }
}

impl ModuleTree {
    /// The units that `pattern` [names](pattern_names), in build order. If it names no unit, the
    /// units under the modules it names.
    pub fn units_matching(&self, pattern: &str) -> impl Iterator<Item = UnitHandle> {
        let names_units = self.units().iter().any(|unit| pattern_names(pattern, unit.path()));
        let matches = if names_units { pattern_names } else { pattern_matches };
        self.units().iter().filter(move |unit| matches(pattern, unit.path())).cloned()
    }

    /// Shards the root unit, which has the parameters outside of all chosen units. It stays
    /// gathered throughout a step. `mesh` is as for [`UnitHandle::fully_shard`].
    ///
    /// # Errors
    /// If `mesh` is not one of those meshes, or the options ask to free all or part of the root
    /// after forward.
    pub fn fully_shard(&mut self, mesh: &DeviceMesh, options: FullyShard) -> Result<()> {
        check_mesh(mesh)?;
        if matches!(options.reshard_after_forward, Some(Reshard::Always | Reshard::Ranks(_))) {
            return Err(Error::other(
                "the root unit cannot be freed after forward: its backward begins at once. Leave \
                 `reshard_after_forward` of the root out, and move what is large into units",
            ));
        }
        self.root = Some(options);
        Ok(())
    }

    /// Gathers the units of [`units_matching`](Self::units_matching) separately, with the
    /// strategy's options. Other units belong to the root unit.
    ///
    /// # Errors
    /// If no unit matches (the message lists the units), or one has computed.
    pub fn fully_shard_matching(&mut self, pattern: &str) -> Result<()> {
        let mut matching = self.units_matching(pattern).peekable();
        if matching.peek().is_none() {
            let message = match self.units() {
                [] => "no unit matches this pattern: the model has none; build blocks with \
                       `ModuleBuilder::unit`"
                    .to_owned(),
                units => format!(
                    "no unit matches this pattern (`*` is one segment); there are {}",
                    paths(units)
                ),
            };
            return Err(Error::Module { path: pattern.to_owned(), message });
        }
        matching.try_for_each(|unit| unit.set_fully_shard(FullyShard::default()))
    }

    /// Chooses, from the last unit to the first, every unit whose path satisfies a condition
    /// (torchtune's `shard_model`). The root unit takes the rest. [`layers_or_names`] makes a
    /// condition.
    ///
    /// # Errors
    /// If no unit satisfies a condition, or one that does has computed.
    pub fn shard_model(
        &mut self,
        conditions: &[&dyn Fn(&str) -> bool],
        options: FullyShard,
    ) -> Result<()> {
        let mut sharded = false;
        for unit in self.units().iter().rev() {
            if conditions.iter().any(|accepts| accepts(unit.path())) {
                unit.set_fully_shard(options)?;
                sharded = true;
            }
        }
        if !sharded {
            return Err(Error::other(format!(
                "No layer modules were sharded. Please check if shard conditions are working as \
                 expected: they see the paths of the model's units ({})",
                match self.units() {
                    [] => "there are none; build blocks with `ModuleBuilder::unit`".to_owned(),
                    units => paths(units),
                }
            )));
        }
        self.root = Some(options);
        Ok(())
    }

    /// Whether the unit at `path` is gathered separately.
    pub fn is_fully_sharded(&self, path: &str) -> bool {
        self.fully_shard_options(path).is_some()
    }

    /// The options chosen for the unit at `path`, or for the root unit at path `""`. `None` if it
    /// was not chosen. For strategies.
    pub fn fully_shard_options(&self, path: &str) -> Option<FullyShard> {
        match path {
            "" => self.root,
            path => self.units().iter().find(|unit| unit.path() == path)?.fully_shard_options(),
        }
    }

    /// Whether any unit or the root was chosen. If not, the strategy chooses, for instance every
    /// unit. For strategies.
    pub fn has_fully_shard_choice(&self) -> bool {
        self.root.is_some() || self.units().iter().any(|u| u.fully_shard_options().is_some())
    }
}

fn paths(units: &[UnitHandle]) -> String {
    units.iter().map(UnitHandle::path).collect::<Vec<_>>().join(", ")
}

/// A condition for [`ModuleTree::shard_model`]: accepts the given paths, and paths that end in
/// `layers` and a number (torchtune's `get_shard_conditions`).
///
/// ```
/// use fulgurite_core::module::layers_or_names;
/// let accepts = layers_or_names(["embedding"]);
/// assert!(accepts("decoder.layers.1") && accepts("embedding"));
/// assert!(!accepts("encoder.layers.2.attention"));
/// ```
pub fn layers_or_names<N: Into<String>>(
    names: impl IntoIterator<Item = N>,
) -> impl Fn(&str) -> bool {
    let names: Vec<String> = names.into_iter().map(Into::into).collect();
    move |path| {
        let mut segments = path.rsplit('.');
        let (last, before) = (segments.next().unwrap_or_default(), segments.next());
        names.iter().any(|name| name == path)
            || (before == Some("layers")
                && !last.is_empty()
                && last.bytes().all(|b| b.is_ascii_digit()))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use fulgurite_test_message::assert_says;

    use super::*;
    use crate::module::{ModuleBuilder, ModuleInit};
    use crate::parameter::Init;
    use fulgurite_collective::collective::Solo;
    use fulgurite_collective::mesh::{CONTEXT_PARALLEL, DATA_PARALLEL_REPLICATE, TENSOR_PARALLEL};

    fn model(units: &[&str]) -> ModuleTree {
        let b = ModuleBuilder::new(ModuleInit::default());
        for unit in units {
            b.unit(unit, |b| b.parameter("weight", [2, 2], Init::ZEROS)).unwrap();
        }
        b.pp("head").parameter("weight", [2, 2], Init::ZEROS).unwrap();
        b.finish().unwrap()
    }

    fn mesh() -> DeviceMesh {
        let layout = DeviceMesh::layout_for(1, None, None, None, None).unwrap();
        DeviceMesh::new(layout, Arc::new(Solo::new("world", 0))).unwrap()
    }

    const OPTIONS: FullyShard = FullyShard { reshard_after_forward: Some(Reshard::Never) };

    /// The examples of torchtune's documentation.
    // checklist: torchtune: get_shard_conditions
    #[test]
    fn layers_and_names_are_accepted() {
        let none: [&str; 0] = [];
        let accepts = layers_or_names(none);
        assert!(accepts("layers.0"));
        assert!(accepts("decoder.layers.1"));
        assert!(!accepts("encoder.layers.2.attention"));
        assert!(!accepts("my_wrapper.layer.1.something"));
        assert!(!accepts("embedding"));
        assert!(!accepts("layers") && !accepts("0") && !accepts("layers.") && !accepts("layers.a"));
        let accepts = layers_or_names(["embedding"]);
        assert!(accepts("embedding") && accepts("layers.0"));
        assert!(!accepts("model.embedding"));
    }

    #[test]
    fn units_are_chosen_one_by_one() {
        let mut tree = model(&["layers.0", "layers.1", "extra"]);
        assert!(!tree.has_fully_shard_choice());
        assert_eq!(tree.units_matching("layers.*").count(), 2);
        assert_eq!(tree.units_matching("layers").count(), 2);
        assert_eq!(tree.units_matching("1").count(), 1);
        for view in VIEWS {
            for unit in tree.units_matching("layers.1") {
                unit.fully_shard(&mesh().get(view).unwrap(), OPTIONS).unwrap();
            }
        }
        assert!(tree.has_fully_shard_choice());
        assert_eq!(tree.fully_shard_options("layers.1"), Some(OPTIONS));
        assert!(!tree.is_fully_sharded("layers.0") && !tree.is_fully_sharded("nowhere"));
        assert_eq!(tree.fully_shard_options(""), None);
        tree.fully_shard(&mesh().get(DP_CP).unwrap(), OPTIONS).unwrap();
        assert_eq!(tree.fully_shard_options(""), Some(OPTIONS));
        // The root alone is a choice too.
        let mut tree = model(&["layers.0"]);
        tree.fully_shard(&mesh().get(DP_CP).unwrap(), OPTIONS).unwrap();
        assert!(tree.has_fully_shard_choice() && !tree.is_fully_sharded("layers.0"));
    }

    // checklist: torchtune: shard_model
    #[test]
    fn conditions_choose_units() {
        let mut tree = model(&["embed", "layers.0", "layers.1", "extra"]);
        let (layers, first) = (layers_or_names(["embed"]), |path: &str| path == "layers.0");
        tree.shard_model(&[&layers, &first], OPTIONS).unwrap();
        let chosen = |path| tree.fully_shard_options(path) == Some(OPTIONS);
        assert!(chosen("embed") && chosen("layers.0") && chosen("layers.1") && chosen(""));
        assert!(!tree.is_fully_sharded("extra"));

        let mut tree = model(&["blocks.0", "blocks.1"]);
        assert_says!(
            tree.shard_model(&[&layers], OPTIONS).unwrap_err(),
            "No layer modules were sharded … shard conditions … (blocks.0, blocks.1)"
        );
        assert!(!tree.has_fully_shard_choice());
        assert_says!(
            model(&[]).shard_model(&[&layers], OPTIONS).unwrap_err(),
            "No layer modules were sharded … there are none … `ModuleBuilder::unit`)"
        );
    }

    #[test]
    fn patterns_choose_units() {
        let mut tree = model(&["blocks.0", "blocks.1", "extra"]);
        tree.fully_shard_matching("blocks.*").unwrap();
        assert_eq!(tree.fully_shard_options("blocks.1"), Some(FullyShard::default()));
        assert!(!tree.is_fully_sharded("extra"));
        assert_says!(
            tree.fully_shard_matching("layers.*").unwrap_err(),
            "module `layers.*`: no unit matches … blocks.0, blocks.1, extra"
        );
        assert_says!(
            model(&[]).fully_shard_matching("layers.*").unwrap_err(),
            "module `layers.*`: no unit matches … the model has none … `ModuleBuilder::unit`"
        );
    }

    #[test]
    fn unsuitable_meshes_are_refused() {
        let mut tree = model(&["blocks.0"]);
        let dp_cp = mesh().get(DP_CP).unwrap();
        for reshard in [Reshard::Always, Reshard::Ranks(2)] {
            let options = FullyShard { reshard_after_forward: Some(reshard) };
            assert_says!(
                tree.fully_shard(&dp_cp, options).unwrap_err(),
                "the root unit cannot be freed after forward … `reshard_after_forward` …"
            );
        }
        let refused =
            |name| mesh().get(name).and_then(|mesh| tree.units()[0].fully_shard(&mesh, OPTIONS));
        assert_says!(
            refused(TENSOR_PARALLEL).unwrap_err(),
            r#"device mesh … one dimension … got a mesh of tensor_parallel. … `mesh.get("dp_cp")`"#
        );
        refused(CONTEXT_PARALLEL).unwrap_err();
        refused(DATA_PARALLEL_REPLICATE).unwrap_err();
        assert_says!(
            tree.fully_shard(&mesh(), OPTIONS).unwrap_err(),
            r#"device mesh … one dimension … data_parallel_replicate … `mesh.get("dp_cp")`"#
        );
        assert!(!tree.has_fully_shard_choice());
    }
}
