//! Pipelines: stages of the model on ranks of their own, against one device.

pub mod training;

use std::collections::BTreeMap;

use fulgurite::core::collective::Counter;
use fulgurite::prelude::*;
use fulgurite_transports::run_ranks;
use rustix::process::{Signal, kill_process};

use crate::program::{Job, Run as ProgramRun, Scratch};
use training::{
    Keys, LENGTH, Lm, MODEL, assert_close, assert_same, config, keys, pipelined, random_lists,
    train,
};

// checklist: NeMo: pipeline parallelism
#[test]
fn every_schedule_equals_one_device() {
    for micro_batches in [4, 6, 8] {
        let accumulate = format!("accumulate_grad_batches = {micro_batches}");
        let keys = keys("batch_size = 2", &accumulate);
        let expected = train(1, keys).unwrap();
        assert_eq!(expected.losses.len(), 3);
        for (ranks, schedule) in [
            (2, "gpipe"),
            (2, "1f1b"),
            (3, "1f1b"),
            (4, "1f1b"),
            (2, "interleaved_1f1b"),
            (2, "zb_h1"),
            (2, "zb_v"),
            (2, "dual_pipe_v"),
            (3, "zb_v"),
        ] {
            let options =
                format!("pipeline_parallel_size = {ranks}, pipeline_schedule = '{schedule}'");
            assert_same(&options, &pipelined(ranks, &options, keys).unwrap(), &expected);
        }
    }
}

#[test]
fn random_lists_train_as_one_device() {
    let folder = tempfile::tempdir().unwrap();
    let mut random = fastrand::Rng::with_seed(19);
    for micro_batches in [1, 3, 5] {
        let accumulate = format!("accumulate_grad_batches = {micro_batches}");
        let keys = keys("batch_size = 2", &accumulate);
        let expected = train(1, keys).unwrap();
        for trial in 0..6 {
            let ranks = random.usize(2..=3);
            let lists = random_lists(&mut random, ranks, micro_batches);
            let path = folder.path().join(format!("{micro_batches}-{trial}.csv"));
            std::fs::write(&path, &lists).unwrap();
            let options = format!("pipeline_parallel_size = {ranks}, pipeline_schedule = {path:?}");
            let run = pipelined(ranks, &options, keys);
            let run = run.unwrap_or_else(|error| panic!("{lists}: {error}"));
            assert_same(&lists, &run, &expected);
        }
    }
}

/// Against the same mesh without stages, whose ranks have the same batches.
// checklist: NeMo: pipeline parallelism
#[test]
fn stages_change_no_bit_of_a_mesh() {
    let accumulate = "accumulate_grad_batches = 4";
    let single = train(1, keys("batch_size = 4", accumulate)).unwrap();
    for (mesh, batch) in [
        ("data_parallel_replicate_size = 2, data_parallel_shard_size = 1", 2),
        ("data_parallel_shard_size = 2", 2),
        ("data_parallel_shard_size = 2, reshard_after_forward = true", 2),
        ("tensor_parallel_size = 2, data_parallel_shard_size = 1", 4),
        (
            "tensor_parallel_size = 2, data_parallel_shard_size = 1, \
             parallelize = { type = 'llama', sequence_parallel = true }",
            4,
        ),
        ("context_parallel_size = 2, tensor_parallel_size = 1", 4),
    ] {
        let data = format!("batch_size = {batch}");
        let keys = keys(&data, accumulate);
        let whole = Keys { strategy: &format!("{{ type = 'model_parallel', {mesh} }}"), ..keys };
        let expected = train(2, whole).unwrap();
        assert_close(mesh, &expected, &single);
        for schedule in ["1f1b", "zb_v", "interleaved_1f1b"] {
            let options =
                format!("{mesh}, pipeline_parallel_size = 2, pipeline_schedule = '{schedule}'");
            let run = pipelined(4, &options, keys);
            let run = run.unwrap_or_else(|error| panic!("{options}: {error}"));
            assert_same(&options, &run, &expected);
        }
    }
}

#[test]
fn variants_train_as_on_one_device() {
    for (data, model, trainer) in [
        (2, "", "precision = 'bf16-mixed'"),
        (2, "", "precision = '16-mixed'"),
        (2, "", "precision = '16-true'"),
        (2, "", "activation_checkpointing = 'full'"),
        (2, "", "ema_decay = 0.9"),
        (2, "", "adapters = { rank = 2, targets = 'all-linear' }"),
        (
            2,
            "",
            "freeze = ['model.embed_tokens', 'model.layers.0', 'model.layers.1', 'model.layers.2']",
        ),
        (2, "", "last_batch = 'partial'\nlimit_train_batches = 5"),
        (4, "", "micro_batch_size = 1"),
        (2, "tie_word_embeddings = true", ""),
    ] {
        let trainer = format!("accumulate_grad_batches = 4\n{trainer}");
        let data = format!("batch_size = {data}");
        let whole_model = format!("{MODEL}{model}");
        let keys = Keys { model: &whole_model, ..keys(&data, &trainer) };
        let expected = train(1, keys).unwrap();
        assert!(expected.has_trained(), "{trainer}");
        for options in
            ["pipeline_parallel_size = 2", "pipeline_parallel_size = 2, pipeline_schedule = 'zb_v'"]
        {
            let run = pipelined(2, options, keys);
            let what = format!("{model} {trainer} {options}");
            let run = run.unwrap_or_else(|error| panic!("{what}: {error}"));
            // One device adds the gradients of both uses in another order.
            match model.contains("tie") {
                true => assert_close(&what, &run, &expected),
                false => assert_same(&what, &run, &expected),
            }
        }
    }
}

/// A border carries an activation and a gradient for each micro-batch, each with a head of 16 f64.
#[test]
fn messages_and_bytes_follow_the_borders() {
    let (micro_batches, steps, activation) = (4, 3, 2 * LENGTH * 16 * 4);
    for (ranks, schedule, borders) in [(2, "1f1b", 1), (3, "gpipe", 2), (2, "interleaved_1f1b", 3)]
    {
        let options = format!("pipeline_parallel_size = {ranks}, pipeline_schedule = '{schedule}'");
        let strategy = format!("{{ type = 'model_parallel', {options} }}");
        let trainer = format!("accumulate_grad_batches = {micro_batches}\nlimit_val_batches = 0");
        let keys = Keys { strategy: &strategy, ..keys("batch_size = 2", &trainer) };
        let logs = tempfile::tempdir().unwrap();
        let counted = run_ranks(ranks, |world| {
            let counter = Counter::default();
            let run = config(logs.path(), ranks, &keys)?;
            Trainer::new(counter.watch(world)).fit::<Lm>(&run)?;
            let sent = counter.snapshot().into_iter();
            let sent =
                sent.filter(|((group, op), _)| group.starts_with("pipeline ") && *op == "send");
            Ok(sent.map(|(_, record)| (record.calls, record.bytes)).collect::<Vec<_>>())
        });
        let sums = counted.unwrap().into_iter().flatten();
        let (calls, bytes) = sums.fold((0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1));
        let tensors = 2 * borders * micro_batches * steps;
        assert_eq!(calls, 2 * tensors, "{options}");
        assert_eq!(bytes, tensors * (activation + 16 * 8), "{options}");
    }
}

#[test]
fn whole_tensor_optimizers_train_in_pipelines() {
    for optimizer in ["muon", "adafactor"] {
        let keys = Keys { optimizer, ..keys("batch_size = 2", "accumulate_grad_batches = 4") };
        let expected = train(1, keys).unwrap();
        let run = pipelined(2, "pipeline_parallel_size = 2", keys).unwrap();
        assert_close(optimizer, &run, &expected);
        let run = pipelined(
            4,
            "pipeline_parallel_size = 2, data_parallel_shard_size = 2",
            Keys { data: "batch_size = 1", ..keys },
        )
        .unwrap();
        assert_close(optimizer, &run, &expected);
    }
}

const SPLIT: &str = "{ type = \"model_parallel\", pipeline_parallel_size = 2 }";
const SHARDED: &str =
    "{ type = \"model_parallel\", pipeline_parallel_size = 2, data_parallel_shard_size = 2 }";
const ENDS_TOGETHER: &str =
    "{ type = \"model_parallel\", pipeline_parallel_size = 2, pipeline_schedule = \"zb_v\" }";

/// A job with all kinds of state to restore.
fn job(scratch: &Scratch) -> Job<'_> {
    scratch.small().set(&[
        "trainer.max_steps=6",
        "scheduler.type=cosine",
        "data.shuffle=true",
        "model.dropout=0.1",
        "model.num_hidden_layers=4",
        "trainer.accumulate_grad_batches=4",
        "checkpoint.every_n_steps=3",
        "checkpoint.dir=kept",
    ])
}

fn numbers(run: &ProgramRun) -> [BTreeMap<u64, f64>; 2] {
    ["train_loss", "grad_norm"].map(|key| run.steps(key).split_off(&4))
}

fn assert_like(what: &str, run: &ProgramRun, expected: &[BTreeMap<u64, f64>; 2]) {
    for (of_run, expected) in numbers(run).iter().zip(expected) {
        assert_eq!(of_run.len(), expected.len(), "{what}");
        for (step, value) in expected {
            let close = (of_run[step] - value).abs() <= 2e-5 * value.abs();
            assert!(close, "{what}: step {step}: {} {value}", of_run[step]);
        }
    }
}

/// The first stage finds a wrong input, and the last a wrong target.
#[test]
fn a_failing_stage_ends_the_others() {
    for (wrong, said) in [("input", "stage 0"), ("target", "stage 1")] {
        let data = format!("batch_size = 2\nwrong = '{wrong}'");
        let error =
            pipelined(2, "pipeline_parallel_size = 2", keys(&data, "accumulate_grad_batches = 4"));
        let error = error.unwrap_err().to_string();
        assert!(error.contains(said) && error.contains("step 1"), "{wrong}: {error}");
    }
}

#[test]
fn a_killed_stage_ends_the_others() {
    for rank in [0, 1] {
        let scratch = Scratch::with_tokens();
        let endless = job(&scratch).set(&["trainer.max_steps=100000000", "scheduler=constant"]);
        let running = endless.on(SPLIT, 2, 4).start();
        running.reach(2);
        kill_process(running.rank(rank), Signal::KILL).unwrap();
        let run = running.wait();
        let expected = format!("error: rank {rank} was killed by signal 9 (SIGKILL)");
        assert_eq!(run.first_error(), expected, "{}", run.stderr);
    }
}

/// Real processes; checkpoints of one mesh go on under the others.
#[test]
fn checkpoints_do_not_depend_on_stages() {
    let meshes =
        [(SPLIT, 2, 4), (SHARDED, 4, 2), (ENDS_TOGETHER, 2, 4), ("fsdp", 2, 2), ("tp", 2, 4)];
    for (from, ranks, batch) in [(SPLIT, 2, 4), (SHARDED, 4, 2), ("fsdp", 2, 2)] {
        let scratch = Scratch::with_tokens();
        let whole = job(&scratch).on(from, ranks, batch).succeed();
        let expected = numbers(&whole);
        let resume = job(&scratch)
            .set(&["trainer.ckpt_path=kept/step-00000003", "checkpoint.every_n_steps=100"]);
        for (to, ranks, batch) in meshes {
            let run = resume.clone().on(to, ranks, batch).succeed();
            assert_like(&format!("{from} to {to}"), &run, &expected);
            if from == to {
                assert_eq!(numbers(&run), expected, "{from}");
            }
        }
    }
}

#[test]
fn impossible_pipelines_start_no_rank() {
    let scratch = Scratch::with_tokens();
    let pipeline =
        |keys: &str| format!("{{ type = \"model_parallel\", pipeline_parallel_size = 2{keys} }}");
    for (keys, others, said) in [
        ("", "model.num_hidden_layers=1", "the pipeline has 2 stages, and the model 1 unit"),
        (", pipeline_units = [3, 2]", "", "[3, 2] names 5 units for 2 stages"),
        (
            ", pipeline_schedule = \"dual_pipe_v\"",
            "trainer.accumulate_grad_batches=3",
            "micro-batches",
        ),
        (", pipeline_schedule = \"best\"", "", "there is no \"best\""),
        (", pipeline_schedule = \"none.csv\"", "", "none.csv"),
        (", data_parallel_shard_size = 2", "", "world size"),
        (", pipeline_units = [4, 0]", "", "at least one unit"),
        (", pipeline_units = \"even\"", "", "\"balanced\" or a list of numbers of units"),
        (
            ", pipeline_units = \"balanced\"",
            "model.num_hidden_layers=1",
            "the pipeline has 2 stages, and the model 1 unit",
        ),
        ("", "trainer.micro_batch_size=\"auto\"", "cannot begin again"),
        (
            ", pipeline_schedule = \"dual_pipe_v\"",
            "trainer.last_batch=\"partial\"",
            "`trainer.last_batch` = \"partial\"",
        ),
    ] {
        let run = job(&scratch).on(&pipeline(keys), 2, 4);
        let message = if others.is_empty() { run.fail() } else { run.set(&[others]).fail() };
        assert!(message.contains(said), "{keys} {others}: {message}");
        assert!(!message.contains("rank 1"), "{message}");
    }
}

#[test]
fn lists_of_a_file_train() {
    let scratch = Scratch::with_tokens();
    scratch.file("mine.csv", "0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1B0,1F1,1F2,1B1,1B2,1F3,1B3\n");
    let expected = job(&scratch).on("single_device", 1, 4).succeed();
    let from_file = SPLIT.replace('}', ", pipeline_schedule = \"mine.csv\" }");
    let run = job(&scratch).set(&["checkpoint.dir=other"]).on(&from_file, 2, 4).succeed();
    assert_eq!(run.losses(), expected.losses());
    let message = job(&scratch)
        .set(&["checkpoint.dir=third", "trainer.accumulate_grad_batches=2"])
        .on(&from_file, 2, 4)
        .fail();
    assert!(message.contains("are for 4 micro-batches, and a step has 2"), "{message}");
}
