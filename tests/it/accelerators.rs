//! An accelerator whose devices are the CPU: assignment of devices to ranks.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use fulgurite::core::accelerator::{
    Accelerator, AcceleratorConfig, Available, DeviceMemory, TimeStamp,
};
use fulgurite::core::collective::{
    GroupContext, ProcessGroup, ProcessGroupConfig, all_gather_object,
};
use fulgurite::core::fabric::Fabric;
use fulgurite::core::launch::LocalStore;
use fulgurite::core::run::TrainerConfig;
use fulgurite::core::trainer::Event;
use fulgurite::core::{register_accelerator, register_process_group};
use fulgurite::prelude::*;
use fulgurite_test_message::assert_says;
use fulgurite_transports::run_ranks;
use serde::{Deserialize, Serialize};

use crate::callbacks::{Net, all, config};
use crate::toy::{Events, NoKeys, Numbers};

/// Two devices per host.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Pretended {
    /// Whether several ranks may share one device.
    #[serde(default)]
    shared: bool,
}

register_accelerator!("pretended", Pretended);

#[typetag::serde(name = "pretended")]
impl AcceleratorConfig for Pretended {
    fn available(&self) -> Result<Available> {
        Ok(Available::Devices(vec!["one".to_owned(), "two".to_owned()]))
    }

    fn is_shared(&self) -> bool {
        self.shared
    }

    fn open(&self, index: usize) -> Result<Box<dyn Accelerator>> {
        OPENED.lock().unwrap().push(index);
        Ok(Box::new(Opened(index)))
    }
}

/// Indices of the opened devices.
static OPENED: Mutex<Vec<usize>> = Mutex::new(Vec::new());

#[derive(Debug)]
struct Opened(usize);

impl Accelerator for Opened {
    fn device(&self) -> &Device {
        &Device::Cpu
    }

    fn description(&self) -> String {
        "pretended device".to_owned()
    }

    fn memory(&self) -> Result<Option<DeviceMemory>> {
        let held_bytes = (self.0 as u64 + 1) << 30;
        let (free_bytes, total_bytes) = (1 << 30, 8 << 30);
        Ok(Some(DeviceMemory { held_bytes, peak_bytes: 2 * held_bytes, free_bytes, total_bytes }))
    }

    fn time_stamp(&self) -> Result<Option<Box<dyn TimeStamp>>> {
        static STAMPS: AtomicUsize = AtomicUsize::new(0);
        Ok(Some(Box::new(Stamp(STAMPS.fetch_add(1, Ordering::Relaxed)))))
    }

    fn is_out_of_memory(&self, error: &Error) -> bool {
        error.to_string().contains("OUT_OF_MEMORY")
    }
}

/// Each stamp is a second after the previous one.
struct Stamp(usize);

impl TimeStamp for Stamp {
    fn is_past(&self) -> Result<bool> {
        Ok(true)
    }

    fn micros_since(&self, earlier: &dyn TimeStamp) -> Result<f64> {
        let earlier: &dyn std::any::Any = earlier;
        let earlier: &Self = earlier.downcast_ref().unwrap();
        Ok((self.0 - earlier.0) as f64 * 1e6)
    }
}

/// Runs out of memory in its second step.
struct Hungry(Unit<Linear>, u32);

impl LightningModule for Hungry {
    type Config = NoKeys;
    type Data = Numbers;

    fn configure_model(_: &NoKeys, b: &ModuleBuilder) -> Result<Self> {
        Ok(Self(b.unit("net", |b| Linear::new(b, 1, 1))?, 0))
    }

    fn training_step(&mut self, x: &Tensor, _: &mut StepContext) -> Result<Loss> {
        self.1 += 1;
        if self.1 == 2 {
            return Err(Error::module("net", "CUDA_ERROR_OUT_OF_MEMORY"));
        }
        Ok(Loss::new(self.0.forward(x)?.sqr()?.sum_all()?, x.dim(0)? as f64))
    }
}

impl Hooks<Numbers> for Hungry {}

const PRETENDED: &str = "trainer.accelerator=pretended";
const SHARED: &str = "trainer.accelerator={ type = 'pretended', shared = true }";

// checklist: Lightning: root_device
#[test]
fn every_rank_has_its_own_device() {
    let dir = tempfile::tempdir().unwrap();
    let trainer_config = |keys: &[&str]| config(dir.path(), keys).trainer;
    let opened = |ranks: usize, config: &TrainerConfig| {
        OPENED.lock().unwrap().clear();
        let memory = run_ranks(ranks, |world| {
            let fabric = Fabric::with_world(world.clone(), config, 1, None)?;
            assert!(fabric.device().same_device(&Device::Cpu));
            let held = fabric.measurements().device_memory()?.map(|memory| memory.held_bytes >> 30);
            all_gather_object(&*world, &held)
        });
        memory.map(|ranks| ranks[0].clone())
    };
    assert_eq!(opened(2, &trainer_config(&[PRETENDED])).unwrap(), [Some(1), Some(2)]);
    assert_eq!(opened(3, &trainer_config(&[SHARED])).unwrap(), [Some(1), Some(2), Some(1)]);
    // No device is opened for the host.
    assert_eq!(opened(2, &trainer_config(&[])).unwrap(), [None, None]);
    assert!(OPENED.lock().unwrap().is_empty());
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let error = opened(3, &trainer_config(&[PRETENDED])).unwrap_err().to_string();
    assert_says!(error.replace(&host, "HOST"), "`trainer.accelerator`: 3 ranks … 2 pretended …");

    // A training run reports its device and memory.
    let run = config(dir.path(), &[PRETENDED, "trainer.max_steps=2", "trainer.strategy=ddp"]);
    let events = Events::default();
    run_ranks(2, |world| {
        let sink = Box::new(events.clone());
        Trainer::new(world).with_sink(sink).fit::<Net>(&run).map(drop)
    })
    .unwrap();
    let all = all(&events);
    let Some(Event::Summary { peak_device_mib, .. }) = all.last() else { panic!("{all:?}") };
    assert_eq!(*peak_device_mib, [2048.0, 4096.0]);

    // A trace contains the device's times.
    let run = config(
        dir.path(),
        &[PRETENDED, "trainer.profiler={ type = 'trace', skip_steps = 0, steps = 1 }"],
    );
    let traces = run_ranks(1, |world| {
        let fabric = Fabric::with_world(world, &run.trainer, 1, None)?;
        drop(fabric.measurements().phase("data"));
        fabric.measurements().profile()
    });
    let trace = traces.unwrap().remove(0).unwrap().1.unwrap();
    let trace: serde_json::Value = serde_json::from_str(&trace).unwrap();
    let spans =
        trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["name"] == "data");
    let longest = spans.map(|span| span["dur"].as_f64().unwrap()).fold(0.0, f64::max);
    assert_eq!(longest.round(), 1e6, "{trace}");

    // Training ends when memory runs out.
    let run = config(dir.path(), &[PRETENDED, "trainer.max_steps=2", "checkpoint.overwrite=true"]);
    let result = Trainer::default().fit::<Hungry>(&run);
    assert_says!(result.map(drop).unwrap_err(), "module `net`: CUDA_ERROR_OUT_OF_MEMORY … 8.00 …");
}

/// A process group for the pretended devices: the host's group, counted.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct BetweenPretended {}

register_process_group!("between_pretended", BetweenPretended);

/// Whether the next rank lacks the library, and the number of groups built over a host group.
static MISSING: AtomicBool = AtomicBool::new(false);
static BUILT: AtomicUsize = AtomicUsize::new(0);

#[typetag::serde(name = "between_pretended")]
impl ProcessGroupConfig for BetweenPretended {
    fn build(&self, _: &GroupContext) -> Result<Arc<dyn ProcessGroup>> {
        Err(Error::other("it is built over another group"))
    }

    fn device_kind(&self) -> Option<&'static str> {
        Some("pretended")
    }

    fn available(&self) -> Result<()> {
        match MISSING.swap(false, Ordering::Relaxed) {
            true => Err(Error::other("its library is missing")),
            false => Ok(()),
        }
    }

    fn over(
        &self,
        host: Arc<dyn ProcessGroup>,
        context: &GroupContext,
    ) -> Result<Arc<dyn ProcessGroup>> {
        assert_eq!((host.rank(), host.size()), (context.rank, context.world_size));
        BUILT.fetch_add(1, Ordering::Relaxed);
        Ok(host)
    }
}

#[test]
fn process_group_matches_the_devices() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(LocalStore::new());
    let built = |keys: &[&str]| {
        let config = config(dir.path(), keys).trainer;
        BUILT.store(0, Ordering::Relaxed);
        run_ranks(2, |world| {
            let context = GroupContext {
                rank: world.rank(),
                world_size: 2,
                local_rank: world.rank(),
                local_world_size: 2,
                node_rank: 0,
                address: None,
                store: store.clone(),
                timeout: std::time::Duration::from_secs(60),
            };
            config.over_devices(world, &context).map(drop)
        })
        .unwrap();
        BUILT.load(Ordering::Relaxed)
    };
    assert_eq!(built(&[PRETENDED]), 2);
    // Not built for two ranks on one device, ranks on the host, or an explicit process group.
    assert_eq!(built(&[SHARED]), 0);
    assert_eq!(built(&["trainer.accelerator=cpu"]), 0);
    assert_eq!(built(&[PRETENDED, "trainer.process_group=shm"]), 0);
    // If one rank cannot build it, no rank does.
    MISSING.store(true, Ordering::Relaxed);
    assert_eq!(built(&[PRETENDED]), 0);
    assert!(!MISSING.load(Ordering::Relaxed));
}
