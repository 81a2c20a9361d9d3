//! [`ImageFolder`]: pictures in folders that name their classes.

use std::hash::Hasher as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::{Device, Tensor};
use fulgurite_config::Documented;
use fulgurite_engine::data::{DataContext, DataModule, DataReport, Samples, SourceReport, Split};
use fulgurite_engine::execution::transfer;
use fulgurite_engine::random::Stream;
use fulgurite_error::files::read_regular;
use fulgurite_error::{Error, Result};
use image::RgbImage;
use image::imageops::FilterType;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use crate::config::{OnError, check_validation};
use crate::held_out::hold_out;
use crate::picture_files::{classes, decode, pictures, unlabelled};

/// Maximum length of a file.
const MAX_FILE: u64 = 256 << 20;
/// The label of a picture without a class.
const IGNORED: i64 = -100;
/// Maximum pixels per side after resizing.
const MAX_SIDE: usize = 1 << 14;

/// The configuration of [`ImageFolder`].
///
/// ```toml
/// [data]
/// path = "pictures"        # pictures/cat/1.png, pictures/dog/1.jpg, …
/// height = 32
/// width = 32
/// batch_size = 16
/// flip = true
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Documented)]
#[serde(default, deny_unknown_fields)]
pub struct ImageFolderConfig {
    /// A folder with a folder of pictures for each class, which may have folders of its own. Links
    /// are followed. Hidden files and folders are left out.
    #[default(PathBuf::from("."))]
    pub path: PathBuf,
    /// A folder of the same kind for validation; then all of `path` is for training. Its classes
    /// must be among the classes of `path`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_path: Option<PathBuf>,
    /// A folder of the same kind for a test; by default the pictures for validation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub test_path: Option<PathBuf>,
    /// A picture, or a folder of pictures, for a prediction, which need no folders of classes; by
    /// default the pictures for a test.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predict_path: Option<PathBuf>,
    /// The fraction of the pictures for validation, chosen at random, the same in every run. By
    /// default 0.1, and 0 with a `validation_path`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_fraction: Option<f64>,
    /// Rows of pixels that pictures are resized to.
    #[default(32)]
    pub height: usize,
    /// Columns of pixels that pictures are resized to.
    #[default(32)]
    pub width: usize,
    /// Pictures in a micro-batch of one data-parallel rank.
    #[default(8)]
    pub batch_size: usize,
    /// Whether training pictures are shuffled, differently in each epoch.
    #[default(true)]
    pub shuffle: bool,
    /// The treatment of pictures that cannot be decoded, for example truncated ones: `"error"` ends
    /// the run; `"skip"` takes the next picture of the split instead and warns, except in a
    /// prediction.
    #[default(OnError::Error)]
    pub on_error: OnError,
    /// Whether a class may be empty. By default an empty class is an error.
    pub allow_empty: bool,
    /// Whether half of the training pictures are mirrored, a different half in each epoch.
    pub flip: bool,
    /// Maximum random shift of training pictures in pixels, in both directions, different in each
    /// epoch. Uncovered pixels are black.
    pub shift: usize,
}

impl ImageFolderConfig {
    fn validation_fraction(&self) -> f64 {
        let default = if self.validation_path.is_some() { 0.0 } else { 0.1 };
        self.validation_fraction.unwrap_or(default)
    }

    fn validate(&self) -> Result<()> {
        let fail = |message: String| Err(Error::Config(message));
        for (key, value) in [("height", self.height), ("width", self.width)] {
            if !(1..=MAX_SIDE).contains(&value) {
                return fail(format!(
                    "data.{key} must be at least 1 and at most {MAX_SIDE} pixels, got {value}"
                ));
            }
        }
        if self.shift >= self.height.min(self.width) {
            return fail(format!(
                "data.shift = {} moves pictures of {} by {} pixels out of sight; it must be less",
                self.shift, self.height, self.width
            ));
        }
        let others = [("validation_path", self.validation_path.is_some())];
        check_validation(self.validation_fraction(), &others)?;
        Ok(())
    }
}

/// Pictures and their classes.
#[derive(Debug, Clone)]
pub struct ImageBatch {
    /// Red, green and blue from 0 to 1, f32 `[samples, 3, height, width]`.
    pub images: Tensor,
    /// The index of each picture's class in [`ImageFolder::classes`], i64 `[samples]`; -100 for a
    /// picture of `data.predict_path`.
    pub labels: Tensor,
}

/// Pictures in folders whose names are their classes (torchvision's `ImageFolder`): PNG, JPEG,
/// WebP, BMP, TIFF, PPM and PGM. Each picture is read on demand and turned by its Exif orientation.
/// Transparency is dropped, 16 bits become 8, and grey, palettes and CMYK become red, green and
/// blue.
///
/// [`Split::Test`] has the pictures of `data.test_path`, otherwise the pictures for validation.
/// [`Split::Predict`] has the pictures of `data.predict_path`, otherwise the pictures for a test.
#[derive(Debug)]
pub struct ImageFolder {
    config: ImageFolderConfig,
    classes: Vec<String>,
    train: Vec<Picture>,
    validation: Vec<Picture>,
    test: Option<Vec<Picture>>,
    predict: Option<Vec<Picture>>,
    report: DataReport,
    /// Number of pictures replaced by others.
    replaced: AtomicU64,
}

#[derive(Debug, Clone)]
pub(crate) struct Picture {
    pub(crate) path: PathBuf,
    /// `None` for a picture of `data.predict_path`.
    pub(crate) class: Option<usize>,
}

impl ImageFolder {
    /// The names of the classes, in order.
    pub fn classes(&self) -> &[String] {
        &self.classes
    }

    /// Height and width of the pictures in a batch.
    pub fn size(&self) -> [usize; 2] {
        [self.config.height, self.config.width]
    }

    fn pictures(&self, split: Split) -> &[Picture] {
        let test = self.test.as_ref().unwrap_or(&self.validation);
        match split {
            Split::Train => &self.train,
            Split::ValidationSet(_) => &[],
            Split::Validation => &self.validation,
            Split::Test => test,
            Split::Predict => self.predict.as_ref().unwrap_or(test),
        }
    }

    /// Decodes a picture of a split. With `data.on_error = "skip"`, takes the next picture that can
    /// be decoded.
    fn decode(&self, split: Split, index: u64) -> Result<(RgbImage, Option<usize>)> {
        let pictures = self.pictures(split);
        let missing = || {
            let available = pictures.len();
            Error::Data(format!("there is no {split} sample {index} of {available}"))
        };
        let halves = pictures.split_at_checked(index as usize);
        let (before, after) = halves.ok_or_else(missing)?;
        if after.is_empty() {
            return Err(missing());
        }
        let mut first = None;
        for picture in after.iter().chain(before) {
            let error = match decode(&read_regular(&picture.path, MAX_FILE)?) {
                Ok(image) => return Ok((image, picture.class)),
                Err(what) => Error::Data(format!("{} {what}", picture.path.display())),
            };
            // A prediction has its picture's name.
            if self.config.on_error == OnError::Error || split == Split::Predict {
                return Err(error);
            }
            let count = self.replaced.fetch_add(1, Ordering::Relaxed) + 1;
            if count.is_power_of_two() {
                tracing::warn!("{error}; the next picture is taken in its place ({count} so far)");
            }
            first.get_or_insert(error);
        }
        Err(first.unwrap_or_else(missing))
    }

    /// Appends red, green and blue of a picture, plane by plane.
    fn add(&self, decoded: RgbImage, random: Option<Stream>, out: &mut Vec<f32>) {
        let (height, width) = (self.config.height, self.config.width);
        let (columns, rows) = (width as u32, height as u32);
        let resized = match decoded.dimensions() == (columns, rows) {
            true => decoded,
            false => image::imageops::resize(&decoded, columns, rows, FilterType::Triangle),
        };
        let range = 2 * self.config.shift as u64 + 1;
        let moved = |index| match random {
            Some(random) => {
                (random.uniform(index) * range as f64) as i64 - self.config.shift as i64
            }
            None => 0,
        };
        let (down, right) = (moved(1), moved(2));
        let flipped = self.config.flip && random.is_some_and(|random| random.uniform(0) < 0.5);
        for channel in 0..3 {
            for y in 0..height as i64 {
                out.extend((0..width as i64).map(|x| {
                    let x = if flipped { width as i64 - 1 - x } else { x };
                    let (x, y) = (x - right, y - down);
                    let inside = (0..width as i64).contains(&x) && (0..height as i64).contains(&y);
                    match inside {
                        true => f32::from(resized.get_pixel(x as u32, y as u32)[channel]) / 255.0,
                        false => 0.0,
                    }
                }));
            }
        }
    }

    fn make(
        &self,
        split: Split,
        indices: &[u64],
        samples: Option<&Samples>,
        device: &Device,
    ) -> Result<ImageBatch> {
        let (height, width) = (self.config.height, self.config.width);
        let mut images = Vec::with_capacity(indices.len() * 3 * height * width);
        let mut labels = Vec::with_capacity(indices.len());
        for (nth, &index) in indices.iter().enumerate() {
            let (image, class) = self.decode(split, index)?;
            self.add(image, samples.map(|samples| samples.random(nth)), &mut images);
            labels.push(class.map_or(IGNORED, |class| class as i64));
        }
        Ok(ImageBatch {
            images: transfer::to_device(
                &Tensor::from_vec(images, (indices.len(), 3, height, width), &Device::Cpu)?,
                device,
                "batch",
            )?,
            labels: transfer::to_device(
                &Tensor::from_vec(labels, indices.len(), &Device::Cpu)?,
                device,
                "batch",
            )?,
        })
    }
}

impl DataModule for ImageFolder {
    type Config = ImageFolderConfig;
    type Batch = ImageBatch;

    fn exclusive_keys() -> &'static [&'static [&'static str]] {
        &[&["validation_fraction", "validation_path"]]
    }

    fn setup(config: &ImageFolderConfig, context: &DataContext) -> Result<Self> {
        config.validate()?;
        let mut report = DataReport::default();
        let mut open = |key: &str, path: &Path, expected: Option<&[String]>| {
            let mut source = SourceReport::new(key);
            let found = classes(key, path, &mut source)?;
            let classes = expected.unwrap_or(&found);
            if let Some(class) = found.iter().find(|class| !classes.contains(class)) {
                return Err(Error::Data(format!(
                    "{} ({key}) has the class {class:?}, and data.path has not",
                    path.display()
                )));
            }
            let allow_empty = config.allow_empty || expected.is_some();
            let pictures = pictures(key, path, classes, allow_empty, &mut source)?;
            source.count("classes", found.len() as u64);
            source.count("images", pictures.len() as u64);
            report.sources.push(source);
            Ok((found, pictures))
        };
        let (classes, mut train) = open("data.path", &config.path, None)?;
        let validation;
        if let Some(path) = &config.validation_path {
            (_, validation) = open("data.validation_path", path, Some(&classes))?;
        } else {
            let held = hold_out(train, config.validation_fraction(), "validation of pictures");
            if let Some(warning) = held.warning.filter(|_| context.rank == 0) {
                tracing::warn!("{warning}");
            }
            (train, validation) = (held.train, held.validation);
        }
        let test = match &config.test_path {
            Some(path) => Some(open("data.test_path", path, Some(&classes))?.1),
            None => None,
        };
        let predict = match &config.predict_path {
            Some(path) => {
                let key = "data.predict_path";
                let mut source = SourceReport::new(key);
                let found = unlabelled(key, path, &mut source)?;
                source.count("images", found.len() as u64);
                report.sources.push(source);
                Some(found)
            }
            None => None,
        };
        let (config, replaced) = (config.clone(), AtomicU64::new(0));
        Ok(Self { config, classes, train, validation, test, predict, report, replaced })
    }

    fn items(_: &ImageFolderConfig) -> &'static str {
        "images"
    }

    fn batch_size(config: &ImageFolderConfig) -> usize {
        config.batch_size
    }

    fn shuffle(config: &ImageFolderConfig) -> bool {
        config.shuffle
    }

    fn len(&self, split: Split) -> u64 {
        self.pictures(split).len() as u64
    }

    fn fingerprint(&self) -> Result<Option<String>> {
        Ok(Some(format!("{} pictures of {} classes", self.train.len(), self.classes.len())))
    }

    fn sample_name(&self, split: Split, index: u64) -> Option<String> {
        let picture = self.pictures(split).get(usize::try_from(index).ok()?)?;
        Some(picture.path.display().to_string())
    }

    fn report(&self) -> Option<DataReport> {
        Some(self.report.clone())
    }

    fn sample_definition(&self) -> Result<Vec<(String, String)>> {
        let size = format!("{} by {}", self.config.height, self.config.width);
        Ok(vec![
            ("`data.height` by `data.width`".to_owned(), size),
            ("the list of training pictures".to_owned(), digest(&self.train)?),
        ])
    }

    fn evaluation_fingerprint(&self) -> Result<Option<String>> {
        let others = [Some(&self.validation), self.test.as_ref(), self.predict.as_ref()];
        let others: Vec<Picture> = others.into_iter().flatten().flatten().cloned().collect();
        digest(&others).map(Some)
    }

    fn host_keys() -> &'static [&'static str] {
        &["path", "validation_path", "test_path", "predict_path"]
    }

    fn batch(&self, split: Split, indices: &[u64], device: &Device) -> Result<ImageBatch> {
        self.make(split, indices, None, device)
    }

    fn augmented_batch(&self, samples: &Samples, device: &Device) -> Result<ImageBatch> {
        let random = (samples.split() == Split::Train).then_some(samples);
        self.make(samples.split(), samples.indices(), random, device)
    }
}

/// Number of pictures whose content enters a [`digest`].
const SAMPLED: usize = 64;

/// A hash of the names and classes of pictures, in order, and of the content of some.
///
/// # Errors
/// If one of the sampled pictures cannot be read.
fn digest(pictures: &[Picture]) -> Result<String> {
    let mut hasher = XxHash3_64::default();
    for picture in pictures {
        let name = picture.path.file_name().unwrap_or_default().as_encoded_bytes();
        hasher.write_u64(name.len() as u64);
        hasher.write(name);
        hasher.write_u64(picture.class.map_or(u64::MAX, |class| class as u64));
    }
    let apart = pictures.len().div_ceil(SAMPLED).max(1);
    for picture in pictures.iter().step_by(apart) {
        hasher.write(&read_regular(&picture.path, MAX_FILE)?);
    }
    Ok(format!("{} pictures ({:016x})", pictures.len(), hasher.finish()))
}
