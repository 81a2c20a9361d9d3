//! The environment `torchelastic`: ranks started by `torchrun`.

use fulgurite_config::register_environment;
use fulgurite_error::{Error, Result};
use fulgurite_launch::environment::{ClusterEnvironment, EnvironmentConfig, Variables};
use serde::{Deserialize, Serialize};

use crate::mpi;
use crate::process::{Names, Process};
use crate::starter::{start_time, starter};

/// `environment.type = "torchelastic"`: the ranks were started by `torchrun`, or by another program
/// that sets the same variables.
///
/// - `RANK`, `WORLD_SIZE`, `LOCAL_RANK`: required.
/// - `MASTER_ADDR`, `MASTER_PORT`: required; rank 0's host, and a free port on it.
/// - `LOCAL_WORLD_SIZE`: the number of ranks on this node. Without it, `WORLD_SIZE` is divided by
///   `GROUP_WORLD_SIZE` or `NNODES` if one is set; else all ranks are on one node.
/// - `GROUP_RANK`, `NODE_RANK`: this node's rank; without them `RANK / LOCAL_WORLD_SIZE`.
/// - `TORCHELASTIC_RUN_ID`: the job's id (`--rdzv-id`), by which a restart finds the job's
///   checkpoints. Without one, restarts of the same `torchrun` on rank 0's node belong together.
/// - `TORCHELASTIC_RESTART_COUNT`: how often `torchrun` has restarted the ranks.
/// - `TORCHELASTIC_USE_AGENT_STORE`: `True` if `torchrun`'s own store uses `MASTER_PORT`; then this
///   job's store uses the next port.
///
/// Detected by `RANK` or `LOCAL_RANK`. `WORLD_SIZE` alone counts only outside of Slurm and MPI,
/// where scripts often set it. In a Slurm step with `WORLD_SIZE` tasks, `RANK` must equal
/// `SLURM_PROCID`; otherwise a script has set the same `RANK` for all tasks.
#[derive(Debug, Clone, Default, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(deny_unknown_fields)]
pub struct TorchElastic {}

register_environment!(
    "torchelastic",
    TorchElastic,
    "Ranks started by torchrun, or by anything that sets its variables",
    r#"{ type = "torchelastic" }"#
);

#[typetag::serde(name = "torchelastic")]
impl EnvironmentConfig for TorchElastic {
    fn priority(&self) -> i32 {
        100
    }

    fn detect(&self, variables: &Variables) -> bool {
        let set = |name| variables.is_set(name);
        set("RANK")
            || set("LOCAL_RANK")
            || (set("WORLD_SIZE") && !set("SLURM_PROCID") && !mpi::has_started(variables))
    }

    fn build(&self, variables: &Variables) -> Result<Box<dyn ClusterEnvironment>> {
        let world_size = variables.require("WORLD_SIZE", "the number of ranks")?;
        let global_rank = variables.require("RANK", "this process's rank, a number")?;
        let local_rank = variables.require("LOCAL_RANK", "this process's rank on its node")?;
        let local_world_size = local_world_size(variables, world_size, global_rank, local_rank)?;
        let what = "this node's rank, a number";
        let node_rank = match variables.parse("GROUP_RANK", what)? {
            Some(rank) => rank,
            None => variables
                .parse("NODE_RANK", what)?
                .unwrap_or_else(|| global_rank.checked_div(local_world_size).unwrap_or(0)),
        };
        check_tasks(variables, world_size, global_rank)?;
        let address = "the host that rank 0 runs on";
        let restarts = "how often the ranks were started again, a number";
        let process = Process {
            name: "torchelastic",
            names: Names {
                size: "WORLD_SIZE",
                rank: "RANK",
                local_rank: "LOCAL_RANK",
                local_size: "LOCAL_WORLD_SIZE",
            },
            world_size,
            global_rank,
            local_rank,
            local_world_size,
            node_rank,
            main_address: variables.require("MASTER_ADDR", address)?,
            main_port: main_port(variables)?,
            job_id: variables.get("TORCHELASTIC_RUN_ID").unwrap_or("torchelastic").to_owned(),
            restart_count: variables.parse("TORCHELASTIC_RESTART_COUNT", restarts)?.unwrap_or(0),
            restart_id: restart_id(variables),
            requeue: None,
        };
        Ok(Box::new(process.check()?))
    }
}

/// The id that a job's restarts share, if the job's id is not unique: `torchrun` without
/// `--rdzv-id` calls all jobs `none`.
fn restart_id(variables: &Variables) -> Option<String> {
    match variables.get("TORCHELASTIC_RUN_ID") {
        Some(id) if id != "none" && !id.is_empty() => None,
        _ => {
            let agent = starter("LOCAL_RANK")?;
            Some(format!("torchelastic-process-{agent}-{}", start_time(agent)?))
        }
    }
}

/// Checks that a `RANK` not set by `torchrun` matches the Slurm task, if each task is a rank.
fn check_tasks(variables: &Variables, world_size: usize, rank: usize) -> Result<()> {
    let of_torchrun = variables.is_set("TORCHELASTIC_RUN_ID");
    if of_torchrun || !variables.is_set("SLURM_STEP_ID") {
        return Ok(());
    }
    let number = |name| variables.parse::<usize>(name, "a number that Slurm sets");
    match (number("SLURM_NTASKS")?, number("SLURM_PROCID")?) {
        (Some(tasks), Some(task)) if tasks == world_size && task != rank => {
            Err(Error::Launch(format!(
                "RANK = {rank} contradicts SLURM_PROCID = {task} of SLURM_NTASKS = {tasks} = WORLD_SIZE tasks: \
                 a variable that the script sets is the same in all tasks. Unset RANK, WORLD_SIZE and LOCAL_RANK, \
                 so that Slurm's variables are read, or set them in each task from SLURM_PROCID, SLURM_NTASKS and \
                 SLURM_LOCALID"
            )))
        }
        _ => Ok(()),
    }
}

fn local_world_size(
    variables: &Variables,
    world_size: usize,
    rank: usize,
    local_rank: usize,
) -> Result<usize> {
    if let Some(size) = variables.parse("LOCAL_WORLD_SIZE", "the number of ranks of this node")? {
        return Ok(size);
    }
    for name in ["GROUP_WORLD_SIZE", "NNODES"] {
        let Some(nodes) = variables.parse::<usize>(name, "the number of nodes")? else { continue };
        if nodes == 0 || !world_size.is_multiple_of(nodes) {
            return Err(Error::Launch(format!(
                "WORLD_SIZE = {world_size} ranks do not divide evenly among {name} = {nodes} \
                 nodes; set LOCAL_WORLD_SIZE to the number of ranks of this node"
            )));
        }
        return Ok(world_size / nodes);
    }
    if local_rank != rank {
        return Err(Error::Launch(format!(
            "LOCAL_RANK = {local_rank} differs from RANK = {rank}, so there are several nodes; set \
             LOCAL_WORLD_SIZE to the number of ranks of this one"
        )));
    }
    Ok(world_size)
}

fn main_port(variables: &Variables) -> Result<u16> {
    let port: u16 =
        variables.require("MASTER_PORT", "a free TCP port of rank 0's host, 1-65535")?;
    let taken = variables.get("TORCHELASTIC_USE_AGENT_STORE");
    let taken = taken.is_some_and(|value| value.eq_ignore_ascii_case("true") || value == "1");
    let port = if taken { port.checked_add(1) } else { Some(port) };
    port.filter(|port| *port != 0).ok_or_else(|| {
        Error::Launch(format!(
            "MASTER_PORT = {} leaves no port for this job's store; choose one between 1024 and \
             65534",
            variables.get("MASTER_PORT").unwrap_or_default()
        ))
    })
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    const FULL: [(&str, &str); 6] = [
        ("RANK", "3"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("MASTER_ADDR", "node0"),
        ("MASTER_PORT", "29500"),
    ];

    /// The full variable set with changes; an empty value removes a variable.
    fn with<'a>(changes: &[(&'a str, &'a str)]) -> Variables {
        let kept = FULL.iter().filter(|(name, _)| changes.iter().all(|(other, _)| name != other));
        kept.chain(changes.iter().filter(|(_, value)| !value.is_empty())).copied().collect()
    }

    fn build(changes: &[(&str, &str)]) -> Box<dyn ClusterEnvironment> {
        TorchElastic {}.build(&with(changes)).unwrap()
    }

    fn error(changes: &[(&str, &str)]) -> String {
        let variables = with(changes);
        assert!(TorchElastic {}.detect(&variables), "partly set variables are recognised");
        TorchElastic {}.build(&variables).unwrap_err().to_string()
    }

    // checklist: Lightning: _set_world_ranks
    // checklist: NeMo: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    #[test]
    fn torchruns_variables_are_read() {
        let environment = build(&[("GROUP_RANK", "1"), ("TORCHELASTIC_RUN_ID", "run")]);
        assert!(environment.creates_processes_externally());
        assert_eq!((environment.global_rank(), environment.world_size()), (3, 4));
        assert_eq!((environment.local_rank(), environment.local_world_size()), (1, 2));
        assert_eq!(environment.node_rank(), 1);
        assert_eq!((environment.main_address(), environment.main_port()), ("node0".into(), 29500));
        assert_eq!(environment.job_id(), "run");
        assert_eq!(build(&[("TORCHELASTIC_USE_AGENT_STORE", "True")]).main_port(), 29501);
        assert_eq!(build(&[("TORCHELASTIC_USE_AGENT_STORE", "False")]).main_port(), 29500);
    }

    // checklist: NeMo: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    #[test]
    fn missing_variables_are_derived() {
        assert_eq!(build(&[]).node_rank(), 1, "from RANK");
        assert_eq!(build(&[("NODE_RANK", "5")]).node_rank(), 5);
        let no_size = ("LOCAL_WORLD_SIZE", "");
        assert_eq!(build(&[no_size, ("NNODES", "2")]).local_world_size(), 2);
        assert_eq!(build(&[no_size, ("GROUP_WORLD_SIZE", "1")]).local_world_size(), 4);
        let one_node = build(&[no_size, ("LOCAL_RANK", "3")]);
        assert_eq!((one_node.local_world_size(), one_node.node_rank()), (4, 0));
    }

    #[test]
    fn is_recognised_by_any_of_its_variables() {
        let detect = |name| TorchElastic {}.detect(&Variables::from([(name, "1")]));
        assert!(detect("RANK") && detect("WORLD_SIZE") && detect("LOCAL_RANK"));
        assert!(!detect("MASTER_ADDR"), "often set for other launchers");
        let under_slurm = Variables::from([("WORLD_SIZE", "2"), ("SLURM_PROCID", "0")]);
        assert!(!TorchElastic {}.detect(&under_slurm));
    }

    // checklist: torchtune: is_distributed
    #[test]
    fn mistakes_are_named() {
        assert_says!(error(&[("RANK", "")]), "launch: … variable RANK … is not set …");
        assert_says!(error(&[("WORLD_SIZE", "")]), "launch: … variable WORLD_SIZE … is not set …");
        assert_says!(error(&[("LOCAL_RANK", "")]), "launch: … variable LOCAL_RANK … is not set …");
        assert_says!(
            error(&[("MASTER_ADDR", "")]),
            "launch: … variable MASTER_ADDR … is not set, but others …"
        );
        assert_says!(error(&[("MASTER_PORT", "")]), "launch: … MASTER_PORT … is not set …");
        assert_says!(error(&[("RANK", "first")]), "launch: … variable RANK is `first` … a number");
        assert_says!(error(&[("RANK", "-1")]), "launch: … variable RANK is `-1` … a number");
        assert_says!(error(&[("RANK", "4")]), "launch: RANK = 4 must be below WORLD_SIZE = 4");
        assert_says!(error(&[("LOCAL_RANK", "2")]), "launch: LOCAL_RANK = 2 must be below … = 2");
        assert_says!(error(&[("WORLD_SIZE", "0")]), "launch: WORLD_SIZE … must be 1 or more");
        assert_says!(error(&[("LOCAL_WORLD_SIZE", "8")]), "launch: LOCAL_WORLD_SIZE = 8 … above …");
        assert_says!(error(&[("LOCAL_WORLD_SIZE", "")]), "launch: LOCAL_RANK = 1 differs … = 3 …");
        assert_says!(
            error(&[("LOCAL_WORLD_SIZE", ""), ("NNODES", "3")]),
            "launch: WORLD_SIZE = 4 … not divide … NNODES = 3 … LOCAL_WORLD_SIZE …"
        );
        assert_says!(error(&[("MASTER_PORT", "http")]), "launch: … MASTER_PORT is `http` …");
        assert_says!(error(&[("MASTER_PORT", "70000")]), "launch: … MASTER_PORT is `70000` …");
        assert_says!(error(&[("MASTER_PORT", "0")]), "launch: MASTER_PORT = 0 leaves no port …");
        let agent = ("TORCHELASTIC_USE_AGENT_STORE", "True");
        assert_says!(error(&[("MASTER_PORT", "65535"), agent]), "launch: MASTER_PORT = 65535 …");
    }

    #[test]
    fn one_rank_for_all_tasks_is_refused() {
        let task = |id| [("SLURM_STEP_ID", "0"), ("SLURM_NTASKS", "4"), ("SLURM_PROCID", id)];
        build(&task("3"));
        assert_says!(error(&task("1")), "launch: RANK = 3 contradicts SLURM_PROCID = 1 … Unset …");
        // `srun torchrun`: each task is a node, or the task's ranks are.
        build(&[&task("1")[..], &[("TORCHELASTIC_RUN_ID", "run")]].concat());
        build(&[("SLURM_STEP_ID", "0"), ("SLURM_NTASKS", "2"), ("SLURM_PROCID", "1")]);
    }

    #[test]
    fn jobs_without_an_id_are_told_apart_by_torchrun() {
        let id = |id| build(&[("TORCHELASTIC_RUN_ID", id)]).restart_id();
        assert_eq!(id("pretrain"), "pretrain");
        assert!(id("none").starts_with("torchelastic-process-"), "{}", id("none"));
        assert_eq!((id("none"), id("none")), (id(""), id("none")));
        assert_eq!(build(&[("TORCHELASTIC_RUN_ID", "none")]).job_id(), "none");
    }

    #[test]
    fn restarts_are_counted() {
        assert_eq!(build(&[]).restart_count(), 0);
        assert_eq!(build(&[("TORCHELASTIC_RESTART_COUNT", "2")]).restart_count(), 2);
        assert_says!(
            error(&[("TORCHELASTIC_RESTART_COUNT", "-1")]),
            "launch: … TORCHELASTIC_RESTART_COUNT is `-1` … started again, a number"
        );
    }

    #[test]
    fn settings_must_fit() {
        build(&[]).validate_settings(2, 2).unwrap();
        assert_says!(
            build(&[]).validate_settings(4, 1).unwrap_err(),
            "launch: `trainer.devices` = 4 … = 1, but 2 of the 4 … (environment `torchelastic`) …"
        );
        assert_says!(
            build(&[]).validate_settings(8, 1).unwrap_err(),
            "launch: trainer.devices = 8 … make 8 ranks, but WORLD_SIZE = 4 … start 8 …"
        );
    }
}
