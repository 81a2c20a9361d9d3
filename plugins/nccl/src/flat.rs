//! Where uneven parts lie in a flat buffer that NCCL, which knows even parts alone, gathers or scatters.
//!
//! The buffer has a slot of one length for each rank. A tensor has one place in all slots, as long as the longest of
//! its parts; what a rank has less is padding of arbitrary content.

/// A tensor of several parts, one for each rank, of these lengths in elements.
pub(crate) type Counts<'a> = &'a [usize];

/// Whether all parts are of one length.
pub(crate) fn is_even(counts: Counts<'_>) -> bool {
    counts.windows(2).all(|pair| pair[0] == pair[1])
}

/// The places of some tensors of one dtype.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Flat {
    /// Elements of a slot.
    pub(crate) slot: usize,
    /// By tensor, where it begins in a slot.
    pub(crate) places: Vec<usize>,
}

impl Flat {
    /// Lays out tensors; each begins at a multiple of `align` elements.
    pub(crate) fn new<'a>(tensors: impl IntoIterator<Item = Counts<'a>>, align: usize) -> Self {
        let (mut slot, mut places) = (0_usize, Vec::new());
        for counts in tensors {
            places.push(slot);
            slot += counts.iter().max().copied().unwrap_or(0).next_multiple_of(align);
        }
        Self { slot, places }
    }

    /// Where tensor number `tensor` of `rank` begins in the buffer.
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
