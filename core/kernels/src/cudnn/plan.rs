//! Plans: the kernels that cuDNN chooses for a graph.
#![allow(unsafe_code)] // a plan runs on memory that the caller names

use std::ffi::c_void;

use super::constants::{Attribute, HeuristicsMode, Kind};
use super::descriptor::{Builder, Descriptor, Pointer};
use super::graph::{Argument, Graph, Number, Place};
use super::library::{Fault, Handle, Library};
use super::lower::{Lowered, lower, unique_id};

/// The alignment of scratch tensors, in bytes.
const SCRATCH_ALIGNMENT: usize = 256;

/// The device of a plan.
#[derive(Debug, Clone, Copy)]
pub enum Device<'a> {
    /// The device of a handle. The plan can run on it.
    Of(Handle),
    /// A device that need not exist, described as JSON
    /// (`CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION`).
    Described(&'a str),
}

/// One or more kernels that compute a graph on a device.
#[derive(Debug)]
pub struct ExecutionPlan {
    plan: Descriptor,
    workspace_bytes: usize,
    arguments: Vec<(i64, Argument)>,
    /// The 32 bits of each number.
    numbers: Vec<(i64, u32)>,
    /// The offset of each scratch tensor; they follow the workspace.
    scratch: Vec<(i64, usize)>,
    memory_bytes: usize,
    /// The descriptors that the plan refers to; dropped after it.
    _kept: Vec<Descriptor>,
}

impl ExecutionPlan {
    /// Makes a plan of the first proposal of cuDNN's heuristics that cuDNN can build. This may take
    /// seconds, because cuDNN compiles some kernels.
    ///
    /// # Errors
    /// If cuDNN has no kernel for the graph on this device, or refuses it for another reason.
    pub fn new(
        library: &'static Library,
        graph: &Graph,
        device: Device<'_>,
    ) -> Result<Self, Fault> {
        let handle = match device {
            Device::Of(handle) => Some(handle),
            Device::Described(_) => None,
        };
        let described = match device {
            Device::Of(_) => None,
            Device::Described(json) => Some(
                Builder::new(library, Kind::DeviceProperties)?
                    .set(Attribute::DeviceJson, json.as_bytes())?
                    .finalize()?,
            ),
        };
        let Lowered { graph: lowered, mut kept } = lower(library, graph, handle)?;
        let heuristics = Builder::new(library, Kind::EngineHeuristics)?
            .link(Attribute::HeuristicsGraph, &[&lowered])?
            .one(Attribute::HeuristicsMode, HeuristicsMode::A)?;
        let heuristics = match &described {
            Some(described) => heuristics.link(Attribute::HeuristicsDevice, &[described])?,
            None => heuristics,
        };
        let heuristics = heuristics.finalize()?;
        let configs = heuristics.list(Attribute::HeuristicsResults, Kind::EngineConfig)?;
        let mut plan = Err(Fault::without_status(
            "asking for kernels".to_owned(),
            "there are none for this graph on this device",
            library.reason(),
        ));
        for config in &configs {
            plan = finalized(library, config, handle, described.as_ref());
            if plan.is_ok() {
                break;
            }
        }
        let plan = plan?;
        let workspace_bytes = plan.get::<i64>(Attribute::PlanWorkspaceBytes)?;
        kept.extend(configs);
        kept.extend([heuristics, lowered]);
        kept.extend(described);
        Ok(Self::of(plan, usize::try_from(workspace_bytes).unwrap_or(0), graph, kept))
    }

    fn of(plan: Descriptor, workspace_bytes: usize, graph: &Graph, kept: Vec<Descriptor>) -> Self {
        let (mut arguments, mut numbers, mut scratch) = (Vec::new(), Vec::new(), Vec::new());
        let mut memory_bytes = workspace_bytes;
        for (index, tensor) in graph.tensors().iter().enumerate() {
            let id = unique_id(index);
            match tensor.place {
                Place::Argument(argument) => arguments.push((id, argument)),
                Place::Number(number) => numbers.push((id, number.bits())),
                Place::Scratch => {
                    let elements: i64 = tensor.dims.iter().product();
                    let start = memory_bytes.next_multiple_of(SCRATCH_ALIGNMENT);
                    scratch.push((id, start));
                    memory_bytes = start + elements as usize * tensor.data_type.size();
                }
                Place::Virtual => {}
            }
        }
        Self { plan, workspace_bytes, arguments, numbers, scratch, memory_bytes, _kept: kept }
    }

    /// Returns the size of cuDNN's own workspace in bytes.
    pub fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    /// Returns the memory that a run needs in bytes: the workspace and the graph's scratch tensors.
    pub fn memory_bytes(&self) -> usize {
        self.memory_bytes
    }

    /// Returns the names of the plan's kernels, in order. cuDNN describes the whole plan for this
    /// call, including the code of the kernels.
    ///
    /// # Errors
    /// If cuDNN reports an error.
    pub fn kernels(&self) -> Result<Vec<String>, Fault> {
        let json = self.plan.text(Attribute::PlanJson)?;
        let names = json.split("\"kernelName\":\"").skip(1);
        Ok(names.filter_map(|rest| rest.split('"').next()).map(str::to_owned).collect())
    }

    /// Queues the plan's work on the handle's stream, and returns without waiting.
    ///
    /// # Safety
    /// The plan must be for the handle's device, and no other thread may use either. `address` must
    /// return device memory for each argument, with at least the elements that the graph says.
    /// `memory` must be device memory of [`memory_bytes`](Self::memory_bytes), at a multiple of
    /// 256. All of it must stay allocated until the work has run, in stream order.
    ///
    /// # Errors
    /// If cuDNN reports an error.
    pub unsafe fn run(
        &self,
        handle: Handle,
        address: impl Fn(Argument) -> u64,
        memory: u64,
    ) -> Result<(), Fault> {
        let device = |address: u64| Pointer(address as usize as *mut c_void);
        let arguments = self.arguments.iter().map(|&(id, of)| (id, device(address(of))));
        let scratch = self.scratch.iter().map(|&(id, start)| (id, device(memory + start as u64)));
        // cuDNN reads the numbers during this call.
        let number = |bits: &u32| Pointer(std::ptr::from_ref(bits).cast_mut().cast());
        let numbers = self.numbers.iter().map(|(id, bits)| (*id, number(bits)));
        let (ids, pointers): (Vec<i64>, Vec<Pointer>) =
            arguments.chain(scratch).chain(numbers).unzip();
        let library = self.plan.library();
        let pack = Builder::new(library, Kind::VariantPack)?
            .one(Attribute::PackWorkspace, device(memory))?
            .set(Attribute::PackPointers, &pointers)?
            .set(Attribute::PackIds, &ids)?
            .finalize()?;
        // SAFETY: finalized descriptors, and memory as the caller promises; numbers live as long as
        // the plan.
        let status = unsafe { (library.execute)(handle, self.plan.raw(), pack.raw()) };
        library.check("running a plan", status)
    }
}

impl Number {
    fn bits(self) -> u32 {
        match self {
            Self::F32(x) => x.to_bits(),
            Self::I32(x) => x.cast_unsigned(),
        }
    }
}

fn finalized(
    library: &'static Library,
    config: &Descriptor,
    handle: Option<Handle>,
    described: Option<&Descriptor>,
) -> Result<Descriptor, Fault> {
    let plan = Builder::new(library, Kind::ExecutionPlan)?;
    let plan = plan.link(Attribute::PlanEngineConfig, &[config])?;
    let plan = match (handle, described) {
        (Some(handle), _) => plan.one(Attribute::PlanHandle, handle)?,
        (None, Some(described)) => plan.link(Attribute::PlanDevice, &[described])?,
        (None, None) => plan,
    };
    plan.finalize()
}
