//! The cuts that mesh dimensions make in a parameter.

use serde::{Deserialize, Serialize};

use super::{Placement, Region};

/// Offset and size of chunk `index` when `n` entries are cut into `parts`, as by `torch.chunk`.
/// Every chunk has `ceil(n / parts)` entries, except the last ones, which may be shorter or empty.
///
/// ```
/// use fulgurite_core::shard::chunk;
/// let chunks: Vec<_> = (0..4).map(|i| chunk(5, 4, i)).collect();
/// assert_eq!(chunks, [(0, 2), (2, 2), (4, 1), (5, 0)]);
/// ```
pub fn chunk(n: usize, parts: usize, index: usize) -> (usize, usize) {
    let size = n.div_ceil(parts);
    let start = (size * index).min(n);
    (start, size.min(n - start))
}

/// A division, by one mesh dimension, of the region left by earlier cuts.
///
/// A mesh dimension may make two cuts, one across groups of neighbouring ranks and one within them.
/// Example: two key and value heads on four tensor-parallel ranks. `Shard(0)` of size 2 and stride
/// 2 gives a head to each pair, and `Replicate` of size 2 makes both ranks of a pair hold the same
/// head.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cut {
    /// The mesh dimension's name.
    pub mesh_dim: String,
    /// Number of parts, or of replicas.
    pub size: usize,
    /// Shard or replicate.
    pub placement: Placement,
    /// Number of neighbouring ranks along the dimension that share a part. The rank at coordinate
    /// `c` is in part `c / stride % size`.
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

    /// Sets the number of neighbouring ranks that share a part.
    #[must_use]
    pub fn with_stride(mut self, stride: usize) -> Self {
        self.stride = stride;
        self
    }

    /// The part that the rank at `coordinate` along the mesh dimension is in.
    pub(crate) fn index(&self, coordinate: usize) -> usize {
        coordinate / self.stride % self.size
    }
}

/// A parameter's global shape and its cuts, outermost first. Under FSDP over tensor parallelism the
/// tensor-parallel cut comes first, and FSDP cuts the remaining region.
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

    /// Adds a cut after the others.
    #[must_use]
    pub fn with_cut(mut self, cut: Cut) -> Self {
        self.cuts.push(cut);
        self
    }

    /// A rank's region; `coordinate` returns its coordinate along a mesh dimension.
    pub fn region(&self, coordinate: impl Fn(&str) -> usize) -> Region {
        self.cuts.iter().fold(Region::full(&self.shape), |region, cut| match cut.placement {
            Placement::Shard(dim) => {
                region.chunked(dim, cut.size, cut.index(coordinate(&cut.mesh_dim)))
            }
            Placement::Replicate => region,
            Placement::Stages(first, last) => {
                let at = coordinate(&cut.mesh_dim);
                if at == first || at == last { region } else { nothing(region) }
            }
        })
    }

    /// The part of [`region`](Self::region) that a rank owns. Replicas divide their region into
    /// chunks of its first dimension, so that all ranks together own every element exactly once.
    /// Gradient norms and checkpoints use it.
    pub fn owned_region(&self, coordinate: impl Fn(&str) -> usize) -> Region {
        let (mut index, mut parts, mut owns) = (0, 1, true);
        for cut in &self.cuts {
            match cut.placement {
                Placement::Shard(_) => {}
                Placement::Replicate => {
                    index = index * cut.size + cut.index(coordinate(&cut.mesh_dim));
                    parts *= cut.size;
                }
                Placement::Stages(first, _) => owns &= coordinate(&cut.mesh_dim) == first,
            }
        }
        let region = self.region(coordinate);
        if !owns {
            nothing(region)
        } else if parts == 1 {
            region
        } else if region.sizes.is_empty() {
            // A scalar cannot be chunked, so the first replica owns it.
            if index == 0 { region } else { nothing(region) }
        } else {
            region.chunked(0, parts, index)
        }
    }
}

/// An empty region of the same dimensions; of one dimension for a scalar, because a region without
/// dimensions has one element.
fn nothing(mut region: Region) -> Region {
    match region.sizes.first_mut() {
        Some(size) => *size = 0,
        None => region = Region { offsets: vec![0], sizes: vec![0] },
    }
    region
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A tensor of up to four dimensions, rarely an empty one.
    fn shapes() -> impl Strategy<Value = Vec<usize>> {
        prop::collection::vec(prop_oneof![20 => 1usize..7, 1 => Just(0)], 0..5)
    }

    /// One or two cuts per mesh dimension, slowest first: sizes and placements. With two cuts, one
    /// is across groups of ranks and one within them.
    fn mesh_dims() -> impl Strategy<Value = Vec<Vec<(usize, usize)>>> {
        let placement = 0usize..5;
        let one = (1usize..5, placement.clone()).prop_map(|cut| vec![cut]);
        let two = prop::collection::vec((1usize..3, placement), 2);
        prop::collection::vec(prop_oneof![2 => one, 1 => two], 0..5)
    }

    /// A spec over up to four mesh dimensions, its cuts in any order, and the dimensions' sizes.
    fn specs() -> impl Strategy<Value = (ShardSpec, Vec<usize>)> {
        (shapes(), mesh_dims()).prop_flat_map(|(shape, mesh)| {
            let place = |n| {
                if n < shape.len() { Placement::Shard(n) } else { Placement::Replicate }
            };
            let mut cuts = Vec::new();
            for (i, dim) in mesh.iter().enumerate() {
                let mut stride = 1;
                for &(size, n) in dim.iter().rev() {
                    cuts.push(Cut::new(format!("m{i}"), size, place(n)).with_stride(stride));
                    stride *= size;
                }
            }
            let sizes = mesh.iter().map(|dim| dim.iter().map(|cut| cut.0).product()).collect();
            let spec = move |cuts| ShardSpec { shape: shape.clone(), cuts };
            (Just(cuts).prop_shuffle().prop_map(spec), Just(sizes))
        })
    }

    fn coordinates(sizes: &[usize]) -> Vec<Vec<usize>> {
        sizes.iter().fold(vec![vec![]], |all, &n| {
            all.into_iter()
                .flat_map(|c| (0..n).map(move |i| c.iter().copied().chain([i]).collect()))
                .collect()
        })
    }

    /// The coordinate along mesh dimension `m<i>`.
    fn at(coordinates: &[usize], dim: &str) -> usize {
        coordinates[dim[1..].parse::<usize>().unwrap()]
    }

    /// Row-major indices of the region's elements in the whole, by its runs.
    fn indices(region: &Region, shape: &[usize]) -> Vec<usize> {
        if region.sizes.len() != shape.len() {
            return Vec::new(); // a scalar's later replicas own nothing
        }
        region.runs(shape).iter().flat_map(|run| run.outer..run.outer + run.len).collect()
    }

    /// Row-major indices of a rank's elements by a naive model: index lists per tensor dimension,
    /// cut into chunks.
    fn naive(spec: &ShardSpec, coordinates: &[usize]) -> Vec<usize> {
        let mut kept: Vec<Vec<usize>> = spec.shape.iter().map(|&n| (0..n).collect()).collect();
        for cut in &spec.cuts {
            let Placement::Shard(dim) = cut.placement else { continue };
            let part = at(coordinates, &cut.mesh_dim) / cut.stride % cut.size;
            let list = &kept[dim];
            let length = list.len().div_ceil(cut.size).max(1);
            kept[dim] = list.chunks(length).nth(part).unwrap_or_default().to_vec();
        }
        kept.iter().zip(&spec.shape).fold(vec![0], |flat, (kept, n)| {
            flat.iter().flat_map(|f| kept.iter().map(move |i| f * n + i)).collect()
        })
    }

    /// Number of ranks that hold each element.
    fn replicas(spec: &ShardSpec) -> usize {
        let replicating = spec.cuts.iter().filter(|cut| cut.placement == Placement::Replicate);
        replicating.map(|cut| cut.size).product()
    }

    /// How often each element is in the lists.
    fn count<'a>(shape: &[usize], lists: impl IntoIterator<Item = &'a Vec<usize>>) -> Vec<usize> {
        let mut counts = vec![0; shape.iter().product()];
        lists.into_iter().flatten().for_each(|&i| counts[i] += 1);
        counts
    }

    /// Checks a spec on all ranks of a mesh of these sizes.
    fn check(spec: &ShardSpec, sizes: &[usize]) -> std::result::Result<(), TestCaseError> {
        let (mut held, mut owned) = (Vec::new(), Vec::new());
        let mut whole = vec![None; spec.shape.iter().product()];
        for rank in coordinates(sizes) {
            let region = spec.region(|dim| at(&rank, dim));
            let part = naive(spec, &rank);
            prop_assert_eq!(&indices(&region, &spec.shape), &part);
            // Writes the rank's values at its runs.
            let values: Vec<usize> = part.iter().map(|i| i * i).collect();
            prop_assert_eq!(values.len(), region.elem_count());
            for run in region.runs(&spec.shape) {
                let values = values[run.inner..run.inner + run.len].iter().copied().map(Some);
                whole.splice(run.outer..run.outer + run.len, values);
            }
            let own = indices(&spec.owned_region(|dim| at(&rank, dim)), &spec.shape);
            prop_assert!(own.iter().all(|i| part.contains(i)), "owns what it does not hold");
            held.push(part);
            owned.push(own);
        }
        let original: Vec<_> = (0..whole.len()).map(|i| Some(i * i)).collect();
        prop_assert_eq!(whole, original);
        prop_assert!(count(&spec.shape, &held).iter().all(|&n| n == replicas(spec)));
        prop_assert!(count(&spec.shape, &owned).iter().all(|&n| n == 1));
        Ok(())
    }

    #[test]
    fn strided_cut_spans_rank_groups() {
        let spec = ShardSpec::new(vec![6])
            .with_cut(Cut::new("m0", 2, Placement::Shard(0)).with_stride(3))
            .with_cut(Cut::new("m0", 3, Placement::Replicate));
        let offsets: Vec<_> = (0..6).map(|rank| spec.region(|_| rank).offsets[0]).collect();
        assert_eq!(offsets, [0, 0, 0, 3, 3, 3]);
        let owned: Vec<_> = (0..6).map(|rank| spec.owned_region(|_| rank).offsets[0]).collect();
        assert_eq!(owned, [0, 1, 2, 3, 4, 5]);
        assert_eq!(replicas(&spec), 3);
    }

    proptest! {
        // checklist: torchtune: DTensor, distribute_tensor
        #[test]
        fn rank_parts_form_the_whole((spec, sizes) in specs()) {
            check(&spec, &sizes)?;
        }

        /// FSDP over tensor parallelism and the reverse, with up to three cuts of one dimension.
        #[test]
        fn dimension_is_cut_repeatedly_in_any_order(
            (n, other) in (0usize..40, 1usize..3),
            first in any::<bool>(),
            (sizes, stride) in (prop::collection::vec(1usize..5, 2..4), 1usize..3),
        ) {
            let (shape, dim) = if first { (vec![n, other], 0) } else { (vec![other, n], 1) };
            // Each part of the first mesh dimension is on `stride` ranks.
            let mut cuts = vec![
                Cut::new("m0", sizes[0], Placement::Shard(dim)).with_stride(stride),
                Cut::new("m0", stride, Placement::Replicate),
            ];
            let later = sizes.iter().enumerate().skip(1);
            cuts.extend(later.map(|(i, &n)| Cut::new(format!("m{i}"), n, Placement::Shard(dim))));
            let mut ranks = sizes.clone();
            ranks[0] *= stride;
            check(&ShardSpec { shape: shape.clone(), cuts: cuts.clone() }, &ranks)?;
            cuts.reverse();
            check(&ShardSpec { shape, cuts }, &ranks)?;
        }

        #[test]
        fn stages_share_what_others_cut(
            (spec, sizes) in specs(),
            (stages, first, last) in (1usize..4, 0usize..3, 0usize..3),
        ) {
            let (first, last) = (first % stages, last % stages);
            let cut = Cut::new("stage", stages, Placement::Stages(first, last));
            let of_stages = spec.clone().with_cut(cut);
            let mut owned = vec![0; spec.shape.iter().product()];
            for stage in 0..stages {
                for rank in coordinates(&sizes) {
                    let along = |dim: &str| if dim == "stage" { stage } else { at(&rank, dim) };
                    let region = of_stages.region(along);
                    let whole = spec.region(|dim| at(&rank, dim));
                    let holds = stage == first || stage == last;
                    prop_assert_eq!(region.is_empty(), !holds || whole.is_empty());
                    if holds {
                        prop_assert_eq!(region, whole);
                    }
                    let own = indices(&of_stages.owned_region(along), &spec.shape);
                    own.iter().for_each(|i| owned[*i] += 1);
                }
            }
            prop_assert!(owned.iter().all(|times| *times == 1), "{:?}", owned);
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
        fn intersection_is_contained_in_both(
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
