//! [`Predictions`].

use std::collections::HashMap;
use std::path::Path;

use candle_core::{Device, Tensor};

use crate::{Error, Result};

/// What a module predicted for this rank's samples.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Predictions {
    /// The samples of each batch, and what [`predict_step`](super::LightningModule::predict_step) returned for
    /// it. Over all ranks each sample comes once.
    pub batches: Vec<(Vec<u64>, Tensor)>,
}

impl Predictions {
    /// The samples (`[n]`, i64), and the outputs of all batches joined along their first dimension (`[n, ..]`);
    /// `None` if this rank had no sample.
    ///
    /// # Errors
    /// If an output does not have one row a sample, or outputs differ in their other dimensions.
    pub fn joined(&self) -> Result<Option<(Tensor, Tensor)>> {
        for (samples, output) in &self.batches {
            if output.dims().first() != Some(&samples.len()) {
                return Err(Error::other(format!(
                    "predictions of {} samples have the shape {:?}; to be joined they need one row a \
                     sample",
                    samples.len(),
                    output.dims()
                )));
            }
        }
        if self.batches.is_empty() {
            return Ok(None);
        }
        let samples: Vec<i64> =
            self.batches.iter().flat_map(|(samples, _)| samples).map(|&i| i as i64).collect();
        let count = samples.len();
        let outputs: Vec<&Tensor> = self.batches.iter().map(|(_, output)| output).collect();
        let samples = Tensor::from_vec(samples, count, &Device::Cpu)?;
        Ok(Some((samples, Tensor::cat(&outputs, 0)?)))
    }

    /// Writes [`joined`](Self::joined) as `samples` and `outputs` to a safetensors file.
    ///
    /// # Errors
    /// As [`joined`](Self::joined), and if the file cannot be written.
    pub fn save(&self, path: &Path) -> Result<()> {
        let tensors = match self.joined()? {
            Some((samples, outputs)) => HashMap::from([("samples", samples), ("outputs", outputs)]),
            None => HashMap::new(),
        };
        let saved = candle_core::safetensors::save(&tensors, path);
        saved.map_err(|e| Error::other(format!("writing predictions to {}: {e}", path.display())))
    }
}
