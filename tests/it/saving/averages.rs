//! Averages of the weights.

use fulgurite::core::checkpoint::tools::{self, AnyCheckpoint, ConvertOptions, ConvertTarget};
use fulgurite::core::trainer::Event;
use fulgurite_checkpoint_local::LocalDirectory;
use fulgurite_test_message::assert_says;

use super::harness::{Scratch, course};

#[test]
fn averages_are_validated_not_trained() {
    let keys =
        ["trainer.max_steps=6", "trainer.val_check_interval=2", "checkpoint.every_n_steps=2"];
    let run = |decay: &str, dir: &str| {
        let scratch = Scratch::new();
        let events = scratch.succeed(&[&keys[..], &[decay][..]].concat());
        let model = scratch.path("kept/step-00000006").join(dir);
        let file = model.join("shard-00001-model-00001-of-00001.safetensors");
        let course = course(&events);
        let (validations, steps): (Vec<_>, Vec<_>) =
            course.into_iter().partition(|line| line.starts_with('v'));
        (steps, validations, std::fs::read(file).unwrap())
    };
    let plain = run("trainer.timeout_secs=600", "model");
    let averaged = run("trainer.ema_decay=0.9", "model");
    assert_eq!(averaged.0, plain.0);
    assert_ne!(averaged.1, plain.1);
    assert_eq!(averaged.2, plain.2, "the weights themselves are the model's in a checkpoint");
    let held = |bytes: &[u8]| String::from_utf8_lossy(bytes).contains("state.double.weight.ema");
    assert!(held(&run("trainer.ema_decay=0.9", "optimizer").2));
    // An average with decay 0 equals the weights.
    assert_eq!(run("trainer.ema_decay=0.0", "model"), plain);

    // The average resumes only from a checkpoint that contains it.
    let scratch = Scratch::new();
    scratch.succeed(&keys);
    let more = ["trainer.ckpt_path=last", "trainer.max_steps=8", "trainer.ema_decay=0.9"];
    let error = scratch.fit(&[&keys[..], &more[..]].concat()).1.unwrap_err().to_string();
    assert!(error.contains("state.double.weight.ema"), "{error}");
    let only = [&keys[..], &more[..], &["checkpoint.weights_only=true"]].concat();
    scratch.succeed(&only);
}

#[test]
fn checkpoint_validates_as_in_training() {
    let keys = ["trainer.max_steps=6", "trainer.val_check_interval=6"];
    let (last, decay) = ("trainer.ckpt_path=last", "trainer.ema_decay=0.9");
    let full = ["trainer.strategy.type=tp", "trainer.strategy.save_distributed_checkpoint=false"];
    let mut plain = None;
    for (ema, kind) in [(&[][..], &[][..]), (&[decay], &[]), (&[decay], &full)] {
        let scratch = Scratch::new();
        let events = scratch.succeed(&[&keys, ema, kind].concat());
        let trained = events.iter().find_map(|event| match event {
            Event::Validation { val_loss, .. } => Some(*val_loss),
            _ => None,
        });
        let validated = scratch.validate(&[ema, kind, &[last]].concat()).unwrap();
        assert_eq!(Some(validated), trained);
        let plain = *plain.get_or_insert(validated);
        assert_eq!(validated == plain, ema.is_empty(), "averages are not the weights");
        // Without the key, or with `weights_only`, the raw weights are validated.
        assert_eq!(scratch.validate(&[kind, &[last]].concat()).unwrap(), plain);
        let weights = [ema, kind, &[last, "checkpoint.weights_only=true"]].concat();
        assert_eq!(scratch.validate(&weights).unwrap(), plain);
        // A conversion publishes the averages on request.
        let kept = AnyCheckpoint::open(scratch.path("kept/step-00000006")).unwrap();
        let published = scratch.path("published");
        let options = ConvertOptions { average: true, ..ConvertOptions::new(ConvertTarget::Full) };
        let io = LocalDirectory::new(published.parent().unwrap());
        let converted = tools::convert(&kept, &io, "published", &options, &mut |_| {});
        if !ema.is_empty() {
            converted.unwrap();
            let path = format!("trainer.ckpt_path={published:?}");
            assert_eq!(scratch.validate(&[kind, &[&path]].concat()).unwrap(), validated);
        } else {
            let error = converted.unwrap_err().to_string();
            let (_, message) = error.split_once("6: ").unwrap();
            assert_says!(message, "it has no average of the weights: … `trainer.ema_decay` …");
            let error = scratch.validate(&[last, decay]).unwrap_err().to_string();
            let (_, message) = error.split_once(": ").unwrap();
            assert_says!(message, "it has no average … would fit … `state.double.weight.ema` …");
        }
    }
}
