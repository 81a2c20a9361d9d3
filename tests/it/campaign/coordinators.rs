//! Coordinators of an elastic training that are killed one after another, at random moments. The
//! ranks are under other agents, and all of them go on.

use std::time::Duration;

use rustix::process::Signal;

use super::agents::assert_nothing_is_left;
use super::trials::{Trial, trials};
use crate::elastic_hosts::{Agents, training};
use crate::program::{Running, Scratch};

const STEPS: u64 = 6000;
/// A killed agent is back in its seat by then.
const BACK: Duration = Duration::from_secs(4);

/// Returns the number of coordinators that were killed.
fn kill_at_random(scratch: &Scratch, trial: &mut Trial) -> usize {
    let rng = &mut trial.rng;
    let mark = format!("{}-coordinators-{}", std::process::id(), trial.seed);
    let job = training(scratch, ["ddp", "fsdp"][rng.usize(..2)]).set(&[
        &format!("trainer.max_steps={STEPS}"),
        &format!("trainer.default_root_dir=runs-{}", trial.seed),
    ]);
    let expected = job.clone().set(&["trainer.devices=4"]).succeed().losses();
    let agents = Agents::new(job.env("CAMPAIGN_MARK", &mark), "2", "2").with_three_seats();
    let start = || {
        let agent = agents.coordinator().start();
        agent.until("its seat", |this| this.said("may coordinate").then_some(()));
        agent
    };
    let mut seats = [(); 3].map(|()| start());
    let nodes = ["0", "1"].map(|node| agents.start(node));
    let coordinates = |agent: &Running| agent.said("This agent coordinates it now");
    let (mut coordinator, mut killed) = (0, 0);
    nodes[0].reach(1);
    while nodes[0].last_step().is_none_or(|step| step + 1000 < STEPS) {
        std::thread::sleep(Duration::from_millis(rng.u64(..1500)));
        seats[coordinator].signal(Signal::KILL);
        killed += 1;
        // It comes back before another one coordinates the job, or after that.
        let comes_at_once = rng.bool();
        let come_back = |seats: &mut [Running; 3]| {
            std::mem::replace(&mut seats[coordinator], start()).wait();
        };
        if comes_at_once {
            come_back(&mut seats);
        }
        let another = nodes[0].until("another coordinator", |_| {
            let may = |seat: &usize| comes_at_once || *seat != coordinator;
            (0..3).filter(may).find(|seat| coordinates(&seats[*seat]))
        });
        if !comes_at_once {
            come_back(&mut seats);
        }
        coordinator = another;
        std::thread::sleep(BACK);
    }
    let runs = nodes.map(Running::wait);
    for run in seats.map(Running::wait).iter().chain(&runs) {
        assert_eq!(run.code(), Some(0), "{killed} killed: {}{}", run.stdout, run.stderr);
    }
    assert_nothing_is_left(&format!("CAMPAIGN_MARK={mark}"));
    let generations = runs[0].events_of("generation");
    assert!(generations.iter().all(|event| event["world_size"] == 4), "{generations:?}");
    assert_eq!(runs[0].losses(), expected, "{killed} killed: {}", runs[0].stderr);
    killed
}

#[test]
#[ignore = "takes a minute or more a trial"]
fn coordinators_are_replaced_again_and_again() {
    let (scratch, mut killed) = (Scratch::with_tokens(), 0);
    trials(1, |trial| killed += kill_at_random(&scratch, trial));
    eprintln!("{killed} coordinators were killed");
    assert!(killed > 0);
}
