//! The all-reduce over replicas follows the reduce-scatter over shards on the device, without a
//! wait of the host.

use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Tensor};
use fulgurite_core::collective::{Collective, End, ProcessGroup, ReduceOp, ReduceScatter, Work};
use fulgurite_core::{Error, Result};
use fulgurite_test_support::training::Training;
use fulgurite_transports::run_ranks;

use crate::orders::orders;
use crate::ranks::Job;

const REPLICAS: &str = "data_parallel_replicate";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    ReduceScatter,
    WaitForIt,
    AllReduce,
    AllReduceBehind,
}

/// The operations on shards and replicas of a rank's computing thread, in order.
type Seen = Arc<Mutex<Vec<What>>>;

/// A group that records its operations.
struct Observed {
    inner: Arc<dyn ProcessGroup>,
    seen: Seen,
}

impl Observed {
    fn note(&self, what: What) {
        self.seen.lock().unwrap().push(what);
    }
}

impl ProcessGroup for Observed {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn size(&self) -> usize {
        self.inner.size()
    }

    fn global_ranks(&self) -> &[usize] {
        self.inner.global_ranks()
    }

    fn exact_reductions(&self) -> bool {
        self.inner.exact_reductions()
    }

    fn start(&self, collective: Collective, overlap: bool) -> Result<Work> {
        let op = collective.name();
        let work = self.inner.start(collective, overlap)?;
        match (op, self.name()) {
            ("reduce_scatter", _) => {
                self.note(What::ReduceScatter);
                let (seen, end) = (self.seen.clone(), work.end().cloned().expect("an end"));
                let wait = move || {
                    seen.lock().unwrap().push(What::WaitForIt);
                    work.wait()
                };
                return Ok(Work::pending(wait).with_end(end));
            }
            // Other all-reduces agree on values between ranks, and are waited for at once.
            ("all_reduce", REPLICAS) if overlap => self.note(What::AllReduce),
            _ => {}
        }
        Ok(work)
    }

    fn start_after(&self, end: &Arc<dyn End>, collective: Collective) -> Result<Option<Work>> {
        assert_eq!((collective.name(), self.name()), ("all_reduce", REPLICAS));
        let work = self.inner.start_after(end, collective)?;
        self.note(What::AllReduceBehind);
        Ok(work)
    }

    fn send(&self, tensor: &Tensor, dst: usize) -> Result<Work> {
        self.inner.send(tensor, dst)
    }

    fn recv(&self, tensor: &Tensor, src: usize) -> Result<Work> {
        self.inner.recv(tensor, src)
    }

    fn split(&self, partition: &[Vec<usize>], name: &str) -> Result<Arc<dyn ProcessGroup>> {
        let inner = self.inner.split(partition, name)?;
        Ok(Arc::new(Self { inner, seen: self.seen.clone() }))
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }

    fn failure(&self) -> Option<Error> {
        self.inner.failure()
    }
}

/// Returns this rank's operations in a training run of a few steps with `micro_batches` each.
fn train(world: Arc<dyn ProcessGroup>, keys: &str, micro_batches: usize) -> Result<Vec<What>> {
    let seen = Seen::default();
    let world: Arc<dyn ProcessGroup> = Arc::new(Observed { inner: world, seen: seen.clone() });
    let config = format!(
        r#"{{"type": "model_parallel", "data_parallel_replicate_size": 2, "data_parallel_shard_size": 2{keys}}}"#
    );
    Training::new(world, &config, DType::F32, micro_batches)?.run()?;
    let seen = seen.lock().unwrap();
    Ok(seen.clone())
}

/// Trains on shared memory and over NCCL.
fn everywhere(train: impl Fn(Arc<dyn ProcessGroup>) -> Result<Vec<What>> + Sync) -> Vec<Vec<What>> {
    let mut all = run_ranks(4, &train).unwrap();
    let job = Job::new(21);
    all.extend(job.run(4, &train).unwrap());
    job.check();
    all
}

#[test]
fn all_reduce_directly_follows_reduce_scatter() {
    for seen in everywhere(|world| train(world, "", 1)) {
        assert!(seen.len() > 3 && seen.contains(&What::WaitForIt), "{seen:?}");
        for (i, what) in seen.iter().enumerate() {
            match what {
                What::ReduceScatter => assert_eq!(seen[i + 1], What::AllReduceBehind, "{seen:?}"),
                What::AllReduceBehind => assert_eq!(seen[i - 1], What::ReduceScatter, "{seen:?}"),
                What::WaitForIt => {}
                What::AllReduce => panic!("one that was started late: {seen:?}"),
            }
        }
    }
}

/// Gradients of an earlier backward are added between the two.
#[test]
fn accumulated_sums_are_waited_for() {
    let keys = r#", "accumulation_sync": "reduce_scatter""#;
    for seen in everywhere(|world| train(world, keys, 2)) {
        assert!(
            seen.contains(&What::AllReduce) && !seen.contains(&What::AllReduceBehind),
            "{seen:?}"
        );
    }
}

/// Groups of shards and replicas, with streams in any order. Each all-reduce takes the result of
/// the reduce-scatter before it, in a tensor with other values until then.
#[test]
fn chained_collectives_use_earlier_results() {
    for seed in 0..orders() {
        let job = Job::new(3000 + seed);
        job.run(4, |world| chains(&*world)).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        job.check();
    }
    run_ranks(4, |world| (0..50).try_for_each(|_| chains(&*world))).unwrap();
}

fn chains(world: &dyn ProcessGroup) -> Result<()> {
    let shards = world.split(&[vec![0, 1], vec![2, 3]], "shards")?;
    let replicas = world.split(&[vec![0, 2], vec![1, 3]], "replicas")?;
    let mut works = Vec::new();
    for round in 0..4 {
        let input = Tensor::full((world.rank() + round) as f32, 6, &Device::Cpu)?;
        let output = Tensor::full(-1000f32, 3, &Device::Cpu)?;
        let part = ReduceScatter { input, output: output.clone(), counts: vec![3; 2] };
        let scatter = shards.reduce_scatter(vec![part], ReduceOp::Sum)?;
        let end = scatter.end().cloned().expect("the end of a collective that overlaps");
        let sum = replicas.start_after(&end, Collective::all_reduce(&output, ReduceOp::Sum))?;
        works.push((scatter, sum.expect("it can follow"), output, round));
    }
    for (scatter, sum, output, round) in works {
        scatter.wait()?;
        sum.wait()?;
        assert_eq!(output.to_vec1::<f32>()?, [(6 + 4 * round) as f32; 3]);
    }
    Ok(())
}
