//! The strategy keeps what Fulgurite's trait promises.

use fulgurite_core::conformance::{self, Equivalence};
use fulgurite_local_sgd::LocalSgd;
use fulgurite_transports::run_ranks;

#[test]
fn averaging_now_and_then_is_its_own_mathematics() {
    for world_size in 1..=3 {
        run_ranks(world_size, |world| {
            conformance::strategy::<LocalSgd>(
                &LocalSgd { sync_every: 2 },
                &world,
                Equivalence::None,
            )
        })
        .unwrap();
    }
}

#[test]
fn one_rank_has_nothing_to_average() {
    run_ranks(1, |world| {
        conformance::strategy::<LocalSgd>(&LocalSgd { sync_every: 1 }, &world, Equivalence::OneRank)
    })
    .unwrap();
}
