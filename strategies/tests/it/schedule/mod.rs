//! Properties of the FSDP, DDP and pipeline schedules, on random models, programs and ranks whose
//! forwards use different parameters.

mod ddp;
mod fsdp;
mod pipeline;

/// A number derived from a scenario's seed and the purpose of the draw.
fn draw(seed: u64, of: &[usize]) -> usize {
    let mut state = seed;
    for &part in of {
        state = (state ^ part as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
        state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        state ^= state >> 31;
    }
    (state >> 1) as usize
}
