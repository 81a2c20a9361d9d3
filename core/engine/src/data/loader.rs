//! Loaders: batches made ahead of the training step.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use candle_core::Device;

use super::Samples;
use crate::{Error, Result, counted};
use fulgurite_tensor::execution::ExecutionContext;
use fulgurite_tensor::execution::transfer::SentTensors;

/// Limit of threads of a loader.
const MAX_WORKERS: usize = 256;
/// Limit of batches that each worker makes ahead.
const MAX_PREFETCH: usize = 1 << 16;
/// Time limit for unfinished batches when a loader ends.
const LAST_BATCHES: Duration = Duration::from_secs(5);

/// Number of worker threads, and of batches they make ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Workers {
    /// Threads that make batches. With 0, the thread that asks for a batch makes it.
    pub num_workers: usize,
    /// Finished and unfinished batches allowed for each worker, at least 1.
    pub prefetch_factor: usize,
}

impl Default for Workers {
    /// No workers.
    fn default() -> Self {
        Self { num_workers: 0, prefetch_factor: 2 }
    }
}

impl Workers {
    /// The default for this device: no thread on the CPU, one on other devices. With one, batches
    /// are made and sent while the device computes.
    pub fn for_device(device: &Device) -> Self {
        Self { num_workers: usize::from(!device.is_cpu()), ..Self::default() }
    }

    /// Checks ranges.
    ///
    /// # Errors
    /// [`Error::Config`] that names the key of `[trainer]`.
    pub fn validate(self) -> Result<()> {
        let Self { num_workers, prefetch_factor } = self;
        if num_workers > MAX_WORKERS {
            return Err(Error::Config(format!(
                "`trainer.num_workers`: must be at most {MAX_WORKERS}, found {num_workers}"
            )));
        }
        if !(1..=MAX_PREFETCH).contains(&prefetch_factor) {
            return Err(Error::Config(format!(
                "`trainer.prefetch_factor`: must be at least 1 and at most {MAX_PREFETCH}, found \
                 {prefetch_factor}"
            )));
        }
        Ok(())
    }
}

type Plan = Box<dyn Iterator<Item = Samples> + Send>;
type Make<B> = dyn Fn(&Samples) -> Result<B> + Send + Sync;
type Made<B> = Result<MadeBatch<B>>;

/// A batch with the host's copies of its tensors on a device.
struct MadeBatch<B> {
    samples: Samples,
    batch: B,
    sent: Option<Arc<SentTensors>>,
}

/// Batches in the order of a plan, made by worker threads ahead of time, or on request by the
/// calling thread. The batches are the same in both cases: each depends only on its [`Samples`], is
/// made in its own [execution context](ExecutionContext), and arrives in the plan's order.
///
/// Workers pause when as many batches as [`Workers`] allow are waiting. An error or panic takes its
/// batch's place, names the samples, and is the last item. Dropping a loader stops its workers, and
/// waits at most a few seconds for batches in progress.
///
/// ```
/// use fulgurite_core::data::{Loader, Samples, Split, Workers};
///
/// let plan = (0..3).map(|i| Samples::new(Split::Train, 0, [(0, i)]));
/// let workers = Workers { num_workers: 2, prefetch_factor: 2 };
/// let loader = Loader::new(plan, |samples| Ok(10 * samples.indices()[0]), workers)?;
/// let batches = loader.map(|batch| Ok(batch?.1));
/// let batches = batches.collect::<Result<Vec<u64>, fulgurite_core::Error>>()?;
/// assert_eq!(batches, [0, 10, 20]);
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
pub struct Loader<B: Send + 'static>(Kind<B>);

enum Kind<B: Send + 'static> {
    Here { plan: Plan, make: Arc<Make<B>>, ended: bool },
    Ahead(Ahead<B>),
}

impl<B: Send + 'static> Loader<B> {
    /// Makes a loader that calls `make` on each of the plan's samples.
    ///
    /// # Errors
    /// If `workers` are out of range, or a thread cannot be started.
    pub fn new(
        plan: impl Iterator<Item = Samples> + Send + 'static,
        make: impl Fn(&Samples) -> Result<B> + Send + Sync + 'static,
        workers: Workers,
    ) -> Result<Self> {
        workers.validate()?;
        let (plan, make): (Plan, Arc<Make<B>>) = (Box::new(plan), Arc::new(make));
        Ok(Self(match workers.num_workers {
            0 => Kind::Here { plan, make, ended: false },
            _ => Kind::Ahead(Ahead::start(plan, make, workers)?),
        }))
    }
}

impl<B: Send + 'static> Iterator for Loader<B> {
    type Item = Result<(Samples, B)>;

    fn next(&mut self) -> Option<Self::Item> {
        let made = match &mut self.0 {
            Kind::Here { ended: true, .. } => None,
            Kind::Here { plan, make, ended } => {
                let made = match next_of(plan) {
                    Ok(samples) => make_batch(&**make, samples?),
                    Err(error) => Err(error),
                };
                *ended = made.is_err();
                Some(made)
            }
            Kind::Ahead(ahead) => ahead.next(),
        };
        Some(made?.map(|MadeBatch { samples, batch, sent }| {
            if let Some(sent) = sent {
                sent.adopt();
            }
            (samples, batch)
        }))
    }
}

impl<B: Send + 'static> std::fmt::Debug for Loader<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let workers = match &self.0 {
            Kind::Here { .. } => 0,
            Kind::Ahead(ahead) => ahead.threads.len(),
        };
        f.debug_struct("Loader").field("workers", &workers).finish_non_exhaustive()
    }
}

/// The next samples of a plan, which may run a user's sampler.
fn next_of(plan: &mut Plan) -> Result<Option<Samples>> {
    catch_unwind(AssertUnwindSafe(|| plan.next())).map_err(|panic| {
        Error::Data(format!("the order of samples panicked: {}", panic_message(&*panic)))
    })
}

fn make_batch<B>(make: &Make<B>, samples: Samples) -> Made<B> {
    // The caller's context must not affect the batch, because workers do not have it.
    let context = ExecutionContext::default().with(SentTensors::default());
    let explain = |what: String| Error::Data(format!("{}: {what}", samples.describe()));
    let made = catch_unwind(AssertUnwindSafe(|| context.run(|| make(&samples))));
    match made {
        Ok(Ok(batch)) => Ok(MadeBatch { samples, batch, sent: context.get() }),
        Ok(Err(Error::Data(message))) => Err(explain(message)),
        Ok(Err(error @ (Error::Interrupted | Error::PeerFailed { .. }))) => Err(error),
        Ok(Err(error)) => Err(explain(error.to_string())),
        Err(panic) => {
            Err(explain(format!("making the batch panicked: {}", panic_message(&*panic))))
        }
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

/// A loader with workers.
struct Ahead<B> {
    shared: Arc<Shared<B>>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared<B> {
    make: Arc<Make<B>>,
    /// Limit of finished and unfinished batches.
    capacity: usize,
    queue: Mutex<Queue<B>>,
    /// Signals that a batch was taken or the loader ends.
    room: Condvar,
    /// Signals that the next batch is ready or the plan has ended.
    ready: Condvar,
    /// Signals that a worker has ended.
    left: Condvar,
}

struct Queue<B> {
    plan: Plan,
    /// The batches not yet taken, in order. `None` marks a batch in progress.
    batches: VecDeque<Option<Made<B>>>,
    /// Number of batches taken, which is the index of the queue's first batch.
    taken: u64,
    /// Whether no further batches are begun.
    ended: bool,
    /// Whether the consumer has stopped taking batches.
    closed: bool,
    /// Number of running workers.
    workers: usize,
}

impl<B: Send + 'static> Ahead<B> {
    fn start(plan: Plan, make: Arc<Make<B>>, workers: Workers) -> Result<Self> {
        let queue = Queue {
            plan,
            batches: VecDeque::new(),
            taken: 0,
            ended: false,
            closed: false,
            workers: 0,
        };
        let shared = Arc::new(Shared {
            make,
            capacity: workers.num_workers * workers.prefetch_factor,
            queue: Mutex::new(queue),
            room: Condvar::new(),
            ready: Condvar::new(),
            left: Condvar::new(),
        });
        let mut ahead = Self { shared, threads: Vec::new() };
        for number in 0..workers.num_workers {
            let shared = ahead.shared.clone();
            let thread = std::thread::Builder::new().name(format!("data-worker-{number}"));
            ahead.shared.lock().workers += 1;
            let spawned = thread.spawn(move || {
                let _at_work = AtWork(&shared);
                shared.work();
            });
            match spawned {
                Ok(thread) => ahead.threads.push(thread),
                Err(error) => {
                    ahead.shared.lock().workers -= 1;
                    return Err(Error::Data(format!(
                        "starting data worker {number} of {} (trainer.num_workers): {error}",
                        workers.num_workers
                    )));
                }
            }
        }
        Ok(ahead)
    }

    fn next(&mut self) -> Option<Made<B>> {
        let shared = &*self.shared;
        let mut queue = shared.lock();
        loop {
            match queue.batches.front() {
                Some(Some(_)) => break,
                None if queue.ended => return None,
                _ => queue = wait(&shared.ready, queue),
            }
        }
        let made = queue.batches.pop_front().flatten();
        queue.taken += 1;
        if matches!(made, Some(Err(_))) {
            queue.end();
        }
        shared.room.notify_one();
        made
    }
}

impl<B> Queue<B> {
    /// Ends the queue: no further batches come.
    fn end(&mut self) {
        self.ended = true;
        self.closed = true;
        self.batches.clear();
    }
}

impl<B: Send + 'static> Shared<B> {
    fn work(&self) {
        while let Some((number, samples)) = self.begin() {
            let made = samples.and_then(|samples| make_batch(&*self.make, samples));
            let mut queue = self.lock();
            if queue.closed {
                return;
            }
            let place = (number - queue.taken) as usize;
            queue.batches[place] = Some(made);
            if place == 0 {
                self.ready.notify_one();
            }
        }
    }

    /// The next batch to make and its index, once the queue has room.
    fn begin(&self) -> Option<(u64, Result<Samples>)> {
        let mut queue = self.lock();
        while !queue.ended && queue.batches.len() >= self.capacity {
            queue = wait(&self.room, queue);
        }
        if queue.ended {
            return None;
        }
        let samples = next_of(&mut queue.plan);
        queue.ended = !matches!(samples, Ok(Some(_)));
        if queue.ended {
            self.ready.notify_one();
            self.room.notify_all();
        }
        let samples = samples.transpose()?;
        queue.batches.push_back(None);
        Some((queue.taken + queue.batches.len() as u64 - 1, samples))
    }
}

impl<B> Shared<B> {
    fn lock(&self) -> MutexGuard<'_, Queue<B>> {
        self.queue.lock().expect("no code of a user runs unguarded while it is held")
    }
}

fn wait<'a, B>(event: &Condvar, queue: MutexGuard<'a, Queue<B>>) -> MutexGuard<'a, Queue<B>> {
    event.wait(queue).expect("no code of a user runs unguarded while it is held")
}

/// Counts a worker as running until it returns or panics.
struct AtWork<'a, B>(&'a Shared<B>);

impl<B> Drop for AtWork<'_, B> {
    fn drop(&mut self) {
        self.0.lock().workers -= 1;
        self.0.left.notify_all();
    }
}

impl<B> Drop for Ahead<B> {
    fn drop(&mut self) {
        let unused = {
            let mut queue = self.shared.lock();
            queue.ended = true;
            queue.closed = true;
            std::mem::take(&mut queue.batches)
        };
        drop(unused);
        self.shared.room.notify_all();
        let queue = self.shared.lock();
        let waited = self.shared.left.wait_timeout_while(queue, LAST_BATCHES, |q| q.workers > 0);
        let busy = waited.map_or(0, |(queue, _)| queue.workers);
        if busy > 0 {
            // They end after their batch, and the result is dropped.
            tracing::warn!(
                "left alone, as they are still making a batch: {}",
                counted(busy, "data worker")
            );
            return;
        }
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a data worker panicked outside of a batch");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Barrier, mpsc};

    use candle_core::Tensor;
    use fulgurite_test_message::assert_says;
    use proptest::prelude::*;

    use super::*;
    use crate::data::Split;
    use fulgurite_tensor::autograd::{is_grad_enabled, no_grad};
    use fulgurite_tensor::execution::{self, transfer};

    const COUNTS: [usize; 4] = [0, 1, 2, 7];

    fn workers(num_workers: usize) -> Workers {
        Workers { num_workers, prefetch_factor: 2 }
    }

    fn plan(n: u64) -> impl Iterator<Item = Samples> + Send {
        (0..n).map(|i| Samples::new(Split::Train, 5, [(0, i), (1, i)]))
    }

    proptest! {
        #[test]
        fn batches_keep_plan_order_with_any_workers(
            n in 0u64..60, num_workers in 0usize..6, prefetch_factor in 1usize..4, delays: u64
        ) {
            let make = move |samples: &Samples| {
                // Some batches take longer than later ones.
                (0..delays >> (samples.indices()[0] % 60) & 0x3ff).for_each(|_| std::thread::yield_now());
                Ok(samples.random(1).word(0))
            };
            let loader = Loader::new(plan(n), make, Workers { num_workers, prefetch_factor }).unwrap();
            let made: Vec<_> = loader.map(Result::unwrap).collect();
            let expected: Vec<_> = plan(n).map(|s| (s.clone(), s.random(1).word(0))).collect();
            prop_assert_eq!(made, expected);
        }
    }

    #[test]
    fn consumer_knows_host_copies_of_batches() {
        for num_workers in COUNTS {
            let make = |samples: &Samples| {
                let ids = Tensor::new(&[samples.indices()[0] as i64], &Device::Cpu)?;
                transfer::to_device(&ids, &Device::Cpu, "batch")
            };
            let mut loader = Loader::new(plan(9), make, workers(num_workers)).unwrap();
            assert!(loader.all(|made| transfer::sent(&made.unwrap().1).is_some()));
        }
    }

    #[test]
    fn workers_run_concurrently_up_to_capacity() {
        let begun = Arc::new(AtomicUsize::new(0));
        let (count, all) = (begun.clone(), Arc::new(Barrier::new(3)));
        let make = move |_: &Samples| {
            // Blocks forever unless three batches are made at once.
            all.wait();
            Ok(count.fetch_add(1, Ordering::SeqCst))
        };
        let config = Workers { num_workers: 3, prefetch_factor: 2 };
        let mut loader = Loader::new(plan(600), make, config).unwrap();
        for taken in 0..30 {
            loader.next().unwrap().unwrap();
            assert!(begun.load(Ordering::SeqCst) <= taken + 1 + 6, "more than the queue holds");
        }
        let Kind::Ahead(ahead) = &loader.0 else { panic!("has workers") };
        assert!(ahead.shared.lock().batches.len() <= 6);
        // Batches at the barrier meet each other, or batches of other workers.
        let is_full = || {
            let shared = ahead.shared.lock();
            shared.batches.len() == 6 && shared.batches.iter().all(Option::is_some)
        };
        while !is_full() {
            std::thread::yield_now();
        }
        assert_eq!(begun.load(Ordering::SeqCst), 36);
    }

    #[test]
    fn failed_batch_keeps_its_place_and_ends_loader() {
        for count in COUNTS {
            let make = |samples: &Samples| match samples.indices()[0] {
                3 => Err(Error::Data("no such file".to_owned())),
                i => Ok(i),
            };
            let mut loader = Loader::new(plan(100), make, workers(count)).unwrap();
            for i in 0..3 {
                assert_eq!(loader.next().unwrap().unwrap().1, i);
            }
            let error = loader.next().unwrap().unwrap_err();
            assert_says!(error, "data: train … 3, 3: no such file");
            assert!(loader.next().is_none() && loader.next().is_none());

            let make = |samples: &Samples| {
                assert!(samples.indices()[0] < 3, "a mistake of {}", 3);
                Ok(())
            };
            let loader = Loader::new(plan(100), make, workers(count)).unwrap();
            let made: Vec<_> = loader.collect();
            assert_eq!(made.len(), 4);
            let error = made.last().unwrap().as_ref().unwrap_err();
            assert_says!(error, "data: train … 3, 3 … panicked … of 3");
        }
    }

    #[test]
    fn panicking_order_is_an_error() {
        for count in COUNTS {
            let plan = plan(100).inspect(|samples| assert!(samples.indices()[0] < 2, "no order"));
            let made: Vec<_> = Loader::new(plan, |_| Ok(()), workers(count)).unwrap().collect();
            assert_eq!(made.len(), 3);
            let error = made.last().unwrap().as_ref().unwrap_err();
            assert_says!(error, "data: the order … panicked: no order");
        }
    }

    #[test]
    fn caller_context_does_not_reach_batches() {
        struct Mark;
        for count in COUNTS {
            let make = |_: &Samples| Ok((is_grad_enabled(), execution::value::<Mark>().is_some()));
            let _guards = (no_grad(), execution::enter(Mark));
            let loader = Loader::new(plan(9), make, workers(count)).unwrap();
            assert!(loader.map(|made| made.unwrap().1).all(|seen| seen == (true, false)));
            assert!(!is_grad_enabled() && execution::value::<Mark>().is_some());
        }
        // A guard leaked by one batch does not affect others.
        let make = |samples: &Samples| {
            let grad = is_grad_enabled();
            std::mem::forget(samples.indices()[0].is_multiple_of(2).then(no_grad));
            Ok(grad)
        };
        let mut loader = Loader::new(plan(9), make, workers(1)).unwrap();
        assert!(loader.all(|made| made.unwrap().1));
    }

    #[test]
    fn drop_ends_threads_and_frees_batches() {
        for count in COUNTS {
            let data = Arc::new(());
            let (has, taken) = (data.clone(), 3);
            let make = move |_: &Samples| Ok(has.clone());
            let mut loader = Loader::new(plan(1000), make, workers(count)).unwrap();
            let batches: Vec<_> = loader.by_ref().take(taken).collect();
            drop(loader);
            assert_eq!(Arc::strong_count(&data), 1 + taken, "{count} workers");
            drop(batches);
        }
    }

    #[test]
    fn endless_batch_does_not_block_drop() {
        let (end, wait) = mpsc::channel::<()>();
        let wait = Mutex::new(wait);
        let (entered, is_in) = mpsc::channel();
        let make = move |samples: &Samples| {
            if samples.indices()[0] == 1 {
                entered.send(()).unwrap();
                let _ = wait.lock().unwrap().recv();
            }
            Ok(())
        };
        let mut loader = Loader::new(plan(9), make, workers(2)).unwrap();
        loader.next().unwrap().unwrap();
        is_in.recv().unwrap();
        drop(loader); // after `LAST_BATCHES`
        end.send(()).expect("the worker still waits");
    }

    #[test]
    fn invalid_worker_counts_are_explained() {
        let error = |num_workers, prefetch_factor| {
            let config = Workers { num_workers, prefetch_factor };
            Loader::new(plan(1), |_| Ok(()), config).unwrap_err().to_string()
        };
        assert_says!(error(5000, 2), "`trainer.num_workers`: must be at most 256, found 5000");
        assert_says!(error(2, 0), "`trainer.prefetch_factor` … at least 1 … 65536, found 0");
    }
}
