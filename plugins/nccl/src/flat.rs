//! Layout of uneven parts in a flat buffer, because NCCL gathers and scatters only even parts.
//!
//! The buffer has a slot for each rank, all of one length. A tensor has the same place in all
//! slots, as long as its longest part. A rank with a shorter part leaves padding of arbitrary
//! content.

/// Lengths in elements of a tensor's parts, one for each rank.
pub(crate) type Counts<'a> = &'a [usize];

/// Whether all parts have one length.
pub(crate) fn is_even(counts: Counts<'_>) -> bool {
    counts.windows(2).all(|pair| pair[0] == pair[1])
}

/// The layout of several tensors of one dtype.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Flat {
    /// Elements of a slot.
    pub(crate) slot: usize,
    /// Offsets of the tensors within a slot, in elements.
    pub(crate) places: Vec<usize>,
}

impl Flat {
    /// Lays out tensors. Each begins at a multiple of `align` elements.
    pub(crate) fn new<'a>(tensors: impl IntoIterator<Item = Counts<'a>>, align: usize) -> Self {
        let (mut slot, mut places) = (0_usize, Vec::new());
        for counts in tensors {
            places.push(slot);
            slot += counts.iter().max().copied().unwrap_or(0).next_multiple_of(align);
        }
        Self { slot, places }
    }

    /// Returns the offset in the buffer, in elements, of `rank`'s part of tensor number `tensor`.
    pub(crate) fn at(&self, tensor: usize, rank: usize) -> usize {
        rank * self.slot + self.places[tensor]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_have_one_place_in_all_slots() {
        assert!(is_even(&[3, 3, 3]) && is_even(&[]) && !is_even(&[3, 3, 2]));
        let tensors: [&[usize]; 3] = [&[5, 5, 1], &[0, 0, 3], &[4, 0, 0]];
        let flat = Flat::new(tensors, 4);
        assert_eq!(flat, Flat { slot: 16, places: vec![0, 8, 12] });
        assert_eq!((flat.at(1, 0), flat.at(2, 2)), (8, 44));
    }
}
