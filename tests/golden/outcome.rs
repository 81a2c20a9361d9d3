//! The outcome of a case.

use std::collections::BTreeMap;
use std::fmt;

use fulgurite_core::collective::Counter;
use serde::{Deserialize, Serialize};

/// Returns the bits of a number. All NaN count as one, because a NaN's sign is not portable.
pub(crate) fn bits(number: f64) -> u64 {
    if number.is_nan() { f64::NAN.to_bits() } else { number.to_bits() }
}

/// FNV-1a hash of the bits.
fn digest<T: Into<f64>>(values: Vec<T>) -> u64 {
    let bytes = values.into_iter().flat_map(|value| value.into().to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Digests of tensors, by name.
pub(crate) fn digests<T: Into<f64>>(tensors: BTreeMap<String, Vec<T>>) -> BTreeMap<String, u64> {
    tensors.into_iter().map(|(name, values)| (name, digest(values))).collect()
}

/// Calls and total bytes of a collective. Recorded as `3 calls, 120 bytes`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub(crate) struct Calls {
    pub(crate) calls: u64,
    pub(crate) bytes: u64,
}

impl fmt::Display for Calls {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} calls, {} bytes", self.calls, self.bytes)
    }
}

impl From<Calls> for String {
    fn from(calls: Calls) -> Self {
        calls.to_string()
    }
}

impl TryFrom<String> for Calls {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let parse = || {
            let (calls, bytes) = text.strip_suffix(" bytes")?.split_once(" calls, ")?;
            Some(Self { calls: calls.parse().ok()?, bytes: bytes.parse().ok()? })
        };
        parse().ok_or_else(|| format!("`{text}` is not like `3 calls, 120 bytes`"))
    }
}

/// Collective calls, by phase of the training and `group collective`.
pub(crate) type Tally = BTreeMap<String, BTreeMap<String, Calls>>;

/// Adds the counter's calls to a phase's tally and resets the counter.
pub(crate) fn count(tally: &mut Tally, phase: &str, counter: &Counter) {
    let of_phase = tally.entry(phase.to_owned()).or_default();
    for ((group, collective), record) in counter.snapshot() {
        let calls = of_phase.entry(format!("{group} {collective}")).or_default();
        calls.calls += record.calls;
        calls.bytes += record.bytes;
    }
    counter.reset();
}

/// The outcome of a case on one rank, or on all ranks with one tally per rank.
#[derive(Debug, Clone, Default)]
pub(crate) struct Outcome {
    /// Series of numbers by name: losses, norms and other logged values.
    pub(crate) numbers: BTreeMap<String, Vec<f64>>,
    /// Digests of tensors by kind (weights, averages) and name.
    pub(crate) tensors: BTreeMap<String, BTreeMap<String, u64>>,
    /// One tally per rank.
    pub(crate) tallies: Vec<Tally>,
}

impl Outcome {
    /// Whether numbers and tensors are bitwise equal.
    fn computed_as(&self, other: &Self) -> bool {
        let of_steps = |numbers: &BTreeMap<String, Vec<f64>>| -> Vec<(String, Vec<u64>)> {
            let bits = |steps: &Vec<f64>| steps.iter().map(|number| bits(*number)).collect();
            numbers.iter().map(|(what, steps)| (what.clone(), bits(steps))).collect()
        };
        self.tensors == other.tensors && of_steps(&self.numbers) == of_steps(&other.numbers)
    }

    /// Merges the ranks' outcomes. Only their tallies may differ.
    pub(crate) fn of_ranks(what: &str, mut ranks: Vec<Self>) -> Self {
        let tallies = ranks.iter_mut().flat_map(|rank| std::mem::take(&mut rank.tallies)).collect();
        let first = ranks.swap_remove(0);
        assert!(ranks.iter().all(|rank| rank.computed_as(&first)), "{what}: ranks differ");
        Self { tallies, ..first }
    }
}
