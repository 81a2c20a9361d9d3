//! The strategy passes Fulgurite's conformance suite.

use fulgurite_core::conformance::{self, Equivalence};
use fulgurite_local_sgd::LocalSgd;
use fulgurite_transports::run_ranks;

#[test]
fn averaging_conforms_without_equivalence() {
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
fn single_rank_conforms_exactly() {
    run_ranks(1, |world| {
        conformance::strategy::<LocalSgd>(&LocalSgd { sync_every: 1 }, &world, Equivalence::OneRank)
    })
    .unwrap();
}
