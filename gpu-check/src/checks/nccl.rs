//! NCCL with one rank: all that one GPU can show of it.

use fulgurite_error::Result;

use crate::findings::Findings;
use crate::target::Target;

/// Every collective, of one rank.
#[cfg(feature = "cuda")]
pub(super) fn alone(target: &Target) -> Result<Findings> {
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use candle_core::{DType, Tensor};
    use fulgurite::core::collective::{AllGather, Collective, ReduceOp, ReduceScatter, Solo};
    use fulgurite::core::launch::LocalStore;
    use fulgurite_nccl::{Cuda, Parts, connect_even_alone};

    use crate::compare::{difference, numbers, randn};

    let (device, mut findings) = (target.device()?, Findings::default());
    let group = connect_even_alone(Parts {
        host: Arc::new(Solo::new("world", 0)),
        library: None,
        streams: Arc::new(Cuda),
        store: Arc::new(LocalStore::new()),
        timeout: Duration::from_secs(60),
    })?;
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64, DType::I64] {
        for n in [1, 1021, 1 << 22] {
            let values = (randn("nccl", &[n])? * 50.)?.to_dtype(dtype)?.to_device(&device)?;
            let expected = numbers(&values)?;
            let output = Tensor::zeros(n, dtype, &device)?;
            let collectives = [
                ("all_reduce", Collective::all_reduce(&values, ReduceOp::Sum), &values),
                ("broadcast", Collective::broadcast(&values, 0), &values),
                (
                    "all_gather",
                    Collective::all_gather_into(vec![AllGather::even(&output, &values, 1)]),
                    &output,
                ),
                (
                    "reduce_scatter",
                    Collective::reduce_scatter(
                        vec![ReduceScatter::even(&output, &values, 1)],
                        ReduceOp::Sum,
                    ),
                    &output,
                ),
                ("all_to_all", Collective::all_to_all(&output, &values), &output),
            ];
            for (name, collective, result) in collectives {
                let begins = Instant::now();
                group.run(collective)?;
                device.synchronize()?;
                let name = format!("{name} of {n} {dtype:?}");
                findings.figure(format!("{name} s"), begins.elapsed().as_secs_f64());
                findings.difference(&name, difference(&numbers(result)?, &expected), 0.0);
                if !std::ptr::eq(result, &values) {
                    result.zero_set()?;
                }
            }
        }
    }
    Ok(findings)
}

/// Programs without CUDA have no NCCL.
#[cfg(not(feature = "cuda"))]
pub(super) fn alone(_: &Target) -> Result<Findings> {
    Ok(Findings::default())
}
