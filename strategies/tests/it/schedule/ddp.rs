//! DDP's buckets, with integers as gradients: at the end of a step each rank must have the sum of
//! all.

use fulgurite_strategies::schedule::ddp::{Action, Event, Schedule};
use proptest::prelude::*;

use super::draw;

const RANKS: usize = 3;

#[derive(Debug, Clone)]
struct Scenario {
    bucket_of: Vec<usize>,
    /// For each step, which backwards synchronise.
    steps: Vec<Vec<bool>>,
    seed: u64,
}

#[derive(Default)]
struct Rank {
    /// Each parameter's gradient in its bucket.
    content: Vec<u64>,
    /// Whether the next gradient is added to the content.
    accumulated: Vec<bool>,
    /// Whether the parameter has a gradient that waits for its optimizer's step.
    live: Vec<bool>,
    reduced: Vec<usize>,
    waited: Vec<usize>,
    delivered: bool,
}

impl Rank {
    fn perform(&mut self, actions: &[Action], rank: usize, bucket_of: &[usize]) {
        for &action in actions {
            assert!(!self.delivered, "{action:?} after the end");
            match action {
                Action::KeepOnOneRank(bucket) => {
                    for (p, _) in bucket_of.iter().enumerate().filter(|(_, b)| **b == bucket) {
                        self.accumulated[p] = rank == 0 && self.live[p];
                    }
                }
                Action::AllReduce(bucket) => self.reduced.push(bucket),
                Action::Wait(bucket) => {
                    assert!(self.reduced.contains(&bucket), "{action:?}");
                    self.waited.push(bucket);
                }
                Action::SumPartialGrads => {
                    assert_eq!(self.waited, self.reduced, "{action:?} before all are reduced");
                }
                Action::Deliver => self.delivered = true,
            }
        }
    }
}

/// One rank's backward: gradients of some of the parameters in `of`, in a rank-specific order.
fn backward(
    scenario: &Scenario,
    at: [usize; 3],
    synchronise: bool,
    active: &dyn Fn(usize) -> bool,
    schedule: &mut Schedule,
    rank: &mut Rank,
) -> Vec<u64> {
    let [_, _, index] = at;
    let of = |what: usize, p: usize| draw(scenario.seed, &[what, at[0], at[1], at[2], p]);
    let n = scenario.bucket_of.len();
    let mut gradients = vec![0; n];
    rank.perform(&schedule.on(Event::BeginBackward { synchronise }), index, &scenario.bucket_of);
    let mut order: Vec<usize> = (0..n).filter(|&p| active(p)).collect();
    order.sort_by_key(|&p| of(0, p));
    for p in order {
        if of(1, p).is_multiple_of(3) {
            // Unused on this rank; its part of the bucket counts as zero.
            if !rank.accumulated[p] {
                rank.content[p] = 0;
            }
        } else {
            assert!(schedule.accepts_gradients(p), "a gradient while its bucket is reduced");
            gradients[p] = 1 + of(2, p) as u64 % 1000;
            rank.content[p] = gradients[p] + if rank.accumulated[p] { rank.content[p] } else { 0 };
            rank.accumulated[p] = true;
        }
        let uses_left = of(3, p).is_multiple_of(20);
        let ready = Event::GradientReady { parameter: p, uses_left };
        rank.perform(&schedule.on(ready), index, &scenario.bucket_of);
    }
    rank.perform(&schedule.on(Event::FinishBackward), index, &scenario.bucket_of);
    assert!(std::mem::take(&mut rank.delivered));
    (0..n).filter(|&p| active(p)).for_each(|p| rank.live[p] = true);
    gradients
}

fn fresh_ranks(n: usize) -> Vec<Rank> {
    let fresh = || Rank {
        content: vec![0; n],
        accumulated: vec![false; n],
        live: vec![false; n],
        ..Rank::default()
    };
    (0..RANKS).map(|_| fresh()).collect()
}

fn run(scenario: &Scenario) {
    let n = scenario.bucket_of.len();
    let buckets = scenario.bucket_of.last().map_or(0, |last| last + 1);
    let mut ranks = fresh_ranks(n);
    let mut schedules = vec![Schedule::new(&scenario.bucket_of); RANKS];
    for (i, step) in scenario.steps.iter().enumerate() {
        let mut sums = vec![0; n];
        for (j, &synchronise) in step.iter().enumerate() {
            for (index, rank) in ranks.iter_mut().enumerate() {
                let schedule = &mut schedules[index];
                let gradients =
                    backward(scenario, [i, j, index], synchronise, &|_| true, schedule, rank);
                sums.iter_mut().zip(gradients).for_each(|(sum, gradient)| *sum += gradient);
            }
            let expected: Vec<usize> = if synchronise { (0..buckets).collect() } else { vec![] };
            for rank in &mut ranks {
                // Each bucket once, in index order, on every rank.
                assert_eq!(std::mem::take(&mut rank.reduced), expected);
                assert_eq!(std::mem::take(&mut rank.waited), expected);
            }
            if synchronise {
                for p in 0..n {
                    let sum = ranks.iter().map(|rank| rank.content[p]).sum();
                    ranks.iter_mut().for_each(|rank| rank.content[p] = sum);
                }
            }
        }
        for (index, rank) in ranks.iter_mut().enumerate() {
            assert_eq!(rank.content, sums, "rank {index} after step {i}");
            rank.accumulated.fill(false);
            rank.live.fill(false);
            assert_eq!(schedules[index].on(Event::FinishStep), []);
        }
    }
    for schedule in &schedules {
        let mut ready_order = schedule.ready_order().to_vec();
        ready_order.sort_unstable();
        assert_eq!(ready_order, (0..n).collect::<Vec<_>>());
    }
}

/// Two optimizers with alternating buckets: backwards for one or both, and steps of one.
fn run_two_optimizers(bucket_of: &[usize], seed: u64) {
    let n = bucket_of.len();
    let buckets = bucket_of.last().map_or(0, |last| last + 1);
    let scenario = Scenario { bucket_of: bucket_of.to_vec(), steps: Vec::new(), seed };
    let mut ranks = fresh_ranks(n);
    let mut schedules = vec![Schedule::new(bucket_of); RANKS];
    let mut sums = vec![0; n];
    let mut synchronised = [true; 2];
    for i in 0..12 {
        let of = |what: usize| draw(seed, &[1000 + what, i]);
        let turn = of(0) % 3; // 2: both
        let active = |bucket: usize| turn == 2 || bucket % 2 == turn;
        let synchronise = !of(1).is_multiple_of(3);
        for (index, rank) in ranks.iter_mut().enumerate() {
            let schedule = &mut schedules[index];
            for bucket in 0..buckets {
                let parameters = bucket_of.iter().filter(|&&b| b == bucket).count();
                let parameters = if active(bucket) { parameters } else { 0 };
                assert_eq!(schedule.on(Event::Expect { bucket, parameters }), []);
            }
            let of_active = |p: usize| active(bucket_of[p]);
            let gradients =
                backward(&scenario, [i, 0, index], synchronise, &of_active, schedule, rank);
            sums.iter_mut().zip(gradients).for_each(|(sum, gradient)| *sum += gradient);
        }
        let expected: Vec<usize> = (0..buckets).filter(|&b| synchronise && active(b)).collect();
        for rank in &mut ranks {
            assert_eq!(std::mem::take(&mut rank.reduced), expected);
            assert_eq!(std::mem::take(&mut rank.waited), expected);
        }
        if synchronise {
            for p in (0..n).filter(|&p| active(bucket_of[p])) {
                let sum = ranks.iter().map(|rank| rank.content[p]).sum();
                ranks.iter_mut().for_each(|rank| rank.content[p] = sum);
            }
        }
        for optimizer in (0..2).filter(|&o| active(o)) {
            synchronised[optimizer] = synchronise;
        }
        let steps = of(2) % 2;
        if !synchronised[steps] {
            continue;
        }
        let own = |p: &usize| bucket_of[*p] % 2 == steps;
        for (index, rank) in ranks.iter_mut().enumerate() {
            for p in (0..n).filter(own) {
                assert_eq!(rank.content[p], sums[p], "rank {index}, parameter {p} after {i}");
                (rank.accumulated[p], rank.live[p]) = (false, false);
            }
            if rank.live.contains(&true) {
                for bucket in (0..buckets).filter(|b| b % 2 == steps) {
                    assert_eq!(schedules[index].on(Event::Empty { bucket }), []);
                }
            } else {
                assert_eq!(schedules[index].on(Event::FinishStep), []);
            }
        }
        for p in (0..n).filter(own) {
            sums[p] = 0;
            ranks.iter_mut().for_each(|rank| rank.content[p] = 0);
        }
    }
}

fn scenario() -> impl Strategy<Value = Scenario> {
    let sizes = prop::collection::vec(1..4usize, 0..5);
    let buckets = sizes.prop_map(|sizes| {
        let parameters = |(bucket, &size)| std::iter::repeat_n(bucket, size);
        sizes.iter().enumerate().flat_map(parameters).collect()
    });
    let step = prop::collection::vec(any::<bool>(), 0..4).prop_map(|mut backwards| {
        backwards.push(true);
        backwards
    });
    (buckets, prop::collection::vec(step, 1..4), any::<u64>())
        .prop_map(|(bucket_of, steps, seed)| Scenario { bucket_of, steps, seed })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn every_gradient_is_summed_once_in_one_order(scenario in scenario()) {
        run(&scenario);
    }

    #[test]
    fn optimizers_in_turns_have_their_own_sums(scenario in scenario()) {
        run_two_optimizers(&scenario.bucket_of, scenario.seed);
    }

    /// Ranks fail at different points, and must communicate alike afterwards.
    #[test]
    fn an_abandoned_step_leaves_nothing_behind(
        before in prop::collection::vec(any_event(), 0..30), after in prop::collection::vec(any_event(), 0..30)
    ) {
        let (mut schedule, mut fresh) = (Schedule::new(&[0, 0, 1]), Schedule::new(&[0, 0, 1]));
        before.into_iter().for_each(|event| drop(schedule.on(event)));
        prop_assert!(schedule.on(Event::Abandon).is_empty());
        for event in after {
            prop_assert_eq!(schedule.on(event), fresh.on(event));
        }
    }
}

fn any_event() -> impl Strategy<Value = Event> {
    prop_oneof![
        any::<bool>().prop_map(|synchronise| Event::BeginBackward { synchronise }),
        (0..3usize, any::<bool>())
            .prop_map(|(parameter, uses_left)| Event::GradientReady { parameter, uses_left }),
        Just(Event::FinishBackward),
        Just(Event::FinishStep),
    ]
}
