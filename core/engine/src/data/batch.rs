//! Batches of token sequences.

use candle_core::Tensor;

use crate::{Error, Result};
use fulgurite_module::parallel::ContextParallel;

/// Token sequences with the next token at each position: a batch for a language model.
#[derive(Debug, Clone)]
pub struct TokenBatch {
    /// Token ids, u32, of shape (samples, sequence length).
    pub inputs: Tensor,
    /// The token id after each input, in the same shape. i64, so that an ignored target can be
    /// negative.
    pub targets: Tensor,
    /// The lengths of the documents in each sequence, if attention is to keep them apart: the
    /// batch's [`DataModule::documents`](super::DataModule::documents). The target of a document's
    /// last token is then ignored (-100).
    pub documents: Option<Vec<Vec<usize>>>,
}

impl TokenBatch {
    /// Number of samples.
    pub fn samples(&self) -> usize {
        self.inputs.dims().first().copied().unwrap_or(0)
    }

    /// Number of input tokens.
    pub fn tokens(&self) -> usize {
        self.inputs.elem_count()
    }

    /// This rank's part of the sequences under context parallelism.
    ///
    /// # Errors
    /// As [`ContextParallel::shard`]. If documents are to be kept apart, which needs whole
    /// sequences.
    pub fn shard_sequence(&self, context: &ContextParallel) -> Result<Self> {
        if self.documents.is_some() {
            return Err(Error::Config(format!(
                "documents that are kept apart (data.separate_documents) need whole sequences, and \
                 context_parallel_size is {}",
                context.size()
            )));
        }
        Ok(Self {
            inputs: context.shard(&self.inputs, 1)?,
            targets: context.shard(&self.targets, 1)?,
            documents: None,
        })
    }
}
