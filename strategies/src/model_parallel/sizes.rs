//! Configured sizes of the mesh's dimensions.

use fulgurite_config::{Scalar, deserialize_scalar};
use fulgurite_engine::strategy::BuildContext;
use fulgurite_error::{Error, Result, counted};
use serde::{Deserialize, Serialize};

use super::ModelParallel;

/// The size of a mesh dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Size {
    /// Lightning's sizes if data and tensor parallelism are both automatic: the number of hosts,
    /// and the ranks of a host. Otherwise like [`Rest`](Self::Rest).
    Auto,
    /// The remaining ranks; other automatic sizes are then 1.
    Rest,
    /// A number of ranks.
    Ranks(usize),
}

impl Size {
    /// The number of ranks; `None` if it follows from the world size.
    fn ranks(self) -> Option<usize> {
        match self {
            Self::Auto | Self::Rest => None,
            Self::Ranks(n) => Some(n),
        }
    }
}

impl Serialize for Size {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => serializer.serialize_str("auto"),
            Self::Rest => serializer.serialize_str("rest"),
            Self::Ranks(n) => serializer.serialize_u64(*n as u64),
        }
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_scalar(deserializer, "a number of ranks, \"auto\" or \"rest\"", |value| {
            match value {
                Scalar::Int(ranks) => usize::try_from(*ranks).ok().map(Self::Ranks),
                Scalar::Text(text) if text == "auto" => Some(Self::Auto),
                Scalar::Text(text) if text == "rest" => Some(Self::Rest),
                _ => None,
            }
        })
    }
}

/// The sizes of all dimensions.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) replicate: Size,
    pub(super) shard: Size,
    pub(super) context: Size,
    pub(super) tensor: Size,
}

impl Sizes {
    /// The defaults of `model_parallel`.
    pub(super) const AUTO: Self = Self {
        replicate: Size::Ranks(1),
        shard: Size::Auto,
        context: Size::Ranks(1),
        tensor: Size::Auto,
    };

    /// These defaults for the ranks of one stage: open sizes are sharded.
    pub(super) fn of_stages(self) -> Self {
        match (self.shard, self.tensor) {
            (Size::Auto, Size::Auto) => Self { shard: Size::Rest, tensor: Size::Ranks(1), ..self },
            _ => self,
        }
    }

    /// Applies the configuration's sizes over these defaults.
    ///
    /// # Errors
    /// If the configured sizes contradict each other.
    pub(super) fn given(self, config: &ModelParallel) -> Result<Self> {
        let replicate = config.data_parallel_replicate_size.unwrap_or(self.replicate);
        let shard = match (config.data_parallel_size, config.data_parallel_shard_size) {
            (Some(_), Some(_)) => {
                return Err(Error::Config(
                    "`trainer.strategy` has both `data_parallel_size` and \
                     `data_parallel_shard_size`; keep one: the first is the second times \
                     `data_parallel_replicate_size`"
                        .to_owned(),
                ));
            }
            (None, shard) => shard.unwrap_or(self.shard),
            (Some(open @ (Size::Auto | Size::Rest)), None) => open,
            (Some(Size::Ranks(n)), None) => match replicate {
                Size::Ranks(replicas) if replicas > 0 && n.is_multiple_of(replicas) => {
                    Size::Ranks(n / replicas)
                }
                Size::Ranks(replicas) => {
                    return Err(Error::Config(format!(
                        "`trainer.strategy.data_parallel_size` = {n} is not divisible by \
                         `data_parallel_replicate_size` = {replicas}"
                    )));
                }
                Size::Auto | Size::Rest => {
                    return Err(Error::Config(
                        "`trainer.strategy.data_parallel_size` and an automatic \
                         `data_parallel_replicate_size` do not say how many ranks shard; give \
                         `data_parallel_shard_size`"
                            .to_owned(),
                    ));
                }
            },
        };
        let context = config.context_parallel_size.unwrap_or(self.context);
        let tensor = config.tensor_parallel_size.unwrap_or(self.tensor);
        Ok(Self { replicate, shard, context, tensor })
    }

    /// The sizes of replicate, shard, context and tensor in a run; `None` for sizes that take the
    /// remaining ranks.
    ///
    /// # Errors
    /// If data and tensor parallelism are both automatic, and the hosts do not divide the ranks,
    /// the replicas the hosts, or the context ranks the ranks of a host.
    pub(super) fn resolve(self, context: &BuildContext) -> Result<[Option<usize>; 4]> {
        let Self { replicate, shard, context: sequence, tensor } = self;
        let all = [replicate, shard, sequence, tensor];
        if all.contains(&Size::Rest) {
            let beside_the_rest =
                |size| if size == Size::Auto { Some(1) } else { Size::ranks(size) };
            return Ok(all.map(beside_the_rest));
        }
        if (shard, tensor) != (Size::Auto, Size::Auto) || context.world_size == 0 {
            return Ok(all.map(Size::ranks));
        }
        let nodes = context.num_nodes.max(1);
        let replicas = replicate.ranks().unwrap_or(1);
        let sharing = sequence.ranks().unwrap_or(1);
        let local = context.world_size / nodes;
        let divides = |n: usize, by: usize| by > 0 && n.is_multiple_of(by);
        if !divides(context.world_size, nodes)
            || !divides(nodes, replicas)
            || !divides(local, sharing)
        {
            return Err(Error::Mesh(format!(
                "sizes of data and tensor parallelism that are both \"auto\" are {} and the \
                 {} of each; of these `data_parallel_replicate_size` = {replicas} does not divide \
                 the first or `context_parallel_size` = {sharing} the second. Give one of \
                 `data_parallel_shard_size` and `tensor_parallel_size`, as a number or as \"rest\"",
                counted(nodes, "host"),
                counted(local, "rank")
            )));
        }
        Ok([Some(replicas), Some(nodes / replicas), Some(sharing), Some(local / sharing)])
    }
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    fn sizes(config: &str, ranks: usize, nodes: usize) -> Result<[Option<usize>; 4]> {
        let config: ModelParallel = serde_json::from_str(config).map_err(Error::other)?;
        Sizes::AUTO.given(&config)?.resolve(&BuildContext::new(ranks).on_nodes(nodes))
    }

    // checklist: Lightning: data_parallel_size, tensor_parallel_size, "auto"
    #[test]
    fn both_automatic_match_lightning() {
        for config in [
            "{}",
            r#"{"data_parallel_size": "auto"}"#,
            r#"{"data_parallel_shard_size": "auto", "tensor_parallel_size": "auto"}"#,
        ] {
            let all = |ranks, nodes| sizes(config, ranks, nodes).unwrap().map(Option::unwrap);
            assert_eq!(all(8, 1), [1, 1, 1, 8]);
            assert_eq!(all(8, 2), [1, 2, 1, 4]);
            assert_eq!(all(1, 1), [1, 1, 1, 1]);
        }
        let replicas = r#"{"data_parallel_replicate_size": 2, "context_parallel_size": 2}"#;
        assert_eq!(sizes(replicas, 16, 4).unwrap(), [2, 2, 2, 2].map(Some));
    }

    // checklist: Lightning: data_parallel_size, tensor_parallel_size, "auto"
    #[test]
    fn a_given_size_leaves_the_rest_to_the_other() {
        let open = |config| sizes(config, 8, 2).unwrap();
        assert_eq!(open(r#"{"tensor_parallel_size": 2}"#), [Some(1), None, Some(1), Some(2)]);
        assert_eq!(open(r#"{"data_parallel_size": 4}"#), [Some(1), Some(4), Some(1), None]);
        // Purely data-parallel.
        let rest = r#"{"data_parallel_shard_size": "rest"}"#;
        assert_eq!(open(rest), [Some(1), None, Some(1), Some(1)]);
        let rest = r#"{"tensor_parallel_size": "rest"}"#;
        assert_eq!(open(rest), [Some(1), Some(1), Some(1), None]);
        let both = r#"{"data_parallel_replicate_size": "rest", "data_parallel_shard_size": 2}"#;
        assert_eq!(open(both), [None, Some(2), Some(1), Some(1)]);
    }

    #[test]
    fn indivisible_sizes_are_refused() {
        let error = |config, ranks, nodes| sizes(config, ranks, nodes).unwrap_err().to_string();
        assert_says!(
            error(r#"{"context_parallel_size": 3}"#, 8, 2),
            r#"device mesh … both "auto" … does not divide … `context_parallel_size` = 3 …"#
        );
        assert_says!(
            error(r#"{"data_parallel_replicate_size": 2}"#, 4, 1),
            r#"device mesh … both "auto" … `data_parallel_replicate_size` = 2 does not divide …"#
        );
        assert_says!(
            error(r#"{"tensor_parallel_size": "all"}"#, 4, 1),
            r#"invalid value: string "all" … a number of ranks, "auto" or "rest" …"#
        );
    }
}
