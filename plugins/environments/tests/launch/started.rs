//! Ranks started from outside, as by `torchrun`.

use std::net::TcpListener;

use fulgurite_test_message::assert_says;
use rustix::process::{Signal, kill_process};

use crate::run::{DEVICES, Ended, Run, TIMEOUT_MS, pid};

pub(crate) const TESTS: &[(&str, fn())] = &[
    ("started::ranks_know_who_they_are", ranks_know_who_they_are),
    ("started::a_single_rank_opens_no_socket", a_single_rank_opens_no_socket),
    ("started::an_error_reaches_all_ranks", an_error_reaches_all_ranks),
    ("started::a_panic_reaches_all_ranks", a_panic_reaches_all_ranks),
    ("started::a_killed_rank_reaches_all_ranks", a_killed_rank_reaches_all_ranks),
    ("started::a_killed_host_reaches_all_ranks", a_killed_host_reaches_all_ranks),
    ("started::a_rank_may_finish_early", a_rank_may_finish_early),
    ("started::ctrl_c_lets_ranks_finish", ctrl_c_lets_ranks_finish),
    ("started::a_signal_while_the_job_starts_ends_it", a_signal_while_the_job_starts_ends_it),
    ("started::a_signal_ends_the_wait_for_ranks", a_signal_ends_the_wait_for_ranks),
    ("started::a_taken_port_is_named", a_taken_port_is_named),
    ("started::ranks_that_do_not_come_are_named", ranks_that_do_not_come_are_named),
    ("started::a_job_without_a_key_is_warned", a_job_without_a_key_is_warned),
    ("started::a_rank_with_another_key_is_refused", a_rank_with_another_key_is_refused),
    ("started::rank_0_listens_on_the_main_address", rank_0_listens_on_the_main_address),
    ("started::foreign_text_does_not_steer_the_terminal", foreign_text_does_not_steer_the_terminal),
    ("started::wrong_variables_are_named", wrong_variables_are_named),
    ("started::a_rank_of_a_dead_supervisor_ends", a_rank_of_a_dead_supervisor_ends),
];

/// The variable with a job's secret.
pub(crate) const JOB_KEY: &str = "FULGURITE_JOB_KEY";

/// Returns a port that is free now.
pub(crate) fn free_port() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port().to_string()
}

fn rank(part: &str, rank: usize, port: &str, more: &[(&str, &str)]) -> Run {
    let key = (JOB_KEY, "0123456789abcdef0123456789abcdef");
    rank_without_key(part, rank, port, &[&[key], more].concat())
}

fn rank_without_key(part: &str, rank: usize, port: &str, more: &[(&str, &str)]) -> Run {
    let rank = rank.to_string();
    let variables = [
        ("RANK", &*rank),
        ("WORLD_SIZE", "2"),
        ("LOCAL_RANK", &*rank),
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", port),
    ];
    Run::start(part, &[&variables[..], more].concat())
}

fn start(part: &str) -> [Run; 2] {
    let port = free_port();
    // The rank that hosts the store starts last.
    let one = rank(part, 1, &port, &[]);
    [rank(part, 0, &port, &[]), one]
}

pub(crate) fn wait(runs: [Run; 2]) -> [Ended; 2] {
    runs.map(Run::wait)
}

fn ranks_know_who_they_are() {
    for (i, ended) in wait(start("identity")).into_iter().enumerate() {
        assert_eq!((ended.code, ended.stderr.as_str()), (0, ""));
        let rank: serde_json::Value = serde_json::from_str(&ended.stdout[0]).unwrap();
        assert_eq!((&rank["rank"], &rank["local_rank"]), (&i.into(), &i.into()));
        assert_eq!((&rank["world_size"], &rank["local_world_size"]), (&2.into(), &2.into()));
        assert_eq!(rank["environment"], "torchelastic");
    }
}

fn a_single_rank_opens_no_socket() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let ended = rank("identity", 0, &port, &[("WORLD_SIZE", "1")]).wait();
    assert_eq!((ended.code, ended.stderr.as_str()), (0, ""));
}

fn an_error_reaches_all_ranks() {
    let [zero, one] = wait(start("error"));
    assert_says!(one.stderr, "error: rank 1 failed: the disk is full");
    assert_says!(zero.stderr, "error: rank 0 stops, because rank 1 failed: the disk is full");
    assert_eq!((zero.code, one.code), (79, 1));
}

// checklist: composer: a rank out of memory must not hang the others
fn a_panic_reaches_all_ranks() {
    let [zero, one] = wait(start("panic"));
    assert!(one.stderr.starts_with("error: rank 1 failed: panicked at "), "{}", one.stderr);
    assert!(zero.stderr.contains("index 7 is out of range"), "{}", zero.stderr);
    assert_eq!((zero.code, one.code), (79, 101));
}

fn a_killed_rank_reaches_all_ranks() {
    let [zero, one] = start("wait");
    zero.ranks(1);
    kill_process(pid(&one.ranks(1)[0]), Signal::KILL).unwrap();
    let [zero, one] = wait([zero, one]);
    assert_says!(zero.stderr, "error: rank 0 stops, because rank 1 failed … without a word …");
    assert_eq!((zero.code, one.code), (79, 137));
}

fn a_killed_host_reaches_all_ranks() {
    let [zero, one] = start("wait");
    one.ranks(1);
    kill_process(pid(&zero.ranks(1)[0]), Signal::KILL).unwrap();
    let [zero, one] = wait([zero, one]);
    assert_says!(one.stderr, "error: rank 1 stops, because rank 0 failed … without a word … store");
    assert_eq!((zero.code, one.code), (137, 79));
}

fn a_rank_may_finish_early() {
    for ended in wait(start("finish_early")) {
        assert_eq!((ended.code, ended.stderr.as_str()), (0, ""));
    }
}

fn ctrl_c_lets_ranks_finish() {
    let runs = start("interrupt");
    for run in &runs {
        run.ranks(1);
        // Once from the terminal, once forwarded.
        run.signal(Signal::INT);
        run.signal(Signal::INT);
    }
    let [zero, one] = wait(runs);
    assert_eq!((zero.code, one.code), (130, 130));
    assert_eq!((zero.stderr.as_str(), one.stderr.as_str()), ("interrupted\n", ""));
}

fn a_signal_while_the_job_starts_ends_it() {
    for asked in [0, 1] {
        let runs = start("starts");
        let ranks = runs.each_ref().map(|run| run.ranks(1).remove(0));
        kill_process(pid(&ranks[asked]), Signal::TERM).unwrap();
        let [zero, one] = wait(runs);
        assert_eq!((zero.code, one.code), (143, 143));
        assert_eq!((zero.stderr.as_str(), one.stderr.as_str()), ("interrupted\n", ""));
    }
}

fn a_signal_ends_the_wait_for_ranks() {
    // Rank 0 waits for rank 1, and rank 1 for the store.
    for rank_number in [0, 1] {
        let run = rank("waits_for_rank_2", rank_number, &free_port(), &[]);
        run.ranks(1);
        // The process sets the handler when it waits.
        run.until_it_handles(Signal::TERM);
        run.signal(Signal::TERM);
        let ended = run.wait();
        assert_eq!((ended.code, ended.stderr.as_str()), (143, "interrupted\n"));
    }
}

fn a_taken_port_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let ended = rank("identity", 0, &port, &[]).wait();
    assert_says!(ended.stderr.replace(&port, "PORT"), "error: launch: … 127.0.0.1:PORT … taken …");
    assert_eq!(ended.code, 1);
}

fn ranks_that_do_not_come_are_named() {
    let port = free_port();
    let hurry = (TIMEOUT_MS, "200");
    let ended = rank("identity", 0, &port, &[("WORLD_SIZE", "3"), hurry]).wait();
    assert_says!(ended.stderr, "error: rank 0 failed: launch: after 200ms … of 3 … come: 1, 2 …");
    assert_eq!(ended.code, 1);
    let ended = rank("identity", 1, &port, &[hurry]).wait();
    assert_says!(ended.stderr.replace(&port, "PORT"), "error: launch: rank 1 … no store … 200ms …");
    assert_eq!(ended.code, 1);
}

fn a_job_without_a_key_is_warned() {
    let port = free_port();
    let one = rank_without_key("identity", 1, &port, &[]);
    let [zero, one] = wait([rank_without_key("identity", 0, &port, &[]), one]);
    assert_says!(zero.warnings.replace(&port, "PORT"), "warning … strangers … FULGURITE_JOB_KEY …");
    assert_eq!((zero.code, one.code, one.warnings.as_str()), (0, 0, ""));
}

fn a_rank_with_another_key_is_refused() {
    let port = free_port();
    let zero = rank("identity", 0, &port, &[(TIMEOUT_MS, "20000")]);
    let stranger = rank("identity", 1, &port, &[(JOB_KEY, "another secret of some length")]).wait();
    assert_says!(stranger.stderr.replace(&port, "PORT"), "error: launch: rank 1 … another job …");
    assert_eq!(stranger.code, 1);
    // It did not take the place of the rank that arrives now.
    let [zero, one] = wait([zero, rank("identity", 1, &port, &[])]);
    assert_eq!((zero.code, one.code), (0, 0));
}

fn rank_0_listens_on_the_main_address() {
    let port = free_port();
    let error = |address: &str, more: &[(&str, &str)]| {
        let variables = [&[("MASTER_ADDR", address), (TIMEOUT_MS, "200")], more].concat();
        let ended = rank("identity", 0, &port, &variables).wait();
        assert_eq!(ended.code, 1);
        ended.stderr.replace(&port, "PORT")
    };
    assert_says!(error("192.0.2.1", &[]), "error: launch: rank 0 … 192.0.2.1:PORT … no address …");
    assert_says!(
        error("192.0.2.1", &[("FULGURITE_STORE_ADDRESS", "all")]),
        "error: launch: … FULGURITE_STORE_ADDRESS is `all` … IP address … 0.0.0.0"
    );
    // If the main address is not its own, rank 0 listens where it is told to.
    assert_says!(
        error("192.0.2.1", &[("FULGURITE_STORE_ADDRESS", "127.0.0.1")]),
        "error: rank 0 failed: launch: after 200ms … of 2 ranks have not come: 1. …"
    );
    // A rank 0 that listens on one address is not found on another address of the same host.
    let zero = rank("identity", 0, &port, &[("MASTER_ADDR", "127.0.0.2")]);
    let elsewhere =
        rank("identity", 1, &port, &[("MASTER_ADDR", "127.0.0.1"), (TIMEOUT_MS, "200")]);
    assert!(elsewhere.wait().stderr.contains("Connection refused"));
    let [zero, one] = wait([zero, rank("identity", 1, &port, &[("MASTER_ADDR", "127.0.0.2")])]);
    assert_eq!((zero.code, one.code), (0, 0));
}

fn foreign_text_does_not_steer_the_terminal() {
    let [zero, one] = wait(start("forged_error"));
    insta::assert_snapshot!(zero.stderr, @r#"
    error: rank 0 stops, because rank 1 failed: \u{1b}[2Kall is well\r
      error: rank 0 failed: not me
    "#);
    insta::assert_snapshot!(one.stderr, @r#"
    error: rank 1 failed: \u{1b}[2Kall is well\r
      error: rank 0 failed: not me
    "#);
    assert_eq!((zero.code, one.code), (79, 1));
}

fn wrong_variables_are_named() {
    let stderr = |variables: &[(&str, &str)]| {
        let ended = Run::start("identity", variables).wait();
        assert_eq!((ended.code, ended.stdout.len()), (1, 0));
        ended.stderr
    };
    assert_says!(stderr(&[("RANK", "0")]), "error: launch: … variable WORLD_SIZE … is not set …");
    let all = [("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "a"), ("RANK", "zero")];
    assert_says!(stderr(&all), "error: launch: … variable RANK is `zero` … rank, a number");
    let four = [
        ("RANK", "0"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_RANK", "0"),
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", "29500"),
        (DEVICES, "2"),
    ];
    assert_says!(stderr(&four), "error: launch: trainer.devices = 2 … 2 ranks … WORLD_SIZE = 4 …");
    assert_says!(stderr(&[(DEVICES, "0")]), "error: launch: trainer.devices … must be 1 or more");
}

fn a_rank_of_a_dead_supervisor_ends() {
    let port = free_port();
    let variables = [
        ("FULGURITE_SUPERVISOR", "999999999"),
        ("FULGURITE_START_TIME", "0"),
        ("FULGURITE_GENERATION", "0"),
        ("FULGURITE_FIRST_WORLD_SIZE", "2"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("GROUP_RANK", "0"),
    ];
    let ended = rank("identity", 0, &port, &variables).wait();
    assert_says!(ended.stderr, "error: launch: FULGURITE_SUPERVISOR … 999999999 … its parent …");
    assert_eq!(ended.code, 1);
}
