//! All interleavings of agents that claim seats, decide, end and start again. The rules are those
//! of the program.

use std::collections::HashSet;

use super::quorum::{Claim, Lead, Seat, claim};

/// The decisions so far, a number for each.
type History = Vec<u8>;

/// A mistake that the checker must find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    /// A seat whose agent has started again still counts as the voter that it was.
    Forgets,
    /// A seat grants a claim that was made before its present record.
    GrantsBlindly,
    /// A coordinator goes on from the oldest decision that it finds.
    GoesOnFromOldest,
    /// A coordinator writes at seats that another one has claimed since.
    Overwrites,
    /// A coordinator acts on what no majority has recorded.
    ActsEarly,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct World {
    /// `None` while its agent is down.
    seats: Vec<Option<Seat<History>>>,
    agents: Vec<Agent>,
    /// The longest history on which an agent has acted.
    acted: History,
    lives: u64,
    decided: u8,
    decisions_left: usize,
    claims_left: usize,
    kills_left: usize,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Agent {
    Idle,
    Claims { claim: Claim<History>, granted: Vec<Option<u64>> },
    Leads(Lead<History>),
}

impl World {
    /// Of three seats.
    fn new(claims_left: usize, kills_left: usize, decisions_left: usize) -> Self {
        let count = 3;
        let seats = (0..count).map(|life| Some(Seat { life, record: None })).collect();
        Self {
            seats,
            agents: (0..count).map(|_| Agent::Idle).collect(),
            acted: Vec::new(),
            lives: count,
            decided: 0,
            decisions_left,
            claims_left,
            kills_left,
        }
    }

    /// All worlds that one event leads to.
    ///
    /// # Errors
    /// If two agents act on histories of which neither continues the other.
    fn next(&self, fault: Fault) -> Result<Vec<Self>, String> {
        let mut all = Vec::new();
        for own in 0..self.seats.len() {
            let mut add = |change: &dyn Fn(&mut Self) -> Result<(), String>| {
                let mut next = self.clone();
                change(&mut next)?;
                if next != *self {
                    all.push(next);
                }
                Ok::<(), String>(())
            };
            if self.seats[own].is_none() {
                add(&|next| next.start_again(own, fault))?;
                continue;
            }
            add(&|next| next.kill(own))?;
            for hidden in 0..=self.seats.len() {
                add(&|next| next.claim(own, hidden, fault))?;
            }
            for at in 0..self.seats.len() {
                add(&|next| next.answer(own, at, fault))?;
                add(&|next| next.write(own, at, fault))?;
            }
            add(&|next| next.win(own))?;
            add(&|next| next.decide(own, fault))?;
        }
        Ok(all)
    }

    fn kill(&mut self, own: usize) -> Result<(), String> {
        if self.kills_left > 0 {
            self.kills_left -= 1;
            (self.seats[own], self.agents[own]) = (None, Agent::Idle);
        }
        Ok(())
    }

    fn start_again(&mut self, own: usize, fault: Fault) -> Result<(), String> {
        // All at once would be another job.
        if self.seats.iter().flatten().all(|seat| seat.record.is_none()) {
            return Ok(());
        }
        let life = match fault {
            Fault::Forgets => own as u64,
            _ => self.lives,
        };
        self.lives += 1;
        self.seats[own] = Some(Seat { life, record: None });
        Ok(())
    }

    /// An agent claims the seats. It may not reach the `hidden` one.
    fn claim(&mut self, own: usize, hidden: usize, fault: Fault) -> Result<(), String> {
        let mut reached = self.seats.clone();
        if let Some(seat) = reached.get_mut(hidden) {
            *seat = None;
        }
        if self.claims_left == 0 || self.agents[own] != Agent::Idle {
            return Ok(());
        }
        let Some(mut claim) = claim(own, &reached, |_| true, || (1, Vec::new())) else {
            return Ok(());
        };
        if fault == Fault::GoesOnFromOldest {
            let decided = claim.records.iter().flatten().map(|record| record.decided.clone());
            let oldest = decided.min_by_key(|decided| (decided.term, decided.number)).unwrap();
            claim.records.iter_mut().flatten().for_each(|record| record.decided = oldest.clone());
        }
        self.claims_left -= 1;
        self.agents[own] = Agent::Claims { granted: vec![None; self.seats.len()], claim };
        Ok(())
    }

    /// A seat answers a claim, if its record is still the one that was read.
    fn answer(&mut self, own: usize, at: usize, fault: Fault) -> Result<(), String> {
        let (Agent::Claims { claim, granted }, Some(seat)) =
            (&mut self.agents[own], &mut self.seats[at])
        else {
            return Ok(());
        };
        if let Some(record) = claim.records[at].clone()
            && granted[at].is_none()
            && (seat.record == claim.read[at] || fault == Fault::GrantsBlindly)
        {
            (seat.record, granted[at]) = (Some(record), Some(seat.life));
        }
        Ok(())
    }

    fn win(&mut self, own: usize) -> Result<(), String> {
        if let Agent::Claims { claim, granted, .. } = &self.agents[own]
            && let Some(lead) = Lead::of(claim, granted)
        {
            self.agents[own] = Agent::Leads(lead);
        }
        Ok(())
    }

    /// A coordinator writes its record at a seat, and may act after that.
    fn write(&mut self, own: usize, at: usize, fault: Fault) -> Result<(), String> {
        let (Agent::Leads(lead), Some(seat)) = (&mut self.agents[own], &mut self.seats[at]) else {
            return Ok(());
        };
        let found = seat.record.as_ref().filter(|_| fault != Fault::Overwrites);
        let Some(record) = lead.record(found, 0) else { return Ok(()) };
        lead.note(at, seat.life, &record);
        seat.record = Some(record);
        match lead.is_recorded() {
            true => {
                let history = lead.decided().clone();
                self.act(history)
            }
            false => Ok(()),
        }
    }

    fn decide(&mut self, own: usize, fault: Fault) -> Result<(), String> {
        let Agent::Leads(lead) = &mut self.agents[own] else { return Ok(()) };
        if !lead.is_recorded() || self.decisions_left == 0 {
            return Ok(());
        }
        self.decisions_left -= 1;
        self.decided += 1;
        let mut history = lead.decided().clone();
        history.push(self.decided);
        lead.decide(history.clone());
        match fault {
            Fault::ActsEarly => self.act(history),
            _ => Ok(()),
        }
    }

    fn act(&mut self, history: History) -> Result<(), String> {
        if history.starts_with(&self.acted) {
            self.acted = history;
        } else if !self.acted.starts_with(&history) {
            return Err(format!("{history:?} lacks what {:?} has", self.acted));
        }
        Ok(())
    }
}

/// Follows all interleavings. Returns their number of worlds, and the longest history.
///
/// # Errors
/// What is wrong.
fn explore(start: World, fault: Fault) -> Result<(usize, usize), String> {
    let (mut seen, mut open, mut longest) = (HashSet::new(), vec![start], 0);
    while let Some(world) = open.pop() {
        if !seen.contains(&world) {
            longest = longest.max(world.acted.len());
            open.extend(world.next(fault)?);
            seen.insert(world);
        }
    }
    Ok((seen.len(), longest))
}

#[test]
fn no_coordinator_loses_a_decision() {
    for (claims, kills, decisions) in [(2, 1, 2), (3, 0, 1)] {
        let found = explore(World::new(claims, kills, decisions), Fault::None);
        let (worlds, longest) = found.unwrap_or_else(|why| panic!("{claims}, {kills}: {why}"));
        eprintln!("{claims} claims, {kills} kills, {decisions} decisions: {worlds} worlds");
        assert_eq!(longest, decisions);
    }
}

#[test]
fn planted_faults_are_found() {
    for fault in [
        Fault::Forgets,
        Fault::GrantsBlindly,
        Fault::GoesOnFromOldest,
        Fault::Overwrites,
        Fault::ActsEarly,
    ] {
        let found = explore(World::new(2, 1, 2), fault);
        assert!(found.is_err(), "{fault:?}: {found:?}");
    }
}
