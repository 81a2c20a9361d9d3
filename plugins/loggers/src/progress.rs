//! Progress for people: a bar on a terminal, lines elsewhere.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, IsTerminal, Write};

use fulgurite_core::trainer::{Event, EventSink, RunStatus};
use fulgurite_core::{Error, Result};
use indicatif::ProgressStyle;

/// Shows a run's progress.
///
/// ```
/// use fulgurite_core::trainer::{EventSink, RunStatus};
/// use fulgurite_loggers::ProgressBar;
///
/// let mut progress = ProgressBar::stderr(Some(200), 10);
/// progress.finish(RunStatus::Success)?;
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
pub struct ProgressBar {
    output: Output,
    max_steps: Option<u64>,
    every_n_steps: u64,
    /// What was logged last: not every step's values are.
    logged: BTreeMap<String, f64>,
}

const WITH_LENGTH: &str = "{bar:24} {pos}/{len}  {msg}  [{elapsed_precise}, {eta_precise} left]";

enum Output {
    Bar(indicatif::ProgressBar),
    /// `None` after a broken pipe.
    Lines(Option<Box<dyn Write + Send>>),
}

impl ProgressBar {
    /// Progress on standard error: a bar if it is a terminal; otherwise a line for the first step
    /// and for every `every_n_steps`-th, and for everything else that happens. `max_steps` is the
    /// run's length, if it is known.
    pub fn stderr(max_steps: Option<u64>, every_n_steps: u64) -> Self {
        if !io::stderr().is_terminal() {
            return Self::lines(io::stderr(), max_steps, every_n_steps);
        }
        let bar = match max_steps {
            Some(steps) => indicatif::ProgressBar::new(steps).with_style(style(WITH_LENGTH)),
            None => indicatif::ProgressBar::new_spinner()
                .with_style(style("{spinner} {pos}  {msg}  [{elapsed_precise}]")),
        };
        Self { output: Output::Bar(bar), max_steps, every_n_steps, logged: BTreeMap::new() }
    }

    /// Progress as lines on any writer.
    pub fn lines(
        writer: impl Write + Send + 'static,
        max_steps: Option<u64>,
        every_n_steps: u64,
    ) -> Self {
        let output = Output::Lines(Some(Box::new(writer)));
        Self { output, max_steps, every_n_steps, logged: BTreeMap::new() }
    }

    fn is_due(&self, step: u64) -> bool {
        step == 1 || Some(step) == self.max_steps || step.is_multiple_of(self.every_n_steps.max(1))
    }

    fn line(&mut self, text: &str) -> Result<()> {
        match &mut self.output {
            Output::Bar(bar) => {
                bar.println(text);
                Ok(())
            }
            Output::Lines(None) => Ok(()),
            Output::Lines(open) => {
                let Some(writer) = open else { return Ok(()) };
                match writeln!(writer, "{text}").and_then(|()| writer.flush()) {
                    Err(error) if error.kind() == ErrorKind::BrokenPipe => {
                        *open = None;
                        Ok(())
                    }
                    result => result.map_err(Error::io("writing progress to", "stderr")),
                }
            }
        }
    }
}

impl EventSink for ProgressBar {
    fn start(&mut self, max_steps: Option<u64>) {
        self.max_steps = max_steps.or(self.max_steps);
        if let (Output::Bar(bar), Some(steps)) = (&self.output, self.max_steps) {
            bar.set_length(steps);
            bar.set_style(style(WITH_LENGTH));
        }
    }

    fn event(&mut self, event: &Event) -> Result<()> {
        let Some(text) = describe(event, &self.logged) else { return Ok(()) };
        let Event::Step { step, metrics, .. } = event else { return self.line(&text) };
        if !metrics.is_empty() {
            self.logged.clone_from(metrics);
        }
        if let Output::Bar(bar) = &self.output {
            bar.set_position(*step);
            bar.set_message(text);
            return Ok(());
        }
        if !self.is_due(*step) {
            return Ok(());
        }
        match self.max_steps {
            Some(max) => self.line(&format!("step {step}/{max}  {text}")),
            None => self.line(&format!("step {step}  {text}")),
        }
    }

    fn finish(&mut self, status: RunStatus) -> Result<()> {
        if let Output::Bar(bar) = &self.output {
            match status {
                RunStatus::Success => bar.finish(),
                RunStatus::Interrupted | RunStatus::Failed => bar.abandon(),
            }
        }
        Ok(())
    }
}

fn style(template: &str) -> ProgressStyle {
    // The templates are constants; for a wrong one the default bar will do.
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// An event in words; for a step without its number, and with what was logged before if it logs nothing.
fn describe(event: &Event, before: &BTreeMap<String, f64>) -> Option<String> {
    Some(match event {
        Event::Step { epoch, train_loss, grad_norm, lr, tokens_per_s, metrics, .. } => format!(
            "epoch {epoch:.2}  loss {train_loss:.4}  grad_norm {grad_norm:.3}  lr {lr:.1e}{}  {} \
             tok/s",
            logged(if metrics.is_empty() { before } else { metrics }),
            count(*tokens_per_s)
        ),
        Event::Validation { step, val_loss, metrics, .. } => {
            format!("validation after step {step}: val_loss {val_loss:.4}{}", logged(metrics))
        }
        Event::Test { step, test_loss, metrics, .. } => {
            format!("test after step {step}: test_loss {test_loss:.4}{}", logged(metrics))
        }
        Event::Metrics { step, metrics } => format!("after step {step}:{}", logged(metrics)),
        Event::Resume { step, path } => {
            format!("going on after step {step}, from {}", path.display())
        }
        Event::Checkpoint { step, path, .. } => {
            format!("checkpoint after step {step}: {}", path.display())
        }
        Event::Profile(profile) => profile.to_string(),
        Event::Summary {
            steps,
            world_size,
            strategy,
            first_loss,
            last_loss,
            step_s_median,
            tokens_per_s,
            startup_s,
            peak_rss_mib,
        } => {
            let peak = peak_rss_mib.iter().copied().fold(0.0, f64::max);
            // A validation, or a run resumed at its end, has no steps.
            let made = match step_s_median.is_nan() {
                true => "no further step".to_owned(),
                false => format!(
                    "loss {first_loss:.4} to {last_loss:.4}, {step_s_median:.3} s a step, {} \
                     tok/s, {startup_s:.1} s to start",
                    count(*tokens_per_s)
                ),
            };
            format!(
                "{steps} steps on {world_size} rank(s) with {strategy}: {made}, at most {peak:.0} \
                 MiB a rank"
            )
        }
        _ => return None,
    })
}

fn logged(metrics: &BTreeMap<String, f64>) -> String {
    metrics
        .iter()
        .map(|(name, value)| match value.abs() {
            0.0 | 1e-3..1e6 => format!("  {name} {value:.4}"),
            _ => format!("  {name} {value:.3e}"),
        })
        .collect()
}

fn count(value: f64) -> String {
    match value {
        v if v >= 1e6 => format!("{:.2}M", v / 1e6),
        v if v >= 1e3 => format!("{:.1}k", v / 1e3),
        v => format!("{v:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn step(step: u64) -> Event {
        Event::Step {
            step,
            epoch: step as f64 / 16.0,
            train_loss: 3.0 / step as f64,
            grad_norm: 1.25,
            lr: 3e-4,
            tokens_per_s: 12_345.6,
            metrics: BTreeMap::from([("acc".to_owned(), 0.5), ("tiny".to_owned(), 1e-7)]),
        }
    }

    fn shown(max_steps: Option<u64>, events: &[Event]) -> String {
        let written = Shared::default();
        let mut progress = ProgressBar::lines(written.clone(), max_steps, 4);
        for event in events {
            progress.event(event).unwrap();
        }
        progress.finish(RunStatus::Success).unwrap();
        let bytes = written.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn lines_come_first_last_and_every_so_often() {
        let mut events = vec![Event::Resume { step: 0, path: "run/step-0".into() }];
        events.extend((1..=6).map(step));
        events.push(Event::Validation {
            step: 6,
            val_loss: 2.5,
            batches: 3,
            metrics: BTreeMap::new(),
        });
        events.push(Event::Checkpoint { step: 6, path: "run/step-6".into(), blocked_s: 0.5 });
        events.push(Event::Summary {
            steps: 6,
            world_size: 2,
            strategy: "fsdp".to_owned(),
            first_loss: 3.0,
            last_loss: 0.5,
            step_s_median: 0.25,
            tokens_per_s: 2_500_000.0,
            startup_s: 0.5,
            peak_rss_mib: vec![100.0, 120.4],
        });
        insta::assert_snapshot!(shown(Some(6), &events), @r#"
going on after step 0, from run/step-0
step 1/6  epoch 0.06  loss 3.0000  grad_norm 1.250  lr 3.0e-4  acc 0.5000  tiny 1.000e-7  12.3k tok/s
step 4/6  epoch 0.25  loss 0.7500  grad_norm 1.250  lr 3.0e-4  acc 0.5000  tiny 1.000e-7  12.3k tok/s
step 6/6  epoch 0.38  loss 0.5000  grad_norm 1.250  lr 3.0e-4  acc 0.5000  tiny 1.000e-7  12.3k tok/s
validation after step 6: val_loss 2.5000
checkpoint after step 6: run/step-6
6 steps on 2 rank(s) with fsdp: loss 3.0000 to 0.5000, 0.250 s a step, 2.50M tok/s, 0.5 s to start, at most 120 MiB a rank
"#);
    }

    #[test]
    fn a_run_without_steps_has_no_loss() {
        let nan = f64::NAN;
        let summary = Event::Summary {
            steps: 6,
            world_size: 1,
            strategy: "ddp".to_owned(),
            first_loss: nan,
            last_loss: nan,
            step_s_median: nan,
            tokens_per_s: nan,
            startup_s: nan,
            peak_rss_mib: vec![100.0],
        };
        insta::assert_snapshot!(shown(None, &[summary]), @"6 steps on 1 rank(s) with ddp: no further step, at most 100 MiB a rank");
    }

    #[test]
    fn a_run_of_unknown_length_shows_no_end() {
        let events: Vec<_> = (4..=7).map(step).collect();
        insta::assert_snapshot!(shown(None, &events), @"step 4  epoch 0.25  loss 0.7500  grad_norm 1.250  lr 3.0e-4  acc 0.5000  tiny 1.000e-7  12.3k tok/s");
    }
}
