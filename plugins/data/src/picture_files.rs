//! Finding and decoding pictures.

use std::fs;
use std::io::Cursor;
use std::path::Path;

use fulgurite_engine::data::SourceReport;
use fulgurite_error::{Error, Result};
use fulgurite_launch::catch_panic;
use image::{DynamicImage, ImageDecoder as _, ImageReader, Limits, RgbImage};

use crate::images::Picture;
use crate::sniff::foreign;
use crate::walk::{Wanted, find, find_in};

/// Extensions of pictures, as in torchvision.
const PICTURES: &[&str] = &["jpg", "jpeg", "png", "ppm", "bmp", "pgm", "tif", "tiff", "webp"];

/// Returns the class names: the folders directly in `folder`, in order. The report counts other
/// entries.
///
/// # Errors
/// If the folder is without classes, or cannot be read.
pub(crate) fn classes(key: &str, folder: &Path, report: &mut SourceReport) -> Result<Vec<String>> {
    let entries = fs::read_dir(folder).map_err(Error::io("reading", folder))?;
    let names = entries.map(|entry| Ok(entry.map_err(Error::io("reading", folder))?.file_name()));
    let mut names = names.collect::<Result<Vec<_>>>()?;
    names.sort();
    let mut classes = Vec::new();
    for name in names {
        let path = folder.join(&name);
        if name.as_encoded_bytes().starts_with(b".") {
            report.leave_out("hidden", name.display());
        } else if path.is_dir() {
            classes.push(name.into_string().map_err(|name| {
                Error::Data(format!(
                    "the name of {} in {} is not UTF-8",
                    name.display(),
                    folder.display()
                ))
            })?);
        } else {
            report.leave_out("in no folder of a class", name.display());
        }
    }
    if classes.is_empty() {
        return Err(Error::Data(format!(
            "{} ({key}) holds no folders; pictures are in a folder for each class, such as {}",
            folder.display(),
            folder.join("cat/1.png").display()
        )));
    }
    Ok(classes)
}

/// Returns the pictures in the classes' folders and their sub-folders, in order.
///
/// # Errors
/// If all classes are empty, a folder cannot be read, or, unless `allow_empty`, a class is empty.
pub(crate) fn pictures(
    key: &str,
    folder: &Path,
    classes: &[String],
    allow_empty: bool,
    report: &mut SourceReport,
) -> Result<Vec<Picture>> {
    let (mut all, mut empty) = (Vec::new(), Vec::new());
    for (class, name) in classes.iter().enumerate() {
        let of_class = folder.join(name);
        let paths = match of_class.is_dir() {
            true => find_in(folder, &of_class, Wanted::Extensions(PICTURES), report)?,
            false => Vec::new(),
        };
        if paths.is_empty() {
            empty.push(name);
        }
        all.extend(paths.into_iter().map(|path| Picture { path, class: Some(class) }));
    }
    let (folder, left_out) = (folder.display(), report.left_out_in_words());
    if all.is_empty() {
        let extensions = PICTURES.join(", .");
        return Err(Error::Data(format!(
            "the folders in {folder} ({key}) hold no pictures (.{extensions}){left_out}"
        )));
    }
    if !allow_empty && !empty.is_empty() {
        let names: Vec<String> = empty.iter().take(3).map(|name| format!("{name:?}")).collect();
        return Err(Error::Data(format!(
            "{folder} ({key}) has no pictures of some classes ({} of {}: {}); take their folders away, or set \
             data.allow_empty = true{left_out}",
            empty.len(),
            classes.len(),
            names.join(", ")
        )));
    }
    empty.into_iter().for_each(|class| report.leave_out("without pictures", class));
    Ok(all)
}

/// Returns a picture, or the pictures in a folder and its sub-folders in order, without classes.
///
/// # Errors
/// If the path is missing or cannot be read, or is a folder without pictures.
pub(crate) fn unlabelled(
    key: &str,
    path: &Path,
    report: &mut SourceReport,
) -> Result<Vec<Picture>> {
    let found = find(key, &[path.to_owned()], Wanted::Extensions(PICTURES), report)?;
    Ok(found.into_iter().map(|found| Picture { path: found.path, class: None }).collect())
}

/// Returns red, green and blue of a picture, turned by its Exif orientation.
///
/// # Errors
/// The fault, in words that follow the picture's name.
pub(crate) fn decode(bytes: &[u8]) -> Result<RgbImage, String> {
    if let Some(flaw) = foreign(bytes).filter(|flaw| !flaw.expected) {
        return Err(flaw.message);
    }
    let image = decode_raw(bytes).map_err(|what| format!("cannot be decoded: {what}"))?;
    if is_cut_jpeg(bytes) {
        return Err("cannot be decoded: the JPEG is cut off".to_owned());
    }
    Ok(image)
}

fn decode_raw(bytes: &[u8]) -> Result<RgbImage, String> {
    let decode = || -> image::ImageResult<RgbImage> {
        let mut decoder =
            ImageReader::new(Cursor::new(bytes)).with_guessed_format()?.into_decoder()?;
        // A header may claim any size.
        let mut limits = Limits::default();
        limits.reserve(decoder.total_bytes())?;
        decoder.set_limits(limits)?;
        let orientation = decoder.orientation()?;
        let mut image = DynamicImage::from_decoder(decoder)?;
        image.apply_orientation(orientation);
        Ok(image.into_rgb8())
    };
    catch_panic(decode)?.map_err(|error| error.to_string())
}

/// Whether a JPEG is cut off within its image data, so that the decoder would make up the rest. A
/// JPEG that only lacks its end marker is complete.
fn is_cut_jpeg(bytes: &[u8]) -> bool {
    let last = |marker: [u8; 2]| bytes.windows(2).rposition(|window| window == marker);
    // In image data, neither of these follows 0xff.
    let (begin, end) = (last([0xff, 0xda]), last([0xff, 0xd9]));
    if !bytes.starts_with(&[0xff, 0xd8]) || end.is_some_and(|end| Some(end) > begin) {
        return false;
    }
    // Only an incomplete picture depends on the bytes behind it.
    let with = |fill: u8| decode_raw(&[bytes, &[fill; 256], &[0xff, 0xd9]].concat());
    match (with(0x55), with(0xaa)) {
        (Ok(one), Ok(other)) => one != other,
        _ => true,
    }
}
