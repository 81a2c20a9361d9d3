//! The environment `kubernetes`: pods with one rank each.

use fulgurite_config::register_environment;
use fulgurite_error::{Error, Result};
use fulgurite_launch::environment::{ClusterEnvironment, EnvironmentConfig, Variables};
use serde::{Deserialize, Serialize};

use crate::main_address::{PORT, master_port};
use crate::process::{Names, Process};

/// `environment.type = "kubernetes"`: each pod is one rank, started by a controller of Kubeflow or
/// by a JobSet.
///
/// - `RANK` (set by PyTorchJob), `PET_NODE_RANK` (TrainJob and PyTorchJob) or
///   `JOB_COMPLETION_INDEX` (every indexed Job, hence every JobSet and TrainJob): the pod's rank.
/// - `WORLD_SIZE` (PyTorchJob; your manifest under a JobSet) or `PET_NNODES` (TrainJob and
///   PyTorchJob): the number of pods.
/// - `MASTER_ADDR` (PyTorchJob) or `PET_MASTER_ADDR` (TrainJob): the first pod's name. Without
///   them, a JobSet's first pod is derived from `JOBSET_NAME` and `REPLICATED_JOB_NAME`, if your
///   manifest sets them.
/// - `MASTER_PORT` (PyTorchJob) or `PET_MASTER_PORT` (TrainJob): a free port there; 29500 without
///   them.
/// - `PET_NPROC_PER_NODE` (TrainJob and PyTorchJob): must be 1, `auto`, `cpu` or `gpu`, which all
///   count as one rank. For more ranks per pod, use `torchrun` as the pod's command; it reads all
///   `PET_*` variables.
/// - `JOBSET_UID` (your manifest, from the label `jobset.sigs.k8s.io/jobset-uid`): distinguishes
///   the JobSet from an earlier one with the same name.
/// - `JOBSET_RESTART_ATTEMPT` (your manifest, from the annotation
///   `jobset.sigs.k8s.io/restart-attempt`): the number of the JobSet's restarts.
///
/// Detected by `PET_NODE_RANK`, by `RANK` and `WORLD_SIZE` in a pod (`KUBERNETES_SERVICE_HOST`), or
/// by `JOBSET_NAME` and `JOB_COMPLETION_INDEX`. Not detected with `LOCAL_RANK`, which `torchrun` in
/// a pod sets. `JOB_COMPLETION_INDEX` alone is not enough: the job's pods may be unrelated. Name
/// the environment in that case. For an MPIJob, use the environment `mpi`.
#[derive(Debug, Clone, Default, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(deny_unknown_fields)]
pub struct Kubernetes {}

register_environment!(
    "kubernetes",
    Kubernetes,
    "One rank a pod: Kubeflow's PyTorchJob and TrainJob, JobSet",
    r#"{ type = "kubernetes" }"#
);

const RANKS: [&str; 3] = ["RANK", "PET_NODE_RANK", "JOB_COMPLETION_INDEX"];
const SIZES: [&str; 2] = ["WORLD_SIZE", "PET_NNODES"];

#[typetag::serde(name = "kubernetes")]
impl EnvironmentConfig for Kubernetes {
    /// Above `torchelastic`, which also claims `RANK`.
    fn priority(&self) -> i32 {
        110
    }

    fn detect(&self, variables: &Variables) -> bool {
        let set = |name| variables.is_set(name);
        let pytorch_job = set("KUBERNETES_SERVICE_HOST") && set("RANK") && set("WORLD_SIZE");
        let job_set = set("JOBSET_NAME") && set("JOB_COMPLETION_INDEX");
        !set("LOCAL_RANK") && (set("PET_NODE_RANK") || pytorch_job || job_set)
    }

    fn build(&self, variables: &Variables) -> Result<Box<dyn ClusterEnvironment>> {
        let processes = variables.get("PET_NPROC_PER_NODE").unwrap_or("1");
        if !matches!(processes, "1" | "auto" | "cpu" | "gpu") {
            return Err(Error::Launch(format!(
                "PET_NPROC_PER_NODE = {processes} processes are to run in each pod, but the pod's command has \
                 started one, and the environment `kubernetes` is for one rank a pod. Let the command be \
                 `torchrun --no-python PROGRAM …`, which reads PET_*, or set `nprocPerNode` (`numProcPerNode`) to 1"
            )));
        }
        let (rank_name, global_rank) = number(variables, &RANKS, "this pod's rank, a number")?;
        let what = "the number of pods, each of which is a rank";
        let (size_name, world_size) = number(variables, &SIZES, what)?;
        let main_address = main_address(variables)?;
        let main_port = match master_port(variables)? {
            Some(port) => port,
            None => variables.parse("PET_MASTER_PORT", PORT)?.unwrap_or(29500),
        };
        let what = "how often the JobSet was started again, a number";
        let process = Process {
            name: "kubernetes",
            names: Names {
                size: size_name,
                rank: rank_name,
                local_rank: "the local rank",
                local_size: "the ranks of a pod",
            },
            world_size,
            global_rank,
            local_rank: 0,
            local_world_size: 1,
            node_rank: global_rank,
            job_id: match variables.get("JOBSET_UID") {
                Some(uid) => format!("kubernetes-{uid}"),
                None => format!("kubernetes-{main_address}"),
            },
            main_address,
            main_port,
            restart_count: variables.parse("JOBSET_RESTART_ATTEMPT", what)?.unwrap_or(0),
            restart_id: None,
            requeue: None,
        };
        Ok(Box::new(process.check()?))
    }
}

/// Returns the first of these variables that is set, and its value. All that are set must agree.
fn number(
    variables: &Variables,
    names: &[&'static str],
    what: &str,
) -> Result<(&'static str, usize)> {
    let mut found = None;
    for name in names {
        let Some(value) = variables.parse::<usize>(name, what)? else { continue };
        match found {
            None => found = Some((*name, value)),
            Some((first, known)) if known != value => {
                return Err(Error::Launch(format!(
                    "{name} = {value} contradicts {first} = {known}: both say {what} (environment \
                     `kubernetes`). Unset the wrong one"
                )));
            }
            Some(_) => {}
        }
    }
    found.ok_or_else(|| {
        Error::Launch(format!(
            "none of the environment variables {} is set, one of which must be {what}. Under a JobSet write it \
             into the manifest: `- {{name: {}, value: …}}`",
            names.join(", "),
            names[0]
        ))
    })
}

fn main_address(variables: &Variables) -> Result<String> {
    let named = ["MASTER_ADDR", "PET_MASTER_ADDR"].into_iter().find_map(|name| variables.get(name));
    // A JobSet's first pod, in its headless service, which has the JobSet's name.
    let in_job_set = || {
        let (set, job) = (variables.get("JOBSET_NAME")?, variables.get("REPLICATED_JOB_NAME")?);
        Some(format!("{set}-{job}-0-0.{set}"))
    };
    named.map(str::to_owned).or_else(in_job_set).ok_or_else(|| {
        Error::Launch(
            "MASTER_ADDR is not set, and nothing else says what the first pod is called (environment \
             `kubernetes`). Under a JobSet it is `JOBSET-JOB-0-0.JOBSET`; write that into the manifest as \
             MASTER_ADDR, or set JOBSET_NAME and REPLICATED_JOB_NAME there"
                .into(),
        )
    })
}

#[cfg(test)]
mod tests {
    use fulgurite_launch::environment::detect;
    use fulgurite_test_message::assert_says;

    use super::*;

    const POD: (&str, &str) = ("KUBERNETES_SERVICE_HOST", "10.96.0.1");

    /// Variables set by the controller of PyTorchJob (training-operator 1.5).
    const PYTORCH_JOB: [(&str, &str); 5] = [
        POD,
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "pretrain-master-0"),
        ("MASTER_PORT", "23456"),
    ];

    /// Variables set by the controller of TrainJob with a torch runtime (trainer 2.0) and, for an
    /// indexed job, by Kubernetes.
    const TRAIN_JOB: [(&str, &str); 7] = [
        POD,
        ("PET_NNODES", "2"),
        ("PET_NPROC_PER_NODE", "1"),
        ("PET_NODE_RANK", "1"),
        ("PET_MASTER_ADDR", "pretrain-node-0-0.pretrain"),
        ("PET_MASTER_PORT", "29500"),
        ("JOB_COMPLETION_INDEX", "1"),
    ];

    /// Variables that a JobSet's manifest sets, with the index.
    const JOB_SET: [(&str, &str); 5] = [
        POD,
        ("JOB_COMPLETION_INDEX", "1"),
        ("JOBSET_NAME", "pretrain"),
        ("REPLICATED_JOB_NAME", "workers"),
        ("WORLD_SIZE", "2"),
    ];

    /// A variable set with changes; an empty value removes a variable.
    fn with<'a>(full: &[(&'a str, &'a str)], changes: &[(&'a str, &'a str)]) -> Variables {
        let kept = full.iter().filter(|(name, _)| changes.iter().all(|(other, _)| name != other));
        kept.chain(changes.iter().filter(|(_, value)| !value.is_empty())).copied().collect()
    }

    fn error(full: &[(&str, &str)], changes: &[(&str, &str)]) -> String {
        Kubernetes {}.build(&with(full, changes)).unwrap_err().to_string()
    }

    // checklist: Lightning: KubeflowEnvironment, never detected
    #[test]
    fn controllers_variables_are_read() {
        let jobs = [
            (&PYTORCH_JOB[..], "pretrain-master-0", 23456),
            (&TRAIN_JOB[..], "pretrain-node-0-0.pretrain", 29500),
            (&JOB_SET[..], "pretrain-workers-0-0.pretrain", 29500),
        ];
        for (job, address, port) in jobs {
            let rank = Kubernetes {}.build(&with(job, &[])).unwrap();
            assert!(rank.creates_processes_externally());
            assert_eq!((rank.global_rank(), rank.world_size(), rank.node_rank()), (1, 2, 1));
            assert_eq!((rank.local_rank(), rank.local_world_size()), (0, 1));
            assert_eq!((rank.main_address().as_str(), rank.main_port()), (address, port));
            assert_eq!((rank.job_id(), rank.restart_count()), (format!("kubernetes-{address}"), 0));
            rank.validate_settings(1, 2).unwrap();
        }
        let again = with(&JOB_SET, &[("JOBSET_RESTART_ATTEMPT", "2"), ("JOBSET_UID", "6e5a")]);
        let again = Kubernetes {}.build(&again).unwrap();
        assert_eq!((again.restart_count(), again.restart_id()), (2, "kubernetes-6e5a".to_owned()));
    }

    // checklist: Lightning: KubeflowEnvironment, never detected
    #[test]
    fn a_pod_is_a_rank_only_without_torchrun() {
        let name = |full: &[(&str, &str)], changes: &[(&str, &str)]| {
            let config = detect(&with(full, changes)).unwrap().unwrap();
            serde_json::to_value(config).unwrap()["type"].as_str().unwrap().to_owned()
        };
        let torchrun = [("LOCAL_RANK", "0"), ("RANK", "2"), ("WORLD_SIZE", "4")];
        let all: [&[(&str, &str)]; 3] = [&PYTORCH_JOB, &TRAIN_JOB, &JOB_SET];
        for full in all {
            assert_eq!(name(full, &[]), "kubernetes");
            assert_eq!(name(full, &torchrun), "torchelastic");
        }
        // Unrelated pods, and a hand-made job outside of a pod.
        assert_eq!(name(&[POD, ("JOB_COMPLETION_INDEX", "1")], &[]), "local");
        assert_eq!(name(&PYTORCH_JOB, &[("KUBERNETES_SERVICE_HOST", "")]), "torchelastic");
        assert_eq!(name(&[POD, ("OMPI_COMM_WORLD_RANK", "0")], &[]), "mpi");
    }

    #[test]
    fn mistakes_are_named() {
        assert_says!(
            error(&TRAIN_JOB, &[("PET_NPROC_PER_NODE", "4")]),
            "launch: PET_NPROC_PER_NODE = 4 … has started one … `kubernetes` … one rank a pod … `nprocPerNode` …"
        );
        assert_says!(
            error(&JOB_SET, &[("WORLD_SIZE", "")]),
            "launch: none of … WORLD_SIZE, PET_NNODES is set … number of pods … `- {name: WORLD_SIZE …"
        );
        assert_says!(
            error(&JOB_SET, &[("REPLICATED_JOB_NAME", "")]),
            "launch: MASTER_ADDR is not set … `JOBSET-JOB-0-0.JOBSET` … JOBSET_NAME …"
        );
        assert_says!(error(&TRAIN_JOB, &[("PET_NNODES", "1:4")]), "launch … PET_NNODES is `1:4` …");
        assert_says!(
            error(&TRAIN_JOB, &[("WORLD_SIZE", "8")]),
            "launch: PET_NNODES = 2 contradicts WORLD_SIZE = 8 … (environment `kubernetes`) …"
        );
        assert_says!(
            error(&TRAIN_JOB, &[("JOB_COMPLETION_INDEX", "0")]),
            "launch: JOB_COMPLETION_INDEX = 0 contradicts PET_NODE_RANK = 1 … Unset …"
        );
        assert_says!(error(&PYTORCH_JOB, &[("RANK", "2")]), "launch: RANK … below WORLD_SIZE = 2");
        assert_says!(
            error(&[], &[]),
            "launch: none of … RANK, PET_NODE_RANK, JOB_COMPLETION_INDEX is set … `- {name: RANK …"
        );
        let pods = Kubernetes {}.build(&with(&TRAIN_JOB, &[])).unwrap();
        assert_says!(
            pods.validate_settings(2, 1).unwrap_err(),
            "launch: `trainer.devices` = 2 … = 1, but 1 of the 2 … (environment `kubernetes`) …"
        );
    }
}
