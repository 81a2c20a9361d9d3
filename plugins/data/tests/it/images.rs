//! Pictures in folders.

use std::path::Path;

use candle_core::{Device, Tensor};
use fulgurite_core::data::{DataContext, DataModule as _, Samples, Split};
use fulgurite_data::{ImageFolder, ImageFolderConfig};
use image::{Rgb, RgbImage};

/// A picture whose pixels say where they are.
fn save(path: &Path, width: u32, height: u32, blue: u8) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    let picture =
        RgbImage::from_fn(width, height, |x, y| Rgb([(x * 10) as u8, (y * 10) as u8, blue]));
    picture.save(path).unwrap();
}

fn setup(dir: &Path, keys: &str) -> fulgurite_core::Result<ImageFolder> {
    let text = format!("path = {dir:?}\nheight = 3\nwidth = 4\n{keys}");
    let config: ImageFolderConfig = toml::from_str(&text).unwrap();
    ImageFolder::setup(&config, &DataContext::default())
}

fn values(x: &Tensor) -> Vec<f32> {
    x.flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn folders_are_classes_and_pictures_are_planes() {
    let dir = tempfile::tempdir().unwrap();
    save(&dir.path().join("dog/b.png"), 4, 3, 0);
    save(&dir.path().join("dog/a.PNG"), 4, 3, 51);
    save(&dir.path().join("cat/x.jpg"), 40, 30, 255);
    std::fs::write(dir.path().join("cat/notes.txt"), "no picture").unwrap();
    let data = setup(dir.path(), "validation_fraction = 0.0").unwrap();
    assert_eq!(data.classes(), ["cat", "dog"]);
    assert_eq!((data.len(Split::Train), data.len(Split::Validation)), (3, 0));
    let batch = data.batch(Split::Train, &[1, 2, 0], &Device::Cpu).unwrap();
    assert_eq!(batch.images.dims(), [3, 3, 3, 4]);
    assert_eq!(batch.labels.to_vec1::<i64>().unwrap(), [1, 1, 0]);
    let first = values(&batch.images.get(0).unwrap());
    let column = |i: usize| (i % 4) as f32 * 10.0 / 255.0;
    let row = |i: usize| (i / 4) as f32 * 10.0 / 255.0;
    let expected: Vec<f32> = (0..12).map(column).chain((0..12).map(row)).chain([0.2; 12]).collect();
    assert_eq!(first, expected);
    // The other one is larger and was resized; its blue is 1 all over, but for JPEG's loss.
    let blue = values(&batch.images.get(2).unwrap().get(2).unwrap());
    assert!(blue.iter().all(|&x| x > 0.9), "{blue:?}");
}

#[test]
fn augmentation_follows_from_epoch_and_sample_and_spares_validation() {
    let dir = tempfile::tempdir().unwrap();
    for i in 0..40 {
        save(&dir.path().join(format!("a/{i:02}.png")), 4, 3, 5);
    }
    let data = setup(dir.path(), "flip = true\nshift = 1").unwrap();
    assert_eq!((data.len(Split::Train), data.len(Split::Validation)), (36, 4));
    let images = |split, samples: &[(u64, u64)]| {
        let samples = Samples::new(split, 7, samples.iter().copied());
        let batch = data.augmented_batch(&samples, &Device::Cpu).unwrap();
        (0..samples.indices().len())
            .map(|i| values(&batch.images.get(i).unwrap()))
            .collect::<Vec<_>>()
    };
    let epoch: Vec<(u64, u64)> = (0..36).map(|i| (0, i)).collect();
    let pictures = images(Split::Train, &epoch);
    assert_eq!(pictures[20..22], images(Split::Train, &epoch[20..22]));
    let mut kinds = pictures.clone();
    kinds.sort_by(|a, b| a.partial_cmp(b).unwrap());
    kinds.dedup();
    assert!((10..=18).contains(&kinds.len()), "of 2 mirrored by 9 moved: {}", kinds.len());
    let plain = values(&data.batch(Split::Train, &[0], &Device::Cpu).unwrap().images);
    assert!(kinds.contains(&plain));
    let next: Vec<(u64, u64)> = (0..36).map(|i| (1, i)).collect();
    assert_ne!(images(Split::Train, &next), pictures);
    for picture in images(Split::Validation, &[(0, 0), (0, 3)]) {
        assert_eq!(picture, plain);
    }
}

#[test]
fn mistakes_are_explained() {
    let dir = tempfile::tempdir().unwrap();
    let error = |keys: &str| {
        setup(dir.path(), keys)
            .unwrap_err()
            .to_string()
            .replace(dir.path().to_str().unwrap(), "DIR")
    };
    insta::assert_snapshot!(error(""), @"data: DIR holds no folders; pictures are in a folder for each class, such as DIR/cat/1.png");
    std::fs::create_dir(dir.path().join("cat")).unwrap();
    insta::assert_snapshot!(error(""), @"data: the folders in DIR (data.path) hold no pictures (.png, .jpg, .jpeg)");
    insta::assert_snapshot!(error("shift = 3"), @"data.shift = 3 moves pictures of 3 by 4 pixels out of sight; it must be less");
    insta::assert_snapshot!(error("validation_fraction = 1.0"), @"data.validation_fraction must be at least 0 and less than 1, got 1");
    std::fs::write(dir.path().join("cat/1.png"), "no picture").unwrap();
    let data = setup(dir.path(), "").unwrap();
    let read = data.batch(Split::Train, &[0], &Device::Cpu).unwrap_err();
    insta::assert_snapshot!(read.to_string().replace(dir.path().to_str().unwrap(), "DIR"), @"data: DIR/cat/1.png: The image format could not be determined");
}
