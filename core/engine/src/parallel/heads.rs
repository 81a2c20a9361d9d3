//! Attention heads over tensor-parallel ranks.

use crate::{Error, Result};

/// The heads of an attention layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub hidden_size: usize,
}

impl Heads {
    /// On how many neighbouring ranks each key and value head is, when `ranks` share the heads
    /// between them.
    ///
    /// # Errors
    /// If heads, key and value heads, or the hidden size do not divide; one message for each, as
    /// torchtune's `prepare_mha_for_tp` has. Fewer key and value heads than ranks are fine if they
    /// divide the ranks: neighbouring ranks then hold the same ones.
    pub fn kv_replicas(self, path: &str, ranks: usize) -> Result<usize> {
        let wrong = |message: String| Err(Error::Module { path: path.to_owned(), message });
        let Self { num_heads, num_kv_heads, hidden_size } = self;
        if !num_heads.is_multiple_of(ranks) {
            return wrong(format!(
                "{num_heads} attention heads are not divisible by tensor_parallel_size {ranks}; \
                 choose a size that divides them"
            ));
        }
        if !num_kv_heads.is_multiple_of(ranks) && !ranks.is_multiple_of(num_kv_heads) {
            return wrong(format!(
                "{num_kv_heads} key and value heads are not divisible by tensor_parallel_size \
                 {ranks}, nor does their number divide it, so that ranks could share them; choose \
                 another size"
            ));
        }
        if !hidden_size.is_multiple_of(ranks) {
            return wrong(format!(
                "the hidden size {hidden_size} is not divisible by tensor_parallel_size {ranks}; \
                 choose a size that divides it"
            ));
        }
        Ok(ranks.div_ceil(num_kv_heads).max(1))
    }
}
