//! Conversations that share samples.

use std::collections::BTreeMap;

/// Packs items of these sizes into bins of `capacity`. Returns the items of each bin.
///
/// Best fit, from the largest item on: each item goes where the least place is left behind it. The
/// items of a bin keep their order, and so do bins, by their first items.
pub(super) fn pack(sizes: &[usize], capacity: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    order.sort_by_key(|&item| (std::cmp::Reverse(sizes[item]), item));
    let mut bins: Vec<Vec<usize>> = Vec::new();
    // Bins by the place left, in the order of their making.
    let mut open: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for item in order {
        let size = sizes[item];
        let fit = open.range(size..).next().map(|(left, _)| *left);
        let (bin, left) = match fit.and_then(|left| Some((open.get_mut(&left)?.pop()?, left))) {
            Some((bin, left)) => {
                if open[&left].is_empty() {
                    open.remove(&left);
                }
                (bin, left)
            }
            None => {
                bins.push(Vec::new());
                (bins.len() - 1, capacity)
            }
        };
        bins[bin].push(item);
        open.entry(left.saturating_sub(size)).or_default().push(bin);
    }
    bins.iter_mut().for_each(|bin| bin.sort_unstable());
    bins.sort_unstable();
    bins
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn short_items_fill_the_gaps() {
        assert_eq!(pack(&[3, 7, 2, 8, 5, 1], 10), [vec![0, 1], vec![2, 3], vec![4, 5]]);
        assert_eq!(pack(&[10, 10], 10), [[0], [1]]);
        assert!(pack(&[], 10).is_empty());
    }

    proptest! {
        #[test]
        fn every_item_has_one_place(sizes in prop::collection::vec(1usize..20, 0..60)) {
            let bins = pack(&sizes, 20);
            let mut all: Vec<usize> = bins.concat();
            all.sort_unstable();
            prop_assert!(all.into_iter().eq(0..sizes.len()));
            for bin in &bins {
                prop_assert!(bin.iter().map(|&item| sizes[item]).sum::<usize>() <= 20);
            }
            // No two bins could be one.
            let sums: Vec<usize> = bins.iter().map(|bin| bin.iter().map(|&i| sizes[i]).sum()).collect();
            let half_empty = sums.iter().filter(|sum| **sum <= 10).count();
            prop_assert!(half_empty <= 1, "{sums:?}");
        }
    }
}
