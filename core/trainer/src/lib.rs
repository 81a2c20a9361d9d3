//! A strategy at work: [`fabric`] for a loop of one's own, [`trainer`] with the loop, and what a [`run`]
//! is configured by.

pub mod fabric;
pub mod run;
mod runtime;
pub mod trainer;

use fulgurite_checkpoint_format as checkpoint;
use fulgurite_config as config;
use fulgurite_config::{config_struct, registry};
use fulgurite_engine::{Error, Result};
use fulgurite_engine::{
    autograd, collective, data, mesh, module, optim, parallel, parameter, shard, strategy,
};
use fulgurite_launch as launch;
use fulgurite_launch::environment;
use fulgurite_nn as nn;
