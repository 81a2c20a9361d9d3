//! Agents and seats in one process, with cables that are cut.

use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use fulgurite_store::LocalStore;

/// A seat's store, as long as it can be reached.
struct Cable {
    store: Arc<LocalStore>,
    is_cut: Arc<AtomicBool>,
}

impl Cable {
    fn reach(&self) -> Result<&LocalStore> {
        match self.is_cut.load(Ordering::SeqCst) {
            true => Err(Error::Launch("the cable is cut".to_owned())),
            false => Ok(&self.store),
        }
    }
}

impl Store for Cable {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.reach()?.set(key, value)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.reach()?.get(key, timeout)
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        self.reach()?.add(key, amount)
    }

    fn compare_set(&self, key: &str, expected: Option<&[u8]>, value: &[u8]) -> Result<bool> {
        self.reach()?.compare_set(key, expected, value)
    }

    fn report_failure(&self, message: &str) -> Result<()> {
        self.reach()?.report_failure(message)
    }

    fn failure(&self) -> Option<(usize, String)> {
        None
    }
}

/// The present store of each seat.
type Stores = [Arc<Mutex<Arc<LocalStore>>>];

/// An agent, and its cables to the seats.
struct Agent {
    seats: Arc<Seats>,
    cables: Vec<Arc<AtomicBool>>,
}

impl Agent {
    fn new(stores: &Stores, own: usize) -> Self {
        let cables: Vec<Arc<AtomicBool>> = stores.iter().map(|_| Arc::default()).collect();
        let connect = |(store, cable): (&Arc<Mutex<Arc<LocalStore>>>, &Arc<AtomicBool>)| {
            let (store, is_cut) = (store.clone(), cable.clone());
            let connect: Connect = Box::new(move |_| {
                let store = store.lock().unwrap().clone();
                let cable = Cable { store, is_cut: is_cut.clone() };
                cable.reach()?;
                Ok(Arc::new(cable))
            });
            connect
        };
        let connections = stores.iter().zip(&cables).map(connect).collect();
        let lease = Duration::from_millis(600);
        let seats =
            Seats::new(connections, (random().unwrap(), Some(own)), Connected::default(), lease);
        Self { seats: Arc::new(seats.unwrap()), cables }
    }

    fn set_cut(&self, seat: usize, is_cut: bool) {
        self.cables[seat].store(is_cut, Ordering::SeqCst);
    }

    /// The number of the last attempt that was decided before this agent won.
    fn win(&self) -> Option<u64> {
        let (_, before) = self.seats.win().unwrap().expect("the job has not ended");
        before.map(|before| before.attempt.number)
    }

    fn decide(&self, number: u64) -> Result<()> {
        let (id, log_name) = (String::new(), String::new());
        let (nodes, store, generation) = (Vec::new(), (String::new(), 0), None);
        let attempt = Attempt { id, log_name, number, restarts: 0, nodes, store, generation };
        self.seats.decide(Decision {
            attempt,
            restarts: Vec::new(),
            agents: Vec::new(),
            lost_hosts: BTreeMap::new(),
            coordinator: (0, String::new()),
            over: None,
        })
    }
}

fn stores<const COUNT: usize>() -> [Arc<Mutex<Arc<LocalStore>>>; COUNT] {
    [(); COUNT].map(|()| Arc::default())
}

#[test]
fn a_cut_off_coordinator_decides_nothing() {
    let stores = stores::<3>();
    let [first, second, third] = [0, 1, 2].map(|own| Agent::new(&stores, own));
    assert_eq!(first.win(), None);
    first.decide(1).unwrap();
    first.seats.check().unwrap();
    for seat in [1, 2] {
        first.set_cut(seat, true);
    }
    for agent in [&second, &third] {
        agent.set_cut(0, true);
    }
    assert_eq!(second.win(), Some(1));
    let error = first.decide(2).unwrap_err().to_string();
    assert!(error.contains("fewer than a majority of the 3 hosts"), "{error}");
    assert!(first.seats.check().is_err());
    second.decide(2).unwrap();
    second.seats.check().unwrap();
    let term = second.seats.own_term();
    assert_eq!(third.seats.coordinator().map(|(term, _)| term), term);
}

#[test]
fn a_seat_that_returns_counts_again() {
    let stores = stores::<3>();
    let [first, second, third] = [0, 1, 2].map(|own| Agent::new(&stores, own));
    assert_eq!(first.win(), None);
    first.decide(1).unwrap();
    first.seats.end();
    for agent in [&second, &third] {
        agent.set_cut(0, true);
    }
    assert_eq!(second.win(), Some(1));
    second.decide(2).unwrap();
    let empty = Arc::new(LocalStore::new());
    *stores[0].lock().unwrap() = empty.clone();
    let returned = Agent::new(&stores, 0);
    for agent in [&second, &third] {
        agent.set_cut(0, false);
    }
    let begun = Instant::now();
    let counts = || -> Option<bool> {
        let life = String::from_utf8(empty.get(LIFE, Duration::ZERO).ok()?).ok()?;
        let record = empty.get(RECORD, Duration::ZERO).ok()?;
        let record: Record<Decided> = serde_json::from_slice(&record).unwrap();
        Some(record.decided.voters[0].to_string() == life)
    };
    while counts() != Some(true) {
        assert!(begun.elapsed() < Duration::from_secs(60), "the seat is no voter");
        std::thread::sleep(Duration::from_millis(10));
    }
    second.seats.end();
    for agent in [&returned, &third] {
        agent.set_cut(1, true);
    }
    assert_eq!(returned.win(), Some(2));
}

#[test]
fn two_of_five_seats_may_be_lost() {
    let stores = stores::<5>();
    let agents = [0, 1, 2, 3, 4].map(|own| Agent::new(&stores, own));
    assert_eq!(agents[0].win(), None);
    agents[0].decide(1).unwrap();
    for lost in [0, 3] {
        agents[lost].seats.end();
        for other in [1, 2, 4] {
            agents[other].set_cut(lost, true);
        }
    }
    assert_eq!(agents[1].win(), Some(1));
    agents[1].decide(2).unwrap();
    for seat in [2, 4] {
        agents[1].set_cut(seat, true);
    }
    assert!(agents[1].decide(3).is_err(), "one seat is left");
}
