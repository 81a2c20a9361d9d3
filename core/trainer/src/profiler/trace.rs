//! A trace in Chrome's format, which Perfetto also opens: one process per rank.

use serde_json::{Value, json};

use super::SpanKind;
use super::device::COMPUTE;
use super::recorder::{Recorded, TraceSpan};
use crate::{Error, Result};

/// Returns the trace of these ranks; `None` if nothing was traced.
pub(super) fn text(ranks: &[Recorded]) -> Result<Option<String>> {
    let all =
        || ranks.iter().flat_map(|rank| rank.spans.iter().chain(rank.on_device.values().flatten()));
    if all().next().is_none() {
        return Ok(None);
    }
    // Times are relative to the first event.
    let start = all().map(|span| span.from_us).fold(f64::INFINITY, f64::min);
    // Rounded to the nanosecond.
    let at = |us: f64| ((us - start) * 1e3).round() / 1e3;
    let mut events = Vec::new();
    let mut collectives = 0;
    for (rank, recorded) in ranks.iter().enumerate() {
        events.push(metadata("process_name", rank, 0, &format!("rank {rank}")));
        events.push(json!({
            "ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0,
            "args": { "sort_index": rank },
        }));
        for (thread, name) in recorded.threads.iter().enumerate() {
            events.push(metadata("thread_name", rank, thread, name));
        }
        let event = |span: &TraceSpan, track: usize| {
            let mut event = json!({
                "name": span.name, "cat": category(span.kind), "pid": rank, "tid": track,
                "ts": at(span.from_us),
            });
            if let Some(bytes) = span.bytes {
                event["args"] = json!({ "bytes": bytes });
            }
            event
        };
        let whole = |span: &TraceSpan, track: usize| {
            let mut event = event(span, track);
            event["ph"] = json!("X");
            event["dur"] = json!(at(span.to_us) - at(span.from_us));
            event
        };
        // A stream runs one operation at a time.
        for (stream, (name, spans)) in recorded.on_device.iter().enumerate() {
            let track = recorded.threads.len() + stream;
            let name = match name.as_str() {
                COMPUTE => "device".to_owned(),
                group => format!("device: {group}"),
            };
            events.push(metadata("thread_name", rank, track, &name));
            events.extend(spans.iter().map(|span| whole(span, track)));
        }
        for span in &recorded.spans {
            if let Some(thread) = span.thread {
                events.push(whole(span, thread));
            } else {
                // Collectives may overlap: asynchronous events, on their own track.
                collectives += 1;
                let mut event = event(span, 0);
                event["ph"] = json!("b");
                event["id"] = json!(collectives);
                let mut end = event.clone();
                end["ph"] = json!("e");
                end["ts"] = json!(at(span.to_us));
                events.extend([event, end]);
            }
        }
    }
    let trace = json!({ "traceEvents": events, "displayTimeUnit": "ms" });
    serde_json::to_string(&trace).map(Some).map_err(Error::other)
}

fn category(kind: SpanKind) -> &'static str {
    match kind {
        SpanKind::Phase => "phase",
        SpanKind::Unit => "unit",
        SpanKind::Collective => "collective",
    }
}

fn metadata(what: &str, rank: usize, thread: usize, name: &str) -> Value {
    json!({ "ph": "M", "name": what, "pid": rank, "tid": thread, "args": { "name": name } })
}
