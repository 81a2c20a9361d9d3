//! Several threads on one device.

use std::sync::mpsc::sync_channel;

use candle_core::{DType, Device, Tensor};
use fulgurite_error::{Error, Result};
use serde_json::json;

use crate::compare::numbers;
use crate::findings::Findings;
use crate::target::Target;

/// With one stream and no event tracking, as a rank opens the device.
pub(super) fn untracked(target: &Target) -> Result<Findings> {
    hand_over(target.open()?.device())
}

/// With event tracking.
pub(super) fn tracked(target: &Target) -> Result<Findings> {
    hand_over(target.open_with(json!({ "event_tracking": true }))?.device())
}

/// One thread computes tensors, hands them over and frees its own; another computes with them and
/// reads.
fn hand_over(device: &Device) -> Result<Findings> {
    const ROUNDS: usize = 300;
    const N: usize = 512;
    let mut findings = Findings::default();
    let (sender, receiver) = sync_channel::<Tensor>(4);
    let its_device = device.clone();
    let thread = std::thread::spawn(move || -> Result<()> {
        for round in 0..ROUNDS {
            // A product whose elements are all N * round: large enough to still run at the
            // hand-over.
            let a = Tensor::ones((N, N), DType::F32, &its_device)?;
            let b = a.affine(round as f64, 0.0)?;
            let product = a.matmul(&b)?;
            drop((a, b));
            if sender.send(product).is_err() {
                break;
            }
        }
        Ok(())
    });
    let mut wrong = 0;
    for (round, product) in receiver.iter().enumerate() {
        // A new tensor, perhaps in memory that the other thread freed.
        let more = Tensor::ones((N, N), DType::F32, device)?;
        let sum = numbers(&(product + more)?)?;
        let expected = (round * N + 1) as f64;
        wrong += usize::from(sum.iter().any(|x| *x != expected));
    }
    thread.join().map_err(|_| Error::other("the thread that computes ended in a panic"))??;
    findings.figure("rounds", ROUNDS as f64);
    findings
        .require(wrong == 0, || format!("{wrong} of {ROUNDS} tensors were read with other values"));
    Ok(findings)
}
