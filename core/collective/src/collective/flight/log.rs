//! Reading flight records.

use std::collections::BTreeMap;
use std::io::BufRead;

use super::line::{Call, Channel, ChannelLine, FlightHead, FlightLine, GroupLine};
use crate::{Error, Result};

/// The record of one rank.
#[derive(Debug, Clone, PartialEq)]
pub struct FlightLog {
    /// The rank.
    pub head: FlightHead,
    /// Its groups.
    pub groups: Vec<GroupLine>,
    /// Number of calls in all, by group and channel.
    pub channels: BTreeMap<(usize, Channel), u64>,
    /// Its last calls, in the order in which they began.
    pub calls: Vec<Call>,
}

impl FlightLog {
    /// Reads a record.
    ///
    /// # Errors
    /// If the text is no record. The message names the line.
    pub fn read(from: impl BufRead) -> Result<Self> {
        let (mut head, mut groups, mut calls) = (None, Vec::new(), Vec::new());
        let mut channels = BTreeMap::new();
        for (i, line) in from.lines().enumerate() {
            let wrong = |why: String| Error::other(format!("line {}: {why}", i + 1));
            let line = line.map_err(|error| wrong(error.to_string()))?;
            match serde_json::from_str(&line).map_err(|error| wrong(error.to_string()))? {
                FlightLine::Rank(line) => head = Some(line),
                FlightLine::Group(line) if line.id == groups.len() => groups.push(line),
                FlightLine::Group(line) => {
                    let (found, expected) = (line.id, groups.len());
                    return Err(wrong(format!("expected group {expected}, found {found}")));
                }
                FlightLine::Channel(line) if line.group < groups.len() => {
                    channels.insert((line.group, line.channel), line.calls);
                }
                FlightLine::Call(call) if call.group < groups.len() => calls.push(call),
                FlightLine::Channel(ChannelLine { group, .. })
                | FlightLine::Call(Call { group, .. }) => {
                    return Err(wrong(format!("there is no group {group}")));
                }
            }
        }
        let head = head.ok_or_else(|| Error::other("there is no line of kind \"rank\""))?;
        Ok(Self { head, groups, channels, calls })
    }
}
