//! The environment `lsf`: ranks started by `jsrun`.

use std::path::Path;

use fulgurite_config::register_environment;
use fulgurite_error::{Error, Result};
use fulgurite_launch::environment::{ClusterEnvironment, EnvironmentConfig, Variables};
use serde::{Deserialize, Serialize};

use crate::main_address::master_port;
use crate::process::{Names, Process};

/// `environment.type = "lsf"`: the ranks were started by `jsrun` in a job of IBM's LSF.
///
/// - `JSM_NAMESPACE_RANK`, `JSM_NAMESPACE_SIZE`, `JSM_NAMESPACE_LOCAL_RANK`: required; the rank,
///   the world size and the rank on its host.
/// - `JSM_NAMESPACE_LOCAL_SIZE`: the number of ranks on this host. Without it, if the rank file has
///   a line for each rank, the number of lines with this rank's host. Else the world size divided
///   by the number of distinct hosts in the file.
/// - `LSB_DJOB_RANKFILE`: a file with the hosts. The first line is the launch node, which runs no
///   ranks.
/// - `LSB_JOBID`: required; the job. `LSB_JOBINDEX`: its element, in a job array.
/// - `LSB_RESTART`: `Y` if LSF has restarted the job.
/// - `MASTER_ADDR`: rank 0's host; else the second host in the rank file.
/// - `MASTER_PORT`: a free port there; else 10000 plus the last three digits of job id plus
///   element.
///
/// Detected by the variables of `jsrun`, which nothing else sets. If an LSF job starts its ranks
/// with `mpirun`, the environment is `mpi`.
#[derive(Debug, Clone, Default, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(deny_unknown_fields)]
pub struct Lsf {}

register_environment!("lsf", Lsf, "Ranks started by jsrun under LSF", r#"{ type = "lsf" }"#);

const NAMES: Names = Names {
    size: "JSM_NAMESPACE_SIZE",
    rank: "JSM_NAMESPACE_RANK",
    local_rank: "JSM_NAMESPACE_LOCAL_RANK",
    local_size: "JSM_NAMESPACE_LOCAL_SIZE",
};

#[typetag::serde(name = "lsf")]
impl EnvironmentConfig for Lsf {
    fn priority(&self) -> i32 {
        70
    }

    fn detect(&self, variables: &Variables) -> bool {
        [NAMES.size, NAMES.rank, NAMES.local_rank].iter().any(|name| variables.is_set(name))
    }

    fn build(&self, variables: &Variables) -> Result<Box<dyn ClusterEnvironment>> {
        let number = |name| variables.require::<usize>(name, "a number that jsrun sets");
        let (world_size, global_rank) = (number(NAMES.size)?, number(NAMES.rank)?);
        let local_rank = number(NAMES.local_rank)?;
        let job: u64 = variables.require("LSB_JOBID", "the job's number, which LSF sets")?;
        let element: u64 = variables.parse("LSB_JOBINDEX", "a number")?.unwrap_or(0);
        let local_size = variables.parse(NAMES.local_size, "the number of ranks of this host")?;
        let address = variables.get("MASTER_ADDR");
        let hosts = match (address, local_size) {
            (Some(_), Some(_)) => Vec::new(),
            _ => rank_file(variables)?,
        };
        let local_world_size = match local_size {
            Some(size) => size,
            None => local_world_size(&hosts, world_size, global_rank)?,
        };
        let process = Process {
            name: "lsf",
            names: NAMES,
            world_size,
            global_rank,
            local_rank,
            local_world_size,
            node_rank: 0,
            main_address: address.map_or_else(|| hosts[0].clone(), str::to_owned),
            main_port: match master_port(variables)? {
                Some(port) => port,
                // Different for jobs on one node, the same for all ranks of a job.
                None => 10_000 + (job.wrapping_add(element) % 1000) as u16,
            },
            job_id: match element {
                0 => format!("lsf-{job}"),
                _ => format!("lsf-{job}[{element}]"),
            },
            restart_count: u64::from(variables.get("LSB_RESTART") == Some("Y")),
            restart_id: None,
            requeue: None,
        };
        let flag = "`jsrun --tasks_per_rs` and `--rs_per_host`";
        Ok(Box::new(process.check_with(variables)?.with_nodes_in_order(flag)?))
    }
}

/// The hosts of the ranks in `LSB_DJOB_RANKFILE`, with repetitions; at least one.
fn rank_file(variables: &Variables) -> Result<Vec<String>> {
    let name = "LSB_DJOB_RANKFILE";
    let path: String =
        variables.require(name, "the file with the job's hosts, which LSF writes")?;
    let text = std::fs::read_to_string(Path::new(&path)).map_err(|error| {
        Error::Launch(format!(
            "{name} = {path} cannot be read: {error}. MASTER_ADDR (rank 0's host) and {} (the ranks of this \
             host) can take its place",
            NAMES.local_size
        ))
    })?;
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let hosts: Vec<String> = lines.skip(1).map(str::to_owned).collect();
    if hosts.is_empty() {
        return Err(Error::Launch(format!(
            "{name} = {path} has no host besides the launch node, which is its first line; was the program \
             started with `jsrun`?"
        )));
    }
    Ok(hosts)
}

fn local_world_size(hosts: &[String], world_size: usize, rank: usize) -> Result<usize> {
    if hosts.len() == world_size {
        // A rank outside the world size is reported later.
        let host = hosts.get(rank).unwrap_or(&hosts[0]);
        return Ok(hosts.iter().filter(|other| *other == host).count());
    }
    let mut different: Vec<&String> = hosts.iter().collect();
    different.sort_unstable();
    different.dedup();
    match different.len() {
        n if world_size.is_multiple_of(n) => Ok(world_size / n),
        n => Err(Error::Launch(format!(
            "{} = {world_size} ranks do not divide evenly among the {n} hosts of LSB_DJOB_RANKFILE, and {} is \
             not set. Start as many ranks on every host (`jsrun --tasks_per_rs`, `--rs_per_host`)",
            NAMES.size, NAMES.local_size
        ))),
    }
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    const FULL: [(&str, &str); 4] = [
        ("JSM_NAMESPACE_RANK", "3"),
        ("JSM_NAMESPACE_SIZE", "4"),
        ("JSM_NAMESPACE_LOCAL_RANK", "1"),
        ("LSB_JOBID", "1234567"),
    ];

    /// The full variable set and a rank file, with changes; an empty value removes a variable.
    fn with(hosts: &str, changes: &[(&str, &str)]) -> Result<Box<dyn ClusterEnvironment>> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), hosts).unwrap();
        let path = file.path().to_str().unwrap();
        let full = [&FULL[..], &[("LSB_DJOB_RANKFILE", path)]].concat();
        let kept = full.iter().filter(|(name, _)| changes.iter().all(|(other, _)| name != other));
        let set = changes.iter().filter(|(_, value)| !value.is_empty());
        let variables: Variables = kept.chain(set).copied().collect();
        assert!(Lsf {}.detect(&variables), "partly set variables are recognised");
        Lsf {}.build(&variables).map_err(|error| {
            Error::Launch(error.to_string().replace(path, "RANKFILE").replacen("launch: ", "", 1))
        })
    }

    fn build(hosts: &str, changes: &[(&str, &str)]) -> Box<dyn ClusterEnvironment> {
        with(hosts, changes).unwrap()
    }

    fn error(hosts: &str, changes: &[(&str, &str)]) -> String {
        with(hosts, changes).unwrap_err().to_string()
    }

    const HOSTS: &str = "launch1\nc07\nc07\nc08\nc08\n";

    // checklist: Lightning: LSFEnvironment
    #[test]
    fn jsruns_variables_are_read() {
        let environment = build(HOSTS, &[]);
        assert_eq!((environment.global_rank(), environment.world_size()), (3, 4));
        assert_eq!((environment.local_rank(), environment.local_world_size()), (1, 2));
        assert_eq!(environment.node_rank(), 1);
        assert_eq!((environment.main_address(), environment.main_port()), ("c07".into(), 10567));
        assert_eq!(
            (environment.job_id().as_str(), environment.restart_count()),
            ("lsf-1234567", 0)
        );
        environment.validate_settings(2, 2).unwrap();
    }

    #[test]
    fn slots_are_not_ranks() {
        // Three slots per host, two ranks on each.
        let slots = "launch1\nc07\nc07\nc07\nc08\nc08\nc08\n";
        assert_eq!(build(slots, &[]).local_world_size(), 2);
        let said =
            build(slots, &[("JSM_NAMESPACE_LOCAL_SIZE", "4"), ("JSM_NAMESPACE_LOCAL_RANK", "3")]);
        assert_eq!(said.local_world_size(), 4);
    }

    #[test]
    fn other_sources_take_the_place_of_the_file() {
        let given = [
            ("LSB_DJOB_RANKFILE", ""),
            ("JSM_NAMESPACE_LOCAL_SIZE", "2"),
            ("MASTER_ADDR", "head"),
            ("MASTER_PORT", "4711"),
            ("LSB_JOBINDEX", "3"),
            ("LSB_RESTART", "Y"),
        ];
        let environment = build("", &given);
        assert_eq!((environment.main_address(), environment.main_port()), ("head".into(), 4711));
        assert_eq!(
            (environment.job_id().as_str(), environment.restart_count()),
            ("lsf-1234567[3]", 1)
        );
        let port = build(HOSTS, &[("LSB_JOBINDEX", "3")]).main_port();
        assert_eq!(port, 10570);
    }

    #[test]
    fn mistakes_are_named() {
        assert_says!(
            error(HOSTS, &[("JSM_NAMESPACE_RANK", "")]),
            "launch: … variable JSM_NAMESPACE_RANK … is not set, but others …"
        );
        assert_says!(
            error(HOSTS, &[("JSM_NAMESPACE_SIZE", "many")]),
            "launch: … JSM_NAMESPACE_SIZE is `many`, but should be a number …"
        );
        assert_says!(
            error(HOSTS, &[("JSM_NAMESPACE_RANK", "4")]),
            "launch: JSM_NAMESPACE_RANK = 4 … below JSM_NAMESPACE_SIZE = 4"
        );
        assert_says!(error(HOSTS, &[("LSB_JOBID", "")]), "launch: … LSB_JOBID … is not set …");
        assert_says!(
            error(HOSTS, &[("LSB_DJOB_RANKFILE", "")]),
            "launch: … variable LSB_DJOB_RANKFILE … is not set, but others …"
        );
        assert_says!(
            error(HOSTS, &[("LSB_DJOB_RANKFILE", "/no/such/file")]),
            "launch: LSB_DJOB_RANKFILE = /no/such/file cannot be read … MASTER_ADDR …"
        );
        assert_says!(error("launch1\n", &[]), "launch: LSB_DJOB_RANKFILE = RANKFILE has no host …");
        assert_says!(
            error("launch1\nc07\nc08\nc09\n", &[]),
            "launch: JSM_NAMESPACE_SIZE = 4 … do not divide … 3 hosts … JSM_NAMESPACE_LOCAL_SIZE …"
        );
        assert_says!(
            error(HOSTS, &[("JSM_NAMESPACE_RANK", "2")]),
            "launch: rank 2 is local rank 1 of 2 … not follow … `jsrun --tasks_per_rs` …"
        );
        assert_says!(
            error(HOSTS, &[("WORLD_SIZE", "8")]),
            "launch: WORLD_SIZE = 8 contradicts JSM_NAMESPACE_SIZE = 4 (environment `lsf`) …"
        );
        assert_says!(
            build(HOSTS, &[]).validate_settings(4, 2).unwrap_err(),
            "launch: trainer.devices = 4 … 8 ranks, but JSM_NAMESPACE_SIZE = 4 … start 8 …"
        );
    }
}
