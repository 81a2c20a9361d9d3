//! Checks that all ranks have equal values: [`Agreement`].
//!
//! Values that all ranks must share are compared before the first step: the process group's
//! configuration through the store, before the ranks connect ([`Agreement::compare`]); the rest of
//! the configuration, the data, the program and the schedules each by one all-reduce
//! ([`Agreement::check`]).

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use candle_core::{Device, Tensor};
use twox_hash::XxHash3_64;

use super::{Collective, ProcessGroup, ReduceOp, all_gather_object};
use crate::{Error, Result};
use fulgurite_tensor::execution::read;

/// Limit of differing names listed in a message. Further names are counted.
const MAX_NAMES: usize = 8;
/// Limit of values listed for one name.
const MAX_VALUES: usize = 4;
/// Limit of characters of a value in a message.
const MAX_CHARS: usize = 160;

/// Named values that must be equal on all ranks of a group, such as the keys of a configuration.
///
/// ```
/// use fulgurite_core::collective::{Agreement, Solo};
///
/// let mut agreement = Agreement::on("the configuration", "Start all ranks with the same one");
/// agreement.insert("`optimizer.lr`", 0.001);
/// Agreement::check(&Solo::new("world", 0), &[agreement])?;
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Agreement {
    subject: String,
    advice: String,
    values: BTreeMap<String, String>,
}

impl Agreement {
    /// No values yet. For the message, `subject` names the values and `advice` says how to fix a
    /// difference.
    pub fn on(subject: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { subject: subject.into(), advice: advice.into(), values: BTreeMap::new() }
    }

    /// Adds a value, replacing any value of this name.
    pub fn insert(&mut self, name: impl Into<String>, value: impl fmt::Display) {
        self.values.insert(name.into(), value.to_string());
    }

    /// Adds several values.
    pub fn extend(&mut self, values: impl IntoIterator<Item = (String, String)>) {
        self.values.extend(values);
    }

    /// The values, by name.
    pub fn values(&self) -> &BTreeMap<String, String> {
        &self.values
    }

    /// The values, by name.
    pub fn into_values(self) -> BTreeMap<String, String> {
        self.values
    }

    /// Compares with rank 0's values without a collective, before a process group exists. `rank` is
    /// this rank, which has received rank 0's values in another way. Local.
    ///
    /// # Errors
    /// If values differ; the message names each.
    pub fn compare(&self, rank: usize, of_rank_zero: &BTreeMap<String, String>) -> Result<()> {
        let differing = differences(&[Some(of_rank_zero), Some(&self.values)], &[0, rank]);
        if differing.is_empty() {
            return Ok(());
        }
        let mut text = String::new();
        self.describe(&differing, &mut text);
        Err(Error::Config(text))
    }

    /// Compares the values of all ranks. Every rank passes the same subjects in the same order.
    /// Collective: one all-reduce of 32 bytes if the ranks agree. Values are exchanged only if they
    /// differ.
    ///
    /// # Errors
    /// On every rank if values differ; the message names each differing value and its ranks.
    pub fn check(group: &dyn ProcessGroup, agreements: &[Self]) -> Result<()> {
        if group.size() == 1 || same_on_all(group, &hashes(agreements))? {
            return Ok(());
        }
        let own: Vec<BTreeMap<_, _>> = agreements.iter().map(|a| a.values.clone()).collect();
        let all = all_gather_object(group, &own)?;
        let mut text = String::new();
        for (i, agreement) in agreements.iter().enumerate() {
            let of_ranks: Vec<_> = all.iter().map(|of_rank| of_rank.get(i)).collect();
            let differing = differences(&of_ranks, group.global_ranks());
            if !differing.is_empty() {
                agreement.describe(&differing, &mut text);
            }
        }
        if text.is_empty() {
            // Another rank has a subject that this one lacks.
            text = "the ranks compare different things: all ranks must run the same program"
                .to_owned();
        }
        Err(Error::Config(text))
    }

    /// Adds a sentence about the differences, and the advice, to `text`.
    fn describe(&self, differing: &[String], text: &mut String) {
        let listed = differing.len().min(MAX_NAMES);
        let separator = if text.is_empty() { "" } else { " " };
        let list = differing[..listed].join("; ");
        let _ = write!(text, "{separator}the ranks differ in {}: {list}", self.subject);
        if differing.len() > listed {
            let _ = write!(text, "; and {} more", differing.len() - listed);
        }
        let _ = write!(text, ". {}", self.advice);
    }
}

/// Two hashes of all values, of 63 bits each.
fn hashes(agreements: &[Agreement]) -> [i64; 2] {
    let mut bytes = Vec::new();
    for agreement in agreements {
        bytes.extend((agreement.values.len() as u64).to_le_bytes());
        for text in agreement.values.iter().flat_map(|(name, value)| [name, value]) {
            bytes.extend((text.len() as u64).to_le_bytes());
            bytes.extend(text.as_bytes());
        }
    }
    [0, 1].map(|seed| (XxHash3_64::oneshot_with_seed(seed, &bytes) >> 1) as i64)
}

/// Whether all ranks have these two integers. Collective: one all-reduce.
fn same_on_all(group: &dyn ProcessGroup, [a, b]: &[i64; 2]) -> Result<bool> {
    let largest = Tensor::new(&[*a, *b, -a, -b], &Device::Cpu)?;
    group.run(Collective::all_reduce(&largest, ReduceOp::Max))?;
    let largest = read::host::<i64>(&largest)?;
    Ok(largest[..2].iter().zip(&largest[2..]).all(|(max, negated_min)| *max == -negated_min))
}

/// A phrase for each name whose values differ: `seed is 1 on rank 0 and 2 on ranks 1 and 2`.
fn differences(
    of_ranks: &[Option<&BTreeMap<String, String>>],
    global_ranks: &[usize],
) -> Vec<String> {
    let mut by_name: BTreeMap<&String, Vec<Option<&String>>> = BTreeMap::new();
    for (i, values) in of_ranks.iter().enumerate() {
        for (name, value) in values.iter().copied().flatten() {
            by_name.entry(name).or_insert_with(|| vec![None; of_ranks.len()])[i] = Some(value);
        }
    }
    let mut differing: Vec<_> = by_name
        .into_iter()
        .filter(|(_, values)| values.iter().any(|value| *value != values[0]))
        .collect();
    // Names that some ranks lack come last: they result from another differing choice.
    differing.sort_by_key(|(_, values)| values.contains(&None));
    differing
        .into_iter()
        .map(|(name, values)| {
            let mut holders: Vec<(Option<&String>, Vec<usize>)> = Vec::new();
            for (value, &rank) in values.into_iter().zip(global_ranks) {
                match holders.iter_mut().find(|(known, _)| *known == value) {
                    Some((_, ranks)) => ranks.push(rank),
                    None => holders.push((value, vec![rank])),
                }
            }
            let mut phrases: Vec<String> = holders
                .iter()
                .take(MAX_VALUES)
                .map(|(value, ranks)| match value {
                    Some(value) => format!("{} on {}", shortened(value), name_ranks(ranks)),
                    None => format!("absent on {}", name_ranks(ranks)),
                })
                .collect();
            if holders.len() > MAX_VALUES {
                phrases.push(format!("{} other values elsewhere", holders.len() - MAX_VALUES));
            }
            format!("{name} is {}", enumerate(&phrases))
        })
        .collect()
}

fn shortened(value: &str) -> String {
    match value.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}…", &value[..end]),
        None => value.to_owned(),
    }
}

/// `rank 3`, `ranks 0 and 2`, `ranks 0-7 and 12`.
fn name_ranks(ranks: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &rank in ranks {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            _ => runs.push((rank, rank)),
        }
    }
    let runs: Vec<String> = runs
        .into_iter()
        .flat_map(|(first, last)| match last - first {
            0 => vec![first.to_string()],
            1 => vec![first.to_string(), last.to_string()],
            _ => vec![format!("{first}-{last}")],
        })
        .collect();
    let word = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{word} {}", enumerate(&runs))
}

/// `a`, `a and b`, `a, b and c`.
fn enumerate(parts: &[String]) -> String {
    match parts {
        [] => String::new(),
        [one] => one.clone(),
        [before @ .., last] => format!("{} and {last}", before.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    fn differences_of(ranks: &[&[(&str, &str)]]) -> String {
        let own = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        let values: Vec<BTreeMap<_, _>> =
            ranks.iter().map(|values| values.iter().map(own).collect()).collect();
        let values: Vec<_> = values.iter().map(Some).collect();
        let global: Vec<usize> = (0..ranks.len()).collect();
        differences(&values, &global).join("; ")
    }

    #[test]
    fn differing_values_are_named_with_their_ranks() {
        let same = [("a", "1"), ("b", "x")];
        assert_eq!(differences_of(&[&same, &same]), "");
        assert_says!(
            differences_of(&[&same, &[("a", "2"), ("b", "x")], &same]),
            "a is 1 on ranks 0 and 2 and 2 on rank 1"
        );
        assert_says!(
            differences_of(&[&same, &[("a", "1")]]),
            "b is x on rank 0 and absent on rank 1"
        );
        let absent = differences_of(&[&[("a", "1"), ("b", "x")], &[("b", "y")]]);
        assert_says!(absent, "b is x on rank 0 and y on rank 1; a is 1 … absent on rank 1");
        let one = |value| [("a", value)];
        let six = ["1", "2", "3", "4", "5", "6"].map(one);
        let six: Vec<&[(&str, &str)]> = six.iter().map(|values| &values[..]).collect();
        assert_says!(differences_of(&six), "a is 1 … 4 on rank 3 and 2 other values elsewhere");
    }

    #[test]
    fn ranks_in_a_row_are_a_range() {
        assert_eq!(name_ranks(&[0, 1, 2, 3, 6, 8, 9]), "ranks 0-3, 6, 8 and 9");
        assert_eq!(name_ranks(&[4]), "rank 4");
    }

    #[test]
    fn hashes_tell_names_from_values() {
        let with = |name: &str, value: &str| {
            let mut one = Agreement::on("the configuration", "");
            one.insert(name, value);
            hashes(&[one])
        };
        assert_ne!(with("ab", "c"), with("a", "bc"));
        assert_eq!(with("ab", "c"), with("ab", "c"));
        let empty = Agreement::on("the data", "");
        assert_ne!(hashes(&[empty.clone(), empty.clone()]), hashes(&[empty]));
    }
}
