//! Recognises file formats by their first bytes.

/// Number of inspected bytes at the beginning of a file.
pub(crate) const HEAD: usize = 8192;

/// UTF-8's byte-order mark; it is not part of the text.
pub(crate) const BOM: &[u8] = b"\xef\xbb\xbf";

/// The reason why a file or its content cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Flaw {
    /// A few words for the data report, which counts flaws of one kind: `not UTF-8`.
    pub(crate) reason: &'static str,
    /// The fault and its remedy, in words that follow the name in an error.
    pub(crate) message: String,
    /// Whether folders of text commonly contain such files, for example pictures.
    pub(crate) expected: bool,
}

impl Flaw {
    pub(crate) fn new(reason: &'static str, message: impl Into<String>) -> Self {
        Self { reason, message: message.into(), expected: false }
    }

    fn expected(reason: &'static str, message: impl Into<String>) -> Self {
        Self { expected: true, ..Self::new(reason, message) }
    }
}

const COMPRESSED: &str = "compressed";
const BINARY: &str = "binary";

/// First bytes of file formats that never begin a text: bytes, reason for the report, format,
/// remedy.
const FORMATS: &[(&[u8], &str, &str, &str)] = &[
    (b"\x1f\x8b\x08", COMPRESSED, "compressed with gzip", "unpack it with `gunzip`"),
    (b"\x28\xb5\x2f\xfd", COMPRESSED, "compressed with Zstandard", "unpack it with `unzstd`"),
    (b"BZh91AY&SY", COMPRESSED, "compressed with bzip2", "unpack it with `bunzip2`"),
    (b"\xfd7zXZ\0", COMPRESSED, "compressed with xz", "unpack it with `unxz`"),
    (b"\x04\x22\x4d\x18", COMPRESSED, "compressed with LZ4", "unpack it with `unlz4`"),
    (b"7z\xbc\xaf\x27\x1c", COMPRESSED, "a 7-Zip archive", "unpack it"),
    (
        b"PK\x03\x04",
        COMPRESSED,
        "a zip archive, such as torch.save and numpy.savez write",
        "unpack it",
    ),
    (b"PAR1\x15", BINARY, "a Parquet file", "set data.type = \"parquet\""),
    (b"ARROW1\0", BINARY, "an Arrow file", "write it as Parquet and set data.type = \"parquet\""),
    (
        b"\xff\xff\xff\xff",
        BINARY,
        "an Arrow stream",
        "write it as Parquet and set data.type = \"parquet\"",
    ),
    (b"\x93NUMPY", BINARY, "a NumPy array", "name it .npy and set data.type = \"tokens\""),
    (
        b"MMIDIDX\0\0",
        BINARY,
        "an index of Megatron-LM",
        "name the .bin file beside it and set data.type = \"tokens\"",
    ),
    (
        b"\x89HDF\r\n",
        BINARY,
        "an HDF5 file",
        "write its data as one of the types that data.type names",
    ),
    (b"SQLite format 3\0", BINARY, "an SQLite database", "write its texts as JSON lines"),
    (b"%PDF-", BINARY, "a PDF document", "extract its text"),
    (b"\x89PNG", BINARY, "a picture", "name files of text"),
    (b"\xff\xd8\xff", BINARY, "a picture", "name files of text"),
    (b"\x7fELF", BINARY, "a program", "name files of text"),
];

const LFS_POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";

/// The flaw of a file with the first bytes of a format other than text or ids.
pub(crate) fn foreign(head: &[u8]) -> Option<Flaw> {
    if head.starts_with(LFS_POINTER) {
        let message =
            "is a pointer of git-lfs in place of the file; fetch the file with `git lfs pull`";
        return Some(Flaw::new("pointers of git-lfs", message));
    }
    if is_safetensors(head) {
        return Some(Flaw::expected(BINARY, "is a safetensors file, which holds weights"));
    }
    let (_, reason, what, advice) = FORMATS.iter().find(|(magic, ..)| head.starts_with(magic))?;
    Some(Flaw::expected(reason, format!("is {what}; {advice}")))
}

/// safetensors: a length of eight bytes, then a JSON object.
fn is_safetensors(head: &[u8]) -> bool {
    let Some((len, header)) = head.split_first_chunk::<8>() else { return false };
    let len = u64::from_le_bytes(*len);
    (2..100 << 20).contains(&len) && header.starts_with(b"{\"")
}

/// The flaw of a text file by its first bytes. Invalid UTF-8 is not checked.
pub(crate) fn flaw_of_text(head: &[u8]) -> Option<Flaw> {
    let utf16 = |which: &str, name: &str| {
        let how = format!("convert it with `iconv -f {name} -t UTF-8`");
        Some(Flaw::new("UTF-16", format!("is {which}, not UTF-8 text; {how}")))
    };
    match head {
        [0xff, 0xfe, 0, 0, ..] => return utf16("UTF-32", "UTF-32"),
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => return utf16("UTF-16", "UTF-16"),
        _ => {}
    }
    if let Some(flaw) = foreign(head) {
        return Some(flaw);
    }
    // In UTF-16, every second byte of Latin letters is 0, and hardly any other byte is.
    if head.len() >= 16 {
        let zeros = |first: usize| head.iter().skip(first).step_by(2).filter(|&&b| b == 0).count();
        let (even, odd) = (zeros(0), zeros(1));
        let many = head.len() * 2 / 5;
        let name = match () {
            () if odd > many && even * 20 < odd => Some("UTF-16LE"),
            () if even > many && odd * 20 < even => Some("UTF-16BE"),
            () => None,
        };
        if let Some(name) = name {
            // Small binary numbers look alike, so a folder may have such files.
            let how = format!("convert it with `iconv -f {name} -t UTF-8`");
            let message = format!("is UTF-16 without a byte-order mark, not UTF-8 text; {how}");
            return Some(Flaw::expected(BINARY, message));
        }
    }
    head.iter().position(|&byte| byte == 0).map(flaw_of_nul)
}

/// The flaw of a text with a byte 0.
pub(crate) fn flaw_of_nul(at: usize) -> Flaw {
    let message = format!(
        "is binary: byte {at} is 0, which no text has; for token ids set data.type = \"tokens\""
    );
    Flaw::expected(BINARY, message)
}

/// The flaw of bytes that are not UTF-8 and begin at byte `start` of the file.
pub(crate) fn flaw_of_utf8(error: std::str::Utf8Error, bytes: &[u8], start: u64) -> Flaw {
    let at = error.valid_up_to();
    let byte = bytes.get(at).copied().unwrap_or_default();
    let position = start + at as u64;
    let message = format!(
        "is not UTF-8 text: byte {position} is {byte:#04x}; convert it, from Latin-1 for example with `iconv \
         -f LATIN1 -t UTF-8`"
    );
    Flaw::new("not UTF-8", message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(head: &[u8]) -> String {
        flaw_of_text(head).map_or_else(|| "text".to_owned(), |flaw| flaw.message)
    }

    #[test]
    fn formats_by_first_bytes() {
        let utf16 = |text: &str| text.encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<_>>();
        let swapped =
            |text: &str| text.encode_utf16().flat_map(u16::to_be_bytes).collect::<Vec<_>>();
        let safetensors = [&64u64.to_le_bytes()[..], b"{\"w\":{\"dtype\":\"F32\""].concat();
        let lfs = b"version https://git-lfs.github.com/spec/v1\noid sha256:0";
        let heads: &[&[u8]] = &[
            b"plain text",
            "caf\u{e9} \u{feff}".as_bytes(),
            b"PAR1 is a gene, and BZh no German abbreviation",
            b"caf\xe9",
            b"",
            &utf16("\u{feff}with a mark"),
            &swapped("\u{feff}with a mark"),
            &utf16("without a mark"),
            &swapped("without a mark"),
            b"\x1f\x8b\x08\0",
            b"\x93NUMPY\x01\0",
            &safetensors,
            lfs,
            b"te\0xt",
        ];
        let messages: Vec<String> = heads.iter().map(|head| message(head)).collect();
        insta::assert_snapshot!(messages.join("\n"), @r#"
text
text
text
text
text
is UTF-16, not UTF-8 text; convert it with `iconv -f UTF-16 -t UTF-8`
is UTF-16, not UTF-8 text; convert it with `iconv -f UTF-16 -t UTF-8`
is UTF-16 without a byte-order mark, not UTF-8 text; convert it with `iconv -f UTF-16LE -t UTF-8`
is UTF-16 without a byte-order mark, not UTF-8 text; convert it with `iconv -f UTF-16BE -t UTF-8`
is compressed with gzip; unpack it with `gunzip`
is a NumPy array; name it .npy and set data.type = "tokens"
is a safetensors file, which holds weights
is a pointer of git-lfs in place of the file; fetch the file with `git lfs pull`
is binary: byte 2 is 0, which no text has; for token ids set data.type = "tokens"
"#);
    }
}
