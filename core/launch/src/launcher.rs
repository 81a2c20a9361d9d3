//! [`launch`] turns a process into a rank.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::num::NonZero;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, SystemTime};

use super::attempt::remember;
use super::elastic::{self, Elastic, Origin, UNLIMITED, join_next_generation};
use super::job_secret;
use super::link::{AgentLink, GOING_ON_KEY, GoingOn, Link, Place, ToAgent};
use super::process::PROCESS;
use super::rank::{LaunchedRank, Membership, RankInfo, membership};
use super::rank_env::{self, RankEnv};
use super::signals::{self, SecondSignal, Starting};
use super::supervisor::supervise;
use super::threads::{configured_threads, install_compute_pool, ranks_on_same_cores};
use crate::environment::{self, ClusterEnvironment, EnvironmentConfig, Variables};
use crate::{Error, Result};
use fulgurite_error::{counted, print_message};
use fulgurite_store::{
    ClientIdentity, ClientOptions, JobKey, LostRankPolicy, StoreHost, StoreServer, TcpStore,
};
use fulgurite_store::{LocalStore, Store as _};

/// The ranks that a program requests from [`launch`].
#[derive(Debug)]
pub struct LaunchOptions {
    /// Ranks on each node. `None` for as many as a launcher has started, else
    /// [`devices_if_alone`](Self::devices_if_alone).
    pub devices: Option<usize>,
    /// Ranks that this program starts itself if [`devices`](Self::devices) is `None`.
    pub devices_if_alone: usize,
    /// Number of nodes. With several, a launcher must start the ranks (`torchrun`, `srun`).
    pub num_nodes: usize,
    /// The environment that tells this process its rank; `None` detects it
    /// ([`environment::detect()`]).
    pub environment: Option<Box<dyn EnvironmentConfig>>,
    /// How long ranks wait for each other to connect.
    pub timeout: Duration,
    /// A file with the job's secret, readable only by this user, for ranks started by a launcher.
    /// The variable `FULGURITE_JOB_KEY` takes precedence. Without either, strangers can join the
    /// job, and rank 0 prints a warning. Ranks that this program starts itself share a random
    /// secret.
    pub job_key_file: Option<PathBuf>,
    /// How a job goes on that has lost a rank. `None`: it ends. Only for ranks that this program
    /// starts itself.
    pub elastic: Option<Elastic>,
}

impl Default for LaunchOptions {
    fn default() -> Self {
        let timeout = Duration::from_secs(300);
        Self {
            devices: None,
            devices_if_alone: 1,
            num_nodes: 1,
            environment: None,
            timeout,
            job_key_file: None,
            elastic: None,
        }
    }
}

/// Makes this process a rank of its job. Returns once all ranks have connected. See the
/// [crate](crate) for the three cases. Every rank must call it early in the program: the code
/// before the call runs in the supervisor and in every rank.
///
/// In the **supervisor** it never returns, because the rest of the program is meant for ranks. It
/// ends the process after the ranks have ended, with the exit code of the first failed rank. The
/// code is 128 + the signal if that rank was killed or the job was interrupted.
///
/// A rank may call it again (a second trainer in one program) and gets the same job.
///
/// From then on Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP no longer end the process;
/// [`interruption`](super::interruption()) reports them. In a job of several ranks a panic on any
/// thread ends the process.
///
/// The calling thread becomes one of the rank's compute threads. It should be the thread that
/// trains, because small pieces of work stay on it. `RAYON_NUM_THREADS` sets the number of compute
/// threads. The default divides the cores that this process may use by the number of ranks that
/// share them: all ranks of this host, unless their launcher has bound each to its own cores.
///
/// # Errors
/// - [`Error::Launch`] if environment variables are missing or malformed, if the configuration
///   requests a number of ranks that differs from the started ones, if the store's port is taken,
///   or if ranks do not connect in time (naming them).
/// - [`Error::PeerFailed`] if another rank fails meanwhile.
/// - [`Error::Interrupted`] if this process is asked to end while it waits for the others.
pub fn launch(options: LaunchOptions) -> Result<LaunchedRank> {
    launch_checked(options, &|_| Ok(()))
}

/// Like [`launch`], but first calls `check` with the world size, before this process starts any
/// rank or becomes the only one. In a job started by a launcher, rank 0 calls it once all ranks
/// have connected.
///
/// # Errors
/// Like [`launch`], and the errors of `check`.
pub fn launch_checked(
    options: LaunchOptions,
    check: &dyn Fn(usize) -> Result<()>,
) -> Result<LaunchedRank> {
    let _guard = PROCESS.launching.lock().unwrap_or_else(PoisonError::into_inner);
    let _starting = Starting::new();

    let launched = become_rank(options, check, now())?;
    install_compute_pool(
        configured_threads()
            .unwrap_or_else(|| threads_per_rank(ranks_on_same_cores(launched.local_world_size))),
    );
    Ok(launched)
}

/// Joins the job as a rank, or starts and supervises the ranks.
fn become_rank(
    options: LaunchOptions,
    check: &dyn Fn(usize) -> Result<()>,
    started: f64,
) -> Result<LaunchedRank> {
    if options.devices == Some(0) || options.num_nodes == 0 {
        return Err(Error::Launch(
            "trainer.devices and trainer.num_nodes must be 1 or more".into(),
        ));
    }
    if let Some(membership) = membership() {
        if membership.generation == 0 {
            check_same_world_size(&options, membership.info.world_size)?;
        }
        return Ok(membership.launched());
    }
    let variables = Variables::current();
    if let Some(env) = RankEnv::read(&variables)? {
        return join_supervisor(&options, env);
    }
    let environment = find_environment(&options, &variables)?;
    match environment {
        Some(environment) if environment.creates_processes_externally() => {
            remember(environment.as_ref());
            let launched = match (&options.elastic, AgentLink::read(&variables)?) {
                (None, _) => join_started(&options, environment.as_ref(), &variables, started)?,
                (Some(elastic), Some(link)) => {
                    join_agent(&options, elastic, environment.as_ref(), link, &variables)?
                }
                (Some(_), None) => {
                    return Err(Error::Launch(format!(
                        "trainer.elastic.enabled = true works with ranks that this program or `fulgurite run` \
                         starts, and `{}` has started this one. Leave the key out: its launcher starts lost ranks \
                         again, and the training goes on from its last checkpoint",
                        environment.name()
                    )));
                }
            };
            if launched.rank == 0 {
                check(launched.world_size)?;
            }
            Ok(launched)
        }
        alone => {
            let devices = options.devices.unwrap_or(options.devices_if_alone);
            if let Some(environment) = &alone {
                environment.validate_settings(devices, options.num_nodes)?;
            }
            let name = alone.map_or("local", |environment| environment.name());
            if devices == 1 {
                if options.elastic.is_some() {
                    print_message(
                        "warning: trainer.elastic.enabled = true, but one rank has no others that could go on",
                    );
                }
                check(devices)?;
                return launch_single_process(started, name);
            }
            if PROCESS.alone.load(Ordering::Relaxed) {
                return check_same_world_size(&options, 1)
                    .and_then(|()| launch_single_process(started, name));
            }
            check(devices)?;
            warn_if_crowded(devices);
            match supervise(devices, started, &variables, options.elastic)? {}
        }
    }
}

/// Returns the configured or the detected environment; `None` if no plugin recognises one.
fn find_environment(
    options: &LaunchOptions,
    variables: &Variables,
) -> Result<Option<Box<dyn ClusterEnvironment>>> {
    let found = match &options.environment {
        Some(config) => Some(config.build(variables)?),
        None => match environment::detect(variables)? {
            Some(config) => Some(config.build(variables)?),
            None => None,
        },
    };
    if found.is_none() && options.num_nodes > 1 {
        return Err(Error::Launch(format!(
            "trainer.num_nodes = {}, but no linked environment plugin recognises who started this \
             process",
            options.num_nodes
        )));
    }
    Ok(found)
}

fn check_same_world_size(options: &LaunchOptions, world_size: usize) -> Result<()> {
    match options.devices.map(|devices| devices.saturating_mul(options.num_nodes)) {
        Some(asked) if asked != world_size => Err(Error::Launch(format!(
            "this process belongs to a job of {} and cannot be launched again as \
             one of {asked}: all launches of a program must ask for the same number",
            counted(world_size, "rank")
        ))),
        _ => Ok(()),
    }
}

fn launch_single_process(started: f64, environment: &'static str) -> Result<LaunchedRank> {
    signals::handle(SecondSignal::Exit)?;
    PROCESS.alone.store(true, Ordering::Relaxed);
    let store = Arc::new(LocalStore::new());
    Ok(LaunchedRank::new(RankInfo::ALONE, None, store, started, environment, 0, None))
}

/// Joins the job as a rank started by this program's supervisor.
fn join_supervisor(options: &LaunchOptions, env: RankEnv) -> Result<LaunchedRank> {
    // Must come first: an earlier signal ends this process, and with it the job.
    signals::handle(SecondSignal::Ignore)?;
    env.die_with_supervisor()?;
    let RankEnv { started, info, generation, first_world_size, .. } = env;
    let link = Link { supervisor: Some(env), agent: None };
    let membership = Membership {
        info,
        generation,
        first_world_size,
        address: None,
        client: Arc::new(link.connect(info, options.timeout)?),
        server: None,
        link,
        environment: "local",
        started,
        presence: Mutex::new(Weak::new()),
    };
    join(membership, options)
}

/// Joins an elastic job as a rank that an agent has started.
fn join_agent(
    options: &LaunchOptions,
    elastic: &Elastic,
    environment: &dyn ClusterEnvironment,
    link: AgentLink,
    variables: &Variables,
) -> Result<LaunchedRank> {
    let info = numbers_of(environment)?;
    rank_env::die_with_agent(variables)?;
    signals::handle(SecondSignal::Ignore)?;
    let (generation, first_world_size) = (link.generation, link.first_world_size);
    let (started, most_ranks) = (link.started, link.most_ranks);
    if generation == 0 {
        // Later generations may have fewer ranks on a node.
        let several_nodes = (options.num_nodes > 1).then_some(info.local_world_size);
        if let Some(devices) = options.devices.or(several_nodes) {
            environment.validate_settings(devices, options.num_nodes)?;
        }
    }
    let to = ToAgent::connect(link, &info)?;
    if info.local_rank == 0 {
        let going_on = GoingOn::of(elastic, most_ranks);
        to.client().set(GOING_ON_KEY, &serde_json::to_vec(&going_on).map_err(Error::other)?)?;
    }
    let link = Link { supervisor: None, agent: Some(to) };
    let client = match elastic::connect(&link, info, options.timeout) {
        Ok(client) => Arc::new(client),
        // The host of the store was lost while this rank started, and the job has gone on.
        Err(error @ Error::Launch(_)) => {
            let environment = environment.name();
            let origin = Origin { link: &link, first_world_size, environment, started };
            let place = Place::without_job(info.rank, &link);
            return elastic::join_after(place, &origin, Duration::ZERO)?.ok_or(error);
        }
        Err(error) => return Err(error),
    };
    let membership = Membership {
        info,
        generation,
        first_world_size,
        address: link.address(&info),
        client,
        link,
        server: None,
        environment: environment.name(),
        started,
        presence: Mutex::new(Weak::new()),
    };
    join(membership, options)
}

fn numbers_of(environment: &dyn ClusterEnvironment) -> Result<RankInfo> {
    let info = RankInfo {
        rank: environment.global_rank(),
        world_size: environment.world_size(),
        local_rank: environment.local_rank(),
        local_world_size: environment.local_world_size(),
        node_rank: environment.node_rank(),
    };
    info.check("rank", "world size")?;
    Ok(info)
}

/// Joins the job as a rank started by a launcher (`torchrun`, `srun`).
fn join_started(
    options: &LaunchOptions,
    environment: &dyn ClusterEnvironment,
    variables: &Variables,
    started: f64,
) -> Result<LaunchedRank> {
    let info = numbers_of(environment)?;
    rank_env::die_with_agent(variables)?;
    let several_nodes = (options.num_nodes > 1).then_some(info.local_world_size);
    if let Some(devices) = options.devices.or(several_nodes) {
        environment.validate_settings(devices, options.num_nodes)?;
    }
    if info.world_size == 1 {
        return launch_single_process(started, environment.name());
    }
    signals::handle(SecondSignal::Ignore)?;
    let sharing = ranks_on_same_cores(info.local_world_size);
    if info.local_rank == 0 {
        warn_if_crowded(sharing);
    }
    if !variables.is_set(super::supervisor::THREADS_VARIABLE) {
        // An error means that the pool is already in use; it stays as it is.
        let threads = threads_per_rank(sharing);
        let _ = rayon::ThreadPoolBuilder::new().num_threads(threads).build_global();
    }
    let (host, port) = (environment.main_address(), environment.main_port());
    let file = options.job_key_file.as_deref();
    let secret = job_secret::configured(variables, file, "trainer.job_key_file =")?;
    let key = JobKey::new(secret.as_deref().unwrap_or_default(), &environment.job_id());
    let server = match info.rank {
        0 => Some(host_store(variables, &host, port, key.clone(), &info)?),
        _ => None,
    };
    if let (Some(server), None) = (&server, secret) {
        print_message(&job_secret::warning(server.address()));
    }
    // Rank 0 may be unable to reach itself by the name that the other hosts use.
    let host = match &server {
        Some(server) if server.address().ip().is_unspecified() => "127.0.0.1".to_owned(),
        Some(server) => server.address().ip().to_string(),
        None => host,
    };
    let several_hosts = info.local_world_size < info.world_size;
    let address =
        if several_hosts { address_towards(&environment.main_address(), port) } else { None };
    let identity = ClientIdentity { key, rank: info.rank, world_size: info.world_size };
    let client_options = client_options(StoreHost::RankZero);
    let client = TcpStore::connect_with(&host, port, identity, options.timeout, client_options)?;
    let membership = Membership {
        info,
        generation: 0,
        first_world_size: info.world_size,
        address,
        client: Arc::new(client),
        server,
        link: Link::NONE,
        environment: environment.name(),
        started,
        presence: Mutex::new(Weak::new()),
    };
    join(membership, options)
}

/// The variable with rank 0's listening address, if it differs from the main address.
const STORE_ADDRESS_VARIABLE: &str = "FULGURITE_STORE_ADDRESS";

/// Starts the store's server on the main address or, if set, only on the address in
/// [`STORE_ADDRESS_VARIABLE`].
fn host_store(
    variables: &Variables,
    main_address: &str,
    port: u16,
    key: JobKey,
    info: &RankInfo,
) -> Result<StoreServer> {
    let bind = |address: SocketAddr| {
        StoreServer::bind(address, key.clone(), info.world_size, LostRankPolicy::Failed)
    };
    let what = "the IP address that rank 0 listens on, such as 0.0.0.0";
    if let Some(ip) = variables.parse::<IpAddr>(STORE_ADDRESS_VARIABLE, what)? {
        return bind(SocketAddr::new(ip, port));
    }
    let addresses = (main_address, port).to_socket_addrs();
    let addresses: Vec<SocketAddr> = addresses
        .map_err(|e| Error::Launch(format!("the main address `{main_address}` is unknown: {e}")))?
        .collect();
    let several_hosts = info.local_world_size < info.world_size;
    let mut first_error = None;
    let reached = reached_by_others(main_address, several_hosts, addresses).map_err(|own| {
        Error::Launch(format!(
            "the main address `{main_address}` is {own} here, where the ranks of other hosts cannot come. Set \
             MASTER_ADDR to an address of this host that they reach, or {STORE_ADDRESS_VARIABLE} to the one that \
             rank 0 listens on (0.0.0.0: on all)"
        ))
    })?;
    for address in reached {
        match bind(address) {
            Ok(server) => return Ok(server),
            Err(error) => {
                first_error.get_or_insert(error);
            }
        }
    }
    Err(first_error.unwrap_or_else(|| {
        Error::Launch(format!("the main address `{main_address}` has no address"))
    }))
}

/// The address of the interface by which this host reaches `host`; `None` if unreachable.
pub(super) fn address_towards(host: &str, port: u16) -> Option<IpAddr> {
    let addresses = (host, port).to_socket_addrs().ok()?;
    let towards = |address: SocketAddr| {
        let any: IpAddr = match address {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let socket = UdpSocket::bind((any, 0)).ok()?;
        // Sends nothing: the system only picks the route.
        socket.connect(address).ok()?;
        Some(socket.local_addr().ok()?.ip())
    };
    // A host's own name may also resolve to its loopback interface, which other hosts cannot reach.
    addresses.into_iter().filter_map(towards).min_by_key(IpAddr::is_loopback)
}

/// Returns the `addresses` of a host that other hosts can reach. On some systems a host's own name
/// resolves to its loopback interface.
///
/// # Errors
/// The first address, if other hosts can reach none of them.
pub(super) fn reached_by_others(
    host: &str,
    several_hosts: bool,
    addresses: Vec<SocketAddr>,
) -> std::result::Result<Vec<SocketAddr>, IpAddr> {
    // An explicit address is intended, for example when "hosts" are processes of one host.
    let is_meant = host == "localhost" || host.parse::<IpAddr>().is_ok();
    if !several_hosts || is_meant {
        return Ok(addresses);
    }
    let (loopback, others): (Vec<_>, Vec<_>) =
        addresses.into_iter().partition(|address| address.ip().is_loopback());
    match (others.is_empty(), loopback.first()) {
        (true, Some(own)) => Err(own.ip()),
        _ => Ok(others),
    }
}

pub(super) fn client_options(host: StoreHost) -> ClientOptions {
    ClientOptions { host, give_up: signals::give_up }
}

fn join(membership: Membership, options: &LaunchOptions) -> Result<LaunchedRank> {
    let membership = membership.enter();
    membership.end_on_panic();
    if membership.generation == 0 {
        check_same_world_size(options, membership.info.world_size)?;
    }
    let timeout = if membership.generation == 0 { options.timeout } else { UNLIMITED };
    match membership.client.wait_for_all(timeout) {
        Ok(()) => Ok(membership.launched()),
        // Another rank was lost while this new one started.
        Err(error @ Error::PeerFailed { .. }) => join_next_generation(Duration::ZERO)?.ok_or(error),
        Err(error) => Err(error),
    }
}

/// Cores that this process may use.
fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get)
}

/// Compute threads per rank, for `ranks` ranks on this host.
pub(super) fn threads_per_rank(ranks: usize) -> usize {
    (cores() / ranks).max(1)
}

fn warn_if_crowded(ranks: usize) {
    let cores = cores();
    if ranks <= cores {
        return;
    }
    let warning = format!(
        "{ranks} ranks share {} of this host, so they will wait for each other",
        counted(cores, "core")
    );
    if tracing::dispatcher::has_been_set() {
        tracing::warn!("{warning}");
    } else {
        print_message(&format!("warning: {warning}"));
    }
}

/// Seconds since 1970.
fn now() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    #[test]
    fn unreachable_names_are_refused() {
        let at = |ips: &[&str]| -> Vec<SocketAddr> {
            ips.iter().map(|ip| SocketAddr::new(ip.parse().unwrap(), 1)).collect()
        };
        let (own, outside) = (at(&["127.0.1.1"]), at(&["127.0.1.1", "10.0.0.5"]));
        let reached =
            |name, several, of: &[SocketAddr]| reached_by_others(name, several, of.to_vec());
        assert_eq!(reached("node0", true, &outside).unwrap(), at(&["10.0.0.5"]));
        assert_eq!(reached("node0", false, &own).unwrap(), own);
        assert_eq!(reached("127.0.1.1", true, &own).unwrap(), own);
        assert_eq!(reached("localhost", true, &own).unwrap(), own);
        assert_eq!(reached("node0", true, &own).unwrap_err(), own[0].ip());
    }

    #[test]
    fn a_second_launch_needs_the_same_world_size() {
        let asking = |devices, num_nodes| {
            let options = LaunchOptions { devices, num_nodes, ..Default::default() };
            check_same_world_size(&options, 2)
        };
        asking(None, 1).unwrap();
        asking(Some(1), 2).unwrap();
        assert_says!(asking(Some(3), 1).unwrap_err(), "launch … of 2 ranks … again as one of 3 …");
        // With wrapping arithmetic this would be 2.
        assert!(asking(Some((1 << 63) + 1), 2).is_err());
    }
}
