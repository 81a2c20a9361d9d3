//! Memory plans: bytes that a rank will hold, estimated before ranks start.

use std::fmt::{self, Display};

/// Bytes that a rank will hold between and within steps for any batch, without activations. From
/// [`StrategyExtensions::plan_module`](super::StrategyExtensions::plan_module).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RankMemory {
    /// Values updated by the optimizer and, in another dtype, the copy that layers compute with.
    pub parameters: u64,
    /// The model's buffers, whole on every rank.
    pub buffers: u64,
    /// Gradients of the elements that this rank's optimizer updates.
    pub gradients: u64,
    /// The largest gathered unit, where parameters are sharded.
    pub gathered_unit: u64,
    /// The optimizer's state.
    pub optimizer_state: u64,
    /// The moving average of the weights.
    pub average: u64,
    /// Elements that this rank's optimizer updates.
    pub updated_elements: u64,
}

impl RankMemory {
    /// The total, in bytes.
    pub fn total(&self) -> u64 {
        self.parts().iter().fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }

    fn parts(&self) -> [(&'static str, u64); 6] {
        [
            ("parameters", self.parameters),
            ("buffers", self.buffers),
            ("gradients", self.gradients),
            ("the largest unit, gathered", self.gathered_unit),
            ("optimizer state", self.optimizer_state),
            ("moving average", self.average),
        ]
    }
}

/// Lists the nonzero parts: `parameters 1.5 GiB, gradients 1.5 GiB`.
impl Display for RankMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = self.parts().into_iter().filter(|(_, bytes)| *bytes > 0);
        let parts: Vec<_> = parts.map(|(name, bytes)| format!("{name} {}", Bytes(bytes))).collect();
        f.write_str(&parts.join(", "))
    }
}

/// Formats a number of bytes for people: `1.5 GiB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bytes(pub u64);

impl Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        if self.0 < 1024 {
            return write!(f, "{} bytes", self.0);
        }
        let mut size = self.0 as f64 / 1024.0;
        let mut unit = 0;
        while size >= 1024.0 && unit + 1 < UNITS.len() {
            (size, unit) = (size / 1024.0, unit + 1);
        }
        write!(f, "{size:.1} {}", UNITS[unit])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_named_and_added() {
        let memory = RankMemory {
            parameters: 3 << 29,
            gradients: 700,
            optimizer_state: 3 << 30,
            ..RankMemory::default()
        };
        insta::assert_snapshot!(memory, @"parameters 1.5 GiB, gradients 700 bytes, optimizer state 3.0 GiB");
        assert_eq!(memory.total(), (3 << 29) + 700 + (3 << 30));
        insta::assert_snapshot!(Bytes(u64::MAX), @"16.0 EiB");
    }
}
