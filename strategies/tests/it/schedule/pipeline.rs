//! Pipeline schedules: against PyTorch's lists, against formulas, and random lists.

use std::collections::HashMap;

use fulgurite_strategies::schedule::pipeline::{Action, Costs, Kind, Schedule, Simulation, Type};

use super::draw;

/// A schedule as PyTorch makes it; see `make_pipelines.py`.
struct Recorded {
    kind: Type,
    ranks: usize,
    stages_per_rank: usize,
    micro_batches: usize,
    computation: String,
    with_transfers: String,
    /// With gathers of at most three stages, of schedules with more stages a rank than two.
    with_gathers: Option<String>,
}

fn recorded() -> Vec<Recorded> {
    let mut lines = include_str!("../../fixtures/pipelines.txt").lines();
    let mut all = Vec::new();
    while let Some(head) = lines.next() {
        let mut words = head.split(' ');
        let name = words.next().unwrap();
        let kind = Type::ALL.into_iter().find(|kind| kind.name() == name).unwrap();
        let [ranks, stages_per_rank, micro_batches] =
            [(); 3].map(|()| words.next().unwrap().parse().unwrap());
        let mut lists = || lines.by_ref().take(ranks).map(|line| line.to_owned() + "\n").collect();
        all.push(Recorded {
            kind,
            ranks,
            stages_per_rank,
            micro_batches,
            computation: lists(),
            with_transfers: lists(),
            with_gathers: (stages_per_rank > 2).then(&mut lists),
        });
    }
    all
}

fn only(csv: &str, keep: impl Fn(&str) -> bool) -> String {
    let line = |line: &str| line.split(',').filter(|cell| keep(cell)).collect::<Vec<_>>().join(",");
    csv.lines().map(|list| line(list) + "\n").collect()
}

#[test]
fn lists_are_those_of_pytorch() {
    let recorded = recorded();
    assert!(recorded.len() > 80);
    for r in recorded {
        let name = format!("{:?} {} {} {}", r.kind, r.ranks, r.stages_per_rank, r.micro_batches);
        let schedule =
            Schedule::new(r.kind, r.ranks, r.stages_per_rank, r.micro_batches).expect(&name);
        assert_eq!(schedule.to_csv(), r.computation, "{name}");
        assert_eq!(schedule.lower(None).unwrap().to_csv(), r.with_transfers, "{name}");
        if let Some(gathers) = r.with_gathers {
            let lowered = schedule.lower(Some(3)).unwrap().to_csv();
            let kept = |cell: &str| !["SEND", "RECV", "REDUCE"].iter().any(|no| cell.contains(no));
            assert_eq!(only(&lowered, kept), gathers, "{name}");
        }
    }
}

/// All schedules of up to four ranks, three stages a rank and nine micro-batches.
fn all() -> impl Iterator<Item = (Type, usize, usize, usize, Schedule)> {
    let sizes = (1..=4).flat_map(|p| (1..=3).flat_map(move |v| (1..=9).map(move |m| (p, v, m))));
    sizes.flat_map(|(p, v, m)| {
        let made = move |kind| Some((kind, p, v, m, Schedule::new(kind, p, v, m).ok()?));
        Type::ALL.into_iter().filter_map(made)
    })
}

#[test]
fn any_size_runs_to_its_end() {
    let costs = Costs { transfer: 0.25, unshard: 0.5, reduce: 0.5, ..Costs::default() };
    let mut count = 0;
    for (kind, p, v, m, schedule) in all() {
        let name = format!("{kind:?} {p} {v} {m}");
        let free = schedule.simulate(&Costs::default()).expect(&name);
        for gathered in [None, Some(1), Some(2), Some(3)] {
            let lowered = schedule.lower(gathered).expect(&name);
            let simulation = lowered.simulate(&costs).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!(simulation.peak_in_flight(), free.peak_in_flight(), "{name}");
            assert!(simulation.duration() >= free.duration(), "{name}");
            let again = Schedule::from_csv(&lowered.to_csv()).expect(&name);
            assert_eq!(again, lowered, "{name}");
            let borders = (1..p * v).filter(|stage| {
                schedule.rank_of_stage(*stage) != schedule.rank_of_stage(stage - 1)
            });
            let sends = lowered.to_csv().matches("SEND").count();
            assert_eq!(sends, 2 * borders.count() * m, "{name}");
        }
        count += 1;
    }
    assert!(count > 300, "{count}");
}

fn simulated(kind: Type, p: usize, v: usize, m: usize, costs: &Costs) -> Simulation {
    Schedule::new(kind, p, v, m).unwrap().simulate(costs).unwrap()
}

#[test]
fn bubbles_have_their_formulas() {
    let costs =
        Costs { forward: 3.0, backward_input: 4.0, backward_weight: 2.0, ..Costs::default() };
    let (f, i, w) = (3.0, 4.0, 2.0);
    for p in 1..=4_usize {
        let hops = p as f64 - 1.0;
        for m in p..=9 {
            let whole = m as f64 * (f + i + w);
            for kind in [Type::GPipe, Type::OneForwardOneBackward] {
                let duration = simulated(kind, p, 1, m, &costs).duration();
                assert_eq!(duration, whole + hops * (f + i + w), "{kind:?} {p} {m}");
            }
            if m % p == 0 {
                for v in 2..=3 {
                    let duration = simulated(Type::Interleaved, p, v, m, &costs).duration();
                    let expected = v as f64 * whole + hops * (f + i + w);
                    assert_eq!(duration, expected, "interleaved {p} {v} {m}");
                }
            }
            // With equal times a third of the bubble is left, where there are enough micro-batches.
            if m >= 2 * p {
                let duration = simulated(Type::ZeroBubble, p, 1, m, &Costs::default()).duration();
                assert_eq!(duration, 3.0 * m as f64 + hops, "zb_h1 {p} {m}");
                let duration = simulated(Type::ZeroBubbleV, p, 2, m, &Costs::default()).duration();
                assert_eq!(duration, 6.0 * m as f64 + hops, "zb_v {p} {m}");
            }
        }
    }
}

#[test]
fn micro_batches_in_flight_have_their_formulas() {
    for p in 1..=4_usize {
        for m in 1..=9_usize {
            let peak =
                |kind, v| simulated(kind, p, v, m, &Costs::default()).peak_in_flight().to_vec();
            assert_eq!(peak(Type::GPipe, 2), vec![2 * m; p]);
            let expected: Vec<_> = (0..p).map(|rank| (p - rank).min(m)).collect();
            assert_eq!(peak(Type::OneForwardOneBackward, 1), expected);
            assert!(peak(Type::ZeroBubble, 1).into_iter().all(|peak| peak <= p.min(m)), "{p} {m}");
            assert!(peak(Type::ZeroBubbleV, 2).into_iter().all(|peak| peak <= 2 * p), "{p} {m}");
            if m >= 2 * p {
                assert!(
                    peak(Type::DualPipeV, 2).into_iter().all(|peak| peak <= 2 * p + 1),
                    "{p} {m}"
                );
            }
            for v in (2..=3).filter(|_| m % p == 0) {
                let most = |rank: usize| ((v - 1) * p + 2 * (p - rank) - 1).min(v * m);
                let expected: Vec<_> = (0..p).map(most).collect();
                assert_eq!(peak(Type::Interleaved, v), expected, "{p} {v} {m}");
                assert!(
                    peak(Type::ZeroBubble, v).into_iter().all(|peak| peak <= v * p),
                    "{p} {v} {m}"
                );
            }
        }
    }
}

#[test]
fn slow_stages_and_transfers_count() {
    let schedule = Schedule::new(Type::GPipe, 2, 1, 1).unwrap();
    let costs = Costs { transfer: 10.0, stages: vec![1.0, 5.0], ..Costs::default() };
    // 1 + 10 + 5 forwards, 10 + 10 + 2 backwards.
    assert_eq!(schedule.simulate(&costs).unwrap().duration(), 38.0);
    let lowered = schedule.lower(None).unwrap();
    assert_eq!(lowered.simulate(&costs).unwrap().duration(), 38.0);
}

/// Whether a schedule's computation ends, by the order of what each action needs.
fn ends(schedule: &Schedule) -> bool {
    let mut done: HashMap<Action, ()> = HashMap::new();
    let mut places = vec![0; schedule.ranks()];
    loop {
        let mut progress = false;
        for (rank, place) in places.iter_mut().enumerate() {
            let Some(action) = schedule.actions(rank).get(*place) else { continue };
            let other = |stage, kind| Action { stage, kind, ..*action };
            let has = |action: Action| done.contains_key(&action);
            let ready = match action.kind {
                Kind::Forward => action.stage == 0 || has(other(action.stage - 1, Kind::Forward)),
                Kind::BackwardWeight => true,
                _ if action.stage + 1 == schedule.stages() => true,
                _ => {
                    has(other(action.stage + 1, Kind::Backward))
                        || has(other(action.stage + 1, Kind::BackwardInput))
                }
            };
            if ready {
                done.insert(*action, ());
                (*place, progress) = (*place + 1, true);
            }
        }
        if !progress {
            return (0..schedule.ranks()).all(|rank| places[rank] == schedule.actions(rank).len());
        }
    }
}

/// A list for each rank in which each stage's actions stand in a possible order, and all else is
/// drawn.
fn random(seed: u64) -> String {
    let pick = |of: &[usize], n: usize| draw(seed, of) % n;
    let (ranks, v, m) = (2 + pick(&[0], 2), 1 + pick(&[1], 2), 1 + pick(&[2], 3));
    let mut csv = String::new();
    for rank in 0..ranks {
        // The chains of actions of each stage and micro-batch, shuffled into each other.
        let mut chains: Vec<Vec<String>> = Vec::new();
        for stage in (0..v).map(|local| local * ranks + rank) {
            for mb in 0..m {
                let split = pick(&[3, stage, mb], 2) == 0;
                let kinds: &[&str] = if split { &["F", "I", "W"] } else { &["F", "B"] };
                chains.push(kinds.iter().map(|kind| format!("{stage}{kind}{mb}")).collect());
            }
        }
        let mut cells = Vec::new();
        while !chains.is_empty() {
            // Mostly the first chain, so that many schedules end.
            let among = if pick(&[4, rank, cells.len()], 3) == 0 { chains.len() } else { 1 };
            let chain = pick(&[5, rank, cells.len()], among);
            cells.push(chains[chain].remove(0));
            chains.retain(|chain| !chain.is_empty());
        }
        csv += &(cells.join(",") + "\n");
    }
    csv
}

#[test]
fn random_lists_are_accepted_if_they_end() {
    let mut counts = [0; 2];
    for seed in 0..2000 {
        let csv = random(seed);
        let schedule = Schedule::from_csv(&csv).unwrap();
        let expected = ends(&schedule);
        counts[usize::from(expected)] += 1;
        assert_eq!(schedule.simulate(&Costs::default()).is_ok(), expected, "{csv}");
        let lowered = schedule.lower(None);
        assert_eq!(lowered.is_ok(), expected, "{csv}");
        if let Ok(lowered) = lowered {
            let costs = Costs { transfer: 1.0, ..Costs::default() };
            lowered.simulate(&costs).unwrap_or_else(|e| panic!("{e}\n{csv}"));
        }
    }
    assert!(counts.into_iter().all(|count| count > 200), "{counts:?}");
}

fn message(csv: &str) -> String {
    let schedule = match Schedule::from_csv(csv) {
        Ok(schedule) => schedule,
        Err(error) => return error.to_string(),
    };
    schedule.simulate(&Costs::default()).map_or_else(|error| error.to_string(), |_| String::new())
}

#[test]
fn deadlocks_show_each_ranks_place() {
    let found = message("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0");
    assert!(found.contains("rank 0: 0F0 [0B0] 0F1 0B1   waits for `1B0` of rank 1"), "{found}");
    assert!(found.contains("rank 1: [1F1] 1B1 1F0 1B0   waits for `0F1` of rank 0"), "{found}");
    // A rank that waits for itself.
    let found = message("0F0,3F0,0F1,3F1,3B0,0B0,3B1,0B1\n1F1,2F1,1F0,2F0,2B0,1B0,2B1,1B1");
    assert!(
        found.contains("rank 0: 0F0 [3F0]") && found.contains("waits for `2F0` of rank 1"),
        "{found}"
    );
    let found = message("1F0,0F0,1B0,0B0\n");
    assert!(
        found.contains("[1F0]") && found.contains("waits for `0F0`, which stands later"),
        "{found}"
    );
    // Both send first, with a receive that the other posts later.
    let found = message(
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B1,0RECV_B0,0B0,0B1\n\
         1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1",
    );
    assert!(
        found.contains("[0RECV_B1]") && found.contains("waits for `1SEND_B1` of rank 1"),
        "{found}"
    );
    assert!(found.contains("[1SEND_B0]"), "{found}");
}

#[test]
fn impossible_lists_are_refused() {
    for (csv, said) in [
        ("", "no actions"),
        ("0F0,0F1,0B0\n", "rank 0: `0B1` is missing"),
        ("0F0,0B0,0B0\n", "rank 0: `0B0` stands there twice"),
        ("0B0,0F0\n", "rank 0: `0B0` stands before `0F0`"),
        ("0F0,0W0,0I0\n", "rank 0: `0W0` stands before `0I0`"),
        ("0F0,0I0\n", "rank 0: `0W0` is missing"),
        ("0F0,0I0,0W0,0B0\n", "`0B0` and its halves"),
        ("0F0,0B0\n0F1,0B1\n", "rank 1: `0F1` is of stage 0, as an action of rank 0"),
        ("0F0,0B0\n2F0,2B0\n", "no rank has actions of stage 1"),
        ("0F0,0X0\n", "line 1, cell 2: `0X0` is no action"),
        ("0F0,B0\n", "line 1, cell 2: `B0` is no action"),
        ("0F18446744073709551615\n", "is no action"),
        ("0F4294967295,0B4294967295\n", "`0F0` is missing"),
        ("0F0,0RECV_B0,0B0\n", "`0RECV_B0`: there is no such stage"),
        ("0F0,1RECV_F0,1F0,1B0,0B0\n", "`1RECV_F0` is a transfer within the rank"),
        ("0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", "rank 0: `0RECV_B0` is missing"),
        ("0UNSHARD,0UNSHARD,0F0,0B0,0RESHARD\n", "`0UNSHARD`: the stage is gathered already"),
        ("0UNSHARD,0F0,0RESHARD,0B0\n", "`0B0`: the stage is not gathered at this point"),
        ("0RESHARD,0F0,0B0\n", "`0RESHARD`: the stage is not gathered"),
        ("0UNSHARD,0F0,0B0\n", "`0RESHARD` is missing"),
        ("0F0,0F1,0B0,0REDUCE_GRAD,0B1\n", "`0B1`: the stage's gradients were reduced before"),
        ("0F0,1F0,1B0,0B0,0REDUCE_GRAD\n", "`1REDUCE_GRAD` is missing"),
    ] {
        let found = message(csv);
        assert!(found.contains(said), "{csv:?}: {found}");
    }
}

#[test]
fn sizes_that_cannot_be_are_refused() {
    for (kind, p, v, m, said) in [
        (Type::OneForwardOneBackward, 2, 2, 4, "2 stages a rank; expected 1; `interleaved_1f1b`"),
        (Type::ZeroBubbleV, 2, 1, 4, "1 stages a rank; expected 2"),
        (Type::DualPipeV, 4, 2, 7, "7 micro-batches on 4 ranks; expected at least two a rank, 8"),
        (Type::Interleaved, 2, 2, 5, "expected a multiple of 2, the rounds, as 4 or 6"),
        (Type::GPipe, 0, 1, 4, "0 ranks"),
        (Type::GPipe, 1, 1, 0, "0 micro-batches"),
        (Type::ZeroBubble, 4, 1, usize::MAX, "at most 1048576 forwards"),
        (Type::ZeroBubble, usize::MAX, 4, 1, "at most 1048576 forwards"),
    ] {
        let found = Schedule::new(kind, p, v, m).unwrap_err().to_string();
        assert!(found.contains(kind.name()) && found.contains(said), "{found}");
    }
    let schedule = Schedule::new(Type::GPipe, 2, 1, 1).unwrap();
    let negative = Costs { forward: -1.0, ..Costs::default() };
    assert!(schedule.simulate(&negative).unwrap_err().to_string().contains("cost of -1"));
    assert!(schedule.lower(Some(0)).unwrap_err().to_string().contains("0 gathered stages"));
    let again = schedule.lower(None).unwrap().lower(None).unwrap_err().to_string();
    assert!(again.contains("already"), "{again}");
}

#[test]
fn pytorchs_overlapped_cells_are_read() {
    let schedule = Schedule::from_csv("0F0,,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n").unwrap();
    assert_eq!(schedule.to_csv(), "0F0,0F1,0F2,0B0,0B1,0B2\n");
}
