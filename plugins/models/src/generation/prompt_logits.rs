//! [`Decoder::prompt_logits`].

use candle_core::{DType, Tensor};
use fulgurite_engine::autograd::no_grad;
use fulgurite_engine::execution::read;
use fulgurite_error::{Error, Result};

use crate::decoder::Decoder;

/// Positions whose logits are in memory at a time.
const POSITIONS: usize = 64;

impl Decoder {
    /// Computes the logits of the token after each of `ids`, by one forward without gradients, and
    /// calls `each` with every position and its logits, f32 `[vocabulary]`, in order. Collective if
    /// the model is sharded.
    ///
    /// # Errors
    /// If `ids` is empty or too long, or has a token that the model lacks. Also if a logit is NaN,
    /// or a peer fails.
    pub fn prompt_logits(&self, ids: &[u32], each: &mut dyn FnMut(usize, &[f32])) -> Result<()> {
        self.check_prompt(ids, 1)?;
        let _no_grad = no_grad();
        let ids = Tensor::from_slice(ids, (1, ids.len()), self.device())?;
        let hidden = self.hidden(&ids)?;
        let length = hidden.dim(1)?;
        for start in (0..length).step_by(POSITIONS) {
            let part = hidden.narrow(1, start, POSITIONS.min(length - start))?;
            let logits = self.logits(&part.contiguous()?)?.squeeze(0)?;
            let width = logits.dim(1)?;
            let logits = logits.to_dtype(DType::F32)?.flatten_all()?;
            let logits: Vec<f32> = read::vec1(&logits, "logits")?;
            for (position, logits) in (start..).zip(logits.chunks_exact(width)) {
                if let Some(at) = logits.iter().position(|logit| logit.is_nan()) {
                    return Err(Error::other(format!(
                        "the logit of token {at} is not a number, after token {position} of the prompt"
                    )));
                }
                each(position, logits);
            }
        }
        Ok(())
    }
}
