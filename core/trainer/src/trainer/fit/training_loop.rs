//! The training loop.

use std::time::{Duration, Instant};

use crate::Result;
use crate::run::TrainerConfig;
use crate::trainer::Stage;
use crate::trainer::elastic::{copy_if_due, leave_if_invited, lose};
use crate::trainer::evaluation::evaluate::{Evaluated, EvaluationStage, evaluate, validation_sets};
use crate::trainer::fit::plan::{LoopPlan, StepPlanner};
use crate::trainer::fit::replica_check::check_replicas_if_due;
use crate::trainer::fit::train_step::StepEnd;
use crate::trainer::module::context::StepParts;
use crate::trainer::module::hooks::Hook;
use crate::trainer::record::meter::micros_since_epoch;
use crate::trainer::saving::save::{end_saving, finish_saving, save, save_as_requested};
use crate::trainer::session::Session;
use fulgurite_engine::optim::WeightAverage;
use fulgurite_launch::Interruption;

/// The reason why the loop ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FitEnd {
    /// A limit was reached, or a hook asked to stop.
    Finished,
    /// The run was interrupted.
    Interrupted(Interruption),
}

impl Session {
    /// The training loop. Collective.
    pub(crate) fn fit(&mut self) -> Result<FitEnd> {
        let planner = StepPlanner::of(self);
        let accumulate = planner.accumulate_in(planner.epoch()?)?;
        self.progress.set_accumulate(accumulate);
        let mut plan = StepPlanner::of(self).plan()?;
        let max_steps = StepPlanner::of(self).max_steps()?;
        let max_time = self.setup.config.limits().max_time;
        if let Some(why) = self.sanity_check()? {
            return Ok(FitEnd::Interrupted(why));
        }
        self.load_training(&plan)?;
        let started = Instant::now();
        let earlier = match self.progress.goes_on() {
            true => Duration::from_micros(micros_since_epoch() - self.setup.begun_at),
            false => Duration::ZERO,
        };
        let mut end = FitEnd::Finished;
        self.progress.set_first_epoch(plan.epoch(self.progress.cursor()));
        self.hook(Hook::TrainStart)?;
        let mut has_run = self.progress.goes_on();
        // A run that was interrupted in a validation begins with that validation, and one that goes
        // on after the loss of a rank with what follows the last step.
        while self.progress.validation_due()
            || self.progress.tail().open
            || max_steps.is_none_or(|max| self.progress.step() < max)
        {
            has_run = true;
            let makes_step = !self.progress.validation_due() && !self.progress.tail().open;
            if makes_step {
                self.recorder.usage().begin_step();
                if self.progress.begin_epoch(plan.epoch(self.progress.cursor())) {
                    self.hook(Hook::TrainEpochStart)?;
                }
                let epoch = self.progress.epoch();
                let accumulate = StepPlanner::of(self).accumulate_in(epoch)?;
                if self.progress.set_accumulate(accumulate) {
                    plan = StepPlanner::of(self).plan()?;
                    self.load_training(&plan)?;
                }
                let before = self.progress.cursor();
                let mut stepped = self.train_step(&plan);
                while matches!(stepped, Ok(StepEnd::BeginAgain)) {
                    plan = StepPlanner::of(self).plan()?;
                    self.load_training(&plan)?;
                    stepped = self.train_step(&plan);
                }
                self.recorder.usage().end_update();
                let is_validated = StepPlanner::of(self).is_validated_in(epoch);
                let due = is_validated && plan.validates(before, self.progress.cursor());
                self.progress.set_validation_due(due);
                stepped?;
                check_replicas_if_due(self)?;
                if self.logs_step(self.progress.step())
                    && let Some(flight) = &mut self.flight
                {
                    let world = self.setup.fabric.world();
                    let slow = flight.compare_paces(&**world, self.progress.step())?;
                    let elastic = &self.setup.config.elastic;
                    if elastic.enabled && elastic.replace_slow_ranks && !slow.is_empty() {
                        lose(world, &slow)?;
                    }
                }
            }
            if self.progress.validation_due() {
                if let Evaluated::Interrupted(why) = self.validate_training()? {
                    end = FitEnd::Interrupted(why);
                    break;
                }
                self.progress.end_validation();
            }
            let validated = self.progress.tail().validated;
            let epoch_ends = plan.epoch(self.progress.cursor()) != self.progress.epoch();
            if epoch_ends {
                self.end_epoch()?;
            }
            let saves = !self.requests.saves.is_empty();
            if self.saving.is_due(self.progress.step(), validated) {
                save(self, false)?;
            }
            save_as_requested(self)?;
            let saves = saves || self.saving.has_saved(self.progress.step());
            let out_of_time = max_time.is_some_and(|limit| earlier + started.elapsed() >= limit);
            let vote = self.vote_on_stop(out_of_time)?;
            // A request waits until the minimum of steps and epochs is reached.
            self.requests.stop = vote.stop;
            let stops = vote.stop && self.may_stop(&plan);
            self.progress.set_open(stops);
            leave_if_invited(self)?;
            copy_if_due(self)?;
            if makes_step
                && !(validated || epoch_ends || saves || self.saving.is_running())
                && self.recorder.meter().steps() > 1
                && !self.logs_step(self.progress.step())
            {
                self.recorder.usage().end_plain_step();
            }
            if vote.saved {
                finish_saving(self)?;
            }
            if let Some(why) = vote.interruption {
                end = FitEnd::Interrupted(why);
                break;
            }
            if stops {
                break;
            }
        }
        // If a rank is lost from here on, the others come here again.
        self.progress.set_open(has_run);
        self.read_pending_step()?;
        self.runner.stop_loading(true);
        self.setup.fabric.runtime.unite_replicas()?;
        self.save_at_end(end)?;
        // A resumed run continues an interrupted epoch.
        let in_epoch = plan.epoch(self.progress.cursor()) == self.progress.epoch();
        if has_run && end == FitEnd::Finished && in_epoch {
            self.end_epoch()?;
        }
        self.hook(Hook::TrainEnd)?;
        // Requests from before an interrupted validation, and from the last hooks.
        save_as_requested(self)?;
        end_saving(self)?;
        Ok(end)
    }

    /// Begins to make the batches of a plan, from the next step on.
    fn load_training(&mut self, plan: &LoopPlan) -> Result<()> {
        let workers = self.setup.config.workers(self.setup.fabric.device());
        self.runner.load_training(plan.loading(self.progress.cursor(), workers))
    }

    /// Returns whether the minimum of steps and epochs is reached.
    fn may_stop(&self, plan: &LoopPlan) -> bool {
        let TrainerConfig { min_steps, min_epochs, .. } = self.setup.config;
        let epochs = self.progress.samples() / plan.order.epoch_len();
        min_steps.is_none_or(|min| self.progress.step() >= min)
            && min_epochs.is_none_or(|min| epochs >= min)
    }

    /// Runs the short validation before a new training. Collective.
    fn sanity_check(&mut self) -> Result<Option<Interruption>> {
        let has_data = !validation_sets(self)?.is_empty();
        if self.progress.step() > 0 || self.setup.config.num_sanity_val_steps == 0 || !has_data {
            return Ok(None);
        }
        self.progress.set_stage(Stage::SanityCheck);
        self.hook(Hook::SanityCheckStart)?;
        let metrics = self.recorder.metrics().clone();
        let evaluated = self.validate_training()?;
        self.recorder.set_metrics(metrics);
        self.hook(Hook::SanityCheckEnd)?;
        self.progress.set_stage(Stage::Fit);
        Ok(match evaluated {
            Evaluated::Interrupted(why) => Some(why),
            Evaluated::Done(_) | Evaluated::NoData => None,
        })
    }

    /// Validates during training, with the moving average of the weights if there is one.
    /// Collective.
    fn validate_training(&mut self) -> Result<Evaluated> {
        self.read_pending_step()?;
        let _phase = self.setup.fabric.measurements().phase("validation");
        self.swap_averages(true)?;
        self.set_training(false)?;
        let validated = evaluate(self, EvaluationStage::Validation)?;
        self.restore_training_weights()?;
        Ok(validated)
    }

    /// Puts the weights of training back in place after a validation. Collective.
    pub(crate) fn restore_training_weights(&mut self) -> Result<()> {
        self.set_training(true)?;
        self.swap_averages(false)
    }

    /// Puts the averages that follow steps in the weights' place, or the weights back. Collective.
    fn swap_averages(&mut self, averages: bool) -> Result<()> {
        if self.has_averages == averages {
            return Ok(());
        }
        let mut swapped = false;
        for (_, optimizer) in self.optimizers_mut().iter_mut() {
            if optimizer.average().is_some_and(WeightAverage::follows_steps) {
                optimizer.swap_average()?;
                swapped = true;
            }
        }
        self.has_averages = averages && swapped;
        Ok(())
    }

    /// The objects that a step can access.
    pub(crate) fn step_parts(&self) -> StepParts {
        StepParts { runtime: self.setup.fabric.runtime.clone(), data: self.runner.data() }
    }

    /// Puts the weights of training or of evaluations in place, for optimizers that have both.
    /// Returns whether anything changed. Collective.
    pub(crate) fn set_training(&mut self, training: bool) -> Result<bool> {
        let Some(optimizers) = &mut self.optimizers else { return Ok(false) };
        let mut changed = false;
        for (_, optimizer) in optimizers.iter_mut() {
            changed |= optimizer.set_training(training)?;
        }
        Ok(changed)
    }

    /// Reports the values logged in the ending epoch, and calls its hook, unless done before.
    /// Collective.
    fn end_epoch(&mut self) -> Result<()> {
        self.read_pending_step()?;
        if !self.progress.end_epoch() {
            return Ok(());
        }
        self.recorder.log_epoch(&self.setup.fabric, self.progress.step())?;
        self.hook(Hook::TrainEpochEnd)
    }

    /// Saves the last step, unless it is saved already or saving is disabled. Collective.
    ///
    /// Called before the hooks at the end, which a resumed run calls again.
    fn save_at_end(&mut self, end: FitEnd) -> Result<()> {
        // The trained module is evaluated, saved and exported with these weights.
        self.set_training(false)?;
        let wanted = match end {
            FitEnd::Finished | FitEnd::Interrupted(Interruption::CtrlC) => {
                self.saving.config().save_last
            }
            // The run resumes when the scheduler gives it a machine again.
            FitEnd::Interrupted(_) => true,
        };
        if wanted && !self.saving.has_saved(self.progress.step()) {
            save(self, end != FitEnd::Finished)?;
        }
        if wanted && self.setup.fabric.adapters().is_some() {
            self.setup.fabric.checkpoints().save_adapter(self.setup.run_dir.join("adapter"))?;
        }
        // The machine may be taken soon, so the save is waited for at once.
        if end == FitEnd::Finished { Ok(()) } else { end_saving(self) }
    }
}
