//! Runs on several hosts, simulated by processes of one host.

use std::net::TcpListener;

use crate::program::{Job, Run, Running, Scratch};

/// Starts `devices` ranks on each of `nodes` nodes, as `torchrun` does, and waits for them.
fn run_on(job: &Job<'_>, nodes: usize, devices: usize) -> Vec<Run> {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let start = |rank: usize| {
        let job = job.clone().set(&[&format!("trainer.num_nodes={nodes}")]);
        job.env("RANK", rank)
            .env("LOCAL_RANK", rank % devices)
            .env("WORLD_SIZE", nodes * devices)
            .env("LOCAL_WORLD_SIZE", devices)
            .env("GROUP_RANK", rank / devices)
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port)
            .start()
    };
    let ranks: Vec<_> = (0..nodes * devices).map(start).collect();
    ranks.into_iter().map(Running::wait).collect()
}

/// A model with tensors large enough for hierarchical collectives.
pub(crate) fn wide(scratch: &Scratch) -> Job<'_> {
    scratch.small().set(&[
        "model.hidden_size=128",
        "model.intermediate_size=256",
        "trainer.max_steps=5",
        "model.num_key_value_heads=2",
    ])
}

#[test]
fn two_hosts_match_one_bitwise() {
    let scratch = Scratch::with_tokens();
    let one_device = wide(&scratch).on("single_device", 1, 12).succeed();
    for (strategy, transport) in [
        ("ddp", "auto"),
        ("fsdp", "auto"),
        ("fsdp", "{ type = \"auto\", levels = false }"),
        ("fsdp", "tcp"),
        ("{ type = \"hsdp\", data_parallel_replicate_size = 2 }", "auto"),
        (
            "{ type = \"hsdp\", data_parallel_shard_size = 4, data_parallel_replicate_size = 1 }",
            "auto",
        ),
        ("{ type = \"fsdp_tp\", tensor_parallel_size = 2 }", "auto"),
    ] {
        let batch_size = if strategy.contains("fsdp_tp") { 6 } else { 3 };
        let expected = wide(&scratch).on(strategy, 4, batch_size).succeed();
        let job = wide(&scratch).on(strategy, 2, batch_size);
        let job = job.set(&[&format!("trainer.process_group={transport}")]);
        let runs = run_on(&job, 2, 2);
        for run in &runs {
            assert!(run.status.success(), "{strategy}: {}", run.stderr);
        }
        assert_eq!(runs[0].losses(), expected.losses(), "{strategy} over {transport}");
        assert_eq!(runs[0].steps("grad_norm"), expected.steps("grad_norm"), "{strategy}");
        crate::program::assert_close(&runs[0].losses(), &one_device.losses(), 1e-5);
    }
}

// checklist: torchtune: get_distributed_backend
#[test]
fn transport_is_reported_at_start() {
    let scratch = Scratch::with_tokens();
    let text = || {
        let mut job = scratch.small().set(&["trainer.max_steps=1"]);
        job.replace("json", "human");
        job
    };
    let runs = run_on(&text().on("fsdp", 2, 3), 2, 2);
    let told = "4 ranks, strategy fsdp, process group shm within hosts, tcp between them";
    assert!(runs[0].stderr.contains(told), "{}", runs[0].stderr);
    let one = text().on("ddp", 2, 3).succeed();
    assert!(one.stderr.contains("2 ranks, strategy ddp, process group shm\n"), "{}", one.stderr);
}
