//! Whether lists of actions are a schedule.

use std::collections::HashMap;

use fulgurite_error::{Error, Result};

use super::{Action, Kind, Schedule};

fn error(rank: usize, message: impl std::fmt::Display) -> Error {
    Error::Config(format!("pipeline schedule, rank {rank}: {message}"))
}

/// Returns the schedule with these lists.
///
/// # Errors
/// If the lists are not a schedule's; the message names the rank and the action.
pub(super) fn schedule(lists: Vec<Vec<Action>>) -> Result<Schedule> {
    let mut ranks: HashMap<usize, usize> = HashMap::new();
    let mut micro_batches = 0;
    for (rank, list) in lists.iter().enumerate() {
        for action in list {
            let first = *ranks.entry(action.stage).or_insert(rank);
            if first != rank {
                let message = format!(
                    "`{action}` is of stage {}, as an action of rank {first}; a stage has one rank",
                    action.stage
                );
                return Err(error(rank, message));
            }
            micro_batches = micro_batches.max(action.micro_batch + 1);
        }
    }
    let stages = ranks.len();
    let rank_of_stage: Option<Vec<usize>> =
        (0..stages).map(|stage| ranks.get(&stage).copied()).collect();
    let Some(rank_of_stage) = rank_of_stage.filter(|stages| !stages.is_empty()) else {
        let message = match ranks.keys().max() {
            None => "no actions".to_owned(),
            Some(last) => {
                let missing = (0..*last).find(|stage| !ranks.contains_key(stage)).unwrap_or(0);
                format!("no rank has actions of stage {missing}, although there is a stage {last}")
            }
        };
        return Err(Error::Config(format!("pipeline schedule: {message}")));
    };
    let schedule = Schedule { rank_of_stage, micro_batches, lists };
    for rank in 0..schedule.ranks() {
        check_rank(&schedule, rank)?;
    }
    Ok(schedule)
}

/// Checks that each of the rank's stages computes each micro-batch once, in a possible order.
fn check_rank(schedule: &Schedule, rank: usize) -> Result<()> {
    let list = schedule.actions(rank);
    let mut places: HashMap<Action, usize> = HashMap::new();
    for (place, action) in list.iter().enumerate() {
        let once = matches!(action.kind, Kind::Unshard | Kind::Reshard);
        if !once && places.insert(*action, place).is_some() {
            return Err(error(rank, format!("`{action}` stands there twice")));
        }
    }
    let lowered = list.iter().any(|action| is_transfer(action.kind));
    let place = |action: Action| places.get(&action).copied();
    let ordered = |before: Action, after: Action| match (place(before), place(after)) {
        (Some(first), Some(then)) if first < then => Ok(()),
        (Some(_), Some(_)) => Err(error(rank, format!("`{after}` stands before `{before}`"))),
        (None, _) => Err(error(rank, format!("`{before}` is missing"))),
        (_, None) => Err(error(rank, format!("`{after}` is missing"))),
    };
    for stage in (0..schedule.stages()).filter(|stage| schedule.rank_of_stage(*stage) == rank) {
        for micro_batch in 0..schedule.micro_batches {
            let forward = Action::new(stage, Kind::Forward, micro_batch);
            let [input, weight, whole] =
                [Kind::BackwardInput, Kind::BackwardWeight, Kind::Backward]
                    .map(|kind| forward.with(kind));
            let backward = match (place(input), place(weight), place(whole)) {
                (None, None, _) => whole,
                (_, _, None) => input,
                _ => {
                    return Err(error(
                        rank,
                        format!("`{whole}` and its halves `{input}` and `{weight}` stand there"),
                    ));
                }
            };
            ordered(forward, backward)?;
            if backward == input {
                ordered(input, weight)?;
            }
            let elsewhere = |other: usize| schedule.rank_of_stage(other) != rank;
            let transfers = [
                (stage > 0, stage.wrapping_sub(1), forward.with(Kind::ReceiveForward), forward),
                (
                    stage + 1 < schedule.stages(),
                    stage + 1,
                    forward,
                    forward.with(Kind::SendForward),
                ),
                (
                    stage + 1 < schedule.stages(),
                    stage + 1,
                    forward.with(Kind::ReceiveBackward),
                    backward,
                ),
                (stage > 0, stage.wrapping_sub(1), backward, forward.with(Kind::SendBackward)),
            ];
            for (exists, neighbour, before, after) in transfers {
                let transfer = if is_transfer(before.kind) { before } else { after };
                if exists && elsewhere(neighbour) {
                    if lowered {
                        ordered(before, after)?;
                    }
                } else if place(transfer).is_some() {
                    let message = match exists {
                        true => format!(
                            "`{transfer}` is a transfer within the rank; its stages hand over by themselves"
                        ),
                        false => format!("`{transfer}`: there is no such stage to transfer with"),
                    };
                    return Err(error(rank, message));
                }
            }
        }
    }
    Ok(())
}

/// Whether the action is a send or a receive.
pub(super) fn is_transfer(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::SendForward | Kind::ReceiveForward | Kind::SendBackward | Kind::ReceiveBackward
    )
}
