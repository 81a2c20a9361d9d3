//! The checks after each call.

use candle_core::{DType, Device, Tensor};

use super::model;
use super::suite::{SEED, Suite};
use crate::Result;
use fulgurite_engine::autograd::storage;
use fulgurite_engine::collective::{ReduceOp, all_gather_object};
use fulgurite_engine::data::DataContext;
use fulgurite_engine::mesh::DP_CP;
use fulgurite_engine::parameter::Parameter;
use fulgurite_engine::strategy::materialize;
use fulgurite_nn::Loss;
use fulgurite_trainer::fabric::{Fabric, FabricOptimizer};

impl Suite<'_> {
    /// The mesh has all ranks of the world, and the data contexts cover the data.
    pub(super) fn mesh(&self, fabric: &Fabric) -> Result<DataContext> {
        let mesh = fabric.device_mesh();
        self.ensure(
            (mesh.rank(), mesh.layout().world_size()) == (self.world.rank(), self.world.size()),
            "the mesh is not over the ranks that device_mesh() was given",
        )?;
        let share = fabric.data_context()?;
        let (num_replicas, rank) = (share.data_parallel_size, share.data_parallel_rank);
        let all = all_gather_object(&**self.world, &(num_replicas, rank))?;
        self.ensure(
            all.iter().all(|&(n, _)| n == num_replicas)
                && (0..num_replicas).all(|replica| all.iter().any(|&(_, rank)| rank == replica)),
            format!("the ranks' parts of the data, (replicas, place), are {all:?}"),
        )?;
        Ok(share)
    }

    fn ensure_of(&self, parameter: &Parameter, holds: bool, what: &str) -> Result<()> {
        self.ensure(holds, format!("parameter `{}`: {what}", parameter.fqn()))
    }

    /// Every rank has its region of every parameter, with the seed's initial values. Together the
    /// ranks have all elements.
    pub(super) fn initial_values(&self, fabric: &Fabric) -> Result<()> {
        let (tree, mesh) = (fabric.module_tree()?, fabric.device_mesh());
        let mut owned_counts = Vec::new();
        for parameter in tree.parameters() {
            let local = parameter.local()?;
            let owned = parameter.spec().owned_region(|dim| mesh.coordinate(dim));
            let region = parameter.spec().region(|dim| mesh.coordinate(dim));
            self.ensure_of(parameter, local.region == region, "local() is not what its spec says")?;
            self.ensure_of(
                parameter,
                local.values.dims() == [region.elem_count()],
                "local().values is not flat with an element for each of its region",
            )?;
            self.ensure_of(
                parameter,
                local.values.dtype() == parameter.dtype(),
                "local().values is not of the parameter's dtype",
            )?;
            let expected = materialize::initial_values(parameter, SEED, &region)?;
            self.ensure_of(
                parameter,
                bytes(&local.values)? == bytes(&expected)?,
                "its initial values are not those of `materialize::initial_values`",
            )?;
            owned_counts.push(owned.elem_count() as i64);
        }
        let counts = Tensor::new(owned_counts, &Device::Cpu)?;
        self.world.all_reduce(&counts, ReduceOp::Sum)?.wait()?;
        for (parameter, count) in tree.parameters().iter().zip(counts.to_vec1::<i64>()?) {
            self.ensure_of(
                parameter,
                count as usize == parameter.elem_count(),
                "the ranks' own regions do not make up the whole, each element once",
            )?;
        }
        Ok(())
    }

    pub(super) fn values_outside_units(&self, fabric: &Fabric, when: &str) -> Result<()> {
        for parameter in fabric.module_tree()?.unit_parameters(None) {
            let has = parameter.value().is_ok();
            let what = format!("is outside of units and has no values {when}");
            self.ensure_of(&parameter, has, &what)?;
        }
        Ok(())
    }

    /// Optimizer state is sharded as its parameter.
    pub(super) fn state_tensors(
        &self,
        fabric: &Fabric,
        optimizer: &mut FabricOptimizer,
    ) -> Result<()> {
        let tree = fabric.module_tree()?;
        let states = optimizer.state_tensors()?;
        for parameter in tree.trainable() {
            let local = parameter.local()?;
            let parallel =
                states.iter().filter(|state| state.fqn == parameter.fqn()).all(|state| {
                    state.region == local.region
                        && state.values.elem_count() == local.region.elem_count()
                        && state.shape == parameter.global_shape()
                });
            self.ensure_of(parameter, parallel, "the optimizer's state is cut differently")?;
        }
        Ok(())
    }

    /// After a backward with synchronisation: gradients exist, with the shapes of the local values.
    pub(super) fn gradients(&self, fabric: &Fabric) -> Result<()> {
        for parameter in fabric.module_tree()?.parameters() {
            let grad = parameter.local_grad();
            self.ensure_of(
                parameter,
                grad.is_some() == parameter.requires_grad(),
                "local_grad() after a synchronised backward is set for what is frozen, or is not \
                 set for what is trained",
            )?;
            if let Some(grad) = grad {
                self.ensure_of(
                    parameter,
                    grad.dims() == parameter.local()?.values.dims(),
                    "local_grad() is not parallel to local().values",
                )?;
            }
        }
        Ok(())
    }

    /// Totals are summed over all ranks and equal on all, with the flags of the first call.
    pub(super) fn totals(&self, fabric: &Fabric, local: &Loss) -> Result<()> {
        let flags = [self.world.rank() as f64, 1.0];
        let numbers = [local.sum_value()?, local.count(), flags[0], flags[1]];
        let expected = Tensor::new(&numbers, &Device::Cpu)?;
        let mesh = fabric.device_mesh();
        mesh.group(DP_CP)?.all_reduce(&expected, ReduceOp::Sum)?.wait()?;
        let expected = expected.to_vec1::<f64>()?;
        let totals = fabric.step_totals(&flags)?;
        let found = [totals.loss_sum, totals.count, totals.flags[0], totals.flags[1]];
        let near = |a: f64, b: f64| (a - b).abs() <= 1e-5 * b.abs();
        self.ensure(
            found.iter().zip(&expected).all(|(&a, &b)| near(a, b)),
            format!("step_totals() are {found:?}, expected {expected:?}"),
        )?;
        let again = fabric.step_totals(&[9.0, 9.0])?;
        self.ensure(again == totals, "step_totals() changes when it is asked again")
    }

    /// The norm is a number that all ranks agree on.
    pub(super) fn norm(&self, optimizer: &FabricOptimizer) -> Result<f64> {
        let norm = optimizer.gradient_norm()?;
        let all = all_gather_object(&**self.world, &norm)?;
        let same = all.iter().all(|other| other.to_bits() == norm.to_bits());
        self.ensure(same && norm > 0.0, format!("gradient_norm() is {all:?} on the ranks"))?;
        Ok(norm)
    }

    pub(super) fn local_values(&self, fabric: &Fabric) -> Result<Vec<Vec<u8>>> {
        let tree = fabric.module_tree()?;
        tree.parameters().iter().map(|parameter| bytes(&parameter.local()?.values)).collect()
    }

    /// After a step: trained parameters have changed, gradients are cleared, and a forward is
    /// possible.
    pub(super) fn after_step(&self, fabric: &Fabric, before: &[Vec<u8>]) -> Result<()> {
        let tree = fabric.module_tree()?;
        let after = self.local_values(fabric)?;
        for ((parameter, before), after) in tree.parameters().iter().zip(before).zip(after) {
            let moved = *before != after;
            self.ensure_of(parameter, !moved || parameter.requires_grad(), "is frozen and moved")?;
            // A rank that did not use a parameter may lack its gradient.
            let moves = parameter.requires_grad()
                && !before.is_empty()
                && parameter.fqn() != model::USED_BY_ONE_REPLICA;
            self.ensure_of(parameter, moved || !moves, "did not change in a step")?;
            self.ensure_of(
                parameter,
                parameter.local_grad().is_none() && !parameter.has_accumulated(),
                "its gradient is not forgotten after a step",
            )?;
        }
        self.values_outside_units(fabric, "after a step")
    }

    /// After `prepare_save`, ranks with the same region have equal values.
    pub(super) fn saved(&self, fabric: &Fabric, optimizer: &mut FabricOptimizer) -> Result<()> {
        drop(fabric.checkpoints().save_request(
            "conformance",
            Some(optimizer),
            &(),
            Default::default(),
        )?);
        self.values_outside_units(fabric, "after prepare_save()")?;
        let tree = fabric.module_tree()?;
        for parameter in tree.parameters() {
            let local = parameter.local()?;
            let digest = twox_hash::XxHash3_64::oneshot(&bytes(&local.values)?);
            let all = all_gather_object(&**self.world, &(local.region.clone(), digest))?;
            self.ensure_of(
                parameter,
                all.iter().all(|(region, other)| *region != local.region || *other == digest),
                "ranks that hold the same part of it hold different values when it is saved",
            )?;
        }
        Ok(())
    }
}

fn bytes(values: &Tensor) -> Result<Vec<u8>> {
    let values = values.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.contiguous()?;
    storage::with_bytes(&values, <[u8]>::to_vec)
}
