//! Collectives that start behind others.

use candle_core::{DType, Device, Tensor};

use super::suite::Suite;
use crate::Result;
use fulgurite_engine::collective::{Collective, ReduceOp};

impl Suite<'_> {
    /// A collective behind another group's collective uses its result. Starting both does not wait.
    pub(super) fn behind(&self) -> Result<()> {
        let (rank, last) = (self.rank(), self.size() - 1);
        if last == 0 {
            return Ok(());
        }
        let all: Vec<usize> = (0..=last).collect();
        let split = |name| self.group.split(std::slice::from_ref(&all), name);
        let (other, signals) = (split("behind")?, split("signals")?);
        // Groups may connect at their first collective, which waits.
        let connects = Tensor::ones(1, DType::F32, self.device)?;
        other.run(Collective::all_reduce(&connects, ReduceOp::Sum))?;
        let signal = Tensor::zeros(1, DType::U8, &Device::Cpu)?;
        // One message or chunk, and several.
        for elements in [3, 40_000] {
            let values =
                Tensor::full(rank as f32 + 1.0, elements, &Device::Cpu)?.to_device(self.device)?;
            if rank == last {
                // Late: the others start both before.
                signals.recv(&signal, 0)?.wait()?;
            }
            let first = self.group.all_reduce(&values, ReduceOp::Sum)?;
            let second = Collective::all_reduce(&values, ReduceOp::Sum);
            let behind = match first.end() {
                Some(end) => other.start_after(end, second.clone())?,
                None => None,
            };
            if rank == 0 {
                signals.send(&signal, last)?.wait()?;
            }
            first.wait()?;
            match behind {
                Some(work) => work.wait()?,
                None => other.run(second)?,
            }
            let expected = ((last + 1) * (last + 1) * (last + 2) / 2) as f32;
            let found = values.to_device(&Device::Cpu)?.to_vec1::<f32>()?;
            let what = format!(
                "an all_reduce of {elements} behind another gives {}, expected {expected}",
                found[0]
            );
            self.ensure(found.iter().all(|&value| value == expected), what)?;
        }
        Ok(())
    }
}
