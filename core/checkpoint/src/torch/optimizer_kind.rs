//! Recognising the kind of a torch optimizer, which its state does not name, and its options.

use std::collections::BTreeMap;

/// The value of an option.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Setting {
    Number(f64),
    Numbers(Vec<f64>),
    Flag(bool),
    None,
    /// A text or a list of names: values that an update does not use.
    Other,
}

/// The options of a group, in the order of the file.
pub(super) type Settings = Vec<(String, Setting)>;

/// A supported optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// `AdamW`, or `Adam` without weight decay.
    AdamW,
    /// `Adam` with weight decay.
    Adam,
    Sgd {
        momentum: bool,
    },
    RmsProp {
        momentum: bool,
        centered: bool,
    },
    Adagrad,
}

/// Options that do not change an update's result, or that belong to a schedule.
const IDLE: [&str; 10] = [
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "initial_lr",
    "max_lr",
    "min_lr",
    "base_momentum",
    "max_momentum",
    "swa_lr",
];

/// Options that identify each kind.
const ADAM: [&str; 5] = ["lr", "weight_decay", "betas", "eps", "amsgrad"];
const RMSPROP: [&str; 6] = ["lr", "weight_decay", "alpha", "eps", "momentum", "centered"];
const ADAGRAD: [&str; 5] = ["lr", "weight_decay", "lr_decay", "eps", "initial_accumulator_value"];
const SGD: [&str; 5] = ["lr", "weight_decay", "momentum", "dampening", "nesterov"];

impl Kind {
    /// Returns the kind that has the options of these groups.
    ///
    /// # Errors
    /// If it is another kind.
    pub(super) fn of(groups: &[&Settings]) -> Result<Self, String> {
        let have = |names: &[&str]| {
            groups.iter().all(|group| names.iter().all(|name| find(group, name).is_some()))
        };
        match groups.first() {
            None => Err("it has no parameter groups".to_owned()),
            Some(_) if have(&ADAM) => {
                // Without decay Adam equals AdamW.
                let decays_in_gradient = |group: &&Settings| {
                    find(group, "decoupled_weight_decay") == Some(&Setting::Flag(false))
                        && find(group, "weight_decay") != Some(&Setting::Number(0.0))
                };
                Ok(if groups.iter().any(decays_in_gradient) { Self::Adam } else { Self::AdamW })
            }
            Some(first) if have(&SGD) => Ok(Self::Sgd { momentum: has_momentum(first) }),
            Some(first) if have(&RMSPROP) => {
                let centered = find(first, "centered") == Some(&Setting::Flag(true));
                Ok(Self::RmsProp { momentum: has_momentum(first), centered })
            }
            Some(_) if have(&ADAGRAD) => Ok(Self::Adagrad),
            Some(first) => {
                let names: Vec<String> =
                    first.iter().map(|(name, _)| format!("`{name}`")).collect();
                Err(format!(
                    "it is of an optimizer whose state is not read: its options are {}. States of `AdamW`, `Adam`, \
                     `SGD`, `RMSprop` and `Adagrad` of `torch.optim` are read",
                    names.join(", ")
                ))
            }
        }
    }

    /// Returns the names of its state tensors for each parameter.
    pub(super) fn states(self) -> &'static [&'static str] {
        match self {
            Self::AdamW | Self::Adam => &["exp_avg", "exp_avg_sq"],
            Self::Sgd { momentum: true } => &["momentum_buffer"],
            Self::Sgd { momentum: false } => &[],
            Self::RmsProp { momentum: false, centered: false } => &["square_avg"],
            Self::RmsProp { momentum: true, centered: false } => &["square_avg", "momentum_buffer"],
            Self::RmsProp { momentum: false, centered: true } => &["square_avg", "grad_avg"],
            Self::RmsProp { momentum: true, centered: true } => {
                &["square_avg", "grad_avg", "momentum_buffer"]
            }
            Self::Adagrad => &["sum"],
        }
    }

    /// Whether the state of a parameter has a count of steps.
    pub(super) fn counts_steps(self) -> bool {
        !matches!(self, Self::Sgd { .. })
    }

    /// Returns the names of the options that identify the kind.
    fn own(self) -> &'static [&'static str] {
        match self {
            Self::AdamW | Self::Adam => &ADAM,
            Self::Sgd { .. } => &SGD,
            Self::RmsProp { .. } => &RMSPROP,
            Self::Adagrad => &ADAGRAD,
        }
    }

    /// Returns the options of the group `index` under Fulgurite's names.
    ///
    /// # Errors
    /// If an option has a wrong type, or changes the update in an unsupported way.
    pub(super) fn options(
        self,
        index: usize,
        settings: &Settings,
    ) -> Result<BTreeMap<String, f64>, String> {
        let mut options = BTreeMap::new();
        if self == Self::Adam {
            // AdamW has no such option, and refuses the state.
            options.insert("decoupled_weight_decay".to_owned(), 0.0);
        }
        let wrong =
            |name: &str, why: &str| Err(format!("its parameter group {index} has `{name}` {why}"));
        for (name, setting) in settings {
            let own = self.own().contains(&name.as_str());
            match (name.as_str(), setting) {
                (_, Setting::None | Setting::Other) if !own => {}
                (name, _) if IDLE.contains(&name) => {}
                ("amsgrad" | "maximize", Setting::Flag(false)) => {}
                ("amsgrad" | "maximize", _) => {
                    return wrong(name, "set, which no optimizer here has");
                }
                ("decoupled_weight_decay", Setting::Flag(decoupled)) => {
                    if *decoupled && self == Self::Adam {
                        return wrong(name, "set, and another group has a weight decay without it");
                    }
                }
                ("betas", Setting::Numbers(betas)) if own && betas.len() == 2 => {
                    options.insert("beta1".to_owned(), betas[0]);
                    options.insert("beta2".to_owned(), betas[1]);
                }
                (name, Setting::Flag(flag)) if own => {
                    options.insert(name.to_owned(), f64::from(u8::from(*flag)));
                }
                (name, Setting::Number(value)) if own => {
                    options.insert(name.to_owned(), *value);
                }
                (name, _) if own => return wrong(name, "of a type that is not known"),
                (name, _) => {
                    return wrong(name, "among its options, which no optimizer here has");
                }
            }
        }
        // The learning rate before the schedule.
        if let Some(Setting::Number(lr)) = find(settings, "initial_lr") {
            options.insert("lr".to_owned(), *lr);
        }
        Ok(options)
    }

    /// Checks that all groups agree on the options that are not set by group here.
    ///
    /// # Errors
    /// If an option differs, naming it.
    pub(super) fn check_common<'a>(
        self,
        groups: impl IntoIterator<Item = &'a BTreeMap<String, f64>>,
    ) -> Result<(), String> {
        let mut groups = groups.into_iter();
        let Some(first) = groups.next() else { return Ok(()) };
        for (index, group) in groups.enumerate() {
            for (name, value) in
                group.iter().filter(|(n, _)| !["lr", "weight_decay"].contains(&n.as_str()))
            {
                let other = first.get(name).copied().unwrap_or_default();
                if other != *value {
                    return Err(format!(
                        "its parameter groups have different `{name}`, group 0 {other:?} and group {} \
                         {value:?}: groups here have a learning rate and a weight decay of their own, and \
                         the other options are the optimizer's",
                        index + 1
                    ));
                }
            }
        }
        Ok(())
    }
}

fn has_momentum(group: &Settings) -> bool {
    find(group, "momentum") != Some(&Setting::Number(0.0))
}

pub(super) fn find<'a>(settings: &'a Settings, name: &str) -> Option<&'a Setting> {
    settings.iter().find(|(known, _)| known == name).map(|(_, setting)| setting)
}
