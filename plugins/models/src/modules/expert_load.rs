//! The loads of experts, as values that training logs.

use candle_core::{Device, Tensor};
use fulgurite_engine::execution::dry_run;
use fulgurite_error::Result;
use fulgurite_nn::ExpertLoad;
use fulgurite_trainer::metric::Metric;
use fulgurite_trainer::trainer::StepContext;

use crate::decoder::{Decoder, LoadLog};

/// The name under which values are logged.
const NAME: &str = "expert_load";

/// Logs the loads of a decoder's experts in the forwards since the last call, if the step is
/// logged. Under a pipeline the last stage logs the loads of all stages.
pub(super) fn log_expert_load(model: &Decoder, ctx: &mut StepContext) {
    let take = |(layer, load): (usize, &ExpertLoad)| LayerLoad {
        layer,
        counts: load.take(),
        dropped: load.take_dropped(),
    };
    let layers: Vec<LayerLoad> = model.expert_loads().map(take).collect();
    let log = model.load_log();
    // A plan has no values to log.
    let is_logged = ctx.is_logged() && !dry_run::is_on();
    if !layers.is_empty() && log != LoadLog::None && is_logged {
        ctx.log(NAME, ExpertLoads { layers, log });
    }
}

/// The rows of each expert in each layer that has experts.
#[derive(Debug)]
struct ExpertLoads {
    layers: Vec<LayerLoad>,
    log: LoadLog,
}

/// The rows of the experts of a layer.
#[derive(Debug)]
struct LayerLoad {
    layer: usize,
    /// Each expert's rows, before choices are dropped.
    counts: Vec<f64>,
    /// Number of dropped choices; `None` without a capacity.
    dropped: Option<f64>,
}

/// The shares of experts in one layer.
struct Shares<'a> {
    layer: usize,
    counts: &'a [f64],
    total: f64,
    dropped: Option<f64>,
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
        for LayerLoad { layer, counts, dropped } in &self.layers {
            let (counts, rest) = state.split_at(counts.len().min(state.len()));
            let (own, rest) = rest.split_at(rest.len().min(usize::from(dropped.is_some())));
            let (total, dropped) = (counts.iter().sum(), own.first().copied());
            all.push(Shares { layer: *layer, counts, total, dropped });
            state = rest;
        }
        all.retain(|shares| shares.total > 0.0);
        all
    }
}

impl Metric for ExpertLoads {
    fn state(&self) -> Result<Tensor> {
        let mut counts: Vec<f64> = Vec::new();
        for layer in &self.layers {
            counts.extend(layer.counts.iter().copied().chain(layer.dropped));
        }
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
        let mut add = |path: &str, [max, min, entropy]: [f64; 3], dropped: Option<f64>| {
            values.push((format!("{path}.max_share"), max));
            values.push((format!("{path}.min_share"), min));
            values.push((format!("{path}.entropy"), entropy));
            values.extend(dropped.map(|share| (format!("{path}.dropped_share"), share)));
        };
        if self.log == LoadLog::Summary {
            if !all.is_empty() {
                let max = all.iter().map(Shares::max).fold(0.0, f64::max);
                let min = all.iter().map(Shares::min).fold(1.0, f64::min);
                let entropy = all.iter().map(Shares::entropy).sum::<f64>() / all.len() as f64;
                let total: f64 = all.iter().map(|shares| shares.total).sum();
                let dropped: Option<f64> = all.iter().map(|shares| shares.dropped).sum();
                add(name, [max, min, entropy], dropped.map(|dropped| dropped / total));
            }
            return values;
        }
        for shares in &all {
            let path = format!("{name}.{}", shares.layer);
            let dropped = shares.dropped.map(|dropped| dropped / shares.total);
            add(&path, [shares.max(), shares.min(), shares.entropy()], dropped);
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

    fn loads(log: LoadLog, dropped: Option<f64>) -> ExpertLoads {
        let layer = |layer| LayerLoad { layer, counts: vec![0.0; 2], dropped };
        ExpertLoads { layers: [1, 2, 3].map(layer).into(), log }
    }

    fn values(log: LoadLog) -> Vec<(String, f64)> {
        // The second layer has computed nothing.
        loads(log, None).compute_all("load", &[3.0, 1.0, 0.0, 0.0, 2.0, 2.0])
    }

    fn named(values: &[(&str, f64)]) -> Vec<(String, f64)> {
        values.iter().map(|(name, x)| ((*name).to_owned(), *x)).collect()
    }

    #[test]
    fn shares_are_of_rows_in_a_layer() {
        let entropy = -(0.75 * 0.75f64.ln() + 0.25 * 0.25f64.ln()) / 2f64.ln();
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

    #[test]
    fn dropped_shares_are_of_choices() {
        let values = |log| {
            let state = [3.0, 1.0, 1.0, 0.0, 0.0, 0.0, 2.0, 2.0, 0.0];
            let mut values = loads(log, Some(5.0)).compute_all("load", &state);
            values.retain(|(name, _)| name.contains("dropped"));
            values
        };
        let layers = named(&[("load.1.dropped_share", 0.25), ("load.3.dropped_share", 0.0)]);
        assert_eq!(values(LoadLog::Layers), layers);
        assert_eq!(values(LoadLog::Experts), layers);
        assert_eq!(values(LoadLog::Summary), named(&[("load.dropped_share", 0.125)]));
        let state = loads(LoadLog::Summary, Some(5.0)).state().unwrap();
        assert_eq!(state.to_vec1::<f64>().unwrap(), [0.0, 0.0, 5.0].repeat(3));
    }
}
