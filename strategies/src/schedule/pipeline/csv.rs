//! Schedules as text.

use fulgurite_error::{Error, Result};

use super::{Action, Schedule};

/// A line for each rank, a cell for each action.
pub(super) fn write(schedule: &Schedule) -> String {
    let line = |list: &Vec<Action>| {
        let cells: Vec<_> = list.iter().map(Action::to_string).collect();
        cells.join(",") + "\n"
    };
    schedule.lists.iter().map(line).collect()
}

pub(super) fn read(text: &str) -> Result<Schedule> {
    let mut lists = Vec::new();
    for (rank, line) in text.lines().enumerate() {
        let mut list = Vec::new();
        for (cell, text) in line.split(',').enumerate() {
            let actions = actions(text.trim().trim_matches('"'));
            list.extend(actions.map_err(|error| {
                Error::Config(format!(
                    "pipeline schedule, line {}, cell {}: {error}",
                    rank + 1,
                    cell + 1
                ))
            })?);
        }
        lists.push(list);
    }
    Schedule::checked(lists)
}

/// The actions of a cell: none, one, or the parts of an overlapped one.
fn actions(cell: &str) -> Result<Vec<Action>> {
    if cell.is_empty() {
        return Ok(Vec::new());
    }
    let overlapped = cell.strip_prefix('(').and_then(|rest| rest.strip_suffix(")OVERLAP_F_B"));
    match overlapped {
        Some(parts) => parts.split(';').map(|part| part.trim().parse()).collect(),
        None => Ok(vec![cell.parse()?]),
    }
}
