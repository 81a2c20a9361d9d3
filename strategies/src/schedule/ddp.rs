//! DDP's schedule: decides when gradient buckets are all-reduced.
//!
//! Gradients are accumulated in buckets, and a bucket is reduced while backward continues. The
//! [`Schedule`] receives [`Event`]s and answers with [`Action`]s.
//!
//! ```
//! use fulgurite_strategies::schedule::ddp::{Action, Event, Schedule};
//!
//! // Three parameters, the first two in bucket 0.
//! let mut schedule = Schedule::new(&[0, 0, 1]);
//! assert!(schedule.on(Event::BeginBackward { synchronise: true }).is_empty());
//! let ready = |parameter| Event::GradientReady { parameter, uses_left: false };
//! assert!(schedule.on(ready(2)).is_empty()); // bucket 1 is full and waits for bucket 0
//! assert!(schedule.on(ready(0)).is_empty());
//! assert_eq!(schedule.on(ready(1)), [Action::AllReduce(0), Action::AllReduce(1)]);
//! let end = schedule.on(Event::FinishBackward);
//! assert_eq!(end, [Action::Wait(0), Action::Wait(1), Action::SumPartialGrads, Action::Deliver]);
//! ```
//!
//! # States of a bucket
//!
//! | state | event | next state | actions |
//! |---|---|---|---|
//! | filling | all gradients ready, and all earlier buckets launched | reducing | all-reduce |
//! | filling | a synchronising backward ends | reduced | all-reduce, wait |
//! | reducing | the backward ends | reduced | wait |
//! | reduced | the step's next backward begins | filling | keep on one rank |
//! | reduced | the step ends, or the bucket is emptied | filling | |
//! | any | a backward without gradients for it begins | the same | |
//! | any | the step is abandoned | filling | |
//!
//! After its reduction a bucket holds the sum over the ranks on every rank. A further backward of
//! the step adds to the sum on one rank and overwrites it on the others, so that the next reduction
//! adds the new gradients to the sum once.
//!
//! # What ranks do alike
//!
//! Ranks all-reduce buckets in index order, although buckets fill in an order that depends on the
//! parameters each rank's forward used. If a backward of the step left uses of parameters behind, a
//! later backward may bring uncounted gradients, and buckets wait for its end. This may differ
//! between ranks, but the order of reductions does not.

/// An event for a [`Schedule`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// Sets how many of a bucket's parameters get gradients from the next backwards: all, or none
    /// while their optimizer is paused. Comes between backwards.
    Expect {
        /// The bucket.
        bucket: usize,
        /// All of its parameters, or 0.
        parameters: usize,
    },
    /// A backward begins.
    BeginBackward {
        /// Whether its gradients are reduced over the ranks, together with gradients of earlier
        /// backwards that did not synchronise.
        synchronise: bool,
    },
    /// A parameter's gradient is complete. Comes once per backward for each parameter, at the
    /// latest before [`FinishBackward`](Event::FinishBackward).
    GradientReady {
        /// The parameter's index in the list given to the schedule.
        parameter: usize,
        /// Whether uses of the parameter have not delivered yet: another backward may bring them.
        uses_left: bool,
    },
    /// The backward has gone through the graph.
    FinishBackward,
    /// All optimizers have stepped: the buckets are empty.
    FinishStep,
    /// This bucket's optimizer has stepped, but another one has not: the bucket is empty.
    Empty {
        /// The bucket.
        bucket: usize,
    },
    /// The step failed at some point and starts again: the buckets are empty, and nothing is under
    /// way. The order in which gradients became ready is forgotten too.
    Abandon,
}

/// An action for the driver of a [`Schedule`], performed in the given order. The number is the
/// bucket's index. The schedule assumes that every action succeeds; after a failure a driver can
/// only [abandon](Event::Abandon) the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Add the next gradients to the bucket's content on one rank, and overwrite it on the others.
    KeepOnOneRank(usize),
    /// Start summing the bucket over the ranks. Collective.
    AllReduce(usize),
    /// Wait for the sum.
    Wait(usize),
    /// Sum the partial gradients of tensor-parallel ranks. Collective over these ranks.
    SumPartialGrads,
    /// Deliver the buckets' content as the parameters' gradients.
    Deliver,
}

/// The content of a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bucket {
    /// This rank's gradients; `ready` counts the gradients completed in this backward.
    Filling { ready: usize },
    /// The all-reduce is under way: no gradient may be added.
    Reducing,
    /// The sum over the ranks.
    Reduced,
}

/// The state machine; see the [module](self) for its states.
#[derive(Debug, Clone)]
pub struct Schedule {
    /// The bucket of each parameter.
    bucket_of: Vec<usize>,
    /// Each bucket, with the number of its parameters that get gradients: all, or none.
    buckets: Vec<(Bucket, usize)>,
    /// The first bucket not yet launched in this backward.
    next: usize,
    synchronise: bool,
    /// Whether uses of this step are still without a gradient, which a later backward may bring.
    older_uses: bool,
    /// Parameters in the order their gradients became ready, in the first synchronising backward.
    ready_order: Vec<usize>,
    /// Whether each parameter is in `ready_order`.
    is_in_order: Vec<bool>,
}

impl Schedule {
    /// Creates a schedule from each parameter's bucket; buckets are numbered without gaps.
    pub fn new(bucket_of: &[usize]) -> Self {
        let count = bucket_of.iter().max().map_or(0, |last| last + 1);
        let mut buckets = vec![(Bucket::Filling { ready: 0 }, 0); count];
        bucket_of.iter().for_each(|&bucket| buckets[bucket].1 += 1);
        Self {
            bucket_of: bucket_of.to_vec(),
            buckets,
            next: 0,
            synchronise: true,
            older_uses: false,
            ready_order: Vec::new(),
            is_in_order: vec![false; bucket_of.len()],
        }
    }

    /// Processes an event and returns the actions to perform.
    ///
    /// # Panics
    /// If the event's parameter is not in the schedule.
    pub fn on(&mut self, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        match event {
            Event::Expect { bucket, parameters } => self.buckets[bucket].1 = parameters,
            Event::BeginBackward { synchronise } => {
                self.synchronise = synchronise;
                for (index, (bucket, expected)) in self.buckets.iter_mut().enumerate() {
                    if *expected == 0 {
                        continue;
                    }
                    if *bucket == Bucket::Reduced {
                        actions.push(Action::KeepOnOneRank(index));
                    }
                    *bucket = Bucket::Filling { ready: 0 };
                }
            }
            Event::GradientReady { parameter, uses_left } => {
                self.gradient_ready(parameter, uses_left, &mut actions);
            }
            Event::FinishBackward => self.finish_backward(&mut actions),
            Event::Empty { bucket } => self.buckets[bucket].0 = Bucket::Filling { ready: 0 },
            Event::Abandon => *self = Self::new(&self.bucket_of),
            Event::FinishStep => {
                self.older_uses = false;
                for (bucket, _) in &mut self.buckets {
                    *bucket = Bucket::Filling { ready: 0 };
                }
            }
        }
        actions
    }

    /// Whether gradients can be added to the parameter's bucket now: not during its reduction.
    pub fn accepts_gradients(&self, parameter: usize) -> bool {
        self.buckets[self.bucket_of[parameter]].0 != Bucket::Reducing
    }

    /// Parameters in the order their gradients became ready, in the first synchronising backward;
    /// all of them after that backward.
    pub fn ready_order(&self) -> &[usize] {
        &self.ready_order
    }

    fn gradient_ready(&mut self, parameter: usize, uses_left: bool, actions: &mut Vec<Action>) {
        self.older_uses |= uses_left;
        if !self.synchronise {
            return;
        }
        if !std::mem::replace(&mut self.is_in_order[parameter], true) {
            self.ready_order.push(parameter);
        }
        if let (Bucket::Filling { ready }, _) = &mut self.buckets[self.bucket_of[parameter]] {
            *ready += 1;
        }
        if self.older_uses {
            return;
        }
        while let Some(&(bucket, expected)) = self.buckets.get(self.next)
            && (expected == 0 || bucket == (Bucket::Filling { ready: expected }))
        {
            self.launch(actions);
        }
    }

    fn finish_backward(&mut self, actions: &mut Vec<Action>) {
        if self.synchronise {
            while self.next < self.buckets.len() {
                self.launch(actions);
            }
            let reduced = (0..self.buckets.len()).filter(|&index| self.buckets[index].1 > 0);
            actions.extend(reduced.map(Action::Wait));
            actions.push(Action::SumPartialGrads);
        }
        actions.push(Action::Deliver);
        let end = if self.synchronise { Bucket::Reduced } else { Bucket::Filling { ready: 0 } };
        let filled = self.buckets.iter_mut().filter(|(_, expected)| *expected > 0);
        filled.for_each(|(bucket, _)| *bucket = end);
        self.next = 0;
    }

    /// Starts reducing the next bucket, if this backward has gradients for it.
    fn launch(&mut self, actions: &mut Vec<Action>) {
        let (bucket, expected) = &mut self.buckets[self.next];
        if *expected > 0 {
            *bucket = Bucket::Reducing;
            actions.push(Action::AllReduce(self.next));
        }
        self.next += 1;
    }
}
