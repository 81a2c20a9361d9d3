//! The environment `slurm`: ranks started by `srun`.

use fulgurite_config::register_environment;
use fulgurite_error::{Error, Result};
use fulgurite_launch::Interruption;
use fulgurite_launch::environment::{ClusterEnvironment, EnvironmentConfig, Requeue, Variables};
use serde::{Deserialize, Serialize};

use crate::main_address::master_port;
use crate::mpi;
use crate::node_list::first_node;
use crate::process::{Names, Process};

/// `environment.type = "slurm"`: the ranks were started by `srun`.
///
/// - `SLURM_NTASKS`, `SLURM_PROCID`, `SLURM_LOCALID`, `SLURM_NODEID`: required; the world size,
///   rank, local rank and node rank.
/// - `SLURM_STEP_TASKS_PER_NODE`, `SLURM_TASKS_PER_NODE`: ranks of each node, such as `2(x3),1`;
///   else `SLURM_NTASKS_PER_NODE`; else the ranks divided by `SLURM_NNODES`.
/// - `MASTER_ADDR`: rank 0's host. Without it, 127.0.0.1 if all ranks are on one node; else the
///   first host of `SLURM_STEP_NODELIST` or `SLURM_NODELIST`; else 127.0.0.1.
/// - `MASTER_PORT`: a free port there; else 15000 plus the last four digits of `SLURM_JOB_ID`
///   (12910 without one).
/// - `SLURM_RESTART_COUNT`: how often the job was requeued.
/// - `SLURM_ARRAY_JOB_ID`, `SLURM_ARRAY_TASK_ID`: the array element to requeue.
///
/// Detected by `SLURM_NTASKS`, except in an allocation's shell, which is not a rank. A process
/// counts as a shell if the job's name is `bash` or `interactive`, unless it belongs to an `srun`
/// step of several tasks without a terminal. To use one node of an allocation without `srun`, set
/// `trainer.environment = "local"`. For ranks started by an `mpirun` in the allocation, the
/// environment is `mpi`.
///
/// # Requeueing
/// After [`requeue_signal`](Self::requeue_signal) (`sbatch --signal=SIGUSR1@90`: 90 seconds before
/// the time is up), the ranks finish their step, save and end. Rank 0 calls `scontrol requeue`, and
/// all ranks exit with 0. The requeued job resumes from that checkpoint. The job must allow
/// requeueing (`sbatch --requeue`, or the cluster's default).
#[derive(Debug, Clone, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct Slurm {
    /// Whether the job is requeued after `requeue_signal`.
    #[default(true)]
    pub auto_requeue: bool,
    /// The signal that comes before Slurm takes the nodes: `"SIGUSR1"` or `"SIGTERM"`.
    #[default(RequeueSignal::Sigusr1)]
    pub requeue_signal: RequeueSignal,
}

/// A signal after which a job may be requeued.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum RequeueSignal {
    /// The usual choice for `sbatch --signal`.
    Sigusr1,
    /// Sent by Slurm when it preempts a job or the job's time is up.
    Sigterm,
}

impl RequeueSignal {
    fn interruption(self) -> Interruption {
        match self {
            Self::Sigusr1 => Interruption::Preemption,
            Self::Sigterm => Interruption::Termination,
        }
    }
}

const NAMES: Names = Names {
    size: "SLURM_NTASKS",
    rank: "SLURM_PROCID",
    local_rank: "SLURM_LOCALID",
    local_size: "the number of tasks of this node",
};

register_environment!(
    "slurm",
    Slurm,
    "Ranks started by srun",
    r#"{ type = "slurm", auto_requeue = false }"#
);

#[typetag::serde(name = "slurm")]
impl EnvironmentConfig for Slurm {
    fn priority(&self) -> i32 {
        80
    }

    fn detect(&self, variables: &Variables) -> bool {
        variables.is_set("SLURM_NTASKS") && !is_shell(variables) && !mpi::has_started(variables)
    }

    fn build(&self, variables: &Variables) -> Result<Box<dyn ClusterEnvironment>> {
        let number = |name| variables.require::<usize>(name, "a number that Slurm sets");
        let world_size = number("SLURM_NTASKS")?;
        if world_size > 1 && !variables.is_set("SLURM_STEP_ID") {
            return Err(Error::Launch(format!(
                "SLURM_NTASKS = {world_size} tasks are allocated, but this process was not started \
                 by srun (SLURM_STEP_ID is not set), so the others would never come. Start the \
                 program with `srun`, or set trainer.environment = \"local\" to run on this node \
                 alone"
            )));
        }
        let node_rank = number("SLURM_NODEID")?;
        let local_world_size = local_world_size(variables, world_size, node_rank)?;
        let job = variables.get("SLURM_JOB_ID").unwrap_or_default();
        let step = variables.get("SLURM_STEP_ID").unwrap_or_default();
        let process = Process {
            name: "slurm",
            names: NAMES,
            world_size,
            global_rank: number("SLURM_PROCID")?,
            local_rank: number("SLURM_LOCALID")?,
            local_world_size,
            node_rank,
            main_address: main_address(variables, local_world_size == world_size)?,
            main_port: main_port(variables, job)?,
            job_id: format!("slurm-{job}.{step}"),
            restart_count: variables
                .parse("SLURM_RESTART_COUNT", "how often the job was requeued, a number")?
                .unwrap_or(0),
            restart_id: None,
            requeue: self.requeue(variables)?,
        };
        Ok(Box::new(process.check_with(variables)?))
    }
}

impl Slurm {
    fn requeue(&self, variables: &Variables) -> Result<Option<Requeue>> {
        if !self.auto_requeue {
            return Ok(None);
        }
        let number = |name| variables.parse::<u64>(name, "a number that Slurm sets");
        // An array element shares the array's job id; requeueing that id would requeue the whole
        // array.
        let array = number("SLURM_ARRAY_JOB_ID")?.zip(number("SLURM_ARRAY_TASK_ID")?);
        let job = match (array, number("SLURM_JOB_ID")?) {
            (Some((array, task)), _) => format!("{array}_{task}"),
            (None, Some(job)) => job.to_string(),
            (None, None) => return Ok(None),
        };
        Ok(Some(Requeue {
            on: self.requeue_signal.interruption(),
            program: "scontrol".to_owned(),
            arguments: vec!["requeue".to_owned(), job],
        }))
    }
}

/// Returns whether this process runs in an allocation's shell (`salloc` or `srun --pty bash`),
/// which is not a rank.
fn is_shell(variables: &Variables) -> bool {
    let is_interactive = matches!(variables.get("SLURM_JOB_NAME"), Some("bash" | "interactive"));
    // Slurm's own steps (batch, interactive, extern) have the highest numbers.
    let step = variables.get("SLURM_STEP_ID").and_then(|id| id.parse::<u32>().ok());
    let is_srun = step.is_some_and(|id| id < 0xffff_fff0) && !variables.is_set("SLURM_PTY_PORT");
    let several = variables.get("SLURM_NTASKS").is_some_and(|tasks| tasks != "1");
    is_interactive && !(is_srun && several)
}

fn local_world_size(variables: &Variables, world_size: usize, node: usize) -> Result<usize> {
    for name in ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"] {
        let Some(list) = variables.get(name) else { continue };
        return tasks_of_node(list, node).ok_or_else(|| {
            Error::Launch(format!(
                "the environment variable {name} is `{list}`, but should give the tasks of every \
                 node, such as `2(x3),1`, and so those of node SLURM_NODEID = {node}"
            ))
        });
    }
    if let Some(tasks) = variables.parse("SLURM_NTASKS_PER_NODE", "the number of tasks a node")? {
        return Ok(tasks);
    }
    let nodes: usize = variables.parse("SLURM_NNODES", "the number of nodes")?.unwrap_or(1);
    match nodes {
        0 => Err(Error::Launch("SLURM_NNODES must be 1 or more".into())),
        _ if world_size.is_multiple_of(nodes) => Ok(world_size / nodes),
        _ => Err(Error::Launch(format!(
            "SLURM_NTASKS = {world_size} tasks do not divide evenly among SLURM_NNODES = {nodes} \
             nodes, and none of SLURM_STEP_TASKS_PER_NODE, SLURM_TASKS_PER_NODE and \
             SLURM_NTASKS_PER_NODE is set. Start the job with `--ntasks-per-node`"
        ))),
    }
}

/// Entry `node` of a list such as `2(x3),1`.
fn tasks_of_node(list: &str, node: usize) -> Option<usize> {
    let mut nodes = 0;
    for part in list.split(',') {
        let (tasks, repeat) = match part.trim().split_once("(x") {
            Some((tasks, repeat)) => (tasks, repeat.strip_suffix(')')?.parse().ok()?),
            None => (part.trim(), 1_usize),
        };
        let tasks = tasks.parse().ok()?;
        nodes = repeat.saturating_add(nodes);
        if node < nodes {
            return Some(tasks);
        }
    }
    None
}

fn main_address(variables: &Variables, is_one_node: bool) -> Result<String> {
    if let Some(address) = variables.get("MASTER_ADDR") {
        return Ok(address.to_owned());
    }
    if is_one_node {
        return Ok("127.0.0.1".to_owned());
    }
    for name in ["SLURM_STEP_NODELIST", "SLURM_NODELIST"] {
        let Some(list) = variables.get(name) else { continue };
        return first_node(list).ok_or_else(|| {
            Error::Launch(format!(
                "the environment variable {name} is `{list}`, but should be a list of nodes such \
                 as `node[01-04]`; MASTER_ADDR can name rank 0's host instead"
            ))
        });
    }
    Ok("127.0.0.1".to_owned())
}

fn main_port(variables: &Variables, job_id: &str) -> Result<u16> {
    if let Some(port) = master_port(variables)? {
        return Ok(port);
    }
    // Different for jobs on one node, the same for all ranks of a job.
    let digits = job_id.get(job_id.len().saturating_sub(4)..).unwrap_or_default();
    Ok(digits.parse::<u16>().map_or(12910, |digits| 15000 + digits))
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    const FULL: [(&str, &str); 7] = [
        ("SLURM_NTASKS", "4"),
        ("SLURM_PROCID", "3"),
        ("SLURM_LOCALID", "1"),
        ("SLURM_NODEID", "1"),
        ("SLURM_STEP_NODELIST", "node[07-08]"),
        ("SLURM_JOB_ID", "1234567"),
        ("SLURM_STEP_ID", "0"),
    ];
    const NODES: (&str, &str) = ("SLURM_NNODES", "2");

    /// The full variable set with changes; an empty value removes a variable.
    fn with<'a>(changes: &[(&'a str, &'a str)]) -> Variables {
        let kept = FULL.iter().filter(|(name, _)| changes.iter().all(|(other, _)| name != other));
        kept.chain(changes.iter().filter(|(_, value)| !value.is_empty())).copied().collect()
    }

    fn build(changes: &[(&str, &str)]) -> Box<dyn ClusterEnvironment> {
        Slurm::default().build(&with(changes)).unwrap()
    }

    fn error(changes: &[(&str, &str)]) -> String {
        Slurm::default().build(&with(changes)).unwrap_err().to_string()
    }

    // checklist: Lightning: _set_world_ranks
    #[test]
    fn sruns_variables_are_read() {
        let environment = build(&[NODES]);
        assert!(environment.creates_processes_externally());
        assert_eq!((environment.global_rank(), environment.world_size()), (3, 4));
        assert_eq!((environment.local_rank(), environment.local_world_size()), (1, 2));
        assert_eq!(environment.node_rank(), 1);
        assert_eq!((environment.main_address(), environment.main_port()), ("node07".into(), 19567));
        assert_eq!(environment.job_id(), "slurm-1234567.0");
    }

    #[test]
    fn finds_the_tasks_of_its_node() {
        let local = |name, value| build(&[(name, value)]).local_world_size();
        assert_eq!(local("SLURM_STEP_TASKS_PER_NODE", "2(x2)"), 2);
        assert_eq!(local("SLURM_TASKS_PER_NODE", "1,3"), 3);
        assert_eq!(local("SLURM_NTASKS_PER_NODE", "2"), 2);
        for (list, node, tasks) in [
            ("2(x3),1", 2, Some(2)),
            ("2(x3),1", 3, Some(1)),
            ("2(x3),1", 4, None),
            ("1,2(x18446744073709551615)", 7, Some(2)),
            ("2(x3", 0, None),
            ("two", 0, None),
            ("", 0, None),
        ] {
            assert_eq!(tasks_of_node(list, node), tasks, "{list} {node}");
        }
    }

    #[test]
    fn address_and_port_have_other_sources() {
        let environment = build(&[NODES, ("MASTER_ADDR", "head"), ("MASTER_PORT", "4711")]);
        assert_eq!((environment.main_address(), environment.main_port()), ("head".into(), 4711));
        let list = [NODES, ("SLURM_STEP_NODELIST", ""), ("SLURM_NODELIST", "alpha[3,1], beta")];
        assert_eq!(build(&list).main_address(), "alpha3");
        let nothing = [NODES, ("SLURM_STEP_NODELIST", ""), ("SLURM_JOB_ID", "")];
        assert_eq!(build(&nothing).main_address(), "127.0.0.1");
        assert_eq!(build(&nothing).main_port(), 12910);
        assert_eq!(build(&[NODES, ("SLURM_JOB_ID", "42")]).main_port(), 15042);
        assert_eq!(build(&[("SLURM_TASKS_PER_NODE", "2,4")]).main_address(), "127.0.0.1");
    }

    #[test]
    fn a_shell_in_an_allocation_is_not_a_rank() {
        assert!(Slurm::default().detect(&with(&[])));
        for name in [("SLURM_JOB_NAME", "bash"), ("SLURM_JOB_NAME", "interactive")] {
            let detects = |change| Slurm::default().detect(&with(&[name, change]));
            // `salloc`, its step in newer Slurm, `srun --pty bash`, `srun -n 4 --pty bash`.
            assert!(!detects(("SLURM_STEP_ID", "")));
            assert!(!detects(("SLURM_STEP_ID", "4294967290")));
            assert!(!detects(("SLURM_NTASKS", "1")));
            assert!(!detects(("SLURM_PTY_PORT", "40000")));
            // `srun` in such a shell.
            assert!(detects(("SLURM_STEP_ID", "1")));
        }
        assert!(!Slurm::default().detect(&with(&[("SLURM_NTASKS", "")])));
    }

    #[test]
    fn ranks_of_mpirun_are_not_tasks() {
        let detects = |changes: &[(&str, &str)]| Slurm::default().detect(&with(changes));
        assert!(!detects(&[("OMPI_COMM_WORLD_RANK", "3")]));
        assert!(!detects(&[("PMI_RANK", "3"), ("MPI_LOCALRANKID", "1")]));
        assert!(!detects(&[("SLURM_STEP_ID", ""), ("PMI_RANK", "3")]));
        // `srun --mpi=pmi2`
        assert!(detects(&[("PMI_RANK", "3"), ("PMI_SIZE", "4")]));
    }

    // checklist: Lightning: SLURMEnvironment: auto_requeue, requeue_signal
    #[test]
    fn a_job_is_requeued_after_a_signal() {
        let requeue = |changes: &[(&str, &str)]| build(&[&[NODES], changes].concat()).requeue();
        let by_default = requeue(&[]).unwrap();
        assert_eq!(by_default.on, Interruption::Preemption);
        assert_eq!(by_default.program, "scontrol");
        assert_eq!(by_default.arguments, ["requeue", "1234567"]);
        let element = [("SLURM_ARRAY_JOB_ID", "1234567"), ("SLURM_ARRAY_TASK_ID", "3")];
        assert_eq!(requeue(&element).unwrap().arguments, ["requeue", "1234567_3"]);
        assert_eq!(requeue(&[("SLURM_JOB_ID", "")]), None);
        let configured = |json: &str| -> Result<Box<dyn EnvironmentConfig>, _> {
            serde_json::from_str(&format!(r#"{{ "type": "slurm", {json} }}"#))
        };
        let requeue = |json| configured(json).unwrap().build(&with(&[NODES])).unwrap().requeue();
        assert_eq!(requeue(r#""auto_requeue": false"#), None);
        let on = requeue(r#""requeue_signal": "SIGTERM""#).unwrap().on;
        assert_eq!(on, Interruption::Termination);
        assert_says!(
            configured(r#""requeue_signal": "SIGKILL""#).unwrap_err(),
            "unknown variant `SIGKILL`, expected `SIGUSR1` or `SIGTERM` …"
        );
    }

    #[test]
    fn requeues_are_counted() {
        assert_eq!(build(&[NODES]).restart_count(), 0);
        assert_eq!(build(&[NODES, ("SLURM_RESTART_COUNT", "2")]).restart_count(), 2);
    }

    #[test]
    fn mistakes_are_named() {
        assert_says!(error(&[("SLURM_STEP_ID", "")]), "launch: SLURM_NTASKS = 4 … `srun` …");
        assert_says!(error(&[("SLURM_PROCID", "")]), "launch: … SLURM_PROCID … is not set …");
        assert_says!(error(&[("SLURM_LOCALID", "x")]), "launch: … SLURM_LOCALID is `x` … number …");
        assert_says!(error(&[NODES, ("SLURM_PROCID", "9")]), "launch: SLURM_PROCID = 9 … below …");
        assert_says!(error(&[("SLURM_NNODES", "3")]), "launch: SLURM_NTASKS = 4 … not divide …");
        assert_says!(
            error(&[("SLURM_TASKS_PER_NODE", "4")]),
            "launch: … SLURM_TASKS_PER_NODE is `4` … tasks of every node … SLURM_NODEID = 1"
        );
        assert_says!(
            error(&[NODES, ("SLURM_STEP_NODELIST", "node[")]),
            "launch: … SLURM_STEP_NODELIST is `node[` … `node[01-04]` … MASTER_ADDR …"
        );
        assert_says!(error(&[NODES, ("MASTER_PORT", "0")]), "launch: MASTER_PORT is `0` … 1-65535");
        assert_says!(
            error(&[NODES, ("WORLD_SIZE", "8")]),
            "launch: WORLD_SIZE = 8 contradicts SLURM_NTASKS = 4 (environment `slurm`) …"
        );
        assert_says!(
            error(&[NODES, ("RANK", "0")]),
            "launch: RANK = 0 contradicts SLURM_PROCID = 3 (environment `slurm`) …"
        );
        assert_says!(
            error(&[NODES, ("SLURM_RESTART_COUNT", "some")]),
            "launch: … SLURM_RESTART_COUNT is `some` … requeued, a number"
        );
        assert_says!(
            build(&[NODES]).validate_settings(4, 1).unwrap_err(),
            "launch: `trainer.devices` = 4 … = 1, but 2 of the 4 … (environment `slurm`). Start 4 …"
        );
        // In wrapping arithmetic this makes 4.
        assert!(build(&[NODES]).validate_settings((1 << 63) + 2, 2).is_err());
        assert_says!(
            build(&[NODES]).validate_settings(4, 2).unwrap_err(),
            "launch: trainer.devices = 4 … make 8 ranks, but SLURM_NTASKS = 4 … start 8 …"
        );
    }
}
