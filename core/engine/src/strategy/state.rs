//! What every strategy keeps, and what the trait's provided methods work on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{Device, Tensor};

use super::Loss;
use crate::collective::{ProcessGroup, ReduceOp, wait_for};
use crate::mesh::{DP_CP, DeviceMesh};
use crate::module::ModuleTree;
use crate::{Error, Result};

/// The loss of one optimizer step, over all ranks and micro-batches.
#[derive(Debug, Clone, PartialEq)]
pub struct StepTotals {
    /// Sum of the losses.
    pub loss_sum: f64,
    /// What the sum is over: tokens, samples.
    pub count: f64,
    /// The ranks' flags, summed.
    pub flags: Vec<f64>,
}

impl StepTotals {
    /// The mean over the whole global batch.
    pub fn mean(&self) -> f64 {
        self.loss_sum / self.count
    }

    /// What gradients of the summed loss are multiplied by to be those of the mean. A batch with
    /// nothing to count has a gradient of zero.
    pub fn grad_scale(&self) -> f64 {
        if self.count > 0.0 { 1.0 / self.count } else { 0.0 }
    }
}

/// The state that strategies share.
#[derive(Debug)]
pub struct StrategyState {
    mesh: Option<DeviceMesh>,
    tree: Option<ModuleTree>,
    sync: Arc<AtomicBool>,
    loss_sum: f64,
    count: f64,
    totals: Option<StepTotals>,
    pub(super) delivered: Vec<bool>,
    pub(super) audited: bool,
    /// Whether the latest backward of the step kept its gradients to its rank.
    unsynced: bool,
}

impl Default for StrategyState {
    fn default() -> Self {
        Self {
            mesh: None,
            tree: None,
            sync: Arc::new(AtomicBool::new(true)),
            loss_sum: 0.0,
            count: 0.0,
            totals: None,
            delivered: Vec::new(),
            audited: false,
            unsynced: false,
        }
    }
}

impl StrategyState {
    /// The mesh.
    ///
    /// # Errors
    /// Before `setup_environment`.
    pub fn mesh(&self) -> Result<&DeviceMesh> {
        self.mesh.as_ref().ok_or_else(|| {
            Error::Mesh(
                "accessing the device mesh before processes have initialized is not allowed; \
                 call `setup_environment` (or `Fabric::launch`) first"
                    .to_owned(),
            )
        })
    }

    /// Sets the mesh.
    pub fn set_mesh(&mut self, mesh: DeviceMesh) {
        self.mesh = Some(mesh);
    }

    /// The model's tree.
    ///
    /// # Errors
    /// Before `setup_module`.
    pub fn tree(&self) -> Result<&ModuleTree> {
        self.tree.as_ref().ok_or_else(|| {
            Error::other("no model has been set up; call `Fabric::setup` (`setup_module`) first")
        })
    }

    /// Sets the tree.
    pub fn set_tree(&mut self, tree: ModuleTree) {
        self.delivered = vec![false; tree.trainable().count()];
        self.tree = Some(tree);
    }

    /// Whether the next backward reduces gradients over ranks.
    pub fn sync(&self) -> bool {
        self.sync.load(Ordering::Relaxed)
    }

    /// The flag behind [`sync`](Self::sync), for reducers that outlive a borrow of the state.
    pub fn sync_flag(&self) -> Arc<AtomicBool> {
        self.sync.clone()
    }

    /// See [`Strategy::no_backward_sync`](super::Strategy::no_backward_sync).
    pub fn no_backward_sync(&self, enabled: bool) -> NoSyncGuard {
        let previous = self.sync.swap(!enabled, Ordering::Relaxed);
        NoSyncGuard { sync: self.sync.clone(), previous }
    }

    /// Ends the parameters' part of a backward (see
    /// [`Parameter::finish_backward`](crate::parameter::Parameter::finish_backward)) and notes
    /// which got a gradient.
    pub(super) fn finish_parameters(&mut self) -> Result<()> {
        let tree = self.tree.take();
        let parameters = tree.iter().flat_map(|tree| tree.trainable());
        let result = parameters.zip(&mut self.delivered).try_for_each(|(parameter, delivered)| {
            *delivered |= parameter.finish_backward()?;
            Ok(())
        });
        self.tree = tree;
        result
    }

    /// Adds a micro-batch's loss to the step's. Totals that were taken before are out of date.
    pub(super) fn record_loss(&mut self, loss: &Loss) -> Result<()> {
        self.loss_sum += loss.sum_value()?;
        self.count += loss.count();
        self.totals = None;
        self.unsynced = !self.sync();
        Ok(())
    }

    /// Checks that the step's last backward synchronised gradients.
    ///
    /// # Errors
    /// If it did not: each rank would update its parameters with gradients of its own.
    pub fn check_synced(&self) -> Result<()> {
        if !self.unsynced {
            return Ok(());
        }
        Err(Error::other(
            "the optimizer cannot step: the step's last backward ran under `no_backward_sync`, so \
             its gradients are on their own ranks only. Run the last micro-batch's backward with \
             `no_backward_sync(false)`, or without a guard",
        ))
    }

    /// How many items the losses of this rank's micro-batches were over, in this step so far.
    pub fn local_count(&self) -> f64 {
        self.count
    }

    /// The step's totals over the `dp_cp` group, and the flags' over the world; see
    /// [`Strategy::step_totals`](super::Strategy::step_totals).
    pub(super) fn totals(&mut self, flags: &[f64]) -> Result<StepTotals> {
        if let Some(totals) = &self.totals {
            return Ok(totals.clone());
        }
        let sum = |values: &[f64], group: &dyn ProcessGroup| -> Result<Vec<f64>> {
            let values = Tensor::new(values, &Device::Cpu)?;
            wait_for(|| group.all_reduce(&values, ReduceOp::Sum))?;
            Ok(values.to_vec1()?)
        };
        let mesh = self.mesh()?;
        let loss = sum(&[self.loss_sum, self.count], &**mesh.group(DP_CP)?)?;
        // Tensor-parallel ranks have the same loss, but flags of their own.
        let flags = if flags.is_empty() { Vec::new() } else { sum(flags, &**mesh.world())? };
        let totals = StepTotals { loss_sum: loss[0], count: loss[1], flags };
        self.totals = Some(totals.clone());
        Ok(totals)
    }

    /// Forgets the step's gradients and totals.
    ///
    /// # Errors
    /// If no model has been set up.
    pub fn end_step(&mut self) -> Result<()> {
        for parameter in self.tree()?.trainable() {
            parameter.end_step();
        }
        self.delivered.fill(false);
        self.unsynced = false;
        (self.loss_sum, self.count, self.totals) = (0.0, 0.0, None);
        Ok(())
    }
}

/// Restores the state that [`Strategy::no_backward_sync`](super::Strategy::no_backward_sync) found.
#[must_use = "gradients are synchronised again as soon as the guard is dropped"]
#[derive(Debug)]
pub struct NoSyncGuard {
    sync: Arc<AtomicBool>,
    previous: bool,
}

impl Drop for NoSyncGuard {
    fn drop(&mut self) {
        self.sync.store(self.previous, Ordering::Relaxed);
    }
}
