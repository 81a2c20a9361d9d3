//! Terms of attention's scores that depend on the distance between query and key.

use std::ops::Range;

use candle_core::Tensor;

use super::embedding::Embedding;
use crate::{Error, Result};
use fulgurite_engine::module::{Module as _, ModuleBuilder};
use fulgurite_engine::parameter::Init;

/// The shape of a [`RelativePositionBias`].
#[derive(Debug, Clone, Copy)]
pub struct RelativePositionBiasConfig {
    /// Number of attention heads.
    pub num_heads: usize,
    /// Number of buckets, even and at least 4. T5's `relative_attention_num_buckets`.
    pub num_buckets: usize,
    /// The distance from which on all are in the last bucket. T5's
    /// `relative_attention_max_distance`.
    pub max_distance: usize,
    /// Whether queries attend to keys on both sides, which then have half of the buckets each.
    /// Otherwise keys behind the query share the bucket of distance 0.
    pub both_sides: bool,
    /// Initial values.
    pub init: Init,
}

impl RelativePositionBiasConfig {
    /// T5's 32 buckets up to distance 128, from zero.
    pub fn new(num_heads: usize, both_sides: bool) -> Self {
        Self { num_heads, num_buckets: 32, max_distance: 128, both_sides, init: Init::ZEROS }
    }
}

/// A learned term of the scores for each head and bucket of distances, as in T5: small distances
/// have a bucket each, and larger ones share buckets that grow with the logarithm.
///
/// The table is an [`Embedding`]: the parameter `weight`, `[num_buckets, num_heads]`. Under a
/// tensor-parallel plan it is colwise with output `shard(-1)`, so that each rank has the terms of
/// its own heads.
///
/// ```
/// use fulgurite_core::module::{ModuleBuilder, ModuleInit};
/// # use fulgurite_core::autograd::storage;
/// use fulgurite_core::nn::{RelativePositionBias, RelativePositionBiasConfig};
///
/// let b = ModuleBuilder::new(ModuleInit::default());
/// let config = RelativePositionBiasConfig::new(8, true);
/// let bias = RelativePositionBias::new(&b.pp("position_bias"), &config)?;
/// # for slot in b.finish()?.slots() { storage::allocate(slot.compute()?)?; }
/// assert_eq!(bias.forward(0..5, 7)?.dims(), [1, 8, 5, 7]);
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct RelativePositionBias {
    table: Embedding,
    num_buckets: usize,
    max_distance: usize,
    both_sides: bool,
}

impl RelativePositionBias {
    /// A table of this shape.
    ///
    /// # Errors
    /// - There are no heads.
    /// - The number of buckets is odd or below 4.
    /// - `max_distance` is within the distances that have a bucket of their own.
    /// - The builder's path has a layer already.
    pub fn new(b: &ModuleBuilder, config: &RelativePositionBiasConfig) -> Result<Self> {
        let RelativePositionBiasConfig { num_heads, num_buckets, max_distance, both_sides, init } =
            *config;
        let wrong = |message: String| Err(Error::module(b.path(), message));
        if num_buckets < 4 || !num_buckets.is_multiple_of(2) {
            return wrong(format!(
                "{num_buckets} buckets of distances; expected an even number from 4 on"
            ));
        }
        let exact = exact_distances(num_buckets, both_sides);
        if max_distance <= exact {
            return wrong(format!(
                "a largest distance of {max_distance} for {num_buckets} buckets, of which the first \
                 {exact} are for one distance each; it must be above that"
            ));
        }
        let table = Embedding::with_init(b, num_buckets, num_heads, init)?;
        Ok(Self { table, num_buckets, max_distance, both_sides })
    }

    /// Returns the terms of the scores of these queries and of keys from position 0 on:
    /// `[1, heads, queries, keys]`, with the heads of this rank.
    ///
    /// # Errors
    /// If candle reports an error.
    pub fn forward(&self, queries: Range<usize>, keys: usize) -> Result<Tensor> {
        let sizes = (queries.len(), keys);
        let ids: Vec<u32> = queries
            .flat_map(|query| (0..keys).map(move |key| (query, key)))
            .map(|(q, k)| self.bucket(q, k))
            .collect();
        let ids = Tensor::from_vec(ids, sizes, self.table.weight().device())?;
        let bias = self.table.forward(&ids)?;
        Ok(bias.permute((2, 0, 1))?.unsqueeze(0)?.contiguous()?)
    }

    /// The bucket of the distance from a query to a key.
    fn bucket(&self, query: usize, key: usize) -> u32 {
        let (first, distance) = match self.both_sides {
            true if key > query => (self.num_buckets / 2, key - query),
            _ => (0, query.saturating_sub(key)),
        };
        let buckets = if self.both_sides { self.num_buckets / 2 } else { self.num_buckets };
        let exact = exact_distances(self.num_buckets, self.both_sides);
        let within = match distance < exact {
            true => distance,
            false => {
                // In f32, as in `transformers`, so that borders are where its are.
                let ratio = (distance as f32 / exact as f32).ln();
                let ratio = ratio / (self.max_distance as f64 / exact as f64).ln() as f32;
                let further = (ratio * (buckets - exact) as f32) as usize;
                (exact + further).min(buckets - 1)
            }
        };
        (first + within) as u32
    }
}

/// The number of distances that have a bucket of their own.
fn exact_distances(num_buckets: usize, both_sides: bool) -> usize {
    if both_sides { num_buckets / 4 } else { num_buckets / 2 }
}
