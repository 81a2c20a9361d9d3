//! NCCL: all that one GPU can show with one rank, and, with several GPUs, one rank on each.

use fulgurite_error::Result;

use crate::findings::Findings;
use crate::target::Target;

/// Every collective with a single rank.
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

/// Collectives and messages of ranks as threads, one GPU each. They sum integers, exact in any
/// order.
#[cfg(feature = "cuda")]
pub(super) fn ranks(target: &Target) -> Result<Findings> {
    use std::sync::Arc;
    use std::time::Duration;

    use fulgurite::core::launch::LocalStore;
    use fulgurite_nccl::{Cuda, Parts, connect};
    use fulgurite_transports::run_ranks_with;

    const TIMEOUT: Duration = Duration::from_secs(120);
    let mut findings = Findings::default();
    let devices = target.count()?.min(4);
    findings.figure("ranks", devices as f64);
    if devices < 2 {
        findings.fact("ranks", "there is one GPU, and NCCL takes one rank on each");
        return Ok(findings);
    }
    let store = Arc::new(LocalStore::new());
    let wrong = run_ranks_with(devices, TIMEOUT, |host| {
        let accelerator = target.open_at(host.rank())?;
        let parts = Parts {
            host,
            library: None,
            streams: Arc::new(Cuda),
            store: store.clone(),
            timeout: TIMEOUT,
        };
        ranks::check(&*connect(parts)?, accelerator.device())
    })?;
    findings.wrong = wrong.into_iter().flatten().collect();
    Ok(findings)
}

/// The work of each rank.
#[cfg(feature = "cuda")]
mod ranks {
    use std::sync::{Arc, Mutex};

    use candle_core::{DType, Device, Tensor};
    use fulgurite::core::accelerator::TimeStamp;
    use fulgurite::core::collective::{
        AllGather, AllToAll, Collective, ProcessGroup, ReduceOp, ReduceScatter, Timing,
    };
    use fulgurite_error::Result;

    use crate::compare::numbers;

    const DTYPES: [DType; 5] = [DType::F32, DType::BF16, DType::F16, DType::F64, DType::I64];

    /// Returns the failures on this rank.
    pub(super) fn check(group: &dyn ProcessGroup, device: &Device) -> Result<Vec<String>> {
        let (rank, size) = (group.rank(), group.size());
        let mut wrong = Vec::new();
        for dtype in DTYPES {
            for n in [1_usize, 7, 1021, 20_000] {
                // Element i of a rank's tensor; small enough for exact sums in every dtype.
                let value = |rank: usize, i: usize| ((i * 7 + rank * 3) % 16) as f64;
                let of = |rank: usize, from: usize, n: usize| -> Vec<f64> {
                    (from..from + n).map(|i| value(rank, i)).collect()
                };
                let put = |values: Vec<f64>| -> Result<Tensor> {
                    let len = values.len();
                    let values = Tensor::from_vec(values, len, &Device::Cpu)?.to_dtype(dtype)?;
                    Ok(values.to_device(device)?)
                };
                let sum = |from: usize, n: usize| -> Vec<f64> {
                    (from..from + n).map(|i| (0..size).map(|r| value(r, i)).sum()).collect()
                };
                let mut expect = |name: &str, got: &Tensor, want: Vec<f64>| -> Result<()> {
                    if numbers(got)? != want {
                        wrong.push(format!("rank {rank}: {name} of {n} {dtype:?}"));
                    }
                    Ok(())
                };

                let values = put(of(rank, 0, n))?;
                group.run(Collective::all_reduce(&values, ReduceOp::Sum))?;
                expect("all_reduce", &values, sum(0, n))?;

                let values = put(of(rank, 0, n))?;
                group.run(Collective::broadcast(&values, size - 1))?;
                expect("broadcast", &values, of(size - 1, 0, n))?;

                // Even shards, and shards of different lengths, one of them empty: the latter use a
                // flat buffer.
                let even = vec![n; size];
                let uneven: Vec<usize> = (0..size).map(|rank| rank * n / 2 + rank).collect();
                for (name, counts) in [("even", even), ("uneven", uneven)] {
                    let (own, whole) = (counts[rank], counts.iter().sum::<usize>());
                    let start: usize = counts[..rank].iter().sum();
                    let output = put(vec![0.0; whole])?;
                    let input = put(of(rank, 0, own))?;
                    let gather =
                        AllGather { input, output: output.clone(), counts: counts.clone() };
                    group.run(Collective::all_gather_into(vec![gather]))?;
                    let all = counts.iter().enumerate().flat_map(|(rank, &n)| of(rank, 0, n));
                    expect(&format!("all_gather, {name}"), &output, all.collect())?;

                    let output = put(vec![0.0; own])?;
                    let input = put(of(rank, 0, whole))?;
                    let scatter = ReduceScatter { input, output: output.clone(), counts };
                    group.run(Collective::reduce_scatter(vec![scatter], ReduceOp::Sum))?;
                    expect(&format!("reduce_scatter, {name}"), &output, sum(start, own))?;
                }

                let output = put(vec![0.0; n * size])?;
                group.run(Collective::all_to_all(&output, &put(of(rank, 0, n * size))?))?;
                let parts = (0..size).flat_map(|from| of(from, rank * n, n));
                expect("all_to_all", &output, parts.collect())?;

                // Rank `i` sends `n + i + j` elements to rank `j`.
                let counts: Vec<Vec<usize>> =
                    (0..size).map(|i| (0..size).map(|j| n + i + j).collect()).collect();
                let received = counts.iter().map(|row| row[rank]).sum();
                let input = put(of(rank, 0, counts[rank].iter().sum()))?;
                let output = put(vec![0.0; received])?;
                let exchange = AllToAll::uneven(&output, &input, counts.clone());
                group.run(Collective::AllToAll(exchange))?;
                let part = |(from, row): (usize, &Vec<usize>)| {
                    of(from, row[..rank].iter().sum(), row[rank])
                };
                let parts = counts.iter().enumerate().flat_map(part);
                expect("all_to_all of uneven parts", &output, parts.collect())?;

                // Send to the next rank, receive from the previous one.
                let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
                let output = put(vec![0.0; n])?;
                let sent = group.send(&put(of(rank, 0, n))?, next)?;
                let received = group.recv(&output, before)?;
                sent.wait()?;
                received.wait()?;
                expect("send and recv", &output, of(before, 0, n))?;
            }
        }
        wrong.extend(timed(group, device)?);
        Ok(wrong)
    }

    /// Returns a failure unless two collectives and a message are timed, the collectives in order.
    fn timed(group: &dyn ProcessGroup, device: &Device) -> Result<Option<String>> {
        type Told = (String, Arc<dyn TimeStamp>, Arc<dyn TimeStamp>);
        let told = Arc::<Mutex<Vec<Told>>>::default();
        let values = Tensor::ones(20_000, DType::F32, device)?;
        let received = Tensor::zeros(20_000, DType::F32, device)?;
        let (rank, size) = (group.rank(), group.size());

        let tell = told.clone();
        let timing = Timing::enter(move |stream, from, to| {
            let told = (stream.to_owned(), from, to);
            tell.lock().expect("no panic here").push(told);
        });
        let one = group.all_reduce(&values, ReduceOp::Sum)?;
        let other = group.broadcast(&values, 0)?;
        let sent = group.send(&values, (rank + 1) % size)?;
        let got = group.recv(&received, (rank + size - 1) % size)?;
        drop(timing);
        [one, other, sent, got]
            .into_iter()
            .try_for_each(fulgurite::core::collective::Work::wait)?;

        let told = std::mem::take(&mut *told.lock().expect("no panic here"));
        let mut micros = Vec::new();
        let Some((_, start, _)) = told.first() else {
            return Ok(Some(format!("rank {rank}: no collective was timed")));
        };
        for (_, from, to) in &told {
            micros.push([from.micros_since(&**start)?, to.micros_since(&**start)?]);
        }
        let lengths = micros.iter().all(|[from, to]| from <= to);
        let in_order = matches!(micros[..], [[_, first], [second, _], ..] if first <= second);
        let right = told.len() == 4 && lengths && in_order;
        Ok((!right).then(|| format!("rank {rank}: times of collectives in us: {micros:?}")))
    }
}

/// Programs without CUDA have no NCCL.
#[cfg(not(feature = "cuda"))]
pub(super) fn alone(_: &Target) -> Result<Findings> {
    Ok(Findings::default())
}

#[cfg(not(feature = "cuda"))]
pub(super) fn ranks(_: &Target) -> Result<Findings> {
    Ok(Findings::default())
}
