//! [`Auto`], the configuration.

use std::sync::Arc;

use fulgurite_config::PluginValue;
use fulgurite_config::register_process_group;
use fulgurite_config::registry::{self, kind};
use fulgurite_engine::collective::{GroupContext, GroupMemory, ProcessGroup, ProcessGroupConfig};
use fulgurite_error::{Error, Result};
use serde::{Deserialize, Serialize};

use super::group::{Mixed, Parts};
use crate::Shm;

/// `process_group.type = "auto"`: shared memory within a host, and a network between hosts.
///
/// For a job on one host it is the same as `shm`. If every rank has its own device, such as an
/// NVIDIA GPU, and the program has a process group for such devices (`nccl`), that group carries
/// device tensors. This group then carries all other tensors.
#[derive(Debug, Clone, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct Auto {
    /// The process group between hosts: a name such as `"tcp"`, or a table with its options.
    /// `"auto"`: `mpi` if the program has it and an MPI launcher started it, else `tcp`.
    pub across: PluginValue,
    /// Whether groups with several ranks on each of several hosts communicate in levels: by shared
    /// memory within a host, and by one rank of each host between hosts. If false, they use only
    /// the network. The results are the same.
    pub levels: bool,
    /// Bytes that a rank transfers in one phase of a collective within its host, as
    /// [of `shm`](crate::Shm::chunk_bytes).
    pub chunk_bytes: usize,
}

impl Default for Auto {
    fn default() -> Self {
        let chunk_bytes = Shm::default().chunk_bytes;
        Self { across: PluginValue::new("auto"), levels: true, chunk_bytes }
    }
}

register_process_group!(
    "auto",
    Auto,
    "shm within a host, and between hosts tcp or mpi",
    "{ type = \"auto\", across = { type = \"tcp\", interface = \"eth1\" } }"
);

/// Variables of MPI launchers; each launcher sets one.
const MPI_VARIABLES: [&str; 3] = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"];

impl Auto {
    /// The process group within hosts.
    fn shm(&self) -> Shm {
        Shm { chunk_bytes: self.chunk_bytes }
    }

    /// The process group between hosts.
    fn network(&self) -> Result<Box<dyn ProcessGroupConfig>> {
        let across = match self.across.name.as_str() {
            "auto" if self.across.options.is_empty() => {
                let started_by_mpi =
                    MPI_VARIABLES.iter().any(|name| std::env::var_os(name).is_some());
                let linked = registry::names(kind::PROCESS_GROUP).contains(&"mpi");
                &PluginValue::new(if started_by_mpi && linked { "mpi" } else { "tcp" })
            }
            "auto" | "shm" => {
                return Err(Error::Config(format!(
                    "trainer.process_group.across is `{}`; it must be a process group across hosts, such \
                     as \"tcp\"",
                    self.across.name
                )));
            }
            _ => &self.across,
        };
        let network: Box<dyn ProcessGroupConfig> =
            across.build(kind::PROCESS_GROUP, "trainer.process_group.across")?;
        network.check()?;
        Ok(network)
    }
}

#[typetag::serde(name = "auto")]
impl ProcessGroupConfig for Auto {
    fn check(&self) -> Result<()> {
        self.shm().check()?;
        self.network().map(drop)
    }

    fn memory(&self, ranks: usize) -> GroupMemory {
        self.shm().memory(ranks)
    }

    fn leaves_devices_open(&self) -> bool {
        true
    }

    fn build(&self, context: &GroupContext) -> Result<Arc<dyn ProcessGroup>> {
        let network = self.network()?;
        if context.local_world_size == context.world_size {
            return self.shm().build(context);
        }
        let hosts = hosts(context)?;
        let members = |host: usize| -> Vec<usize> {
            (0..hosts.len()).filter(|&rank| hosts[rank] == host).collect()
        };
        let here = members(hosts[context.rank]);
        if here.len() != context.local_world_size {
            return Err(Error::Launch(format!(
                "of the ranks, {here:?} say that they are on node {}, but each says that {} are: the \
                 launcher's node ranks and local sizes do not fit",
                hosts[context.rank], context.local_world_size
            )));
        }
        let across = network.build(context)?;
        let own = here.iter().position(|&rank| rank == context.rank).unwrap_or(0);
        let key = format!("node{}/", hosts[context.rank]);
        let local = crate::shm::connect_ranks(&self.shm(), context, &key, here, own)?;
        let parts = Parts { across, local, hosts: hosts.into(), levels: self.levels };
        Mixed::of_all("world", parts)
    }
}

/// Returns the node of each rank. Collective.
fn hosts(context: &GroupContext) -> Result<Vec<usize>> {
    let GroupContext { store, rank, world_size, .. } = context;
    let build = store.add(&format!("process_group/auto/builds/{rank}"), 1)?;
    let key = |what: &dyn std::fmt::Display| format!("process_group/auto/{build}/{what}");
    store.set(&key(rank), context.node_rank.to_string().as_bytes())?;
    let parse = |bytes: Vec<u8>| -> Result<Vec<usize>> {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let nodes = text.split(',').map(str::parse).collect::<Result<_, _>>();
        nodes.map_err(|e| Error::Launch(format!("the store's nodes of ranks are `{text}`: {e}")))
    };
    // One rank reads all nodes, so that the number of requests to the store is linear in the number
    // of ranks.
    if *rank == 0 {
        let nodes = (0..*world_size).map(|rank| {
            let node = store.get(&key(&rank), context.timeout)?;
            Ok(String::from_utf8_lossy(&node).into_owned())
        });
        let nodes = nodes.collect::<Result<Vec<_>>>()?.join(",");
        store.set(&key(&"all"), nodes.as_bytes())?;
    }
    let nodes = parse(store.get(&key(&"all"), context.timeout)?)?;
    match nodes.len() == *world_size {
        true => Ok(nodes),
        false => Err(Error::Launch(format!(
            "the store has the nodes of {} ranks; there are {world_size}",
            nodes.len()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    #[test]
    fn options_are_checked() {
        let config = |json: &str| serde_json::from_str::<Auto>(json).unwrap();
        config("{}").check().unwrap();
        config(r#"{ "across": { "type": "tcp", "interface": "lo" } }"#).check().unwrap();
        let error = |json| config(json).check().unwrap_err().to_string();
        assert_says!(error(r#"{ "across": "shm" }"#), "trainer.process_group.across is `shm` …");
        assert_says!(
            error(r#"{ "across": "infiniband" }"#),
            "unknown process_group `infiniband` …"
        );
        assert_says!(
            error(r#"{ "across": { "type": "tcp", "ports": [2, 1] } }"#),
            "trainer.process_group.ports is [2, 1] … first and the last … from 1 on"
        );
    }
}
