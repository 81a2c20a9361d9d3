//! The watchdog thread, which makes sure that every wait ends.
//!
//! It asks NCCL for errors of its communicators, the device for finished work, and the host's
//! groups for failures of other ranks. It never waits for a device or a peer.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use fulgurite_engine::collective::TIMED_OUT;
use fulgurite_error::{Error, Result, advice};

use crate::failure::Failure;
use crate::flight::Notice;
use crate::records::{self, Record};
use crate::shared::Shared;
use crate::world::World;

/// Interval between checks.
const INTERVAL: Duration = Duration::from_millis(100);
/// Longest wait before ranks ask each other for their collectives, and the interval between such
/// questions.
const LONG: Duration = Duration::from_secs(1);

/// Starts the watchdog of a rank. It ends some time after `world` is dropped.
pub(crate) fn start(world: &Arc<World>) -> Result<()> {
    let world: Weak<World> = Arc::downgrade(world);
    let run = move || {
        while let Some(world) = world.upgrade() {
            world.groups().iter().for_each(look);
            drop(world);
            std::thread::sleep(INTERVAL);
        }
    };
    std::thread::Builder::new()
        .name("nccl-watchdog".to_owned())
        .spawn(run)
        .map(drop)
        .map_err(|e| Error::Launch(format!("starting the watchdog of NCCL: {e}{}", advice(&e))))
}

/// Checks a group once.
fn look(shared: &Arc<Shared>) {
    if shared.failure().is_some() {
        return;
    }
    if let Some(error) = shared.host.failure() {
        return shared.fail(error.into());
    }
    let oldest = match retire(shared) {
        Ok(oldest) => oldest,
        Err(error) => return shared.fail(error.into()),
    };
    if oldest.is_some() && shared.world.gives_up() {
        return shared.fail(Failure::Interrupted);
    }
    let context =
        || oldest.as_ref().map_or_else(String::new, |it| format!(", in {}", it.notice.describe()));
    for communicator in shared.communicators() {
        if let Err(fault) = communicator.progress() {
            return shared.fail(Failure::Group(format!("{fault}{}", context())));
        }
    }
    if let Some(oldest) = &oldest
        && let Some(message) = overdue(shared, oldest)
    {
        shared.fail(Failure::Group(message));
    }
}

/// The longest wait of a group.
struct Oldest {
    notice: Arc<Notice>,
    waited: Duration,
    /// Whether to ask the other ranks for their collectives now.
    asks: bool,
}

/// Removes finished flights. Returns the oldest unfinished one.
fn retire(shared: &Shared) -> Result<Option<Oldest>> {
    let long = LONG.min(shared.world.timeout / 4);
    let (mut oldest, mut error) = (None, None);
    shared.flights(|flight| {
        match flight.event.as_ref().map(|event| event.is_done()) {
            Some(Ok(true)) => return false,
            Some(Err(failed)) => {
                error.get_or_insert(failed);
            }
            Some(Ok(false)) | None => {}
        }
        if oldest.is_none() {
            let now = Instant::now();
            let waited = now - flight.since;
            let asks = waited >= long && flight.asked.is_none_or(|asked| now - asked >= long);
            if asks {
                flight.asked = Some(now);
            }
            oldest = Some(Oldest { notice: flight.notice.clone(), waited, asks });
        }
        true
    });
    error.map_or(Ok(oldest), Err)
}

/// Returns the error message of a wait that must end.
fn overdue(shared: &Shared, oldest: &Oldest) -> Option<String> {
    let Oldest { notice, waited, asks } = oldest;
    let timeout = shared.world.timeout;
    let late = *waited >= timeout;
    let all = match Record::of(notice) {
        Some(own) if *asks || late => {
            let all = records::exchange(shared, &own);
            if let Some(message) = records::mismatch(shared, &own, &all) {
                return Some(message);
            }
            all
        }
        _ => Vec::new(),
    };
    late.then(|| {
        let missing = records::missing(shared, notice, &all);
        format!("{TIMED_OUT} {timeout:?} in {}: {missing}", notice.describe())
    })
}
