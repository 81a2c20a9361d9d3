//! Conversions of [`Half`].

use half::{bf16, f16};

/// A 16-bit float. Loops that convert bf16 are vectorised.
pub trait Half: Copy {
    /// The same value in f32.
    fn widen(self) -> f32;
    /// The nearest value, ties to even.
    fn narrow(x: f32) -> Self;
}

impl Half for bf16 {
    /// [`bf16::to_f32`], without a branch.
    #[inline(always)]
    fn widen(self) -> f32 {
        let bits = u32::from(self.to_bits());
        let quiet = if bits & 0x7fff > 0x7f80 { 0x0040 } else { 0 };
        f32::from_bits((bits | quiet) << 16)
    }

    /// [`bf16::from_f32`], without a branch.
    #[inline(always)]
    fn narrow(x: f32) -> Self {
        let bits = x.to_bits();
        let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        let quiet = bits >> 16 | 0x40;
        bf16::from_bits(if x.is_nan() { quiet } else { nearest } as u16)
    }
}

impl Half for f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }

    #[inline(always)]
    fn narrow(x: f32) -> Self {
        f16::from_f32(x)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_conversions_match_half() {
        let ends = [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff];
        for high in 0..=u32::from(u16::MAX) {
            for low in ends {
                let x = f32::from_bits(high << 16 | low);
                assert_eq!(
                    <bf16 as Half>::narrow(x).to_bits(),
                    bf16::from_f32(x).to_bits(),
                    "{x:e}"
                );
            }
            let x = bf16::from_bits(high as u16);
            assert_eq!(x.widen().to_bits(), x.to_f32().to_bits(), "{x:e}");
        }
    }
}
