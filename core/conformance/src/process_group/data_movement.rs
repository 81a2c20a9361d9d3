//! Collectives that only move data, and several collectives at a time.

use half::{bf16, f16};

use super::suite::{LARGE, Suite};
use super::value::{Value, values};
use crate::Result;
use fulgurite_engine::collective::{AllGather, AllToAll, Collective, ReduceOp};

impl Suite<'_> {
    pub(super) fn all_gather(&self) -> Result<()> {
        for counts in self.layouts() {
            self.all_gather_case::<f32>(counts.clone())?;
            self.all_gather_case::<f64>(counts.clone())?;
            self.all_gather_case::<bf16>(counts.clone())?;
            self.all_gather_case::<f16>(counts.clone())?;
            self.all_gather_case::<u8>(counts.clone())?;
            self.all_gather_case::<u32>(counts.clone())?;
            self.all_gather_case::<i32>(counts.clone())?;
            self.all_gather_case::<i64>(counts)?;
        }
        self.all_gather_case::<f32>(vec![LARGE / self.size() + 1; self.size()])?;
        self.all_gather_case::<u8>(self.one_has_all(LARGE))?;
        self.all_gather_parts()?;
        self.all_gather_in_place()
    }

    fn gathered<T: Value>(&self, counts: &[usize], salt: u64) -> Vec<T> {
        counts.iter().enumerate().flat_map(|(rank, &n)| values::<T>(rank, n, salt)).collect()
    }

    fn all_gather_case<T: Value>(&self, counts: Vec<usize>) -> Result<()> {
        let mine = values::<T>(self.rank(), counts[self.rank()], 2);
        let input = self.view(&mine)?;
        let expected = self.gathered::<T>(&counts, 2);
        let output = self.view(&vec![T::MARGIN; expected.len()])?;
        let part = AllGather {
            input: input.tensor.clone(),
            output: output.tensor.clone(),
            counts: counts.clone(),
        };
        self.group.all_gather_into(vec![part])?.wait()?;
        let what = format!("all_gather_into of {counts:?} {:?}", T::DTYPE);
        output.expect(self, &what, &expected)?;
        input.expect(self, &format!("{what}: its input"), &mine)
    }

    /// Several tensors, of several dtypes, in one call; and no tensors.
    fn all_gather_parts(&self) -> Result<()> {
        self.group.all_gather_into(vec![])?.wait()?;
        let layouts = self.layouts();
        let mut parts = vec![];
        let mut outputs = vec![];
        for (i, counts) in layouts.iter().enumerate() {
            let input = self.view(&values::<f32>(self.rank(), counts[self.rank()], i as u64))?;
            let output = self.view(&vec![0f32; counts.iter().sum()])?;
            parts.push(AllGather {
                input: input.tensor,
                output: output.tensor.clone(),
                counts: counts.clone(),
            });
            outputs.push(output);
        }
        let bytes = self.view(&vec![0u8; 5 * self.size()])?;
        let input = self.view(&values::<u8>(self.rank(), 5, 77))?.tensor;
        parts.insert(1, AllGather::even(&bytes.tensor, &input, self.size()));
        self.group.all_gather_into(parts)?.wait()?;
        for (i, (output, counts)) in outputs.iter().zip(&layouts).enumerate() {
            let expected = self.gathered::<f32>(counts, i as u64);
            output.expect(self, &format!("all_gather_into of several, part {i}"), &expected)?;
        }
        let expected = self.gathered::<u8>(&vec![5; self.size()], 77);
        bytes.expect(self, "all_gather_into of several, the u8 part", &expected)
    }

    /// With an input that is this rank's part of the output.
    fn all_gather_in_place(&self) -> Result<()> {
        let counts: Vec<usize> = (0..self.size()).map(|rank| 500 + rank).collect();
        let expected = self.gathered::<f32>(&counts, 3);
        let mine = self.range_of(&counts, self.rank());
        let mut start = vec![0f32; expected.len()];
        start[mine.clone()].copy_from_slice(&expected[mine.clone()]);
        let view = self.view(&start)?;
        let input = view.tensor.narrow(0, mine.start, mine.len())?;
        let part = AllGather { input, output: view.tensor.clone(), counts };
        self.group.all_gather_into(vec![part])?.wait()?;
        view.expect(self, "all_gather_into in place", &expected)
    }

    pub(super) fn broadcast(&self) -> Result<()> {
        for src in 0..self.size() {
            for n in [0, 1, 513] {
                self.broadcast_case::<f32>(src, n)?;
                self.broadcast_case::<bf16>(src, n)?;
                self.broadcast_case::<i64>(src, n)?;
            }
        }
        self.broadcast_case::<u8>(self.size() - 1, 4 * LARGE)
    }

    fn broadcast_case<T: Value>(&self, src: usize, n: usize) -> Result<()> {
        let view = self.view(&values::<T>(self.rank(), n, 4))?;
        self.group.broadcast(&view.tensor, src)?.wait()?;
        let what = format!("broadcast of {n} {:?} from rank {src}", T::DTYPE);
        view.expect(self, &what, &values::<T>(src, n, 4))
    }

    pub(super) fn all_to_all(&self) -> Result<()> {
        for n in [0, 1, 129, LARGE / self.size() / 4] {
            self.all_to_all_case::<f32>(n)?;
            self.all_to_all_case::<f16>(n)?;
            self.all_to_all_case::<u32>(n)?;
        }
        let size = self.size();
        // Parts of all lengths, none at all, all from one rank, and all to one.
        let lengths = |count: &dyn Fn(usize, usize) -> usize| -> Vec<Vec<usize>> {
            (0..size).map(|i| (0..size).map(|j| count(i, j)).collect()).collect()
        };
        for counts in [
            lengths(&|i, j| (i * 7 + j * 3) % 5),
            lengths(&|_, _| 0),
            lengths(&|i, j| if i == size - 1 { 100 + j } else { 0 }),
            lengths(&|i, j| if j == 0 { 65 * i } else { 0 }),
            lengths(&|i, j| if i == j { 3 } else { LARGE / size / (1 + i + j) }),
        ] {
            self.uneven_all_to_all_case::<f32>(&counts)?;
            self.uneven_all_to_all_case::<bf16>(&counts)?;
            self.uneven_all_to_all_case::<u32>(&counts)?;
            self.uneven_all_to_all_case::<i64>(&counts)?;
        }
        Ok(())
    }

    /// Sends `counts[i][j]` elements from rank `i` to rank `j`.
    fn uneven_all_to_all_case<T: Value>(&self, counts: &[Vec<usize>]) -> Result<()> {
        let own = self.rank();
        let sent = counts[own].iter().sum();
        let received = counts.iter().map(|row| row[own]).sum();
        let input = self.view(&values::<T>(own, sent, 6))?;
        let output = self.view(&vec![T::MARGIN; received])?;
        let exchange = AllToAll::uneven(&output.tensor, &input.tensor, counts.to_vec());
        self.group.start(Collective::AllToAll(exchange), true)?.wait()?;
        let mut expected = vec![];
        for (rank, row) in counts.iter().enumerate() {
            let before: usize = row[..own].iter().sum();
            expected.extend((before..before + row[own]).map(|i| T::test_value(rank, i, 6)));
        }
        output.expect(self, &format!("all_to_all of {counts:?} {:?}", T::DTYPE), &expected)
    }

    /// Sends `n` elements from each rank to each rank.
    fn all_to_all_case<T: Value>(&self, n: usize) -> Result<()> {
        let size = self.size();
        let input = self.view(&values::<T>(self.rank(), n * size, 6))?;
        let output = self.view(&vec![T::MARGIN; n * size])?;
        self.group.all_to_all(&output.tensor, &input.tensor)?.wait()?;
        let mut expected = vec![];
        for rank in 0..size {
            expected.extend((0..n).map(|i| T::test_value(rank, self.rank() * n + i, 6)));
        }
        output.expect(self, &format!("all_to_all of {n} {:?} a pair", T::DTYPE), &expected)
    }

    /// Rings in both directions. All ranks start their send before their receive, as ring attention
    /// does, so a send must not block a later receive.
    pub(super) fn point_to_point(&self) -> Result<()> {
        let (rank, size) = (self.rank(), self.size());
        if size == 1 {
            return Ok(());
        }
        for step in [1, size - 1] {
            for n in [0, 1, 333, LARGE] {
                let (next, previous) = ((rank + step) % size, (rank + size - step) % size);
                let sent = self.view(&values::<f32>(rank, n, 8))?;
                let received = self.view(&vec![0f32; n])?;
                let send = self.group.send(&sent.tensor, next)?;
                let recv = self.group.recv(&received.tensor, previous)?;
                send.wait()?;
                recv.wait()?;
                let what = format!("send / recv of {n} in a ring of step {step}");
                received.expect(self, &what, &values::<f32>(previous, n, 8))?;
            }
        }
        self.messages_in_order()?;
        self.messages_begin_when_asked()
    }

    /// A message that its sender does not wait for arrives once it has begun. The sender waits for
    /// an answer in another group.
    fn messages_begin_when_asked(&self) -> Result<()> {
        let partition: Vec<Vec<usize>> =
            std::iter::once(vec![0, 1]).chain((2..self.size()).map(|rank| vec![rank])).collect();
        let answers = self.group.split(&partition, "answers")?;
        let question = self.view(&values::<f32>(0, 3, 5))?;
        let answer = self.view(&values::<f32>(1, 3, 6))?;
        if self.rank() == 0 {
            let send = self.group.send(&question.tensor, 1)?;
            self.group.begin_messages()?;
            let received = self.view(&[0f32; 3])?;
            answers.recv(&received.tensor, 1)?.wait()?;
            send.wait()?;
            received.expect(self, "an answer in another group", &values::<f32>(1, 3, 6))?;
        } else if self.rank() == 1 {
            let received = self.view(&[0f32; 3])?;
            self.group.recv(&received.tensor, 0)?.wait()?;
            answers.send(&answer.tensor, 0)?.wait()?;
            received.expect(self, "a message that has begun", &values::<f32>(0, 3, 5))?;
        }
        self.group.barrier()?.wait()
    }

    /// Messages between a pair of ranks arrive in the order of sending, and other pairs are not
    /// blocked.
    fn messages_in_order(&self) -> Result<()> {
        let count = 10;
        if self.rank() == 0 {
            let works: Result<Vec<_>> = (0..count)
                .map(|i| self.group.send(&self.view(&values::<i64>(0, 5, i))?.tensor, 1))
                .collect();
            for work in works? {
                work.wait()?;
            }
        } else if self.rank() == 1 {
            let views: Result<Vec<_>> = (0..count).map(|_| self.view(&[0i64; 5])).collect();
            let views = views?;
            let works: Result<Vec<_>> =
                views.iter().map(|view| self.group.recv(&view.tensor, 0)).collect();
            for work in works?.into_iter().rev() {
                work.wait()?;
            }
            for (i, view) in views.iter().enumerate() {
                view.expect(self, &format!("message {i}"), &values::<i64>(0, 5, i as u64))?;
            }
        }
        self.group.barrier()?.wait()
    }

    /// A collective that some ranks wait for at once keeps its order between earlier and later
    /// ones.
    pub(super) fn waited_for(&self) -> Result<()> {
        let size = self.size() as i64;
        let chain = self.view(&[1i64; 10])?;
        let mut expected = 1;
        for round in 0..6 {
            let before = self.group.all_reduce(&chain.tensor, ReduceOp::Sum)?;
            let overlap = self.rank() % 2 != round % 2;
            let sum = Collective::all_reduce(&chain.tensor, ReduceOp::Sum);
            self.group.start(sum, overlap)?.wait()?;
            expected *= size * size;
            chain.expect(self, "a chain that is waited for at once", &[expected; 10])?;
            before.wait()?;
        }
        Ok(())
    }

    /// Many collectives start before the first wait; they are waited for in reverse order, or
    /// never.
    pub(super) fn in_flight(&self) -> Result<()> {
        let size = self.size();
        let mut works = vec![];
        let mut sums = vec![];
        let mut gathers = vec![];
        for round in 0..12u64 {
            let n = 100 + 997 * round as usize;
            let sum = self.view(&values::<f32>(self.rank(), n, round))?;
            works.push(self.group.all_reduce(&sum.tensor, ReduceOp::Sum)?);
            sums.push((sum, n, round));

            let input = self.view(&values::<f64>(self.rank(), n, round))?.tensor;
            let gather = self.view(&vec![0f64; n * size])?;
            let part = AllGather::even(&gather.tensor, &input, size);
            works.push(self.group.all_gather_into(vec![part])?);
            gathers.push((gather, n, round));

            drop(self.group.barrier()?);
        }
        // Each collective of the chain uses the previous result.
        let chain = self.view(&[1i64; 10])?;
        for _ in 0..5 {
            works.push(self.group.all_reduce(&chain.tensor, ReduceOp::Sum)?);
        }
        for work in works.into_iter().rev() {
            work.wait()?;
        }
        for (view, n, salt) in sums {
            let what = format!("all_reduce {salt} of many");
            view.expect_reduced(self, &what, ReduceOp::Sum, (n, salt), 0..n)?;
        }
        for (view, n, salt) in gathers {
            let expected = self.gathered::<f64>(&vec![n; size], salt);
            view.expect(self, &format!("all_gather_into {salt} of many"), &expected)?;
        }
        chain.expect(self, "a chain of five all_reduce", &[(size as i64).pow(5); 10])
    }
}
