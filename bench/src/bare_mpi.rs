//! MPI's own collectives, measured alternately with a process group that uses MPI.

use fulgurite::prelude::*;

/// Runs one collective of MPI.
pub(super) type Call = Box<dyn FnMut() -> Result<()>>;

/// Returns `None`: the program was built without MPI.
#[cfg(not(feature = "mpi"))]
#[expect(clippy::unnecessary_wraps, reason = "with MPI it can fail")]
pub(super) fn call(_: &str, _: usize, _: usize) -> Result<Option<Call>> {
    Ok(None)
}

/// Returns a call of MPI's collective like `op`, for `ranks` ranks with shards of `part` f32.
/// `None` if the ranks do not use MPI. Collective: runs the call once and checks its result.
#[cfg(feature = "mpi")]
pub(super) fn call(op: &str, part: usize, ranks: usize) -> Result<Option<Call>> {
    let Some(mpi) = fulgurite_mpi::bare::BareMpi::current() else { return Ok(None) };
    let (mut whole, mut own) = (vec![1f32; part * ranks], vec![1f32; part]);
    let reduced = vec![ranks as f32; part * ranks];
    let (is_right, call): (bool, Call) = match op {
        "all_reduce" => {
            let mut sum = vec![0f32; part * ranks];
            mpi.all_reduce(&whole, &mut sum)?;
            (sum == reduced, Box::new(move || mpi.all_reduce(&whole, &mut sum)))
        }
        "all_gather" => {
            whole.fill(0.0);
            mpi.all_gather(&own, &mut whole)?;
            (whole.iter().all(|x| *x == 1.0), Box::new(move || mpi.all_gather(&own, &mut whole)))
        }
        "reduce_scatter" => {
            mpi.reduce_scatter(&whole, &mut own)?;
            (own == reduced[..part], Box::new(move || mpi.reduce_scatter(&whole, &mut own)))
        }
        "broadcast" => {
            mpi.broadcast(&mut whole)?;
            (whole.iter().all(|x| *x == 1.0), Box::new(move || mpi.broadcast(&mut whole)))
        }
        _ => (true, Box::new(move || mpi.barrier())),
    };
    if !is_right {
        return Err(Error::other(format!("MPI's own {op} gave a wrong result")));
    }
    Ok(Some(call))
}
