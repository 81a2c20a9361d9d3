//! Tables as pictures.

use font8x8::UnicodeFonts as _;
use fulgurite_error::{Error, Result};
use fulgurite_trainer::metric::MetricTable;

/// Pixels of a character, wide and high.
const CHARACTER: usize = 8;
/// Pixels around a text.
const MARGIN: usize = 4;
/// Maximum characters of a name that are drawn.
const MAX_NAME: usize = 14;
/// A table with more rows or columns has cells without texts.
const MAX_WITH_TEXTS: usize = 40;
/// A table with more rows or columns is not drawn whole.
const MAX_CELLS: usize = 512;

/// A picture as PNG.
pub(super) struct Picture {
    /// Width and height in pixels.
    pub(super) size: [u32; 2],
    pub(super) png: Vec<u8>,
}

/// Draws a table with cells shaded by their share of the row, from white to blue.
///
/// # Errors
/// If the picture cannot be encoded.
pub(super) fn heat_map(table: &MetricTable) -> Result<Picture> {
    let (rows, columns) = (table.rows().len().min(MAX_CELLS), table.columns().len().min(MAX_CELLS));
    let has_texts = rows.max(columns) <= MAX_WITH_TEXTS;
    let row_names: Vec<String> = table.rows().iter().take(rows).map(|name| short(name)).collect();
    let column_names: Vec<String> =
        table.columns().iter().take(columns).map(|name| short(name)).collect();
    let texts: Vec<Vec<String>> =
        (0..rows).map(|row| table.row(row).iter().map(|value| number(*value)).collect()).collect();
    let width_of = |texts: &mut dyn Iterator<Item = &String>| {
        texts.map(|text| text.chars().count()).max().unwrap_or(0) * CHARACTER + 2 * MARGIN
    };
    let height = CHARACTER + 2 * MARGIN;
    let ([left, top], [cell_width, cell_height]) = match has_texts {
        true => (
            [width_of(&mut row_names.iter()), height],
            [width_of(&mut column_names.iter().chain(texts.iter().flatten())), height],
        ),
        false => ([0, 0], [CHARACTER, CHARACTER]),
    };
    let mut canvas = Canvas::new(left + columns * cell_width, top + rows * cell_height);
    for (row, texts) in texts.iter().enumerate() {
        let values = table.row(row);
        let sum: f64 = values.iter().sum();
        for (column, value) in values.iter().enumerate().take(columns) {
            let share = if sum > 0.0 { (value / sum).clamp(0.0, 1.0) } else { 0.0 };
            let at = [left + column * cell_width, top + row * cell_height];
            canvas.fill(at, [cell_width, cell_height], shade(share));
            if has_texts {
                let colour = if share > 0.5 { [255; 3] } else { [0; 3] };
                canvas.write(at, &texts[column], colour);
            }
        }
    }
    if has_texts {
        for (row, name) in row_names.iter().enumerate() {
            canvas.write([0, top + row * cell_height], name, [0; 3]);
        }
        for (column, name) in column_names.iter().enumerate() {
            canvas.write([left + column * cell_width, 0], name, [0; 3]);
        }
    }
    canvas.encode()
}

fn shade(share: f64) -> [u8; 3] {
    const BLUE: [f64; 3] = [33.0, 86.0, 160.0];
    BLUE.map(|full| (255.0 + (full - 255.0) * share) as u8)
}

fn short(name: &str) -> String {
    match name.chars().count() > MAX_NAME {
        true => name.chars().take(MAX_NAME - 2).chain("..".chars()).collect(),
        false => name.to_owned(),
    }
}

fn number(value: f64) -> String {
    if value.fract() == 0.0 { value.to_string() } else { format!("{value:.3}") }
}

/// RGB pixels, row by row.
struct Canvas {
    width: usize,
    height: usize,
    pixels: Vec<u8>,
}

impl Canvas {
    fn new(width: usize, height: usize) -> Self {
        let (width, height) = (width.max(1), height.max(1));
        Self { width, height, pixels: vec![255; width * height * 3] }
    }

    fn set(&mut self, x: usize, y: usize, colour: [u8; 3]) {
        if x < self.width && y < self.height {
            let at = (y * self.width + x) * 3;
            self.pixels[at..at + 3].copy_from_slice(&colour);
        }
    }

    fn fill(&mut self, [x, y]: [usize; 2], [width, height]: [usize; 2], colour: [u8; 3]) {
        for y in y..y + height {
            (x..x + width).for_each(|x| self.set(x, y, colour));
        }
    }

    /// Writes a text with its margin at `[x, y]`. A character that the font lacks is a `?`.
    fn write(&mut self, [x, y]: [usize; 2], text: &str, colour: [u8; 3]) {
        for (i, character) in text.chars().enumerate() {
            let glyph = [character, '?'].into_iter().find_map(glyph).unwrap_or_default();
            for (row, bits) in glyph.into_iter().enumerate() {
                for column in (0..CHARACTER).filter(|column| bits >> column & 1 == 1) {
                    let x = x + MARGIN + i * CHARACTER + column;
                    self.set(x, y + MARGIN + row, colour);
                }
            }
        }
    }

    fn encode(self) -> Result<Picture> {
        let size = [self.width as u32, self.height as u32];
        let mut png = Vec::new();
        let mut encoder = png::Encoder::new(&mut png, size[0], size[1]);
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        let mut writer = encoder.write_header().map_err(Error::other)?;
        writer.write_image_data(&self.pixels).map_err(Error::other)?;
        writer.finish().map_err(Error::other)?;
        Ok(Picture { size, png })
    }
}

/// The rows of a character, with the leftmost pixel in the lowest bit.
fn glyph(character: char) -> Option<[u8; CHARACTER]> {
    font8x8::BASIC_FONTS.get(character).or_else(|| font8x8::LATIN_FONTS.get(character))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(png: &[u8]) -> (u32, u32, Vec<u8>) {
        let mut reader = png::Decoder::new(std::io::Cursor::new(png)).read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        let frame = reader.next_frame(&mut pixels).unwrap();
        (frame.width, frame.height, pixels)
    }

    fn picture(names: &[String], values: &[f64]) -> (u32, u32, Vec<u8>) {
        let table = MetricTable::new(["target", "prediction"], names, names, values).unwrap();
        decode(&heat_map(&table).unwrap().png)
    }

    #[test]
    fn cells_are_shaded_by_row() {
        let names = ["a".to_owned(), "b".to_owned()];
        let (width, height, pixels) = picture(&names, &[4.0, 0.0, 1.0, 3.0]);
        assert_eq!((width, height), (48, 48));
        let corner = |x: usize, y: usize| pixels[(y * 48 + x) * 3];
        // The corners of the four cells, which no text reaches.
        assert_eq!([corner(16, 16), corner(32, 16)], [33, 255]);
        assert_eq!([corner(16, 32), corner(32, 32)], [199, 88]);
        // The name of a row is written before it.
        assert!((16..32).any(|y| (0..16).any(|x| corner(x, y) == 0)));
    }

    #[test]
    fn many_classes_have_no_texts() {
        let names: Vec<String> = (0..60).map(|i| format!("class {i}")).collect();
        let (width, height, _) = picture(&names, &[1.0; 3600]);
        assert_eq!((width, height), (480, 480));
    }
}
