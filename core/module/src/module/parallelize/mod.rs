//! Applying a plan to a module tree.

mod check;
mod cut;
mod edges;
mod matching;

pub(crate) use edges::Edge;

use std::collections::BTreeMap;
use std::sync::Arc;

use super::ModuleTree;
use crate::parallel::{
    LayerEdges, LayerSharding, LayerStyles, ParallelStyle, Plan, SequenceLength, Styles,
};
use crate::parameter::Parameter;
use crate::{Error, Result};
use fulgurite_collective::collective::ProcessGroup;
use fulgurite_collective::mesh::{
    CONTEXT_PARALLEL, DATA_PARALLEL, DATA_PARALLEL_REPLICATE, DATA_PARALLEL_SHARD, DP_CP,
    DP_SHARD_CP, DeviceMesh, TENSOR_PARALLEL,
};

/// The plans applied to a tree.
#[derive(Debug, Clone, Default)]
pub(crate) struct AppliedPlans {
    pub(super) styles: Styles,
    /// The layouts at the edges of the modules that the plans shard.
    pub(super) edges: BTreeMap<String, LayerEdges>,
    pub(super) ranks: usize,
    pub(super) sequence: SequenceLength,
}

/// A plan's sharding of the layers it names, by path. The sharding of a layer includes the layers
/// that it computes.
pub(super) type Shardings = BTreeMap<String, LayerSharding>;

fn wrong<T>(path: &str, message: String) -> Result<T> {
    Err(Error::Module { path: path.to_owned(), message })
}

/// A plan that is being applied.
pub(super) struct PlanApplication<'a> {
    pub(super) tree: &'a ModuleTree,
    /// The mesh dimension.
    pub(super) dim: &'a str,
    pub(super) group: Arc<dyn ProcessGroup>,
    pub(super) styles: Styles,
    pub(super) sequence: SequenceLength,
}

impl ModuleTree {
    /// Applies a tensor-parallel plan along `mesh`, a mesh of one dimension
    /// (`mesh.get("tensor_parallel")`), like PyTorch's function of this name. Call it before
    /// [`fully_shard`](Self::fully_shard) and before any values exist, alike on every rank. It
    /// communicates nothing.
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use fulgurite_core::collective::Solo;
    /// use fulgurite_core::mesh::{DeviceMesh, TENSOR_PARALLEL};
    /// use fulgurite_core::module::{ModuleBuilder, ModuleInit};
    /// use fulgurite_core::nn::SwiGluMlp;
    /// use fulgurite_core::parallel::{Colwise, Rowwise};
    /// use fulgurite_core::plan;
    ///
    /// let b = ModuleBuilder::new(ModuleInit::default());
    /// let mlp = SwiGluMlp::new(&b.pp("blocks.0.mlp"), 64, 256)?;
    /// let mut tree = b.finish()?;
    /// let mesh = DeviceMesh::new(DeviceMesh::layout_for(1, None, None, None, None)?,
    ///     Arc::new(Solo::new("world", 0)))?;
    /// tree.parallelize_module(&mesh.get(TENSOR_PARALLEL)?, &plan! {
    ///     "blocks.*.mlp.gate_proj" => Colwise::default(),
    ///     "blocks.*.mlp.up_proj" => Colwise::default(),
    ///     "blocks.*.mlp.down_proj" => Rowwise::default(),
    /// })?;
    /// # Ok::<(), fulgurite_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// If a pattern matches no layer, a layer matches two patterns, or a layer does not support its
    /// style. If the projections of an attention or MLP block do not fit together, or layers that
    /// share a weight cut it differently. If heads or a parameter cannot be cut into as many parts
    /// as there are ranks. The message names the layer.
    pub fn parallelize_module(&mut self, mesh: &DeviceMesh, plan: &Plan) -> Result<()> {
        let dim = dimension(mesh)?;
        let styles = self.styles(plan)?;
        let earlier = &self.parallel.styles;
        if let Some(path) = styles.keys().find(|path| earlier.contains_key(*path)) {
            return Err(Error::Module {
                path: path.clone(),
                message: "has a style from an earlier plan already; name it in one".to_owned(),
            });
        }
        let applying = PlanApplication {
            tree: self,
            dim,
            group: mesh.world().clone(),
            styles,
            sequence: self.parallel.sequence.clone(),
        };
        let shardings = applying.check()?;
        let edges = applying.edges(&shardings)?;
        if applying.group.size() > 1 {
            applying.cut_layers(&shardings)?;
        }
        let (styles, ranks) = (applying.styles, applying.group.size());
        let applied = &mut self.parallel;
        applied.styles.extend(styles);
        applied.edges.extend(edges);
        applied.ranks = ranks;
        Ok(())
    }

    /// Whether the layer at `path` supports a style, on any number of ranks.
    pub fn takes_style(&self, path: &str, style: impl Into<ParallelStyle>) -> bool {
        self.modules().get(path).is_some_and(|info| {
            let styles = Styles::from([(path.to_owned(), style.into())]);
            info.parallel.shard(&LayerStyles::new(path, &styles, 1)).is_ok()
        })
    }
}

/// The mesh's single dimension, along which layers are cut.
fn dimension(mesh: &DeviceMesh) -> Result<&str> {
    const OTHERS: [&str; 6] = [
        DATA_PARALLEL_REPLICATE,
        DATA_PARALLEL_SHARD,
        CONTEXT_PARALLEL,
        DATA_PARALLEL,
        DP_CP,
        DP_SHARD_CP,
    ];
    let wrong = |got: String| {
        Err(Error::Mesh(format!(
            "parallelize_module cuts layers along one mesh dimension, got {got}; take it with \
             `mesh.get({TENSOR_PARALLEL:?})`"
        )))
    };
    match mesh.layout().names() {
        [dim] if OTHERS.contains(&dim.as_str()) => {
            wrong(format!("`{dim}`, whose ranks compute with different data"))
        }
        [dim] => Ok(dim),
        dims => wrong(format!("a mesh of {}", dims.join(", "))),
    }
}

impl<'a> PlanApplication<'a> {
    /// The layouts at the edges of each module of the plan.
    fn edges(&self, shardings: &Shardings) -> Result<BTreeMap<String, LayerEdges>> {
        let is_trained = |path: &str| self.parameters_of(path).any(Parameter::requires_grad);
        let foreign = self.styles.keys();
        let foreign =
            foreign.filter(|path| !self.tree.modules().contains_key(*path) && is_trained(path));
        let foreign = foreign.map(|path| (path, LayerSharding::on_parts()));
        let shardings = shardings.iter().map(|(path, sharding)| (path, sharding.clone()));
        let edges = |(path, sharding): (&String, LayerSharding)| {
            let edges = LayerEdges::new(path, self.styles.get(path), &sharding)?;
            Ok((path.clone(), edges))
        };
        let returns_input = |path: &String, edges: &LayerEdges| {
            let info = self.tree.modules().get(path);
            edges.takes == edges.gives && info.is_some_and(|info| info.parallel.returns_input())
        };
        let all = foreign.chain(shardings).map(edges).collect::<Result<BTreeMap<_, _>>>()?;
        Ok(all.into_iter().filter(|(path, edges)| !returns_input(path, edges)).collect())
    }

    /// The module's own parameters. For a parameter outside of modules, `path` is its name.
    pub(super) fn parameters_of(&self, path: &str) -> impl Iterator<Item = &'a Parameter> {
        self.tree.parameters().iter().filter(move |p| {
            // Adapter parameters belong to the layer: `q_proj.lora_A.weight`.
            let name = if p.is_adapter() { p.fqn().rfind(".lora_") } else { p.fqn().rfind('.') };
            name.map_or(p.fqn(), |name| &p.fqn()[..name]) == path
        })
    }

    /// The parameter `name` of a module, by any of its names.
    pub(super) fn parameter(&self, path: &str, name: &str) -> Option<&'a Parameter> {
        self.tree.parameter(&format!("{path}.{name}"))
    }
}
