//! The gradient audit: parameters that got no gradient.

use super::StrategyState;
use crate::collective::ReduceOp;
use crate::config::UnusedParameters;
use crate::{Error, Result};
use candle_core::{Device, Tensor};

impl StrategyState {
    /// Looks for trainable parameters that got a gradient on no rank in this step. Collective over
    /// the world in the first step, and in every step under [`UnusedParameters::Ignore`].
    pub(super) fn audit(&mut self, policy: UnusedParameters) -> Result<()> {
        if self.audited && policy != UnusedParameters::Ignore {
            return Ok(());
        }
        let used: Vec<u8> = self.delivered.iter().map(|&used| u8::from(used)).collect();
        let n = used.len();
        let used = Tensor::from_vec(used, n, &Device::Cpu)?;
        self.mesh()?.world().all_reduce(&used, ReduceOp::Max)?.wait()?;
        let used = used.to_vec1::<u8>()?;
        let unused: Vec<_> = self
            .tree()?
            .trainable()
            .zip(used)
            .filter(|(_, used)| *used == 0)
            .map(|(parameter, _)| parameter.clone())
            .collect();
        match policy {
            UnusedParameters::Error if !unused.is_empty() => {
                let names = unused.iter().map(|p| p.fqn().to_owned()).collect();
                return Err(Error::UnusedParameters { names });
            }
            UnusedParameters::Ignore => unused.iter().for_each(|p| p.set_local_grad(None)),
            _ => {}
        }
        self.audited = true;
        Ok(())
    }
}
