//! What loops exchange with `Fabric`.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use fulgurite_core::collective::ReduceOp;
use fulgurite_core::fabric::Fabric;
use fulgurite_test_support::training::{init, strategy};
use fulgurite_transports::run_ranks;

const DDP: &str = r#"{"type": "ddp"}"#;

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

            // A view that is not contiguous, and a scalar.
            let tensor = (Tensor::arange(0f32, 6., &Device::Cpu)?.reshape((2, 3))? + rank as f64)?;
            let all = fabric.all_gather(&tensor.t()?)?;
            assert_eq!(all.dims(), [ranks, 3, 2]);
            for of in 0..ranks {
                let expected: Vec<Vec<f32>> =
                    (0..3).map(|i| [i, i + 3].map(|x| (x + of) as f32).to_vec()).collect();
                assert_eq!(all.get(of)?.to_vec2::<f32>()?, expected);
            }
            let scalar = Tensor::new(rank as u32, &Device::Cpu)?;
            assert_eq!(fabric.all_gather(&scalar)?.to_vec1::<u32>()?, (0..ranks as u32).collect::<Vec<_>>());

            let sum = Tensor::full(rank as f32, 2, &Device::Cpu)?.to_dtype(DType::F64)?;
            fabric.all_reduce(&sum, ReduceOp::Sum)?;
            assert_eq!(sum.to_vec1::<f64>()?, [(0..ranks).sum::<usize>() as f64; 2]);

            let error = fabric.broadcast(&0, 7).unwrap_err().to_string();
            assert_eq!(error, format!("there is no rank 7 to broadcast from: there are {ranks} rank(s), counted from 0"));
            fabric.barrier()
        })
        .unwrap();
    }
}
