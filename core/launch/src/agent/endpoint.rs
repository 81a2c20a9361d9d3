//! The agents' rendezvous: decides which agent hosts the store, and connects to it.

use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::options::{AgentOptions, Endpoint, Nodes};
use crate::environment::Variables;
use crate::job_secret;
use crate::launcher::{address_towards, reached_by_others};
use crate::signals::{self, Starting};
use crate::{Error, Result};
use fulgurite_error::{advice, print_message};
use fulgurite_store::{
    ClientIdentity, ClientOptions, JobKey, LocalStore, LostRankPolicy, Patience, Store, StoreHost,
    StoreServer, TcpStore,
};

/// The agents' store, and this host's address.
pub(super) struct Meeting {
    pub(super) store: Arc<dyn Store>,
    /// Whether this agent hosts the store, and so is the coordinator.
    pub(super) hosts: bool,
    /// This host's address for the other hosts; 127.0.0.1 in a job of one node.
    pub(super) address: String,
    /// The secret that the job's ranks and agents share.
    pub(super) secret: String,
    /// Held for the duration of the job.
    _server: Option<StoreServer>,
}

/// The variable that holds the secret, also for ranks.
const KEY: &str = job_secret::JOB_KEY_VARIABLE;

impl Meeting {
    /// Connects to the store. Hosts it first if the endpoint's address is this host's and still
    /// free.
    pub(super) fn join(options: &AgentOptions) -> Result<Self> {
        let file = options.job_key_file.as_deref();
        let secret = job_secret::configured(&Variables::current(), file, "--job-key-file")?;
        let Some(endpoint) = &options.endpoint else {
            if options.nodes != Nodes::ONE {
                return Err(Error::Launch(
                    "a job of several nodes needs a place where its agents meet: --rdzv-endpoint HOST:PORT, \
                     the same on all nodes, with a free port of one of them"
                        .to_owned(),
                ));
            }
            let secret = secret.map_or_else(JobKey::random_secret, Ok)?;
            let address = "127.0.0.1".to_owned();
            let store = Arc::new(LocalStore::new());
            return Ok(Self { store, hosts: true, address, secret, _server: None });
        };
        let secret = secret.ok_or_else(|| {
            Error::Launch(format!(
                "agents of several nodes need a secret, so that strangers cannot join the job, read it or end \
                 it: set {KEY}, the same on all nodes, to what `openssl rand -hex 16` gives, or name a file with \
                 it by --job-key-file"
            ))
        })?;
        let key = JobKey::new(
            &secret,
            &format!("agents of {}", options.id.as_deref().unwrap_or_default()),
        );
        let (server, not_hosted) = match options.node_rank {
            None | Some(0) => host(endpoint, &key, options.nodes.most > 1)?,
            Some(_) => (None, None),
        };
        let towards = || address_towards(&endpoint.host, endpoint.port);
        let address = options.local_address.or_else(towards).ok_or_else(|| {
            Error::Launch(format!("the host of the rendezvous endpoint {endpoint} cannot be found"))
        })?;
        let store = connect(endpoint, &key, options, not_hosted)?;
        let hosts = server.is_some();
        let address = address.to_string();
        Ok(Self { store: Arc::new(store), hosts, address, secret, _server: server })
    }
}

/// The store's message to a second process with the same number.
const TAKEN: &str = "another process is or was rank";

/// Hosts the store, if the address is this host's and free. Returns the reason if it is this host's
/// and not free.
fn host(
    endpoint: &Endpoint,
    key: &JobKey,
    several_hosts: bool,
) -> Result<(Option<StoreServer>, Option<String>)> {
    let addresses = (endpoint.host.as_str(), endpoint.port).to_socket_addrs().map_err(|e| {
        Error::Launch(format!("the host of the rendezvous endpoint {endpoint} is unknown: {e}"))
    })?;
    // Binding another port tells whether an address is this host's.
    let is_ours =
        |address: &SocketAddr| TcpListener::bind(SocketAddr::new(address.ip(), 0)).is_ok();
    let ours: Vec<SocketAddr> = addresses.filter(is_ours).collect();
    let reached = reached_by_others(&endpoint.host, several_hosts, ours).map_err(|own| {
        Error::Launch(format!(
            "the host of the rendezvous endpoint {endpoint} is {own} here, where the agents of other hosts \
             cannot come: name it by the address of this host that they reach"
        ))
    })?;
    let mut why = None;
    for address in reached {
        // Another agent of this host or another program has the address; connecting tells which.
        if let Err(error) = TcpListener::bind(address) {
            why = Some(format!("{error}{}", advice(&error)));
            continue;
        }
        let policy = LostRankPolicy::ParentReports;
        match StoreServer::bind(address, key.clone(), Nodes::LIMIT, policy) {
            Ok(server) => return Ok((Some(server), None)),
            Err(error) => why = Some(error.to_string()),
        }
    }
    Ok((None, why))
}

/// How long an agent says nothing while nobody hosts the rendezvous.
const SILENT: Duration = Duration::from_secs(5);

/// Connects under a number that no other agent has.
fn connect(
    endpoint: &Endpoint,
    key: &JobKey,
    options: &AgentOptions,
    not_hosted: Option<String>,
) -> Result<TcpStore> {
    let _starting = Starting::new();
    let mut patience = Patience::new(options.join_timeout);
    let mut number = std::process::id() as usize;
    let mut timeout = options.join_timeout.min(SILENT);
    let mut later = options.join_timeout - timeout;
    loop {
        let left = patience.slice().unwrap_or_default();
        let begun = Instant::now();
        let identity = ClientIdentity {
            key: key.clone(),
            rank: number % Nodes::LIMIT,
            world_size: Nodes::LIMIT,
        };
        let client_options = ClientOptions { host: StoreHost::Agent, give_up: signals::give_up };
        let connected = TcpStore::connect_with(
            &endpoint.host,
            endpoint.port,
            identity,
            timeout,
            client_options,
        );
        match connected {
            Ok(store) => return Ok(store),
            Err(Error::Launch(_)) if !later.is_zero() && begun.elapsed() >= timeout => {
                (timeout, later) = (later, Duration::ZERO);
                print_message(&format!(
                    "waits for an agent that hosts the rendezvous at {endpoint}, for {} s at most",
                    options.join_timeout.as_secs()
                ));
            }
            Err(Error::Launch(why)) if why.contains(TAKEN) && !left.is_zero() => number += 1,
            Err(Error::Launch(why)) => {
                let hosting =
                    not_hosted.map(|why| format!(". It cannot be hosted here either: {why}"));
                return Err(Error::Launch(format!(
                    "the rendezvous at {endpoint} cannot be joined: {why}{}",
                    hosting.unwrap_or_default()
                )));
            }
            Err(other) => return Err(other),
        }
    }
}
