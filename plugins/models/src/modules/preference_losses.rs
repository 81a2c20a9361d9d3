//! Losses of pairs of answers, from the answers' log-probabilities.

use candle_core::{DType, Tensor};
use fulgurite_error::Result;
use fulgurite_nn::{Loss, functional};

/// The log-probabilities of a batch's answers, f32 `[pairs]` each.
pub(super) struct Answers {
    chosen: Tensor,
    rejected: Tensor,
    /// Those of the reference model; zeros without one.
    reference: [Tensor; 2],
    /// The tokens of each answer.
    tokens: [Tensor; 2],
}

impl Answers {
    /// Splits log-probabilities `[2 * pairs]`: the chosen and the rejected answer's of each pair.
    pub(super) fn new(
        policy: Tensor,
        reference: Option<Tensor>,
        answer_tokens: &[usize],
    ) -> Result<Self> {
        let pairs = answer_tokens.len() / 2;
        let halves = |both: &Tensor| -> Result<[Tensor; 2]> {
            let both = both.reshape((pairs, 2))?;
            Ok([both.narrow(1, 0, 1)?.flatten_all()?, both.narrow(1, 1, 1)?.flatten_all()?])
        };
        let [chosen, rejected] = halves(&policy)?;
        let reference = match reference {
            Some(reference) => halves(&reference.detach())?,
            None => [chosen.zeros_like()?.detach(), rejected.zeros_like()?.detach()],
        };
        let tokens: Vec<f32> = answer_tokens.iter().map(|&tokens| tokens.max(1) as f32).collect();
        let tokens = halves(&Tensor::from_vec(tokens, 2 * pairs, policy.device())?)?;
        Ok(Self { chosen, rejected, reference, tokens })
    }

    fn pairs(&self) -> f64 {
        self.chosen.elem_count() as f64
    }

    /// The log-ratios of policy and reference: chosen, rejected.
    fn ratios(&self) -> Result<[Tensor; 2]> {
        let [chosen, rejected] = &self.reference;
        Ok([(&self.chosen - chosen)?, (&self.rejected - rejected)?])
    }
}

/// What is minimised.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct PreferenceLoss {
    kind: Kind,
    beta: f64,
    label_smoothing: f64,
    nll_weight: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Dpo,
    Hinge,
    Ipo,
    Orpo,
}

impl PreferenceLoss {
    pub(super) const NAMES: [&'static str; 4] = ["dpo", "hinge", "ipo", "orpo"];

    /// The loss of this name.
    pub(super) fn named(
        name: &str,
        beta: f64,
        label_smoothing: f64,
        nll_weight: f64,
    ) -> Option<Self> {
        let kinds = [Kind::Dpo, Kind::Hinge, Kind::Ipo, Kind::Orpo];
        let index = Self::NAMES.iter().position(|known| *known == name)?;
        Some(Self { kind: kinds[index], beta, label_smoothing, nll_weight })
    }

    /// Whether it compares with a reference model.
    pub(super) fn needs_reference(&self) -> bool {
        self.kind != Kind::Orpo
    }

    /// The loss of all pairs; it counts pairs.
    pub(super) fn of(&self, answers: &Answers) -> Result<Loss> {
        let beta = self.beta;
        let [chosen, rejected] = answers.ratios()?;
        let margin = || -> Result<Tensor> { Ok(((&chosen - &rejected)? * beta)?) };
        let of_pairs = match self.kind {
            Kind::Dpo => {
                let (margin, smoothing) = (margin()?, self.label_smoothing);
                let right = minus_log_sigmoid(&margin)?;
                match smoothing {
                    0.0 => right,
                    _ => {
                        ((right * (1.0 - smoothing))?
                            + (minus_log_sigmoid(&margin.neg()?)? * smoothing)?)?
                    }
                }
            }
            Kind::Hinge => (margin()?.neg()? + 1.0)?.relu()?,
            Kind::Ipo => {
                let [of_chosen, of_rejected] = &answers.tokens;
                let difference = ((chosen / of_chosen)? - (rejected / of_rejected)?)?;
                (difference - 1.0 / (2.0 * beta))?.sqr()?
            }
            Kind::Orpo => {
                let [of_chosen, of_rejected] = &answers.tokens;
                let (chosen, rejected) = ((chosen / of_chosen)?, (rejected / of_rejected)?);
                // log(p / (1 - p)) of the mean probability of a token.
                let odds = |logp: &Tensor| -> Result<Tensor> {
                    Ok((logp - (logp.exp()?.neg()? + 1.0)?.log()?)?)
                };
                let ratio = (odds(&chosen)? - odds(&rejected)?)?;
                (chosen.neg()? + (minus_log_sigmoid(&ratio)? * beta)?)?
            }
        };
        let of_pairs = match self.nll_weight {
            0.0 => of_pairs,
            weight => (of_pairs - ((&answers.chosen / &answers.tokens[0])? * weight)?)?,
        };
        Ok(Loss::new(of_pairs.sum_all()?, answers.pairs()))
    }

    /// What is logged, by name: means over the pairs.
    pub(super) fn metrics(&self, answers: &Answers) -> Result<Vec<(&'static str, Tensor)>> {
        let [chosen, rejected] = answers.ratios()?;
        let [chosen, rejected] = [chosen.detach() * self.beta, rejected.detach() * self.beta];
        let (chosen, rejected) = (chosen?, rejected?);
        Ok(vec![
            ("reward_accuracy", chosen.gt(&rejected)?.to_dtype(DType::F32)?.mean_all()?),
            ("reward_margin", (&chosen - &rejected)?.mean_all()?),
            ("reward_chosen", chosen.mean_all()?),
            ("reward_rejected", rejected.mean_all()?),
        ])
    }
}

/// `-log sigmoid(x)`.
fn minus_log_sigmoid(x: &Tensor) -> Result<Tensor> {
    functional::softplus(&x.neg()?)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    /// The loss of two pairs, with log-probabilities and lengths by hand.
    fn loss(name: &str, beta: f64, label_smoothing: f64) -> f64 {
        let of = |values: &[f32]| Tensor::new(values, &Device::Cpu).unwrap();
        let policy = of(&[-3.0, -5.0, -10.0, -8.0]);
        let reference = of(&[-4.0, -4.0, -9.0, -9.5]);
        let answers = Answers::new(policy, Some(reference), &[2, 4, 5, 8]).unwrap();
        let loss = PreferenceLoss::named(name, beta, label_smoothing, 0.0).unwrap();
        let loss = loss.of(&answers).unwrap();
        assert_eq!(loss.count(), 2.0);
        loss.mean().unwrap()
    }

    fn close(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-6, "{found} {expected}");
    }

    #[test]
    fn losses_follow_their_formulas() {
        let softplus = |x: f64| (1.0 + x.exp()).ln();
        // The ratios are 1 and -1, and -1 and 1.5.
        let (first, second) = (2.0, -2.5);
        close(loss("dpo", 0.5, 0.0), (softplus(-0.5 * first) + softplus(-0.5 * second)) / 2.0);
        let smoothed = |margin: f64| 0.8 * softplus(-margin) + 0.2 * softplus(margin);
        close(loss("dpo", 0.5, 0.2), (smoothed(0.5 * first) + smoothed(0.5 * second)) / 2.0);
        close(loss("hinge", 0.5, 0.0), (0.0 + 1.0 + 0.5 * 2.5) / 2.0);
        let ipo: [f64; 2] = [1.0 / 2.0 + 1.0 / 4.0 - 1.0, -1.0 / 5.0 - 1.5 / 8.0 - 1.0];
        close(loss("ipo", 0.5, 0.0), (ipo[0].powi(2) + ipo[1].powi(2)) / 2.0);
        assert!(PreferenceLoss::named("other", 0.1, 0.0, 0.0).is_none());
    }

    #[test]
    fn large_margins_do_not_overflow() {
        let x = Tensor::new(&[-1000f32, 1000.0], &Device::Cpu).unwrap();
        assert_eq!(minus_log_sigmoid(&x).unwrap().to_vec1::<f32>().unwrap(), [1000.0, 0.0]);
    }
}
