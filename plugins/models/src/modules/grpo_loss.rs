//! The loss of rewarded answers.

use candle_core::{Device, Tensor, WithDType};
use fulgurite_error::Result;
use fulgurite_nn::Loss;

use super::grpo::SampledAnswer;
use super::grpo_config::{GrpoConfig, GrpoLoss, SamplingLevel, ScaleRewards};

/// TRL's bound of the divisor of advantages.
const STD_EPSILON: f64 = 1e-4;

/// The count of a batch whose answers are all left out: no division by zero, and less than a
/// rounding beside other batches.
const NO_TOKENS: f64 = 1e-9;

/// Rewards compared with the rewards of their group, and metrics of the groups.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Advantages {
    /// Of each answer.
    pub(super) values: Vec<f64>,
    /// The mean of the groups' standard deviations.
    pub(super) mean_std: f64,
    /// The share of groups whose rewards are all equal, which teach nothing.
    pub(super) equal_share: f64,
}

impl Advantages {
    /// Compares `rewards`, in groups of `samples`, as TRL. `all` are the rewards of all ranks.
    pub(super) fn new(rewards: &[f64], samples: usize, scale: ScaleRewards, all: &[f64]) -> Self {
        let mut values = Vec::with_capacity(rewards.len());
        let (mut stds, mut equal) = (0.0, 0.0);
        for group in rewards.chunks_exact(samples) {
            let (mean, std) = mean_and_std(group);
            let divisor = match scale {
                ScaleRewards::Group => std + STD_EPSILON,
                ScaleRewards::Batch => mean_and_std(all).1 + STD_EPSILON,
                ScaleRewards::None => 1.0,
            };
            values.extend(group.iter().map(|reward| (reward - mean) / divisor));
            stds += std;
            equal += f64::from(u8::from(group.iter().all(|reward| *reward == group[0])));
        }
        let groups = (rewards.len() / samples).max(1) as f64;
        Self { values, mean_std: stds / groups, equal_share: equal / groups }
    }
}

/// The mean and the standard deviation of a sample.
fn mean_and_std(rewards: &[f64]) -> (f64, f64) {
    let count = rewards.len() as f64;
    let mean = rewards.iter().sum::<f64>() / count;
    let squares = rewards.iter().map(|reward| (reward - mean).powi(2)).sum::<f64>();
    (mean, (squares / (count - 1.0)).sqrt())
}

/// The tokens of rewarded answers, one after another.
#[derive(Debug, Clone)]
pub(super) struct RewardedTokens {
    /// The log-probabilities with which the answers were sampled, f32 `[tokens]`.
    pub(super) sampled: Tensor,
    /// The log-probabilities of the reference model, f32 `[tokens]`.
    pub(super) reference: Option<Tensor>,
    /// The advantage of each token's answer, f32 `[tokens]`.
    advantages: Tensor,
    /// The weight of each token, f32 `[tokens]`.
    weights: Tensor,
    /// The answer of each token, u32 `[tokens]`.
    answers: Tensor,
    /// The number of tokens of each answer, f32 `[answers]`.
    lengths: Tensor,
    count: f64,
}

impl RewardedTokens {
    /// The tokens of `answers`. With `mask_truncated`, truncated answers have no weight.
    ///
    /// # Errors
    /// If candle cannot make the tensors.
    pub(super) fn new(
        config: &GrpoConfig,
        answers: &[SampledAnswer],
        sampled: Tensor,
        reference: Option<Tensor>,
    ) -> Result<Self> {
        let (mut advantages, mut weights, mut tokens) = (Vec::new(), Vec::new(), 0);
        let (mut of_answer, mut lengths) = (Vec::new(), Vec::new());
        for (index, answer) in answers.iter().enumerate() {
            let length = answer.ids.len();
            of_answer.resize(of_answer.len() + length, index as u32);
            lengths.push(length as f32);
            advantages.resize(advantages.len() + length, answer.advantage as f32);
            let is_learned = !(config.mask_truncated && answer.is_truncated);
            let weight = match (is_learned, config.loss) {
                (false, _) => 0.0,
                (true, GrpoLoss::Grpo) => 1.0 / length as f32,
                (true, GrpoLoss::Dapo | GrpoLoss::DrGrpo | GrpoLoss::Cispo) => 1.0,
            };
            weights.resize(weights.len() + length, weight);
            tokens += if is_learned { length } else { 0 };
        }
        let count = match config.loss {
            GrpoLoss::Grpo => answers.len() as f64,
            GrpoLoss::Dapo | GrpoLoss::Cispo if tokens == 0 => NO_TOKENS,
            GrpoLoss::Dapo | GrpoLoss::Cispo => tokens as f64,
            GrpoLoss::DrGrpo => (answers.len() * config.max_new_tokens) as f64,
        };
        let device = sampled.device();
        fn tensor<T: WithDType>(values: Vec<T>, device: &Device) -> Result<Tensor> {
            let len = values.len();
            Ok(Tensor::from_vec(values, len, &Device::Cpu)?.to_device(device)?)
        }
        let (advantages, weights) = (tensor(advantages, device)?, tensor(weights, device)?);
        let (answers, lengths) = (tensor(of_answer, device)?, tensor(lengths, device)?);
        Ok(Self { sampled, reference, advantages, weights, answers, lengths, count })
    }

    /// The logarithm of the ratio that counts for each token, f32 `[tokens]`, of a policy with
    /// these log-probabilities, f32 `[tokens]`.
    ///
    /// # Errors
    /// If candle cannot compute it.
    pub(super) fn log_ratio(&self, level: SamplingLevel, policy: &Tensor) -> Result<Tensor> {
        let of_tokens = (policy - &self.sampled)?;
        match level {
            SamplingLevel::Token => Ok(of_tokens),
            SamplingLevel::Sequence => {
                let sums = self.lengths.zeros_like()?.index_add(&self.answers, &of_tokens, 0)?;
                Ok((sums / &self.lengths)?.index_select(&self.answers, 0)?)
            }
        }
    }

    /// The loss of a policy with these log-probabilities, f32 `[tokens]`: for each token
    /// `-min(ratio a, clamp(ratio) a) + beta (exp(d) - d - 1)`, where `d` is the reference's
    /// log-probability less the policy's.
    ///
    /// # Errors
    /// If candle cannot compute it.
    pub(super) fn loss(&self, config: &GrpoConfig, policy: &Tensor) -> Result<Loss> {
        let ratio = self.log_ratio(config.importance_sampling_level, policy)?.exp()?;
        let range = config.ratios();
        // A clipped ratio is a constant.
        let clipped = ratio.detach().clamp(*range.start(), *range.end())?;
        let mut losses = if config.loss == GrpoLoss::Cispo {
            ((clipped * &self.advantages)? * policy)?.neg()?
        } else {
            let ratio = match config.delta {
                None => ratio,
                Some(delta) => {
                    let bounded = ratio.detach().clamp(f64::NEG_INFINITY, delta)?;
                    ratio.le(delta)?.where_cond(&ratio, &bounded)?
                }
            };
            let gain = (ratio * &self.advantages)?;
            let clipped = (clipped * &self.advantages)?;
            gain.le(&clipped)?.where_cond(&gain, &clipped)?.neg()?
        };
        if let Some(reference) = &self.reference {
            let difference = (reference - policy)?;
            let divergence = ((difference.exp()? - difference)? - 1.0)?;
            losses = (losses + (divergence * config.beta)?)?;
        }
        Ok(Loss::new((losses * &self.weights)?.sum_all()?, self.count))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Var;

    use super::*;

    fn row(values: &[f32]) -> Tensor {
        Tensor::new(values, &Device::Cpu).unwrap()
    }

    #[test]
    fn advantages_equal_a_hand_count() {
        let rewards = [1.0, 0.0, 0.0, 1.0, 2.0, 2.0, 2.0, 2.0];
        let found = Advantages::new(&rewards, 4, ScaleRewards::Group, &[]);
        let std = (1.0f64 / 3.0).sqrt();
        let one = 0.5 / (std + 1e-4);
        assert_eq!(found.values, [one, -one, -one, one, 0.0, 0.0, 0.0, 0.0]);
        assert_eq!((found.mean_std, found.equal_share), (std / 2.0, 0.5));
        let plain = Advantages::new(&[1.0, 0.0], 2, ScaleRewards::None, &[]);
        assert_eq!(plain.values, [0.5, -0.5]);
        // Of this rank's rewards and another's.
        let all = [1.0, 0.0, 3.0, 0.0];
        let of_batch = Advantages::new(&[1.0, 0.0], 2, ScaleRewards::Batch, &all);
        let one = 0.5 / (2.0f64.sqrt() + 1e-4);
        assert_eq!(of_batch.values, [one, -one]);
    }

    /// Two answers, of 2 and 3 tokens, the second truncated.
    fn loss(config: &GrpoConfig, policy: &[f32]) -> (f64, Vec<f32>, f64) {
        let answer = |tokens: usize, advantage, is_truncated| SampledAnswer {
            prompt: vec![0],
            ids: vec![0; tokens],
            log_probabilities: Vec::new(),
            advantage,
            is_truncated,
        };
        let answers = [answer(2, 1.5, false), answer(3, -0.5, true)];
        let sampled = row(&SAMPLED);
        let reference = (config.beta > 0.0).then(|| row(&[-1.1, -1.5, -0.5, -1.0, -2.0]));
        let tokens = RewardedTokens::new(config, &answers, sampled, reference);
        let policy = Var::from_tensor(&row(policy)).unwrap();
        let loss = tokens.unwrap().loss(config, &policy).unwrap();
        let grad = loss.sum().backward().unwrap();
        let grad = grad.get(&policy).unwrap().to_vec1::<f32>().unwrap();
        (loss.mean().unwrap(), grad, loss.count())
    }

    const SAMPLED: [f32; 5] = [-1.0, -2.0, -0.5, -0.7, -3.0];

    #[test]
    fn weights_follow_the_loss() {
        let of = |loss| GrpoConfig { loss, max_new_tokens: 10, ..GrpoConfig::default() };
        // On policy each token's loss is minus its advantage.
        let (mean, grad, count) = loss(&of(GrpoLoss::Dapo), &SAMPLED);
        assert_eq!((mean, count), (f64::from(-3.0f32 + 1.5) / 5.0, 5.0));
        assert_eq!(grad, [-1.5, -1.5, 0.5, 0.5, 0.5]);
        let (mean, _, count) = loss(&of(GrpoLoss::Grpo), &SAMPLED);
        assert!((mean - (-1.5 + 0.5) / 2.0).abs() < 1e-7 && count == 2.0, "{mean}");
        let (mean, _, count) = loss(&of(GrpoLoss::DrGrpo), &SAMPLED);
        assert_eq!((mean, count), (-1.5 / 20.0, 20.0));
        let masked = GrpoConfig { mask_truncated: true, ..of(GrpoLoss::Dapo) };
        let (mean, grad, count) = loss(&masked, &SAMPLED);
        assert_eq!((mean, count), (-1.5, 2.0));
        assert_eq!(grad[2..], [0.0; 3]);
    }

    #[test]
    fn masked_answers_alone_teach_nothing() {
        for loss in [GrpoLoss::Dapo, GrpoLoss::Grpo, GrpoLoss::DrGrpo] {
            let config = GrpoConfig { mask_truncated: true, loss, ..GrpoConfig::default() };
            let answer = SampledAnswer {
                prompt: vec![0],
                ids: vec![0; 2],
                log_probabilities: vec![-1.0; 2],
                advantage: 1.0,
                is_truncated: true,
            };
            let tokens = RewardedTokens::new(&config, &[answer], row(&[-1.0; 2]), None).unwrap();
            let loss = tokens.loss(&config, &row(&[-0.5; 2])).unwrap();
            assert_eq!(loss.mean().unwrap(), 0.0);
        }
    }

    #[test]
    fn clipped_ratios_have_no_gradient() {
        let config = GrpoConfig { epsilon_high: Some(0.3), ..GrpoConfig::default() };
        // Ratios 1.35, 0.7, 1.35, 0.7 and 1: only gains beyond the bounds are clipped.
        let shift = [1.35f32, 0.7, 1.35, 0.7, 1.0].map(f32::ln);
        let policy: Vec<f32> = SAMPLED.iter().zip(shift).map(|(old, shift)| old + shift).collect();
        let (mean, grad, _) = loss(&config, &policy);
        let wanted = [-1.5 * 1.3, -1.5 * 0.7, 0.5 * 1.35, 0.5 * 0.8, 0.5];
        assert!((mean * 5.0 - wanted.iter().sum::<f64>()).abs() < 1e-6, "{mean}");
        for (i, (found, wanted)) in grad.iter().zip([0.0, -1.05, 0.675, 0.0, 0.5]).enumerate() {
            assert!((found - wanted).abs() < 1e-5, "{i}: {grad:?}");
        }
    }

    #[test]
    fn divergence_is_not_negative() {
        let config = GrpoConfig { beta: 0.5, ..GrpoConfig::default() };
        let without = loss(&GrpoConfig::default(), &SAMPLED).0;
        let differences = [-0.1f64, 0.5, 0.0, -0.3, 1.0];
        let divergence: f64 = differences.iter().map(|d| d.exp() - d - 1.0).sum();
        let found = loss(&config, &SAMPLED).0 - without;
        assert!((found - 0.5 * divergence / 5.0).abs() < 1e-6, "{found}");
    }
}
