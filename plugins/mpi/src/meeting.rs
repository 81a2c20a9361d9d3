//! Meeting in the job's store: before calls of MPI that block, and to agree on what one member decides.

use std::time::Duration;

use fulgurite_error::{Error, Result};
use fulgurite_launch::{Patience, Store};
use fulgurite_transports::network::POLL_INTERVAL;
use serde::{Deserialize, Serialize};

/// How much longer than the first member, which says who is missing, the others wait for it.
const GRACE: Duration = Duration::from_secs(2);

/// Where ranks meet.
pub(crate) struct Meeting<'a> {
    pub(crate) store: &'a dyn Store,
    /// Where in the store; no other meeting of the job has it.
    pub(crate) key: &'a str,
    /// Why, for messages: `to start MPI`.
    pub(crate) purpose: &'a str,
    /// The global ranks that come.
    pub(crate) members: &'a [usize],
    /// Which of them this one is.
    pub(crate) own: usize,
    pub(crate) timeout: Duration,
    /// Asked while others are waited for: an error ends the wait.
    pub(crate) wanted: &'a dyn Fn() -> Result<()>,
}

/// What the first member tells the others.
#[derive(Serialize, Deserialize)]
enum Decision<T> {
    Agreed(T),
    Refused(String),
}

impl Meeting<'_> {
    /// Gives every member what `decide` makes of all members' `card`s on the first of them. Collective over the
    /// members.
    ///
    /// # Errors
    /// If a member does not come in time, naming it, and what `decide` says: on all members.
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

    /// The value of a key that a member sets.
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
