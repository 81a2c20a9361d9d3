//! Ranks that are processes: the test program starts itself once for each rank.

use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use fulgurite_core::collective::{
    Collective, GroupContext, ProcessGroup, ProcessGroupConfig as _, ReduceOp,
};
use fulgurite_core::launch::{ClientIdentity, JobKey, LostRankPolicy, StoreServer, TcpStore};
use fulgurite_core::{Result, conformance};
use fulgurite_nccl::{Parts, connect};
use fulgurite_nccl_fake::streams::Machine;
use fulgurite_transports::Shm;

use crate::host_memory::HostMemory;
use crate::ranks::built;

const RANKS: usize = 3;
const TIMEOUT: Duration = Duration::from_secs(60);
/// Environment variables for a rank of a test.
const RANK: &str = "NCCL_TEST_RANK";
const PORT: &str = "NCCL_TEST_PORT";
const SCENARIO: &str = "NCCL_TEST_SCENARIO";
const RESULT: &str = "RESULT: ";

fn key() -> JobKey {
    JobKey::new("a secret of this test", "nccl")
}

/// Starts the ranks, and returns the result that each printed, if any.
fn results(scenario: &str) -> Vec<Option<String>> {
    let here = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let store = StoreServer::bind(here, key(), RANKS, LostRankPolicy::Failed).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let start = |rank: usize| {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "processes::rank", "--nocapture"])
            .env(RANK, rank.to_string())
            .env(PORT, store.address().port().to_string())
            .env(SCENARIO, scenario)
            .env("FAKE_NCCL_FOLDER", folder.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let ranks: Vec<Child> = (0..RANKS).map(start).collect();
    let result = |rank: Child| {
        let output = String::from_utf8(rank.wait_with_output().unwrap().stdout).unwrap();
        output.lines().find_map(|line| line.strip_prefix(RESULT)).map(str::to_owned)
    };
    ranks.into_iter().map(result).collect()
}

/// One rank, in its own process.
#[test]
fn rank() {
    let Ok(rank) = std::env::var(RANK) else { return };
    let (rank, port) = (rank.parse().unwrap(), std::env::var(PORT).unwrap().parse().unwrap());
    let identity = ClientIdentity { key: key(), rank, world_size: RANKS };
    let store = Arc::new(TcpStore::connect("127.0.0.1", port, identity, TIMEOUT).unwrap());
    let context = GroupContext {
        rank,
        world_size: RANKS,
        local_rank: rank,
        local_world_size: RANKS,
        node_rank: 0,
        address: None,
        store: store.clone(),
        timeout: TIMEOUT,
    };
    let machine = Machine::new(rank as u64);
    let group = connect(Parts {
        host: Shm::default().build(&context).unwrap(),
        library: Some(built()),
        streams: HostMemory::new(&machine, None, &Arc::default()),
        store,
        timeout: TIMEOUT,
    });
    let run = || -> Result<()> {
        match std::env::var(SCENARIO).unwrap().as_str() {
            "conforms" => conformance::process_group(&*group?),
            "killed" => killed(&*group?),
            other => panic!("{other}"),
        }
    };
    // The harness prints the test's name without a line break.
    println!();
    match run() {
        Ok(()) => println!("{RESULT}ok"),
        Err(error) => println!("{RESULT}{error}"),
    }
}

/// The last rank is killed while the others wait for it.
fn killed(group: &dyn ProcessGroup) -> Result<()> {
    for step in 0.. {
        let numbers = Tensor::ones(1000, DType::F32, &Device::Cpu)?;
        if step == 3 && group.rank() == RANKS - 1 {
            std::thread::sleep(Duration::from_millis(200));
            std::process::abort();
        }
        group.run(Collective::all_reduce(&numbers, ReduceOp::Sum))?;
    }
    Ok(())
}

#[test]
fn groups_of_processes_conform() {
    assert_eq!(results("conforms"), vec![Some("ok".to_owned()); RANKS]);
}

#[test]
fn killed_rank_is_named_at_once() {
    let results = results("killed");
    // Not reported as late, which would take until the timeout.
    let named = "rank 2 failed: the process ended without a word (killed?)";
    for result in &results[..RANKS - 1] {
        assert!(result.as_ref().is_some_and(|result| result.contains(named)), "{results:?}");
    }
    assert_eq!(results[RANKS - 1], None);
}
