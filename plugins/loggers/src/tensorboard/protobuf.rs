//! Encodes messages of Protocol Buffers, field by field. Nothing is decoded.

/// A message under construction. Fields are written in the order of the calls.
#[derive(Debug, Default)]
pub(super) struct Message(Vec<u8>);

/// Wire types: the encodings of a field's value.
#[derive(Clone, Copy)]
enum Wire {
    Varint = 0,
    Fixed64 = 1,
    Bytes = 2,
    Fixed32 = 5,
}

impl Message {
    pub(super) fn new() -> Self {
        Self::default()
    }

    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn key(&mut self, field: u32, wire: Wire) {
        self.varint(u64::from(field << 3 | wire as u32));
    }

    /// Adds an integer, a boolean or an enum value.
    pub(super) fn int(mut self, field: u32, value: u64) -> Self {
        self.key(field, Wire::Varint);
        self.varint(value);
        self
    }

    pub(super) fn double(mut self, field: u32, value: f64) -> Self {
        self.key(field, Wire::Fixed64);
        self.0.extend(value.to_le_bytes());
        self
    }

    pub(super) fn float(mut self, field: u32, value: f32) -> Self {
        self.key(field, Wire::Fixed32);
        self.0.extend(value.to_le_bytes());
        self
    }

    /// Adds a string or bytes.
    pub(super) fn bytes(mut self, field: u32, value: &[u8]) -> Self {
        self.key(field, Wire::Bytes);
        self.varint(value.len() as u64);
        self.0.extend(value);
        self
    }

    pub(super) fn message(self, field: u32, value: Self) -> Self {
        self.bytes(field, &value.0)
    }

    /// Adds a packed repeated field.
    pub(super) fn doubles(self, field: u32, values: &[f64]) -> Self {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.bytes(field, &bytes)
    }

    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_encoded_as_the_specification_says() {
        // The examples of https://protobuf.dev/programming-guides/encoding/.
        assert_eq!(Message::new().int(1, 150).into_bytes(), [0x08, 0x96, 0x01]);
        let text = Message::new().bytes(2, b"testing").into_bytes();
        assert_eq!(text, [0x12, 7, 0x74, 0x65, 0x73, 0x74, 0x69, 0x6e, 0x67]);
        let inner = Message::new().message(3, Message::new().int(1, 150));
        assert_eq!(inner.into_bytes(), [0x1a, 3, 0x08, 0x96, 0x01]);
        assert_eq!(Message::new().float(2, 1.0).into_bytes(), [0x15, 0, 0, 0x80, 0x3f]);
        let double = Message::new().double(1, 1.0).into_bytes();
        assert_eq!(double, [0x09, 0, 0, 0, 0, 0, 0, 0xf0, 0x3f]);
    }
}
