//! Ranks that the program starts itself.

use fulgurite_test_message::assert_says;
use rustix::process::{Signal, kill_process};

use crate::run::{DEVICES, Ended, Run, gone, pid};

pub(crate) const TESTS: &[(&str, fn())] = &[
    ("supervised::one_rank_is_this_process", one_rank_is_this_process),
    ("supervised::ranks_know_who_they_are", ranks_know_who_they_are),
    ("supervised::more_ranks_than_cores_are_warned_of", more_ranks_than_cores_are_warned_of),
    ("supervised::an_error_is_printed_once", an_error_is_printed_once),
    ("supervised::the_same_error_everywhere_is_printed_once", the_same_error_everywhere),
    ("supervised::a_panic_is_an_error", a_panic_is_an_error),
    ("supervised::a_panic_of_a_thread_is_an_error", a_panic_of_a_thread_is_an_error),
    ("supervised::an_exit_code_is_passed_on", an_exit_code_is_passed_on),
    ("supervised::symptoms_are_not_printed", symptoms_are_not_printed),
    ("supervised::a_killed_rank_ends_the_others", a_killed_rank_ends_the_others),
    ("supervised::a_killed_supervisor_takes_its_ranks_along", a_killed_supervisor),
    ("supervised::ranks_that_do_not_stop_are_killed", ranks_that_do_not_stop_are_killed),
    ("supervised::ctrl_c_lets_ranks_finish", ctrl_c_lets_ranks_finish),
    ("supervised::a_second_ctrl_c_kills", a_second_ctrl_c_kills),
    ("supervised::a_signal_before_all_have_joined_ends_the_job", a_signal_before_all_have_joined),
    ("supervised::a_signal_while_the_job_starts_ends_it", a_signal_while_the_job_starts_ends_it),
    ("supervised::the_exit_code_is_what_the_ranks_agreed_on", the_exit_code_is_what_was_agreed_on),
    ("supervised::a_hang_up_comes_twice_and_counts_once", a_hang_up_counts_once),
    ("supervised::what_ranks_leave_is_ended", what_ranks_leave_is_ended),
    ("supervised::the_cause_is_waited_for", the_cause_is_waited_for),
    ("supervised::a_rank_may_finish_early", a_rank_may_finish_early),
    ("supervised::a_program_may_launch_twice", a_program_may_launch_twice),
];

fn run(part: &str, devices: &str) -> Run {
    Run::start(part, &[(DEVICES, devices)])
}

// checklist: torchtune: is_distributed
// checklist: Lightning: launcher: own processes, or started externally
fn one_rank_is_this_process() {
    let ended = run("error_everywhere", "1").wait();
    assert_says!(ended.stderr, "error: no such file: corpus.txt");
    assert_eq!((ended.code, ended.stdout.len()), (1, 1));
    let rank: serde_json::Value = serde_json::from_str(&ended.stdout[0]).unwrap();
    assert_eq!((&rank["rank"], &rank["world_size"]), (&0.into(), &1.into()));
    assert_eq!(rank["variables"]["RANK"], "", "nobody set it");
    assert_eq!(rank["environment"], "local");

    let alone = run("interrupt", "1");
    alone.ranks(1);
    alone.signal(Signal::INT);
    let Ended { code, stderr, .. } = alone.wait();
    assert_eq!((code, stderr.as_str()), (130, "interrupted\n"));
    let alone = run("deaf", "1");
    alone.ranks(1);
    alone.signal(Signal::INT);
    alone.signal(Signal::TERM);
    let code = alone.wait().code;
    assert!(code == 130 || code == 143, "the second signal ends it: {code}");
}

// checklist: torchtune: is_distributed
// checklist: torchtune: set_torch_num_threads
// checklist: torchtune: get_world_size_and_rank
// checklist: Lightning: launcher: own processes, or started externally
fn ranks_know_who_they_are() {
    let run = run("identity", "3");
    let ranks = run.ranks(3);
    let Ended { code, stdout, stderr, .. } = run.wait();
    assert_eq!((code, stdout.len(), stderr.as_str()), (0, 0, ""));
    for (i, rank) in ranks.iter().enumerate() {
        let text = i.to_string();
        assert_eq!((&rank["rank"], &rank["local_rank"]), (&i.into(), &i.into()));
        assert_eq!((&rank["world_size"], &rank["local_world_size"]), (&3.into(), &3.into()));
        assert_eq!(rank["node_rank"], 0);
        assert_eq!(rank["started"], ranks[0]["started"], "all name the supervisor's start");
        assert_eq!(rank["arguments"], serde_json::json!(["--flag", "a b"]));
        let variables = &rank["variables"];
        assert_eq!(variables["RANK"], *text);
        assert_eq!(variables["LOCAL_RANK"], *text);
        assert_eq!(variables["WORLD_SIZE"], "3");
        assert_eq!(variables["LOCAL_WORLD_SIZE"], "3");
        assert_eq!(variables["MASTER_ADDR"], "127.0.0.1");
        let threads = std::thread::available_parallelism().unwrap().get() / 3;
        assert_eq!(variables["RAYON_NUM_THREADS"], threads.max(1).to_string());
    }
    assert_ne!(ranks[0]["pid"], ranks[1]["pid"]);

    let threads = Run::start("identity", &[(DEVICES, "2"), ("RAYON_NUM_THREADS", "7")]);
    assert_eq!(threads.ranks(2)[1]["variables"]["RAYON_NUM_THREADS"], "7", "the user's choice");
}

fn more_ranks_than_cores_are_warned_of() {
    let ended = run("crowded", "2").wait();
    assert_says!(ended.warnings, "warning: 2 ranks share 1 core … wait for each other");
    assert_eq!(ended.code, 0);
}

fn an_error_is_printed_once() {
    let ended = run("error", "2").wait();
    assert_says!(ended.stderr, "error: rank 1 failed: the disk is full");
    assert_eq!(ended.code, 1);
}

fn the_same_error_everywhere() {
    let ended = run("error_everywhere", "2").wait();
    let any = ended.stderr.replace("rank 0", "rank R").replace("rank 1", "rank R");
    assert_says!(any, "error: rank R failed: no such file: corpus.txt");
    assert_eq!(ended.code, 1);
}

/// Replaces the source location by `PLACE`.
fn without_place(stderr: &str) -> String {
    let (before, after) = stderr.split_once(" at ").unwrap();
    let (place, after) = after.split_once(": ").unwrap();
    assert!(place.contains("program.rs:"), "{place}");
    format!("{before} at PLACE: {after}")
}

fn a_panic_is_an_error() {
    let ended = run("panic", "2").wait();
    assert_says!(without_place(&ended.stderr), "error: rank 1 failed: panicked … index 7 …");
    assert_eq!(ended.code, 101);
}

fn a_panic_of_a_thread_is_an_error() {
    let ended = run("panic_in_thread", "2").wait();
    assert_says!(without_place(&ended.stderr), "error: rank 1 failed: … `loader` … bad record");
    assert_eq!(ended.code, 101);
}

fn an_exit_code_is_passed_on() {
    let ended = run("exit", "2").wait();
    assert_says!(ended.stderr, "error: rank 1 ended with exit code 7");
    assert_eq!(ended.code, 7);
}

fn symptoms_are_not_printed() {
    let ended = run("symptom", "2").wait();
    assert_says!(ended.stderr, "error: rank 1 failed: the cause");
    assert_eq!(ended.code, 1);
    let ended = run("collective", "2").wait();
    assert_says!(ended.stderr, "error: rank 1 failed: the cause");
    assert_eq!(ended.code, 1);
}

/// Sends a signal to rank 1. Returns the job's end, after all its ranks are gone.
fn ended_by(signal: Signal, part: &str, size: usize) -> Ended {
    let run = run(part, &size.to_string());
    let ranks = run.ranks(size);
    kill_process(pid(&ranks[1]), signal).unwrap();
    let ended = run.wait();
    ranks.iter().for_each(gone);
    ended
}

fn a_killed_rank_ends_the_others() {
    let ended = ended_by(Signal::KILL, "wait", 2);
    assert_says!(ended.stderr, "error: rank 1 was killed by signal 9 (SIGKILL)");
    assert_eq!(ended.code, 137);
}

fn a_killed_supervisor() {
    for part in ["wait", "deaf"] {
        let run = run(part, "2");
        let ranks = run.ranks(2);
        run.signal(Signal::KILL);
        ranks.iter().for_each(gone);
        assert_eq!(run.wait().code, 137);
    }
}

fn ranks_that_do_not_stop_are_killed() {
    let run = run("stuck", "2");
    let ranks = run.ranks(2);
    let ended = run.wait();
    assert_says!(ended.stderr, "error: rank 1 failed: the link is down");
    assert_eq!(ended.code, 1);
    ranks.iter().for_each(gone);
}

fn ctrl_c_lets_ranks_finish() {
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let run = run("interrupt", "2");
        let ranks = run.ranks(2);
        // A terminal signals every process, and the supervisor also forwards the signal.
        kill_process(pid(&ranks[0]), signal).unwrap();
        run.signal(signal);
        let mut ended = run.wait();
        ended.stdout.sort();
        assert_eq!(ended.stdout, ["rank 0 finished its step", "rank 1 finished its step"]);
        assert_says!(ended.stderr, "interrupted: … finish their step … interrupt again …");
        assert_eq!(ended.code, code);
    }
}

fn a_hang_up_counts_once() {
    let run = run("interrupt", "2");
    run.ranks(2);
    run.signal(Signal::HUP);
    run.until_stderr_has("interrupt again");
    run.signal(Signal::HUP);
    let Ended { code, stderr, stdout, .. } = run.wait();
    assert_says!(stderr, "interrupted: the ranks finish their step; interrupt again …");
    assert_eq!((code, stdout.len()), (129, 2));
}

fn what_ranks_leave_is_ended() {
    let run = run("leaves", "2");
    let left = run.ranks(2);
    let Ended { code, stderr, .. } = run.wait();
    assert_says!(stderr, "ended with the job: 2 orphans that ranks had left running");
    assert_eq!(code, 0);
    left.iter().for_each(gone);
}

fn a_second_ctrl_c_kills() {
    let run = run("deaf", "2");
    let ranks = run.ranks(2);
    run.signal(Signal::INT);
    // Two simultaneous signals count as one, so wait until the first was noticed.
    run.until_stderr_has("interrupt again to end them at once");
    run.signal(Signal::INT);
    let ended = run.wait();
    assert_eq!(ended.code, 130);
    assert_eq!(ended.stderr.lines().count(), 1, "{}", ended.stderr);
    ranks.iter().for_each(gone);
}

/// Rank 0 waits for rank 1, which has not set its signal handlers yet.
fn a_signal_before_all_have_joined() {
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::USR1, 138)] {
        // To the supervisor: it forwards the signal, which ends rank 1.
        let run = run("waits_for_rank_1", "2");
        let ranks = run.ranks(2);
        run.signal(signal);
        let ended = run.wait();
        assert_says!(ended.stderr, "interrupted while the ranks start … interrupt again …");
        assert_eq!(ended.code, code);
        ranks.iter().for_each(gone);
    }
    // To one rank alone: the rank that is missing, then the rank that waits.
    for rank in [1, 0] {
        let run = run("waits_for_rank_1", "2");
        let ranks = run.ranks(2);
        kill_process(pid(&ranks[rank]), Signal::TERM).unwrap();
        let ended = run.wait();
        let stderr = ended.stderr.replace(&format!("rank {rank}"), "rank R");
        assert_says!(stderr, "interrupted: rank R … before training … signal 15 (SIGTERM)");
        assert_eq!(ended.code, 143);
        ranks.iter().for_each(gone);
    }
}

fn a_signal_while_the_job_starts_ends_it() {
    let ended = ended_by(Signal::USR1, "starts", 3);
    assert_says!(ended.stderr, "interrupted: rank 1 … before training … signal 10 (SIGUSR1)");
    assert_eq!(ended.code, 138);
}

fn the_exit_code_is_what_was_agreed_on() {
    let run = run("agrees", "2");
    let ranks = run.ranks(2);
    for rank in &ranks {
        kill_process(pid(rank), Signal::TERM).unwrap();
    }
    let ended = run.wait();
    assert_eq!((ended.code, ended.stderr.as_str()), (138, ""));
}

fn the_cause_is_waited_for() {
    let ended = run("hears_first", "2").wait();
    assert_says!(ended.stderr, "error: rank 1 failed: the cause");
    assert_eq!(ended.code, 1);
    let ended = run("hears_nothing", "2").wait();
    assert_says!(ended.stderr, "error: rank 1 failed: it left the process group");
    assert_eq!(ended.code, 1);
}

fn a_rank_may_finish_early() {
    let ended = run("finish_early", "2").wait();
    assert_eq!((ended.code, ended.stderr.as_str()), (0, ""));
}

// checklist: torchtune: init_distributed
fn a_program_may_launch_twice() {
    let run = run("twice", "2");
    let ranks = run.ranks(4);
    assert_eq!(
        ranks.iter().map(|rank| rank["rank"].as_u64().unwrap()).collect::<Vec<_>>(),
        [0, 0, 1, 1]
    );
    assert_eq!((&ranks[0]["pid"], &ranks[2]["pid"]), (&ranks[1]["pid"], &ranks[3]["pid"]));
    assert!(ranks.iter().all(|rank| rank["world_size"] == 2));
    let stderr = run.wait().stderr;
    assert_says!(
        stderr.replace("rank 0", "rank R").replace("rank 1", "rank R"),
        "error: rank R failed: launch: … job of 2 ranks … launched again as one of 9 …"
    );
}
