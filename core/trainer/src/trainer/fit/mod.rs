//! Training: the loop, its steps, and the plan that both follow.

pub(crate) mod fit_run;
pub(crate) mod pipeline_step;
pub(crate) mod plan;
pub(crate) mod replica_check;
pub(crate) mod schedule_warning;
pub(crate) mod train_step;
pub(crate) mod training_loop;
