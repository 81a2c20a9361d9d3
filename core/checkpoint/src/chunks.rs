//! Chunks of a stored tensor: finding the ones that overlap a region, and checking that they cover
//! the tensor.

use fulgurite_engine::shard::Region;

/// Size limit of a block in bytes; a longer row is a block of its own.
const BLOCK: usize = 4 << 20;

/// The chunks of a tensor, ordered by their first index along one dimension.
///
/// The dimension is the one with the most different first indices, so that a region is compared
/// only with chunks that may overlap it.
#[derive(Debug)]
pub(super) struct ChunkIndex {
    /// The dimension by which the chunks are ordered.
    dim: usize,
    /// Each chunk's region, and its index in the list given to [`new`](Self::new).
    chunks: Vec<(Region, usize)>,
    /// For each chunk, the largest end along `dim` of this and all earlier chunks.
    reach: Vec<usize>,
}

impl ChunkIndex {
    /// Indexes chunks that [`check_bounds`] accepts.
    pub(super) fn new(regions: impl Iterator<Item = Region>) -> Self {
        let mut chunks: Vec<_> = regions.enumerate().map(|(i, region)| (region, i)).collect();
        let dim = widest(&chunks);
        chunks.sort_by_key(|(region, i)| (start(region, dim), *i));
        let mut furthest = 0;
        let reach = chunks
            .iter()
            .map(|(region, _)| {
                furthest = furthest.max(end(region, dim));
                furthest
            })
            .collect();
        Self { dim, chunks, reach }
    }

    /// Returns the chunks that overlap `region`, each with the intersection, in reverse order.
    pub(super) fn intersections(
        &self,
        region: &Region,
    ) -> impl Iterator<Item = (usize, Region)> + use<> {
        let (from, to) = (start(region, self.dim), end(region, self.dim));
        let first_after = self.chunks.partition_point(|(other, _)| start(other, self.dim) < to);
        (0..first_after)
            .rev()
            .take_while(|&i| self.reach[i] > from)
            .filter_map(|i| {
                let (other, index) = &self.chunks[i];
                other.intersect(region).map(|shared| (*index, shared))
            })
            .collect::<Vec<_>>()
            .into_iter()
    }
}

/// Returns the dimension with the most different first indices.
///
/// It is the first one under FSDP, and the second one where tensor parallelism alone shards
/// columns.
fn widest(chunks: &[(Region, usize)]) -> usize {
    let dims = chunks.first().map_or(0, |(region, _)| region.offsets.len());
    let distinct = |dim: usize| {
        let mut starts: Vec<usize> = chunks.iter().map(|(region, _)| start(region, dim)).collect();
        starts.sort_unstable();
        starts.dedup();
        starts.len()
    };
    (0..dims).rev().max_by_key(|&dim| distinct(dim)).unwrap_or(0)
}

fn start(region: &Region, dim: usize) -> usize {
    region.offsets.get(dim).copied().unwrap_or(0)
}

fn end(region: &Region, dim: usize) -> usize {
    region.offsets.get(dim).zip(region.sizes.get(dim)).map_or(1, |(o, s)| o + s)
}

/// Returns a shape's number of elements; `None` if it or a stride does not fit into `usize`.
pub(super) fn checked_elem_count(shape: &[usize]) -> Option<usize> {
    let strides = shape.iter().filter(|&&n| n > 0).try_fold(1usize, |n, &d| n.checked_mul(d));
    strides.map(|n| if shape.contains(&0) { 0 } else { n })
}

/// Checks that a region lies inside a tensor of this shape.
pub(super) fn check_bounds(shape: &[usize], region: &Region) -> Result<(), String> {
    let dims = shape.len();
    let inside = region.offsets.len() == dims
        && region.sizes.len() == dims
        && (0..dims).all(|d| {
            region.offsets[d].checked_add(region.sizes[d]).is_some_and(|end| end <= shape[d])
        });
    if inside && checked_elem_count(shape).is_some() {
        Ok(())
    } else {
        Err(format!("{} is not a part of a tensor of shape {shape:?}", format_region(region)))
    }
}

/// Checks that chunks cover a tensor of this shape, each element once.
pub(super) fn check_cover(shape: &[usize], regions: &[Region]) -> Result<(), String> {
    let total = checked_elem_count(shape).ok_or_else(|| format!("{shape:?} is no valid shape"))?;
    for region in regions {
        check_bounds(shape, region)?;
    }
    let index = ChunkIndex::new(regions.iter().cloned());
    let mut covered = 0;
    for (i, region) in regions.iter().enumerate() {
        covered += region.elem_count();
        if let Some((other, _)) = index.intersections(region).find(|(other, _)| *other != i) {
            let (a, b) =
                (format_region(&regions[other.min(i)]), format_region(&regions[other.max(i)]));
            return Err(format!("is stored twice in part: {a} and {b} overlap"));
        }
    }
    if covered == total {
        Ok(())
    } else {
        Err(format!("is incomplete: {covered} of its {total} elements are stored"))
    }
}

/// A region as slices, `[0..4, 8..16]`.
pub(super) fn format_region(region: &Region) -> String {
    let slices: Vec<_> = region
        .offsets
        .iter()
        .zip(&region.sizes)
        .map(|(o, s)| format!("{o}..{}", o.saturating_add(*s)))
        .collect();
    format!("[{}]", slices.join(", "))
}

/// Splits a tensor into blocks along its first dimension, to be read one after the other. `width`
/// is an element's size in bytes.
pub(super) fn blocks(shape: &[usize], width: usize) -> Vec<Region> {
    let whole = Region::full(shape);
    if whole.is_empty() || shape.is_empty() {
        return if whole.is_empty() { Vec::new() } else { vec![whole] };
    }
    let row = whole.elem_count() / shape[0] * width;
    let rows = (BLOCK / row.max(1)).max(1);
    let block = |start: usize| {
        let mut region = whole.clone();
        region.offsets[0] = start;
        region.sizes[0] = rows.min(shape[0] - start);
        region
    };
    (0..shape[0]).step_by(rows).map(block).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulgurite_test_message::assert_says;
    use proptest::prelude::*;

    fn region(offsets: &[usize], sizes: &[usize]) -> Region {
        Region { offsets: offsets.to_vec(), sizes: sizes.to_vec() }
    }

    #[test]
    fn covers_are_checked() {
        let check = |shape: &[usize], regions: &[Region]| check_cover(shape, regions);
        check(&[], &[region(&[], &[])]).unwrap();
        check(&[0, 3], &[]).unwrap();
        check(&[4, 3], &[region(&[1, 0], &[3, 3]), region(&[0, 0], &[1, 3])]).unwrap();
        let error = check(&[4, 3], &[region(&[0, 0], &[2, 3])]).unwrap_err();
        assert_says!(error, "is incomplete: 6 of its 12 elements are stored");
        let error = check(&[4, 3], &[region(&[0, 0], &[2, 3]), region(&[1, 0], &[3, 3])]);
        assert_says!(error.unwrap_err(), "is stored twice … [0..2, 0..3] and [1..4, 0..3] overlap");
        let error = check(&[4, 3], &[region(&[2, 0], &[usize::MAX, 3])]).unwrap_err();
        assert_says!(error, "[2..18446744073709551615, 0..3] is not a part … shape [4, 3]");
        let error = check(&[usize::MAX, 3], &[]).unwrap_err();
        assert_says!(error, "[18446744073709551615, 3] is no valid shape");
    }

    #[test]
    fn index_uses_the_sharded_dimension() {
        let columns = (0..64).map(|i| region(&[0, i * 2], &[8, 2]));
        assert_eq!(ChunkIndex::new(columns).dim, 1);
        let rows = (0..64).map(|i| region(&[i * 2, i % 2], &[2, 1]));
        assert_eq!(ChunkIndex::new(rows).dim, 0);
        assert_eq!(ChunkIndex::new(std::iter::once(region(&[], &[]))).dim, 0);
        assert_eq!(ChunkIndex::new(std::iter::once(region(&[0, 0], &[2, 2]))).dim, 0);
    }

    proptest! {
        #[test]
        fn index_finds_all_intersections(
            chunks in prop::collection::vec((0usize..8, 1usize..8, 0usize..4, 1usize..4), 0..12),
            wanted in (0usize..8, 1usize..8, 0usize..4, 1usize..4),
        ) {
            let make = |(o0, s0, o1, s1): (usize, usize, usize, usize)| region(&[o0, o1], &[s0, s1]);
            let chunks: Vec<Region> = chunks.into_iter().map(make).collect();
            let wanted = make(wanted);
            let naive: Vec<_> = chunks
                .iter()
                .enumerate()
                .filter_map(|(i, chunk)| chunk.intersect(&wanted).map(|shared| (i, shared)))
                .collect();
            let mut found: Vec<_> = ChunkIndex::new(chunks.into_iter()).intersections(&wanted).collect();
            found.sort_by_key(|(i, _)| *i);
            prop_assert_eq!(found, naive);
        }
    }

    #[test]
    fn blocks_cover_the_tensor() {
        assert_eq!(blocks(&[], 4), [Region::full(&[])]);
        assert!(blocks(&[0, 3], 4).is_empty());
        let shape = [3000, 1000];
        let blocks = blocks(&shape, 4);
        assert!(blocks.len() > 1);
        assert!(blocks.iter().all(|b| b.elem_count() * 4 <= BLOCK));
        check_cover(&shape, &blocks).unwrap();
    }
}
