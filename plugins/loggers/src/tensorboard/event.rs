//! Messages of event files: `tensorflow.Event` and its content, and the messages of the plugins
//! `text` and `hparams`.

use fulgurite_trainer::trainer::{Histogram, RunStatus};
use toml::{Table, Value};

use super::protobuf::Message;

/// `tensorflow.DataType`.
const DT_FLOAT: u64 = 1;
const DT_STRING: u64 = 7;

/// An event, at `time` in seconds since 1970.
fn event(time: f64, step: u64) -> Message {
    Message::new().double(1, time).int(2, step)
}

/// The first event of each file.
pub(super) fn version(time: f64) -> Vec<u8> {
    event(time, 0).bytes(3, b"brain.Event:2").into_bytes()
}

/// The start of a session at `step`: invalidates what an earlier session logged for `step` and
/// later.
pub(super) fn session(time: f64, step: u64) -> Vec<u8> {
    const START: u64 = 1;
    event(time, step).message(7, Message::new().int(1, START)).into_bytes()
}

/// An event with values.
pub(super) fn summary(time: f64, step: u64, values: impl IntoIterator<Item = Message>) -> Vec<u8> {
    let summary =
        values.into_iter().fold(Message::new(), |summary, value| summary.message(1, value));
    event(time, step).message(5, summary).into_bytes()
}

fn tagged(tag: &str) -> Message {
    Message::new().bytes(1, tag.as_bytes())
}

pub(super) fn scalar(tag: &str, value: f64) -> Message {
    tagged(tag).float(2, value as f32)
}

pub(super) fn text(tag: &str, text: &str) -> Message {
    let tensor = Message::new().int(1, DT_STRING).message(2, shape(1)).bytes(8, text.as_bytes());
    tagged(tag).message(8, tensor).message(9, plugin("text", Message::new()))
}

pub(super) fn histogram(tag: &str, histogram: &Histogram) -> Message {
    let (mut limits, mut counts) = (Vec::new(), Vec::new());
    for bucket in histogram.buckets() {
        // A bucket starts where the previous bucket ends.
        if limits.last().is_some_and(|&end| end < bucket.left) {
            limits.push(bucket.left);
            counts.push(0.0);
        }
        limits.push(bucket.right);
        counts.push(bucket.count as f64);
    }
    let proto = Message::new()
        .double(1, histogram.min())
        .double(2, histogram.max())
        .double(3, histogram.count() as f64)
        .double(4, histogram.sum())
        .double(5, histogram.sum_of_squares())
        .doubles(6, &limits)
        .doubles(7, &counts);
    tagged(tag).message(5, proto)
}

/// A picture in PNG.
pub(super) fn picture(tag: &str, [width, height]: [u32; 2], png: &[u8]) -> Message {
    const RGB: u64 = 3;
    let picture =
        Message::new().int(1, u64::from(height)).int(2, u64::from(width)).int(3, RGB).bytes(4, png);
    tagged(tag).message(4, picture)
}

/// The start of a session of the plugin `hparams`, with the hyper-parameters by dotted name.
pub(super) fn session_start(time: f64, params: &Table) -> Message {
    let mut flat = Vec::new();
    flatten("", params, &mut flat);
    let start = flat.into_iter().fold(Message::new(), |start, (name, value)| {
        start.message(1, Message::new().bytes(1, name.as_bytes()).message(2, value))
    });
    hparams("_hparams_/session_start_info", Message::new().message(3, start.double(5, time)))
}

/// The end of a session of the plugin `hparams`.
pub(super) fn session_end(time: f64, status: RunStatus) -> Message {
    let status = match status {
        RunStatus::Success => 1,
        RunStatus::Failed => 2,
        // The plugin has a status for success and failure only.
        RunStatus::Interrupted => 0,
    };
    let end = Message::new().int(1, status).double(2, time);
    hparams("_hparams_/session_end_info", Message::new().message(4, end))
}

/// A value of the plugin `hparams`: an empty tensor with the content in its metadata.
fn hparams(tag: &str, content: Message) -> Message {
    let empty = Message::new().int(1, DT_FLOAT).message(2, shape(0));
    tagged(tag).message(8, empty).message(9, plugin("hparams", content))
}

fn shape(size: u64) -> Message {
    Message::new().message(2, Message::new().int(1, size))
}

fn plugin(name: &str, content: Message) -> Message {
    Message::new().message(1, Message::new().bytes(1, name.as_bytes()).message(2, content))
}

/// The values of a table as `google.protobuf.Value`s. A list becomes a string.
fn flatten(prefix: &str, table: &Table, flat: &mut Vec<(String, Message)>) {
    for (key, value) in table {
        let name = format!("{prefix}{key}");
        let value = match value {
            Value::Table(inner) => {
                flatten(&format!("{name}."), inner, flat);
                continue;
            }
            Value::Integer(number) => Message::new().double(2, *number as f64),
            Value::Float(number) => Message::new().double(2, *number),
            Value::Boolean(flag) => Message::new().int(4, u64::from(*flag)),
            Value::String(text) => Message::new().bytes(3, text.as_bytes()),
            Value::Array(_) | Value::Datetime(_) => {
                Message::new().bytes(3, value.to_string().as_bytes())
            }
        };
        flat.push((name, value));
    }
}
