//! Meetings in the job's store: before MPI calls that block, and to agree on one member's decision.

use std::time::Duration;

use fulgurite_core::launch::{Patience, Store};
use fulgurite_core::{Error, Result};
use fulgurite_transports::network::POLL_INTERVAL;
use serde::{Deserialize, Serialize};

/// Extra time that the others wait for the first member, whose error names missing members.
const GRACE: Duration = Duration::from_secs(2);

/// A meeting of ranks in the store.
pub(crate) struct Meeting<'a> {
    pub(crate) store: &'a dyn Store,
    /// Prefix in the store, unique among the job's meetings.
    pub(crate) key: &'a str,
    /// Purpose, for messages: `to start MPI`.
    pub(crate) purpose: &'a str,
    /// Global ranks of the members.
    pub(crate) members: &'a [usize],
    /// This member's index.
    pub(crate) own: usize,
    pub(crate) timeout: Duration,
    /// Called during waits. An error ends the wait.
    pub(crate) wanted: &'a dyn Fn() -> Result<()>,
}

/// The first member's message to the others.
#[derive(Serialize, Deserialize)]
enum Decision<T> {
    Agreed(T),
    Refused(String),
}

impl Meeting<'_> {
    /// Collects all members' `card`s on the first member, and returns its result of `decide` on
    /// every member. Collective over the members.
    ///
    /// # Errors
    /// If a member is missing at the end of the timeout (the error names it), or if `decide` fails.
    /// All members get the error.
    pub(crate) fn agree<C, T>(
        &self,
        card: &C,
        decide: impl FnOnce(Vec<C>) -> Result<T, String>,
    ) -> Result<T>
    where
        C: Serialize + for<'a> Deserialize<'a>,
        T: Serialize + for<'a> Deserialize<'a>,
    {
        let card_key = |member: usize| format!("{}/{member}", self.key);
        let decision_key = format!("{}/decision", self.key);
        self.store.set(&card_key(self.own), &encode(card)?)?;
        if self.own == 0 {
            let decided =
                self.cards(card_key).and_then(|cards| decide(cards).map_err(Error::Launch));
            let decision = match decided {
                Ok(agreed) => Decision::Agreed(agreed),
                Err(Error::Launch(why)) => Decision::Refused(why),
                Err(other) => return Err(other),
            };
            self.store.set(&decision_key, &encode(&decision)?)?;
        }
        let decision = self.get(&decision_key, 0, self.timeout + GRACE)?;
        match decode(&decision_key, &decision)? {
            Decision::Agreed(agreed) => Ok(agreed),
            Decision::Refused(why) => Err(Error::Launch(why)),
        }
    }

    fn cards<C: for<'a> Deserialize<'a>>(&self, key: impl Fn(usize) -> String) -> Result<Vec<C>> {
        let card = |member| {
            let key = key(member);
            decode(&key, &self.get(&key, member, self.timeout)?)
        };
        (0..self.members.len()).map(card).collect()
    }

    /// Reads a key that a member sets.
    fn get(&self, key: &str, member: usize, timeout: Duration) -> Result<Vec<u8>> {
        let mut patience = Patience::new(timeout);
        loop {
            let slice = patience.slice();
            match self.store.get(key, slice.unwrap_or_default().min(POLL_INTERVAL)) {
                Err(Error::Launch(_)) if slice.is_none() => {
                    let rank = self.members[member];
                    return Err(Error::Launch(format!(
                        "rank {rank} did not come {} within {} s: the ranks may have gone different ways, \
                         or it is stuck",
                        self.purpose,
                        timeout.as_secs_f64()
                    )));
                }
                Err(Error::Launch(_)) => (self.wanted)()?,
                other => return other,
            }
        }
    }
}

fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(Error::other)
}

fn decode<T: for<'a> Deserialize<'a>>(key: &str, value: &[u8]) -> Result<T> {
    serde_json::from_slice(value).map_err(|e| {
        Error::Launch(format!("the store's value of `{key}` is not what a rank puts there: {e}"))
    })
}
