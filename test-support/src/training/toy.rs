//! A model whose inputs use different parameters.

use candle_core::{Device, Tensor};
use fulgurite_core::Result;
use fulgurite_core::module::{Module as _, ModuleBuilder, Unit};
use fulgurite_core::nn::{Linear, Loss};
use fulgurite_core::parameter::{Init, Parameter};

const WIDTH: usize = 4;
/// Every unit once.
pub const ROUTE: &[usize] = &[0, 1, 2];

/// A unit with two layers of equal shape and a plain parameter; some inputs skip parts.
struct Pair {
    always: Linear,
    sometimes: Linear,
    shift: Parameter,
}

pub struct Toy {
    units: Vec<Unit<Pair>>,
    head: Linear,
}

impl Toy {
    pub fn new(b: &ModuleBuilder) -> Result<Self> {
        let pair = |b: &ModuleBuilder| {
            Ok(Pair {
                always: Linear::with_bias(&b.pp("always"), WIDTH, WIDTH)?,
                sometimes: Linear::new(&b.pp("sometimes"), WIDTH, WIDTH)?,
                shift: b.parameter("shift", [WIDTH], Init::ONES)?,
            })
        };
        let units = (0..3).map(|i| b.unit(&format!("units.{i}"), pair)).collect::<Result<_>>()?;
        Ok(Self { units, head: Linear::new(&b.pp("head"), WIDTH, 1)? })
    }

    /// The loss of shard `part` of the global batch through the units at `route`.
    pub fn loss(&self, part: usize, route: &[usize]) -> Result<Loss> {
        let x: Vec<f32> = (0..2 * WIDTH).map(|i| ((part * 5 + i * 3) % 7) as f32 * 0.2).collect();
        let mut x = Tensor::from_vec(x, (2, WIDTH), &Device::Cpu)?;
        for (place, &unit) in route.iter().enumerate() {
            x = self.units[unit].call(&x, move |pair, x| {
                let mut y = (x + pair.always.forward(x)?.tanh()?)?;
                if (part + place).is_multiple_of(3) {
                    y = (y + pair.sometimes.forward(x)?)?;
                }
                if (part + place) % 3 != 1 {
                    y = y.broadcast_add(&pair.shift.tensor()?)?;
                }
                Ok(y)
            })?;
        }
        Ok(Loss::new(self.head.forward(&x)?.sqr()?.sum_all()?, 2.0 + part as f64))
    }
}
