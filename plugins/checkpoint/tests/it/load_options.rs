//! Allowed differences between a checkpoint and a model, and the errors about others.

use candle_core::DType;
use fulgurite_core::checkpoint::{
    CheckpointIO, DistributedCheckpoint, DtypePolicy, LoadOptions, NameRules, ParameterFilter,
    SaveMeta, TensorSource, compare_with, load_from_full_model_state_dict,
    load_from_full_optimizer_state_dict, load_into, load_optimizer, model_tensors,
    optimizer_tensors, restore, save,
};
use fulgurite_core::module::{ModuleBuilder, ModuleInit, ModuleTree};
use fulgurite_core::parameter::Init;
use fulgurite_core::shard::Region;
use fulgurite_test_support::checkpoints::{
    Mesh, SEED, bytes, coordinate, io, meta, model, ranks, set_up, shown, states, values,
};

const ONE: Mesh = [1, 1, 1];

/// Saves the model of `SEED` on four ranks with a filter, as `c`.
fn saved(filter: Option<ParameterFilter>) -> tempfile::TempDir {
    let temp = tempfile::tempdir().unwrap();
    let io = io(temp.path());
    let mesh = [1, 2, 2];
    let saved = ranks(4, |group| {
        let tree = model(mesh, group.rank(), Some(SEED), DType::F32);
        let coordinate = coordinate(mesh, group.rank());
        let model = model_tensors(&tree, coordinate)?;
        let optimizer = optimizer_tensors(&tree, &states(&tree, Some(SEED)), coordinate)?;
        let meta = SaveMeta { filter: filter.clone(), ..meta(1, mesh, &tree) };
        save(&*io, group, "c", &model, &optimizer, &meta)
    });
    saved.into_iter().for_each(|saved| drop(saved.unwrap()));
    temp
}

fn opened(temp: &tempfile::TempDir) -> DistributedCheckpoint {
    DistributedCheckpoint::open(temp.path().join("c")).unwrap()
}

/// Whether a parameter has the values that were saved.
fn is_loaded(tree: &ModuleTree, fqn: &str) -> bool {
    let parameter = tree.parameter(fqn).unwrap();
    let shape = parameter.global_shape();
    let full = Region::full(shape);
    bytes(&parameter.local().unwrap().values)
        == bytes(&values(Some(SEED), fqn, shape, &full, parameter.dtype()))
}

// checklist: Lightning: save_checkpoint
#[test]
fn filter_applies_to_model_and_optimizer() {
    let temp = saved(None);
    let checkpoint = opened(&temp);
    let tree = model(ONE, 0, None, DType::F32);
    let options = LoadOptions {
        filter: Some(ParameterFilter::matching(["layers.0", "norm"])),
        ..Default::default()
    };
    assert!(load_into(&checkpoint, &tree, &options).unwrap().is_empty());
    for parameter in tree.parameters() {
        let fqn = parameter.fqn();
        assert_eq!(
            is_loaded(&tree, fqn),
            fqn.starts_with("layers.0") || fqn == "norm.weight",
            "{fqn}"
        );
    }
    let state = states(&tree, None);
    assert!(load_optimizer(checkpoint.optimizer(), &tree, &state, &options).unwrap().is_empty());
    for state in &state {
        let kept = state.fqn.starts_with("layers.0") || state.fqn == "norm.weight";
        let zeros = bytes(&state.values).iter().all(|b| *b == 0);
        assert_eq!(zeros, !kept, "{}", state.fqn);
    }
}

#[test]
fn filtered_checkpoint_records_its_filter() {
    let filter = ParameterFilter::matching(["layers.*", "scale"]);
    let temp = saved(Some(filter.clone()));
    let checkpoint = opened(&temp);
    assert_eq!(checkpoint.model().names(), ["layers.0.conv", "layers.0.up", "scale"]);
    assert_eq!(checkpoint.optimizer().len(), 6);
    assert_eq!(checkpoint.manifest().filter.as_deref(), Some("layers.*, scale"));
    checkpoint.verify().unwrap();
    let tree = model(ONE, 0, None, DType::F32);
    let state = states(&tree, None);
    let error = restore(&checkpoint, &tree, Some(&state), true).unwrap_err();
    insta::assert_snapshot!(shown(error, temp.path()), @r#"
checkpoint ROOT/c: does not fit this model:
  missing, the model has it and the checkpoint does not (3):
    embed.weight
    norm.weight
    row.weight
and does not fit this optimizer:
  missing, the optimizer has it and the checkpoint does not (6):
    state.embed.weight.exp_avg
    state.embed.weight.exp_avg_sq
    state.norm.weight.exp_avg
    state.norm.weight.exp_avg_sq
    state.row.weight.exp_avg
    state.row.weight.exp_avg_sq
Nothing was loaded. It was saved with a filter and holds only: layers.*, scale. Load with the same filter or with `strict = false`
"#);
    assert!(tree.parameters().iter().all(|p| !is_loaded(&tree, p.fqn())));
    // It loads with the same filter, or not strictly.
    let same = LoadOptions { filter: Some(filter), ..LoadOptions::default() };
    let report = restore(&checkpoint, &tree, Some(&state), &same).unwrap();
    assert!(report.model.is_empty() && report.optimizer.is_empty());
    assert_eq!(report.model.loaded, ["layers.0.up", "layers.0.conv", "scale"]);
    assert_eq!(report.optimizer.loaded.len(), 6);
    assert!(is_loaded(&tree, "scale") && !is_loaded(&tree, "norm.weight"));
    let report = restore(&checkpoint, &tree, Some(&state), false).unwrap();
    assert_eq!(report.model.missing, ["embed.weight", "norm.weight", "row.weight"]);
    assert_eq!(report.optimizer.missing.len(), 6);
    // A manifest without a filter does not mention one.
    let whole = saved(None);
    let text = std::fs::read_to_string(whole.path().join("c/manifest.json")).unwrap();
    assert!(!text.contains("\"filter\""));
}

/// The model with another layer, other shapes and a layer less.
fn changed() -> ModuleTree {
    let b = ModuleBuilder::new(ModuleInit::default());
    let init = Init::Normal { mean: 0.0, std: 1.0 };
    b.pp("embed").parameter("weight", [8, 6], init).unwrap();
    b.pp("norm").parameter("weight", [5], init).unwrap();
    b.pp("layers.0").parameter("up", [6, 10], init).unwrap();
    b.pp("layers.1").parameter("up", [6, 10], init).unwrap();
    set_up(b.finish().unwrap(), ONE, 0, Some(1))
}

#[test]
fn report_covers_model_and_optimizer() {
    let temp = saved(None);
    let checkpoint = opened(&temp);
    let tree = changed();
    let state = states(&tree, None);
    let before: Vec<_> =
        tree.parameters().iter().map(|p| bytes(&p.local().unwrap().values)).collect();
    let error = restore(&checkpoint, &tree, Some(&state), true).unwrap_err();
    insta::assert_snapshot!(shown(error, temp.path()), @r#"
    checkpoint ROOT/c: does not fit this model:
      missing, the model has it and the checkpoint does not (1):
        layers.1.up
      unexpected, the checkpoint has it and the model does not (3):
        layers.0.conv
        row.weight
        scale
      of another shape (1):
        embed.weight: [8, 6] in the model, [7, 6] in the checkpoint
    and does not fit this optimizer:
      missing, the optimizer has it and the checkpoint does not (2):
        state.layers.1.up.exp_avg
        state.layers.1.up.exp_avg_sq
      unexpected, the checkpoint has it and the optimizer does not (6):
        state.layers.0.conv.exp_avg
        state.layers.0.conv.exp_avg_sq
        state.row.weight.exp_avg
        state.row.weight.exp_avg_sq
        state.scale.exp_avg
        state.scale.exp_avg_sq
      of another shape (2):
        state.embed.weight.exp_avg: [8, 6] in the optimizer, [7, 6] in the checkpoint
        state.embed.weight.exp_avg_sq: [8, 6] in the optimizer, [7, 6] in the checkpoint
    Nothing was loaded. Use the configuration that it was saved with, or `LoadOptions` with `strict: false`, a `filter` or other `names`
    "#);
    let after: Vec<_> =
        tree.parameters().iter().map(|p| bytes(&p.local().unwrap().values)).collect();
    assert_eq!(before, after);
    // Not strictly, new parameters start fresh and the others are loaded.
    let report = restore(&checkpoint, &tree, Some(&state), false).unwrap();
    assert_eq!(report.model.missing, ["layers.1.up"]);
    assert_eq!(report.model.unexpected, ["layers.0.conv", "row.weight", "scale"]);
    assert_eq!(report.model.mismatched[0].name, "embed.weight");
    assert_eq!(
        report.optimizer.missing,
        ["state.layers.1.up.exp_avg", "state.layers.1.up.exp_avg_sq"]
    );
    assert_eq!(report.optimizer.mismatched.len(), 2);
    assert!(is_loaded(&tree, "norm.weight"));
    for state in &state {
        let fresh = bytes(&state.values).iter().all(|b| *b == 0);
        assert_eq!(
            fresh,
            matches!(state.fqn.as_str(), "layers.1.up" | "embed.weight"),
            "{}",
            state.fqn
        );
    }
    // torchtune's functions do the same.
    let model = load_from_full_model_state_dict(&tree, &checkpoint, false).unwrap();
    assert_eq!(model, report.model);
    let optimizer =
        load_from_full_optimizer_state_dict(&tree, &state, checkpoint.optimizer(), false).unwrap();
    assert_eq!(optimizer, report.optimizer);
}

#[test]
fn weights_only_skips_the_optimizer() {
    let temp = saved(None);
    let tree = model(ONE, 0, None, DType::F32);
    let state = states(&tree, None);
    let options = LoadOptions { weights_only: true, ..LoadOptions::default() };
    restore(&opened(&temp), &tree, Some(&state), &options).unwrap();
    assert!(is_loaded(&tree, "norm.weight"));
    assert!(state.iter().all(|s| bytes(&s.values).iter().all(|b| *b == 0)));
}

#[test]
fn name_rules_apply_to_model_and_optimizer() {
    let temp = saved(None);
    let checkpoint = opened(&temp);
    let b = ModuleBuilder::new(ModuleInit::default());
    b.pp("net.blocks.0").parameter("up", [6, 10], Init::ZEROS).unwrap();
    let tree = set_up(b.finish().unwrap(), ONE, 0, None);
    let state = states(&tree, None);
    let names = NameRules {
        rename: vec![("layers.*".into(), "blocks.*".into())],
        prefix_add: Some("net.".into()),
        ..NameRules::default()
    };
    let options = LoadOptions { strict: false, names, ..LoadOptions::default() };
    let report = restore(&checkpoint, &tree, Some(&state), &options).unwrap();
    assert_eq!(report.model.missing, [""; 0]);
    assert_eq!(report.model, compare_with(&checkpoint, &tree, &options).unwrap());
    assert_eq!(report.model.unexpected.len(), 5);
    assert_eq!(report.optimizer.unexpected.len(), 10);
    let full = Region::full(&[6, 10]);
    let expected = |name: &str| bytes(&values(Some(SEED), name, &[6, 10], &full, DType::F32));
    assert_eq!(bytes(&tree.parameters()[0].local().unwrap().values), expected("layers.0.up"));
    assert_eq!(bytes(&state[0].values), expected("layers.0.up/exp_avg"));
    // The report and the filter use the model's names.
    let only = LoadOptions {
        filter: Some(ParameterFilter::matching(["net.blocks"])),
        strict: true,
        ..options
    };
    let report = restore(&checkpoint, &tree, Some(&state), &only).unwrap_err();
    insta::assert_snapshot!(shown(report, temp.path()), @r#"
    checkpoint ROOT/c: does not fit this model:
      unexpected, the checkpoint has it and the model does not (1):
        net.blocks.0.conv
    and does not fit this optimizer:
      unexpected, the checkpoint has it and the optimizer does not (2):
        state.net.blocks.0.conv.exp_avg
        state.net.blocks.0.conv.exp_avg_sq
    Nothing was loaded. Use the configuration that it was saved with, or `LoadOptions` with `strict: false`, a `filter` or other `names`
    "#);
}

#[test]
fn dtype_policy_and_verify_are_options() {
    let temp = saved(None);
    let checkpoint = opened(&temp);
    let tree = model(ONE, 0, None, DType::BF16);
    let exact = LoadOptions {
        dtypes: DtypePolicy::Exact,
        filter: Some(ParameterFilter::matching(["norm", "scale"])),
        ..LoadOptions::default()
    };
    let error = load_into(&checkpoint, &tree, &exact).unwrap_err();
    insta::assert_snapshot!(shown(error, temp.path()), @r#"
    checkpoint ROOT/c: does not fit this model:
      of another dtype (2):
        norm.weight: BF16 in the model, F32 in the checkpoint
        scale: BF16 in the model, F32 in the checkpoint
    Nothing was loaded. Use the configuration that it was saved with, or `LoadOptions` with `strict: false`, a `filter` or other `names`
    "#);
    assert!(load_into(&checkpoint, &tree, true).unwrap().is_empty());
    assert!(load_into(&checkpoint, &model(ONE, 0, None, DType::F32), &exact).unwrap().is_empty());
    // A flipped bit is found, unless verification is off.
    let shard = temp.path().join("c/model/shard-00001-model-00001-of-00001.safetensors");
    let mut content = std::fs::read(&shard).unwrap();
    *content.last_mut().unwrap() ^= 1;
    std::fs::write(&shard, content).unwrap();
    let tree = model(ONE, 0, None, DType::F32);
    let error = load_into(&checkpoint, &tree, true).unwrap_err();
    assert!(error.to_string().contains("do not match their checksum"), "{error}");
    let unverified = LoadOptions { verify: false, ..LoadOptions::default() };
    load_into(&checkpoint, &tree, &unverified).unwrap();
}

#[test]
fn filtered_save_writes_only_kept_tensors() {
    let temp = saved(Some(ParameterFilter::new("nothing but the scale", |fqn| fqn == "scale")));
    let place = io(temp.path());
    let place: &dyn CheckpointIO = &*place;
    assert_eq!(place.list("c/model").unwrap().len(), 1, "ranks without a part write no file");
    let source = fulgurite_core::checkpoint::open(temp.path().join("c")).unwrap();
    assert_eq!(source.filtered(), Some("nothing but the scale"));
    assert_eq!(source.names(), ["scale"]);
    let tree = model(ONE, 0, None, DType::F32);
    assert_eq!(ParameterFilter::trainable(&tree).what(), "trainable parameters");
    assert!(
        ParameterFilter::trainable(&tree).keeps("scale")
            && !ParameterFilter::trainable(&tree).keeps("head.weight")
    );
}
