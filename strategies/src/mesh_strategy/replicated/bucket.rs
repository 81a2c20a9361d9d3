//! Packs gradients into buckets.

use candle_core::DType;

/// Size, dtype and optimizer of one parameter's gradient.
#[derive(Debug, Clone, Copy)]
pub(super) struct Item {
    pub(super) elements: usize,
    pub(super) dtype: DType,
    pub(super) optimizer: usize,
}

/// Packs items, in the order their gradients become ready, into consecutive buckets. The first
/// holds up to `first_bytes`, later ones up to `cap_bytes`. A bucket has one dtype, one optimizer
/// and at least one item (like PyTorch's `compute_bucket_assignment_by_size`).
pub(super) fn pack(items: &[Item], first_bytes: usize, cap_bytes: usize) -> Vec<Vec<usize>> {
    let mut buckets: Vec<Vec<usize>> = Vec::new();
    let (mut bytes, mut kind) = (0, None);
    for (i, item) in items.iter().enumerate() {
        let size = item.elements * item.dtype.size_in_bytes();
        let cap = if buckets.len() <= 1 { first_bytes } else { cap_bytes };
        match buckets.last_mut() {
            Some(bucket) if kind == Some((item.dtype, item.optimizer)) && bytes + size <= cap => {
                bucket.push(i);
            }
            _ => {
                buckets.push(vec![i]);
                bytes = 0;
            }
        }
        bytes += size;
        kind = Some((item.dtype, item.optimizer));
    }
    buckets
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(elements: usize) -> Item {
        Item { elements, dtype: DType::F32, optimizer: 0 }
    }

    #[test]
    fn the_first_bucket_is_small_and_none_is_empty() {
        let items = [item(10), item(10), item(100), item(100), item(100), item(1000)];
        assert_eq!(pack(&items, 80, 800), [vec![0, 1], vec![2, 3], vec![4], vec![5]]);
        assert_eq!(pack(&items, 0, 0).len(), 6);
        assert!(pack(&[], 80, 800).is_empty());
    }

    #[test]
    fn dtypes_and_optimizers_are_not_mixed() {
        let items = [item(1), Item { dtype: DType::F64, ..item(1) }, item(1)];
        assert_eq!(pack(&items, 800, 800), [vec![0], vec![1], vec![2]]);
        let items = [item(1), item(1), Item { optimizer: 1, ..item(1) }];
        assert_eq!(pack(&items, 800, 800), [vec![0, 1], vec![2]]);
    }
}
