//! Types of command-line arguments.

use std::str::FromStr;

use candle_core::DType;
use clap::ValueEnum;

/// A type of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum WeightType {
    F64,
    F32,
    F16,
    Bf16,
    /// Blocks of 32 integers of 8 bits, for GGUF
    #[value(name = "q8_0")]
    Q8_0,
    /// Blocks of 256 integers of 4 bits, for GGUF
    #[value(name = "q4_k")]
    Q4K,
}

impl WeightType {
    /// The dtype of tensors; `None` for a type that only GGUF has.
    pub(super) fn dtype(self) -> Option<DType> {
        match self {
            Self::F64 => Some(DType::F64),
            Self::F32 => Some(DType::F32),
            Self::F16 => Some(DType::F16),
            Self::Bf16 => Some(DType::BF16),
            Self::Q8_0 | Self::Q4K => None,
        }
    }
}

/// A number of bytes: `5GB`, `512MiB`, `100000`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Size(pub(super) u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.bytes().take_while(|b| b.is_ascii_digit() || *b == b'.').count();
        let (number, unit) = text.split_at(digits);
        let factor = match unit.trim() {
            "" | "B" => 1.0,
            "KB" => 1e3,
            "MB" => 1e6,
            "GB" => 1e9,
            "TB" => 1e12,
            "KiB" => 1024.0,
            "MiB" => 1024.0 * 1024.0,
            "GiB" => 1024.0 * 1024.0 * 1024.0,
            _ => return Err("expected a size such as 5GB, 512MiB or 100000".to_owned()),
        };
        match number.parse::<f64>() {
            Ok(n) if n * factor >= 1.0 => Ok(Self((n * factor) as u64)),
            _ => Err("expected a size such as 5GB, 512MiB or 100000".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        let parse = |text: &str| text.parse::<Size>().map(|size| size.0);
        assert_eq!(parse("5GB"), Ok(5_000_000_000));
        assert_eq!(parse("1.5 MiB"), Ok(1_572_864));
        assert_eq!(parse("100000"), Ok(100_000));
        for wrong in ["", "GB", "5gb", "-1", "0", "1e9"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
