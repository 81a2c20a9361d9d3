//! Messages without the engine.
#![allow(unsafe_code)] // Memory of messages.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fulgurite_core::Result;
use fulgurite_core::collective::GroupContext;
use fulgurite_mpi::{Mpi, MpiNetwork};
use fulgurite_transports::network::{Incoming, Network, Outgoing, Watch, Wire, WireError};

use crate::job::{By, Job};

/// Records the calls of a wire.
#[derive(Default)]
struct Notes {
    received: Vec<usize>,
    missing: Vec<usize>,
    /// Ends the exchange at the first received message.
    refuses: bool,
    /// Ends the exchange after this time.
    patience: Option<Duration>,
    since: Option<Instant>,
}

impl Watch for Notes {
    fn received(&mut self, index: usize) -> std::result::Result<(), WireError> {
        self.received.push(index);
        if self.refuses { Err(WireError::Ended) } else { Ok(()) }
    }

    fn waiting(&mut self, _: bool, missing: &[usize]) -> std::result::Result<(), WireError> {
        self.missing = missing.to_vec();
        let since = *self.since.get_or_insert_with(Instant::now);
        match self.patience {
            Some(patience) if since.elapsed() > patience => Err(WireError::Ended),
            _ => Ok(()),
        }
    }
}

fn exchange(
    wire: &mut dyn Wire,
    sends: &[(usize, Vec<u8>)],
    receives: &mut [(usize, Vec<u8>)],
    notes: &mut Notes,
) -> std::result::Result<(), WireError> {
    let sends: Vec<Outgoing> =
        sends.iter().map(|(to, bytes)| Outgoing { to: *to, bytes: &raw const bytes[..] }).collect();
    let receives: Vec<Incoming> = receives
        .iter_mut()
        .map(|(from, bytes)| Incoming { from: *from, bytes: &raw mut bytes[..] })
        .collect();
    // SAFETY: the vectors outlive the call. A test with a failing exchange leaks them.
    unsafe { wire.exchange(&sends, &receives, notes) }
}

/// Message `index` of round `round` from member `from` to member `to`.
fn message(from: usize, to: usize, round: usize, index: usize, limit: usize) -> Vec<u8> {
    let seed = (from * 31 + to) * 100_003 + round * 17 + index;
    let mut random = fastrand::Rng::with_seed(seed as u64);
    let len = match random.usize(0..4) {
        0 => 0,
        1 => random.usize(0..100),
        _ => random.usize(0..limit),
    };
    let mut bytes = vec![0; len];
    random.fill(&mut bytes);
    bytes
}

/// Exchanges several messages of all sizes between all members, in several rounds.
fn exchange_all(wire: &mut dyn Wire, own: usize, size: usize, rounds: usize, limit: usize) {
    for round in 0..rounds {
        let others = || (0..size).filter(|&other| other != own);
        let three = |from, to| (0..3).map(move |index| message(from, to, round, index, limit));
        let sends: Vec<_> =
            others().flat_map(|to| three(own, to).map(move |bytes| (to, bytes))).collect();
        let expected: Vec<_> =
            others().flat_map(|from| three(from, own).map(move |bytes| (from, bytes))).collect();
        let mut receives: Vec<_> =
            expected.iter().map(|(from, bytes)| (*from, vec![0; bytes.len()])).collect();
        let mut notes = Notes::default();
        exchange(wire, &sends, &mut receives, &mut notes).unwrap();
        assert!(receives == expected, "round {round}: other bytes came");
        let from_of = |index: usize| expected[index].0;
        let told = |from| notes.received.iter().filter(move |&&index| from_of(index) == from);
        for from in others() {
            assert!(told(from).is_sorted(), "round {round}: {:?}", notes.received);
        }
        let with_bytes = expected.iter().filter(|(_, bytes)| !bytes.is_empty()).count();
        assert_eq!(notes.received.len(), with_bytes);
    }
}

pub(crate) fn run(scenario: &str, context: &GroupContext) -> Option<Result<()>> {
    let (rank, size) = (context.rank, context.world_size);
    let piece_bytes = match scenario {
        "pieces" => 1000,
        "large" => i32::MAX as usize,
        _ => Mpi::default().piece_bytes,
    };
    let network = || MpiNetwork::new(&Mpi { piece_bytes, ..Mpi::default() }, context).map(Arc::new);
    let connect = |network: &Arc<MpiNetwork>, key: &str, members: &[usize], own: usize| {
        network.clone().connect(key, members, own, context.timeout, &|| Ok(()))
    };
    let everybody: Vec<usize> = (0..size).collect();
    let result = match scenario {
        "pieces" | "messages" => (|| {
            let mut wire = connect(&network()?, "all", &everybody, rank)?;
            exchange_all(&mut *wire, rank, size, 50, 200_000);
            exchange_all(&mut *wire, rank, size, 3, 3_000_000);
            Ok(())
        })(),
        "groups" => (|| {
            // Several threads of a rank exchange at once, each in its own group. Every second group
            // has its members in reverse order.
            let network = network()?;
            let exchange = |number: usize| {
                let mut members = everybody.clone();
                let mut own = rank;
                if number % 2 == 1 {
                    members.reverse();
                    own = size - 1 - rank;
                }
                let mut wire = connect(&network, &format!("group {number}"), &members, own)?;
                exchange_all(&mut *wire, own, size, 30, 100_000);
                Ok(())
            };
            std::thread::scope(|scope| {
                let threads: Vec<_> =
                    (0..4).map(|number| scope.spawn(move || exchange(number))).collect();
                threads.into_iter().try_for_each(|thread| thread.join().unwrap())
            })
        })(),
        "large" => (|| {
            let mut wire = connect(&network()?, "all", &everybody, rank)?;
            let len = (1 << 31) + (1 << 20) + 5;
            let byte = |i: usize| (i % 251) as u8;
            let (mut sends, mut receives) = (vec![], vec![]);
            match rank {
                0 => sends.push((1, (0..len).map(byte).collect())),
                _ => receives.push((0, vec![0; len])),
            }
            exchange(&mut *wire, &sends, &mut receives, &mut Notes::default()).unwrap();
            for (_, bytes) in receives {
                assert!(bytes.iter().enumerate().all(|(i, &b)| b == byte(i)), "other bytes came");
            }
            Ok(())
        })(),
        "silent" => (|| {
            let mut wire = connect(&network()?, "all", &everybody, rank)?;
            if rank > 0 {
                // The rank is alive, but sends no messages.
                return context.store.get("rank 0 gave up", context.timeout).map(drop);
            }
            let mut notes =
                Notes { patience: Some(Duration::from_millis(500)), ..Notes::default() };
            let mut receives = vec![(1, vec![0; 100]), (size - 1, vec![0; 10_000_000])];
            let sends = vec![(1, vec![0; 10_000_000])];
            let error = exchange(&mut *wire, &sends, &mut receives, &mut notes).unwrap_err();
            assert_eq!(error, WireError::Ended);
            assert_eq!(notes.missing, if size == 2 { vec![1] } else { vec![1, size - 1] });
            std::mem::forget((sends, receives));
            context.store.set("rank 0 gave up", b"")
        })(),
        "lengths" => (|| {
            // The second message is longer or shorter than the receive, as the ranks are in
            // different collectives. The first message shows it.
            let network = network()?;
            for (number, (sent, received)) in [(50_000, 100), (100, 50_000)].into_iter().enumerate()
            {
                let mut wire = connect(&network, &format!("all {number}"), &everybody, rank)?;
                let patience = Some(Duration::from_millis(500));
                if rank == 0 {
                    let sends = vec![(1, vec![1; 8]), (1, vec![2; sent])];
                    let mut notes = Notes { patience, ..Notes::default() };
                    // The send may succeed before the ranks know.
                    let _ = exchange(&mut *wire, &sends, &mut [], &mut notes);
                    std::mem::forget(sends);
                } else if rank == 1 {
                    let mut receives = vec![(0, vec![0; 8]), (0, vec![0; received])];
                    // Memory past the end of the message's.
                    receives[1].1.reserve(100_000);
                    let spare = receives[1].1.spare_capacity_mut();
                    spare.fill(std::mem::MaybeUninit::new(0));
                    let mut notes = Notes { refuses: true, ..Notes::default() };
                    let error = exchange(&mut *wire, &[], &mut receives, &mut notes).unwrap_err();
                    assert_eq!(error, WireError::Ended);
                    assert_eq!(notes.received, [0]);
                    assert_eq!(receives[0].1, [1; 8]);
                    let spare = receives[1].1.spare_capacity_mut();
                    // SAFETY: written above.
                    let touched = spare.iter().any(|byte| unsafe { byte.assume_init() } != 0);
                    assert!(!touched, "MPI wrote behind the memory of a message");
                    std::mem::forget(receives);
                }
            }
            Ok(())
        })(),
        _ => return None,
    };
    Some(result)
}

#[test]
fn messages_of_all_sizes_arrive_in_order() {
    Job::start(2, "messages", 60, By::Mpirun).expect_ok();
    Job::start(4, "messages", 60, By::Mpirun).expect_ok();
}

#[test]
fn messages_arrive_in_pieces() {
    Job::start(2, "pieces", 60, By::Mpirun).expect_ok();
}

#[test]
fn groups_exchange_on_several_threads() {
    Job::start(4, "groups", 60, By::Mpirun).expect_ok();
}

#[test]
fn job_and_mpi_rank_order_may_differ() {
    Job::start(3, "messages", 60, By::Flipped).expect_ok();
}

#[test]
fn watch_ends_wait_for_silent_rank() {
    Job::start(2, "silent", 30, By::Mpirun).expect_ok_without_finalize();
    Job::start(3, "silent", 30, By::Mpirun).expect_ok_without_finalize();
}

#[test]
fn later_messages_wait_for_the_first() {
    Job::start(2, "lengths", 30, By::Mpirun).expect_ok_without_finalize();
}

#[test]
#[ignore = "takes 5 GiB of memory"]
fn message_longer_than_two_gibibytes() {
    Job::start(2, "large", 120, By::Mpirun).expect_ok();
}
