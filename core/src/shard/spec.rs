//! The cuts that mesh dimensions make in a parameter.

use serde::{Deserialize, Serialize};

use super::{Placement, Region};

/// Offset and size of chunk `index` when `n` entries are cut into `parts`, as `torch.chunk`: every
/// chunk has `ceil(n / parts)` entries but the last ones, which may be short or empty.
///
/// ```
/// use fulgurite_core::shard::chunk;
/// assert_eq!((0..4).map(|i| chunk(5, 4, i)).collect::<Vec<_>>(), [(0, 2), (2, 2), (4, 1), (5, 0)]);
/// ```
pub fn chunk(n: usize, parts: usize, index: usize) -> (usize, usize) {
    let size = n.div_ceil(parts);
    let start = (size * index).min(n);
    (start, size.min(n - start))
}

/// One cut: a mesh dimension and what it does to the part of the tensor that earlier cuts left.
///
/// A mesh dimension may make two cuts, one across groups of neighbouring ranks and one within them:
/// with two key and value heads on four tensor-parallel ranks, `Shard(0)` of size 2 and stride 2
/// gives a head to each pair, and `Replicate` of size 2 says that the pair holds the same.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cut {
    /// The mesh dimension's name.
    pub mesh_dim: String,
    /// Number of parts, or of replicas.
    pub size: usize,
    /// What each of them holds.
    pub placement: Placement,
    /// How many neighbouring ranks along the dimension are in one part of this cut: the rank at
    /// coordinate `c` is in part `c / stride % size`.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub stride: usize,
}

fn one() -> usize {
    1
}

fn is_one(n: &usize) -> bool {
    *n == 1
}

impl Cut {
    /// A cut along `mesh_dim`, which has `size` ranks.
    pub fn new(mesh_dim: impl Into<String>, size: usize, placement: Placement) -> Self {
        Self { mesh_dim: mesh_dim.into(), size, placement, stride: 1 }
    }

    /// The same cut across groups of `stride` neighbouring ranks.
    #[must_use]
    pub fn with_stride(mut self, stride: usize) -> Self {
        self.stride = stride;
        self
    }

    /// Which part the rank at `coordinate` along the mesh dimension is in.
    pub fn index(&self, coordinate: usize) -> usize {
        coordinate / self.stride % self.size
    }
}

/// A parameter's global shape and the cuts in it, outermost first: under FSDP over tensor
/// parallelism the tensor-parallel cut comes first, and FSDP cuts what is left.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardSpec {
    /// The parameter's shape before any cut.
    pub shape: Vec<usize>,
    /// The cuts, in the order they are made.
    pub cuts: Vec<Cut>,
}

impl ShardSpec {
    /// A parameter without cuts: one rank holds it whole.
    pub fn new(shape: Vec<usize>) -> Self {
        Self { shape, cuts: Vec::new() }
    }

    /// The same with one more cut, made after the others.
    #[must_use]
    pub fn with_cut(mut self, cut: Cut) -> Self {
        self.cuts.push(cut);
        self
    }

    /// The region of the rank whose coordinate along each mesh dimension `coordinate` tells.
    pub fn region(&self, coordinate: impl Fn(&str) -> usize) -> Region {
        self.cuts.iter().fold(Region::full(&self.shape), |region, cut| match cut.placement {
            Placement::Shard(dim) => {
                region.chunked(dim, cut.size, cut.index(coordinate(&cut.mesh_dim)))
            }
            Placement::Replicate | Placement::Partial => region,
        })
    }

    /// The part of [`region`](Self::region) that counts as this rank's own: where cuts replicate,
    /// the replicas share the region between them, by chunks of its first dimension, so that over
    /// all ranks every element is owned exactly once. Gradient norms and checkpoints go by it.
    pub fn owned_region(&self, coordinate: impl Fn(&str) -> usize) -> Region {
        let (mut index, mut parts) = (0, 1);
        for cut in self.cuts.iter().filter(|cut| !matches!(cut.placement, Placement::Shard(_))) {
            index = index * cut.size + cut.index(coordinate(&cut.mesh_dim));
            parts *= cut.size;
        }
        let region = self.region(coordinate);
        if parts == 1 {
            region
        } else if region.sizes.is_empty() {
            // A scalar cannot be chunked: the first replica owns it. As no region is empty without
            // dimensions, the others' is one of no elements in one dimension.
            if index == 0 { region } else { Region { offsets: vec![0], sizes: vec![0] } }
        } else {
            region.chunked(0, parts, index)
        }
    }

    /// On how many ranks each element is held.
    pub fn replication(&self) -> usize {
        self.cuts
            .iter()
            .filter(|cut| !matches!(cut.placement, Placement::Shard(_)))
            .map(|cut| cut.size)
            .product()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A spec over up to three mesh dimensions, and their sizes.
    fn specs() -> impl Strategy<Value = (ShardSpec, Vec<usize>)> {
        (
            prop::collection::vec(1usize..8, 1..4),
            prop::collection::vec((1usize..5, 0usize..5), 0..4),
        )
            .prop_map(|(shape, cuts)| {
                let mut spec = ShardSpec::new(shape.clone());
                let mut sizes = Vec::new();
                for (i, (size, placement)) in cuts.into_iter().enumerate() {
                    let placement = if placement < shape.len() {
                        Placement::Shard(placement)
                    } else {
                        Placement::Replicate
                    };
                    spec = spec.with_cut(Cut::new(format!("m{i}"), size, placement));
                    sizes.push(size);
                }
                (spec, sizes)
            })
    }

    fn coordinates(sizes: &[usize]) -> Vec<Vec<usize>> {
        sizes.iter().fold(vec![vec![]], |all, &n| {
            all.into_iter()
                .flat_map(|c| (0..n).map(move |i| c.iter().copied().chain([i]).collect()))
                .collect()
        })
    }

    fn count(shape: &[usize], regions: impl Iterator<Item = Region>) -> Vec<usize> {
        let mut counts = vec![0; shape.iter().product()];
        for region in regions {
            if region.sizes.len() == shape.len() {
                for run in region.runs(shape) {
                    counts[run.outer..run.outer + run.len].iter_mut().for_each(|c| *c += 1);
                }
            }
        }
        counts
    }

    proptest! {
        #[test]
        fn regions_cover_every_element_once_a_replica((spec, sizes) in specs()) {
            let all = coordinates(&sizes);
            let at = |c: &[usize], dim: &str| c[dim[1..].parse::<usize>().unwrap()];
            let held = count(&spec.shape, all.iter().map(|c| spec.region(|d| at(c, d))));
            prop_assert!(held.iter().all(|&n| n == spec.replication()));
            let owned = count(&spec.shape, all.iter().map(|c| spec.owned_region(|d| at(c, d))));
            prop_assert!(owned.iter().all(|&n| n == 1));
        }

        #[test]
        fn runs_enumerate_a_region_in_row_major_order(
            dims in prop::collection::vec((1usize..6, 0usize..6, 0usize..6), 0..4)
        ) {
            let shape: Vec<usize> = dims.iter().map(|d| d.0).collect();
            let region = Region {
                offsets: dims.iter().map(|d| d.1.min(d.0)).collect(),
                sizes: dims.iter().map(|d| d.2.min(d.0 - d.1.min(d.0))).collect(),
            };
            let total: usize = shape.iter().product();
            let naive: Vec<usize> = (0..total)
                .filter(|&flat| {
                    let mut rest = flat;
                    (0..shape.len()).rev().all(|d| {
                        let i = rest % shape[d];
                        rest /= shape[d];
                        (region.offsets[d]..region.offsets[d] + region.sizes[d]).contains(&i)
                    })
                })
                .collect();
            let runs = region.runs(&shape);
            let listed: Vec<usize> = runs.iter().flat_map(|r| r.outer..r.outer + r.len).collect();
            prop_assert_eq!(listed, naive);
            let mut inner = 0;
            for run in runs {
                prop_assert_eq!(run.inner, inner);
                inner += run.len;
            }
        }

        #[test]
        fn intersection_is_what_both_contain(
            a in (0usize..6, 0usize..6, 0usize..6, 0usize..6),
            b in (0usize..6, 0usize..6, 0usize..6, 0usize..6),
        ) {
            let region = |(o0, s0, o1, s1)| Region { offsets: vec![o0, o1], sizes: vec![s0, s1] };
            let (a, b) = (region(a), region(b));
            let inside = |r: &Region, i: usize, j: usize| {
                (r.offsets[0]..r.offsets[0] + r.sizes[0]).contains(&i)
                    && (r.offsets[1]..r.offsets[1] + r.sizes[1]).contains(&j)
            };
            let shared = a.intersect(&b);
            for i in 0..12 {
                for j in 0..12 {
                    let expected = inside(&a, i, j) && inside(&b, i, j);
                    prop_assert_eq!(shared.as_ref().is_some_and(|s| inside(s, i, j)), expected);
                }
            }
        }
    }
}
