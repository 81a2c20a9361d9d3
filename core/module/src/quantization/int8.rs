//! Eight bits an element, with a scale for each row.

use std::ops::Range;

use candle_core::WithDType;

/// The code of 0.
const ZERO: f32 = 128.0;
/// Steps from 0 to the largest magnitude.
const STEPS: f32 = 127.0;

/// The factor of the row's codes.
pub(super) fn scale(row: &[f32]) -> f32 {
    row.iter().fold(0_f32, |largest, x| largest.max(x.abs())) / STEPS
}

/// Packs the columns at `range` of a whole row.
pub(super) fn pack(row: &[f32], range: Range<usize>, out: &mut [u8]) {
    let largest = row.iter().fold(0_f32, |largest, x| largest.max(x.abs()));
    let steps = if largest > 0.0 { STEPS / largest } else { 0.0 };
    for (code, x) in out.iter_mut().zip(&row[range]) {
        *code = ((x * steps).round_ties_even() + ZERO) as u8;
    }
}

/// The elements of these codes.
pub(super) fn unpack<T: WithDType>(codes: &[u8], scale: f32, out: &mut [T]) {
    for (code, x) in codes.iter().zip(out) {
        *x = T::from_f64(f64::from((f32::from(*code) - ZERO) * scale));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_is_at_most_half_a_step() {
        let row: Vec<f32> = (0..101).map(|i| (i as f32 * 0.37).sin() * 2.5).collect();
        let mut codes = vec![0; 101];
        pack(&row, 0..101, &mut codes);
        let mut back = vec![0_f64; 101];
        unpack(&codes, scale(&row), &mut back);
        for (x, back) in row.iter().zip(&back) {
            assert!((f64::from(*x) - back).abs() <= f64::from(scale(&row)) * 0.5001, "{x} {back}");
        }
        let mut middle = vec![0; 3];
        pack(&row, 40..43, &mut middle);
        assert_eq!(middle, codes[40..43]);
    }
}
