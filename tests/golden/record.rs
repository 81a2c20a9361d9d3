//! `record.json`, and the comparison of outcomes with it.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::outcome::{Calls, Outcome, Tally, bits};

/// Returns the CPU's family, on which the bits of matrix products depend. Instructions for bf16
/// only matter in `half` precision.
pub(crate) fn cpu(half: bool) -> String {
    #[cfg(target_arch = "x86_64")]
    let vectors = match () {
        () if is_x86_feature_detected!("avx512f") => "avx512f",
        () if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") => "avx2+fma",
        () => "sse2",
    };
    #[cfg(not(target_arch = "x86_64"))]
    let vectors = "its own vectors";
    let bf16 = match fulgurite_core::nn::bf16_products() {
        instructions if half && instructions != "f32" => format!("+{instructions}"),
        _ => String::new(),
    };
    format!("{} {} {vectors}{bf16}", std::env::consts::OS, std::env::consts::ARCH)
}

/// Recorded values, each as 16 hexadecimal digits of its bits.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Bits {
    /// Series by name, with spaces between the values.
    numbers: BTreeMap<String, String>,
    /// Digests of tensors, by kind and name.
    tensors: BTreeMap<String, BTreeMap<String, String>>,
}

fn hex(bits: u64) -> String {
    format!("{bits:016x}")
}

fn number(hex: &str) -> f64 {
    f64::from_bits(u64::from_str_radix(hex, 16).expect("the record holds numbers in hexadecimal"))
}

impl Bits {
    fn of(outcome: &Outcome) -> Self {
        let line = |numbers: &Vec<f64>| {
            numbers.iter().map(|number| hex(bits(*number))).collect::<Vec<_>>().join(" ")
        };
        let named = |digests: &BTreeMap<String, u64>| {
            digests.iter().map(|(name, digest)| (name.clone(), hex(*digest))).collect()
        };
        let (numbers, tensors) = (&outcome.numbers, &outcome.tensors);
        Self {
            numbers: numbers.iter().map(|(what, all)| (what.clone(), line(all))).collect(),
            tensors: tensors.iter().map(|(kind, all)| (kind.clone(), named(all))).collect(),
        }
    }

    /// Compares bits with the record. With a `tolerance`, compares only numbers, relatively.
    ///
    /// # Errors
    /// The first number or tensor that differs.
    fn compare(&self, found: &Self, tolerance: Option<f64>) -> Result<(), String> {
        let steps = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let mut first: Option<(usize, String)> = None;
        for (what, line) in union(&self.numbers, &found.numbers) {
            let (recorded, found) = both(what, line)?;
            let (recorded, found) = (steps(recorded), steps(found));
            if recorded.len() != found.len() {
                return Err(format!("{what}: {} on record, found {}", recorded.len(), found.len()));
            }
            for (i, (recorded, found)) in recorded.iter().zip(&found).enumerate() {
                let (a, b) = (number(recorded), number(found));
                // A tolerance cannot compare infinities and NaN.
                let near = |tolerance| a.is_finite() && (a - b).abs() <= tolerance * a.abs();
                let same = recorded == found || tolerance.is_some_and(near);
                if !same && first.as_ref().is_none_or(|(step, _)| i < *step) {
                    let text = format!(
                        "step {}, {what}: {a:?} ({recorded}) on record, found {b:?} ({found})",
                        i + 1
                    );
                    first = Some((i, text));
                }
            }
        }
        if let Some((_, text)) = first {
            return Err(text);
        }
        if tolerance.is_some() {
            return Ok(());
        }
        for (kind, tensors) in union(&self.tensors, &found.tensors) {
            let (recorded, found) = both(kind, tensors)?;
            let of_tensor = |(name, digests): (&String, _)| {
                let (recorded, found) = both(&format!("{kind}, `{name}`"), digests)?;
                match recorded == found {
                    true => Ok(()),
                    false => Err(format!(
                        "{kind} after the last step, `{name}`: its digest on record is {recorded}, found \
                         {found}; losses and norms are equal"
                    )),
                }
            };
            union(recorded, found).into_iter().try_for_each(of_tensor)?;
        }
        Ok(())
    }
}

/// Pairs the values of both maps by key.
fn union<'a, V>(
    a: &'a BTreeMap<String, V>,
    b: &'a BTreeMap<String, V>,
) -> BTreeMap<&'a String, (Option<&'a V>, Option<&'a V>)> {
    a.keys().chain(b.keys()).map(|key| (key, (a.get(key), b.get(key)))).collect()
}

fn both<'a, V>(
    what: &str,
    values: (Option<&'a V>, Option<&'a V>),
) -> Result<(&'a V, &'a V), String> {
    match values {
        (Some(recorded), Some(found)) => Ok((recorded, found)),
        (Some(_), None) => Err(format!("{what}: on record, and not there any more")),
        (None, _) => Err(format!("{what}: not on record")),
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    /// Calls by ranks, phase and `group collective`. Ranks with equal tallies share an entry.
    collectives: BTreeMap<String, Tally>,
    /// By CPU family.
    bits: BTreeMap<String, Bits>,
}

/// Groups ranks with equal tallies. Keys are rank numbers separated by spaces.
fn by_ranks(tallies: &[Tally]) -> BTreeMap<String, Tally> {
    let mut groups: Vec<(Vec<String>, &Tally)> = Vec::new();
    for (rank, tally) in tallies.iter().enumerate() {
        match groups.iter_mut().find(|(_, other)| *other == tally) {
            Some((ranks, _)) => ranks.push(rank.to_string()),
            None => groups.push((vec![rank.to_string()], tally)),
        }
    }
    groups.into_iter().map(|(ranks, tally)| (ranks.join(" "), tally.clone())).collect()
}

/// Returns the tally of a rank.
fn of_rank(collectives: &BTreeMap<String, Tally>, rank: usize) -> Tally {
    let rank = rank.to_string();
    let mut entries = collectives.iter();
    let found = entries.find(|(ranks, _)| ranks.split(' ').any(|other| other == rank));
    found.map(|(_, tally)| tally.clone()).unwrap_or_default()
}

/// Compares every rank's collectives with the record.
///
/// # Errors
/// The first collective with other calls or bytes.
fn compare_collectives(recorded: &BTreeMap<String, Tally>, found: &[Tally]) -> Result<(), String> {
    for (rank, found) in found.iter().enumerate() {
        let recorded = of_rank(recorded, rank);
        for (phase, tally) in union(&recorded, found) {
            let (recorded, found) = both(&format!("rank {rank}, {phase}"), tally)?;
            for (what, (recorded, found)) in union(recorded, found) {
                if recorded != found {
                    let calls = |calls: Option<&Calls>| calls.copied().unwrap_or_default();
                    let (recorded, found) = (calls(recorded), calls(found));
                    return Err(format!(
                        "rank {rank}, {phase}, `{what}`: {recorded} on record, found {found}"
                    ));
                }
            }
        }
    }
    Ok(())
}

/// The CPU family whose bits an outcome was compared with.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Against {
    SameCpu,
    OtherCpu(String),
}

/// The recorded outcomes, by case.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Record(BTreeMap<String, Entry>);

impl Record {
    /// Reads the file. A nonexistent file is an empty record if `missing` is true.
    pub(crate) fn read(file: &Path, missing: bool) -> Self {
        match std::fs::read(file) {
            Err(error) if missing && error.kind() == std::io::ErrorKind::NotFound => {
                Self::default()
            }
            Err(error) => panic!("{}: {error}", file.display()),
            Ok(text) => serde_json::from_slice(&text)
                .unwrap_or_else(|error| panic!("{}: {error}", file.display())),
        }
    }

    pub(crate) fn write(&self, file: &Path) {
        let text = serde_json::to_string_pretty(self).expect("maps with names as keys");
        std::fs::write(file, text + "\n").expect("the sources can be written");
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    pub(crate) fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        self.0.retain(|name, _| keep(name));
    }

    /// Records an outcome as the bits of `cpu`. If they changed, other CPUs' bits are outdated and
    /// are removed.
    pub(crate) fn put(&mut self, name: &str, outcome: &Outcome, cpu: &str) {
        let new = Bits::of(outcome);
        let old = self.0.remove(name).map(|entry| entry.bits).unwrap_or_default();
        let keep = old.get(cpu).is_none_or(|bits| *bits == new);
        let mut bits = if keep { old } else { BTreeMap::new() };
        bits.insert(cpu.to_owned(), new);
        let collectives = by_ranks(&outcome.tallies);
        self.0.insert(name.to_owned(), Entry { collectives, bits });
    }

    /// Compares an outcome of `cpu` with the record. If the record lacks this CPU's bits,
    /// `tolerance` applies to another CPU's numbers.
    ///
    /// # Errors
    /// The first difference.
    pub(crate) fn compare(
        &self,
        name: &str,
        outcome: &Outcome,
        cpu: &str,
        tolerance: f64,
    ) -> Result<Against, String> {
        let entry = self.0.get(name).ok_or("not on record")?;
        let found = Bits::of(outcome);
        let against = match entry.bits.get(cpu) {
            Some(recorded) => {
                recorded.compare(&found, None)?;
                Against::SameCpu
            }
            None => {
                let (other, recorded) =
                    entry.bits.first_key_value().ok_or("no CPU's bits on record")?;
                recorded.compare(&found, Some(tolerance))?;
                Against::OtherCpu(other.clone())
            }
        };
        compare_collectives(&entry.collectives, &outcome.tallies)?;
        Ok(against)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The CPU family that runs the case.
    const OWN: &str = "own";

    fn outcome() -> Outcome {
        let tally = |bytes| {
            let calls = Calls { calls: 2, bytes };
            let calls = BTreeMap::from([("world all_reduce".to_owned(), calls)]);
            Tally::from([("first step".to_owned(), calls)])
        };
        Outcome {
            numbers: BTreeMap::from([
                ("loss".to_owned(), vec![2.5, 2.25]),
                ("norm".to_owned(), vec![1.0, 0.5]),
            ]),
            tensors: BTreeMap::from([(
                "weights".to_owned(),
                BTreeMap::from([("up.weight".to_owned(), 5), ("up.bias".to_owned(), 6)]),
            )]),
            tallies: vec![tally(16), tally(24), tally(16)],
        }
    }

    fn difference(change: impl Fn(&mut Outcome)) -> String {
        let mut record = Record::default();
        record.put("case", &outcome(), OWN);
        let mut changed = outcome();
        change(&mut changed);
        record.compare("case", &changed, OWN, 1e-5).unwrap_err()
    }

    #[test]
    fn first_difference_is_named() {
        let mut record = Record::default();
        record.put("case", &outcome(), OWN);
        let record: Record = serde_json::from_value(serde_json::to_value(record).unwrap()).unwrap();
        assert_eq!(record.compare("case", &outcome(), OWN, 1e-5), Ok(Against::SameCpu));
        insta::assert_snapshot!(record.compare("none", &outcome(), OWN, 1e-5).unwrap_err(), @"not on record");
        let number = |what: &'static str, step: usize| {
            move |outcome: &mut Outcome| {
                let number = &mut outcome.numbers.get_mut(what).unwrap()[step];
                *number = f64::from_bits(number.to_bits() + 1);
            }
        };
        insta::assert_snapshot!(difference(number("loss", 1)), @"step 2, loss: 2.25 (4002000000000000) on record, found 2.2500000000000004 (4002000000000001)");
        let two = |outcome: &mut Outcome| {
            number("loss", 1)(outcome);
            number("norm", 0)(outcome);
        };
        insta::assert_snapshot!(difference(two), @"step 1, norm: 1.0 (3ff0000000000000) on record, found 1.0000000000000002 (3ff0000000000001)");
        insta::assert_snapshot!(difference(|outcome| outcome.numbers.get_mut("loss").unwrap().truncate(1)), @"loss: 2 on record, found 1");
        insta::assert_snapshot!(difference(|outcome| drop(outcome.numbers.remove("norm"))), @"norm: on record, and not there any more");
        let weights = |outcome: &mut Outcome| {
            outcome.tensors.get_mut("weights").unwrap().insert("up.bias".to_owned(), 7);
        };
        insta::assert_snapshot!(difference(weights), @"weights after the last step, `up.bias`: its digest on record is 0000000000000006, found 0000000000000007; losses and norms are equal");
        let bytes = |outcome: &mut Outcome| {
            let step = outcome.tallies[1].get_mut("first step").unwrap();
            step.insert("world all_reduce".to_owned(), Calls { calls: 3, bytes: 24 });
        };
        insta::assert_snapshot!(difference(bytes), @"rank 1, first step, `world all_reduce`: 2 calls, 24 bytes on record, found 3 calls, 24 bytes");
        let more = |outcome: &mut Outcome| {
            let step = outcome.tallies[2].get_mut("first step").unwrap();
            step.insert("world barrier".to_owned(), Calls { calls: 1, bytes: 0 });
        };
        insta::assert_snapshot!(difference(more), @"rank 2, first step, `world barrier`: 0 calls, 0 bytes on record, found 1 calls, 0 bytes");
    }

    #[test]
    fn other_cpu_numbers_have_a_tolerance() {
        let mut record = Record::default();
        record.put("case", &outcome(), OWN);
        let entry = record.0.get_mut("case").unwrap();
        let bits = entry.bits.remove(OWN).unwrap();
        entry.bits.insert("another".to_owned(), bits);
        let mut near = outcome();
        near.numbers.get_mut("loss").unwrap()[1] = 2.25001;
        near.tensors.get_mut("weights").unwrap().insert("up.bias".to_owned(), 7);
        let against = Against::OtherCpu("another".to_owned());
        assert_eq!(record.compare("case", &near, OWN, 1e-5), Ok(against));
        near.numbers.get_mut("loss").unwrap()[1] = 2.2501;
        assert!(record.compare("case", &near, OWN, 1e-5).unwrap_err().starts_with("step 2, loss"));
        let mut more = outcome();
        more.tallies[0].clear();
        assert!(
            record.compare("case", &more, OWN, 1e-5).unwrap_err().starts_with("rank 0, first step")
        );
    }

    #[test]
    fn nan_and_infinities_equal_themselves_alone() {
        let with = |norm: f64| {
            let mut outcome = outcome();
            outcome.numbers.get_mut("norm").unwrap()[1] = norm;
            outcome
        };
        for (norm, same) in [(f64::NAN, -f64::NAN), (f64::INFINITY, f64::INFINITY)] {
            let mut record = Record::default();
            record.put("case", &with(norm), OWN);
            assert_eq!(record.compare("case", &with(same), OWN, 1e-5), Ok(Against::SameCpu));
            let entry = record.0.get_mut("case").unwrap();
            let bits = entry.bits.remove(OWN).unwrap();
            entry.bits.insert("another".to_owned(), bits);
            let against = Against::OtherCpu("another".to_owned());
            assert_eq!(record.compare("case", &with(same), OWN, 1e-5), Ok(against));
            assert!(record.compare("case", &with(0.5), OWN, 1e-5).is_err());
            assert!(record.compare("case", &with(-f64::INFINITY), OWN, 1e-5).is_err());
        }
    }

    #[test]
    fn update_drops_contradicted_bits_of_other_cpus() {
        let mut record = Record::default();
        record.put("case", &outcome(), OWN);
        let bits = Bits::of(&outcome());
        record.0.get_mut("case").unwrap().bits.insert("another".to_owned(), bits);
        record.put("case", &outcome(), OWN);
        assert_eq!(record.0["case"].bits.len(), 2);
        let mut changed = outcome();
        changed.numbers.get_mut("loss").unwrap()[0] = 3.0;
        record.put("case", &changed, OWN);
        assert_eq!(record.0["case"].bits.keys().collect::<Vec<_>>(), [OWN]);
    }
}
