//! Ranks that hold parts of the same sizes.

use std::collections::HashMap;

use crate::Result;
use fulgurite_engine::mesh::DeviceMesh;
use fulgurite_engine::shard::{Cut, Placement, ShardSpec};

/// Ranks that hold parts of the same sizes, and so do the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RankClass {
    /// The first of them.
    pub(super) rank: usize,
    /// Their number.
    pub(super) count: usize,
}

/// Returns the classes of a mesh's ranks, by the first rank of each, and the class of each rank.
///
/// Ranks are told apart by the sizes of their parts of each parameter after each of its cuts. So a
/// mesh whose sizes divide evenly has one class, of any number of ranks.
///
/// # Errors
/// If the mesh lacks a rank.
pub(super) fn rank_classes(
    mesh: &DeviceMesh,
    specs: &[ShardSpec],
) -> Result<(Vec<RankClass>, Vec<usize>)> {
    let mut dims: Vec<&str> = Vec::new();
    for cut in specs.iter().flat_map(|spec| &spec.cuts) {
        if !dims.contains(&cut.mesh_dim.as_str()) {
            dims.push(&cut.mesh_dim);
        }
    }
    // Ranks at one place along the cut dimensions hold the same parts.
    let world_size = mesh.layout().world_size();
    let mut places: HashMap<Vec<usize>, Vec<usize>> = HashMap::new();
    for rank in 0..world_size {
        let at: Result<Vec<usize>> = dims.iter().map(|dim| mesh.coordinate_of(rank, dim)).collect();
        places.entry(at?).or_default().push(rank);
    }
    let mut of_sizes: HashMap<Vec<usize>, Vec<usize>> = HashMap::new();
    for (at, ranks) in places {
        let along = |dim: &str| dims.iter().position(|known| *known == dim).map_or(0, |i| at[i]);
        // What is left after each cut: ranks gather parts that a later cut has made.
        let after = |spec: &ShardSpec| -> Vec<usize> {
            let is_elsewhere = |cut: &Cut| match cut.placement {
                Placement::Stages(a, b) => ![a, b].contains(&along(&cut.mesh_dim)),
                _ => false,
            };
            if spec.cuts.iter().any(is_elsewhere) {
                return vec![ELSEWHERE];
            }
            let cut = |n| ShardSpec { shape: spec.shape.clone(), cuts: spec.cuts[..n].to_vec() };
            (1..=spec.cuts.len()).flat_map(|n| cut(n).region(along).sizes).collect()
        };
        of_sizes.entry(specs.iter().flat_map(after).collect()).or_default().extend(ranks);
    }
    let mut ranks: Vec<Vec<usize>> = of_sizes.into_values().collect();
    ranks.iter_mut().for_each(|ranks| ranks.sort_unstable());
    ranks.sort_unstable();
    let mut class_of = vec![0; world_size];
    for (class, ranks) in ranks.iter().enumerate() {
        ranks.iter().for_each(|rank| class_of[*rank] = class);
    }
    let class = |ranks: &Vec<usize>| RankClass { rank: ranks[0], count: ranks.len() };
    Ok((ranks.iter().map(class).collect(), class_of))
}

/// Stands for the sizes of a parameter of another stage.
const ELSEWHERE: usize = usize::MAX;

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use fulgurite_engine::collective::DryRunGroup;
    use fulgurite_engine::mesh::{
        DATA_PARALLEL_SHARD, MeshLayout, PIPELINE_PARALLEL, TENSOR_PARALLEL,
    };

    fn classes_of(ranks: usize, rows: usize) -> Vec<(usize, usize)> {
        let layout = MeshLayout::new([(DATA_PARALLEL_SHARD, ranks)]).unwrap();
        let world = Arc::new(DryRunGroup::world(0, ranks));
        let mesh = DeviceMesh::new(layout, world).unwrap();
        let cut = Cut::new(DATA_PARALLEL_SHARD, ranks, Placement::Shard(0));
        let (classes, _) =
            rank_classes(&mesh, &[ShardSpec::new(vec![rows, 3]).with_cut(cut)]).unwrap();
        classes.iter().map(|class| (class.rank, class.count)).collect()
    }

    #[test]
    fn short_and_empty_shards_are_classes() {
        assert_eq!(classes_of(4, 8), [(0, 4)]);
        assert_eq!(classes_of(4, 5), [(0, 2), (2, 1), (3, 1)]);
        assert_eq!(classes_of(4, 2), [(0, 2), (2, 2)]);
    }

    #[test]
    fn stages_of_equal_sizes_are_classes() {
        let layout = MeshLayout::new([(PIPELINE_PARALLEL, 2), (TENSOR_PARALLEL, 2)]).unwrap();
        let mesh = DeviceMesh::new(layout, Arc::new(DryRunGroup::world(0, 4))).unwrap();
        let of_stage = |stage| {
            let cut = Cut::new(PIPELINE_PARALLEL, 2, Placement::Stages(stage, stage));
            ShardSpec::new(vec![4, 3]).with_cut(cut)
        };
        let (classes, class_of) = rank_classes(&mesh, &[of_stage(0), of_stage(1)]).unwrap();
        let found: Vec<_> = classes.iter().map(|class| (class.rank, class.count)).collect();
        assert_eq!((found, class_of), (vec![(0, 2), (2, 2)], vec![0, 0, 1, 1]));
    }

    #[test]
    fn parts_of_unequal_parts_are_classes() {
        let layout = MeshLayout::new([(DATA_PARALLEL_SHARD, 2), (TENSOR_PARALLEL, 2)]).unwrap();
        let mesh = DeviceMesh::new(layout, Arc::new(DryRunGroup::world(0, 4))).unwrap();
        let cut = |dim: &str| Cut::new(dim, 2, Placement::Shard(0));
        // Columns of 3 and 2 rows, cut into 2 and 1, and into 1 and 1.
        let spec = ShardSpec::new(vec![5]).with_cut(cut(TENSOR_PARALLEL));
        let specs = [spec.with_cut(cut(DATA_PARALLEL_SHARD))];
        let (classes, class_of) = rank_classes(&mesh, &specs).unwrap();
        let found: Vec<_> = classes.iter().map(|class| (class.rank, class.count)).collect();
        assert_eq!(found, [(0, 1), (1, 2), (2, 1)]);
        assert_eq!(class_of, [0, 1, 2, 1]);
    }
}
