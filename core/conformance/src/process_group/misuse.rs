//! Wrong arguments: the rank that passes them gets an error, and the group still works afterwards.

use candle_core::{DType, Tensor};

use super::suite::Suite;
use super::value::values;
use crate::Result;
use fulgurite_engine::collective::{
    AllGather, AllToAll, Collective, ReduceOp, ReduceScatter, Work,
};

impl Suite<'_> {
    /// Every rank makes the same mistake, so that no rank waits for another.
    pub(super) fn misuse(&self) -> Result<()> {
        let (group, size, device) = (self.group, self.size(), self.device);
        let ones = |n: usize, dtype| Tensor::ones(n, dtype, device);
        let four = ones(4, DType::F32)?;
        let all = ones(4 * size, DType::F32)?;
        let gather = |input: &Tensor, output: &Tensor, counts: &[usize]| {
            let (input, output, counts) = (input.clone(), output.clone(), counts.to_vec());
            group.all_gather_into(vec![AllGather { input, output, counts }])
        };
        let scatter = |input: &Tensor, output: &Tensor, counts: &[usize]| {
            let (input, output, counts) = (input.clone(), output.clone(), counts.to_vec());
            group.reduce_scatter(vec![ReduceScatter { input, output, counts }], ReduceOp::Sum)
        };
        let even = vec![4; size];
        let short = &even[1..];
        let five = vec![5; size];
        let doubles = ones(4 * size, DType::F64)?;
        let too_long = ones(4 * size + 1, DType::F32)?;

        self.refused("counts for too few ranks (gather)", gather(&four, &all, short))?;
        self.refused(
            "an input unlike its count",
            gather(&four, &ones(5 * size, DType::F32)?, &five),
        )?;
        self.refused("an output unlike the counts", gather(&four, &too_long, &even))?;
        self.refused("an output of another dtype (gather)", gather(&four, &doubles, &even))?;
        self.refused("counts for too few ranks (scatter)", scatter(&all, &four, short))?;
        self.refused(
            "an output unlike its count",
            scatter(&ones(5 * size, DType::F32)?, &four, &five),
        )?;
        self.refused("an input unlike the counts", scatter(&too_long, &four, &even))?;
        self.refused("an input of another dtype (scatter)", scatter(&doubles, &four, &even))?;
        self.refused("broadcast from a rank that is not", group.broadcast(&four, size))?;
        self.refused("send to a rank that is not", group.send(&four, size))?;
        self.refused("recv from a rank that is not", group.recv(&four, size))?;
        self.refused("send to itself", group.send(&four, self.rank()))?;
        self.refused("all_to_all of two lengths", group.all_to_all(&all, &too_long))?;
        if size > 1 {
            let odd = ones(size + 1, DType::F32)?;
            let same = ones(size + 1, DType::F32)?;
            self.refused("all_to_all that does not divide", group.all_to_all(&odd, &same))?;
        }
        self.refused("all_to_all of two dtypes", group.all_to_all(&doubles, &all))?;
        let exchange = |counts: Vec<Vec<usize>>, output: &Tensor| {
            let exchange = AllToAll::uneven(output, &all, counts);
            group.start(Collective::AllToAll(exchange), true)
        };
        let fours = |ranks: usize| vec![vec![4; ranks]; size];
        self.refused("all_to_all with counts of too many ranks", exchange(fours(size + 1), &all))?;
        self.refused(
            "all_to_all with an output unlike its counts",
            exchange(fours(size), &too_long),
        )?;
        self.refused("all_to_all with an input unlike its counts", {
            exchange(vec![vec![5; size]; size], &ones(5 * size, DType::F32)?)
        })?;
        let strided = Tensor::ones((3, 4), DType::F32, device)?.t()?;
        self.refused("a tensor that is not contiguous", group.all_reduce(&strided, ReduceOp::Sum))?;

        let partitions: [(&str, Vec<Vec<usize>>); 4] = [
            ("a partition that leaves out all", vec![]),
            ("a partition with an empty set", vec![(0..size).collect(), vec![]]),
            ("a partition with a rank twice", vec![(0..size).chain([0]).collect()]),
            ("a partition with a rank that is not", vec![(0..=size).collect()]),
        ];
        for (what, partition) in partitions {
            let refused = group.split(&partition, "wrong").is_err();
            self.ensure(refused, format!("{what} was not refused"))?;
        }

        let view = self.view(&values::<f32>(self.rank(), 50, 1))?;
        group.all_reduce(&view.tensor, ReduceOp::Sum)?.wait()?;
        view.expect_reduced(self, "after misuse", ReduceOp::Sum, (50, 1), 0..50)
    }

    fn refused(&self, what: &str, result: Result<Work>) -> Result<()> {
        self.ensure(result.and_then(Work::wait).is_err(), format!("{what} was not refused"))
    }
}
