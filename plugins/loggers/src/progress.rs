//! Progress for people: bars on a terminal, lines elsewhere.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use fulgurite_error::output::{self, Outlet};
use fulgurite_error::{Error, Result, counted};
use fulgurite_trainer::trainer::{EvaluationProgress, Event, EventSink, RunStart, RunStatus};
use indicatif::{MultiProgress, ProgressDrawTarget, ProgressStyle, TermLike};

fulgurite_trainer::register_progress!(|every_n_steps| Box::new(ProgressBar::stderr(
    None,
    every_n_steps
)));

/// Shows a run's progress: the model, the steps, validations and their results. If this crate is
/// linked, trainers show it by default, unless `trainer.enable_progress_bar` is false. On standard
/// error it does not wait for a reader ([`output`]).
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
    /// Whether training has begun; otherwise this is an evaluation.
    trains: bool,
    /// The checkpoint whose weights were loaded, until its purpose is known.
    loaded: Option<(u64, PathBuf)>,
    /// The last logged values; not every step logs.
    logged: BTreeMap<String, f64>,
}

enum Output {
    Bars(Bars),
    /// `None` after a broken pipe.
    Lines(Option<Box<dyn Write + Send>>),
}

/// The bars of a terminal.
struct Bars {
    all: MultiProgress,
    /// Output for the lines above the bars.
    lines: Outlet,
    /// The training bar, once training has begun.
    training: Option<indicatif::ProgressBar>,
    /// The text that replaces the training bar when it ends.
    last_step: String,
    /// The bar of the current evaluation.
    evaluation: Option<indicatif::ProgressBar>,
}

/// Maximum number of rows and columns of a table that is shown.
const MAX_SHOWN: usize = 16;

/// Columns of a bar on a wide terminal.
const BAR: usize = 24;

/// Columns of a bar on a narrow terminal, where words take precedence.
const SMALL_BAR: usize = 8;

/// Columns for times and the spaces between the parts of a line.
const TIMES: usize = 20;

/// Columns that stay free at the end of a line for the `^C` that a terminal echoes. On a full line
/// the echo would wrap to the next line, and the bar could not be erased.
const ECHO: usize = 3;

/// Maximum number of redraws per second.
const DRAWS: u8 = 20;

/// The terminal of standard error. Hands on each redraw as one write.
#[derive(Debug)]
struct Terminal {
    size: console::Term,
    drawn: Mutex<String>,
    to: Outlet,
}

impl Terminal {
    fn push(&self, text: &str) -> io::Result<()> {
        self.drawn.lock().unwrap_or_else(PoisonError::into_inner).push_str(text);
        Ok(())
    }

    fn move_cursor(&self, n: usize, to: char) -> io::Result<()> {
        if n > 0 { self.push(&format!("\x1b[{n}{to}")) } else { Ok(()) }
    }
}

impl TermLike for Terminal {
    fn width(&self) -> u16 {
        self.size.size().1.saturating_sub(ECHO as u16)
    }

    fn height(&self) -> u16 {
        self.size.size().0
    }

    fn move_cursor_up(&self, n: usize) -> io::Result<()> {
        self.move_cursor(n, 'A')
    }

    fn move_cursor_down(&self, n: usize) -> io::Result<()> {
        self.move_cursor(n, 'B')
    }

    fn move_cursor_right(&self, n: usize) -> io::Result<()> {
        self.move_cursor(n, 'C')
    }

    fn move_cursor_left(&self, n: usize) -> io::Result<()> {
        self.move_cursor(n, 'D')
    }

    fn write_line(&self, text: &str) -> io::Result<()> {
        self.push(text)?;
        self.push("\n")
    }

    fn write_str(&self, text: &str) -> io::Result<()> {
        self.push(text)
    }

    fn clear_line(&self) -> io::Result<()> {
        self.push("\r\x1b[2K")
    }

    fn flush(&self) -> io::Result<()> {
        let drawn = std::mem::take(&mut *self.drawn.lock().unwrap_or_else(PoisonError::into_inner));
        if !drawn.is_empty() {
            self.to.draw(&drawn);
        }
        Ok(())
    }
}

impl Bars {
    fn new() -> Self {
        let (size, to) = (console::Term::stderr(), output::stderr());
        let terminal = Terminal { size, drawn: Mutex::default(), to: to.clone() };
        let target = ProgressDrawTarget::term_like_with_hz(Box::new(terminal), DRAWS);
        let all = MultiProgress::with_draw_target(target);
        Self { all, lines: to, training: None, last_step: String::new(), evaluation: None }
    }

    /// The terminal's width in columns.
    fn columns(&self) -> usize {
        let columns = console::Term::stderr().size_checked().map(|(_, columns)| columns.into());
        // A terminal that does not report its width may have told the shell.
        let of_shell = || std::env::var("COLUMNS").ok()?.parse().ok();
        columns.filter(|&columns| columns > 0).or_else(of_shell).unwrap_or(80)
    }

    fn start(&mut self, max_steps: Option<u64>) {
        let bar = match max_steps {
            Some(steps) => indicatif::ProgressBar::new(steps).with_style(style(&with_length(BAR))),
            None => indicatif::ProgressBar::new_spinner()
                .with_style(style("{spinner} {pos}  [{elapsed}]  {msg}")),
        };
        self.training = Some(self.all.add(bar));
    }

    fn step(&mut self, step: u64, text: &StepText, max_steps: Option<u64>) {
        if self.training.is_none() {
            self.start(max_steps);
        }
        let columns = self.columns();
        let Some(bar) = &self.training else { return };
        let position = position(step, max_steps);
        let (message, width) =
            text.fit(columns.saturating_sub(TIMES + ECHO + position.len()), max_steps.is_some());
        self.last_step = format!("step {position}  {message}");
        if max_steps.is_some() {
            bar.set_style(style(&with_length(width)));
        }
        bar.set_position(step);
        bar.set_message(message);
    }

    /// Removes the bars and returns the text of the last step, if there was one. A bar that stayed
    /// would appear below all following lines, with its remaining time.
    fn end(&mut self) -> Option<String> {
        self.evaluation.take().inspect(indicatif::ProgressBar::finish_and_clear);
        self.training.take().inspect(indicatif::ProgressBar::finish_and_clear)?;
        Some(std::mem::take(&mut self.last_step)).filter(|text| !text.is_empty())
    }

    fn evaluating(
        &mut self,
        EvaluationProgress { what, done, batches, .. }: EvaluationProgress<'_>,
    ) {
        let bar = self.evaluation.get_or_insert_with(|| {
            let style = style("{msg} {bar:24} {pos}/{len} [{elapsed}, {eta} left]");
            self.all.add(indicatif::ProgressBar::new(batches).with_style(style))
        });
        bar.set_message(what.to_owned());
        bar.set_length(batches);
        bar.set_position(done);
        if done == batches {
            bar.finish_and_clear();
            self.evaluation = None;
        }
    }
}

/// `59/405`.
fn position(step: u64, max_steps: Option<u64>) -> String {
    match max_steps {
        Some(max) => format!("{step}/{max}"),
        None => step.to_string(),
    }
}

fn with_length(width: usize) -> String {
    match width {
        0 => "{pos}/{len} [{elapsed}, {eta} left]  {msg}".to_owned(),
        _ => format!("{{bar:{width}}} {{pos}}/{{len}} [{{elapsed}}, {{eta}} left]  {{msg}}"),
    }
}

impl ProgressBar {
    /// Shows progress on standard error: bars if it is a terminal. Otherwise it prints a line for
    /// the first step, for every `every_n_steps`-th step and for every other event. `max_steps` is
    /// the run's length, if known.
    pub fn stderr(max_steps: Option<u64>, every_n_steps: u64) -> Self {
        if !io::stderr().is_terminal() {
            return Self::lines(output::stderr(), max_steps, every_n_steps);
        }
        Self::new(Output::Bars(Bars::new()), max_steps, every_n_steps)
    }

    /// Shows progress as lines on any writer; the run waits for it.
    pub fn lines(
        writer: impl Write + Send + 'static,
        max_steps: Option<u64>,
        every_n_steps: u64,
    ) -> Self {
        Self::new(Output::Lines(Some(Box::new(writer))), max_steps, every_n_steps)
    }

    fn new(output: Output, max_steps: Option<u64>, every_n_steps: u64) -> Self {
        let logged = BTreeMap::new();
        Self { output, max_steps, every_n_steps, trains: false, loaded: None, logged }
    }

    fn is_due(&self, step: u64) -> bool {
        step == 1 || Some(step) == self.max_steps || step.is_multiple_of(self.every_n_steps.max(1))
    }

    /// Reports which weights were loaded, once their purpose is known.
    fn say_loaded(&mut self) -> Result<()> {
        let Some((step, path)) = self.loaded.take() else { return Ok(()) };
        match self.trains {
            true => self.line(&format!("going on after step {step}, from {}", path.display())),
            false => self.line(&format!("weights after step {step}, from {}", path.display())),
        }
    }

    fn end_bars(&mut self) -> Result<()> {
        match &mut self.output {
            Output::Bars(bars) => match bars.end() {
                Some(last) => self.line(&last),
                None => Ok(()),
            },
            Output::Lines(_) => Ok(()),
        }
    }

    fn line(&mut self, text: &str) -> Result<()> {
        let line = format!("{text}\n");
        match &mut self.output {
            Output::Bars(Bars { all, lines, .. }) => {
                // An error means that the terminal is gone.
                let _ = all.suspend(|| lines.write_all(line.as_bytes()));
                Ok(())
            }
            Output::Lines(None) => Ok(()),
            Output::Lines(open) => {
                let Some(writer) = open else { return Ok(()) };
                match writer.write_all(line.as_bytes()).and_then(|()| writer.flush()) {
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
    fn begin(&mut self, run: &RunStart) {
        self.trains = true;
        // Failing to show the model must not end the run; the next line reports the error.
        let _ = self.line(&run.model.to_string());
        if let Some(ranks) = &run.ranks {
            let _ = self.line(&ranks.to_string());
        }
        if let Some(dir) = &run.run_dir {
            let _ = self.line(&format!("run directory {}", dir.display()));
        }
        let _ = self.say_loaded();
    }

    fn start(&mut self, max_steps: Option<u64>) {
        self.trains = true;
        self.max_steps = max_steps.or(self.max_steps);
        if let Output::Bars(bars) = &mut self.output {
            bars.start(self.max_steps);
        }
    }

    fn evaluating(&mut self, progress: EvaluationProgress<'_>) {
        // As above: the next line reports the error.
        let _ = self.say_loaded();
        if let Output::Bars(bars) = &mut self.output {
            bars.evaluating(progress);
        }
    }

    fn event(&mut self, event: &Event) -> Result<()> {
        let Event::Step { step, epoch, train_loss, grad_norm, lr, rate, metrics } = event else {
            if let Event::Resume { step, path } = event {
                self.loaded = Some((*step, path.clone()));
                return if self.trains { self.say_loaded() } else { Ok(()) };
            }
            self.say_loaded()?;
            if let Event::Summary { .. } = event {
                self.end_bars()?;
            }
            return match describe(event, self.trains) {
                Some(text) => self.line(&text),
                None => Ok(()),
            };
        };
        if !metrics.is_empty() {
            self.logged.clone_from(metrics);
        }
        let text = StepText {
            epoch: format!("epoch {epoch:.2}"),
            loss: match train_loss.is_nan() {
                true => "skipped: nothing counts".to_owned(),
                false => format!("loss {train_loss:.4}"),
            },
            grad_norm: format!("grad_norm {grad_norm:.3}"),
            lr: format!("lr {lr:.1e}"),
            logged: logged(&self.logged),
            rate: format!("{} {}/s", count(rate.per_s), rate.items()),
        };
        if let Output::Bars(bars) = &mut self.output {
            bars.step(*step, &text, self.max_steps);
            return Ok(());
        }
        if !self.is_due(*step) {
            return Ok(());
        }
        self.line(&format!("step {}  {}", position(*step, self.max_steps), text.whole()))
    }

    fn finish(&mut self, status: RunStatus) -> Result<()> {
        // After an error there was no summary.
        let ended = self.end_bars();
        self.trains = false;
        match status {
            RunStatus::Failed => output::flush_briefly(),
            RunStatus::Success | RunStatus::Interrupted => output::flush(),
        }
        ended
    }
}

fn style(template: &str) -> ProgressStyle {
    // The templates are constants; a wrong one falls back to the default bar.
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// The texts about a step, without its number.
struct StepText {
    epoch: String,
    loss: String,
    grad_norm: String,
    lr: String,
    /// Values logged by the module.
    logged: Vec<String>,
    rate: String,
}

impl StepText {
    /// All texts, in order.
    fn all(&self) -> Vec<&str> {
        let mut all = vec![&*self.epoch, &*self.loss, &*self.grad_norm, &*self.lr];
        all.extend(self.logged.iter().map(String::as_str));
        all.push(&self.rate);
        all
    }

    fn whole(&self) -> String {
        self.all().join("  ")
    }

    /// Selects the texts that fit into `columns`, beside a small bar if `has_bar`. Returns them and
    /// the bar's width. Values logged by the module take precedence over the learning rate and the
    /// norm.
    fn fit(&self, columns: usize, has_bar: bool) -> (String, usize) {
        let mut by_weight = vec![&*self.loss, &*self.rate, &*self.epoch];
        by_weight.extend(self.logged.iter().map(String::as_str));
        by_weight.extend([&*self.lr, &*self.grad_norm]);
        let (mut used, mut fits) = (0, Vec::new());
        for text in by_weight {
            let width = text.chars().count() + 2;
            // The loss takes precedence over a bar.
            let bar = if has_bar && !fits.is_empty() { SMALL_BAR } else { 0 };
            if used + width + bar <= columns {
                used += width;
                fits.push(text);
            }
        }
        let shown: Vec<&str> = self.all().into_iter().filter(|text| fits.contains(text)).collect();
        // A multiple of 4, so that the width does not jitter with the numbers.
        let bar = if has_bar { (columns - used).min(BAR) / 4 * 4 } else { 0 };
        (shown.join("  "), bar)
    }
}

/// Describes an event; `None` if it is not shown as a line.
fn describe(event: &Event, trains: bool) -> Option<String> {
    Some(match event {
        Event::Validation { step, val_loss, metrics, .. } => {
            format!("validation after step {step}: val_loss {val_loss:.4}{}", after(metrics))
        }
        Event::Test { step, test_loss, metrics, .. } => {
            format!("test after step {step}: test_loss {test_loss:.4}{}", after(metrics))
        }
        Event::Metrics { step, metrics } => format!("after step {step}:{}", after(metrics)),
        Event::Table { step, name, table } => match table.rows().len().max(table.columns().len()) {
            0..=MAX_SHOWN => format!("{name} after step {step}:\n{table}"),
            _ => return None,
        },
        Event::Data(report) => report.to_string(),
        Event::Generation { generation, step, world_size, from, repeated_steps, lost_s } => {
            let repeated = match repeated_steps {
                0 => String::new(),
                n => format!("; {} again", counted(*n, "step")),
            };
            format!(
                "generation {generation} goes on after step {step} with {}, from {from}{repeated} ({lost_s:.2} s \
                 after the loss)",
                counted(*world_size, "rank")
            )
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
            rate,
            startup_s,
            peak_rss_mib,
            peak_device_mib,
            skipped_steps,
            plan,
            ..
        } => {
            let peak = peak_rss_mib.iter().copied().fold(0.0, f64::max);
            let device = match peak_device_mib.iter().copied().reduce(f64::max) {
                Some(peak) => format!(" and {peak:.0} MiB on its device"),
                None => String::new(),
            };
            let skipped = match skipped_steps {
                0 => String::new(),
                n => format!(" ({n} skipped, nothing counted in them)"),
            };
            if !trains {
                let weights = match steps {
                    0 => String::new(),
                    steps => format!("weights after step {steps}, "),
                };
                return Some(format!(
                    "{weights}{} with {strategy}, at most {peak:.0} MiB a rank{device}",
                    counted(*world_size, "rank")
                ));
            }
            let planned = if plan.is_planned() { format!("\nplan: {plan}") } else { String::new() };
            // A run resumed at its end makes zero steps.
            let made = match step_s_median.is_nan() {
                true => "no further step".to_owned(),
                false => format!(
                    "loss {first_loss:.4} to {last_loss:.4}, {step_s_median:.3} s a step, {} \
                     {}/s, {startup_s:.1} s to start",
                    count(rate.per_s),
                    rate.items()
                ),
            };
            format!(
                "{}{skipped} on {} with {strategy}: {made}, at most {peak:.0} \
                 MiB a rank{device}{planned}",
                counted(*steps, "step"),
                counted(*world_size, "rank")
            )
        }
        _ => return None,
    })
}

/// Formats logged values to follow another text.
fn after(metrics: &BTreeMap<String, f64>) -> String {
    logged(metrics).iter().map(|text| format!("  {text}")).collect()
}

fn logged(metrics: &BTreeMap<String, f64>) -> Vec<String> {
    metrics
        .iter()
        .map(|(name, value)| match value.abs() {
            0.0 | 1e-3..1e6 => format!("{name} {value:.4}"),
            _ => format!("{name} {value:.3e}"),
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

    use fulgurite_engine::module::{ModuleBuilder, ModuleInit};
    use fulgurite_engine::parameter::Init;
    use fulgurite_trainer::run_plan::PlanComparison;
    use fulgurite_trainer::trainer::{ItemRate, ModelSummary, RanksSummary};

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
            rate: ItemRate::new("images", 12_345.6),
            metrics: BTreeMap::from([("acc".to_owned(), 0.5), ("tiny".to_owned(), 1e-7)]),
        }
    }

    fn shown(max_steps: Option<u64>, events: &[Event]) -> String {
        let written = Shared::default();
        let mut progress = ProgressBar::lines(written.clone(), None, 4);
        let b = ModuleBuilder::new(ModuleInit::default());
        b.pp("head").parameter("weight", [3, 2], Init::ONES).unwrap();
        let model = ModelSummary::new(&b.finish().unwrap());
        let ranks = RanksSummary::new(2, "ddp", "shm");
        progress.begin(&RunStart::new(max_steps, "images", model).with_ranks(ranks));
        progress.start(max_steps);
        progress.evaluating(EvaluationProgress::new("validation", 0, 3));
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
            rate: ItemRate::new("images", 2_500_000.0),
            startup_s: 0.5,
            goodput: Some(0.5),
            peak_rss_mib: vec![100.0, 120.4],
            peak_device_mib: vec![50.0, 60.4],
            skipped_steps: 2,
            plan: PlanComparison::default(),
        });
        insta::assert_snapshot!(shown(Some(6), &events), @"
        module    parameters
        head               6
        all                6, 6 trained, in 0 units
        2 ranks, strategy ddp, process group shm
        going on after step 0, from run/step-0
        step 1/6  epoch 0.06  loss 3.0000  grad_norm 1.250  lr 3.0e-4  acc 0.5000  tiny 1.000e-7  12.3k images/s
        step 4/6  epoch 0.25  loss 0.7500  grad_norm 1.250  lr 3.0e-4  acc 0.5000  tiny 1.000e-7  12.3k images/s
        step 6/6  epoch 0.38  loss 0.5000  grad_norm 1.250  lr 3.0e-4  acc 0.5000  tiny 1.000e-7  12.3k images/s
        validation after step 6: val_loss 2.5000
        checkpoint after step 6: run/step-6
        6 steps (2 skipped, nothing counted in them) on 2 ranks with fsdp: loss 3.0000 to 0.5000, 0.250 s a step, 2.50M images/s, 0.5 s to start, at most 120 MiB a rank and 60 MiB on its device
        ");
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
            rate: ItemRate::new("images", nan),
            startup_s: nan,
            goodput: None,
            peak_rss_mib: vec![100.0],
            peak_device_mib: Vec::new(),
            skipped_steps: 0,
            plan: PlanComparison::default(),
        };
        insta::assert_snapshot!(shown(None, &[summary]), @"
        module    parameters
        head               6
        all                6, 6 trained, in 0 units
        2 ranks, strategy ddp, process group shm
        6 steps on 1 rank with ddp: no further step, at most 100 MiB a rank
        ");
    }

    #[test]
    fn an_evaluation_does_not_speak_of_further_steps() {
        let written = Shared::default();
        let mut progress = ProgressBar::lines(written.clone(), None, 4);
        let events = [
            Event::Resume { step: 243, path: "run/step-243".into() },
            Event::Test { step: 243, test_loss: 2.5, batches: 3, metrics: BTreeMap::new() },
            Event::Summary {
                steps: 243,
                world_size: 1,
                strategy: "ddp".to_owned(),
                first_loss: f64::NAN,
                last_loss: f64::NAN,
                step_s_median: f64::NAN,
                rate: ItemRate::new("images", f64::NAN),
                startup_s: f64::NAN,
                goodput: None,
                peak_rss_mib: vec![100.0],
                peak_device_mib: Vec::new(),
                skipped_steps: 0,
                plan: PlanComparison::default(),
            },
        ];
        events.iter().for_each(|event| progress.event(event).unwrap());
        let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
        insta::assert_snapshot!(text, @"
        weights after step 243, from run/step-243
        test after step 243: test_loss 2.5000
        weights after step 243, 1 rank with ddp, at most 100 MiB a rank
        ");
    }

    #[test]
    fn a_run_of_unknown_length_shows_no_end() {
        let events: Vec<_> = (4..=7).map(step).collect();
        insta::assert_snapshot!(shown(None, &events), @"
        module    parameters
        head               6
        all                6, 6 trained, in 0 units
        2 ranks, strategy ddp, process group shm
        step 4  epoch 0.25  loss 0.7500  grad_norm 1.250  lr 3.0e-4  acc 0.5000  tiny 1.000e-7  12.3k images/s
        ");
    }

    #[test]
    fn narrow_terminals_drop_the_least_important() {
        let text = StepText {
            epoch: "epoch 0.06".to_owned(),
            loss: "loss 3.0000".to_owned(),
            grad_norm: "grad_norm 1.250".to_owned(),
            lr: "lr 3.0e-4".to_owned(),
            logged: vec!["acc 0.5000".to_owned()],
            rate: "12.3k tok/s".to_owned(),
        };
        let whole = text.whole();
        assert_eq!(text.fit(200, true), (whole.clone(), BAR));
        assert_eq!(text.fit(whole.len() + 2, false), (whole.clone(), 0));
        assert_eq!(text.fit(whole.len() + 2 + SMALL_BAR, true), (whole, SMALL_BAR));
        // The columns beside position and times of some hundred steps on an 80-column terminal.
        insta::assert_snapshot!(text.fit(60, true).0, @"epoch 0.06  loss 3.0000  acc 0.5000  12.3k tok/s");
        assert_eq!(text.fit(46, true), ("epoch 0.06  loss 3.0000  12.3k tok/s".to_owned(), 8));
        assert_eq!(text.fit(44, true), ("loss 3.0000  12.3k tok/s".to_owned(), 16));
        assert_eq!(text.fit(15, true), ("loss 3.0000".to_owned(), 0));
        assert_eq!(text.fit(5, true), (String::new(), 4));
    }
}
