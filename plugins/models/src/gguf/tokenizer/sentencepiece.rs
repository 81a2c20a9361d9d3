//! `tokenizer.model` of SentencePiece: a message of protocol buffers.
//!
//! Source: `sentencepiece_model.proto`.

use fulgurite_error::{Error, Result};

use super::special::Special;
use super::{Kind, Token, Vocabulary, fail};

/// Reads a `tokenizer.model`.
///
/// # Errors
/// If it is damaged, or its model is not a BPE.
pub(super) fn read(model: &[u8], special: Special) -> Result<Vocabulary> {
    let damaged = || Error::Config("tokenizer.model: this is no model of SentencePiece".to_owned());
    // Unigram and a space before the text are the defaults.
    let (mut tokens, mut kind, mut adds_space) = (Vec::new(), 1, true);
    for field in Fields(model) {
        match field.ok_or_else(damaged)? {
            (1, Field::Bytes(piece)) => tokens.push(token(piece).ok_or_else(damaged)?),
            (2, Field::Bytes(trainer)) => {
                kind = number(trainer, 3).ok_or_else(damaged)?.unwrap_or(kind);
            }
            (3, Field::Bytes(normalizer)) => {
                let prefix = number(normalizer, 3).ok_or_else(damaged)?;
                adds_space = prefix.is_none_or(|prefix| prefix != 0);
            }
            _ => {}
        }
    }
    if tokens.is_empty() {
        return Err(damaged());
    }
    const BPE: u64 = 2;
    if kind != BPE {
        return fail("tokenizer.model: GGUF files of decoders have a BPE, and this model is none");
    }
    let (merges, adds_space) = (Vec::new(), Some(adds_space));
    Ok(Vocabulary {
        kind: ("llama", "default"),
        tokens,
        merges,
        adds_space,
        stripping: None,
        special,
    })
}

fn token(piece: &[u8]) -> Option<Token> {
    let mut token = Token { text: String::new(), score: 0.0, kind: Kind::Normal };
    for field in Fields(piece) {
        match field? {
            (1, Field::Bytes(text)) => token.text = String::from_utf8(text.to_vec()).ok()?,
            (2, Field::Four(bytes)) => token.score = f32::from_le_bytes(bytes),
            (3, Field::Number(kind)) => {
                token.kind = match kind {
                    1 => Kind::Normal,
                    2 => Kind::Unknown,
                    3 => Kind::Control,
                    4 => Kind::UserDefined,
                    5 => Kind::Unused,
                    6 => Kind::Byte,
                    _ => return None,
                }
            }
            _ => {}
        }
    }
    Some(token)
}

/// Returns the number of a field, `Some(None)` without the field, and `None` for a damaged message.
#[expect(clippy::option_option, reason = "damaged and missing differ")]
fn number(message: &[u8], wanted: u64) -> Option<Option<u64>> {
    let mut found = None;
    for field in Fields(message) {
        if let (field, Field::Number(value)) = field?
            && field == wanted
        {
            found = Some(value);
        }
    }
    Some(found)
}

/// The value of a field.
#[derive(Debug, PartialEq)]
enum Field<'a> {
    Number(u64),
    Four([u8; 4]),
    Eight,
    Bytes(&'a [u8]),
}

/// The fields of a message; `None` where it is damaged, and nothing after that.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let (&byte, rest) = self.0.split_first()?;
            self.0 = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(value);
            }
        }
        None
    }

    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    fn field(&mut self) -> Option<(u64, Field<'a>)> {
        let tag = self.varint()?;
        let value = match tag & 7 {
            0 => Field::Number(self.varint()?),
            1 => self.take(8).map(|_| Field::Eight)?,
            2 => {
                let len = usize::try_from(self.varint()?).ok()?;
                Field::Bytes(self.take(len)?)
            }
            5 => Field::Four(self.take(4)?.try_into().ok()?),
            _ => return None,
        };
        Some((tag >> 3, value))
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Option<(u64, Field<'a>)>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_none() {
            self.0 = &[];
        }
        Some(field)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(field: u8, bytes: &[u8]) -> Vec<u8> {
        [&[field << 3 | 2, bytes.len() as u8], bytes].concat()
    }

    fn piece(text: &str, score: f32, kind: u8) -> Vec<u8> {
        let score = [&[2 << 3 | 5][..], &score.to_le_bytes()].concat();
        bytes(1, &[bytes(1, text.as_bytes()), score, vec![3 << 3, kind]].concat())
    }

    #[test]
    fn pieces_scores_and_kinds_are_read() {
        let bpe = bytes(2, &[3 << 3, 2]);
        let without_space = bytes(3, &[3 << 3, 0]);
        let pieces = [piece("<unk>", 0.0, 2), piece("▁a", -1.5, 1), piece("<0x0A>", 0.0, 6)];
        let model = [pieces.concat(), bpe.clone(), without_space].concat();
        let found = read(&model, Special::default()).unwrap();
        let token = |text: &str, score, kind| Token { text: text.to_owned(), score, kind };
        let expected = [
            token("<unk>", 0.0, Kind::Unknown),
            token("▁a", -1.5, Kind::Normal),
            token("<0x0A>", 0.0, Kind::Byte),
        ];
        assert_eq!(found.tokens, expected);
        assert_eq!(found.adds_space, Some(false));

        let unigram = read(&pieces.concat(), Special::default()).unwrap_err().to_string();
        assert!(unigram.contains("BPE"), "{unigram}");
        for len in 1..model.len() {
            // A cut message is an error or has fewer fields; it never panics.
            drop(read(&model[..len], Special::default()));
        }
        let error = read(b"\xff\xff\xff", Special::default()).unwrap_err().to_string();
        assert!(error.contains("tokenizer.model"), "{error}");
    }
}
