//! The definition of a sample, for other ranks and for resumed runs.

use fulgurite_core::data::{DataContext, DataModule};
#[cfg(feature = "images")]
use fulgurite_data::{ImageFolder, ImageFolderConfig};
use fulgurite_data::{TextData, TextDataConfig};

#[test]
fn cut_defines_a_text_sample() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.txt");
    std::fs::write(&path, "a text of enough letters for several samples").unwrap();
    let definition = |seq_len, stride, batch_size| {
        let path = path.as_path().into();
        let config =
            TextDataConfig { path, seq_len, stride, batch_size, ..TextDataConfig::default() };
        let data = TextData::setup(&config, &DataContext::default()).unwrap();
        data.sample_definition().unwrap()
    };
    let first = definition(4, None, 2);
    assert_eq!(first, definition(4, Some(4), 1), "as by default, in other batches");
    assert_ne!(first, definition(5, Some(4), 2));
    assert_ne!(first, definition(4, Some(3), 2));
}

#[cfg(feature = "images")]
#[test]
fn pictures_by_name_and_content() {
    let dir = tempfile::tempdir().unwrap();
    let class = dir.path().join("cat");
    std::fs::create_dir(&class).unwrap();
    for (i, name) in ["a.png", "b.png", "c.png"].iter().enumerate() {
        image::RgbImage::from_pixel(2, 2, image::Rgb([i as u8; 3])).save(class.join(name)).unwrap();
    }
    let definition = || {
        let config = ImageFolderConfig {
            path: dir.path().to_owned(),
            validation_fraction: Some(0.0),
            ..ImageFolderConfig::default()
        };
        ImageFolder::setup(&config, &DataContext::default()).unwrap().sample_definition().unwrap()
    };
    let first = definition();
    assert_eq!(first, definition());
    std::fs::rename(class.join("c.png"), class.join("d.png")).unwrap();
    let renamed = definition();
    assert_ne!(first, renamed);
    image::RgbImage::from_pixel(2, 2, image::Rgb([9; 3])).save(class.join("d.png")).unwrap();
    assert_ne!(renamed, definition());
}
