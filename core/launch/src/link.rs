//! A rank's connection to the process that started it.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::elastic::{Elastic, Invitation, UNLIMITED};
use super::job_secret::JOB_KEY_VARIABLE;
use super::launcher::{address_towards, client_options};
use super::rank::{Membership, RankInfo, membership};
use super::rank_env::RankEnv;
use crate::environment::Variables;
use crate::{Error, Result};
use fulgurite_store::{ClientIdentity, JobKey, Patience, Store as _, StoreHost, TcpStore};

/// The variable with the [`AgentLink`].
const LINK_VARIABLE: &str = "FULGURITE_AGENT_LINK";
/// The key of an agent's own store for how the job goes on ([`GoingOn`]).
pub(super) const GOING_ON_KEY: &str = "elastic";
/// The key of an agent's own store for what rank 0 notes of its work ([`note_work`]).
pub(super) const WORK_KEY: &str = "work";
/// How long a rank waits for its agent, after the time in which agents notice that a host is lost.
const AGENT_NOTICE: Duration = Duration::from_secs(5);
/// Time to connect to the own agent's store, which listens already.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

/// What an agent passes to its ranks besides `torchrun`'s variables, for an elastic job.
///
/// The agent has a store of its own for its ranks. They hear of failures from it, because the job's
/// store may be on a host that is lost.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct AgentLink {
    /// The agent's process.
    pub(super) agent: i32,
    /// The job's id.
    pub(super) id: String,
    /// The number of the agents' attempt.
    pub(super) attempt: u64,
    /// When the agent started, in seconds since 1970.
    pub(super) started: f64,
    pub(super) generation: u64,
    /// Number of ranks of the first generation.
    pub(super) first_world_size: usize,
    /// Most ranks that the job can have.
    pub(super) most_ranks: usize,
    /// The address of the job's store, which an agent hosts.
    pub(super) store: (String, u16),
    /// The port of the agent's own store.
    pub(super) port: u16,
    /// Time in which agents notice that a host is lost.
    pub(super) keep_alive: Duration,
    /// What rank 0 of an earlier generation has noted of its work.
    pub(super) work: Option<String>,
}

impl AgentLink {
    /// Reads the link; `None` if no agent has started this process.
    pub(super) fn read(variables: &Variables) -> Result<Option<Self>> {
        let Some(text) = variables.get(LINK_VARIABLE) else { return Ok(None) };
        let wrong = |e| Error::Launch(format!("{LINK_VARIABLE}, which the agent sets: {e}"));
        serde_json::from_str(text).map(Some).map_err(wrong)
    }

    /// The variable for a rank.
    pub(super) fn variable(&self) -> (&'static str, String) {
        (LINK_VARIABLE, serde_json::to_string(self).expect("numbers and texts are JSON"))
    }

    /// The key of the job's store.
    pub(super) fn job_key(&self, secret: &str) -> JobKey {
        Self::job_key_of(secret, &self.id, self.attempt)
    }

    /// The key of the store of a job's attempt.
    pub(super) fn job_key_of(secret: &str, id: &str, attempt: u64) -> JobKey {
        JobKey::new(secret, &format!("attempt {attempt} of {id}"))
    }

    /// The key of the agent's own store.
    pub(super) fn own_key(&self, secret: &str) -> JobKey {
        let Self { agent, attempt, id, .. } = self;
        JobKey::new(secret, &format!("ranks of agent {agent} in attempt {attempt} of {id}"))
    }
}

/// The conditions on which a job goes on, which its ranks tell their agents.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct GoingOn {
    pub(super) min_ranks: usize,
    pub(super) max_restarts: u64,
    pub(super) join_timeout: Duration,
    /// Whether the job can have each number of ranks, from 0 on.
    pub(super) fits: Vec<bool>,
    /// What rank 0 has noted of its work, which an agent adds.
    pub(super) work: Option<String>,
}

impl GoingOn {
    pub(super) fn of(elastic: &Elastic, most_ranks: usize) -> Self {
        Self {
            min_ranks: elastic.min_ranks,
            max_restarts: elastic.max_restarts,
            join_timeout: elastic.join_timeout,
            fits: (0..=most_ranks).map(|ranks| ranks > 0 && (elastic.fits)(ranks)).collect(),
            work: None,
        }
    }
}

/// A rank's connection to the agent of an elastic job.
#[derive(Clone)]
pub(super) struct ToAgent {
    link: AgentLink,
    /// Of the agent's own store.
    client: Arc<TcpStore>,
}

/// Who started a rank.
#[derive(Clone)]
pub(super) struct Link {
    /// The supervisor, which hosts the job's store.
    pub(super) supervisor: Option<RankEnv>,
    /// The agent of an elastic job.
    pub(super) agent: Option<ToAgent>,
}

impl Link {
    /// A rank that no supervisor has started, and no agent of an elastic job.
    pub(super) const NONE: Self = Self { supervisor: None, agent: None };

    /// The process that started the rank, and when, for an elastic job.
    pub(super) fn starter(&self) -> Option<(i32, f64)> {
        let agent = self.agent.as_ref().map(|to| (to.link.agent, to.link.started));
        agent.or(self.supervisor.as_ref().map(|env| (env.supervisor, env.started)))
    }

    /// The link in the generation of an invitation. Connects to the agent's store.
    pub(super) fn to(&self, invitation: &Invitation, info: &RankInfo) -> Result<Self> {
        if let Some(env) = &self.supervisor {
            let (_, port) = invitation.store;
            let env =
                RankEnv { generation: invitation.generation, port, info: *info, ..env.clone() };
            return Ok(Self { supervisor: Some(env), agent: None });
        }
        let (Some(to), Some((attempt, port))) = (&self.agent, invitation.agent) else {
            return Err(Error::Launch("only a supervisor begins another generation".to_owned()));
        };
        let (generation, store) = (invitation.generation, invitation.store.clone());
        let link = AgentLink { generation, attempt, port, store, ..to.link.clone() };
        Ok(Self { supervisor: None, agent: Some(ToAgent::connect(link, info)?) })
    }

    /// Connects to the job's store. Afterwards its client also tells the failures that the agent
    /// tells.
    ///
    /// # Errors
    /// As [`TcpStore::connect`].
    pub(super) fn connect(&self, info: RankInfo, timeout: Duration) -> Result<TcpStore> {
        let connect = |host: &str, port, key, by| {
            let identity = ClientIdentity { key, rank: info.rank, world_size: info.world_size };
            TcpStore::connect_with(host, port, identity, timeout, client_options(by))
        };
        if let Some(env) = &self.supervisor {
            return connect("127.0.0.1", env.port, env.key(), StoreHost::Supervisor);
        }
        let Some(ToAgent { link, .. }) = &self.agent else {
            return Err(Error::Launch("no supervisor has started this process".to_owned()));
        };
        let (host, port) = &link.store;
        connect(host, *port, link.job_key(&secret()?), StoreHost::Agent)
    }

    /// The address of this host for ranks on others, as
    /// [`LaunchedRank::address`](crate::LaunchedRank::address).
    pub(super) fn address(&self, info: &RankInfo) -> Option<IpAddr> {
        let (host, port) = &self.agent.as_ref()?.link.store;
        let several_hosts = info.local_world_size < info.world_size;
        several_hosts.then(|| address_towards(host, *port)).flatten()
    }
}

/// Notes what new processes must know of the job's work, if no other process is left that knows it.
/// Under an agent of an elastic job; elsewhere it does nothing, and processes of one host have
/// [`job_memories`](crate::job_memories). Called on rank 0.
///
/// # Errors
/// If the agent has ended.
pub fn note_work(work: &str) -> Result<()> {
    let to = membership().and_then(|membership| membership.link.agent.as_ref());
    to.map_or(Ok(()), |to| to.client.set(WORK_KEY, work.as_bytes()))
}

/// Returns what rank 0 of an earlier generation has [noted](note_work), as far as this process's
/// agent knows.
pub fn noted_work() -> Option<String> {
    membership()?.link.agent.as_ref()?.link.work.clone()
}

/// The secret that agents and ranks share.
fn secret() -> Result<String> {
    Variables::current().require(JOB_KEY_VARIABLE, "the job's secret")
}

impl ToAgent {
    /// Connects to the agent's own store.
    pub(super) fn connect(link: AgentLink, info: &RankInfo) -> Result<Self> {
        let key = link.own_key(&secret()?);
        let (rank, world_size) = (info.local_rank, info.local_world_size);
        let identity = ClientIdentity { key, rank, world_size };
        let options = client_options(StoreHost::Agent);
        let client =
            TcpStore::connect_with("127.0.0.1", link.port, identity, CONNECT_TIMEOUT, options)?;
        Ok(Self { link, client: Arc::new(client) })
    }

    pub(super) fn client(&self) -> &TcpStore {
        &self.client
    }

    /// Passes the agent's failure on to the client of the job's store, on a thread of its own.
    pub(super) fn pass_failures_to(&self, job: &Arc<TcpStore>) {
        let (from, to) = (self.client.clone(), job.clone());
        let pass = move || {
            if let Some((rank, message)) = from.wait_for_failure(UNLIMITED) {
                to.set_failure(rank, &message);
            }
        };
        let thread = std::thread::Builder::new().name("agent-failures".to_owned());
        // Without the thread the rank hears of failures when its collectives fail.
        if let Err(error) = thread.stack_size(256 << 10).spawn(pass) {
            tracing::warn!("no thread to listen to the agent: {error}");
        }
    }
}

/// The place where a rank without a generation hears of the next one.
pub(super) struct Place {
    /// Its rank in the last generation to which it was invited.
    pub(super) rank: usize,
    /// The client of the job's store, if it was reached.
    pub(super) job: Option<Arc<TcpStore>>,
    pub(super) agent: Option<ToAgent>,
}

impl Membership {
    pub(super) fn place(&self) -> Place {
        let Self { info, client, link, .. } = self;
        Place { rank: info.rank, job: Some(client.clone()), agent: link.agent.clone() }
    }
}

impl Place {
    /// The place of a rank that has not reached the store of its generation.
    pub(super) fn without_job(rank: usize, link: &Link) -> Self {
        Self { rank, job: None, agent: link.agent.clone() }
    }

    /// Waits up to `within` for the failure of the job, and returns it. With an agent, waits for
    /// what the agent says, unless a rank has reported an error of its own.
    pub(super) fn wait_for_failure(&self, within: Duration) -> Option<(usize, String)> {
        let Some(to) = &self.agent else {
            return self.job.as_ref()?.wait_for_failure(within);
        };
        let lost = |job: &Arc<TcpStore>| job.has_lost_host();
        let within = match within.is_zero() && !self.job.as_ref().is_some_and(lost) {
            true => Duration::ZERO,
            false => within.max(to.link.keep_alive + AGENT_NOTICE),
        };
        let mut patience = Patience::new(within);
        let own_since = Instant::now();
        loop {
            let slice = patience.slice().unwrap_or_default();
            if let Some(failure) = to.client.wait_for_failure(slice.min(POLL_INTERVAL)) {
                return Some(failure);
            }
            let job = self.job.as_ref().filter(|job| !job.has_lost_host());
            let reported = job.and_then(|job| job.failure());
            // The agent's own message may be under way.
            if slice.is_zero() || (reported.is_some() && own_since.elapsed() > AGENT_GRACE) {
                return reported;
            }
        }
    }
}

const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// How long an agent's message may take that has been sent.
const AGENT_GRACE: Duration = Duration::from_millis(500);
