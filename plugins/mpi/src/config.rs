//! [`Mpi`], the configuration.

use std::sync::Arc;

use fulgurite_config::register_process_group;
use fulgurite_engine::collective::{GroupContext, ProcessGroup, ProcessGroupConfig};
use fulgurite_error::{Error, Result};
use serde::{Deserialize, Serialize};

/// `process_group.type = "mpi"`: messages of the MPI library that the program was built with.
///
/// The ranks must be started by a launcher of that library's family (`mpirun`, `mpiexec`,
/// `srun --mpi=…`).
#[derive(
    Debug, Clone, PartialEq, Eq, Serialize, Deserialize, fulgurite_config_derive::Documented,
)]
#[serde(deny_unknown_fields, default)]
pub struct Mpi {
    /// Bytes that a rank receives in one round of a reduction, 64 KiB to 1 GiB, which each group
    /// holds. The same on all ranks.
    #[default(4 << 20)]
    pub chunk_bytes: usize,
    /// Bytes of the longest message for MPI, 1 to 2147483647. Longer messages are sent in pieces of
    /// this size, one after the other. A wait lasts up to the timeout after each piece. The same on
    /// all ranks.
    #[default(64 << 20)]
    pub piece_bytes: usize,
}

register_process_group!(
    "mpi",
    Mpi,
    "messages of an MPI library, between ranks that mpirun or srun started",
    "{ type = \"mpi\" }"
);

#[typetag::serde(name = "mpi")]
impl ProcessGroupConfig for Mpi {
    fn check(&self) -> Result<()> {
        if !(64 << 10..=1 << 30).contains(&self.chunk_bytes) {
            return Err(Error::Config(format!(
                "trainer.process_group.chunk_bytes is {}; it must be between 65536 (64 KiB) and \
                 1073741824 (1 GiB)",
                self.chunk_bytes
            )));
        }
        if !(1..=i32::MAX as usize).contains(&self.piece_bytes) {
            return Err(Error::Config(format!(
                "trainer.process_group.piece_bytes is {}; it must be between 1 and 2147483647, the most \
                 that MPI counts",
                self.piece_bytes
            )));
        }
        if cfg!(not(feature = "mpi")) {
            return Err(Error::Config(
                "trainer.process_group.type is \"mpi\", but this program was built without an MPI library. \
                 Build it with the cargo feature `mpi` of `fulgurite` (or of `fulgurite-mpi`), which needs \
                 the library's `mpicc` and libclang"
                    .to_owned(),
            ));
        }
        Ok(())
    }

    fn build(&self, context: &GroupContext) -> Result<Arc<dyn ProcessGroup>> {
        self.check()?;
        build(self, context)
    }
}

#[cfg(feature = "mpi")]
fn build(config: &Mpi, context: &GroupContext) -> Result<Arc<dyn ProcessGroup>> {
    use fulgurite_engine::collective::Solo;
    use fulgurite_transports::network::connect_world;

    if context.world_size == 1 {
        // A single rank exchanges no messages, and may run without an MPI launcher.
        return Ok(Arc::new(Solo::new("world", 0)));
    }
    let network = crate::MpiNetwork::new(config, context)?;
    connect_world(Arc::new(network), context, config.chunk_bytes)
}

#[cfg(not(feature = "mpi"))]
fn build(_: &Mpi, _: &GroupContext) -> Result<Arc<dyn ProcessGroup>> {
    unreachable!("`check` refuses it")
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    fn error(json: &str) -> String {
        let config: Mpi = serde_json::from_str(json).unwrap();
        config.check().unwrap_err().to_string()
    }

    #[test]
    fn options_out_of_range_are_refused() {
        assert_says!(error(r#"{ "chunk_bytes": 1 }"#), "trainer.process_group.chunk_bytes is 1; …");
        assert_says!(error(r#"{ "piece_bytes": 0 }"#), "trainer.process_group.piece_bytes is 0; …");
        assert_says!(
            error(r#"{ "piece_bytes": 2147483648 }"#),
            "trainer.process_group.piece_bytes is 2147483648 … between 1 and 2147483647 …"
        );
    }

    #[cfg(not(feature = "mpi"))]
    #[test]
    fn check_refuses_builds_without_mpi() {
        assert_says!(error("{}"), r#"trainer.process_group.type is "mpi" … without … `mpi` …"#);
    }
}
