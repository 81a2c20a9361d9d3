//! The environment variables by which a supervisor passes its ranks their numbers.

use std::process::Command;

use super::job_secret::JOB_KEY_VARIABLE;
use super::rank::RankInfo;
use crate::environment::Variables;
use crate::{Error, Result};
use fulgurite_store::JobKey;

const SUPERVISOR: &str = "FULGURITE_SUPERVISOR";
/// The generation of a job whose supervisor lets it go on ([`crate::Elastic`]).
const GENERATION: &str = "FULGURITE_GENERATION";
/// Number of ranks of the first generation.
const FIRST_WORLD_SIZE: &str = "FULGURITE_FIRST_WORLD_SIZE";
const START_TIME: &str = "FULGURITE_START_TIME";
/// The process id of the agent that started this rank ([`crate::agent`]).
pub(super) const AGENT_VARIABLE: &str = "FULGURITE_AGENT";

/// The values that a supervisor passes to a rank. `torchrun`'s variables are set too, for programs
/// that read them.
#[derive(Clone, PartialEq)]
#[cfg_attr(test, derive(Debug))]
pub(super) struct RankEnv {
    /// The supervisor's process id. The supervisor hosts the store.
    pub(super) supervisor: i32,
    /// The secret that the job's processes share.
    pub(super) secret: String,
    /// When the supervisor was started, in seconds since 1970.
    pub(super) started: f64,
    pub(super) info: RankInfo,
    /// The job's generation.
    pub(super) generation: u64,
    /// Number of ranks of the first generation.
    pub(super) first_world_size: usize,
    /// The store's port on this host.
    pub(super) port: u16,
}

impl RankEnv {
    pub(super) fn variables(&self) -> [(&'static str, String); 13] {
        let info = &self.info;
        [
            (SUPERVISOR, self.supervisor.to_string()),
            (JOB_KEY_VARIABLE, self.secret.clone()),
            (START_TIME, format!("{:.6}", self.started)),
            (GENERATION, self.generation.to_string()),
            (FIRST_WORLD_SIZE, self.first_world_size.to_string()),
            ("RANK", info.rank.to_string()),
            ("WORLD_SIZE", info.world_size.to_string()),
            ("LOCAL_RANK", info.local_rank.to_string()),
            ("LOCAL_WORLD_SIZE", info.local_world_size.to_string()),
            ("GROUP_RANK", info.node_rank.to_string()),
            ("NODE_RANK", info.node_rank.to_string()),
            ("MASTER_ADDR", "127.0.0.1".to_owned()),
            ("MASTER_PORT", self.port.to_string()),
        ]
    }

    /// The key of this generation of the job.
    pub(super) fn key(&self) -> JobKey {
        JobKey::new(&self.secret, &format!("supervised {}", self.generation))
    }

    pub(super) fn set(&self, command: &mut Command) {
        command.envs(self.variables());
    }

    /// Reads the values set by this process's supervisor; `None` if no supervisor started it.
    pub(super) fn read(variables: &Variables) -> Result<Option<Self>> {
        if !variables.is_set(SUPERVISOR) {
            return Ok(None);
        }
        let number = |name| variables.require::<usize>(name, "a number");
        let info = RankInfo {
            rank: number("RANK")?,
            world_size: number("WORLD_SIZE")?,
            local_rank: number("LOCAL_RANK")?,
            local_world_size: number("LOCAL_WORLD_SIZE")?,
            node_rank: number("GROUP_RANK")?,
        };
        info.check("RANK", "WORLD_SIZE")?;
        Ok(Some(Self {
            supervisor: variables.require(SUPERVISOR, "the supervisor's process id")?,
            secret: variables.require(JOB_KEY_VARIABLE, "the job's secret")?,
            started: variables.require(START_TIME, "seconds since 1970")?,
            info,
            generation: variables.require(GENERATION, "the job's generation")?,
            first_world_size: number(FIRST_WORLD_SIZE)?,
            port: variables.require("MASTER_PORT", "the store's port")?,
        }))
    }

    /// Makes the kernel kill this process when its supervisor ends, even by SIGKILL.
    ///
    /// # Errors
    /// If the supervisor is not, or no longer, the parent of this process.
    pub(super) fn die_with_supervisor(&self) -> Result<()> {
        die_with_parent()?;
        // The supervisor may have ended before the call above.
        if is_parent(self.supervisor) {
            return Ok(());
        }
        Err(Error::Launch(format!(
            "{SUPERVISOR} says that process {} supervises this one, but it is not its parent. If \
             a rank started this program, unset {SUPERVISOR}, RANK and WORLD_SIZE for it; else \
             the supervisor was killed",
            self.supervisor
        )))
    }
}

/// Makes the kernel kill this process when its agent ends, if the agent started it directly.
///
/// # Errors
/// If the agent has already ended.
pub(super) fn die_with_agent(variables: &Variables) -> Result<()> {
    let what = "the process id of this rank's agent";
    let Some(agent) = variables.parse::<i32>(AGENT_VARIABLE, what)? else { return Ok(()) };
    if is_parent(agent) {
        die_with_parent()?;
    }
    // The agent may have ended before the call above. A program in between, such as a shell,
    // decides itself when its ranks end.
    match is_parent(agent) || is_running(agent) {
        true => Ok(()),
        false => Err(Error::Launch(format!(
            "the agent that started this rank ({AGENT_VARIABLE} = {agent}) has ended; if none did, unset \
             {AGENT_VARIABLE}"
        ))),
    }
}

/// Whether an agent started the ranks and reports their ends.
pub(super) fn has_agent() -> bool {
    std::env::var_os(AGENT_VARIABLE).is_some()
}

fn die_with_parent() -> Result<()> {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .map_err(|e| Error::Launch(format!("cannot tie this rank to its parent: {e}")))?;
    Ok(())
}

/// Whether a supervisor started this process and still runs.
pub(super) fn is_supervised() -> bool {
    let pid = std::env::var(SUPERVISOR).ok().and_then(|pid| pid.parse().ok());
    pid.is_some_and(is_parent)
}

/// Whether process `pid` is the parent of this process, and therefore alive.
pub(super) fn is_parent(pid: i32) -> bool {
    rustix::process::getppid().is_some_and(|parent| parent.as_raw_nonzero().get() == pid)
}

/// Whether process `pid` runs: false as soon as it has ended, even before its parent has waited for
/// it (on Linux since 5.3).
pub fn is_running(pid: i32) -> bool {
    let Some(pid) = rustix::process::Pid::from_raw(pid) else { return false };
    #[cfg(any(target_os = "linux", target_os = "android"))]
    {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        use rustix::process::{PidfdFlags, pidfd_open};
        if let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) {
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            return poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&now)) == Ok(0);
        }
    }
    rustix::process::test_kill_process(pid).is_ok()
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    #[test]
    fn an_unreaped_process_does_not_run() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id().cast_signed();
        assert!(is_running(pid) && is_running(std::process::id().cast_signed()));
        child.kill().unwrap();
        while !crate::rank_process::has_ended(&child) {
            std::thread::yield_now();
        }
        assert!(!is_running(pid));
        child.wait().unwrap();
        assert!(!is_running(pid));
    }

    #[test]
    fn a_rank_reads_what_its_supervisor_set() {
        let info =
            RankInfo { rank: 1, world_size: 3, local_rank: 1, local_world_size: 3, node_rank: 0 };
        let env = RankEnv {
            supervisor: 1,
            secret: "a b".into(),
            started: 12.5,
            info,
            generation: 3,
            first_world_size: 4,
            port: 4711,
        };
        let variables = env.variables();
        let read = variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
        assert_eq!(RankEnv::read(&read).unwrap(), Some(env));
        assert_eq!(RankEnv::read(&Variables::from([("RANK", "1")])).unwrap(), None);
        assert_says!(
            RankEnv::read(&Variables::from([(SUPERVISOR, "1")])).unwrap_err(),
            "launch: the environment variable RANK (a number) is not set … unset them all …"
        );
    }

    #[test]
    fn a_stranger_is_no_supervisor() {
        assert!(is_parent(std::os::unix::process::parent_id().cast_signed()));
        assert!(!is_parent(std::process::id().cast_signed()));
    }
}
