//! Orders that mix several sources by weight: [`Mixture`].

use super::order::Sampler;
use crate::{Error, Result};
use fulgurite_tensor::random::{Purpose, Stream};

/// Limit of draws in a block.
const MAX_BLOCK: u64 = 1 << 20;

/// An order of samples that mixes sources by weight, regardless of their lengths. A short source
/// with a large weight is repeated, each time in another order.
///
/// Draws come in blocks. In each block a source has its share of places, in random order: weights
/// 0.7, 0.2 and 0.1 give blocks of ten. So counts are exact after every block. Weights with more
/// than six decimals are rounded to multiples of 2^-20 of their sum.
///
/// Indices run through the sources in order. Indices of the second source begin at the length of
/// the first.
///
/// ```
/// use fulgurite_core::data::{Mixture, Sampler};
///
/// // A hundred samples with the weight 3, and ten with the weight 1.
/// let mixture = Mixture::new(42, &[(3.0, 100), (1.0, 10)])?;
/// let of_first = (0..400).filter(|&i| mixture.sample(i).1 < 100).count();
/// assert_eq!(of_first, 300);
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Mixture {
    sources: Vec<Source>,
    /// Draws in a block.
    block: u64,
    stream: Stream,
}

#[derive(Debug, Clone)]
struct Source {
    /// The index of the source's first sample.
    first: u64,
    len: u64,
    /// The source's first place in a block before shuffling, and its number of places.
    first_place: u64,
    places: u64,
}

impl Mixture {
    /// A mixture of sources, given as weight and number of samples.
    ///
    /// # Errors
    /// If `sources` is empty, a source is empty, or a weight is not above 0.
    pub fn new(seed: u64, sources: &[(f64, u64)]) -> Result<Self> {
        if sources.is_empty() {
            return Err(Error::Data("a mixture needs at least one source".to_owned()));
        }
        for (i, (weight, len)) in sources.iter().enumerate() {
            if !(weight.is_finite() && *weight > 0.0) {
                return Err(Error::Config(format!(
                    "source {i} of the mixture has the weight {weight:?}, which must be above 0; leave \
                     out what is not wanted"
                )));
            }
            if *len == 0 {
                return Err(Error::Data(format!("source {i} of the mixture has no samples")));
            }
        }
        let weights: Vec<f64> = sources.iter().map(|(weight, _)| *weight).collect();
        let (mut first, mut first_place) = (0, 0);
        let mut mixed = Vec::new();
        for (places, (_, len)) in shares(&weights)?.into_iter().zip(sources) {
            mixed.push(Source { first, len: *len, first_place, places });
            (first, first_place) = (first + len, first_place + places);
        }
        let stream = Stream::new(seed, Purpose::Shuffle, "mixture");
        Ok(Self { sources: mixed, block: first_place, stream })
    }
}

impl Sampler for Mixture {
    /// The number of samples in all sources.
    fn epoch_len(&self) -> u64 {
        self.sources.iter().map(|source| source.len).sum()
    }

    fn sample(&self, position: u64) -> (u64, u64) {
        let (block, place) = (position / self.block, position % self.block);
        let place = self.stream.child(0).child(block).permute(self.block, place);
        let after = self.sources.partition_point(|source| source.first_place <= place);
        let source = &self.sources[after - 1]; // the first one has place 0
        let draw = block * source.places + (place - source.first_place);
        let (round, index) = (draw / source.len, draw % source.len);
        let order = self.stream.child(after as u64).child(round);
        (round, source.first + order.permute(source.len, index))
    }
}

/// The smallest whole numbers in the ratio of the weights.
fn shares(weights: &[f64]) -> Result<Vec<u64>> {
    let exact = (0..=6).map(|digits| 10_f64.powi(digits)).find_map(|scale| {
        let scaled: Vec<f64> = weights.iter().map(|weight| weight * scale).collect();
        let whole = |x: &f64| *x >= 0.5 && (x - x.round()).abs() <= 1e-9 * x;
        (scaled.iter().all(whole) && scaled.iter().sum::<f64>() <= MAX_BLOCK as f64)
            .then(|| scaled.iter().map(|x| x.round() as u64).collect::<Vec<_>>())
    });
    let mut shares = match exact {
        Some(shares) => shares,
        None => rounded(weights)?,
    };
    let divisor = shares.iter().copied().fold(0, gcd);
    shares.iter_mut().for_each(|share| *share /= divisor);
    Ok(shares)
}

/// Shares of a block of maximum size, rounded down. Sources that lost most get one more.
fn rounded(weights: &[f64]) -> Result<Vec<u64>> {
    let sum: f64 = weights.iter().sum();
    let exact: Vec<f64> = weights.iter().map(|w| w / sum * MAX_BLOCK as f64).collect();
    if exact.iter().any(|share| *share < 1.0) {
        return Err(Error::Config(format!(
            "the weights of a mixture {weights:?} differ by too much: each must be at least a \
             {MAX_BLOCK}th of their sum"
        )));
    }
    let mut shares: Vec<u64> = exact.iter().map(|share| *share as u64).collect();
    let mut by_loss: Vec<usize> = (0..weights.len()).collect();
    by_loss.sort_by(|&a, &b| exact[b].fract().total_cmp(&exact[a].fract()));
    let missing = MAX_BLOCK.saturating_sub(shares.iter().sum());
    by_loss.into_iter().take(missing as usize).for_each(|i| shares[i] += 1);
    Ok(shares)
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn block_counts_are_exact_and_rounds_complete(
            seed: u64, sources in prop::collection::vec((1u64..20, 1u64..30), 1..5), blocks in 1u64..20
        ) {
            let weighted: Vec<_> = sources.iter().map(|&(w, len)| (w as f64 / 100.0, len)).collect();
            let mixture = Mixture::new(seed, &weighted).unwrap();
            let divisor = sources.iter().fold(0, |all, &(w, _)| gcd(all, w));
            let block = sources.iter().map(|(w, _)| w / divisor).sum::<u64>();
            prop_assert_eq!(mixture.block, block);
            let mut draws: Vec<_> = (0..blocks * block).map(|i| mixture.sample(i)).collect();
            draws.sort_unstable();
            let mut first = 0;
            for (weight, len) in sources {
                let own = |index: &u64| (first..first + len).contains(index);
                let of: Vec<_> = draws.iter().filter(|(_, index)| own(index)).collect();
                let count = blocks * weight / divisor;
                prop_assert_eq!(of.len() as u64, count);
                // Whole rounds have each sample once, and the last round repeats none.
                for round in 0..count.div_ceil(len) {
                    let mut seen: Vec<_> = of.iter().filter(|(r, _)| *r == round).map(|(_, i)| i).collect();
                    let expected = len.min(count - round * len);
                    prop_assert_eq!(seen.len() as u64, expected);
                    seen.dedup();
                    prop_assert_eq!(seen.len() as u64, expected);
                }
                first += len;
            }
            prop_assert_eq!(mixture.epoch_len(), first);
        }

        #[test]
        fn any_weights_are_met_to_a_millionth(weights in prop::collection::vec(0.01f64..100.0, 1..6)) {
            let shares = shares(&weights).unwrap();
            let (sum, all) = (weights.iter().sum::<f64>(), shares.iter().sum::<u64>() as f64);
            for (weight, share) in weights.iter().zip(shares) {
                prop_assert!((weight / sum - share as f64 / all).abs() < 1e-6);
            }
        }
    }

    #[test]
    fn seeds_differ_and_sources_are_shuffled() {
        let draws = |seed| {
            let mixture = Mixture::new(seed, &[(0.5, 40), (0.5, 40)]).unwrap();
            (0..40).map(|i| mixture.sample(i).1).collect::<Vec<_>>()
        };
        assert_ne!(draws(1), draws(2));
        let of_first: Vec<_> = draws(1).into_iter().filter(|i| *i < 40).collect();
        let of_second: Vec<_> = draws(1).into_iter().filter(|i| *i >= 40).map(|i| i - 40).collect();
        assert!(!of_first.is_sorted() && of_first != of_second);
    }

    #[test]
    fn mistakes_are_explained() {
        let error = |sources: &[(f64, u64)]| Mixture::new(0, sources).unwrap_err();
        assert_says!(error(&[]), "data: a mixture needs at least one source");
        assert_says!(error(&[(1.0, 3), (0.0, 3)]), "source 1 … weight 0.0 … must be above 0 …");
        assert_says!(error(&[(f64::NAN, 3)]), "source 0 … weight NaN … must be above 0 …");
        assert_says!(error(&[(1.0, 0)]), "data: source 0 of the mixture has no samples");
        assert_says!(error(&[(1e9, 3), (1e-9, 3)]), "… [1000000000.0, 1e-9] differ by too much …");
    }
}
