//! The agents' rendezvous. An agent hosts a seat if an endpoint is on its host, and connects to
//! all.

use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::board::write;
use super::options::{AgentOptions, Endpoint, Nodes, listed};
use super::seats::{Connect, Seats};
use crate::environment::Variables;
use crate::job_secret;
use crate::launcher::{address_towards, reached_by_others};
use crate::signals::{self, Starting};
use crate::{Error, Result};
use fulgurite_error::{advice, print_message};
use fulgurite_store::{
    ClientIdentity, ClientOptions, JobKey, LocalStore, LostRankPolicy, Store, StoreHost,
    StoreServer, TcpStore,
};

/// The agents' rendezvous, and this host's address.
pub(super) struct Meeting {
    pub(super) seats: Arc<Seats>,
    /// This host's address for the other hosts; 127.0.0.1 in a job of one node.
    pub(super) address: String,
    /// The secret that the job's ranks and agents share.
    pub(super) secret: String,
    /// Why this agent hosts no seat, although an endpoint is its host's.
    not_hosted: Option<String>,
    /// The agents' connections to this agent's seat. A job of one node has none.
    pub(super) connected: Connected,
    /// Held for the duration of the job.
    _server: Option<Arc<StoreServer>>,
}

/// The agents' connections to this agent's seat.
#[derive(Clone, Default)]
pub(super) struct Connected(Weak<StoreServer>);

impl Connected {
    fn of(server: &Arc<StoreServer>) -> Self {
        Self(Arc::downgrade(server))
    }

    /// Whether an agent's connection has ended, and it could have connected again meanwhile. One
    /// that is known `since` then should have connected at all.
    pub(super) fn is_cut_off(&self, agent: u64, since: Instant) -> bool {
        let Some(server) = self.0.upgrade() else { return false };
        let number = server.value(&connection(agent));
        let number = number.and_then(|number| serde_json::from_slice(&number).ok());
        let lost_for = match number {
            Some(number) => server.lost_for(number),
            None => Some(since.elapsed()),
        };
        lost_for.is_some_and(|time| time >= CONNECTS_AGAIN)
    }
}

/// The variable that holds the secret, also for ranks.
const KEY: &str = job_secret::JOB_KEY_VARIABLE;
/// Interval between checks for a coordinator.
const POLL: Duration = Duration::from_millis(20);
/// Time after which an agent says that it waits for a coordinator.
const SILENT: Duration = Duration::from_secs(5);
/// Time after which an agent counts as lost whose connection has ended: several attempts to connect
/// again. The connection of an agent that is killed ends at once.
pub(super) const CONNECTS_AGAIN: Duration = Duration::from_secs(2);
/// Time for one connection, after the first one.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

impl Meeting {
    /// Hosts a seat if an endpoint's address is this host's and still free, and connects to all.
    pub(super) fn join(options: &AgentOptions, agent: u64) -> Result<Self> {
        let file = options.job_key_file.as_deref();
        let secret = job_secret::configured(&Variables::current(), file, "--job-key-file")?;
        let Some(first) = options.endpoints.first() else {
            if options.nodes != Nodes::ONE {
                return Err(Error::Launch(
                    "a job of several nodes needs a place where its agents meet: --rdzv-endpoint HOST:PORT, \
                     the same on all nodes, with a free port of one of them"
                        .to_owned(),
                ));
            }
            let secret = secret.map_or_else(JobKey::random_secret, Ok)?;
            let (address, store) = ("127.0.0.1".to_owned(), Arc::new(LocalStore::new()));
            let connect: Connect = Box::new(move |_| Ok(store.clone()));
            let seats = vec![connect];
            let seats =
                Seats::new(seats, (agent, Some(0)), Connected::default(), options.keep_alive)?;
            let seats = Arc::new(seats);
            return Ok(Self {
                seats,
                address,
                secret,
                connected: Connected::default(),
                not_hosted: None,
                _server: None,
            });
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
        let (hosted, not_hosted) = host_one(options, &key)?;
        let (own, server) = hosted.map(|(at, server)| (at, Arc::new(server))).unzip();
        let connected = server.as_ref().map(Connected::of).unwrap_or_default();
        let towards = |endpoint: &Endpoint| address_towards(&endpoint.host, endpoint.port);
        let address = options.local_address.or_else(|| options.endpoints.iter().find_map(towards));
        let address = address.ok_or_else(|| {
            Error::Launch(format!("the host of the rendezvous endpoint {first} cannot be found"))
        })?;
        let connections = options.endpoints.iter().map(|endpoint| {
            let (endpoint, key) = (endpoint.clone(), key.clone());
            let (all, first_timeout) = (listed(&options.endpoints), options.join_timeout);
            let connect: Connect = Box::new(move |first| {
                let timeout = if first { first_timeout } else { CONNECT_TIMEOUT };
                let (store, number) = connect(&endpoint, &key, timeout)?;
                check_endpoints(&store, &all)?;
                write(&store, &connection(agent), &number)?;
                Ok(Arc::new(store))
            });
            connect
        });
        let (own, lease) = ((agent, own), options.keep_alive);
        let seats = Seats::new(connections.collect(), own, connected.clone(), lease)?;
        let (seats, address) = (Arc::new(seats), address.to_string());
        Ok(Self { seats, address, secret, connected, not_hosted, _server: server })
    }

    /// Waits until the job has a coordinator.
    ///
    /// # Errors
    /// If too few seats are reached in time, or a seat refuses this agent; [`Error::Interrupted`]
    /// if this agent is asked to end.
    pub(super) fn wait_for_coordinator(&self, options: &AgentOptions) -> Result<()> {
        let _starting = Starting::new();
        let (begun, mut said) = (Instant::now(), false);
        let endpoints = listed(&options.endpoints);
        while self.seats.coordinator().is_none() {
            if signals::give_up().is_some() {
                return Err(Error::Interrupted);
            }
            let unreached = self.seats.unreached();
            let refusal = unreached.iter().find(|(_, _, stays)| *stays);
            let late = begun.elapsed() >= options.join_timeout;
            match (&*options.endpoints, refusal) {
                ([endpoint], Some((_, why, _))) => {
                    let hosting = self.not_hosted.as_ref();
                    let hosting =
                        hosting.map(|why| format!(". It cannot be hosted here either: {why}"));
                    return Err(Error::Launch(format!(
                        "the rendezvous at {endpoint} cannot be joined: {why}{}",
                        hosting.unwrap_or_default()
                    )));
                }
                (endpoints, Some((at, why, _))) if !late => {
                    return Err(Error::Launch(format!(
                        "the rendezvous at {} cannot be joined: {why}",
                        endpoints[*at]
                    )));
                }
                // The only seat's own error comes soon.
                ([_], None) if begun.elapsed() < options.join_timeout + SILENT => {}
                _ if late => {
                    let why = unreached
                        .iter()
                        .map(|(at, why, _)| format!("\n- {}: {why}", options.endpoints[*at]));
                    return Err(Error::Launch(format!(
                        "after {:?} nobody coordinates the job. At its start the agents on all hosts of \
                         --rdzv-endpoint {endpoints} must be there, later a majority of them{}",
                        options.join_timeout,
                        why.collect::<String>()
                    )));
                }
                _ => {}
            }
            if !said && begun.elapsed() >= SILENT {
                said = true;
                let most = options.join_timeout.as_secs();
                print_message(&match &*options.endpoints {
                    [endpoint] => format!(
                        "waits for an agent that hosts the rendezvous at {endpoint}, for {most} s at most"
                    ),
                    _ => format!(
                        "waits for the agents that host the rendezvous at {endpoints}, for {most} s at most"
                    ),
                });
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }
}

/// The store's message to a second process with the same number.
const TAKEN: &str = "another process is or was rank";

/// A seat, and its store.
type Hosted = (usize, StoreServer);

/// Hosts the first seat whose address is this host's and free. Returns why an address of this host
/// is not free.
fn host_one(options: &AgentOptions, key: &JobKey) -> Result<(Option<Hosted>, Option<String>)> {
    // A node's rank names the host of the only seat.
    if options.endpoints.len() == 1 && options.node_rank.is_some_and(|rank| rank > 0) {
        return Ok((None, None));
    }
    let (all, mut why) = (listed(&options.endpoints), None);
    for (at, endpoint) in options.endpoints.iter().enumerate() {
        let addresses = match (endpoint.host.as_str(), endpoint.port).to_socket_addrs() {
            Ok(addresses) => addresses.collect(),
            // A host that is lost may have no name.
            Err(_) if options.endpoints.len() > 1 => continue,
            Err(e) => {
                return Err(Error::Launch(format!(
                    "the host of the rendezvous endpoint {endpoint} is unknown: {e}"
                )));
            }
        };
        match host(endpoint, addresses, key, &all, options.nodes.most > 1)? {
            (Some(server), _) => return Ok((Some((at, server)), None)),
            (None, not_hosted) => why = why.or(not_hosted),
        }
    }
    Ok((None, why))
}

/// Hosts a seat's store, if the address is this host's and free. Returns the reason if it is this
/// host's and not free. `all` is the list of the job's endpoints.
fn host(
    endpoint: &Endpoint,
    addresses: Vec<SocketAddr>,
    key: &JobKey,
    all: &str,
    several_hosts: bool,
) -> Result<(Option<StoreServer>, Option<String>)> {
    // Binding another port tells whether an address is this host's.
    let is_ours =
        |address: &SocketAddr| TcpListener::bind(SocketAddr::new(address.ip(), 0)).is_ok();
    let ours: Vec<SocketAddr> = addresses.into_iter().filter(is_ours).collect();
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
        let values = [(ENDPOINTS, all.as_bytes())];
        match StoreServer::bind_with_values(address, key.clone(), Nodes::LIMIT, policy, &values) {
            Ok(server) => return Ok((Some(server), None)),
            Err(error) => why = Some(error.to_string()),
        }
    }
    Ok((None, why))
}

/// The key of a seat's store for the endpoints that its host was told.
const ENDPOINTS: &str = "endpoints";

/// Checks that this agent was told the same endpoints as the seat's host. Their order numbers the
/// seats. A single endpoint may have several names.
fn check_endpoints(store: &dyn Store, own: &str) -> Result<()> {
    let others = store.get(ENDPOINTS, Duration::ZERO)?;
    let others = String::from_utf8_lossy(&others);
    if others == own || !(own.contains(',') || others.contains(',')) {
        return Ok(());
    }
    Err(Error::Launch(format!(
        "this agent was told --rdzv-endpoint {own}, the others {others}; they must be told the same, in the same \
         order"
    )))
}

/// The key of a seat's store for the number under which an agent is connected.
fn connection(agent: u64) -> String {
    format!("connection/{agent}")
}

/// Connects to a seat's store under a number that no other agent has, and returns the number.
fn connect(endpoint: &Endpoint, key: &JobKey, timeout: Duration) -> Result<(TcpStore, usize)> {
    let begun = Instant::now();
    let mut number = std::process::id() as usize % Nodes::LIMIT;
    loop {
        let identity = ClientIdentity { key: key.clone(), rank: number, world_size: Nodes::LIMIT };
        let options = ClientOptions { host: StoreHost::Agent, give_up: || None };
        let connected =
            TcpStore::connect_with(&endpoint.host, endpoint.port, identity, timeout, options);
        match connected {
            Err(Error::Launch(why)) if why.contains(TAKEN) && begun.elapsed() < timeout => {
                number = (number + 1) % Nodes::LIMIT;
            }
            connected => return Ok((connected?, number)),
        }
    }
}
