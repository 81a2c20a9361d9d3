//! Checkpoints in the memory of several hosts: each host has a directory that the others do not
//! see.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::DType;
use fulgurite_core::checkpoint::{
    AsyncSaver, CheckpointIO, DistributedCheckpoint, Hosts, OnHosts, SaveRequest, load_into,
    load_optimizer, parts_on_host, save_on_hosts, whole_on_hosts,
};
use fulgurite_core::collective::{Counter, ProcessGroup, all_gather_object};
use fulgurite_core::{Error, Result};
use fulgurite_test_support::checkpoints::{
    Mesh, bytes, io, meta, model, ranks, ranks_over_tcp, states, tensors, values,
};
use fulgurite_transports::run_ranks;
use tempfile::TempDir;

use crate::transactions::Failing;

/// The hosts of ranks, by their names.
fn hosts(ids: &str) -> Hosts {
    Hosts::new(&ids.chars().map(String::from).collect::<Vec<_>>())
}

/// The memory of each host.
struct Memories(TempDir);

impl Memories {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn root(&self, host: char) -> PathBuf {
        self.0.path().join(host.to_string())
    }

    fn io(&self, ids: &str, rank: usize) -> Arc<dyn CheckpointIO> {
        io(&self.root(ids.chars().nth(rank).unwrap()))
    }

    fn lose(&self, host: char) {
        let _ = fs::remove_dir_all(self.root(host));
    }

    /// The names on a host, temporary ones included.
    fn names(&self, host: char) -> Vec<String> {
        io(&self.root(host)).list("").unwrap().into_iter().map(|entry| entry.name).collect()
    }
}

fn mesh(ids: &str) -> Mesh {
    [1, ids.len(), 1]
}

fn request(mesh: Mesh, rank: usize, step: u64, seed: u64) -> SaveRequest {
    let tree = model(mesh, rank, Some(seed), DType::F32);
    let (model, optimizer) = tensors(&tree, mesh, rank, seed);
    let (name, meta) = (name(step), meta(step, mesh, &tree));
    SaveRequest { name, model, optimizer, meta, update_last: false, remove: Vec::new() }
}

fn name(step: u64) -> String {
    format!("copy-{step}")
}

fn save(
    memories: &Memories,
    ids: &str,
    group: &dyn ProcessGroup,
    step: u64,
    io: Option<Arc<dyn CheckpointIO>>,
) -> Result<PathBuf> {
    let request = request(mesh(ids), group.rank(), step, step);
    let io = io.unwrap_or_else(|| memories.io(ids, group.rank()));
    save_on_hosts(&*io, group, &hosts(ids), &name(step), Some(&request), Ok(()))
}

fn save_all(memories: &Memories, ids: &str, step: u64) {
    for saved in ranks(ids.len(), |group| save(memories, ids, group, step, None)) {
        saved.unwrap();
    }
}

/// The checkpoints that are whole on the hosts of these ranks.
fn whole(memories: &Memories, ids: &str, group: &dyn ProcessGroup) -> Vec<OnHosts> {
    let hosts = hosts(ids);
    let parts = match hosts.leads(group.rank()) {
        true => parts_on_host(&*memories.io(ids, group.rank())).unwrap(),
        false => Vec::new(),
    };
    let all = all_gather_object(group, &parts).unwrap();
    let of_host: Vec<_> = (0..hosts.count()).map(|host| all[hosts.leader(host)].clone()).collect();
    whole_on_hosts(&of_host)
}

fn whole_names(memories: &Memories, ids: &str) -> Vec<String> {
    let found = ranks(ids.len(), |group| whole(memories, ids, group));
    assert!(found.windows(2).all(|pair| pair[0] == pair[1]));
    found[0].iter().map(|whole| whole.name.clone()).collect()
}

/// Loads the checkpoint of a step on these ranks, and compares it with what was saved.
fn load_all(memories: &Memories, ids: &str, step: u64) {
    for loaded in ranks(ids.len(), |group| load(memories, ids, group, step)) {
        loaded.unwrap();
    }
}

fn load(memories: &Memories, ids: &str, group: &dyn ProcessGroup, step: u64) -> Result<()> {
    let found = whole(memories, ids, group).into_iter().find(|found| found.name == name(step));
    let reader = found.unwrap().open(group, &hosts(ids), |root| Ok(io(root)))?;
    let checkpoint = DistributedCheckpoint::open_with(&reader.io(), &name(step))?;
    let tree = model(mesh(ids), group.rank(), None, DType::F32);
    load_into(&checkpoint, &tree, true)?;
    for parameter in tree.parameters() {
        let local = parameter.local()?;
        let shape = parameter.global_shape();
        let expected = values(Some(step), parameter.fqn(), shape, &local.region, DType::F32);
        assert_eq!(bytes(&local.values), bytes(&expected), "{}", parameter.fqn());
    }
    let state = states(&tree, None);
    load_optimizer(checkpoint.optimizer(), &tree, &state, true)?;
    for (loaded, expected) in state.iter().zip(states(&tree, Some(step))) {
        assert_eq!(bytes(&loaded.values), bytes(&expected.values), "{}", loaded.fqn);
    }
    drop(checkpoint);
    reader.end()
}

#[test]
fn any_lost_host_leaves_a_whole() {
    for (ids, lost, left) in [
        ("aabbc", 'a', "bbc"),
        ("aabbc", 'b', "aac"),
        ("aabbc", 'c', "aabb"),
        ("aab", 'a', "b"),
        ("aabbc", 'b', "aaxxc"),
        ("ab", 'b', "axxx"),
    ] {
        let memories = Memories::new();
        save_all(&memories, ids, 7);
        memories.lose(lost);
        load_all(&memories, left, 7);
    }
}

#[test]
fn two_lost_neighbours_leave_nothing() {
    let memories = Memories::new();
    save_all(&memories, "abcd", 7);
    memories.lose('b');
    memories.lose('c');
    assert_eq!(whole_names(&memories, "ad"), [""; 0]);
}

#[test]
fn two_lost_strangers_leave_a_whole() {
    let memories = Memories::new();
    save_all(&memories, "abcd", 7);
    memories.lose('a');
    memories.lose('c');
    load_all(&memories, "bxyd", 7);
}

#[test]
fn new_copy_replaces_the_last_on_all_hosts() {
    let memories = Memories::new();
    save_all(&memories, "aabc", 7);
    save_all(&memories, "aabc", 8);
    assert_eq!(['a', 'b', 'c'].map(|host| memories.names(host)), [["copy-8"]; 3]);
}

#[test]
fn sent_bytes_are_those_of_the_files() {
    let (memories, ids) = (Memories::new(), "aaabbc");
    let counters: Vec<Counter> = ids.chars().map(|_| Counter::default()).collect();
    run_ranks(ids.len(), |group| {
        let watched = counters[group.rank()].watch(group);
        save(&memories, ids, &*watched, 7, None)
    })
    .unwrap();
    let hosts = hosts(ids);
    let parts = parts_on_host(&*memories.io(ids, 0)).unwrap();
    let of_files = |rank: usize| {
        let is_own = |file: &str| file.contains(&format!("shard-{:05}-", rank + 1));
        let own = parts[0].all.iter().filter(|(file, _)| is_own(file));
        own.map(|(_, bytes)| *bytes).sum::<u64>()
    };
    for (rank, counter) in counters.iter().enumerate() {
        let tensors = request(mesh(ids), rank, 7, 7).bytes();
        let sent = counter.get("world", "send");
        assert_eq!(sent.bytes, of_files(rank));
        assert!(sent.bytes >= tensors && (sent.calls > 0) == (tensors > 0));
        let kept: u64 = hosts.kept_by(rank).into_iter().map(of_files).sum();
        assert_eq!(counter.get("world", "recv").bytes, kept);
    }
}

#[test]
fn failure_on_one_host_keeps_the_last_copy() {
    let (memories, ids) = (Memories::new(), "aab");
    save_all(&memories, ids, 7);
    for (on, what, path) in [
        (1, "create", "model/"),
        (0, "create", "optimizer/shard-00003"),
        (2, "create", "model/shard-00001"),
        (2, "finish", "model/shard-00002"),
        (2, "finish", "manifest"),
        (0, "commit", ""),
        (2, "commit", ""),
    ] {
        let saved = ranks(ids.len(), |group| {
            let inner = memories.io(ids, group.rank());
            let failing = Failing { inner: inner.clone(), what, path };
            let io = if group.rank() == on { Arc::new(failing) } else { inner };
            save(&memories, ids, group, 8, Some(io))
        });
        for (rank, saved) in saved.into_iter().enumerate() {
            let error = saved.unwrap_err();
            let is_peers = matches!(error, Error::PeerFailed { rank, .. } if rank == on);
            assert_eq!(is_peers, rank != on, "{what} {path} on {on}: {error}");
        }
        let whole = whole_names(&memories, ids);
        assert!(whole.contains(&name(7)), "{what} {path} on {on}");
        load_all(&memories, ids, 7);
        let left = ['a', 'b'].map(|host| memories.names(host));
        assert!(left.iter().flatten().all(|name| !name.contains("tmp")), "{left:?}");
    }
    save_all(&memories, ids, 8);
    assert_eq!(['a', 'b'].map(|host| memories.names(host)), [["copy-8"]; 2]);
}

#[test]
fn save_waits_for_slow_ranks() {
    let (memories, ids) = (Memories::new(), "aabb");
    // The second rank of a host writes files of the other host after the first one is done.
    for (on, file) in [(1, "shard-00004"), (3, "shard-00002")] {
        let slow = |group: &dyn ProcessGroup| {
            let inner = memories.io(ids, group.rank());
            let late = Failing { inner: inner.clone(), what: "late", path: file };
            let io = if group.rank() == on { Arc::new(late) } else { inner };
            save(&memories, ids, group, 7, Some(io))
        };
        for saved in ranks_over_tcp(ids.len(), slow) {
            saved.unwrap();
        }
        load_all(&memories, ids, 7);
    }
}

/// As after the loss of a host between the commits of two others.
#[test]
fn commit_on_some_hosts_loses_no_state() {
    let (memories, ids) = (Memories::new(), "abc");
    save_all(&memories, ids, 7);
    let die = |group: &dyn ProcessGroup| {
        let inner = memories.io(ids, group.rank());
        let failing = Failing { inner: inner.clone(), what: "die", path: "" };
        let io = if group.rank() == 1 { Arc::new(failing) } else { inner };
        save(&memories, ids, group, 8, Some(io)).unwrap_err();
    };
    ranks(ids.len(), die);
    assert_eq!(whole_names(&memories, "abc"), ["copy-7", "copy-8"]);
    for (lost, left) in [('a', "bc"), ('b', "ac"), ('c', "ab")] {
        let aside = memories.root('x');
        fs::rename(memories.root(lost), &aside).unwrap();
        assert!(whole_names(&memories, left).contains(&name(7)), "{lost}");
        load_all(&memories, left, 7);
        fs::rename(&aside, memories.root(lost)).unwrap();
    }
}

#[test]
fn holders_alone_save_for_all() {
    let (memories, ids) = (Memories::new(), "aabc");
    // Ranks 1 and 3 hold the whole state.
    let saved = ranks(ids.len(), |group| {
        let rank = group.rank();
        let request = (rank % 2 == 1).then(|| request([1, 2, 1], rank / 2, 7, 7));
        let io = memories.io(ids, rank);
        save_on_hosts(&*io, group, &hosts(ids), &name(7), request.as_ref(), Ok(()))
    });
    saved.into_iter().for_each(|saved| drop(saved.unwrap()));
    load_all(&memories, "aabc", 7);
    memories.lose('c');
    load_all(&memories, "aabx", 7);
}

#[test]
fn background_saves_do_not_wait_for_training() {
    let (memories, ids) = (Memories::new(), "aab");
    for result in ranks(ids.len(), |group| -> Result<()> {
        let io = memories.io(ids, group.rank());
        let mut saver = AsyncSaver::on_hosts(io, group, hosts(ids))?;
        for step in 1..4 {
            saver.start(request(mesh(ids), group.rank(), step, step))?;
            group.barrier()?.wait()?;
        }
        saver.wait().map(drop)
    }) {
        result.unwrap();
    }
    load_all(&memories, "aab", 3);
}

#[test]
fn large_files_come_in_pieces() {
    let (memories, ids) = (Memories::new(), "ab");
    let big = |rank: usize| {
        let mut request = request(mesh(ids), rank, 7, 7);
        let rows = 3 << 20;
        let region =
            fulgurite_core::shard::Region { offsets: vec![rows * rank], sizes: vec![rows] };
        let begin = (rows * rank) as f32;
        let values =
            candle_core::Tensor::arange(begin, begin + rows as f32, &candle_core::Device::Cpu);
        request.model = vec![fulgurite_core::checkpoint::ShardTensor {
            name: "w".to_owned(),
            values: values.unwrap(),
            region,
            shape: vec![2 * rows],
        }];
        request.optimizer.clear();
        request
    };
    for saved in ranks(2, |group| {
        let io = memories.io(ids, group.rank());
        let request = big(group.rank());
        save_on_hosts(&*io, group, &hosts(ids), &name(7), Some(&request), Ok(()))
    }) {
        saved.unwrap();
    }
    memories.lose('a');
    for loaded in ranks(2, |group| -> Result<()> {
        let found = whole(&memories, "xb", group).remove(0);
        let reader = found.open(group, &hosts("xb"), |root| Ok(io(root)))?;
        let checkpoint = DistributedCheckpoint::open_with(&reader.io(), &name(7))?;
        checkpoint.verify()?;
        drop(checkpoint);
        reader.end()
    }) {
        loaded.unwrap();
    }
}

#[test]
fn failed_read_reaches_all_ranks() {
    let (memories, ids) = (Memories::new(), "ab");
    save_all(&memories, ids, 7);
    let read = |group: &dyn ProcessGroup| -> Result<()> {
        let found = whole(&memories, "xb", group).remove(0);
        group.barrier()?.wait()?;
        memories.lose('b');
        let reader = found.open(group, &hosts("xb"), |root: &Path| Ok(io(root)))?;
        let opened = DistributedCheckpoint::open_with(&reader.io(), &name(7));
        match opened {
            Ok(_) => reader.end(),
            Err(error) => Err(reader.take_failure().unwrap_or(error)),
        }
    };
    let errors: Vec<Error> = ranks(2, read).into_iter().map(|read| read.unwrap_err()).collect();
    assert!(matches!(errors[0], Error::Collective { .. }), "{}", errors[0]);
}
