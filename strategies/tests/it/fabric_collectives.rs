//! Collectives of `Fabric` for training loops.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use fulgurite_core::collective::ReduceOp;
use fulgurite_core::counted;
use fulgurite_core::fabric::Fabric;
use fulgurite_test_support::training::{init, strategy};
use fulgurite_transports::run_ranks;

const DDP: &str = r#"{"type": "ddp"}"#;

// checklist: Lightning: all_reduce, all_gather, barrier, broadcast
#[test]
fn values_and_tensors_of_all_ranks_come_to_each() {
    for ranks in [1, 3] {
        run_ranks(ranks, |world| {
            let rank = world.rank();
            let fabric = Fabric::new(world, strategy(DDP)?, init(DDP)?, 11)?;
            let own = BTreeMap::from([("rank".to_owned(), vec![rank; rank])]);
            let of = |rank: usize| BTreeMap::from([("rank".to_owned(), vec![rank; rank])]);
            assert_eq!(fabric.broadcast(&own, ranks - 1)?, of(ranks - 1));
            assert_eq!(fabric.all_gather_object(&own)?, (0..ranks).map(of).collect::<Vec<_>>());

            // A non-contiguous view, and a scalar.
            let tensor = (Tensor::arange(0f32, 6., &Device::Cpu)?.reshape((2, 3))? + rank as f64)?;
            let all = fabric.all_gather(&tensor.t()?)?;
            assert_eq!(all.dims(), [ranks, 3, 2]);
            for of in 0..ranks {
                let expected: Vec<Vec<f32>> =
                    (0..3).map(|i| [i, i + 3].map(|x| (x + of) as f32).to_vec()).collect();
                assert_eq!(all.get(of)?.to_vec2::<f32>()?, expected);
            }
            let scalar = Tensor::new(rank as u32, &Device::Cpu)?;
            assert_eq!(
                fabric.all_gather(&scalar)?.to_vec1::<u32>()?,
                (0..ranks as u32).collect::<Vec<_>>()
            );

            let sum = Tensor::full(rank as f32, 2, &Device::Cpu)?.to_dtype(DType::F64)?;
            fabric.all_reduce(&sum, ReduceOp::Sum)?;
            assert_eq!(sum.to_vec1::<f64>()?, [(0..ranks).sum::<usize>() as f64; 2]);

            let error = fabric.broadcast(&0, 7).unwrap_err().to_string();
            assert_eq!(
                error,
                format!(
                    "there is no rank 7 to broadcast from: the job has {}, counted from 0",
                    counted(ranks, "rank")
                )
            );
            fabric.barrier()
        })
        .unwrap();
    }
}

// checklist: Lightning: all_reduce, all_gather, barrier, broadcast
#[test]
fn collectives_take_means_and_groups() {
    const MESH: &str =
        r#"{"type": "fsdp_tp", "data_parallel_shard_size": 3, "tensor_parallel_size": 2}"#;
    run_ranks(6, |world| {
        let rank = world.rank();
        let fabric = Fabric::new(world, strategy(MESH)?, init(MESH)?, 11)?;
        let own = Tensor::new(&[rank as f32, 1.0], &Device::Cpu)?;
        assert_eq!(fabric.all_mean(&own)?.to_vec1::<f32>()?, [2.5, 1.0]);
        // The caller's tensor is unchanged.
        assert_eq!(own.to_vec1::<f32>()?, [rank as f32, 1.0]);
        let (row, column) = (rank / 2, rank % 2);
        let mean = fabric.collectives("tensor_parallel")?.all_mean(&own)?.to_vec1::<f32>()?;
        assert_eq!(mean, [2.0 * row as f32 + 0.5, 1.0]);
        let sum = own.copy()?;
        fabric.collectives("data_parallel")?.all_reduce(&sum, ReduceOp::Sum)?;
        assert_eq!(sum.to_vec1::<f32>()?, [(6 + 3 * column) as f32, 3.0]);
        let there = fabric
            .collectives("data_parallel")?
            .all_gather(&Tensor::new(rank as u32, &Device::Cpu)?)?;
        let expected: Vec<u32> = (0..3).map(|i| (2 * i + column) as u32).collect();
        assert_eq!(there.to_vec1::<u32>()?, expected);

        let whole = Tensor::new(&[1i64], &Device::Cpu)?;
        let error = fabric.all_mean(&whole).unwrap_err().to_string();
        assert!(error.contains("floating-point") && error.contains("I64"), "{error}");
        let error = fabric.collectives("tp").err().expect("there is no such dimension").to_string();
        assert!(error.contains("tp") && error.contains("tensor_parallel"), "{error}");
        Ok(())
    })
    .unwrap();
}
