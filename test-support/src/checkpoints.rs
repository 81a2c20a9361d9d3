//! A small model on any mesh, and its expected values.

use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use fulgurite_checkpoint_local::LocalDirectory;
use fulgurite_core::Result;
use fulgurite_core::autograd::storage;
use fulgurite_core::checkpoint::{
    CheckpointIO, FORMAT_VERSION, SaveMeta, ShardTensor, model_tensors, optimizer_tensors, save,
    shard_specs,
};
use fulgurite_core::collective::{GroupContext, ProcessGroup, ProcessGroupConfig as _};
use fulgurite_core::launch::LocalStore;
use fulgurite_core::module::{ModuleBuilder, ModuleInit, ModuleTree};
use fulgurite_core::optim::StateTensor;
use fulgurite_core::parameter::{Init, LocalShard};
use fulgurite_core::shard::{Cut, Placement, Region};
use fulgurite_transports::{Tcp, run_ranks};

/// Runs `f` on `n` ranks and returns their results.
pub fn ranks<T: Send>(n: usize, f: impl Fn(&dyn ProcessGroup) -> T + Sync) -> Vec<T> {
    run_ranks(n, |group| Ok(f(&*group))).expect("no rank panics")
}

/// As [`ranks`], over connections. There a rank may return from a collective before the others, so
/// that a barrier that is missing shows.
pub fn ranks_over_tcp<T: Send>(n: usize, f: impl Fn(&dyn ProcessGroup) -> T + Sync) -> Vec<T> {
    let store = Arc::new(LocalStore::new());
    let run = |rank| {
        let context = GroupContext {
            rank,
            world_size: n,
            local_rank: 0,
            local_world_size: 1,
            node_rank: rank,
            address: Some(Ipv4Addr::LOCALHOST.into()),
            store: store.clone(),
            timeout: Duration::from_secs(60),
        };
        f(&*Tcp::default().build(&context).expect("ranks connect"))
    };
    std::thread::scope(|scope| {
        let run = &run;
        let ranks: Vec<_> = (0..n).map(|rank| scope.spawn(move || run(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
    })
}

/// Sizes of `data_parallel_replicate`, `data_parallel_shard`, `tensor_parallel`.
pub type Mesh = [usize; 3];

pub const DIMS: [&str; 3] = ["data_parallel_replicate", "data_parallel_shard", "tensor_parallel"];

pub fn world_size(mesh: Mesh) -> usize {
    mesh.iter().product()
}

/// This rank's coordinate along a mesh dimension, the last dimension fastest; 0 along a dimension
/// that the mesh lacks.
pub fn coordinate(mesh: Mesh, rank: usize) -> impl Fn(&str) -> usize + Copy {
    move |dim| match DIMS.iter().position(|d| *d == dim) {
        Some(0) => rank / (mesh[1] * mesh[2]),
        Some(1) => rank / mesh[2] % mesh[1],
        Some(_) => rank % mesh[2],
        None => 0,
    }
}

pub const SEED: u64 = 7;
const INIT: Init = Init::Normal { mean: 0.0, std: 1.0 };

/// A model with uneven, one-row, scalar and tied parameters, on this rank of the mesh. Local values
/// follow from `seed`; without a seed they are zero.
pub fn model(mesh: Mesh, rank: usize, seed: Option<u64>, dtype: DType) -> ModuleTree {
    let b = ModuleBuilder::new(ModuleInit { dtype, ..ModuleInit::default() });
    let embed = b.pp("embed").parameter("weight", [7, 6], INIT).unwrap();
    b.pp("norm").parameter("weight", [5], INIT).unwrap();
    b.pp("layers.0").parameter("up", [6, 10], INIT).unwrap();
    b.pp("layers.0").parameter("conv", [2, 3, 4], INIT).unwrap();
    b.pp("row").parameter("weight", [1, 4], INIT).unwrap();
    b.parameter("scale", [], INIT).unwrap();
    b.pp("head").tie("weight", &embed).unwrap();
    set_up(b.finish().unwrap(), mesh, rank, seed)
}

/// Shards a model's parameters for the mesh and sets this rank's local values.
pub fn set_up(mut tree: ModuleTree, mesh: Mesh, rank: usize, seed: Option<u64>) -> ModuleTree {
    for parameter in tree.slots() {
        let mut spec = parameter.spec();
        let dims = spec.shape.len();
        let shard = |dim| if dim < dims { Placement::Shard(dim) } else { Placement::Replicate };
        spec = spec.with_cut(Cut::new(DIMS[2], mesh[2], shard(1)));
        spec = spec.with_cut(Cut::new(DIMS[0], mesh[0], Placement::Replicate));
        spec = spec.with_cut(Cut::new(DIMS[1], mesh[1], shard(0)));
        let region = spec.region(coordinate(mesh, rank));
        let values = values(seed, parameter.fqn(), &spec.shape, &region, parameter.dtype());
        parameter.set_spec(spec);
        parameter.set_local(LocalShard { values, region });
    }
    tree
}

/// Values of a parameter within a region.
pub fn values(
    seed: Option<u64>,
    fqn: &str,
    shape: &[usize],
    region: &Region,
    dtype: DType,
) -> Tensor {
    let init = if seed.is_some() { INIT } else { Init::ZEROS };
    init.values(seed.unwrap_or(0), fqn, shape, region, dtype, &Device::Cpu).unwrap()
}

/// Optimizer state for every parameter, sharded like the parameter.
pub fn states(tree: &ModuleTree, seed: Option<u64>) -> Vec<StateTensor> {
    tree.trainable()
        .flat_map(|parameter| {
            ["exp_avg", "exp_avg_sq"].map(|name| {
                let (fqn, shape) = (parameter.fqn().to_owned(), parameter.global_shape().to_vec());
                let region = parameter.local().unwrap().region;
                let values = values(seed, &format!("{fqn}/{name}"), &shape, &region, DType::F32);
                StateTensor { fqn, name, values, region, shape }
            })
        })
        .collect()
}

pub fn bytes(tensor: &Tensor) -> Vec<u8> {
    storage::with_bytes(tensor, <[u8]>::to_vec).unwrap()
}

pub fn io(root: &Path) -> Arc<dyn CheckpointIO> {
    Arc::new(LocalDirectory::new(root).with_sync(false))
}

pub fn meta(step: u64, mesh: Mesh, tree: &ModuleTree) -> SaveMeta {
    SaveMeta {
        step,
        mesh: DIMS.iter().map(|d| (*d).to_owned()).zip(mesh).collect(),
        specs: shard_specs(tree),
        state: serde_json::json!({ "trainer": { "step": step, "lr": 0.1 + 0.2 } }),
        config: serde_json::json!({ "seed": SEED }),
        ..SaveMeta::default()
    }
}

/// An editable manifest in the older format without a digest.
pub fn without_digest(manifest: &str) -> String {
    let (before, _) = manifest.rsplit_once(",\n  \"digest\": \"").expect("it has a digest");
    let version = format!("\"format_version\": {FORMAT_VERSION}");
    assert!(before.contains(&version), "{before}");
    before.replacen(&version, "\"format_version\": 2", 1) + "\n}"
}

/// Saves the model of `seed` from this rank.
pub fn save_model(
    io: &dyn CheckpointIO,
    group: &dyn ProcessGroup,
    name: &str,
    mesh: Mesh,
    step: u64,
    seed: u64,
) -> Result<std::path::PathBuf> {
    let tree = model(mesh, group.rank(), Some(seed), DType::F32);
    let (model, optimizer) = tensors(&tree, mesh, group.rank(), seed);
    save(io, group, name, &model, &optimizer, &meta(step, mesh, &tree))
}

pub fn tensors(
    tree: &ModuleTree,
    mesh: Mesh,
    rank: usize,
    seed: u64,
) -> (Vec<ShardTensor>, Vec<ShardTensor>) {
    let coordinate = coordinate(mesh, rank);
    let model = model_tensors(tree, coordinate).unwrap();
    let optimizer = optimizer_tensors(tree, &states(tree, Some(seed)), coordinate).unwrap();
    (model, optimizer)
}

/// Saves on all ranks of `mesh`.
pub fn save_all(root: &Path, name: &str, mesh: Mesh, step: u64, seed: u64) {
    let io = io(root);
    for saved in ranks(world_size(mesh), |group| save_model(&*io, group, name, mesh, step, seed)) {
        assert_eq!(saved.unwrap(), root.join(name));
    }
}

/// An error's text, with the temporary directory replaced by `ROOT` and temporary names by `ID`.
pub fn shown(error: impl std::fmt::Display, root: &Path) -> String {
    let text = error.to_string().replace(root.to_str().unwrap(), "ROOT");
    let mut parts = text.split(".tmp-");
    let mut shown = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let digits = part.bytes().take_while(u8::is_ascii_hexdigit).count();
        shown.push_str(".tmp-");
        shown.push_str(if digits == 16 { "ID" } else { &part[..digits] });
        shown.push_str(&part[digits..]);
    }
    shown
}
