//! Tests that read event files back, frame by frame and field by field.

use super::*;

/// A field of a message: a number, or bytes that may be a message.
#[derive(Debug, Clone, PartialEq)]
enum Field {
    Int(u64),
    Double(f64),
    Float(f32),
    Bytes(Vec<u8>),
}

/// The fields of a message, in order.
#[derive(Debug)]
struct Fields(Vec<(u64, Field)>);

fn take<'a>(bytes: &mut &'a [u8], n: usize) -> &'a [u8] {
    let (head, tail) = bytes.split_at(n);
    *bytes = tail;
    head
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let (mut value, mut shift) = (0, 0);
    loop {
        let byte = take(bytes, 1)[0];
        value |= u64::from(byte & 0x7f) << shift;
        shift += 7;
        if byte < 0x80 {
            return value;
        }
    }
}

impl Fields {
    fn of(mut bytes: &[u8]) -> Self {
        let mut fields = Vec::new();
        while !bytes.is_empty() {
            let key = varint(&mut bytes);
            let field = match key & 7 {
                0 => Field::Int(varint(&mut bytes)),
                1 => Field::Double(f64::from_le_bytes(take(&mut bytes, 8).try_into().unwrap())),
                2 => {
                    let len = varint(&mut bytes) as usize;
                    Field::Bytes(take(&mut bytes, len).to_vec())
                }
                5 => Field::Float(f32::from_le_bytes(take(&mut bytes, 4).try_into().unwrap())),
                wire => panic!("wire type {wire}"),
            };
            fields.push((key >> 3, field));
        }
        Self(fields)
    }

    fn all(&self, number: u64) -> impl Iterator<Item = &Field> {
        self.0.iter().filter(move |(n, _)| *n == number).map(|(_, field)| field)
    }

    fn get(&self, number: u64) -> &Field {
        self.all(number).next().unwrap_or_else(|| panic!("no field {number}"))
    }

    fn bytes(&self, number: u64) -> &[u8] {
        match self.get(number) {
            Field::Bytes(bytes) => bytes,
            other => panic!("field {number}: {other:?}"),
        }
    }

    fn message(&self, number: u64) -> Self {
        Self::of(self.bytes(number))
    }

    fn text(&self, number: u64) -> String {
        String::from_utf8(self.bytes(number).to_vec()).unwrap()
    }

    fn doubles(&self, number: u64) -> Vec<f64> {
        let numbers = self.bytes(number).chunks_exact(8);
        numbers.map(|n| f64::from_le_bytes(n.try_into().unwrap())).collect()
    }
}

/// Reads a file's events and checks their lengths and checksums. Ignores the partial record that a
/// killed run left at the end, as TensorBoard does.
fn read(path: &Path) -> Vec<Fields> {
    let bytes = std::fs::read(path).unwrap();
    let mut rest = bytes.as_slice();
    let mut events = Vec::new();
    while rest.len() >= 12 {
        let len = take(&mut rest, 8);
        let crc = take(&mut rest, 4);
        assert_eq!(crc, record::masked_crc32c(len).to_le_bytes());
        let len = u64::from_le_bytes(len.try_into().unwrap()) as usize;
        if rest.len() < len + 4 {
            break;
        }
        let data = take(&mut rest, len);
        assert_eq!(take(&mut rest, 4), record::masked_crc32c(data).to_le_bytes());
        events.push(Fields::of(data));
    }
    events
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = entries.collect();
    files.sort();
    files
}

fn metrics(pairs: &[(&str, f64)]) -> BTreeMap<String, f64> {
    pairs.iter().map(|&(name, value)| (name.to_owned(), value)).collect()
}

/// The values of a summary event.
fn values(event: &Fields) -> Vec<Fields> {
    let summary = event.message(5);
    let all = summary.all(1).map(|value| match value {
        Field::Bytes(bytes) => Fields::of(bytes),
        other => panic!("{other:?}"),
    });
    all.collect()
}

#[test]
fn scalars_are_one_event_a_step() {
    let dir = tempfile::tempdir().unwrap();
    let mut logger = TensorboardConfig::default().build(dir.path()).unwrap();
    logger.begin_training(0).unwrap();
    logger.log_metrics(&metrics(&[("train_loss", 3.5), ("lr", f64::NAN)]), 1).unwrap();
    logger.log_metrics(&BTreeMap::new(), 2).unwrap();
    logger.log_metrics(&metrics(&[("val_loss", f64::INFINITY)]), 300).unwrap();
    // Readable before the run's end.
    let events = read(&files(dir.path())[0]);
    assert_eq!(events.len(), 4);
    assert_eq!(events[0].text(3), "brain.Event:2");
    assert_eq!(events[1].message(7).get(1), &Field::Int(1), "START");
    assert_eq!((events[2].get(2), events[3].get(2)), (&Field::Int(1), &Field::Int(300)));
    let first = values(&events[2]);
    assert_eq!((first[0].text(1), first[1].text(1)), ("lr".to_owned(), "train_loss".to_owned()));
    assert!(matches!(first[0].get(2), Field::Float(value) if value.is_nan()));
    assert_eq!(first[1].get(2), &Field::Float(3.5));
    assert_eq!(values(&events[3])[0].get(2), &Field::Float(f32::INFINITY));
}

#[test]
fn texts_and_histograms_match_their_plugins() {
    let dir = tempfile::tempdir().unwrap();
    let mut logger = TensorboardConfig::default().build(dir.path()).unwrap();
    logger.log_text("sample", "# Once\nü", 4).unwrap();
    let histogram = Histogram::of_values([-1.0, 0.0, 0.0, 2.0, 2.05, f64::NAN]);
    logger.log_histogram("grads", &histogram, 4).unwrap();
    let events = read(&files(dir.path())[0]);
    let text = &values(&events[1])[0];
    assert_eq!(
        (text.text(1), text.message(8).text(8)),
        ("sample".to_owned(), "# Once\nü".to_owned())
    );
    assert_eq!(text.message(9).message(1).text(1), "text");
    let histo = values(&events[2])[0].message(5);
    assert_eq!(histo.get(3), &Field::Double(5.0));
    assert_eq!((histo.get(1), histo.get(2)), (&Field::Double(-1.0), &Field::Double(2.05)));
    let (limits, counts) = (histo.doubles(6), histo.doubles(7));
    assert!(limits.is_sorted_by(|a, b| a < b), "{limits:?}");
    assert_eq!(limits.len(), counts.len());
    assert_eq!(counts.iter().sum::<f64>(), 5.0);
    // The bucket of 2 extends from below 2 to above it.
    let bucket = limits.iter().position(|&limit| limit >= 2.0).unwrap();
    assert!(limits[bucket - 1] < 2.0 && limits[bucket - 1] > 1.7 && counts[bucket] > 0.0);
}

#[test]
fn the_configuration_is_the_session_of_a_run() {
    let dir = tempfile::tempdir().unwrap();
    let mut logger = TensorboardConfig::default().build(dir.path()).unwrap();
    let params = toml::toml! { seed = 7
    trainer = { strategy = "fsdp", deep = { on = true, list = [1, 2] } } };
    logger.log_hyperparams(&params).unwrap();
    logger.finalize(RunStatus::Failed).unwrap();
    let events = read(&files(dir.path())[0]);
    let content = |event: &Fields| values(event)[0].message(9).message(1).message(2);
    let start = content(&events[1]).message(3);
    let hparams: Vec<(String, Fields)> = start
        .all(1)
        .map(|entry| match entry {
            Field::Bytes(bytes) => (Fields::of(bytes).text(1), Fields::of(bytes).message(2)),
            other => panic!("{other:?}"),
        })
        .collect();
    let names: Vec<&str> = hparams.iter().map(|(name, _)| &**name).collect();
    assert_eq!(names, ["seed", "trainer.deep.list", "trainer.deep.on", "trainer.strategy"]);
    assert_eq!(hparams[0].1.get(2), &Field::Double(7.0));
    assert_eq!(hparams[1].1.text(3), "[1, 2]");
    assert_eq!(hparams[2].1.get(4), &Field::Int(1));
    assert_eq!(hparams[3].1.text(3), "fsdp");
    assert_eq!(content(&events[2]).message(4).get(1), &Field::Int(2), "it has failed");
}

#[test]
fn a_resumed_run_writes_a_new_file() {
    let dir = tempfile::tempdir().unwrap();
    let config = TensorboardConfig { dir: Some(dir.path().join("tb/one")) };
    let run = tempfile::tempdir().unwrap();
    let mut logger = config.build(run.path()).unwrap();
    logger.begin_training(0).unwrap();
    logger.log_metrics(&metrics(&[("x", 1.0)]), 6).unwrap();
    drop(logger);
    let mut again = config.build(run.path()).unwrap();
    again.begin_training(5).unwrap();
    again.log_metrics(&metrics(&[("x", 2.0)]), 6).unwrap();
    let files = files(&dir.path().join("tb/one"));
    assert_eq!(files.len(), 2);
    for (file, start) in files.iter().zip([1, 6]) {
        let events = read(file);
        assert_eq!(events[1].get(2), &Field::Int(start));
        assert_eq!(events[1].message(7).get(1), &Field::Int(1), "START");
        assert_eq!(events[2].get(2), &Field::Int(6));
    }
    assert_eq!(std::fs::read_dir(run.path()).unwrap().count(), 0);
}

#[test]
fn files_of_a_killed_run_are_readable() {
    let dir = tempfile::tempdir().unwrap();
    let mut logger = TensorboardConfig::default().build(dir.path()).unwrap();
    logger.log_metrics(&metrics(&[("x", 1.0)]), 1).unwrap();
    logger.log_metrics(&metrics(&[("x", 2.0)]), 2).unwrap();
    let file = &files(dir.path())[0];
    let bytes = std::fs::read(file).unwrap();
    for cut in 1..20 {
        std::fs::write(file, &bytes[..bytes.len() - cut]).unwrap();
        assert_eq!(read(file).len(), 2, "all but the event that was cut");
    }
}

/// TensorBoard reads files by name, and the resumed run's clock may have been ahead.
#[test]
fn a_later_file_has_a_later_name() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("events.out.tfevents.4102444800.host.1.0"), "").unwrap();
    let names = [(); 2].map(|()| {
        let path = TensorboardLogger::open(dir.path()).unwrap().path;
        path.file_name().unwrap().to_str().unwrap().to_owned()
    });
    assert!(names[0].starts_with("events.out.tfevents.4102444801."), "{names:?}");
    assert!(names[1].starts_with("events.out.tfevents.4102444802."), "{names:?}");
}
