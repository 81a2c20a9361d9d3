//! Sends, receives and FSDP's actions, added to lists of computation.

use std::collections::HashSet;

use fulgurite_error::{Error, Result};

use super::check::is_transfer;
use super::{Action, Kind, Schedule};

pub(super) fn lower(schedule: &Schedule, gathered_stages: Option<usize>) -> Result<Schedule> {
    let has_more = |list: &Vec<Action>| list.iter().any(|action| !action.kind.computes());
    if schedule.lists.iter().any(has_more) {
        let message = "pipeline schedule: it has transfers or FSDP's actions already; expected computation alone";
        return Err(Error::Config(message.to_owned()));
    }
    let lists = match gathered_stages {
        None => schedule.lists.clone(),
        Some(0) => {
            let message =
                "pipeline schedule: 0 gathered stages; expected at least the one that is computed";
            return Err(Error::Config(message.to_owned()));
        }
        Some(stages) => schedule
            .lists
            .iter()
            .map(|list| gather(&reduce(list, schedule.micro_batches), stages))
            .collect(),
    };
    transfer(&Schedule { lists, ..schedule.clone() })
}

/// Adds the reduction of a stage's gradients after its last backward.
fn reduce(list: &[Action], micro_batches: usize) -> Vec<Action> {
    let mut backwards = vec![0; list.iter().map(|action| action.stage + 1).max().unwrap_or(0)];
    let mut reduced = Vec::with_capacity(list.len());
    for action in list {
        reduced.push(*action);
        if matches!(action.kind, Kind::BackwardWeight | Kind::Backward) {
            backwards[action.stage] += 1;
            if backwards[action.stage] == micro_batches {
                reduced.push(Action::new(action.stage, Kind::ReduceGradients, 0));
            }
        }
    }
    reduced
}

/// Adds gathers before the first use of a stage, and frees a stage that is not among the next
/// `most` ones.
fn gather(list: &[Action], most: usize) -> Vec<Action> {
    // From the end: the stages in the order of their next use.
    let mut next: Vec<usize> = Vec::new();
    let mut needed: Vec<Vec<usize>> = Vec::with_capacity(list.len());
    for action in list.iter().rev() {
        next.retain(|stage| *stage != action.stage);
        next.insert(0, action.stage);
        needed.push(next.iter().take(most).copied().collect());
    }
    let mut gathered: Vec<usize> = Vec::new();
    let mut all = Vec::with_capacity(list.len());
    for (action, needed) in list.iter().zip(needed.into_iter().rev()) {
        if action.kind.computes() {
            let freed = gathered.extract_if(.., |stage| !needed.contains(stage));
            all.extend(freed.map(|stage| Action::new(stage, Kind::Reshard, 0)));
            for stage in needed {
                if !gathered.contains(&stage) {
                    all.push(Action::new(stage, Kind::Unshard, 0));
                    gathered.push(stage);
                }
            }
        }
        all.push(*action);
    }
    all.extend(gathered.into_iter().map(|stage| Action::new(stage, Kind::Reshard, 0)));
    all
}

/// Adds transfers: a send after what computes its tensor, its receive at the same time.
fn transfer(schedule: &Schedule) -> Result<Schedule> {
    let ranks = schedule.ranks();
    let mut lists: Vec<Vec<Action>> = vec![Vec::new(); ranks];
    let mut places = vec![0; ranks];
    // Inputs and gradients that are where they are needed.
    let mut arrived: HashSet<Action> = HashSet::new();
    let last = schedule.stages() - 1;
    loop {
        let mut progress = false;
        for rank in 0..ranks {
            let Some(action) = schedule.lists[rank].get(places[rank]).copied() else { continue };
            let ready = match action.kind {
                Kind::Forward if action.stage > 0 => {
                    arrived.contains(&action.with(Kind::ReceiveForward))
                }
                Kind::BackwardInput | Kind::Backward if action.stage < last => {
                    arrived.contains(&action.with(Kind::ReceiveBackward))
                }
                _ => true,
            };
            if !ready {
                continue;
            }
            progress = true;
            places[rank] += 1;
            lists[rank].push(action);
            let Some((send, receive)) = transfer_of(action, last) else { continue };
            let peer = schedule.rank_of_stage(receive.stage);
            if peer != rank {
                lists[rank].push(send);
                lists[peer].push(receive);
            }
            arrived.insert(receive);
        }
        if !progress {
            break;
        }
    }
    if (0..ranks).all(|rank| places[rank] == schedule.lists[rank].len()) {
        return Schedule::checked(lists);
    }
    Err(stuck(schedule, &places))
}

/// The send and the receive that follow an action.
pub(super) fn transfer_of(action: Action, last: usize) -> Option<(Action, Action)> {
    match action.kind {
        Kind::Forward if action.stage < last => {
            let receive = Action::new(action.stage + 1, Kind::ReceiveForward, action.micro_batch);
            Some((action.with(Kind::SendForward), receive))
        }
        Kind::BackwardInput | Kind::Backward if action.stage > 0 => {
            let receive = Action::new(action.stage - 1, Kind::ReceiveBackward, action.micro_batch);
            Some((action.with(Kind::SendBackward), receive))
        }
        _ => None,
    }
}

/// Why ranks cannot go on: each rank's place in its list, and what it waits for.
pub(super) fn stuck(schedule: &Schedule, places: &[usize]) -> Error {
    let mut text = "pipeline schedule: the ranks wait for each other:".to_owned();
    for (rank, place) in places.iter().enumerate() {
        let list = schedule.actions(rank);
        let Some(action) = list.get(*place) else {
            text += &format!("\n  rank {rank}: at its end");
            continue;
        };
        let mut words: Vec<String> = Vec::new();
        if *place > 4 {
            words.push("…".to_owned());
        }
        words.extend(list[place.saturating_sub(4)..*place].iter().map(ToString::to_string));
        words.push(format!("[{action}]"));
        words.extend(list[place + 1..].iter().take(3).map(ToString::to_string));
        if list.len() > place + 4 {
            words.push("…".to_owned());
        }
        let (words, awaited) = (words.join(" "), awaited(schedule, *action));
        text += &format!("\n  rank {rank}: {words}   waits for {awaited}");
    }
    Error::Config(text)
}

/// What an action needs, in words.
fn awaited(schedule: &Schedule, action: Action) -> String {
    let lowered = schedule.lists.iter().flatten().any(|action| is_transfer(action.kind));
    let rank = schedule.rank_of_stage(action.stage);
    let of = |stage: usize, kind: Kind| {
        let other = Action::new(stage, kind, action.micro_batch);
        match schedule.rank_of_stage(stage) {
            own if own == rank => format!("`{other}`, which stands later"),
            other_rank => format!("`{other}` of rank {other_rank}"),
        }
    };
    let computed = |stage: usize, receive: Kind, kind: Kind| {
        let received = lowered && schedule.rank_of_stage(stage) != rank;
        if received { format!("`{}`", action.with(receive)) } else { of(stage, kind) }
    };
    let (before, after) = (action.stage.saturating_sub(1), action.stage + 1);
    match action.kind {
        Kind::Forward => computed(before, Kind::ReceiveForward, Kind::Forward),
        Kind::Backward | Kind::BackwardInput => {
            let input = Action::new(after, Kind::BackwardInput, action.micro_batch);
            let is_split = schedule.lists.iter().any(|list| list.contains(&input));
            let kind = if is_split { Kind::BackwardInput } else { Kind::Backward };
            computed(after, Kind::ReceiveBackward, kind)
        }
        Kind::SendForward => of(after, Kind::ReceiveForward),
        Kind::SendBackward => of(before, Kind::ReceiveBackward),
        Kind::ReceiveForward => of(before, Kind::SendForward),
        Kind::ReceiveBackward => of(after, Kind::SendBackward),
        // These wait for nothing.
        Kind::BackwardWeight | Kind::Unshard | Kind::Reshard | Kind::ReduceGradients => {
            "nothing".to_owned()
        }
    }
}
