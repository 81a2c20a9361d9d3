//! A mesh whose dimensions have process groups.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{
    CONTEXT_PARALLEL, DATA_PARALLEL, DATA_PARALLEL_REPLICATE, DATA_PARALLEL_SHARD, DP_CP,
    DP_SHARD_CP, MeshLayout, PIPELINE_PARALLEL, PP_DP_CP, STAGE, TENSOR_PARALLEL,
};
use crate::collective::{ProcessGroup, Solo};
use crate::{Error, Result};

/// The ranks of a job in a grid, with a process group along each dimension.
///
/// Dimensions, slowest first: `pipeline_parallel` (only if there are several stages),
/// `data_parallel_replicate`, `data_parallel_shard`, `context_parallel`, `tensor_parallel`. The
/// flattened views `data_parallel` (replicate × shard), `dp_cp`
/// (replicate × shard × context) and `dp_shard_cp` (shard × context) always exist, also at size 1.
/// A dimension of size 1 has a group that communicates nothing.
#[derive(Clone)]
pub struct DeviceMesh {
    layout: MeshLayout,
    rank: usize,
    world: Arc<dyn ProcessGroup>,
    groups: BTreeMap<String, Arc<dyn ProcessGroup>>,
    /// The dimensions of flattened views.
    views: BTreeMap<String, Vec<String>>,
}

impl DeviceMesh {
    /// The layout of a training mesh; sizes left open are inferred (see [`MeshLayout::infer`]),
    /// `data_parallel_shard` first.
    ///
    /// # Errors
    /// As [`MeshLayout::infer`].
    pub fn layout_for(
        world_size: usize,
        replicate: Option<usize>,
        shard: Option<usize>,
        context: Option<usize>,
        tensor: Option<usize>,
    ) -> Result<MeshLayout> {
        // The first open size takes the remaining ranks, so the shard dimension comes first.
        let inferred = MeshLayout::infer(
            world_size,
            [
                (DATA_PARALLEL_SHARD, shard),
                (DATA_PARALLEL_REPLICATE, replicate),
                (CONTEXT_PARALLEL, context),
                (TENSOR_PARALLEL, tensor),
            ],
        )?;
        let [shard, replicate, context, tensor] = inferred.sizes() else {
            return Err(Error::Mesh("inference lost a dimension".to_owned()));
        };
        MeshLayout::new([
            (DATA_PARALLEL_REPLICATE, *replicate),
            (DATA_PARALLEL_SHARD, *shard),
            (CONTEXT_PARALLEL, *context),
            (TENSOR_PARALLEL, *tensor),
        ])
    }

    /// Makes the groups of `layout`, a layout over all ranks of `world`. Collective over `world`.
    ///
    /// # Errors
    /// If the layout is not one of `world`'s size, or a group cannot be made.
    pub fn new(layout: MeshLayout, world: Arc<dyn ProcessGroup>) -> Result<Self> {
        if layout.world_size() != world.size() {
            return Err(Error::Mesh(format!(
                "a mesh of {:?} has {} ranks; the world size is {}",
                layout.sizes(),
                layout.world_size(),
                world.size()
            )));
        }
        let (groups, views) = (BTreeMap::new(), BTreeMap::new());
        let mut mesh = Self { rank: world.rank(), layout, world, groups, views };
        let names = mesh.layout.names().to_vec();
        for name in &names {
            mesh.add_group(name, &[name])?;
        }
        let has = |dim: &&str| names.iter().any(|name| name == dim);
        let dims = [DATA_PARALLEL_REPLICATE, DATA_PARALLEL_SHARD, CONTEXT_PARALLEL];
        mesh.flatten(DATA_PARALLEL, &dims[..2].iter().copied().filter(has).collect::<Vec<_>>())?;
        mesh.flatten(DP_CP, &dims.iter().copied().filter(has).collect::<Vec<_>>())?;
        mesh.flatten(DP_SHARD_CP, &dims[1..].iter().copied().filter(has).collect::<Vec<_>>())?;
        if has(&PIPELINE_PARALLEL) {
            let of_stage = [&dims[..], &[TENSOR_PARALLEL]].concat();
            mesh.flatten(STAGE, &of_stage.into_iter().filter(has).collect::<Vec<_>>())?;
            let summed = [&[PIPELINE_PARALLEL], &dims[..]].concat();
            mesh.flatten(PP_DP_CP, &summed.into_iter().filter(has).collect::<Vec<_>>())?;
        }
        Ok(mesh)
    }

    /// Adds the flattened view `name` of several dimensions, in mesh order, which can then be used
    /// like a dimension. Collective over the mesh.
    ///
    /// # Errors
    /// If a dimension does not exist, or the name is taken.
    pub fn flatten(&mut self, name: &str, dims: &[&str]) -> Result<()> {
        if self.groups.contains_key(name) {
            return Err(Error::Mesh(format!("there is a dimension or view `{name}` already")));
        }
        dims.iter().try_for_each(|dim| self.layout.dim(dim).map(drop))?;
        let flattened = dims.iter().map(|dim| (*dim).to_owned()).collect();
        self.views.insert(name.to_owned(), flattened);
        // A view with one dimension above size 1 shares that dimension's group, unless it is the
        // context dimension.
        let wide: Vec<&str> = dims.iter().copied().filter(|dim| self.size_of(dim) > 1).collect();
        match wide.as_slice() {
            // Attention communicates along the context dimension while units are reduced.
            [dim] if *dim != CONTEXT_PARALLEL => {
                let group = self.groups[*dim].clone();
                self.groups.insert(name.to_owned(), group);
                Ok(())
            }
            _ => self.add_group(name, &wide),
        }
    }

    /// The sub-mesh along one dimension or flattened view that this rank is in. Not collective.
    ///
    /// # Errors
    /// As [`group`](Self::group).
    pub fn get(&self, name: &str) -> Result<Self> {
        let group = self.group(name)?.clone();
        let layout = MeshLayout::new([(name, group.size())])?;
        let groups = BTreeMap::from([(name.to_owned(), group.clone())]);
        Ok(Self { layout, rank: group.rank(), world: group, groups, views: BTreeMap::new() })
    }

    /// The sub-mesh of several dimensions, given in mesh order. Collective over the mesh.
    ///
    /// # Errors
    /// If a dimension does not exist, or they are not in mesh order.
    pub fn submesh(&self, dims: &[&str]) -> Result<Self> {
        let places = dims.iter().map(|dim| self.layout.dim(dim)).collect::<Result<Vec<_>>>()?;
        if !places.is_sorted_by(|a, b| a < b) {
            return Err(Error::Mesh(format!(
                "the dimensions {} are not in the mesh's order ({})",
                dims.join(", "),
                self.layout.names().join(", ")
            )));
        }
        let layout = MeshLayout::new(dims.iter().map(|&dim| (dim, self.size_of(dim))))?;
        let name = dims.join("+");
        let mut whole = self.clone();
        whole.groups.remove(&name);
        whole.flatten(&name, dims)?;
        let world = whole.group(&name)?.clone();
        let own = |dim: &&str| Ok(((*dim).to_owned(), self.group(dim)?.clone()));
        let groups = dims.iter().map(own).collect::<Result<_>>()?;
        Ok(Self { layout, rank: world.rank(), world, groups, views: BTreeMap::new() })
    }

    fn add_group(&mut self, name: &str, dims: &[&str]) -> Result<()> {
        let size: usize = dims.iter().map(|dim| self.size_of(dim)).product();
        let group: Arc<dyn ProcessGroup> = if size == 1 {
            Arc::new(Solo::new(name, self.world.global_ranks()[self.rank]))
        } else {
            self.world.split(&self.layout.partition(dims)?, name)?
        };
        self.groups.insert(name.to_owned(), group);
        Ok(())
    }

    fn size_of(&self, dim: &str) -> usize {
        self.layout.dim(dim).map_or(1, |d| self.layout.sizes()[d])
    }

    /// The dimensions' names and sizes.
    pub fn layout(&self) -> &MeshLayout {
        &self.layout
    }

    /// This process's rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The group of all ranks.
    pub fn world(&self) -> &Arc<dyn ProcessGroup> {
        &self.world
    }

    /// The process group along a dimension or flattened view.
    ///
    /// # Errors
    /// If the name is unknown. The message lists the known names.
    pub fn group(&self, name: &str) -> Result<&Arc<dyn ProcessGroup>> {
        self.groups.get(name).ok_or_else(|| {
            let names: Vec<_> = self.groups.keys().map(String::as_str).collect();
            Error::Mesh(format!("no dimension `{name}`; there are {}", names.join(", ")))
        })
    }

    /// The ranks with the stages of one pipeline, in order; `None` without a pipeline.
    pub fn pipeline(&self) -> Option<&Arc<dyn ProcessGroup>> {
        self.groups.get(PIPELINE_PARALLEL)
    }

    /// The ranks whose losses are summed: all ranks with different data, in all stages of a
    /// pipeline.
    ///
    /// # Errors
    /// If this is a sub-mesh.
    pub fn loss_ranks(&self) -> Result<&Arc<dyn ProcessGroup>> {
        self.group(if self.pipeline().is_some() { PP_DP_CP } else { DP_CP })
    }

    /// The ranks with the same stage as this one: all, without a pipeline.
    pub fn stage_ranks(&self) -> &Arc<dyn ProcessGroup> {
        self.groups.get(STAGE).unwrap_or(&self.world)
    }

    /// Number of ranks along a dimension or flattened view.
    ///
    /// # Errors
    /// As [`group`](Self::group).
    pub fn size(&self, name: &str) -> Result<usize> {
        Ok(self.group(name)?.size())
    }

    /// This rank's index along a dimension or flattened view (PyTorch's `get_local_rank`).
    ///
    /// # Errors
    /// As [`group`](Self::group).
    pub fn local_rank(&self, name: &str) -> Result<usize> {
        Ok(self.group(name)?.rank())
    }

    /// This rank's index along a dimension; 0 for names that the mesh does not have. For
    /// [`ShardSpec::region`](crate::shard::ShardSpec::region).
    pub fn coordinate(&self, name: &str) -> usize {
        self.groups.get(name).map_or(0, |group| group.rank())
    }

    /// The index of another rank of the mesh along a dimension or flattened view; 0 for names that
    /// the mesh does not have. Not collective.
    ///
    /// # Errors
    /// If the rank is not in the mesh.
    pub fn coordinate_of(&self, rank: usize, name: &str) -> Result<usize> {
        let coordinate = self.layout.coordinate(rank)?;
        let along = |dim: &str| match self.layout.dim(dim) {
            Ok(index) => (coordinate[index], self.layout.sizes()[index]),
            Err(_) => (0, 1),
        };
        let dims = self.views.get(name).map_or(&[][..], Vec::as_slice);
        Ok(match dims {
            [] => along(name).0,
            dims => dims.iter().fold(0, |index, dim| {
                let (coordinate, size) = along(dim);
                index * size + coordinate
            }),
        })
    }

    /// The names of the dimensions and of the flattened views.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.groups.keys().map(String::as_str)
    }
}

impl std::fmt::Debug for DeviceMesh {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceMesh")
            .field("layout", &self.layout)
            .field("rank", &self.rank)
            .finish_non_exhaustive()
    }
}
