//! Launches real processes, which fail and end.
//!
//! The launched program is this one again: with `LAUNCH_TEST_PROGRAM` set it plays that part
//! instead of running the tests. So it has a `main` like any user's program.

mod launchers;
mod program;
mod requeued;
mod run;
mod started;
mod supervised;

use std::process::ExitCode;

use fulgurite_environments as _;
use libtest_mimic::{Arguments, Trial};

fn main() -> ExitCode {
    if let Ok(part) = std::env::var(run::PROGRAM) {
        return fulgurite_core::launch::report_and_exit_code(program::play(&part));
    }
    let trials = supervised::TESTS.iter().chain(started::TESTS);
    let trials = trials.chain(launchers::TESTS).chain(requeued::TESTS);
    let trials = trials.map(|(name, test)| {
        Trial::test(*name, move || {
            test();
            Ok(())
        })
    });
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit_code()
}
