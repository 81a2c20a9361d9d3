//! `detect_anomaly` names the layer that produced the first non-finite value.

use candle_core::{DType, Device, Tensor};
use fulgurite_core::autograd::detect_anomaly;
use fulgurite_core::fabric::Fabric;
use fulgurite_core::module::{Module as _, ModuleBuilder, Unit};
use fulgurite_core::nn::{Linear, Loss};
use fulgurite_core::optim::AdamW;
use fulgurite_core::parameter::Init;
use fulgurite_core::{Error, Result};
use fulgurite_test_message::assert_says;
use fulgurite_test_support::training::{checkpointed, init, strategy};
use fulgurite_transports::run_ranks;

/// The place of the anomaly.
#[derive(Clone, Copy, PartialEq)]
enum Wrong {
    Nothing,
    Weights,
    OperationBetween,
    BackwardBetween,
    InUnit,
    Loss,
}

struct Net {
    first: Linear,
    block: Unit<Linear>,
    last: Linear,
}

impl Net {
    fn new(b: &ModuleBuilder, wrong: Wrong) -> Result<Self> {
        let huge = if wrong == Wrong::Weights { 3e38 } else { 0.1 };
        Ok(Self {
            first: Linear::new(&b.pp("first"), 2, 2)?,
            block: b.unit("block", |b| Linear::with_init(b, 2, 2, Init::Const(huge)))?,
            last: Linear::new(&b.pp("last"), 2, 2)?,
        })
    }

    fn loss(&self, x: &Tensor, wrong: Wrong) -> Result<Loss> {
        let x = self.first.forward(x)?;
        let x = match wrong {
            Wrong::InUnit => {
                self.block.call(&x, |layer, x| Ok((layer.forward(x)?.sqr()? - 1e9)?.sqrt()?))?
            }
            _ => self.block.forward(&x)?,
        };
        let x = match wrong {
            Wrong::OperationBetween => (x.sqr()? * -1.0)?.log()?,
            // The square root has no derivative at 0.
            Wrong::BackwardBetween => (&x - x.detach())?.sqrt()?,
            _ => x,
        };
        let y = self.last.forward(&x)?;
        let y = if wrong == Wrong::Loss { (y.abs()? * -1.0)?.log()? } else { y };
        Ok(Loss::new(y.sqr()?.sum_all()?, 2.0))
    }
}

fn outcome(ranks: usize, config: &str, wrong: Wrong) -> String {
    let mut errors = run_ranks(ranks, |world| {
        let mut fabric = Fabric::new(world, strategy(config)?, init(config)?, 1)?;
        let (net, mut optimizer) = fabric.setup(|b| Net::new(b, wrong), &AdamW::default())?;
        let x = Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &Device::Cpu)?.to_dtype(DType::F32)?;
        let _detecting = detect_anomaly();
        // All ranks have the same samples and the same error, so no rank waits for another.
        let step = || -> Result<()> { fabric.backward(&net.loss(&x, wrong)?) };
        match step() {
            Ok(()) => optimizer.step().map(|()| "no error".to_owned()),
            Err(error @ (Error::Module { .. } | Error::Parameter { .. } | Error::Other(_))) => {
                Ok(error.to_string())
            }
            Err(error) => Err(error),
        }
    })
    .unwrap_or_else(|error| panic!("{config}: {error}"));
    errors.swap_remove(0)
}

#[test]
fn the_first_non_finite_value_is_named() {
    let fsdp = r#"{"type": "fsdp"}"#;
    let checkpointed = checkpointed(fsdp, "full");
    for (ranks, config) in [(1, r#"{"type": "single_device"}"#), (2, fsdp), (2, &*checkpointed)] {
        let of = |wrong| outcome(ranks, config, wrong);
        assert_says!(of(Wrong::Nothing), "no error");
        assert_says!(of(Wrong::Weights), "module `block` … output has 4 infinite … is finite");
        assert_says!(of(Wrong::OperationBetween), "module `last` … input has 4 NaN … before …");
        assert_says!(of(Wrong::BackwardBetween), "module `block` … gradient … 4 NaN …");
        assert_says!(of(Wrong::InUnit), "module `block` … its output has 4 NaN among 4");
        assert_says!(of(Wrong::Loss), "detect_anomaly: the loss is NaN … finite values …");
    }
}
