//! What the supervisor tells the ranks it starts, through environment variables.

use std::process::Command;

use super::rank::Place;
use crate::environment::Variables;
use crate::{Error, Result};

const SUPERVISOR: &str = "FULGURITE_SUPERVISOR";
const JOB_ID: &str = "FULGURITE_JOB_ID";
const START_TIME: &str = "FULGURITE_START_TIME";

/// Who a rank is, in its supervisor's words. The variables of `torchrun` are set besides our own,
/// so that programs that read them work.
#[derive(Debug, PartialEq)]
pub(super) struct Handover {
    /// The supervisor's process id. That it is there says: the store is hosted by the supervisor.
    pub(super) supervisor: i32,
    pub(super) job_id: String,
    /// When the supervisor was started, in seconds since 1970.
    pub(super) started: f64,
    pub(super) place: Place,
    /// The store's port on this host.
    pub(super) port: u16,
}

impl Handover {
    pub(super) fn variables(&self) -> [(&'static str, String); 11] {
        let place = &self.place;
        [
            (SUPERVISOR, self.supervisor.to_string()),
            (JOB_ID, self.job_id.clone()),
            (START_TIME, format!("{:.6}", self.started)),
            ("RANK", place.rank.to_string()),
            ("WORLD_SIZE", place.world_size.to_string()),
            ("LOCAL_RANK", place.local_rank.to_string()),
            ("LOCAL_WORLD_SIZE", place.local_world_size.to_string()),
            ("GROUP_RANK", place.node_rank.to_string()),
            ("NODE_RANK", place.node_rank.to_string()),
            ("MASTER_ADDR", "127.0.0.1".to_owned()),
            ("MASTER_PORT", self.port.to_string()),
        ]
    }

    pub(super) fn set(&self, command: &mut Command) {
        command.envs(self.variables());
    }

    /// What was handed over to this process; `None` if no supervisor started it.
    pub(super) fn read(variables: &Variables) -> Result<Option<Self>> {
        if !variables.is_set(SUPERVISOR) {
            return Ok(None);
        }
        let number = |name| variables.require::<usize>(name, "a number");
        let place = Place {
            rank: number("RANK")?,
            world_size: number("WORLD_SIZE")?,
            local_rank: number("LOCAL_RANK")?,
            local_world_size: number("LOCAL_WORLD_SIZE")?,
            node_rank: number("GROUP_RANK")?,
        };
        place.check("RANK", "WORLD_SIZE")?;
        Ok(Some(Self {
            supervisor: variables.require(SUPERVISOR, "the supervisor's process id")?,
            job_id: variables.require(JOB_ID, "the job's id")?,
            started: variables.require(START_TIME, "seconds since 1970")?,
            place,
            port: variables.require("MASTER_PORT", "the store's port")?,
        }))
    }

    /// Ties this process to its supervisor: when that ends, however it ends, this one is killed.
    ///
    /// # Errors
    /// If the supervisor is not the parent of this process (any more).
    pub(super) fn die_with_supervisor(&self) -> Result<()> {
        #[cfg(any(target_os = "linux", target_os = "android"))]
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
            .map_err(|e| Error::Launch(format!("cannot tie this rank to its supervisor: {e}")))?;
        // It may have ended before the line above.
        if self.supervisor_lives() {
            return Ok(());
        }
        Err(Error::Launch(format!(
            "{SUPERVISOR} says that process {} supervises this one, but it is not its parent. If \
             a rank started this program, unset {SUPERVISOR}, RANK and WORLD_SIZE for it; else \
             the supervisor was killed",
            self.supervisor
        )))
    }

    fn supervisor_lives(&self) -> bool {
        is_parent(self.supervisor)
    }
}

/// Whether process `pid` is this process's parent, and so alive.
pub(super) fn is_parent(pid: i32) -> bool {
    rustix::process::getppid().is_some_and(|parent| parent.as_raw_nonzero().get() == pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_handed_over_arrives() {
        let place =
            Place { rank: 1, world_size: 3, local_rank: 1, local_world_size: 3, node_rank: 0 };
        let handover =
            Handover { supervisor: 1, job_id: "a b".into(), started: 12.5, place, port: 4711 };
        let variables = handover.variables();
        let read = variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
        assert_eq!(Handover::read(&read).unwrap(), Some(handover));
        assert_eq!(Handover::read(&Variables::from([("RANK", "1")])).unwrap(), None);
        insta::assert_snapshot!(
            Handover::read(&Variables::from([(SUPERVISOR, "1")])).unwrap_err(),
            @"launch: the environment variable RANK (a number) is not set, but others of its family are. Set it, or unset them all to run without a launcher"
        );
    }

    #[test]
    fn a_stranger_is_no_supervisor() {
        assert!(is_parent(std::os::unix::process::parent_id().cast_signed()));
        assert!(!is_parent(std::process::id().cast_signed()));
    }
}
