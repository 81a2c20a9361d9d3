//! Runs a rank's collectives, in the order they were started.
#![allow(unsafe_code)] // Reads and writes slots; the barriers of this file make it sound.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use fulgurite_engine::autograd::storage::{with_bytes, with_bytes_mut};
use fulgurite_engine::collective::RANKS_DIFFER;

use super::direct::Direct;
use super::job_thread::RunJobs;
use super::plan::{Collective, CollectivePlan, Fingerprint};
use super::queue::{Job, Task, wait_for};
use super::reduce::reduce;
use super::wait::{Failure, Shared};
use crate::memory::{BUFFERS, OpRecord, notify};

/// Runs a rank's collectives and counts them. Only the thread with the [`Turn`](super::queue::Turn)
/// uses it.
pub(crate) struct Worker {
    pub(crate) shared: Arc<Shared>,
    /// Collectives begun.
    sequence: u64,
    /// Barriers that this rank has arrived at.
    barriers: u64,
    /// Number of chunks so far that went through the slots, which determines the next buffer.
    chunks: usize,
    /// Number of times that the thread running this job checks a flag before it sleeps.
    pub(super) spins: u32,
}

impl RunJobs for Worker {
    fn run(&mut self, job: Job, spins: u32) {
        self.spins = spins;
        let Job { task, after, done } = job;
        match task {
            Task::Collective(collective) => {
                let result = self.guarded(|worker| {
                    wait_for(after)?;
                    worker.collective(&collective)
                });
                match result {
                    // Release the tensors before telling the caller of the end.
                    Ok(()) => drop(collective),
                    // Another rank may still access the tensors, so their memory is never freed.
                    Err(_) => std::mem::forget(collective),
                }
                done.set(result);
            }
            Task::P2p(task) => self.run_p2p(task, done),
        }
    }
}

impl Worker {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, sequence: 0, barriers: 0, chunks: 0, spins: 0 }
    }

    /// Runs `f` unless the group has failed. A failure or panic in it fails the group.
    pub(crate) fn guarded<T>(
        &mut self,
        f: impl FnOnce(&mut Self) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        if let Some(failure) = self.shared.broken() {
            return Err(failure);
        }
        let result = catch_unwind(AssertUnwindSafe(|| f(self))).unwrap_or_else(|panic| {
            let message = crate::threads::panic_message(&*panic);
            Err(Failure::Group(format!("a collective panicked: {message}")))
        });
        if let Err(failure) = &result {
            self.shared.fail(failure);
        }
        result
    }

    fn collective(&mut self, collective: &Collective) -> Result<(), Failure> {
        let shared = self.shared.clone();
        let fingerprint = collective.fingerprint();
        let Some(direct) = Direct::of(collective, shared.identity.rank, shared.identity.size())?
        else {
            self.publish(&fingerprint, false);
            return self.through_slots(collective, &fingerprint, true);
        };
        let exposes = self.expose(&direct)?;
        self.publish(&fingerprint, exposes);
        self.barrier_and_compare(&fingerprint)?;
        let buffer = self.buffer(0);
        self.chunks += 1;
        if !(0..shared.identity.size())
            .all(|rank| self.op(rank).direct.load(Ordering::Relaxed) == 1)
        {
            return self.through_slots(collective, &fingerprint, false);
        }
        direct.execute(shared.identity.size(), |rank, exposed, len| {
            let range = exposed * size_of::<u64>()..(exposed + 1) * size_of::<u64>();
            // SAFETY: its owner wrote it before the barrier, and writes it again BUFFERS
            // collectives or chunks later, after more barriers.
            let offset = unsafe { shared.region.slot(buffer, rank, range) };
            shared.reach(rank, bytemuck::pod_read_unaligned(offset), len)
        })?;
        self.barrier(&fingerprint)
    }

    /// Writes the offsets of this rank's exposed tensors to its slot. Returns whether the other
    /// ranks can map the tensors.
    fn expose(&self, direct: &Direct) -> Result<bool, Failure> {
        let (region, rank) = (&self.shared.region, self.shared.identity.rank);
        let Some(offsets) = direct.exposed_offsets(&*self.shared.rendezvous)? else {
            return Ok(false);
        };
        let offsets: &[u8] = bytemuck::cast_slice(&offsets);
        if offsets.len() > region.layout().slot || !self.shared.reaches_all.load(Ordering::Relaxed)
        {
            return Ok(false);
        }
        // SAFETY: as in `write`, where this would be chunk 0.
        let slot = unsafe { region.slot_mut(self.buffer(0), rank, 0..offsets.len()) };
        slot.copy_from_slice(offsets);
        Ok(true)
    }

    /// Runs the collective through the slots, chunk by chunk. With `compare`, first checks that all
    /// ranks are in the same collective.
    fn through_slots(
        &mut self,
        collective: &Collective,
        fingerprint: &Fingerprint,
        compare: bool,
    ) -> Result<(), Failure> {
        let plan = collective.plan(self.shared.identity.rank, self.shared.region.layout())?;
        for phase in 0..plan.chunks + plan.stages - 1 {
            match phase {
                0 => {}
                1 if compare => self.barrier_and_compare(fingerprint)?,
                _ => self.barrier(fingerprint)?,
            }
            if phase < plan.chunks {
                self.write(&plan, phase)?;
            }
            if (1..=plan.chunks).contains(&phase) {
                self.reduce(&plan, phase - 1)?;
            }
            if phase + 1 >= plan.stages {
                self.read(&plan, phase + 1 - plan.stages)?;
            }
        }
        self.chunks += plan.chunks;
        plan.buffers.iter().try_for_each(|buffer| Ok(buffer.finish()?))
    }

    /// Returns the buffer of a collective's chunk.
    fn buffer(&self, chunk: usize) -> usize {
        (self.chunks + chunk) % BUFFERS
    }

    fn write(&self, plan: &CollectivePlan, chunk: usize) -> Result<(), Failure> {
        let (region, rank, buffer) =
            (&self.shared.region, self.shared.identity.rank, self.buffer(chunk));
        for write in &plan.writes {
            let portion = write.portion * plan.stride;
            for (index, from, to) in write.stream.chunk(chunk, plan.stride) {
                let to = portion + to.start..portion + to.end;
                // SAFETY: this rank's own slot, without any other slice of it. Other ranks last
                // read this buffer BUFFERS chunks ago, in a phase at most two after the write. That
                // phase ended with a barrier before this phase began.
                let slot = unsafe { region.slot_mut(buffer, rank, to) };
                with_bytes(&plan.buffers[index].host, |bytes| slot.copy_from_slice(&bytes[from]))?;
            }
        }
        Ok(())
    }

    fn reduce(&self, plan: &CollectivePlan, chunk: usize) -> Result<(), Failure> {
        let Some(reduction) = &plan.reduction else { return Ok(()) };
        let (region, rank, buffer) =
            (&self.shared.region, self.shared.identity.rank, self.buffer(chunk));
        let portion = rank * plan.stride;
        for (index, from, to) in reduction.own.chunk(chunk, plan.stride) {
            let range = portion + to.start..portion + to.end;
            // SAFETY: this rank's portion of its own slot. This rank does not write it in the write
            // phase, and others read it after the next barrier; they last read it BUFFERS chunks
            // ago.
            let out = unsafe { region.slot_mut(buffer, rank, range.clone()) };
            let host = &plan.buffers[index].host;
            with_bytes(host, |own| {
                let sources: Vec<&[u8]> = (0..self.shared.identity.size())
                    .map(|peer| {
                        if peer == rank {
                            return &own[from.clone()];
                        }
                        // SAFETY: its owner wrote it in the phase before the last barrier, and
                        // writes it again BUFFERS chunks later, after more barriers. Only this
                        // rank reads this portion.
                        unsafe { region.slot(buffer, peer, range.clone()) }
                    })
                    .collect();
                reduce(host.dtype(), reduction.op, &sources, out);
            })?;
        }
        Ok(())
    }

    fn read(&self, plan: &CollectivePlan, chunk: usize) -> Result<(), Failure> {
        let (region, buffer) = (&self.shared.region, self.buffer(chunk));
        for read in &plan.reads {
            let portion = read.portion * plan.stride;
            for (index, to, from) in read.stream.chunk(chunk, plan.stride) {
                let from = portion + from.start..portion + from.end;
                // SAFETY: written or reduced in an earlier phase, and a barrier lies between (or
                // it is this rank's own slot); written again BUFFERS chunks later, after the
                // barrier that ends this phase.
                let slot = unsafe { region.slot(buffer, read.rank, from) };
                with_bytes_mut(&plan.buffers[index].host, |bytes| {
                    bytes[to].copy_from_slice(slot);
                })?;
            }
        }
        Ok(())
    }

    /// Writes this rank's next collective to its record.
    fn publish(&mut self, fingerprint: &Fingerprint, direct: bool) {
        let record = self.shared.region.record(self.shared.identity.rank);
        let op = &record.ops[self.sequence as usize % 2];
        op.sequence.store(self.sequence, Ordering::Relaxed);
        op.kind.store(fingerprint.kind, Ordering::Relaxed);
        op.dtype.store(fingerprint.dtype, Ordering::Relaxed);
        op.bytes.store(fingerprint.bytes, Ordering::Relaxed);
        op.detail.store(fingerprint.detail, Ordering::Relaxed);
        op.direct.store(direct.into(), Ordering::Relaxed);
        self.sequence += 1;
        record.begun.store(self.sequence, Ordering::Release);
    }

    /// Waits for the first barrier of a collective, and checks that all ranks are in the same
    /// collective.
    fn barrier_and_compare(&mut self, fingerprint: &Fingerprint) -> Result<(), Failure> {
        let met = self.barrier(fingerprint);
        // If a faster rank has found a difference and aborted, this rank finds the difference too,
        // and reports the same message.
        if self.all_arrived() {
            self.compare(fingerprint)?;
        }
        met
    }

    /// Whether all ranks have arrived at this rank's current or last barrier.
    fn all_arrived(&self) -> bool {
        let arrivals = self.shared.region.header().arrivals.0.load(Ordering::SeqCst);
        arrivals >= self.barriers * self.shared.identity.size() as u64
    }

    /// Checks, after the first barrier, that all ranks are in the same collective.
    fn compare(&self, own: &Fingerprint) -> Result<(), Failure> {
        let shared = &self.shared;
        let sequence = self.sequence - 1;
        let mut seen = Vec::with_capacity(shared.identity.size());
        let mut same = true;
        for rank in 0..shared.identity.size() {
            let op = self.op(rank);
            let other = Fingerprint {
                kind: op.kind.load(Ordering::Relaxed),
                dtype: op.dtype.load(Ordering::Relaxed),
                bytes: op.bytes.load(Ordering::Relaxed),
                detail: op.detail.load(Ordering::Relaxed),
            };
            same &= other == *own && op.sequence.load(Ordering::Relaxed) == sequence;
            seen.push(other);
        }
        if same {
            return Ok(());
        }
        let exposed: Vec<String> = seen.iter().map(Fingerprint::to_string).collect();
        let what = if exposed.iter().all(|s| *s == exposed[0]) {
            format!(
                "all ranks called {}, but with different arguments (counts, operation, source or \
                 partition)",
                exposed[0]
            )
        } else {
            let ranks = shared.identity.global_ranks.iter().zip(&exposed);
            let list: Vec<String> = ranks.map(|(rank, op)| format!("rank {rank}: {op}")).collect();
            list.join("; ")
        };
        Err(Failure::Group(format!(
            "{RANKS_DIFFER} collective {} of this group: {what}. All ranks must call the same \
             collectives in the same order",
            self.sequence
        )))
    }

    /// Returns a rank's record of this rank's current collective.
    fn op(&self, rank: usize) -> &OpRecord {
        &self.shared.region.record(rank).ops[(self.sequence - 1) as usize % 2]
    }

    /// Waits until all ranks have arrived. Their earlier writes are visible afterwards.
    fn barrier(&mut self, fingerprint: &Fingerprint) -> Result<(), Failure> {
        let shared = &*self.shared;
        let region = &shared.region;
        let size = shared.identity.size() as u64;
        self.barriers += 1;
        let all = self.barriers * size;
        let barriers = self.barriers;
        // If the group has failed, the other ranks do not arrive. This is not checked after
        // arriving: a faster rank may abort after this barrier, which all ranks have still passed.
        if let Some(failure) = shared.broken() {
            return Err(failure);
        }
        region.record(shared.identity.rank).arrived.store(barriers, Ordering::Release);
        let arrivals = &region.header().arrivals.0;
        if arrivals.fetch_add(1, Ordering::SeqCst) + 1 == all {
            (0..shared.identity.size())
                .filter(|&rank| rank != shared.identity.rank)
                .for_each(|rank| notify(region.record(rank)));
            return Ok(());
        }
        let sequence = self.sequence;
        shared.wait_until(
            self.spins,
            || arrivals.load(Ordering::SeqCst) >= all,
            || {
                let arrived = |rank: &usize| region.record(*rank).arrived.load(Ordering::Acquire);
                (0..shared.identity.size()).filter(|rank| arrived(rank) < barriers).collect()
            },
            || format!("in {fingerprint} (collective {sequence} of this group)"),
        )
    }
}
