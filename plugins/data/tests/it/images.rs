//! Pictures in folders.

use std::path::Path;

use candle_core::{Device, Tensor};
use fulgurite_core::data::{DataContext, DataModule as _, Samples, Split};
use fulgurite_data::{ImageFolder, ImageFolderConfig};
use fulgurite_test_message::assert_says;
use image::{Rgb, RgbImage};

/// Saves a picture whose pixels encode their position.
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
fn folders_are_classes() {
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
    // The other picture is larger and was resized; its blue is 1 everywhere, up to JPEG's loss.
    let blue = values(&batch.images.get(2).unwrap().get(2).unwrap());
    assert!(blue.iter().all(|&x| x > 0.9), "{blue:?}");
}

#[test]
fn augmentation_depends_on_epoch_and_sample() {
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

/// The mean red, green and blue of a picture in a batch, from 0 to 255.
fn colours(data: &ImageFolder, index: u64) -> [u8; 3] {
    let batch = data.batch(Split::Train, &[index], &Device::Cpu).unwrap();
    let means = batch.images.squeeze(0).unwrap().mean((1, 2)).unwrap().to_vec1::<f32>().unwrap();
    [0, 1, 2].map(|channel| (means[channel] * 255.0).round() as u8)
}

#[test]
fn all_extensions_in_subfolders_are_found() {
    let dir = tempfile::tempdir().unwrap();
    let extensions = ["bmp", "jpeg", "jpg", "pgm", "png", "ppm", "tif", "tiff", "webp"];
    for (i, extension) in extensions.iter().enumerate() {
        let path = dir.path().join(format!("a/sub/{i}.{extension}"));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        match *extension {
            "pgm" => image::GrayImage::from_pixel(4, 3, image::Luma([90])).save(path).unwrap(),
            _ => RgbImage::from_pixel(4, 3, Rgb([90, 90, 90])).save(path).unwrap(),
        }
    }
    for name in [".hidden/1.png", "a/.thumbs/1.png", "a/1.gif", "a/notes.txt", "top.png"] {
        std::fs::create_dir_all(dir.path().join(name).parent().unwrap()).unwrap();
        std::fs::write(dir.path().join(name), "").unwrap();
    }
    let data = setup(dir.path(), "validation_fraction = 0.0").unwrap();
    assert_eq!((data.classes(), data.len(Split::Train)), (&["a".to_owned()][..], 9));
    for i in 0..9 {
        assert_eq!(colours(&data, i), [90; 3], "{}", extensions[i as usize]);
    }
    let expected = "data.path: 1 class, 9 images; left out: 2 hidden (.hidden, a/.thumbs), 1 in no folder of a \
                    class (top.png), 2 of another type (a/1.gif, a/notes.txt)";
    assert_eq!(data.report().unwrap().to_string(), expected);
}

#[test]
fn classes_without_pictures_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    save(&dir.path().join("train/cat/1.png"), 4, 3, 0);
    save(&dir.path().join("val/cat/1.png"), 4, 3, 0);
    std::fs::create_dir(dir.path().join("train/dog")).unwrap();
    let train = dir.path().join("train");
    let error = |keys: &str| {
        let error = setup(&train, keys).unwrap_err().to_string();
        error.replace(dir.path().to_str().unwrap(), "DIR")
    };
    assert_says!(error(""), r#"data: DIR/train (data.path) has no pictures … (1 of 2: "dog") …"#);
    let val = dir.path().join("val");
    let keys = format!("allow_empty = true\nvalidation_path = {val:?}");
    let data = setup(&train, &keys).unwrap();
    assert_eq!(data.classes(), ["cat", "dog"]);
    let expected = "data.path: 1 image, 2 classes; left out: 1 without pictures (dog)\n\
                    data.validation_path: 1 class, 1 image; left out: 1 without pictures (dog)";
    assert_eq!(data.report().unwrap().to_string(), expected);
    // Other classes would get other indices.
    save(&val.join("bird/1.png"), 4, 3, 0);
    assert_says!(error(&keys), r#"data: DIR/val (data.validation_path) … class "bird" … has not"#);
}

#[test]
fn pictures_are_upright_rgb() {
    let dir = tempfile::tempdir().unwrap();
    let put = |name: &str, bytes: &[u8]| {
        std::fs::create_dir_all(dir.path().join("a")).unwrap();
        std::fs::write(dir.path().join("a").join(name), bytes).unwrap();
    };
    put("1.jpg", include_bytes!("../pictures/cmyk.jpg"));
    put("2.jpg", include_bytes!("../pictures/turned.jpg"));
    let deep = image::ImageBuffer::from_pixel(4, 3, Rgb([257u16 * 10, 257 * 20, 257 * 30]));
    deep.save(dir.path().join("a/3.png")).unwrap();
    let clear = image::RgbaImage::from_pixel(4, 3, image::Rgba([10, 20, 30, 0]));
    clear.save(dir.path().join("a/4.png")).unwrap();
    let data = setup(dir.path(), "validation_fraction = 0.0").unwrap();
    // As Pillow converts it: (207, 137, 49).
    let [red, green, blue] = colours(&data, 0);
    assert!(red.abs_diff(207) <= 3 && green.abs_diff(137) <= 3 && blue.abs_diff(49) <= 3);
    // Eight columns and sixteen rows: red above, blue below, to be turned clockwise.
    let turned = data.batch(Split::Train, &[1], &Device::Cpu).unwrap().images.squeeze(0).unwrap();
    let turned = turned.to_vec3::<f32>().unwrap();
    for (red, blue) in turned[0].iter().zip(&turned[2]) {
        assert!(blue[0] > 0.9 && red[0] < 0.1, "left: blue");
        assert!(red[3] > 0.9 && blue[3] < 0.1, "right: red");
    }
    assert_eq!((colours(&data, 2), colours(&data, 3)), ([10, 20, 30], [10, 20, 30]));
}

#[test]
fn missing_end_marker_and_huge_pictures() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a/1.jpg");
    save(&path, 40, 30, 200);
    let whole = std::fs::read(&path).unwrap();
    let read = || {
        let data = setup(dir.path(), "validation_fraction = 0.0").unwrap();
        data.batch(Split::Train, &[0], &Device::Cpu).map(|batch| values(&batch.images))
    };
    let expected = read().unwrap();
    std::fs::write(&path, &whole[..whole.len() - 2]).unwrap();
    assert_eq!(read().unwrap(), expected);
    std::fs::write(&path, &whole[..whole.len() - 40]).unwrap();
    assert!(read().unwrap_err().to_string().contains("1.jpg cannot be decoded: "));

    // The header of a PNG of 60,000 by 60,000 pixels, without data.
    let mut png = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\xea\x60\0\0\xea\x60\x08\x02\0\0\0".to_vec();
    png.extend(0x0fb0e215_u32.to_be_bytes());
    png.extend(b"\0\0\0\0IDAT\x35\xaf\x06\x1e");
    std::fs::write(&path, png).unwrap();
    let error = read().unwrap_err().to_string();
    assert!(error.contains("1.jpg cannot be decoded: Memory limit exceeded"), "{error}");
}

#[test]
fn truncated_pictures_are_errors_or_replaced() {
    let dir = tempfile::tempdir().unwrap();
    for (i, name) in ["1.jpg", "2.png", "3.webp", "4.png"].iter().enumerate() {
        let path = dir.path().join("a").join(name);
        let other = dir.path().join(if i == 3 { "b" } else { "a" }).join(name);
        save(&other, 40, 30, 200);
        if i < 3 {
            let bytes = std::fs::read(&path).unwrap();
            std::fs::write(&path, &bytes[..bytes.len() * 3 / 4]).unwrap();
        }
    }
    std::fs::write(dir.path().join("a/5.png"), "version https://git-lfs.github.com/spec/v1")
        .unwrap();
    let data = setup(dir.path(), "validation_fraction = 0.0").unwrap();
    let errors = [0, 1, 2, 3].map(|index| {
        let error = data.batch(Split::Train, &[index], &Device::Cpu).unwrap_err().to_string();
        error.replace(dir.path().to_str().unwrap(), "DIR")
    });
    for (error, name) in errors.iter().zip(["1.jpg", "2.png", "3.webp"]) {
        assert!(error.starts_with(&format!("data: DIR/a/{name} cannot be decoded: ")), "{error}");
    }
    assert_says!(errors[3], "data: DIR/a/5.png is a pointer of git-lfs … `git lfs pull`");
    let data = setup(dir.path(), "validation_fraction = 0.0\non_error = 'skip'").unwrap();
    let batch = data.batch(Split::Train, &[0, 3, 4], &Device::Cpu).unwrap();
    assert_eq!(batch.labels.to_vec1::<i64>().unwrap(), [1, 1, 1]);
    assert_eq!(values(&batch.images.get(0).unwrap()), values(&batch.images.get(2).unwrap()));
}

#[test]
fn tests_and_predictions_have_own_pictures() {
    let dir = tempfile::tempdir().unwrap();
    for (i, name) in ["cat/1", "cat/2", "dog/1", "dog/2"].iter().enumerate() {
        save(&dir.path().join(format!("train/{name}.png")), 4, 3, i as u8);
    }
    save(&dir.path().join("test/dog/x.png"), 4, 3, 9);
    save(&dir.path().join("new/2025/later.webp"), 4, 3, 9);
    save(&dir.path().join("new/a.png"), 4, 3, 9);
    let (test, new) = (dir.path().join("test"), dir.path().join("new"));
    let train = dir.path().join("train");
    let keys = format!("validation_fraction = 0.5\ntest_path = {test:?}\n");
    let data = setup(&train, &keys).unwrap();
    assert_eq!(data.len(Split::Validation), 2);
    for split in [Split::Test, Split::Predict] {
        assert_eq!(data.len(split), 1);
        let batch = data.batch(split, &[0], &Device::Cpu).unwrap();
        assert_eq!(batch.labels.to_vec1::<i64>().unwrap(), [1]);
    }
    let data = setup(&train, &format!("{keys}predict_path = {new:?}")).unwrap();
    let batch = data.batch(Split::Predict, &[0, 1], &Device::Cpu).unwrap();
    assert_eq!(batch.labels.to_vec1::<i64>().unwrap(), [-100, -100]);
    let names = [0, 1].map(|i| data.sample_name(Split::Predict, i).unwrap());
    assert_eq!(
        names,
        ["2025/later.webp", "a.png"].map(|name| new.join(name).display().to_string())
    );
    assert_eq!(data.sample_name(Split::Predict, 2), None);
    std::fs::write(new.join("b.png"), "no picture").unwrap();
    let data = setup(&train, &format!("predict_path = {new:?}\non_error = 'skip'")).unwrap();
    assert!(data.batch(Split::Predict, &[2], &Device::Cpu).is_err(), "named after another picture");
    let one = new.join("a.png");
    let data = setup(&train, &format!("predict_path = {one:?}")).unwrap();
    assert_eq!((data.len(Split::Test), data.len(Split::Predict)), (0, 1));
    let error = setup(&train, &format!("test_path = {new:?}")).unwrap_err().to_string();
    assert_says!(
        error.replace(dir.path().to_str().unwrap(), "DIR"),
        r#"data: DIR/new (data.test_path) … class "2025" … data.path has not"#
    );
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
    assert_says!(error(""), "data: DIR (data.path) holds no folders … a folder for each class …");
    std::fs::create_dir(dir.path().join("cat")).unwrap();
    assert_says!(error(""), "data: the folders in DIR (data.path) hold no pictures …");
    assert_says!(error("shift = 3"), "data.shift = 3 … 3 by 4 pixels out of sight …");
    assert_says!(error("validation_fraction = 1.0"), "data.validation_fraction … than 1, got 1");
    std::fs::write(dir.path().join("cat/1.png"), "no picture").unwrap();
    let data = setup(dir.path(), "").unwrap();
    let read = data.batch(Split::Train, &[0], &Device::Cpu).unwrap_err();
    assert_says!(
        read.to_string().replace(dir.path().to_str().unwrap(), "DIR"),
        "data: DIR/cat/1.png cannot be decoded …"
    );
}
