//! Golden tests: a refactoring must keep the bits of losses, norms, weights and their averages, and
//! the calls and bytes of every collective, for every kind of training.
//!
//! `record.json` holds the expected values. Bits depend on the vector instructions of matrix
//! products, so each CPU family has its own record. Cases in half precision (`Case::half`) have one
//! more for CPUs with bf16 instructions. On a CPU family without a record, losses and norms are
//! compared with another family's to a tolerance.
//!
//! After an intended change, run `UPDATE_GOLDEN=1 cargo test --test golden`. It records this CPU's
//! bits. If a case's bits changed, it drops the outdated bits of other CPUs.

mod case;
mod cases;
mod fabric_steps;
mod fault;
mod modules;
mod outcome;
mod pair;
mod record;
mod several;
mod trainer_steps;
mod training;
mod with_trainer;

use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::Path;

use record::{Against, Record};

/// Prints to the real stderr, past the test harness's capture.
fn tell(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

#[test]
fn nothing_on_record_has_changed() {
    let cases = cases::all();
    let names: BTreeSet<&str> = cases.iter().map(|case| case.name).collect();
    assert_eq!(names.len(), cases.len(), "two cases have one name");

    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/record.json");
    let update = std::env::var_os("UPDATE_GOLDEN").is_some();
    let mut record = Record::read(&file, update);
    let (mut differences, mut compared_with) = (Vec::new(), BTreeSet::new());
    for case in &cases {
        let outcome = case.run();
        if update {
            record.put(case.name, &outcome, &record::cpu(case.half));
            continue;
        }
        match record.compare(case.name, &outcome, &record::cpu(case.half), case.tolerance()) {
            Ok(Against::SameCpu) => {}
            Ok(Against::OtherCpu(cpu)) => {
                compared_with.insert((record::cpu(case.half), cpu));
            }
            Err(difference) => differences.push(format!("{}: {difference}", case.name)),
        }
    }
    if update {
        record.retain(|name| names.contains(name));
        record.write(&file);
        tell(&format!("{}: {} cases on {}", file.display(), cases.len(), record::cpu(true)));
        return;
    }
    let forgotten = record.names().filter(|name| !names.contains(name));
    differences.extend(forgotten.map(|name| format!("{name}: on record, and no case any more")));
    for (own, other) in compared_with {
        tell(&format!(
            "golden: bits of {own} are missing on record; losses and norms were compared with those of \
             {other} to a tolerance, calls and bytes exactly"
        ));
    }
    assert!(
        differences.is_empty(),
        "{} of {} cases differ from tests/golden/record.json:\n{}\n\
         If that is meant, `UPDATE_GOLDEN=1 cargo test --test golden` puts the new ones on record.",
        differences.len(),
        cases.len(),
        differences.join("\n")
    );
}
