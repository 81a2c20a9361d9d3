//! Connects the members of a group.

use std::collections::HashMap;
use std::net::{IpAddr, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fulgurite_core::collective::GroupContext;
use fulgurite_core::launch::{Patience, Store};
use fulgurite_core::{Error, Result, advice};

use super::address::listen;
use super::config::Tcp;
use super::contact::Contact;
use super::listener::Listener;
use super::wire::TcpWire;
use crate::network::wire::{Network, POLL_INTERVAL, Wire};

/// Delay between attempts after a refused connection: first, and at most.
const FIRST_RETRY: Duration = Duration::from_millis(20);
const LAST_RETRY: Duration = Duration::from_millis(500);
/// Extra time beyond the timeout for a rank that must connect to this one.
const GRACE: Duration = Duration::from_secs(3);

/// The connections of this process to other ranks.
pub(super) struct TcpNetwork {
    store: Arc<dyn Store>,
    rank: usize,
    /// Prefix of the ranks' contacts in the store.
    keys: String,
    chunk_bytes: usize,
    listener: Listener,
    /// Contacts of other ranks so far.
    contacts: Mutex<HashMap<usize, Contact>>,
    /// Addresses of ranks, from earlier connections.
    places: Mutex<HashMap<usize, IpAddr>>,
}

impl TcpNetwork {
    /// Listens, and publishes the address. Every rank of the job calls it, in the same order.
    pub(super) fn new(config: &Tcp, context: &GroupContext) -> Result<Self> {
        let (store, rank) = (context.store.clone(), context.rank);
        let build = store.add(&format!("network/tcp/listeners/{rank}"), 1)?;
        let keys = format!("network/tcp/contacts{build}");
        let listener = listen(config, context)?;
        let address = listener
            .local_addr()
            .map_err(|e| Error::Launch(format!("listening: {e}{}", advice(&e))))?;
        let contact = Contact::new(address, config.chunk_bytes)?;
        let value = serde_json::to_vec(&contact).map_err(Error::other)?;
        let listener = Listener::new(listener, contact)?;
        store.set(&format!("{keys}/{rank}"), &value)?;
        Ok(Self {
            store,
            rank,
            keys,
            chunk_bytes: config.chunk_bytes,
            listener,
            contacts: Mutex::default(),
            places: Mutex::default(),
        })
    }

    fn contact(&self, rank: usize, timeout: Duration) -> Result<Contact> {
        let known = self.contacts.lock().expect("no panic with contacts").get(&rank).cloned();
        if let Some(contact) = known {
            return Ok(contact);
        }
        let key = format!("{}/{rank}", self.keys);
        let value = self.store.get(&key, timeout).map_err(|error| match error {
            Error::Launch(why) => {
                Error::Launch(format!("rank {rank} has not said where it listens: {why}"))
            }
            other => other,
        })?;
        let contact: Contact = serde_json::from_slice(&value).map_err(|e| {
            Error::Launch(format!("the store's value of `{key}` is no address: {e}"))
        })?;
        if contact.chunk_bytes != self.chunk_bytes {
            return Err(Error::Launch(format!(
                "trainer.process_group.chunk_bytes is {} on rank {} and {} on rank {rank}; it must be the same on all",
                self.chunk_bytes, self.rank, contact.chunk_bytes
            )));
        }
        self.contacts.lock().expect("no panic with contacts").insert(rank, contact.clone());
        Ok(contact)
    }

    /// Connects to a listening rank.
    fn call(
        &self,
        key: &str,
        rank: usize,
        timeout: Duration,
        patience: &mut Patience,
        wanted: &dyn Fn() -> Result<()>,
    ) -> Result<TcpStream> {
        let contact = self.contact(rank, timeout)?;
        let mut retry = FIRST_RETRY;
        while let Some(slice) = patience.slice() {
            let mut tick = || {
                patience.slice();
            };
            match contact.call(key, self.rank, slice.max(FIRST_RETRY), &mut tick) {
                Ok(stream) => return Ok(stream),
                Err(error) => tracing::debug!("connecting to rank {rank}: {error}"),
            }
            // The patience only counts steps of at most a second.
            tick();
            wanted()?;
            std::thread::sleep(retry.min(slice));
            retry = (retry * 2).min(LAST_RETRY);
        }
        let why = match contact.call(key, self.rank, LAST_RETRY, &mut || {}) {
            Ok(stream) => return Ok(stream),
            Err(error) => error,
        };
        Err(Error::Launch(format!(
            "rank {} cannot connect to rank {rank} at {} ({why}). Check that the hosts reach each other \
             there: firewalls (trainer.process_group.ports), the interface \
             (trainer.process_group.interface)",
            self.rank, contact.address
        )))
    }

    /// Waits for the connection of a calling rank.
    fn take(
        &self,
        key: &str,
        rank: usize,
        patience: &mut Patience,
        wanted: &dyn Fn() -> Result<()>,
    ) -> Result<TcpStream> {
        loop {
            let slice = patience.slice();
            if let Some(stream) =
                self.listener.take(key, rank, slice.unwrap_or_default().min(POLL_INTERVAL))
            {
                return Ok(stream);
            }
            wanted()?;
            if slice.is_none() {
                let place = self.place(rank).map_or_else(String::new, |at| format!(" ({at})"));
                return Err(Error::Launch(format!(
                    "rank {rank}{place} did not connect to rank {}, for the process group `{key}`",
                    self.rank
                )));
            }
        }
    }
}

impl Network for TcpNetwork {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn connect(
        self: Arc<Self>,
        key: &str,
        members: &[usize],
        own: usize,
        timeout: Duration,
        wanted: &dyn Fn() -> Result<()>,
    ) -> Result<Box<dyn Wire>> {
        // The caller knows more about an error, so it must report first.
        let mut patience = Patience::new(timeout);
        let mut longer = Patience::new(timeout.saturating_add(GRACE));
        let mut streams = Vec::with_capacity(members.len());
        for (member, &rank) in members.iter().enumerate() {
            let stream = match member.cmp(&own) {
                std::cmp::Ordering::Less => {
                    Some(self.call(key, rank, timeout, &mut patience, wanted)?)
                }
                std::cmp::Ordering::Equal => None,
                std::cmp::Ordering::Greater => Some(self.take(key, rank, &mut longer, wanted)?),
            };
            if let Some(Ok(address)) = stream.as_ref().map(TcpStream::peer_addr) {
                self.places.lock().expect("no panic with places").insert(rank, address.ip());
            }
            streams.push(stream);
        }
        Ok(Box::new(TcpWire::new(streams, self)?))
    }

    fn place(&self, rank: usize) -> Option<String> {
        let places = self.places.lock().expect("no panic with places");
        places.get(&rank).map(IpAddr::to_string)
    }
}
