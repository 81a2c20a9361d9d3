//! all_reduce and reduce_scatter.

use half::{bf16, f16};

use super::suite::{LARGE, Suite};
use super::value::{Value, reduced, slacks, values};
use crate::Result;
use fulgurite_engine::collective::{ReduceOp, ReduceScatter};

const OPS: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max];

impl Suite<'_> {
    pub(super) fn all_reduce(&self) -> Result<()> {
        self.all_reduce_of::<f32>()?;
        self.all_reduce_of::<f64>()?;
        self.all_reduce_of::<bf16>()?;
        self.all_reduce_of::<f16>()?;
        self.all_reduce_of::<u8>()?;
        self.all_reduce_of::<u32>()?;
        self.all_reduce_of::<i32>()?;
        self.all_reduce_of::<i64>()?;
        self.all_reduce_case::<f32>(ReduceOp::Sum, LARGE)?;
        self.all_reduce_case::<bf16>(ReduceOp::Sum, LARGE)?;
        self.nan::<f32>(f32::NAN)?;
        self.nan::<f64>(f64::NAN)?;
        self.nan::<bf16>(bf16::NAN)?;
        self.nan::<f16>(f16::NAN)
    }

    fn all_reduce_of<T: Value>(&self) -> Result<()> {
        for op in OPS {
            for n in [0, 1, 2, 7, 64, 1023, 4099] {
                self.all_reduce_case::<T>(op, n)?;
            }
        }
        Ok(())
    }

    fn all_reduce_case<T: Value>(&self, op: ReduceOp, n: usize) -> Result<()> {
        let salt = n as u64;
        let view = self.view(&values::<T>(self.rank(), n, salt))?;
        self.group.all_reduce(&view.tensor, op)?.wait()?;
        let what = format!("all_reduce {op:?} of {n} {:?}", T::DTYPE);
        view.expect_reduced(self, &what, op, (n, salt), 0..n)
    }

    /// A NaN of one rank is in the result; other elements are unaffected.
    fn nan<T: Value>(&self, nan: T) -> Result<()> {
        if !self.group.exact_reductions() {
            return Ok(());
        }
        let n = 2 * self.size() + 1;
        for op in [ReduceOp::Min, ReduceOp::Max] {
            let mut mine = values::<T>(self.rank(), n, 9);
            mine[2 * self.rank()] = nan;
            let mut expected = reduced::<T>(op, self.size(), n, 9);
            (0..self.size()).for_each(|rank| expected[2 * rank] = nan);
            let view = self.view(&mine)?;
            self.group.all_reduce(&view.tensor, op)?.wait()?;
            view.expect(self, &format!("all_reduce {op:?} with NaN, {:?}", T::DTYPE), &expected)?;
        }
        Ok(())
    }

    pub(super) fn reduce_scatter(&self) -> Result<()> {
        self.reduce_scatter_of::<f32>()?;
        self.reduce_scatter_of::<f64>()?;
        self.reduce_scatter_of::<bf16>()?;
        self.reduce_scatter_of::<f16>()?;
        self.reduce_scatter_of::<u8>()?;
        self.reduce_scatter_of::<u32>()?;
        self.reduce_scatter_of::<i32>()?;
        self.reduce_scatter_of::<i64>()?;
        let share = LARGE / self.size();
        self.reduce_scatter_case::<f32>(ReduceOp::Sum, vec![share; self.size()])?;
        self.reduce_scatter_case::<f32>(ReduceOp::Sum, self.one_has_all(LARGE))?;
        self.reduce_scatter_parts()?;
        self.reduce_scatter_in_place()
    }

    fn reduce_scatter_of<T: Value>(&self) -> Result<()> {
        for op in OPS {
            for counts in self.layouts() {
                self.reduce_scatter_case::<T>(op, counts)?;
            }
        }
        Ok(())
    }

    fn reduce_scatter_case<T: Value>(&self, op: ReduceOp, counts: Vec<usize>) -> Result<()> {
        let n: usize = counts.iter().sum();
        let salt = 1 + n as u64;
        let mine = values::<T>(self.rank(), n, salt);
        let input = self.view(&mine)?;
        let output = self.view(&vec![T::MARGIN; counts[self.rank()]])?;
        let whole = self.view(&mine)?;
        let part = ReduceScatter {
            input: input.tensor.clone(),
            output: output.tensor.clone(),
            counts: counts.clone(),
        };
        self.group.reduce_scatter(vec![part], op)?.wait()?;
        self.group.all_reduce(&whole.tensor, op)?.wait()?;
        let what = format!("reduce_scatter {op:?} of {counts:?} {:?}", T::DTYPE);
        whole.expect_reduced(self, &what, op, (n, salt), 0..n)?;
        let own = self.range_of(&counts, self.rank());
        output.expect_reduced(self, &what, op, (n, salt), own)?;
        input.expect(self, &format!("{what}: its input"), &mine)
    }

    /// Several tensors, of several dtypes, in one call.
    fn reduce_scatter_parts(&self) -> Result<()> {
        let mut parts = vec![];
        let mut outputs = vec![];
        let layouts = self.layouts();
        for (i, counts) in layouts.iter().enumerate() {
            let n = counts.iter().sum();
            let input = self.view(&values::<f32>(self.rank(), n, i as u64))?.tensor;
            let output = self.view(&vec![0f32; counts[self.rank()]])?;
            parts.push(ReduceScatter {
                input,
                output: output.tensor.clone(),
                counts: counts.clone(),
            });
            outputs.push(output);
        }
        let n = 3 * self.size();
        let input = self.view(&values::<bf16>(self.rank(), n, 99))?.tensor;
        let half = self.view(&[bf16::ZERO; 3])?;
        parts.push(ReduceScatter::even(&half.tensor, &input, self.size()));
        self.group.reduce_scatter(parts, ReduceOp::Sum)?.wait()?;
        for (i, (output, counts)) in outputs.iter().zip(&layouts).enumerate() {
            let n = counts.iter().sum();
            let what = format!("reduce_scatter of several, part {i}");
            let mine = self.range_of(counts, self.rank());
            output.expect_reduced(self, &what, ReduceOp::Sum, (n, i as u64), mine)?;
        }
        let mine = 3 * self.rank()..3 * self.rank() + 3;
        let what = "reduce_scatter of several, the bf16 part";
        half.expect_reduced(self, what, ReduceOp::Sum, (n, 99), mine)
    }

    /// With an output that is this rank's part of the input.
    fn reduce_scatter_in_place(&self) -> Result<()> {
        let counts = vec![1000; self.size()];
        let n = 1000 * self.size();
        let mut expected = values::<f32>(self.rank(), n, 5);
        let view = self.view(&expected)?;
        let output = view.tensor.narrow(0, 1000 * self.rank(), 1000)?;
        let part = ReduceScatter { input: view.tensor.clone(), output, counts: counts.clone() };
        self.group.reduce_scatter(vec![part], ReduceOp::Sum)?.wait()?;
        let mine = self.range_of(&counts, self.rank());
        let sums = reduced::<f32>(ReduceOp::Sum, self.size(), n, 5);
        expected[mine.clone()].copy_from_slice(&sums[mine.clone()]);
        let slacks = slacks::<f32>(ReduceOp::Sum, self.size(), n, 5);
        let exact = self.group.exact_reductions();
        view.expect_each(
            self,
            "reduce_scatter in place",
            &expected,
            |i, found, expected| match mine.contains(&i) && !exact {
                true => found.is_near(expected, slacks[i]),
                false => found.same(expected),
            },
        )
    }

    /// Ways to split a tensor over the ranks: even, uneven, with empty parts, all empty.
    pub(super) fn layouts(&self) -> Vec<Vec<usize>> {
        let size = self.size();
        let n = 3 * size - 2;
        let per = n.div_ceil(size);
        vec![
            vec![0; size],
            vec![1; size],
            vec![257; size],
            (0..size).map(|r| (r * 7 + 3) % 5 * 11).collect(),
            // As torch.chunk: the last ranks get fewer, or none.
            (0..size).map(|r| n.saturating_sub(r * per).min(per)).collect(),
            self.one_has_all(1001),
        ]
    }

    pub(super) fn one_has_all(&self, n: usize) -> Vec<usize> {
        (0..self.size()).map(|r| if r == self.size() - 1 { n } else { 0 }).collect()
    }

    pub(super) fn range_of(&self, counts: &[usize], rank: usize) -> std::ops::Range<usize> {
        let start = counts[..rank].iter().sum();
        start..start + counts[rank]
    }
}
