//! The framing of TFRecord files: length, its checksum, data, its checksum.

/// The lookup table of CRC-32C (Castagnoli), reflected.
const TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut i = 0;
    while i < 256 {
        let (mut crc, mut bit) = (i as u32, 0);
        while bit < 8 {
            crc = (crc >> 1) ^ (0x82F6_3B78 * (crc & 1));
            bit += 1;
        }
        table[i] = crc;
        i += 1;
    }
    table
};

fn crc32c(data: &[u8]) -> u32 {
    let step = |crc: u32, byte: &u8| TABLE[usize::from(crc as u8 ^ byte)] ^ (crc >> 8);
    !data.iter().fold(!0, step)
}

/// The masked checksum of a record, safe for data that contains checksums itself.
pub(super) fn masked_crc32c(data: &[u8]) -> u32 {
    crc32c(data).rotate_right(15).wrapping_add(0xA282_EAD8)
}

/// Frames `data` as a record.
pub(super) fn frame(data: &[u8]) -> Vec<u8> {
    let len = (data.len() as u64).to_le_bytes();
    let mut record = Vec::with_capacity(data.len() + 16);
    record.extend(len);
    record.extend(masked_crc32c(&len).to_le_bytes());
    record.extend(data);
    record.extend(masked_crc32c(data).to_le_bytes());
    record
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_match_the_standard() {
        // RFC 3720, B.4, and the check value of the algorithm.
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8A91_36AA);
        assert_eq!(crc32c(&[0xFF; 32]), 0x62A8_AB43);
        let rising: Vec<u8> = (0..32).collect();
        assert_eq!(crc32c(&rising), 0x46DD_794E);
    }

    #[test]
    fn records_match_tensorflow() {
        // The record of the event `file_version: "brain.Event:2"` at time 0.
        let record = frame(b"\x1a\x0dbrain.Event:2");
        assert_eq!(record.len(), 8 + 4 + 15 + 4);
        assert_eq!(record[..8], 15u64.to_le_bytes());
        assert_eq!(record[8..12], masked_crc32c(&15u64.to_le_bytes()).to_le_bytes());
        // The head of every event file with a time in it: 24 bytes follow.
        assert_eq!(masked_crc32c(&24u64.to_le_bytes()).to_le_bytes(), [0xa3, 0x7f, 0x4b, 0x22]);
    }
}
