//! A trace in the format of Chrome, which Perfetto opens too: a process for each rank.

use serde_json::{Value, json};

use super::SpanKind;
use super::recorder::Recorded;
use crate::{Error, Result};

/// The trace of these ranks; `None` if nothing was traced.
pub(super) fn text(ranks: &[Recorded]) -> Result<Option<String>> {
    let all = || ranks.iter().flat_map(|rank| rank.spans.iter().chain(&rank.on_device));
    if all().next().is_none() {
        return Ok(None);
    }
    // Viewers count from the first event on.
    let start = all().map(|span| span.from_us).fold(f64::INFINITY, f64::min);
    // To the nanosecond.
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
        let device = recorded.threads.len();
        if !recorded.on_device.is_empty() {
            events.push(metadata("thread_name", rank, device, "device"));
        }
        for span in &recorded.on_device {
            events.push(json!({
                "name": span.name, "cat": category(span.kind), "pid": rank, "tid": device,
                "ts": at(span.from_us), "ph": "X", "dur": at(span.to_us) - at(span.from_us),
            }));
        }
        for span in &recorded.spans {
            let kind = category(span.kind);
            let mut event = json!({
                "name": span.name, "cat": kind, "pid": rank, "tid": span.thread.unwrap_or(0),
                "ts": at(span.from_us),
            });
            if let Some(bytes) = span.bytes {
                event["args"] = json!({ "bytes": bytes });
            }
            if span.thread.is_some() {
                event["ph"] = json!("X");
                event["dur"] = json!(at(span.to_us) - at(span.from_us));
                events.push(event);
            } else {
                // Several go on at a time, on a track of their own.
                collectives += 1;
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
