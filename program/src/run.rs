//! `fulgurite run`: starts a job's ranks on this node, together with the agents of other nodes.

use std::ffi::OsString;
use std::net::IpAddr;
use std::num::NonZero;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use fulgurite_error::{Error, Result};
use fulgurite_launch::agent::{AgentOptions, Endpoint, Nodes};

const EXAMPLES: &str = "\
One host, four ranks, started again up to three times after a failure:
  fulgurite run --nproc-per-node 4 --max-restarts 3 -- ./pretrain fit --config run.toml

Two hosts, the same command on both, and the same secret in FULGURITE_JOB_KEY (`openssl rand -hex 16`):
  fulgurite run --nnodes 2 --nproc-per-node 4 --rdzv-endpoint node0:29400 -- ./pretrain fit --config run.toml

Two to four hosts: it starts again with those that are left, and takes one that comes back in at the next
restart (with trainer.elastic.enabled = true both without a restart):
  fulgurite run --nnodes 2:4 --max-restarts 10 --nproc-per-node 4 --rdzv-endpoint node0:29400 -- ./pretrain fit

An elastic job that may lose any of its hosts, with a coordinator on a host that starts no ranks:
  fulgurite run --nnodes 1:4 --nproc-per-node 0 --rdzv-endpoint login:29400 -- ./pretrain
  fulgurite run --nnodes 1:4 --nproc-per-node 4 --rdzv-endpoint login:29400 -- ./pretrain fit \
      --set trainer.elastic.enabled=true

Ranks are told by the variables of torchrun. A restart goes on from the last checkpoint of the job.";

/// Default port of `--master-addr`, as in `torchrun`.
const MASTER_PORT: u16 = 29500;

#[derive(Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Run {
    /// Ranks on this node: a number, `auto` for one a core, or 0 to coordinate the job alone
    #[arg(long, alias = "nproc_per_node", value_name = "N", default_value = "1")]
    nproc_per_node: String,
    /// Nodes: a number, or the least and the most, such as 1:4
    #[arg(long, value_name = "M|MIN:MAX", default_value = "1")]
    nnodes: Nodes,
    /// This node's place among the nodes; by default in the order in which they come
    #[arg(long, alias = "node_rank", value_name = "R")]
    node_rank: Option<usize>,
    /// Where the nodes' agents meet: an address of one of the hosts, and a free port there. With
    /// three or five, separated by commas, fewer than half of these hosts may be lost
    #[arg(long, alias = "rdzv_endpoint", value_name = "HOST[:PORT]", value_delimiter = ',')]
    rdzv_endpoint: Vec<Endpoint>,
    /// As `--rdzv-endpoint`, in two parts; the port is 29500 by default
    #[arg(long, alias = "master_addr", value_name = "HOST", conflicts_with = "rdzv_endpoint")]
    master_addr: Option<String>,
    /// The port of `--master-addr`
    #[arg(long, alias = "master_port", value_name = "PORT", requires = "master_addr")]
    master_port: Option<u16>,
    /// torchrun's backends; both mean that one of the agents hosts the place where they meet
    #[arg(long = "rdzv-backend", alias = "rdzv_backend", value_parser = ["c10d", "static"], hide = true)]
    _rdzv_backend: Option<String>,
    /// One node, which is the default
    #[arg(long = "standalone", conflicts_with_all = ["nnodes", "rdzv_endpoint", "master_addr"], hide = true)]
    _standalone: bool,
    /// The address of this host that the others reach; by default the one towards the endpoint
    #[arg(long, alias = "local_addr", value_name = "IP")]
    local_addr: Option<IpAddr>,
    /// The job's id, the same on all nodes and in no other job; by default one at random
    #[arg(long, alias = "rdzv_id", value_name = "ID")]
    rdzv_id: Option<String>,
    /// How often the job is started again, on all nodes, after a failure
    #[arg(long, alias = "max_restarts", value_name = "K", default_value_t = 0)]
    max_restarts: u64,
    /// SIGTERM takes this node out of an elastic job, which goes on with the others: for a host
    /// that is drained. By default it ends the job on all nodes
    #[arg(long)]
    leave_on_sigterm: bool,
    /// Writes each rank's output to DIR/JOB/attempt_N/RANK/{stdout,stderr}.log, where JOB is the id
    /// and some letters
    #[arg(long, alias = "log_dir", value_name = "DIR")]
    log_dir: Option<PathBuf>,
    /// Shows each line of output with its rank in front, also with --log-dir
    #[arg(long)]
    tee: bool,
    /// A file with the job's secret, readable by its owner alone; FULGURITE_JOB_KEY comes before it
    #[arg(long, value_name = "FILE")]
    job_key_file: Option<PathBuf>,
    /// How long nodes wait for each other
    #[arg(long, value_name = "SECS", default_value_t = 600)]
    join_timeout_secs: u64,
    /// How long more nodes are waited for once the least number has come
    #[arg(long, value_name = "SECS", default_value_t = 30)]
    last_call_timeout_secs: u64,
    /// After how long without a sign of life a node is lost
    #[arg(long, value_name = "SECS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(2..))]
    keep_alive_timeout_secs: u64,
    /// The program that every rank runs, and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM ARGS")]
    command: Vec<OsString>,
}

impl Run {
    pub(crate) fn run(self) -> Result<ExitCode> {
        let mut command = self.command.into_iter();
        let Some(program) = command.next() else {
            return Err(Error::Launch("no program is given after `--`".to_owned()));
        };
        let devices = match self.nproc_per_node.as_str() {
            "auto" | "cpu" => std::thread::available_parallelism().map_or(1, NonZero::get),
            number => number.parse().map_err(|_| {
                Error::Launch(format!(
                    "--nproc-per-node is `{number}`; it should be a number or `auto`"
                ))
            })?,
        };
        let endpoints = match self.master_addr {
            Some(host) => {
                let port = self.master_port.unwrap_or(MASTER_PORT);
                let host = if host.contains(':') { format!("[{host}]") } else { host };
                vec![format!("{host}:{port}").parse()?]
            }
            None => self.rdzv_endpoint,
        };
        let options = AgentOptions {
            program,
            arguments: command.collect(),
            devices,
            nodes: self.nnodes,
            node_rank: self.node_rank,
            endpoints,
            local_address: self.local_addr,
            id: self.rdzv_id,
            max_restarts: self.max_restarts,
            leave_on_sigterm: self.leave_on_sigterm,
            job_key_file: self.job_key_file,
            log_dir: self.log_dir,
            tee: self.tee,
            join_timeout: Duration::from_secs(self.join_timeout_secs),
            last_call: Duration::from_secs(self.last_call_timeout_secs),
            keep_alive: Duration::from_secs(self.keep_alive_timeout_secs),
        };
        let code = fulgurite_launch::agent::run(&options)?;
        Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)))
    }
}
