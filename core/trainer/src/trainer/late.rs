//! Steps of which the host knows loss and norm a step later, and the metrics of hooks meanwhile.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::OnceLock;

use super::session::{Cursor, Session};
use super::train_step::only;
use super::{Event, ItemRate};
use crate::fabric::{PendingStep, StepNumbers};
use crate::{Error, Result};

/// Of a step that is done, what the host knows without its device.
#[derive(Debug)]
pub(super) struct StepReport {
    pub(super) step: u64,
    /// Passes over the training data.
    pub(super) epoch: f64,
    pub(super) lr: f64,
    pub(super) rate: ItemRate,
    pub(super) metrics: BTreeMap<String, f64>,
}

/// A step whose loss and norm the host has not read.
#[derive(Debug)]
pub(super) struct UnreadStep {
    pub(super) report: StepReport,
    pub(super) pending: PendingStep,
    /// Where the run was before it.
    pub(super) before: Cursor,
}

impl Session {
    /// Whether the next step may leave its numbers on the device: it is not logged, and no checkpoint of the step before
    /// must be saved after an error. The same on all ranks.
    pub(super) fn defers_reads(&self, wanted: bool) -> bool {
        let config = &self.parts.config;
        config.late_reads.on(self.parts.fabric.device())
            && !config.detect_anomaly
            && !wanted
            && self.requests.save_on_exception.is_none()
    }

    /// Reads what the last step has left on its device, if it has, and reports that step. Before anything is made of the
    /// state after it that lasts: a checkpoint, a validation, the end of the run.
    ///
    /// # Errors
    /// On every rank, if its loss or norm is not finite: the state is that before the step.
    pub(super) fn catch_up(&mut self) -> Result<()> {
        let Some(UnreadStep { report, pending, before }) = self.unread.take() else {
            return Ok(());
        };
        match only(&mut self.optimizers).read(pending) {
            Ok(StepNumbers { loss, grad_norm }) => self.report_step(report, loss, grad_norm),
            Err(error) => {
                self.cursor = before;
                Err(error)
            }
        }
    }

    /// Reports the last step after an error, if it has left its numbers on the device, and returns
    /// the first error. Not after those of peers and devices, with which nothing is waited for any
    /// more.
    pub(super) fn catch_up_after(&mut self, error: Error) -> Error {
        if matches!(error, Error::PeerFailed { .. } | Error::Collective { .. } | Error::Candle(..))
        {
            return error;
        }
        match self.catch_up() {
            Err(first @ Error::NonFinite { .. }) => first,
            Ok(()) | Err(_) => error,
        }
    }

    /// Reports a step that is done.
    pub(super) fn report_step(
        &mut self,
        report: StepReport,
        train_loss: f64,
        grad_norm: f64,
    ) -> Result<()> {
        let StepReport { step, epoch, lr, rate, metrics } = report;
        // A step in which nothing counts has no loss, and leaves that of the one before.
        if !train_loss.is_nan() {
            self.parts.meter.note_loss(train_loss);
            self.record_of(step, &[(TRAIN_LOSS.to_owned(), train_loss)].into());
        }
        self.record_of(step, &[(GRAD_NORM.to_owned(), grad_norm)].into());
        self.emit(&Event::Step { step, epoch, train_loss, grad_norm, lr, rate, metrics })
    }
}

const TRAIN_LOSS: &str = "train_loss";
const GRAD_NORM: &str = "grad_norm";

/// The latest metrics by name, as hooks see them: a map. Where `trainer.late_reads` has left the loss and norm of the last
/// step on the device, it reads them when it is looked at.
pub struct Metrics<'a> {
    known: &'a BTreeMap<String, f64>,
    unread: Option<&'a UnreadStep>,
    with_unread: OnceLock<BTreeMap<String, f64>>,
}

impl<'a> Metrics<'a> {
    pub(super) fn new(known: &'a BTreeMap<String, f64>, unread: Option<&'a UnreadStep>) -> Self {
        Self { known, unread, with_unread: OnceLock::new() }
    }

    /// The step that a metric is of, if that has not been read.
    pub(super) fn unread_step(&self, name: &str) -> Option<u64> {
        let of_step = [TRAIN_LOSS, GRAD_NORM].contains(&name);
        self.unread.filter(|_| of_step).map(|unread| unread.report.step)
    }
}

impl Deref for Metrics<'_> {
    type Target = BTreeMap<String, f64>;

    fn deref(&self) -> &BTreeMap<String, f64> {
        let Some(unread) = self.unread else { return self.known };
        self.with_unread.get_or_init(|| {
            // Whoever reads them next, at the end of the next step at the latest, says what went wrong.
            let unknown = StepNumbers { loss: f64::NAN, grad_norm: f64::NAN };
            let StepNumbers { loss, grad_norm } = unread.pending.numbers().unwrap_or(unknown);
            let mut all = self.known.clone();
            let both = [(TRAIN_LOSS, loss), (GRAD_NORM, grad_norm)];
            all.extend(both.map(|(name, value)| (name.to_owned(), value)));
            all
        })
    }
}

impl std::fmt::Debug for Metrics<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.known.fmt(f)
    }
}
