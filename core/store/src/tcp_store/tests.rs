use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fulgurite_test_message::assert_says;

use super::handshake::{self, Greeting, HandshakeError, Purpose};
use super::protocol::{Reply, Request, send};
use super::*;
use crate::Error;
use crate::Patience;
use crate::Store;

const LONG: Duration = Duration::from_secs(60);

fn loopback() -> SocketAddr {
    ([127, 0, 0, 1], 0).into()
}

fn server(world_size: usize) -> StoreServer {
    StoreServer::bind(loopback(), key(), world_size, LostRankPolicy::Failed).unwrap()
}

fn key() -> JobKey {
    JobKey::new("a secret of the job", "job")
}

fn identity(rank: usize, world_size: usize) -> ClientIdentity {
    ClientIdentity { key: key(), rank, world_size }
}

fn client(server: &StoreServer, rank: usize, world_size: usize) -> TcpStore {
    let port = server.address().port();
    TcpStore::connect("127.0.0.1", port, identity(rank, world_size), LONG).unwrap()
}

/// Returns the error of connecting, with the port blanked.
fn refusal(port: u16, identity: ClientIdentity, timeout: Duration) -> String {
    let error = TcpStore::connect("127.0.0.1", port, identity, timeout).err().unwrap();
    error.to_string().replace(&format!(":{port}"), ":PORT")
}

/// Returns a health connection of `rank`, which the test drives.
fn raw_health(server: &StoreServer, rank: usize, world_size: usize) -> TcpStream {
    let stream = admitted(server, rank, world_size);
    send(&stream, &Request::Ping).unwrap();
    stream
}

/// Returns an admitted health connection of `rank` that has not sent a message since.
fn admitted(server: &StoreServer, rank: usize, world_size: usize) -> TcpStream {
    let stream = TcpStream::connect(server.address()).unwrap();
    let greeting = Greeting { rank, world_size, purpose: Purpose::Health };
    let mut patience = Patience::new(LONG);
    handshake::connect(stream.try_clone().unwrap(), &key(), &greeting, &mut patience).unwrap();
    stream
}

fn peer_failed(error: Error) -> (usize, String) {
    match error {
        Error::PeerFailed { rank, message } => (rank, message),
        other => panic!("expected a peer's failure, got: {other}"),
    }
}

#[test]
fn values_and_counters_are_shared() {
    let server = server(2);
    let (a, b) = (client(&server, 0, 2), client(&server, 1, 2));
    a.wait_for_all(LONG).unwrap();
    a.set("key", b"value").unwrap();
    assert_eq!(b.get("key", Duration::ZERO).unwrap(), b"value");
    a.set("empty", b"").unwrap();
    assert_eq!(b.get("empty", Duration::ZERO).unwrap(), b"");
    let large = vec![7; 1 << 20];
    b.set("key", &large).unwrap();
    assert_eq!(a.get("key", Duration::ZERO).unwrap(), large, "the last value counts");
    assert_eq!(a.add("n", 2).unwrap(), 2);
    assert_eq!(b.add("n", -5).unwrap(), -3);
    assert_eq!(a.get("n", Duration::ZERO).unwrap(), b"-3");
    assert_says!(a.add("empty", 1).unwrap_err(), "launch: … key `empty` holds `` … can be added");
    assert_says!(
        a.get("nobody", Duration::from_millis(20)).unwrap_err(),
        "launch: no rank set the store's key `nobody` within 20ms …"
    );
}

#[test]
fn waiting_thread_does_not_block_others() {
    let server = server(1);
    let store = client(&server, 0, 1);
    std::thread::scope(|scope| {
        let waiters: Vec<_> = (0..8).map(|_| scope.spawn(|| store.get("late", LONG))).collect();
        store.set("late", b"now").unwrap();
        for waiter in waiters {
            assert_eq!(waiter.join().unwrap().unwrap(), b"now");
        }
    });
}

#[test]
fn reported_failure_ends_all_waits() {
    let server = server(3);
    let stores: Vec<_> = (0..3).map(|rank| client(&server, rank, 3)).collect();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| stores[0].get("never", LONG));
        stores[1].report_failure("out of data").unwrap();
        let expected = (1, "out of data".to_owned());
        assert_eq!(peer_failed(waiter.join().unwrap().unwrap_err()), expected);
        assert_eq!(stores[2].wait_for_failure(LONG), Some(expected.clone()));
        assert_eq!(stores[2].failure(), Some(expected.clone()));
        stores[2].report_failure("also").unwrap();
        assert_eq!(stores[2].failure(), Some(expected.clone()), "the first is the job's");
        let all = vec![expected, (2, "also".to_owned())];
        assert_eq!(server.failures(), all);
        assert!(server.wait_until_notified(0, LONG));
    });
}

#[test]
fn lost_rank_fails_but_left_rank_does_not() {
    let server = server(3);
    let store = client(&server, 0, 3);
    let goes = client(&server, 1, 3);
    let dies = raw_health(&server, 2, 3);
    drop(goes);
    assert!(!server.wait_for_others(0, Duration::from_millis(1)), "rank 2 is still there");
    assert_eq!(store.failure(), None);
    drop(dies);
    let (rank, message) = store.wait_for_failure(LONG).unwrap();
    assert_eq!((rank, message.as_str()), (2, "the process ended without a word (killed?)"));
    assert!(server.wait_for_others(0, LONG), "a failure ends the wait");
}

#[test]
fn parent_reports_lost_ranks() {
    let server = StoreServer::bind(loopback(), key(), 2, LostRankPolicy::ParentReports).unwrap();
    let store = client(&server, 0, 2);
    let connected = raw_health(&server, 1, 2);
    assert_eq!(server.lost_for(1), None);
    drop(connected);
    assert!(server.wait_for_others(0, LONG), "rank 1 is seen as lost");
    assert!(server.lost_for(1).is_some());
    assert_eq!((server.lost_for(0), server.lost_for(2)), (None, None));
    assert_eq!(server.failures(), []);
    server.fail(1, "killed");
    assert_eq!(store.wait_for_failure(LONG), Some((1, "killed".to_owned())));
}

#[test]
fn lost_server_fails_unless_it_left() {
    let server_1 = server(1);
    let store = client(&server_1, 0, 1);
    store.set("a", b"b").unwrap();
    drop(server_1);
    let (rank, message) = store.wait_for_failure(LONG).unwrap();
    assert_eq!(rank, 0);
    assert_says!(message, "the process ended without a word … hosted the job's store");
    peer_failed(store.get("a", LONG).unwrap_err());

    let server_2 = server(1);
    let store = client(&server_2, 0, 1);
    server_2.set_left(true);
    while !store.health_says_host_left() {
        std::thread::yield_now();
    }
    let port = server_2.address().port();
    drop(server_2);
    let error = store.set("a", b"b").unwrap_err().to_string();
    assert_says!(error.replace(&port.to_string(), "PORT"), "launch: rank 0 … store, has finished");
    assert_eq!(store.failure(), None);
}

#[test]
fn another_server_at_the_address_is_not_asked() {
    let first = server(1);
    let (store, address) = (client(&first, 0, 1), first.address());
    drop(first);
    store.wait_for_failure(LONG).unwrap();
    let second = StoreServer::bind(address, key(), 1, LostRankPolicy::Failed).unwrap();
    peer_failed(store.set("a", b"b").unwrap_err());
    assert_eq!(second.value("a"), None);
    client(&second, 0, 1).set("a", b"b").unwrap();
    assert_eq!(second.value("a"), Some(b"b".to_vec()));
}

#[test]
fn broken_supervisor_store_is_not_rank_0() {
    let server = server(3);
    let port = server.address().port();
    let options = ClientOptions { host: StoreHost::Supervisor, ..Default::default() };
    let store = TcpStore::connect_with("127.0.0.1", port, identity(2, 3), LONG, options).unwrap();
    drop(server);
    let (rank, message) = store.wait_for_failure(LONG).unwrap();
    assert_says!(message, "its connection to the job's store … supervisor hosts, broke");
    assert_eq!(rank, 2);
}

#[test]
fn giving_up_is_reported_to_others() {
    static ASKED: AtomicBool = AtomicBool::new(false);
    let give_up = || ASKED.load(Ordering::SeqCst).then(|| "asked to end".to_owned());
    let server = server(2);
    let port = server.address().port();
    let options = ClientOptions { give_up, ..Default::default() };
    let store = TcpStore::connect_with("127.0.0.1", port, identity(0, 2), LONG, options).unwrap();
    let other = client(&server, 1, 2);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| store.get("nobody", LONG).unwrap_err());
        let other_waits = scope.spawn(|| other.get("nobody", LONG).unwrap_err());
        ASKED.store(true, Ordering::SeqCst);
        assert!(matches!(waits.join().unwrap(), Error::Interrupted));
        let expected = (0, "asked to end".to_owned());
        assert_eq!(peer_failed(other_waits.join().unwrap()), expected);
    });
    // The port is closed now.
    drop((store, other, server));
    let timeout = Duration::from_secs(3600);
    let error = TcpStore::connect_with("127.0.0.1", port, identity(0, 2), timeout, options);
    assert!(matches!(error.err(), Some(Error::Interrupted)));
}

#[test]
fn noticed_failures_are_kept() {
    let server = server(2);
    let store = client(&server, 0, 2);
    for n in 0..9 {
        store.report_noticed(1, &format!("it left ({n})"));
    }
    store.report_failure("after it").unwrap();
    assert_eq!(server.noticed(), Some((1, "it left (0)".to_owned())));
    assert_eq!(server.failures(), [(0, "after it".to_owned())]);
}

// checklist: Lightning: timeout
#[test]
fn missing_ranks_are_named() {
    let server = server(4);
    let (a, _b) = (client(&server, 0, 4), client(&server, 2, 4));
    assert_says!(
        a.wait_for_all(Duration::from_millis(20)).unwrap_err(),
        "launch: after 20ms these of 4 ranks have not come: 1, 3 …"
    );
}

#[test]
fn strangers_are_refused() {
    let server = server(2);
    let port = server.address().port();
    let _one = client(&server, 1, 2);
    for (secret, job) in [("a secret of the job", "other"), ("another secret", "job")] {
        let other = ClientIdentity { key: JobKey::new(secret, job), ..identity(0, 2) };
        assert_says!(
            refusal(port, other, LONG),
            "launch: rank 0 … another job … another key … MASTER_PORT …"
        );
    }
    assert_says!(refusal(port, identity(0, 3), LONG), "launch: rank 0 … serves 2 … expects 3 …");
    assert_says!(refusal(port, identity(1, 2), LONG), "launch: rank 1 … is or was rank 1 … RANK …");
    assert_says!(refusal(port, identity(2, 2), LONG), "launch: rank 2 … below the world size 2");
    assert_says!(HandshakeError::Version(2).describe(), "it speaks version 2 … version 4 …");

    let mut browser = TcpStream::connect(server.address()).unwrap();
    browser.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    browser.set_read_timeout(Some(LONG)).unwrap();
    let mut answer = Vec::new();
    let _ = browser.read_to_end(&mut answer);
    assert!(answer.is_empty(), "a stranger is told nothing");
    let _zero = client(&server, 0, 2); // strangers did not take its rank
    assert_eq!(server.failures(), []);
}

#[test]
fn rank_may_retry_after_cut_handshake() {
    let server = server(2);
    let cut_off = admitted(&server, 1, 2);
    assert!(server.has_joined(1));
    std::thread::scope(|scope| {
        // The rank retries while the server still holds its first connection.
        let again = scope.spawn(|| client(&server, 1, 2));
        drop(cut_off);
        let again = again.join().unwrap();
        let zero = client(&server, 0, 2);
        zero.wait_for_all(LONG).unwrap();
        again.set("here", b"").unwrap();
    });
    assert_eq!(server.failures(), []);
}

#[test]
fn other_servers_are_recognised() {
    let listener = TcpListener::bind(loopback()).unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
            let _ = stream.read_to_end(&mut Vec::new());
        });
        assert_says!(refusal(port, identity(0, 1), LONG), "launch: rank 0 … not a Fulgurite …");
    });
    drop(listener);
    assert_says!(
        refusal(port, identity(1, 2), Duration::from_millis(30)),
        "launch: rank 1 … no store answered within 30ms … MASTER_ADDR and MASTER_PORT …"
    );
}

#[test]
fn taken_port_is_named() {
    let taken = server(1);
    let error = StoreServer::bind(taken.address(), key(), 1, LostRankPolicy::Failed).err().unwrap();
    let error = error.to_string().replace(&taken.address().port().to_string(), "PORT");
    assert_says!(error, "launch: rank 0 cannot host … 127.0.0.1:PORT … is taken … MASTER_PORT");
}

#[test]
fn huge_world_size_is_refused() {
    let error =
        StoreServer::bind(loopback(), key(), usize::MAX, LostRankPolicy::Failed).err().unwrap();
    assert_says!(error, "launch: a job of 18446744073709551615 ranks is more than … (1048576) …");
}

#[test]
fn first_client_finds_the_values() {
    let lost = LostRankPolicy::Failed;
    let values: [(&str, &[u8]); 1] = [("told", b"by the host")];
    let server = StoreServer::bind_with_values(loopback(), key(), 1, lost, &values).unwrap();
    assert_eq!(server.value("told").unwrap(), b"by the host");
    let client = client(&server, 0, 1);
    assert_eq!(client.get("told", Duration::ZERO).unwrap(), b"by the host");
    assert!(!client.compare_set("told", None, b"by a client").unwrap());
}

#[test]
fn early_rank_waits_for_the_server() {
    let address = server(1).address();
    std::thread::scope(|scope| {
        let early = scope
            .spawn(move || TcpStore::connect("127.0.0.1", address.port(), identity(0, 1), LONG));
        let late = StoreServer::bind(address, key(), 1, LostRankPolicy::Failed);
        // Another process may have taken the port meanwhile; then the test cannot check anything.
        let Ok(_late) = late else { return };
        early.join().unwrap().unwrap().set("a", b"b").unwrap();
    });
}

/// A connection that keeps back written bytes once it is corked.
struct Corked {
    stream: TcpStream,
    corked: Arc<AtomicBool>,
    kept: Arc<Mutex<Vec<u8>>>,
}

impl Read for Corked {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        self.stream.read(out)
    }
}

impl Write for Corked {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        match self.corked.load(Ordering::SeqCst) {
            true => self.kept.lock().unwrap().write(bytes),
            false => (&self.stream).write(bytes),
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Serves one client: sends the admission and the job's failure in one write, then ends.
fn admits_and_notifies_at_once(message: &str) -> Option<(usize, String)> {
    let listener = TcpListener::bind(loopback()).unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (stream, _) = listener.accept().unwrap();
            let corked = Arc::new(AtomicBool::new(false));
            let kept = Arc::new(Mutex::default());
            let stream_of = stream.try_clone().unwrap();
            let stream = Corked { stream, corked: corked.clone(), kept: kept.clone() };
            let admit = |_: &Greeting| {
                corked.store(true, Ordering::SeqCst);
                Ok(())
            };
            assert!(handshake::accept(stream, &key(), &mut Patience::new(LONG), admit).is_some());
            let mut both = kept.lock().unwrap();
            send(&mut *both, &Reply::Failed { rank: 1, message: message.to_owned() }).unwrap();
            (&stream_of).write_all(&both).unwrap();
        });
        let store = TcpStore::connect("127.0.0.1", port, identity(0, 2), LONG).unwrap();
        store.wait_for_failure(LONG)
    })
}

#[test]
fn failure_sent_with_admission_is_known() {
    for message in ["out of data".to_owned(), "very long ".repeat(2_000)] {
        assert_eq!(admits_and_notifies_at_once(&message), Some((1, message)));
    }
}

#[test]
fn failure_prevents_the_start() {
    let server = server(2);
    let (a, b) = (client(&server, 0, 2), client(&server, 1, 2));
    b.report_failure("out of data").unwrap();
    let expected = (1, "out of data".to_owned());
    assert_eq!(peer_failed(a.wait_for_all(LONG).unwrap_err()), expected);
}

/// Whether the server has closed `stream`.
fn is_closed(mut stream: &TcpStream) -> bool {
    stream.set_read_timeout(Some(LONG)).unwrap();
    matches!(stream.read(&mut [0; 64]), Ok(0) | Err(_))
}

#[test]
fn idle_strangers_are_evicted() {
    let server = server(2);
    let open: Vec<_> = (0..200).map(|_| TcpStream::connect(server.address()).unwrap()).collect();
    let store = client(&server, 0, 2);
    store.set("a", b"b").unwrap();
    assert!(is_closed(&open[0]), "the oldest had to go");
    let other = client(&server, 1, 2);
    other.wait_for_all(LONG).unwrap();
    assert_eq!(other.get("a", Duration::ZERO).unwrap(), b"b");
    assert_eq!(server.failures(), []);
}

#[test]
fn slow_handshake_times_out() {
    let server = server(1);
    // A byte now and then does not keep a handshake alive.
    let stream = TcpStream::connect(server.address()).unwrap();
    std::thread::scope(|scope| {
        let writer = stream.try_clone().unwrap();
        scope.spawn(move || {
            while (&writer).write_all(&[0]).is_ok() {
                std::thread::sleep(Duration::from_millis(200));
            }
        });
        assert!(is_closed(&stream));
        let _ = stream.shutdown(std::net::Shutdown::Both);
    });
}

#[test]
fn total_value_size_is_bounded() {
    let server = server(1);
    let store = client(&server, 0, 1);
    let value = vec![0; 15 << 20];
    let mut kept = 0;
    let error = loop {
        match store.set(&format!("key{kept}"), &value) {
            Ok(()) => kept += 1,
            Err(error) => break error,
        }
        assert!(kept < 100);
    };
    let port = server.address().port().to_string();
    assert_says!(error.to_string().replace(&port, "PORT"), "launch: rank 0 … no room … `key17` …");
    assert_eq!(kept, 17);
    // A replaced value frees its room, and a failed write leaves the value in place.
    store.set("key0", b"").unwrap();
    store.set("another", &value).unwrap();
    assert_eq!(store.get("key1", Duration::ZERO).unwrap(), value);
    let error = store.set("huge", &vec![0; 17 << 20]).unwrap_err();
    assert_says!(error.to_string().replace(&port, "PORT"), "launch: rank 0 … 17825802 … large …");
}
