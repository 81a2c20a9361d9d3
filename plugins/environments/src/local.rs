//! The environment `local`: a process without a launcher.

use fulgurite_config::register_environment;
use fulgurite_error::{Error, Result};
use fulgurite_launch::environment::{ClusterEnvironment, EnvironmentConfig, Variables};
use serde::{Deserialize, Serialize};

/// `environment.type = "local"`: this process is alone, and Fulgurite's launcher starts the other
/// ranks on this host. The default when no other environment is detected. Set it to use one node of
/// an allocation without the allocation's launcher.
#[derive(Debug, Clone, Default, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(deny_unknown_fields)]
pub struct Local {}

register_environment!(
    "local",
    Local,
    "One process, which starts the other ranks of this host itself",
    r#"{ type = "local" }"#
);

#[typetag::serde(name = "local")]
impl EnvironmentConfig for Local {
    fn priority(&self) -> i32 {
        -1000
    }

    fn detect(&self, _: &Variables) -> bool {
        true
    }

    fn build(&self, _: &Variables) -> Result<Box<dyn ClusterEnvironment>> {
        Ok(Box::new(SingleProcess))
    }
}

#[derive(Debug)]
struct SingleProcess;

impl ClusterEnvironment for SingleProcess {
    fn name(&self) -> &'static str {
        "local"
    }

    fn creates_processes_externally(&self) -> bool {
        false
    }

    fn world_size(&self) -> usize {
        1
    }

    fn global_rank(&self) -> usize {
        0
    }

    fn local_rank(&self) -> usize {
        0
    }

    fn local_world_size(&self) -> usize {
        1
    }

    fn node_rank(&self) -> usize {
        0
    }

    fn main_address(&self) -> String {
        "127.0.0.1".to_owned()
    }

    /// 0 for any free port: only processes started by this one need to know it.
    fn main_port(&self) -> u16 {
        0
    }

    fn job_id(&self) -> String {
        std::process::id().to_string()
    }

    fn validate_settings(&self, devices: usize, num_nodes: usize) -> Result<()> {
        if num_nodes == 1 {
            return Ok(());
        }
        Err(Error::Launch(format!(
            "trainer.devices = {devices} and trainer.num_nodes = {num_nodes} make {} ranks, but \
             nobody started this process as one of them. Ranks of several nodes need a launcher: \
             `srun`, or on every node `torchrun --nnodes {num_nodes} --nproc-per-node {devices} \
             --no-python PROGRAM`, or whatever sets RANK, WORLD_SIZE, LOCAL_RANK, \
             LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
            devices.saturating_mul(num_nodes)
        )))
    }
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    #[test]
    fn several_nodes_need_a_launcher() {
        let alone = Local {}.build(&Variables::default()).unwrap();
        alone.validate_settings(7, 1).unwrap();
        assert!(alone.validate_settings(usize::MAX, 2).is_err());
        assert_says!(alone.validate_settings(2, 3).unwrap_err(), "launch: … 6 ranks, but nobody …");
    }
}
