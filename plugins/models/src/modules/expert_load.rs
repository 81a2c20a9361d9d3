//! The loads of experts, as values that training logs.

use candle_core::{Device, Tensor};
use fulgurite_engine::execution::dry_run;
use fulgurite_error::Result;
use fulgurite_trainer::metric::Metric;
use fulgurite_trainer::trainer::StepContext;

use crate::decoder::{Decoder, LoadLog};

/// The name under which values are logged.
const NAME: &str = "expert_load";

/// Logs the loads of a decoder's experts in the forwards since the last call, if the step is
/// logged. Under a pipeline the last stage logs those of all stages.
pub(super) fn log_expert_load(model: &Decoder, ctx: &mut StepContext) {
    let counts: Vec<(usize, Vec<f64>)> =
        model.expert_loads().map(|(layer, load)| (layer, load.take())).collect();
    let log = model.load_log();
    // A plan has no values to log.
    let is_logged = ctx.is_logged() && !dry_run::is_on();
    if !counts.is_empty() && log != LoadLog::None && is_logged {
        ctx.log(NAME, ExpertLoads { counts, log });
    }
}

/// The rows of each expert in each layer that has experts.
#[derive(Debug)]
struct ExpertLoads {
    counts: Vec<(usize, Vec<f64>)>,
    log: LoadLog,
}

/// The shares of experts in one layer.
struct Shares<'a> {
    layer: usize,
    counts: &'a [f64],
    total: f64,
}

impl Shares<'_> {
    fn iter(&self) -> impl Iterator<Item = f64> {
        self.counts.iter().map(|count| count / self.total)
    }

    fn max(&self) -> f64 {
        self.iter().fold(0.0, f64::max)
    }

    fn min(&self) -> f64 {
        self.iter().fold(1.0, f64::min)
    }

    /// The entropy of the shares, of the largest that there can be.
    fn entropy(&self) -> f64 {
        let entropy: f64 = self.iter().filter(|share| *share > 0.0).map(|p| -p * p.ln()).sum();
        match self.counts.len() {
            1 => 1.0,
            experts => entropy / (experts as f64).ln(),
        }
    }
}

impl ExpertLoads {
    /// The shares in the layers that have computed rows.
    fn shares<'a>(&self, mut state: &'a [f64]) -> Vec<Shares<'a>> {
        let mut all = Vec::new();
        for (layer, counts) in &self.counts {
            let (own, rest) = state.split_at(counts.len().min(state.len()));
            let total = own.iter().sum();
            all.push(Shares { layer: *layer, counts: own, total });
            state = rest;
        }
        all.retain(|shares| shares.total > 0.0);
        all
    }
}

impl Metric for ExpertLoads {
    fn state(&self) -> Result<Tensor> {
        let counts: Vec<f64> = self.counts.iter().flat_map(|(_, counts)| counts).copied().collect();
        let len = counts.len();
        Ok(Tensor::from_vec(counts, len, &Device::Cpu)?)
    }

    /// Returns the largest share in any layer.
    fn compute(&self, state: &[f64]) -> f64 {
        self.shares(state).iter().map(Shares::max).fold(f64::NAN, f64::max)
    }

    fn compute_all(&self, name: &str, state: &[f64]) -> Vec<(String, f64)> {
        let all = self.shares(state);
        let mut values = Vec::new();
        let mut add = |path: &str, [max, min, entropy]: [f64; 3]| {
            values.push((format!("{path}.max_share"), max));
            values.push((format!("{path}.min_share"), min));
            values.push((format!("{path}.entropy"), entropy));
        };
        if self.log == LoadLog::Summary {
            if !all.is_empty() {
                let max = all.iter().map(Shares::max).fold(0.0, f64::max);
                let min = all.iter().map(Shares::min).fold(1.0, f64::min);
                let entropy = all.iter().map(Shares::entropy).sum::<f64>() / all.len() as f64;
                add(name, [max, min, entropy]);
            }
            return values;
        }
        for shares in &all {
            let path = format!("{name}.{}", shares.layer);
            add(&path, [shares.max(), shares.min(), shares.entropy()]);
        }
        if self.log == LoadLog::Experts {
            for shares in &all {
                let path = format!("{name}.{}.share", shares.layer);
                let of = shares.iter().enumerate();
                values.extend(of.map(|(expert, share)| (format!("{path}.{expert}"), share)));
            }
        }
        values
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(log: LoadLog) -> Vec<(String, f64)> {
        let counts = vec![(1, vec![0.0; 2]), (2, vec![0.0; 2]), (3, vec![0.0; 2])];
        let metric = ExpertLoads { counts, log };
        // The second layer has computed nothing.
        metric.compute_all("load", &[3.0, 1.0, 0.0, 0.0, 2.0, 2.0])
    }

    #[test]
    fn shares_are_of_rows_in_a_layer() {
        let entropy = -(0.75 * 0.75f64.ln() + 0.25 * 0.25f64.ln()) / 2f64.ln();
        let named = |values: &[(&str, f64)]| {
            values.iter().map(|(name, x)| ((*name).to_owned(), *x)).collect::<Vec<_>>()
        };
        let layers = [
            ("load.1.max_share", 0.75),
            ("load.1.min_share", 0.25),
            ("load.1.entropy", entropy),
            ("load.3.max_share", 0.5),
            ("load.3.min_share", 0.5),
            ("load.3.entropy", 1.0),
        ];
        assert_eq!(values(LoadLog::Layers), named(&layers));
        let experts = values(LoadLog::Experts);
        assert_eq!(experts[..6], named(&layers));
        assert_eq!(experts[6..8], named(&[("load.1.share.0", 0.75), ("load.1.share.1", 0.25)]));
        let found = values(LoadLog::Summary);
        assert_eq!(found[..2], named(&[("load.max_share", 0.75), ("load.min_share", 0.25)]));
        assert!((found[2].1 - (1.0 + entropy) / 2.0).abs() < 1e-12);
    }
}
