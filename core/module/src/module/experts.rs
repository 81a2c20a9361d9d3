//! Experts: parallel parts of a layer, which ranks can divide among each other.

use std::sync::{Arc, Mutex, OnceLock};

use super::ModuleTree;
use crate::parameter::{LayerCut, Parameter};
use crate::{Error, Result};
use fulgurite_collective::collective::ProcessGroup;
use fulgurite_collective::mesh::DeviceMesh;
use fulgurite_collective::shard::{Cut, Placement};

/// The path of one expert's layer, where `stack` is the path of the layer of all experts:
/// `mlp.experts.2.up_proj` for `mlp.experts.up_proj` and 2.
pub fn expert_path(stack: &str, expert: usize) -> String {
    match stack.rsplit_once('.') {
        Some((path, name)) => format!("{path}.{expert}.{name}"),
        None => format!("{expert}.{stack}"),
    }
}

/// The reverse of [`expert_path`], for paths that contain `experts` and a number before their last
/// segment. `None` for others.
pub fn expert_stack(path: &str) -> Option<(String, usize)> {
    let (path, name) = path.rsplit_once('.')?;
    let (path, number) = path.rsplit_once('.')?;
    let is_experts = path.rsplit('.').next() == Some("experts");
    let expert: usize = number.parse().ok().filter(|_| is_experts)?;
    (expert.to_string() == number).then(|| (format!("{path}.{name}"), expert))
}

/// The experts of a layer ([`ModuleBuilder::experts`](super::ModuleBuilder::experts)). Clones share
/// the record.
///
/// Without expert parallelism, every rank has all of them. With it, each of several
/// [ranks](Self::ranks) has a part: the parameters' [compute tensors] then have this rank's experts
/// alone, and the layer computes them for the rows of all these ranks.
///
/// [compute tensors]: crate::parameter::Parameter::compute_shape
#[derive(Clone)]
pub struct Experts(Arc<Inner>);

struct Inner {
    path: String,
    count: usize,
    per_row: usize,
    parameters: Mutex<Vec<Parameter>>,
    ranks: OnceLock<Arc<dyn ProcessGroup>>,
}

impl Experts {
    pub(super) fn new(path: String, count: usize, per_row: usize) -> Self {
        let (parameters, ranks) = (Mutex::default(), OnceLock::new());
        Self(Arc::new(Inner { path, count, per_row, parameters, ranks }))
    }

    /// The layer's path.
    pub fn path(&self) -> &str {
        &self.0.path
    }

    /// The number of experts, on all ranks together.
    pub fn count(&self) -> usize {
        self.0.count
    }

    /// The number of experts that compute a row.
    pub fn per_row(&self) -> usize {
        self.0.per_row
    }

    /// Adds a parameter whose first dimension is the experts.
    ///
    /// # Errors
    /// If its first dimension has another size.
    pub fn add(&self, parameter: &Parameter) -> Result<()> {
        if parameter.global_shape().first() != Some(&self.count()) {
            return Err(Error::parameter(
                parameter.fqn(),
                format!(
                    "has shape {:?}, and its first dimension should be the {} experts of `{}`",
                    parameter.global_shape(),
                    self.count(),
                    self.path()
                ),
            ));
        }
        self.0.parameters.lock().expect("no panic while adding").push(parameter.clone());
        Ok(())
    }

    /// The parameters whose first dimension is the experts.
    pub fn parameters(&self) -> Vec<Parameter> {
        self.0.parameters.lock().expect("no panic while adding").clone()
    }

    /// The ranks that each have a part of the experts, in the order of the experts. `None`: this
    /// rank has all.
    pub fn ranks(&self) -> Option<&Arc<dyn ProcessGroup>> {
        self.0.ranks.get()
    }
}

impl std::fmt::Debug for Experts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Experts").field("path", &self.0.path).finish_non_exhaustive()
    }
}

impl ModuleTree {
    /// The layers with [experts](Experts), in the order of their declaration.
    pub fn experts(&self) -> &[Experts] {
        &self.experts
    }

    /// Divides the experts of every layer evenly among `ranks`, which are neighbours along the
    /// dimension `mesh_dim` of the mesh. Each parameter gets a cut of its first dimension along
    /// `mesh_dim`, whose parts repeat every `ranks.size()` ranks. For strategies, after a plan is
    /// applied and before values exist. Not collective.
    ///
    /// # Errors
    /// If the ranks do not divide the number of a layer's experts, or if a strategy has set the
    /// model up.
    pub fn distribute_experts(
        &mut self,
        mesh: &DeviceMesh,
        mesh_dim: &str,
        ranks: &Arc<dyn ProcessGroup>,
    ) -> Result<()> {
        for experts in &self.experts {
            let (count, size) = (experts.count(), ranks.size());
            if !count.is_multiple_of(size) {
                let divisors = (1..=count).filter(|n| count.is_multiple_of(*n));
                let divisors: Vec<String> = divisors.map(|n| n.to_string()).collect();
                return Err(Error::module(
                    experts.path(),
                    format!(
                        "has {count} experts, which {size} ranks cannot divide among each other; their number \
                         can be {}",
                        divisors.join(", ")
                    ),
                ));
            }
            for parameter in experts.parameters() {
                let cut = Cut::new(mesh_dim, size, Placement::Shard(0));
                let spec = parameter.spec().with_cut(cut);
                let region = spec.region(|dim| mesh.coordinate(dim));
                let partial_grad = parameter.has_partial_grad();
                parameter.cut_layer(spec, LayerCut { region, partial_grad })?;
            }
            if experts.0.ranks.set(ranks.clone()).is_err() {
                return Err(Error::module(experts.path(), "has divided its experts already"));
            }
        }
        Ok(())
    }
}
