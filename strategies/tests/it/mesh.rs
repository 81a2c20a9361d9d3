//! Meshes with real groups: dimensions, views, sub-meshes.

use candle_core::{Device, Tensor};
use fulgurite_core::Result;
use fulgurite_core::collective::{ProcessGroup, ReduceOp, all_gather_object};
use fulgurite_core::mesh::{
    CONTEXT_PARALLEL, DATA_PARALLEL, DATA_PARALLEL_REPLICATE, DATA_PARALLEL_SHARD, DP_CP,
    DeviceMesh, TENSOR_PARALLEL,
};
use fulgurite_test_message::assert_says;
use fulgurite_transports::run_ranks;

/// The sum of the ranks' global numbers over a group.
fn sum_of_ranks(group: &dyn ProcessGroup, rank: usize) -> Result<i64> {
    let number = Tensor::new(&[rank as i64], &Device::Cpu)?;
    group.all_reduce(&number, ReduceOp::Sum)?.wait()?;
    Ok(number.to_vec1::<i64>()?[0])
}

// checklist: NeMo: dp_cp exists only with cp > 1
#[test]
fn groups_connect_ranks_along_their_dimensions() {
    run_ranks(8, |world| {
        let rank = world.rank();
        let layout = DeviceMesh::layout_for(8, Some(2), Some(2), Some(1), Some(2))?;
        let mesh = DeviceMesh::new(layout, world)?;
        let peers = |name| sum_of_ranks(&**mesh.group(name).unwrap(), rank);
        // Coordinates of rank r are its bits (replicate, shard, tensor).
        let r = rank as i64;
        assert_eq!(peers(TENSOR_PARALLEL)?, 2 * (r & !1) + 1);
        assert_eq!(peers(DATA_PARALLEL_SHARD)?, 2 * (r & !2) + 2);
        assert_eq!(peers(DATA_PARALLEL_REPLICATE)?, 2 * (r & !4) + 4);
        assert_eq!(peers(CONTEXT_PARALLEL)?, r);
        assert_eq!(peers(DATA_PARALLEL)?, 4 * (r & 1) + 2 + 4 + 6);
        assert_eq!(peers(DP_CP)?, peers(DATA_PARALLEL)?);
        assert_eq!(mesh.coordinate(DATA_PARALLEL), rank >> 1);
        Ok(())
    })
    .unwrap();
}

#[test]
fn sub_meshes_have_their_own_coordinates() {
    run_ranks(8, |world| {
        let rank = world.rank();
        let layout = DeviceMesh::layout_for(8, Some(2), Some(2), Some(1), Some(2))?;
        let mut mesh = DeviceMesh::new(layout, world)?;
        let tensor = mesh.get(TENSOR_PARALLEL)?;
        assert_eq!((tensor.layout().world_size(), tensor.rank()), (2, rank & 1));
        let sub = mesh.submesh(&[DATA_PARALLEL_SHARD, TENSOR_PARALLEL])?;
        assert_eq!((sub.layout().sizes(), sub.rank()), (&[2, 2][..], rank & 3));
        assert_eq!(sub.layout().coordinate(sub.rank())?, [(rank >> 1) & 1, rank & 1]);
        assert_eq!(sum_of_ranks(&**sub.world(), rank)?, 4 * (rank as i64 & 4) + 6);

        mesh.flatten("model", &[DATA_PARALLEL_SHARD, TENSOR_PARALLEL])?;
        assert_eq!(mesh.size("model")?, 4);
        // Every rank knows the coordinates of all, along dimensions and views.
        for name in mesh.names() {
            let own = all_gather_object(&**mesh.world(), &mesh.coordinate(name))?;
            let of = (0..8).map(|rank| mesh.coordinate_of(rank, name));
            assert_eq!(of.collect::<Result<Vec<_>>>()?, own, "{name}");
        }
        assert!(mesh.coordinate_of(8, "model").is_err());
        assert_eq!(mesh.coordinate_of(7, "pp")?, 0);
        let error = mesh.flatten("model", &[TENSOR_PARALLEL]).unwrap_err();
        assert_says!(error, "device mesh … dimension or view `model` already");
        let error = mesh.submesh(&[TENSOR_PARALLEL, DATA_PARALLEL_SHARD]).unwrap_err();
        assert_says!(error, "device mesh: … tensor_parallel, data_parallel_shard … order …");
        assert_says!(mesh.get("pp").unwrap_err(), "device mesh: no dimension `pp` …");
        Ok(())
    })
    .unwrap();
}
