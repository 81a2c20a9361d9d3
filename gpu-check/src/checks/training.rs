//! Whole training runs through `fulgurite bench`: their losses and their speed.

use std::process::{Command, Stdio};

use fulgurite_error::{Error, Result};
use serde_json::Value;

use crate::findings::Findings;
use crate::target::{Kind, Target};

/// A small decoder and the number of its steps.
const SMALL: [&str; 10] =
    ["--workload", "tiny", "--kv-heads", "2", "--seq", "48", "--steps", "18", "--warmup", "2"];

/// Trains on a device in its own process, with its ranks, and returns the measurements.
fn train(accelerator: &str, options: &[&str]) -> Result<Value> {
    let program = std::env::current_exe().map_err(Error::io("finding", "this program"))?;
    let output = Command::new(&program)
        .args(["bench", "train", "--json", "--no-floor", "--accelerator", accelerator])
        .args(options)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .map_err(Error::io("starting", &program))?;
    let printed = String::from_utf8_lossy(&output.stdout);
    match serde_json::from_str(printed.lines().last().unwrap_or_default()) {
        Ok(row) if output.status.success() => Ok(row),
        _ => Err(Error::other(format!(
            "training on {accelerator} with {} ended with {}",
            options.join(" "),
            output.status
        ))),
    }
}

/// The device of the target, for all ranks.
fn shared(target: &Target) -> &'static str {
    match target.device {
        Kind::Cuda => "{ type = \"cuda\", shared = true }",
        Kind::Cpu => "cpu",
    }
}

fn number(row: &Value, key: &str) -> Result<f64> {
    row[key]
        .as_f64()
        .ok_or_else(|| Error::other(format!("a training did not measure {key}: {row}")))
}

/// Compares the first and the last loss.
fn compare(
    findings: &mut Findings,
    name: &str,
    got: &Value,
    want: &Value,
    allowed: f64,
) -> Result<()> {
    for key in ["loss_first", "loss_last"] {
        let (got, want) = (number(got, key)?, number(want, key)?);
        findings.figure(format!("{name} {key}"), got);
        findings.difference(
            &format!("{name} {key} differs by"),
            ((got - want) / want).abs(),
            allowed,
        );
    }
    findings.figure(format!("{name} step_s"), number(got, "step_s")?);
    Ok(())
}

fn on_one_rank(target: &Target, precision: &str, allowed: f64) -> Result<Findings> {
    let mut findings = Findings::default();
    let one = ["--strategy", "single_device", "--ranks", "1", "--precision", precision];
    let options = [&SMALL[..], &one].concat();
    let want = train("cpu", &options)?;
    let got = train(target.device.name(), &options)?;
    compare(&mut findings, "single_device", &got, &want, allowed)?;
    let last = number(&want, "loss_last")?;
    let falls = last < number(&want, "loss_first")?;
    findings.require(falls, || format!("20 steps on a CPU have not lowered the loss: {last}"));
    let checkpointing = ["--activation-checkpointing", "full"];
    let again = train(target.device.name(), &[&options[..], &checkpointing].concat())?;
    compare(&mut findings, "activation checkpointing", &again, &got, allowed)?;
    Ok(findings)
}

pub(super) fn f32(target: &Target) -> Result<Findings> {
    on_one_rank(target, "32-true", 1e-4)
}

pub(super) fn bf16(target: &Target) -> Result<Findings> {
    on_one_rank(target, "bf16-mixed", 1e-2)
}

pub(super) fn ranks(target: &Target) -> Result<Findings> {
    let mut findings = Findings::default();
    for strategy in ["ddp", "fsdp"] {
        let options = [&SMALL[..], &["--strategy", strategy, "--ranks", "2"]].concat();
        let (want, got) = (train("cpu", &options)?, train(shared(target), &options)?);
        compare(&mut findings, strategy, &got, &want, 1e-4)?;
    }
    Ok(findings)
}

pub(super) fn offload(target: &Target) -> Result<Findings> {
    let mut findings = Findings::default();
    let fsdp = |strategy| [&SMALL[..], &["--ranks", "1", "--strategy", strategy]].concat();
    let want = train(target.device.name(), &fsdp("fsdp"))?;
    let got = train(target.device.name(), &fsdp("{ type = \"fsdp\", cpu_offload = true }"))?;
    compare(&mut findings, "cpu_offload", &got, &want, 1e-5)?;
    Ok(findings)
}

pub(super) fn llama(target: &Target) -> Result<Findings> {
    let mut findings = Findings::default();
    for strategy in ["single_device", "fsdp"] {
        let options =
            ["--workload", "llama1b", "--precision", "bf16-mixed", "--ranks", "1", "--strategy"];
        let row = train(target.device.name(), &[&options[..], &[strategy]].concat())?;
        for key in [
            "step_s",
            "step_s_min",
            "step_s_max",
            "tokens_per_s",
            "startup_s",
            "loss_first",
            "loss_last",
        ] {
            findings.figure(format!("{strategy} {key}"), number(&row, key)?);
        }
        let peak = row["peak_device_mib"][0].as_f64();
        findings.figure(format!("{strategy} peak_device_mib"), peak.unwrap_or(f64::NAN));
        let flops = 6.0 * number(&row, "parameters")? * number(&row, "tokens_per_s")?;
        findings.figure(format!("{strategy} tflops_without_attention"), flops / 1e12);
        let finite = number(&row, "loss_last")?.is_finite();
        findings.require(finite, || format!("{strategy}: the last loss is not finite"));
    }
    Ok(findings)
}
