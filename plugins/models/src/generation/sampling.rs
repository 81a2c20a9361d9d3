//! The choice of the next token from its logits.

use std::cmp::Ordering;

use fulgurite_error::{Error, Result};

/// The choice of the next token.
///
/// The steps come in the order of `transformers`: the repetition penalty, the temperature, `top_k`,
/// `top_p` and `min_p`.
///
/// ```
/// use fulgurite_models::Sampling;
///
/// let greedy = Sampling::default();
/// assert_eq!(greedy.choose(&mut [0.5, 2.0, 1.0], &[], 0.9), 1);
/// let sampling = Sampling { temperature: 1.0, top_k: 2, ..greedy };
/// assert_eq!(sampling.choose(&mut [0.5, 2.0, 1.0], &[], 0.9), 2);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// Divisor of the logits; 0 takes the largest logit (greedy).
    pub temperature: f64,
    /// Samples from this many of the largest logits; 0 for all.
    pub top_k: usize,
    /// Samples from the fewest likely tokens whose probabilities add up to this; 1 for all.
    pub top_p: f64,
    /// Samples from tokens with at least this fraction of the largest probability; 0 for all.
    pub min_p: f64,
    /// Divides the positive logits of tokens in the prompt and the answer so far, and multiplies
    /// their negative ones; 1 changes nothing.
    pub repetition_penalty: f64,
}

impl Default for Sampling {
    /// The largest logit.
    fn default() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0 }
    }
}

impl Sampling {
    /// Checks the numbers.
    ///
    /// # Errors
    /// Names the first that is out of its range.
    pub fn check(&self) -> Result<()> {
        let Self { temperature, top_p, min_p, repetition_penalty, .. } = *self;
        let ranges = [
            ("temperature", temperature, (0.0..=1e6).contains(&temperature), "from 0 to 1e6"),
            ("top_p", top_p, top_p > 0.0 && top_p <= 1.0, "above 0 and at most 1"),
            ("min_p", min_p, (0.0..=1.0).contains(&min_p), "from 0 to 1"),
            (
                "repetition_penalty",
                repetition_penalty,
                repetition_penalty > 0.0 && repetition_penalty.is_finite(),
                "above 0",
            ),
        ];
        match ranges.into_iter().find(|(_, _, fits, _)| !fits) {
            None => Ok(()),
            Some((name, value, _, range)) => {
                Err(Error::Config(format!("`{name}`: must be {range}, found {value}")))
            }
        }
    }

    /// Returns the token for these logits, after the tokens `before`, by a `uniform` random number
    /// above 0 and below 1. Changes `logits`. Of equal logits the first counts.
    ///
    /// # Panics
    /// If `logits` is empty, or a token of `before` exceeds it.
    pub fn choose(&self, logits: &mut [f32], before: &[u32], uniform: f64) -> u32 {
        self.penalise(logits, before);
        if self.temperature == 0.0 {
            return greatest(logits);
        }
        let largest = f64::from(logits[greatest(logits) as usize]);
        let weight = |logit: f32| ((f64::from(logit) - largest) / self.temperature).exp();
        let limits = self.top_k > 0 || self.top_p < 1.0;
        let mut tokens: Vec<(u32, f64)> = (0..).zip(logits.iter().map(|&x| weight(x))).collect();
        if limits {
            self.keep_largest(&mut tokens);
        }
        if self.min_p > 0.0 {
            // The largest weight is 1, and `top_k` and `top_p` keep it.
            tokens.retain(|(_, weight)| *weight >= self.min_p);
        }
        let total: f64 = tokens.iter().map(|(_, weight)| weight).sum();
        let mut rest = uniform * total;
        for (token, weight) in &tokens {
            rest -= weight;
            if rest < 0.0 {
                return *token;
            }
        }
        // Rounding, or logits that are not numbers.
        tokens.iter().rev().find(|(_, weight)| *weight > 0.0).map_or(0, |(token, _)| *token)
    }

    /// Applies the repetition penalty.
    pub(super) fn penalise(&self, logits: &mut [f32], before: &[u32]) {
        if self.repetition_penalty == 1.0 {
            return;
        }
        let penalty = self.repetition_penalty as f32;
        let mut seen = before.to_vec();
        seen.sort_unstable();
        seen.dedup();
        for token in seen {
            let logit = &mut logits[token as usize];
            *logit = if *logit < 0.0 { *logit * penalty } else { *logit / penalty };
        }
    }

    /// Keeps the tokens that `top_k` and `top_p` allow, in descending order of their weights.
    fn keep_largest(&self, tokens: &mut Vec<(u32, f64)>) {
        let order = |a: &(u32, f64), b: &(u32, f64)| {
            b.1.partial_cmp(&a.1).unwrap_or(Ordering::Equal).then(a.0.cmp(&b.0))
        };
        if self.top_k > 0 && self.top_k < tokens.len() {
            tokens.select_nth_unstable_by(self.top_k - 1, order);
            // Tokens as likely as the last one stay, as in `transformers`.
            let least = tokens[self.top_k - 1].1;
            tokens.retain(|(_, weight)| *weight >= least);
        }
        tokens.sort_unstable_by(order);
        if self.top_p < 1.0 {
            let total: f64 = tokens.iter().map(|(_, weight)| weight).sum();
            let mut before = 0.0;
            let inside = tokens.iter().take_while(|(_, weight)| {
                let is_inside = before < self.top_p * total;
                before += weight;
                is_inside
            });
            let inside = inside.count().max(1);
            tokens.truncate(inside);
        }
    }
}

/// The first of the largest elements.
fn greatest(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (i, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = i;
        }
    }
    best as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 5] = [1.0, 3.0, 2.0, -1.0, 2.5];

    fn sampling() -> Sampling {
        Sampling { temperature: 1.0, ..Sampling::default() }
    }

    /// The tokens that some random number leads to.
    fn reached(sampling: Sampling) -> Vec<u32> {
        let mut found: Vec<u32> = (0..4000)
            .map(|i| sampling.choose(&mut LOGITS.clone(), &[], (f64::from(i) + 0.5) / 4000.0))
            .collect();
        found.sort_unstable();
        found.dedup();
        found
    }

    #[test]
    fn limits_keep_the_tokens_of_transformers() {
        assert_eq!(reached(sampling()), [0, 1, 2, 3, 4]);
        assert_eq!(reached(Sampling { top_k: 2, ..sampling() }), [1, 4]);
        assert_eq!(reached(Sampling { top_k: 9, ..sampling() }), [0, 1, 2, 3, 4]);
        // Probabilities 0.064, 0.470, 0.173, 0.009 and 0.285, and sums 0.470, 0.755, 0.928.
        assert_eq!(reached(Sampling { top_p: 0.46, ..sampling() }), [1]);
        assert_eq!(reached(Sampling { top_p: 0.48, ..sampling() }), [1, 4]);
        assert_eq!(reached(Sampling { top_p: 0.8, ..sampling() }), [1, 2, 4]);
        assert_eq!(reached(Sampling { min_p: 0.36, ..sampling() }), [1, 2, 4]);
        assert_eq!(reached(Sampling { min_p: 1.0, ..sampling() }), [1]);
        assert_eq!(reached(Sampling { temperature: 0.01, ..sampling() }), [1]);
    }

    #[test]
    fn shares_follow_the_softmax() {
        let mut counts = [0f64; 5];
        for i in 0..100_000 {
            let uniform = (f64::from(i) + 0.5) / 1e5;
            counts[sampling().choose(&mut LOGITS.clone(), &[], uniform) as usize] += 1e-5;
        }
        let exps = LOGITS.map(|x| f64::from(x).exp());
        let total: f64 = exps.iter().sum();
        for (count, exp) in counts.iter().zip(exps) {
            assert!((count - exp / total).abs() < 1e-4, "{count} {}", exp / total);
        }
    }

    #[test]
    fn penalty_lowers_each_seen_token_once() {
        let penalised = Sampling { repetition_penalty: 2.0, ..Sampling::default() };
        let mut logits = LOGITS;
        assert_eq!(penalised.choose(&mut logits, &[1, 3, 1], 0.0), 4);
        assert_eq!(logits, [1.0, 1.5, 2.0, -2.0, 2.5]);
    }

    #[test]
    fn numbers_out_of_range_are_named() {
        let message = |sampling: Sampling| sampling.check().unwrap_err().to_string();
        assert!(sampling().check().is_ok());
        for (wrong, name) in [
            (Sampling { temperature: -1.0, ..sampling() }, "temperature"),
            (Sampling { temperature: f64::NAN, ..sampling() }, "temperature"),
            (Sampling { top_p: 0.0, ..sampling() }, "top_p"),
            (Sampling { min_p: 1.5, ..sampling() }, "min_p"),
            (Sampling { repetition_penalty: 0.0, ..sampling() }, "repetition_penalty"),
        ] {
            assert!(message(wrong).starts_with(&format!("`{name}`: must be ")), "{name}");
        }
    }
}
