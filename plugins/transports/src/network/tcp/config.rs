//! [`Tcp`], the configuration.

use std::sync::Arc;

use fulgurite_config::register_process_group;
use fulgurite_engine::collective::{GroupContext, ProcessGroup, ProcessGroupConfig};
use fulgurite_error::{Error, Result};
use serde::{Deserialize, Serialize};

use super::network::TcpNetwork;
use crate::network::connect_world;

/// `process_group.type = "tcp"`: connections between the ranks, of one host or of several.
#[derive(
    Debug, Clone, PartialEq, Eq, Serialize, Deserialize, fulgurite_config_derive::Documented,
)]
#[serde(deny_unknown_fields, default)]
pub struct Tcp {
    /// The network interface that ranks listen on and connect from: its name (`eth1`), or an IP
    /// address of this host. By default, the interface through which the host reaches rank 0's.
    /// With several hosts, give a name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interface: Option<String>,
    /// The first and the last port that ranks listen on, for firewalls: one port for each rank of a
    /// host. By default any free port.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ports: Option<[u16; 2]>,
    /// Bytes that a rank receives in one round of a reduction, 64 KiB to 1 GiB, which each group
    /// holds. The same on all ranks.
    #[default(4 << 20)]
    pub chunk_bytes: usize,
}

register_process_group!(
    "tcp",
    Tcp,
    "connections between the ranks, of one host or several",
    "{ type = \"tcp\", interface = \"eth1\", ports = [29600, 29699] }"
);

#[typetag::serde(name = "tcp")]
impl ProcessGroupConfig for Tcp {
    fn check(&self) -> Result<()> {
        if !(64 << 10..=1 << 30).contains(&self.chunk_bytes) {
            return Err(Error::Config(format!(
                "trainer.process_group.chunk_bytes is {}; it must be between 65536 (64 KiB) and \
                 1073741824 (1 GiB)",
                self.chunk_bytes
            )));
        }
        match self.ports {
            Some([first, last]) if first == 0 || first > last => Err(Error::Config(format!(
                "trainer.process_group.ports is [{first}, {last}]; it must be the first and the last of \
                 a range of ports, from 1 on"
            ))),
            _ => Ok(()),
        }
    }

    fn build(&self, context: &GroupContext) -> Result<Arc<dyn ProcessGroup>> {
        self.check()?;
        let network = TcpNetwork::new(self, context)?;
        connect_world(Arc::new(network), context, self.chunk_bytes)
    }
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    #[test]
    fn options_out_of_range_are_refused() {
        let error = |json: &str| {
            let config: Tcp = serde_json::from_str(json).unwrap();
            config.check().unwrap_err().to_string()
        };
        assert_says!(error(r#"{ "chunk_bytes": 1 }"#), "trainer.process_group.chunk_bytes is 1; …");
        assert_says!(error(r#"{ "ports": [0, 5] }"#), "trainer.process_group.ports is [0, 5] …");
        assert_says!(error(r#"{ "ports": [6, 5] }"#), "trainer.process_group.ports is [6, 5] …");
    }
}
