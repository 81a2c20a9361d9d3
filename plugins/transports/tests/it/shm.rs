//! Groups of real processes that share memory.

use std::fs;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use candle_core::{DType, Device};
use fulgurite_core::collective::{GroupContext, ProcessGroup, ProcessGroupConfig, ReduceOp};
use fulgurite_core::launch::Store;
use fulgurite_core::{Error, Result, conformance};
use fulgurite_test_message::assert_says;
use fulgurite_transports::Shm;
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, setrlimit};

use crate::abandonment;
use crate::job::{DirectoryStore, Job, RESULT, run_as_rank};

/// One rank of a scenario, if this process was started as one.
#[test]
fn a_rank() {
    let timeout_secs = |scenario: &str| match scenario {
        "timeout" => 1,
        "waits briefly" => SHORT,
        _ => 120,
    };
    run_as_rank(timeout_secs, run_scenario);
}

/// The timeout in seconds of ranks that wait briefly.
const SHORT: u64 = 3;

fn start(size: usize, scenario: &str) -> Job {
    Job::start("shm::a_rank", size, scenario)
}

fn run_scenario(scenario: &str, context: &GroupContext) -> Result<()> {
    if scenario == "limits" && context.rank == 1 {
        // Its own memory for tensors is small, and it cannot map the other ranks' memory.
        limit(Resource::Fsize, 1 << 20);
        limit(Resource::As, 4 << 30);
    }
    let chunk_bytes = match scenario {
        "default" => Shm::default().chunk_bytes,
        "unequal" => 4096 << context.rank,
        _ => 8192,
    };
    let group = Shm { chunk_bytes }.build(context)?;
    assert_eq!(open_shared_memory(), 0, "a descriptor of the shared memory is still open");
    match scenario {
        "default" | "small" => {
            conformance::process_group(&*group)?;
            assert_eq!(mapped_memories(), context.world_size, "this rank's and its peers' memory");
            // A second world group on the same store.
            let again = Shm { chunk_bytes }.build(context)?;
            all_reduce_once(&*again)?;
            all_reduce_once(&*group)
        }
        "limits" => conformance::process_group(&*group),
        "abort" => conformance::process_group_abort(&*group),
        "abandon" => (0..8).try_for_each(|seed| abandonment::rounds(group.clone(), seed)),
        "timeout" => conformance::process_group_timeout(&*group, context.timeout),
        "killed" => {
            for step in 0.. {
                all_reduce_once(&*group)?;
                if step == 20 {
                    context.store.set(&format!("running{}", context.rank), b"")?;
                }
            }
            Ok(())
        }
        "fails" => {
            all_reduce_once(&*group)?;
            if context.rank == 1 {
                context.store.report_failure("the disk is full")?;
                return Ok(());
            }
            all_reduce_once(&*group)
        }
        // Rank 0 waits for rank 1, which waits for the test.
        "waits" | "waits briefly" => {
            context.store.set(&format!("running{}", context.rank), b"")?;
            if context.rank == 1 {
                context.store.get("rank 1 goes on", Duration::from_secs(60))?;
            }
            all_reduce_once(&*group)
        }
        "exits" => {
            all_reduce_once(&*group)?;
            if context.rank == 1 {
                println!("{RESULT}ok");
                // No destructor runs.
                std::process::exit(0);
            }
            all_reduce_once(&*group)
        }
        other => Err(Error::other(format!("no scenario {other}"))),
    }
}

fn limit(resource: Resource, bytes: u64) {
    let limit = Rlimit { current: Some(bytes), maximum: Some(bytes) };
    setrlimit(resource, limit).unwrap();
}

fn all_reduce_once(group: &dyn ProcessGroup) -> Result<()> {
    let x = group.empty(10_000, DType::F32, &Device::Cpu)?;
    x.const_set(1f32.into())?;
    group.all_reduce(&x, ReduceOp::Sum)?.wait()?;
    assert_eq!(x.to_vec1::<f32>()?, vec![group.size() as f32; 10_000]);
    Ok(())
}

/// Number of this process's file descriptors that are open on a group's memory.
fn open_shared_memory() -> usize {
    let links = fs::read_dir("/proc/self/fd").unwrap();
    links
        .filter_map(|entry| fs::read_link(entry.ok()?.path()).ok())
        .filter(|target| target.to_string_lossy().contains("memfd:fulgurite (deleted)"))
        .count()
}

/// Number of tensor memories that this process maps, its own and other ranks'.
fn mapped_memories() -> usize {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains("memfd:fulgurite-tensors")).count()
}

/// Files in `/dev/shm` that look like this crate's. It should make none. The directories of elastic
/// jobs belong to their agents.
fn files_left() -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir("/dev/shm") else { return vec![] };
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let is_own = |name: &str| name.contains("fulgurite") && !name.contains("fulgurite-elastic-");
    paths.filter(|path| is_own(&path.to_string_lossy())).collect()
}

// checklist: torchtune: _broadcast_tensor
#[test]
fn two_processes_conform() {
    start(2, "default").expect_ok();
}

#[test]
fn three_processes_conform() {
    start(3, "small").expect_ok();
}

// checklist: Lightning: all_reduce, all_gather, barrier, broadcast
#[test]
fn four_processes_conform() {
    start(4, "default").expect_ok();
}

#[test]
fn process_with_limits_copies_through_slots() {
    start(2, "limits").expect_ok();
}

#[test]
fn processes_leave_a_step_together() {
    start(4, "abandon").expect_ok();
}

#[test]
fn abort_reaches_all_processes() {
    start(3, "abort").expect_ok();
}

#[test]
fn missing_process_is_named() {
    start(3, "timeout").expect_ok();
}

// checklist: composer: a rank out of memory must not hang the others
#[test]
fn killed_process_ends_the_others() {
    let mut job = start(3, "killed");
    (0..3).for_each(|rank| job.wait_for(&format!("running{rank}")));
    let pid = job.children[2].id();
    job.children[2].kill().unwrap();
    let results = job.results();
    assert_eq!(results[2], None);
    for result in &results[..2] {
        let result = result.as_deref().unwrap();
        let expected = format!("rank 2 failed: its process ({pid}) ended while in all_reduce");
        assert!(result.starts_with(&expected), "{result}");
    }
    assert_eq!(files_left(), Vec::<PathBuf>::new());
}

#[test]
fn killed_leader_leaves_no_memory() {
    let mut job = start(2, "killed");
    (0..2).for_each(|rank| job.wait_for(&format!("running{rank}")));
    job.children[0].kill().unwrap();
    let results = job.results();
    assert!(results[1].as_deref().unwrap().starts_with("rank 0 failed: its process"));
    assert_eq!(files_left(), Vec::<PathBuf>::new());
}

/// The launcher sees how a rank ended, and reports it in the store.
#[test]
fn error_of_killed_process_comes_from_store() {
    let mut job = start(3, "killed");
    (0..3).for_each(|rank| job.wait_for(&format!("running{rank}")));
    job.children[2].kill().unwrap();
    job.children[2].wait().unwrap();
    job.store().report_failure("killed by signal 9").unwrap();
    let results = job.results();
    for result in &results[..2] {
        assert_eq!(result.as_deref(), Some("rank 2 failed: killed by signal 9"));
    }
}

#[test]
fn reported_failure_is_every_ranks_error() {
    let results = start(3, "fails").results();
    assert_eq!(results[1].as_deref(), Some("ok"));
    assert_eq!(results[0].as_deref(), Some("rank 1 failed: the disk is full"));
    assert_eq!(results[2].as_deref(), Some("rank 1 failed: the disk is full"));
}

#[test]
fn interrupted_rank_ends_all_ranks() {
    let job = start(2, "waits");
    (0..2).for_each(|rank| job.wait_for(&format!("running{rank}")));
    job.store().set("asked0", b"").unwrap();
    let results = job.results();
    assert_eq!(results[0].as_deref(), Some("interrupted"));
    assert_eq!(results[1].as_deref(), Some("rank 0 failed: it was asked to end"));
}

#[test]
fn stopped_time_does_not_count_as_waiting() {
    let job = start(2, "waits briefly");
    (0..2).for_each(|rank| job.wait_for(&format!("running{rank}")));
    let all = |signal| {
        for child in &job.children {
            kill_process(Pid::from_child(child), signal).unwrap();
        }
    };
    all(Signal::STOP);
    std::thread::sleep(Duration::from_secs(SHORT) + Duration::from_millis(500));
    all(Signal::CONT);
    // Time for a rank that counts to give up.
    std::thread::sleep(Duration::from_millis(500));
    job.store().set("rank 1 goes on", b"").unwrap();
    job.expect_ok();
}

#[test]
fn exited_process_is_reported() {
    let results = start(2, "exits").results();
    let result = results[0].as_deref().unwrap();
    assert!(result.starts_with("rank 1 failed: its process ("), "{result}");
}

#[test]
fn unequal_chunks_are_refused() {
    // The first rank made the memory, and waits for the second until this test ends.
    let mut first = start(2, "unequal");
    let children = vec![first.children.pop().unwrap()];
    let second = Job { directory: tempfile::tempdir().unwrap(), children };
    let results = second.results();
    let message = results[0].as_deref().unwrap();
    assert!(message.contains("process_group.chunk_bytes must be the same on all"), "{message}");
}

/// Returns the error of rank 1 of 2 as it builds its group; `announcement` is rank 0's message.
fn build_second(announcement: &str) -> Error {
    build_second_after(announcement, |_| ())
}

/// Like [`build_second`], after `first` has acted as rank 0 on the store.
fn build_second_after(announcement: &str, first: impl FnOnce(&DirectoryStore)) -> Error {
    let directory = tempfile::tempdir().unwrap();
    first(&DirectoryStore { directory: directory.path().to_owned(), rank: 0 });
    let store = DirectoryStore { directory: directory.path().to_owned(), rank: 1 };
    store.set("process_group/shm/world1", announcement.as_bytes()).unwrap();
    let context = GroupContext {
        rank: 1,
        world_size: 2,
        local_rank: 1,
        local_world_size: 2,
        node_rank: 0,
        address: None,
        store: Arc::new(store),
        timeout: Duration::from_secs(5),
    };
    Shm { chunk_bytes: 4096 }.build(&context).map(drop).unwrap_err()
}

/// Returns the length of the memory that rank 0 of such a group really announces.
fn announced_len() -> usize {
    let message = build_second(r#"{"Region":{"pid":1,"fd":1,"len":1,"nonce":1}}"#).to_string();
    let (_, rest) = message.split_once("(1 and ").unwrap();
    rest.split_once(' ').unwrap().0.parse().unwrap()
}

#[test]
fn unopenable_memory_suggests_other_groups() {
    let error = announce(999999, announced_len()).replace(&std::process::id().to_string(), "PID");
    assert_says!(error, "launch: … cannot be opened at /proc/PID/fd/999999 … not on one host …");
    let error = build_second(r#"{"Failed":"no memory"}"#);
    assert!(error.to_string().contains("no memory"), "{error}");
}

#[test]
fn ended_first_rank_is_named() {
    let mut ended = Command::new("true").spawn().unwrap();
    ended.wait().unwrap();
    let (pid, len) = (ended.id(), announced_len());
    let region = format!(r#"{{"Region":{{"pid":{pid},"fd":9,"len":{len},"nonce":1}}}}"#);
    let error = build_second_after(&region, |first| {
        first.report_failure("killed by signal 9").unwrap();
    });
    assert_says!(error, "rank 0 failed: killed by signal 9");
}

/// Returns the second rank's error if the first announces this file of this process as its memory.
fn announce(fd: i32, len: usize) -> String {
    let pid = std::process::id();
    let region = format!(r#"{{"Region":{{"pid":{pid},"fd":{fd},"len":{len},"nonce":1}}}}"#);
    build_second(&region).to_string()
}

#[test]
fn unsealed_memory_is_not_mapped() {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
    let len = announced_len();
    let of_length = |file: fs::File, len: usize| {
        file.set_len(len as u64).unwrap();
        file
    };
    let memory = || {
        fs::File::from(
            memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap(),
        )
    };
    let error = |file: &fs::File| announce(file.as_raw_fd(), len);

    let file = of_length(tempfile::tempfile().unwrap(), len);
    assert!(error(&file).contains("it is no sealed memory"), "{}", error(&file));
    let growable = of_length(memory(), len);
    fcntl_add_seals(&growable, SealFlags::SHRINK).unwrap();
    assert!(error(&growable).contains("it is no sealed memory"), "{}", error(&growable));
    let short = of_length(memory(), len - 4096);
    let expected = format!("it has {} bytes instead of {len}", len - 4096);
    assert!(error(&short).contains(&expected), "{}", error(&short));

    let all = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    let other = of_length(memory(), len);
    fcntl_add_seals(&other, all).unwrap();
    assert!(error(&other).contains("it is another file"), "{}", error(&other));
    // Only root can give a file away, so only root can run this check.
    let of_nobody = of_length(memory(), len);
    fcntl_add_seals(&of_nobody, all).unwrap();
    if std::os::unix::fs::fchown(&of_nobody, Some(65534), None).is_ok() {
        assert!(error(&of_nobody).contains("it belongs to user 65534"), "{}", error(&of_nobody));
    }

    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("pipe");
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, mode).unwrap();
    let pipe = fs::File::options().read(true).write(true).open(&pipe).unwrap();
    assert!(error(&pipe).contains("it has 0 bytes"), "{}", error(&pipe));
}

#[test]
fn across_hosts_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let context = GroupContext {
        rank: 3,
        world_size: 4,
        local_rank: 1,
        local_world_size: 2,
        node_rank: 0,
        address: None,
        store: Arc::new(DirectoryStore { directory: directory.path().to_owned(), rank: 3 }),
        timeout: Duration::from_secs(5),
    };
    let error = Shm::default().build(&context).map(drop).unwrap_err();
    assert_says!(error, r#"process group `shm` … 4 processes 2 are on this host … "auto" … "tcp""#);
    let context = GroupContext { local_world_size: 4, ..context };
    let error = Shm { chunk_bytes: 100 }.build(&context).map(drop).unwrap_err();
    assert_says!(error, "trainer.process_group.chunk_bytes is 100 … between 4096 … 1073741824 …");
}

// checklist: torchtune: get_distributed_backend
#[test]
fn configuration() {
    let parse = |json: &str| serde_json::from_str::<Box<dyn ProcessGroupConfig>>(json);
    let config = parse(r#"{ "type": "shm" }"#).unwrap();
    assert_eq!(format!("{config:?}"), format!("{:?}", Shm::default()));
    let error = parse(r#"{ "type": "shm", "chunk_byte": 1 }"#).unwrap_err();
    assert_says!(error, "unknown field `chunk_byte`, expected `chunk_bytes` …");
    // The chunks of a rank in three buffers, and two message chunks from each rank to each.
    let (one, many) = (Shm::default().memory(1), Shm::default().memory(50));
    assert_eq!((one.used, one.mapped), (0, 0));
    assert!((many.used >> 20, many.mapped >> 20) == (151, 151 + 1250), "{many:?}");
    fulgurite_core::registry::validate().unwrap();
    let names = fulgurite_core::registry::names(fulgurite_core::registry::kind::PROCESS_GROUP);
    assert_eq!(names, ["auto", "shm", "tcp"]);
}
