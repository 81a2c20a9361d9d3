//! Tensors that were saved as views, such as transposed or expanded ones.

use crate::CheckpointReader;
use fulgurite_engine::shard::Region;

use super::state_dict::TensorView;

/// Reads a region of a view into `out`, in the region's row-major order.
///
/// Reads the storage range that covers the region, then copies element by element. `base` is the
/// storage's first byte in the file.
pub(super) fn read_region(
    reader: &dyn CheckpointReader,
    base: u64,
    view: &TensorView,
    region: &Region,
    out: &mut [u8],
) -> std::io::Result<()> {
    if region.is_empty() {
        return Ok(());
    }
    let width = view.dtype.bitsize() / 8;
    let steps = || region.sizes.iter().zip(&view.strides);
    let first: usize =
        view.offset + region.offsets.iter().zip(&view.strides).map(|(o, s)| o * s).sum::<usize>();
    let span: usize = 1 + steps().map(|(size, stride)| (size - 1) * stride).sum::<usize>();
    let mut bytes = vec![0; span * width];
    reader.read_exact_at(&mut bytes, base + (first * width) as u64)?;
    let mut index = vec![0; region.sizes.len()];
    for element in out.chunks_exact_mut(width) {
        let at: usize = index.iter().zip(&view.strides).map(|(i, s)| i * s).sum();
        element.copy_from_slice(&bytes[at * width..][..width]);
        for (i, size) in index.iter_mut().zip(&region.sizes).rev() {
            *i += 1;
            if *i < *size {
                break;
            }
            *i = 0;
        }
    }
    Ok(())
}
