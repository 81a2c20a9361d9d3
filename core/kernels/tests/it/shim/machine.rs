//! Memory, and plans that run on it.

use std::fs;

use bytemuck::Pod;
use fulgurite_kernels::{Argument, Plan, Product, Target, Work};

use super::{Driver, Sanitizer};

/// The test device: separate allocations with their own addresses. An access past the end of one
/// ends the test.
#[derive(Debug, Clone, Default)]
pub(crate) struct Machine {
    memory: Vec<Vec<u8>>,
}

const OFFSET_BITS: u32 = 40;

impl Machine {
    /// Copies values to the device.
    pub(crate) fn put<T: Pod>(&mut self, values: &[T]) -> u64 {
        self.memory.push(bytemuck::cast_slice(values).to_vec());
        (self.memory.len() as u64) << OFFSET_BITS
    }

    /// Allocates memory for `count` elements, filled with bits that are NaN in every dtype.
    pub(crate) fn garbage<T: Pod>(&mut self, count: usize) -> u64 {
        self.put(&vec![0xffu8; count * size_of::<T>()])
    }

    /// Returns all elements of the allocation that begins at `address`.
    pub(crate) fn get<T: Pod>(&self, address: u64) -> Vec<T> {
        let memory = &self.memory[(address >> OFFSET_BITS) as usize - 1];
        memory.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
    }

    /// Runs a plan under every sanitizer, with threads and blocks in several orders, and expects
    /// one result.
    pub(crate) fn run(&mut self, plan: &Plan) {
        let mut result: Option<Vec<Vec<u8>>> = None;
        for sanitizer in Sanitizer::ALL {
            // A race is found in any order, so one seed is enough.
            let seeds: &[u64] = if sanitizer == Sanitizer::Thread { &[3] } else { &[1, 2] };
            for &seed in seeds {
                let memory = self
                    .run_with(Driver::of_crate(sanitizer), seed, plan)
                    .unwrap_or_else(|report| panic!("under {sanitizer:?}:\n{report}"));
                let same = result.as_ref().is_none_or(|other| *other == memory);
                assert!(same, "other bits in another order of threads");
                result = Some(memory);
            }
        }
        self.memory = result.unwrap_or_default();
    }

    /// Returns the memory after a plan, or the driver's message if it fails.
    pub(crate) fn run_with(
        &self,
        driver: &Driver,
        seed: u64,
        plan: &Plan,
    ) -> Result<Vec<Vec<u8>>, String> {
        let folder = tempfile::tempdir().unwrap();
        let [request, answer] = ["request", "answer"].map(|name| folder.path().join(name));
        fs::write(&request, self.request(seed, plan)).unwrap();
        driver.run(&request, &answer)?;
        let bytes = fs::read(&answer).unwrap();
        let mut at = 0;
        Ok(self
            .memory
            .iter()
            .map(|memory| {
                at += memory.len();
                bytes[at - memory.len()..at].to_vec()
            })
            .collect())
    }

    fn request(&self, seed: u64, plan: &Plan) -> Vec<u8> {
        let scratch: Vec<Vec<u8>> =
            plan.scratch_bytes().iter().map(|&bytes| vec![0xff; bytes]).collect();
        let first_table = self.memory.len();
        let first_scratch = first_table + plan.tables().len();
        let address = |index: usize| (index as u64 + 1) << OFFSET_BITS;
        let mut out = Vec::new();
        let number = |out: &mut Vec<u8>, n: u64| out.extend_from_slice(&n.to_le_bytes());
        number(&mut out, seed);
        let tables = plan.tables().iter().map(|table| table.bytes());
        let all: Vec<&[u8]> = self
            .memory
            .iter()
            .map(Vec::as_slice)
            .chain(tables)
            .chain(scratch.iter().map(Vec::as_slice))
            .collect();
        number(&mut out, all.len() as u64);
        for memory in all {
            number(&mut out, memory.len() as u64);
            out.extend_from_slice(memory);
        }
        let pointers = plan.tables().iter().enumerate().flat_map(|(index, table)| {
            let start = address(first_table + index);
            table.addresses().iter().map(move |&offset| start + offset as u64)
        });
        let pointers: Vec<u64> = pointers.collect();
        number(&mut out, pointers.len() as u64);
        pointers.iter().for_each(|&pointer| number(&mut out, pointer));
        let place = |target: Target| match target {
            Target::Address(address) => address,
            Target::Table(index) => address(first_table + index),
            Target::Scratch(index) => address(first_scratch + index),
        };
        number(&mut out, plan.work().len() as u64);
        for work in plan.work() {
            let call = match work {
                Work::Launch(call) => call,
                Work::Product(product) => {
                    fields(product, &place).into_iter().for_each(|field| number(&mut out, field));
                    continue;
                }
            };
            number(&mut out, call.kernel.len() as u64);
            out.extend_from_slice(call.kernel.as_bytes());
            number(&mut out, u64::from(call.blocks));
            number(&mut out, u64::from(call.threads));
            number(&mut out, u64::from(call.shared_bytes));
            number(&mut out, call.arguments.len() as u64);
            for argument in &call.arguments {
                let (is_address, value) = match *argument {
                    Argument::Number(value) => (0, value),
                    Argument::Pointer(target) => (1, place(target)),
                };
                number(&mut out, is_address);
                number(&mut out, value);
            }
        }
        out
    }
}

/// A product in the driver's format, after an empty name.
fn fields(product: &Product, place: &dyn Fn(Target) -> u64) -> Vec<u64> {
    let Product { dtype, out, starts, transposed, m, n, k, leading, batch, strides, .. } = product;
    let mut all = vec![0, *dtype as u64, *out as u64];
    all.extend(starts.map(|start| place(start.target) + start.offset));
    all.extend(transposed.map(u64::from));
    all.extend([*m, *n, *k].map(|n| n as u64));
    all.extend(leading.map(|n| n as u64));
    all.push(*batch as u64);
    all.extend(strides.map(|n| n as u64));
    all.extend([product.alpha, product.beta].map(|factor| u64::from(factor.to_bits())));
    all
}
