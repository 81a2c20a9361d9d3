//! Strangers on the host connect to a job's store and send anything, and try to read and signal its
//! processes. The job must train on undisturbed.

use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::unix::process::CommandExt;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fastrand::Rng;
use rustix::process::{Pid, Signal, geteuid};

use super::trials::{Trial, trials};
use crate::program::{Running, Scratch};

/// A user unrelated to the job.
const NOBODY: u32 = 65534;
/// More memory than the store needs for its ranks, far less than strangers send.
const MORE_MEMORY_KIB: u64 = 64 << 10;

/// An attack: its name and function.
type Scenario = (&'static str, fn(&Job, &mut Rng));

/// A running job from a stranger's point of view.
struct Job<'a> {
    running: &'a Running,
    store: SocketAddr,
}

impl Job<'_> {
    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.store).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        stream
    }

    /// Sends `bytes`, and reads until the server closes the connection.
    fn say(&self, bytes: &[u8]) -> Vec<u8> {
        let mut stream = self.connect();
        // The server may close the connection before it has read everything.
        let _ = stream.write_all(bytes);
        let _ = stream.shutdown(Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        answer
    }

    /// Runs a command as another user and asserts that it is denied. Requires root.
    fn denied(&self, command: &str, path: &str) {
        if let Some(output) = as_nobody(command, &[path]) {
            assert!(!output.status.success(), "{command} {path}: {output:?}");
            assert!(output.stdout.is_empty(), "{command} {path} shows {output:?}");
        }
    }

    fn processes(&self) -> [Pid; 3] {
        [self.running.pid(), self.running.rank(0), self.running.rank(1)]
    }
}

fn as_nobody(command: &str, arguments: &[&str]) -> Option<Output> {
    let mut command = Command::new(command);
    command.args(arguments).uid(NOBODY).gid(NOBODY).current_dir("/");
    geteuid().is_root().then(|| command.output().unwrap())
}

fn frame(body: &[u8]) -> Vec<u8> {
    [&(body.len() as u32).to_le_bytes(), body].concat()
}

/// The first frame of a client.
fn hello(version: u16, nonce: [u8; 16]) -> Vec<u8> {
    frame(&[&b"FULGSTOR"[..], &version.to_le_bytes(), &nonce].concat())
}

/// The second frame: a proof, and the client's claims (rank, world size, purpose).
fn greeting(proof: &[u8], rank: u8, purpose: u8) -> Vec<u8> {
    frame(&[proof, &[rank, 2, purpose]].concat())
}

fn random(rng: &mut Rng, len: usize) -> Vec<u8> {
    (0..len).map(|_| rng.u8(..)).collect()
}

/// Protocol version, and length of a proof.
const VERSION: u16 = 4;
const PROOF: usize = 32;

/// Shakes hands with a wrong proof. The server must send only its hello and a refusal.
fn enter(job: &Job, proof: &[u8], rank: u8, purpose: u8, then: &[u8]) {
    let bytes = [hello(VERSION, [7; 16]), greeting(proof, rank, purpose), then.to_vec()].concat();
    let answer = job.say(&bytes);
    let own_hello = 4 + 8 + 2 + 16;
    assert_eq!(answer.len(), own_hello + 4, "{answer:?}");
    assert_eq!(answer[own_hello..], [0; 4], "an empty frame");
}

/// A request in the protocol's format: its number and its fields.
fn request(number: u8, fields: &[&[u8]]) -> Vec<u8> {
    let mut body = vec![number];
    for field in fields {
        body.push(field.len() as u8);
        body.extend(*field);
    }
    frame(&body)
}

const SCENARIOS: &[Scenario] = &[
    ("comes and goes", |job, _| (0..100).for_each(|_| drop(job.connect()))),
    ("comes and says that it goes", |job, _| assert!(job.say(b"").is_empty())),
    ("stays and says nothing", |job, _| {
        let open: Vec<_> = (0..300).map(|_| job.connect()).collect();
        job.running.reach_next();
        drop(open);
    }),
    ("says anything", |job, rng| {
        for _ in 0..50 {
            let len = rng.usize(..600);
            assert!(job.say(&random(rng, len)).is_empty());
        }
    }),
    ("is a browser", |job, _| {
        assert!(job.say(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").is_empty())
    }),
    ("speaks TLS", |job, rng| {
        let hello = [&[0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3][..], &random(rng, 200)].concat();
        assert!(job.say(&hello).is_empty());
    }),
    ("claims a frame of 4 GiB", |job, _| assert!(job.say(&[0xff; 4]).is_empty())),
    ("claims the longest frame that ranks may send", |job, _| {
        assert!(job.say(&(16_u32 << 20).to_le_bytes()).is_empty());
    }),
    ("sends frames of nothing", |job, _| assert!(job.say(&[0; 40_000]).is_empty())),
    ("sends 64 MiB", |job, rng| {
        let some = random(rng, 1 << 20);
        let mut stream = job.connect();
        let _ = (0..64).try_for_each(|_| stream.write_all(&some));
    }),
    ("sends 64 MiB after a hello", |job, rng| {
        let some = random(rng, 1 << 20);
        let mut stream = job.connect();
        let _ = stream.write_all(&hello(VERSION, [1; 16]));
        let _ = (0..64).try_for_each(|_| stream.write_all(&some));
    }),
    ("says hello and no more", |job, _| {
        let open: Vec<_> = (0..100)
            .map(|_| {
                let mut stream = job.connect();
                let _ = stream.write_all(&hello(VERSION, [2; 16]));
                stream
            })
            .collect();
        job.running.reach_next();
        drop(open);
    }),
    ("says hello twice", |job, _| {
        job.say(&[hello(VERSION, [3; 16]), hello(VERSION, [3; 16])].concat());
    }),
    ("says hello in another version", |job, rng| {
        job.say(&hello(rng.u16(4..), [4; 16]));
    }),
    ("speaks the protocol that told the job's id", |job, _| {
        let identity = [&[5][..], b"a job", &[0, 2, 1]].concat();
        let old = frame(&[&b"FULGSTOR"[..], &2_u16.to_le_bytes(), &identity].concat());
        let answer = job.say(&old);
        assert!(answer.len() <= 30, "told more than a number: {answer:?}");
    }),
    ("says hello slowly", |job, _| {
        let mut stream = job.connect();
        for byte in hello(VERSION, [5; 16]) {
            if stream.write_all(&[byte]).is_err() {
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }),
    ("cuts its hello", |job, rng| {
        let whole = hello(VERSION, [6; 16]);
        assert!(job.say(&whole[..rng.usize(1..whole.len())]).is_empty());
    }),
    ("wants to be rank 0, with no proof", |job, _| enter(job, &[], 0, 1, &[])),
    ("wants to be rank 1, with a proof of zeros", |job, _| enter(job, &[0; PROOF], 1, 1, &[])),
    ("wants to be rank 1, with any proof", |job, rng| {
        let proof = random(rng, PROOF);
        enter(job, &proof, 1, 1, &[]);
    }),
    ("wants to be rank 200", |job, rng| {
        let proof = random(rng, PROOF);
        enter(job, &proof, 200, 1, &[]);
    }),
    ("wants to ask as rank 0", |job, rng| {
        let proof = random(rng, PROOF);
        enter(job, &proof, 0, 0, &[]);
    }),
    ("sets a value before it is let in", |job, rng| {
        let set = request(0, &[b"process_group/shm/world1", b"mine"]);
        let proof = random(rng, PROOF);
        enter(job, &proof, 0, 0, &set);
    }),
    ("reads a value before it is let in", |job, rng| {
        let get = request(1, &[b"process_group/shm/world1"]);
        let proof = random(rng, PROOF);
        enter(job, &proof, 1, 0, &get);
    }),
    ("ends the job before it is let in, with a forged message", |job, rng| {
        let message = b"\x1b[2K\rerror: rank 0 failed: no more money";
        let fail = request(3, &[message]);
        let proof = random(rng, PROOF);
        enter(job, &proof, 1, 1, &fail);
    }),
    ("tries 200 proofs", |job, rng| {
        for _ in 0..200 {
            let proof = random(rng, PROOF);
            enter(job, &proof, 1, 0, &[]);
        }
    }),
    ("resets its connections", |job, _| {
        for _ in 0..50 {
            let mut stream = job.connect();
            let _ = stream.write_all(&hello(VERSION, [8; 16]));
            // Closing a socket with unread bytes resets the connection.
            std::thread::yield_now();
        }
    }),
    ("floods the store while a rank comes", |job, _| {
        let (mut open, steps) = (Vec::new(), job.running.steps());
        while job.running.steps() < steps + 3 && open.len() < 5_000 {
            open.push(TcpStream::connect_timeout(&job.store, Duration::from_secs(5)));
            if open.len() % 100 == 0 {
                open.clear();
            }
        }
    }),
    ("looks for the store on other addresses", |job, _| {
        for address in ["127.0.0.2", "::1"] {
            let other = SocketAddr::new(address.parse().unwrap(), job.store.port());
            assert!(TcpStream::connect_timeout(&other, Duration::from_secs(5)).is_err());
        }
    }),
    ("looks for the key among arguments", |job, _| {
        let key = job.running.variable("FULGURITE_JOB_KEY");
        assert_eq!(key.len(), 32);
        for process in job.processes() {
            let arguments = fs::read(proc(process, "cmdline")).unwrap();
            assert!(!String::from_utf8_lossy(&arguments).contains(&key));
        }
    }),
    ("reads the environment", |job, _| {
        job.processes().iter().for_each(|&process| job.denied("cat", &proc(process, "environ")));
    }),
    ("reads the memory", |job, _| {
        for process in job.processes() {
            job.denied("cat", &proc(process, "maps"));
            job.denied("cat", &proc(process, "mem"));
        }
    }),
    ("opens the shared memory", |job, _| {
        for process in job.processes() {
            for entry in fs::read_dir(proc(process, "fd")).unwrap().flatten() {
                let path = entry.path();
                let target = fs::read_link(&path).unwrap_or_default();
                if target.to_string_lossy().contains("memfd:fulgurite") {
                    job.denied("cat", path.to_str().unwrap());
                }
            }
        }
    }),
    ("signals the processes", |job, _| {
        for process in job.processes() {
            for signal in ["TERM", "USR1", "STOP", "KILL"] {
                let pid = process.as_raw_nonzero().to_string();
                let killed = as_nobody("kill", &["-s", signal, &pid]);
                assert!(killed.is_none_or(|output| !output.status.success()));
            }
        }
    }),
];

fn proc(process: Pid, file: &str) -> String {
    format!("/proc/{}/{file}", process.as_raw_nonzero())
}

/// Resident memory of a process in KiB.
fn resident_kib(process: Pid) -> u64 {
    let status = fs::read_to_string(proc(process, "status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn strangers_do_not_disturb_a_job() {
    let scratch = Scratch::with_tokens();
    let job = scratch.small().on("fsdp", 2, 2).set(&[
        "trainer.max_steps=100000000",
        "scheduler=constant",
        "trainer.log_every_n_steps=1",
    ]);
    if !geteuid().is_root() {
        eprintln!("not tested: what other users can do, for only root can become one");
    }
    trials(1, |Trial { rng, .. }| {
        let running = job.start();
        running.reach(2);
        let store = running.store();
        let before = resident_kib(running.pid());

        let mut scenarios: Vec<&Scenario> = SCENARIOS.iter().collect();
        rng.shuffle(&mut scenarios);
        for (name, act) in scenarios {
            eprintln!("a stranger {name}");
            act(&Job { running: &running, store }, rng);
            running.reach_next();
        }
        let more = resident_kib(running.pid()).saturating_sub(before);
        assert!(more < MORE_MEMORY_KIB, "the store's process has grown by {more} KiB");

        running.signal(Signal::TERM);
        let run = running.wait();
        assert_eq!(run.code(), Some(143), "{}", run.stderr);
        assert!(!run.stderr.contains("error"), "{}", run.stderr);
        let attacked = run.losses();
        // The same number of steps without strangers has the same losses.
        let steps = format!("trainer.max_steps={}", attacked.len());
        assert_eq!(job.clone().set(&[&steps]).succeed().losses(), attacked);
    });
    eprintln!("{} scenarios", SCENARIOS.len());
}

/// The port on which a process listens; waits until it does.
fn listens_on(running: &Running) -> u16 {
    running.until("the store", |running| {
        let held = fs::read_dir(proc(running.pid(), "fd")).ok()?.flatten();
        let held: Vec<String> = held
            .filter_map(|entry| Some(fs::read_link(entry.path()).ok()?.to_str()?.to_owned()))
            .collect();
        // `slot: address:port peer state … inode`; state 0A listens.
        let sockets = fs::read_to_string("/proc/net/tcp").ok()?;
        sockets.lines().skip(1).find_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let own = held.contains(&format!("socket:[{}]", fields[9])) && fields[3] == "0A";
            let port = fields[1].rsplit(':').next().filter(|_| own)?;
            u16::from_str_radix(port, 16).ok()
        })
    })
}

#[test]
fn early_strangers_do_not_keep_ranks_out() {
    let scratch = Scratch::with_tokens();
    let job = scratch.small().on("ddp", 4, 1);
    let expected = job.succeed().losses();
    trials(2, |_| {
        let running = job.start();
        let store = SocketAddr::from(([127, 0, 0, 1], listens_on(&running)));
        let idle: Vec<_> = (0..400)
            .map_while(|_| TcpStream::connect_timeout(&store, Duration::from_secs(1)).ok())
            .collect();
        let run = running.wait();
        drop(idle);
        assert!(run.status.success(), "{}", run.stderr);
        assert_eq!(run.losses(), expected);
    });
}

#[test]
fn strangers_do_not_keep_ranks_out() {
    let scratch = Scratch::with_tokens();
    let job = scratch.small().on("ddp", 3, 2);
    let expected = job.succeed().losses();
    trials(1, |_| {
        let running = job.start();
        let store = running.store();
        let over = AtomicBool::new(false);
        let run = std::thread::scope(|scope| {
            for holds in [0, 30, 100, 300] {
                let over = &over;
                scope.spawn(move || {
                    let mut open = std::collections::VecDeque::new();
                    while !over.load(Ordering::Relaxed) {
                        open.push_back(TcpStream::connect_timeout(&store, Duration::from_secs(1)));
                        if open.len() > holds {
                            open.pop_front();
                        }
                    }
                });
            }
            let run = running.wait();
            over.store(true, Ordering::Relaxed);
            run
        });
        assert!(run.status.success(), "{}", run.stderr);
        assert_eq!(run.losses(), expected);
    });
}
