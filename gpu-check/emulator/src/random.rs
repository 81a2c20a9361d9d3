//! cuRAND: other values than NVIDIA's, from the same distributions.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::{Mutex, PoisonError};

use crate::machine::{self, State};
use crate::streams::Handle;

const SUCCESS: c_int = 0;
const NOT_INITIALIZED: c_int = 101;

#[derive(Debug, Clone, Copy, Default)]
struct Generator {
    stream: Handle,
    state: u64,
}

impl Generator {
    /// Draws from `0..1`.
    fn draw(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn draw_normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.draw()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.draw()).cos()
    }
}

static GENERATORS: Mutex<BTreeMap<usize, Generator>> = Mutex::new(BTreeMap::new());

fn with(generator: usize, act: impl FnOnce(&mut Generator)) -> c_int {
    let mut all = GENERATORS.lock().unwrap_or_else(PoisonError::into_inner);
    match all.get_mut(&generator) {
        Some(generator) => {
            act(generator);
            SUCCESS
        }
        None => NOT_INITIALIZED,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn curandCreateGenerator(to: *mut usize, _kind: c_int) -> c_int {
    let mut all = GENERATORS.lock().unwrap_or_else(PoisonError::into_inner);
    let handle = all.last_key_value().map_or(1, |(last, _)| last + 1);
    all.insert(handle, Generator::default());
    // SAFETY: the caller's.
    unsafe { *to = handle };
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn curandDestroyGenerator(generator: usize) -> c_int {
    let mut all = GENERATORS.lock().unwrap_or_else(PoisonError::into_inner);
    if all.remove(&generator).is_some() { SUCCESS } else { NOT_INITIALIZED }
}

#[unsafe(no_mangle)]
extern "C" fn curandSetPseudoRandomGeneratorSeed(generator: usize, seed: u64) -> c_int {
    with(generator, |generator| generator.state = seed)
}

#[unsafe(no_mangle)]
extern "C" fn curandSetGeneratorOffset(_generator: usize, _offset: u64) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn curandSetStream(generator: usize, stream: Handle) -> c_int {
    with(generator, |generator| generator.stream = stream)
}

fn fill<T: Send + 'static>(
    generator: usize,
    to: *mut T,
    count: usize,
    mut draw: impl FnMut(&mut Generator) -> T,
) -> c_int {
    with(generator, |generator| {
        let values: Vec<T> = (0..count).map(|_| draw(generator)).collect();
        let (stream, to) = (generator.stream, to as usize);
        machine::with(|machine| {
            let Some(stream) = machine.stream(stream, "random numbers") else { return };
            let work = move |state: &mut State| {
                let bytes = size_of_val(values.as_slice());
                if !state.memory.iter().any(|memory| memory.holds(to, bytes)) {
                    crate::refuse("random numbers for memory that is not allocated");
                }
                // SAFETY: allocated device memory; the caller states its type.
                unsafe { std::ptr::copy(values.as_ptr(), to as *mut T, values.len()) };
            };
            machine.streams.push(stream, Box::new(work), &mut machine.state);
        });
    })
}

#[unsafe(no_mangle)]
extern "C" fn curandGenerateUniform(generator: usize, to: *mut f32, count: usize) -> c_int {
    // In `0 < x <= 1`, as cuRAND's.
    fill(generator, to, count, |generator| 1.0 - generator.draw() as f32)
}

#[unsafe(no_mangle)]
extern "C" fn curandGenerateUniformDouble(generator: usize, to: *mut f64, count: usize) -> c_int {
    fill(generator, to, count, |generator| 1.0 - generator.draw())
}

#[unsafe(no_mangle)]
extern "C" fn curandGenerateNormal(
    generator: usize,
    to: *mut f32,
    count: usize,
    mean: f32,
    deviation: f32,
) -> c_int {
    fill(generator, to, count, |generator| mean + deviation * generator.draw_normal() as f32)
}

#[unsafe(no_mangle)]
extern "C" fn curandGenerateNormalDouble(
    generator: usize,
    to: *mut f64,
    count: usize,
    mean: f64,
    deviation: f64,
) -> c_int {
    fill(generator, to, count, |generator| mean + deviation * generator.draw_normal())
}
