//! The choice of experts for each row, and the order of rows by expert.

use std::ops::Range;

use candle_core::{Device, Tensor};
use rayon::prelude::*;

use crate::Result;
use crate::host::{Float, host, rows_per_piece, with_float};
use fulgurite_engine::execution::{dry_run, read};

/// The experts of each row, and the order in which experts compute rows.
///
/// A *choice* is a row with one of its experts. Choices are sorted by expert, and those of one
/// expert by row, so every sum over them has one order. Dropped choices are not among the sorted
/// ones.
#[derive(Debug)]
pub(crate) struct Routing {
    /// The experts of each row, the best first: `[rows * per_row]`.
    pub(crate) experts: Vec<u32>,
    /// Number of experts of a row.
    pub(crate) per_row: usize,
    /// The sorted choices of each expert.
    pub(crate) ranges: Vec<Range<usize>>,
    /// The row of each sorted choice.
    pub(crate) rows: Vec<u32>,
    /// The index in `experts` of each sorted choice.
    pub(crate) choices: Vec<u32>,
    /// The sorted choices of each row, in the order of their experts: `[rows * per_row]`. Behind
    /// them, [`len`](Self::len) stands for each of the row's dropped choices.
    pub(crate) places: Vec<u32>,
}

impl Routing {
    /// Chooses the `per_row` best of the experts in each row of `scores` (`[rows, experts]`, f32 or
    /// f64), within the best groups if there are groups; of equally good ones those of lower index.
    /// Reads the scores to the host.
    pub(crate) fn of(
        scores: &Tensor,
        per_row: usize,
        groups: Option<ExpertGroups>,
    ) -> Result<Self> {
        let (rows, experts) = scores.dims2()?;
        let chosen = match dry_run::is_on() {
            // Evenly, as in a mixture that is in balance: the scores are not computed.
            true => (0..rows * per_row).map(|choice| (choice % experts) as u32).collect(),
            false => with_scores(scores, Best { experts, per_row, groups })?,
        };
        Ok(Self::sorted(chosen, experts, per_row, |_| true))
    }

    /// Drops the choices that `keeps` (`[rows * per_row]`) does not keep.
    pub(crate) fn keeping(self, keeps: &[bool]) -> Self {
        match keeps.iter().all(|keep| *keep) {
            true => self,
            false => {
                let num_experts = self.ranges.len();
                Self::sorted(self.experts, num_experts, self.per_row, |choice| keeps[choice])
            }
        }
    }

    /// Sorts the kept choices by expert.
    fn sorted(
        experts: Vec<u32>,
        num_experts: usize,
        per_row: usize,
        keeps: impl Fn(usize) -> bool,
    ) -> Self {
        let mut ends = vec![0; num_experts];
        let kept = experts.iter().enumerate().filter(|(choice, _)| keeps(*choice));
        kept.for_each(|(_, &expert)| ends[expert as usize] += 1);
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
            rows: vec![0; start],
            choices: vec![0; start],
            ranges,
            per_row,
            places: Vec::with_capacity(experts.len()),
            experts,
        };
        for (row, of_row) in sorted.experts.chunks_exact(per_row).enumerate() {
            let first = sorted.places.len();
            for (i, &expert) in of_row.iter().enumerate() {
                let choice = row * per_row + i;
                if !keeps(choice) {
                    sorted.places.push(start as u32);
                    continue;
                }
                let place = next[expert as usize];
                next[expert as usize] += 1;
                sorted.rows[place] = row as u32;
                sorted.choices[place] = choice as u32;
                sorted.places.push(place as u32);
            }
            // Places grow with experts. Dropped choices have the largest place.
            sorted.places[first..].sort_unstable();
        }
        sorted
    }

    /// Number of choices that are not dropped.
    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }

    /// Number of dropped choices.
    pub(crate) fn dropped(&self) -> usize {
        self.experts.len() - self.len()
    }

    /// The experts of each row on a device, `[rows, per_row]`.
    pub(crate) fn experts_on(&self, device: &Device) -> Result<Tensor> {
        let shape = (self.experts.len() / self.per_row, self.per_row);
        Ok(Tensor::from_slice(&self.experts, shape, device)?)
    }

    /// The index of each choice in the sorted order, `[rows * per_row]`: the reverse of `choices`.
    /// [`len`](Self::len) for dropped choices.
    pub(crate) fn inverse(&self) -> Vec<u32> {
        let mut inverse = vec![self.len() as u32; self.experts.len()];
        for (place, &choice) in self.choices.iter().enumerate() {
            inverse[choice as usize] = place as u32;
        }
        inverse
    }
}

/// The number of rows that have each expert among their `per_row` best, and the sum of each
/// expert's scores (`[rows, experts]`, f32 or f64), in f64. Reads the scores once.
pub(crate) fn counts_and_sums(scores: &Tensor, per_row: usize) -> Result<[Vec<f64>; 2]> {
    let (rows, experts) = scores.dims2()?;
    match dry_run::is_on() {
        true => Ok([vec![(rows * per_row / experts) as f64; experts], vec![0.0; experts]]),
        false => with_scores(scores, CountsAndSums(Best { experts, per_row, groups: None })),
    }
}

struct CountsAndSums(Best);

impl Scores<[Vec<f64>; 2]> for CountsAndSums {
    fn call<T: Float>(self, scores: &[T]) -> [Vec<f64>; 2] {
        let experts = self.0.experts;
        let [mut counts, mut sums] = [(); 2].map(|()| vec![0.0; experts]);
        for row in scores.chunks_exact(experts) {
            sums.iter_mut().zip(row).for_each(|(sum, score)| *sum += score.to_f64());
        }
        self.0.call(scores).into_iter().for_each(|expert| counts[expert as usize] += 1.0);
        [counts, sums]
    }
}

/// The scores on the host, `f` of them, in f32 or f64.
pub(crate) fn with_scores<R>(scores: &Tensor, f: impl Scores<R>) -> Result<R> {
    let scores = scores.detach().contiguous()?;
    with_float!(scores.dtype(), T => match scores.device().is_cpu() {
        true => Ok(f.call(host(&scores)?.slice::<T>()?)),
        false => Ok(f.call(&read::vec1::<T>(&scores.flatten_all()?, "routing")?)),
    })
}

/// A function of scores in any float.
pub(crate) trait Scores<R> {
    fn call<T: Float>(self, scores: &[T]) -> R;
}

/// Groups of experts, as in DeepSeek-V3. The experts of a row are chosen within the groups whose
/// two best scores have the largest sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Number of groups: neighbouring experts, equally many in each.
    pub count: usize,
    /// Number of groups that a row's experts may be in.
    pub per_row: usize,
}

impl ExpertGroups {
    /// Returns a contradiction to the numbers of experts, in words.
    pub fn problem(self, experts: usize, experts_per_row: usize) -> Option<String> {
        let Self { count, per_row } = self;
        if count == 0 || !experts.is_multiple_of(count) {
            return Some(format!(
                "{experts} experts cannot be divided into {count} groups; the number of groups must divide that of \
                 experts"
            ));
        }
        let size = experts / count;
        if size < 2 {
            return Some(format!(
                "groups of one expert have no two best scores; use at most {} groups for {experts} experts",
                experts / 2
            ));
        }
        if !(1..=count).contains(&per_row) {
            return Some(format!(
                "a row cannot use {per_row} of {count} groups; expected 1 to {count}"
            ));
        }
        match experts_per_row > per_row * size {
            false => None,
            true => Some(format!(
                "a row cannot use {experts_per_row} of the {} experts in its groups ({per_row} of {size} experts \
                 each)",
                per_row * size
            )),
        }
    }
}

struct Best {
    experts: usize,
    per_row: usize,
    groups: Option<ExpertGroups>,
}

impl Scores<Vec<u32>> for Best {
    fn call<T: Float>(self, scores: &[T]) -> Vec<u32> {
        let Self { experts, per_row, groups } = self;
        let rows = scores.len() / experts;
        let mut chosen = vec![0; rows * per_row];
        let piece = rows_per_piece(rows);
        let pieces = chosen.par_chunks_mut(piece * per_row);
        pieces.zip(scores.par_chunks(piece * experts)).for_each(|(chosen, all)| {
            for (chosen, row) in chosen.chunks_exact_mut(per_row).zip(all.chunks_exact(experts)) {
                match groups {
                    None => choose(chosen, row, |_| true),
                    Some(groups) => choose_in_groups(chosen, row, groups),
                }
            }
        });
        chosen
    }
}

/// Writes the indices of the largest `allowed` elements of `row`, the largest first, equal elements
/// in order.
fn choose<T: Float>(chosen: &mut [u32], row: &[T], allowed: impl Fn(usize) -> bool) {
    for i in 0..chosen.len() {
        let mut best: Option<usize> = None;
        for (expert, &score) in row.iter().enumerate() {
            let is_free = allowed(expert) && !chosen[..i].contains(&(expert as u32));
            if is_free && best.is_none_or(|best| score > row[best]) {
                best = Some(expert);
            }
        }
        // There are at least as many experts as choices.
        chosen[i] = best.unwrap_or_default() as u32;
    }
}

fn choose_in_groups<T: Float>(chosen: &mut [u32], row: &[T], groups: ExpertGroups) {
    let size = row.len() / groups.count;
    let two_best = |group: &[T]| {
        let mut best = [0; 2];
        choose(&mut best, group, |_| true);
        group[best[0] as usize] + group[best[1] as usize]
    };
    let scores: Vec<T> = row.chunks_exact(size).map(two_best).collect();
    let mut kept = vec![0; groups.per_row];
    choose(&mut kept, &scores, |_| true);
    choose(chosen, row, |expert| kept.contains(&((expert / size) as u32)));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn routing(rows: &[[f32; 4]], per_row: usize) -> Routing {
        let rows = Tensor::from_vec(rows.concat(), (rows.len(), 4), &Device::Cpu).unwrap();
        Routing::of(&rows, per_row, None).unwrap()
    }

    #[test]
    fn groups_are_chosen_by_their_two_best() {
        let rows = [
            // The best expert is in the second group, and the best pair in the third.
            [0.1f32, 0.1, 0.9, 0.0, 0.5, 0.6],
            // Equal groups: the first, and within it equal experts in order.
            [0.3, 0.3, 0.3, 0.3, 0.3, 0.3],
        ];
        let rows = Tensor::new(&rows, &Device::Cpu).unwrap();
        let chosen = |per_row, groups: [usize; 2]| {
            let [count, kept] = groups;
            let groups = Some(ExpertGroups { count, per_row: kept });
            Routing::of(&rows, per_row, groups).unwrap().experts
        };
        assert_eq!(chosen(2, [3, 1]), [5, 4, 0, 1]);
        assert_eq!(chosen(2, [3, 2]), [2, 5, 0, 1]);
        assert_eq!(chosen(3, [2, 1]), [5, 4, 3, 0, 1, 2]);
        assert_eq!(chosen(2, [1, 1]), [2, 5, 0, 1]);
    }

    #[test]
    fn scores_of_nan_stay_in_their_groups() {
        let rows = [[f32::NAN, f32::NEG_INFINITY, 1.0, f32::NAN], [f32::NAN; 4]];
        let rows = Tensor::new(&rows, &Device::Cpu).unwrap();
        let groups = Some(ExpertGroups { count: 2, per_row: 1 });
        let found = Routing::of(&rows, 2, groups).unwrap().experts;
        for row in found.chunks(2) {
            assert!(row[0] / 2 == row[1] / 2 && row[0] != row[1], "{found:?}");
        }
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
    fn non_finite_scores_choose_some_expert() {
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
        let found = Routing::of(&none, 2, None).unwrap();
        assert_eq!((found.len(), found.ranges.len()), (0, 4));
    }
}
