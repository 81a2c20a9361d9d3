//! NF4 with double quantisation, a row at a time.

use std::ops::Range;

use candle_core::WithDType;

/// The levels published by QLoRA's authors: quantiles of a normal distribution, with 0 and ±1.
pub(super) const LEVELS: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// The code of a scale equal to the mean.
const MEAN: f32 = 128.0;
/// Steps from the mean to the farthest scale.
const STEPS: f32 = 127.0;

/// Bytes of a packed block: its scale and its elements.
pub(super) const fn record_bytes(block_size: usize) -> usize {
    1 + block_size / 2
}

fn largest(block: &[f32]) -> f32 {
    block.iter().fold(0.0, |largest, x| largest.max(x.abs()))
}

/// The mean of the blocks' scales and the largest distance from it.
pub(super) fn scales(row: &[f32], block_size: usize) -> [f32; 2] {
    let scales = || row.chunks_exact(block_size).map(largest);
    let blocks = row.len() / block_size;
    if blocks == 0 {
        return [0.0; 2];
    }
    let mean = (scales().map(f64::from).sum::<f64>() / blocks as f64) as f32;
    [mean, scales().fold(0.0, |far, scale| far.max((scale - mean).abs()))]
}

/// Packs the blocks at `range` of a whole row.
pub(super) fn pack(row: &[f32], block_size: usize, range: Range<usize>, out: &mut [u8]) {
    let [mean, far] = scales(row, block_size);
    let blocks = row.chunks_exact(block_size).skip(range.start).take(range.len());
    for (block, record) in blocks.zip(out.chunks_exact_mut(record_bytes(block_size))) {
        let scale = largest(block);
        let steps = if far > 0.0 { ((scale - mean) / far * STEPS).round_ties_even() } else { 0.0 };
        record[0] = (steps + MEAN) as u8;
        let code = |x: f32| if scale > 0.0 { nearest(x / scale) } else { nearest(0.0) };
        for (byte, pair) in record[1..].iter_mut().zip(block.chunks_exact(2)) {
            *byte = code(pair[0]) << 4 | code(pair[1]);
        }
    }
}

/// The index of the level nearest to `x`; of two equally near, the lower.
fn nearest(x: f32) -> u8 {
    LEVELS.windows(2).filter(|pair| (pair[1] - x).abs() < (x - pair[0]).abs()).count() as u8
}

/// The elements of whole blocks.
pub(super) fn unpack<T: WithDType>(
    records: &[u8],
    [mean, far]: [f32; 2],
    block_size: usize,
    out: &mut [T],
) {
    let records = records.chunks_exact(record_bytes(block_size));
    for (record, block) in records.zip(out.chunks_exact_mut(block_size)) {
        // Rounding may take a scale of nearly 0 below 0.
        let scale = (mean + (f32::from(record[0]) - MEAN) / STEPS * far).max(0.0);
        let values = LEVELS.map(|level| T::from_f64(f64::from(level * scale)));
        for (byte, pair) in record[1..].iter().zip(block.chunks_exact_mut(2)) {
            pair[0] = values[usize::from(byte >> 4)];
            pair[1] = values[usize::from(byte & 15)];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_element_gets_its_nearest_level() {
        for (i, level) in LEVELS.into_iter().enumerate() {
            assert_eq!(usize::from(nearest(level)), i);
        }
        for i in 0..=20_000 {
            let x = i as f32 / 10_000.0 - 1.0;
            let far = |level: f32| (level - x).abs();
            let least = LEVELS.into_iter().map(far).fold(f32::INFINITY, f32::min);
            assert_eq!(far(LEVELS[usize::from(nearest(x))]), least, "{x}");
        }
    }

    /// If all scales of a row are equal, only the rounding to levels loses precision.
    #[test]
    fn levels_of_one_scale_come_back() {
        let row: Vec<f32> = LEVELS.iter().chain(LEVELS.iter().rev()).map(|x| 3.0 * x).collect();
        let mut packed = vec![0; 2 * record_bytes(16)];
        pack(&row, 16, 0..2, &mut packed);
        let mut back = vec![0_f32; 32];
        unpack(&packed, scales(&row, 16), 16, &mut back);
        assert_eq!(back, row);
        assert_eq!(packed[1], 0x01);
    }

    #[test]
    fn zeros_stay_zeros() {
        let mut packed = vec![1; 2 * record_bytes(4)];
        let row = [0.0, 0.0, 0.0, 0.0, 1.0, -1.0, 0.5, 0.0];
        pack(&row, 4, 0..2, &mut packed);
        let mut back = vec![0_f32; 8];
        unpack(&packed, scales(&row, 4), 4, &mut back);
        assert_eq!(back[..4], [0.0; 4]);
        assert_eq!(back[4..6], [1.0, -1.0]);
    }
}
