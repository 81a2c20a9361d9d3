//! The choice of experts for each row, and the order of rows by expert.

use std::ops::Range;

use candle_core::{D, Device, Tensor};
use rayon::prelude::*;

use crate::Result;
use crate::host::{Float, host, rows_per_piece, with_float};
use fulgurite_engine::execution::{dry_run, read};

/// The experts of each row, and the order in which experts compute rows.
///
/// A *choice* is a row with one of its experts. Choices are sorted by expert, and those of one
/// expert by row, so every sum over them has one order.
#[derive(Debug)]
pub(crate) struct Routing {
    /// The experts of each row, the likeliest first: `[rows * per_row]`.
    pub(crate) experts: Vec<u32>,
    /// Number of experts of a row.
    pub(crate) per_row: usize,
    /// The sorted choices of each expert.
    pub(crate) ranges: Vec<Range<usize>>,
    /// The row of each sorted choice.
    pub(crate) rows: Vec<u32>,
    /// The index in `experts` of each sorted choice.
    pub(crate) choices: Vec<u32>,
    /// The sorted choices of each row, in the order of their experts: `[rows * per_row]`.
    pub(crate) places: Vec<u32>,
}

impl Routing {
    /// Chooses the `per_row` likeliest of the experts in each row of `probabilities`
    /// (`[rows, experts]`, f32 or f64); of equally likely ones those of lower index. Reads the
    /// probabilities to the host.
    pub(crate) fn of(probabilities: &Tensor, per_row: usize) -> Result<Self> {
        let (rows, experts) = probabilities.dims2()?;
        let chosen = match dry_run::is_on() {
            // Evenly, as in a mixture that is in balance: the probabilities are not computed.
            true => (0..rows * per_row).map(|choice| (choice % experts) as u32).collect(),
            false => likeliest(probabilities, per_row)?,
        };
        Ok(Self::sorted(chosen, experts, per_row))
    }

    /// Sorts the choices by expert.
    fn sorted(experts: Vec<u32>, num_experts: usize, per_row: usize) -> Self {
        let mut ends = vec![0; num_experts];
        experts.iter().for_each(|&expert| ends[expert as usize] += 1);
        let mut start = 0;
        let ranges: Vec<Range<usize>> = ends
            .iter()
            .map(|&count| {
                start += count;
                start - count..start
            })
            .collect();
        let mut next: Vec<usize> = ranges.iter().map(|range| range.start).collect();
        let mut sorted = Self {
            rows: vec![0; experts.len()],
            choices: vec![0; experts.len()],
            ranges,
            per_row,
            places: Vec::with_capacity(experts.len()),
            experts,
        };
        for (row, of_row) in sorted.experts.chunks_exact(per_row).enumerate() {
            let first = sorted.places.len();
            for (i, &expert) in of_row.iter().enumerate() {
                let place = next[expert as usize];
                next[expert as usize] += 1;
                sorted.rows[place] = row as u32;
                sorted.choices[place] = (row * per_row + i) as u32;
                sorted.places.push(place as u32);
            }
            // Places grow with experts.
            sorted.places[first..].sort_unstable();
        }
        sorted
    }

    /// Number of choices.
    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }

    /// The experts of each row on a device, `[rows, per_row]`.
    pub(crate) fn experts_on(&self, device: &Device) -> Result<Tensor> {
        let shape = (self.experts.len() / self.per_row, self.per_row);
        Ok(Tensor::from_slice(&self.experts, shape, device)?)
    }

    /// The index of each choice in the sorted order, `[rows * per_row]`: the reverse of `choices`.
    pub(crate) fn inverse(&self) -> Vec<u32> {
        let mut inverse = vec![0; self.len()];
        for (place, &choice) in self.choices.iter().enumerate() {
            inverse[choice as usize] = place as u32;
        }
        inverse
    }
}

/// The probabilities on the host, `f` of them, in f32 or f64.
pub(crate) fn with_probabilities<R>(probabilities: &Tensor, f: impl Probabilities<R>) -> Result<R> {
    let probabilities = probabilities.detach().contiguous()?;
    with_float!(probabilities.dtype(), T => match probabilities.device().is_cpu() {
        true => Ok(f.call(host(&probabilities)?.slice::<T>()?)),
        false => Ok(f.call(&read::vec1::<T>(&probabilities.flatten_all()?, "routing")?)),
    })
}

/// A function of probabilities in any float.
pub(crate) trait Probabilities<R> {
    fn call<T: Float>(self, probabilities: &[T]) -> R;
}

struct Likeliest {
    experts: usize,
    per_row: usize,
}

impl Probabilities<Vec<u32>> for Likeliest {
    fn call<T: Float>(self, probabilities: &[T]) -> Vec<u32> {
        let Self { experts, per_row } = self;
        let rows = probabilities.len() / experts;
        let mut chosen = vec![0; rows * per_row];
        let piece = rows_per_piece(rows);
        let pieces = chosen.par_chunks_mut(piece * per_row);
        pieces.zip(probabilities.par_chunks(piece * experts)).for_each(|(chosen, all)| {
            for (chosen, row) in chosen.chunks_exact_mut(per_row).zip(all.chunks_exact(experts)) {
                choose(chosen, row);
            }
        });
        chosen
    }
}

fn likeliest(probabilities: &Tensor, per_row: usize) -> Result<Vec<u32>> {
    let experts = probabilities.dim(D::Minus1)?;
    with_probabilities(probabilities, Likeliest { experts, per_row })
}

/// Writes the indices of the largest elements of `row`, the largest first, equal ones in order.
fn choose<T: Float>(chosen: &mut [u32], row: &[T]) {
    for i in 0..chosen.len() {
        let mut best: Option<usize> = None;
        for (expert, &probability) in row.iter().enumerate() {
            let is_taken = chosen[..i].contains(&(expert as u32));
            if !is_taken && best.is_none_or(|best| probability > row[best]) {
                best = Some(expert);
            }
        }
        // There are at least as many experts as choices.
        chosen[i] = best.unwrap_or_default() as u32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn routing(rows: &[[f32; 4]], per_row: usize) -> Routing {
        let rows = Tensor::from_vec(rows.concat(), (rows.len(), 4), &Device::Cpu).unwrap();
        Routing::of(&rows, per_row).unwrap()
    }

    #[test]
    fn equal_probabilities_choose_lower_experts() {
        let found = routing(&[[0.25; 4], [0.1, 0.4, 0.1, 0.4], [0.1, 0.2, 0.3, 0.4]], 2);
        assert_eq!(found.experts, [0, 1, 1, 3, 3, 2]);
        assert_eq!(found.ranges, [0..1, 1..3, 3..4, 4..6]);
        assert_eq!(found.rows, [0, 0, 1, 2, 1, 2]);
        assert_eq!(found.choices, [0, 1, 2, 5, 3, 4]);
        // In the order of the experts, not of their probabilities.
        assert_eq!(found.places, [0, 1, 2, 4, 3, 5]);
        assert_eq!(found.inverse(), [0, 1, 2, 4, 5, 3]);
    }

    #[test]
    fn numbers_that_are_not_finite_choose_some_expert() {
        let found = routing(&[[f32::NAN; 4], [f32::NAN, 1.0, f32::NAN, 2.0]], 2);
        assert_eq!(found.experts[..2], [0, 1]);
        assert_eq!(found.len(), 4);
        assert!(found.experts.iter().all(|expert| *expert < 4));
    }

    #[test]
    fn every_choice_is_counted_once() {
        let value = |row: usize, expert: usize| ((row * 7919 + expert * 271) % 101) as f32;
        let rows: Vec<[f32; 4]> = (0..57).map(|row| [0, 1, 2, 3].map(|e| value(row, e))).collect();
        for per_row in 1..=4 {
            let found = routing(&rows, per_row);
            let counts: Vec<usize> = found.ranges.iter().map(Range::len).collect();
            assert_eq!(counts.iter().sum::<usize>(), 57 * per_row);
            for (expert, range) in found.ranges.iter().enumerate() {
                let rows = &found.rows[range.clone()];
                assert!(rows.is_sorted(), "an expert's rows are in order");
                for (&row, &choice) in rows.iter().zip(&found.choices[range.clone()]) {
                    assert_eq!(choice as usize / per_row, row as usize);
                    assert_eq!(found.experts[choice as usize] as usize, expert);
                }
            }
            let mut places = found.places.clone();
            places.sort_unstable();
            assert!(places.iter().enumerate().all(|(i, place)| i == *place as usize));
        }
    }

    #[test]
    fn no_rows_have_no_choices() {
        let none = Tensor::zeros((0, 4), candle_core::DType::F32, &Device::Cpu).unwrap();
        let found = Routing::of(&none, 2).unwrap();
        assert_eq!((found.len(), found.ranges.len()), (0, 4));
    }
}
