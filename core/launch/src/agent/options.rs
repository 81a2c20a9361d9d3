//! Options of an agent.

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use crate::{Error, Result};

/// Options of an agent. [`nodes`](Self::nodes), [`max_restarts`](Self::max_restarts),
/// [`endpoints`](Self::endpoints) and [`id`](Self::id) must be equal on all nodes.
#[derive(Debug, Clone)]
pub struct AgentOptions {
    /// The program that ranks run.
    pub program: OsString,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// Number of ranks on this node; 0 for an agent that only coordinates the others.
    pub devices: usize,
    /// The allowed numbers of nodes.
    pub nodes: Nodes,
    /// This node's place among the nodes; by default agents are placed in the order of joining.
    pub node_rank: Option<usize>,
    /// The agents' rendezvous; none for a job of one node. Of an odd number of endpoints, the job
    /// goes on while a majority of their hosts is there.
    pub endpoints: Vec<Endpoint>,
    /// The job's id; by default the coordinator chooses one at random.
    pub id: Option<String>,
    /// Maximum number of restarts after failures.
    pub max_restarts: u64,
    /// Whether SIGTERM takes this node out of an elastic job, which goes on without it if it can.
    pub leave_on_sigterm: bool,
    /// This host's address for the other hosts; by default the address of the interface towards the
    /// endpoint.
    pub local_address: Option<IpAddr>,
    /// A file with the job's secret, if it is not in `FULGURITE_JOB_KEY`.
    pub job_key_file: Option<PathBuf>,
    /// The directory for the ranks' output, which goes to the job's own subdirectory.
    pub log_dir: Option<PathBuf>,
    /// Whether output is also shown with the rank as a prefix, in addition to files.
    pub tee: bool,
    /// How long agents wait for the others to join.
    pub join_timeout: Duration,
    /// How long to wait for further nodes once there are enough.
    pub last_call: Duration,
    /// Time without a heartbeat after which an agent is lost.
    pub keep_alive: Duration,
}

/// The allowed numbers of nodes: `2`, or `1:4`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Nodes {
    /// The job does not start with fewer.
    pub least: usize,
    /// Further nodes wait.
    pub most: usize,
}

impl Nodes {
    /// One node.
    pub const ONE: Self = Self { least: 1, most: 1 };
    /// The maximum for any job.
    pub(super) const LIMIT: usize = 4096;
}

impl std::fmt::Display for Nodes {
    /// In the format that is parsed.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.least == self.most {
            true => write!(f, "{}", self.most),
            false => write!(f, "{}:{}", self.least, self.most),
        }
    }
}

impl FromStr for Nodes {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (least, most) = text.split_once(':').unwrap_or((text, text));
        let parse = |text: &str| text.trim().parse::<usize>().ok();
        match (parse(least), parse(most)) {
            (Some(least), Some(most)) if 0 < least && least <= most && most <= Self::LIMIT => {
                Ok(Self { least, most })
            }
            _ => Err(Error::Launch(format!(
                "the nodes are `{text}`; they should be a number such as 2, or the least and the most such as \
                 1:4, of 1 to {}",
                Self::LIMIT
            ))),
        }
    }
}

/// The agents' rendezvous: `node0:29400`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// A host's name or address.
    pub host: String,
    /// A free port on that host.
    pub port: u16,
}

impl Endpoint {
    /// The default port, as in `torchrun`.
    pub const PORT: u16 = 29400;
}

impl FromStr for Endpoint {
    type Err = Error;

    /// `host`, `host:port`, `[address]:port` of IPv6.
    fn from_str(text: &str) -> Result<Self> {
        let wrong = || {
            Error::Launch(format!(
                "the rendezvous endpoint is `{text}`; it should be a host and a port such as \
                 node0:29400, [fd00::1]:29400 or 10.0.0.1:29400"
            ))
        };
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (host, rest) = rest.split_once(']').ok_or_else(wrong)?;
                (host, rest.strip_prefix(':'))
            }
            None => match text.rsplit_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (text, None),
            },
        };
        let port = port.map_or(Ok(Self::PORT), |port| port.parse().map_err(|_| wrong()))?;
        let plain = !text.starts_with('[') && host.contains(':');
        if host.is_empty() || plain || port == 0 {
            return Err(wrong());
        }
        Ok(Self { host: host.to_owned(), port })
    }
}

impl std::fmt::Display for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

/// The endpoints as they are given.
pub(super) fn listed(endpoints: &[Endpoint]) -> String {
    endpoints.iter().map(Endpoint::to_string).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    #[test]
    fn nodes_are_a_number_or_a_range() {
        let parse = |text: &str| text.parse::<Nodes>().map(|nodes| (nodes.least, nodes.most));
        assert_eq!(parse("2").unwrap(), (2, 2));
        assert_eq!(parse("1:4").unwrap(), (1, 4));
        for wrong in ["", "0", "4:1", "1:", "two", "1:2:3", "5000"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        assert_says!(parse("4:1").unwrap_err(), "launch: the nodes are `4:1` … 1:4, of 1 to 4096");
    }

    #[test]
    fn an_endpoint_is_a_host_and_a_port() {
        let parse = |text: &str| text.parse::<Endpoint>().map(|endpoint| endpoint.to_string());
        assert_eq!(parse("node0").unwrap(), "node0:29400");
        assert_eq!(parse("10.0.0.1:7").unwrap(), "10.0.0.1:7");
        assert_eq!(parse("[fd00::1]:7").unwrap(), "[fd00::1]:7");
        for wrong in ["", ":7", "node0:", "node0:0", "node0:99999", "fd00::1", "[fd00::1"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        assert_says!(parse("node0:http").unwrap_err(), "launch … `node0:http` … host and a port …");
    }
}
