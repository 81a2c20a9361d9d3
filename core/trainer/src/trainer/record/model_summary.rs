//! A table of a model's parameters.

use std::fmt;

use crate::counted;
use fulgurite_engine::module::ModuleTree;
use fulgurite_engine::parameter::Buffer;

/// Numbers of parameters by module: Lightning's model summary. Displayed as a table.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ModelSummary {
    /// The model's top modules, or one level deeper if those are few, with their parameters.
    ///
    /// In the order of their first parameters.
    pub modules: Vec<ModuleParameters>,
    /// Elements of all parameters. A parameter with several names counts once.
    pub parameters: usize,
    /// Elements of the trainable parameters.
    pub trainable: usize,
    /// Elements of the buffers, which are not trained, such as running statistics.
    pub buffers: usize,
    /// Number of units. A unit is gathered or recomputed as a whole.
    pub units: usize,
}

/// The elements of the parameters in a module.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ModuleParameters {
    /// The module's path.
    pub path: String,
    /// Elements of all its parameters.
    pub parameters: usize,
    /// Elements of its trainable parameters.
    pub trainable: usize,
}

impl ModelSummary {
    /// Creates the summary of a model, with whole sizes regardless of sharding. Local.
    pub fn new(tree: &ModuleTree) -> Self {
        let segments = |fqn: &str, n: usize| {
            let all: Vec<&str> = fqn.split('.').collect();
            // The last segment is the parameter's own name.
            all[..n.min(all.len().saturating_sub(1)).max(1)].join(".")
        };
        let group = |depth: usize| {
            let mut modules: Vec<ModuleParameters> = Vec::new();
            for parameter in tree.parameters() {
                let path = segments(parameter.fqn(), depth);
                let elements = parameter.model_elem_count();
                let trainable = if parameter.requires_grad() { elements } else { 0 };
                match modules.iter_mut().find(|module| module.path == path) {
                    Some(module) => {
                        module.parameters += elements;
                        module.trainable += trainable;
                    }
                    None => {
                        modules.push(ModuleParameters { path, parameters: elements, trainable });
                    }
                }
            }
            modules
        };
        let modules = match group(2) {
            modules if modules.len() <= LISTED => modules,
            _ => group(1),
        };
        Self {
            parameters: modules.iter().map(|module| module.parameters).sum(),
            trainable: modules.iter().map(|module| module.trainable).sum(),
            buffers: tree.buffers().iter().map(Buffer::elem_count).sum(),
            units: tree.units().len(),
            modules,
        }
    }
}

/// Formats a number of elements for people, such as `1.2M`.
fn short(n: usize) -> String {
    let n = n as f64;
    match n {
        n if n >= 1e9 => format!("{:.2}B", n / 1e9),
        n if n >= 1e6 => format!("{:.1}M", n / 1e6),
        n if n >= 1e3 => format!("{:.1}k", n / 1e3),
        n => format!("{n}"),
    }
}

/// Maximum number of listed modules. The others share one line.
const LISTED: usize = 12;

impl fmt::Display for ModelSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let listed = match self.modules.len() {
            n if n > LISTED + 1 => LISTED,
            n => n,
        };
        let width = self.modules[..listed].iter().map(|m| m.path.len()).max().unwrap_or(0).max(8);
        writeln!(f, "{:width$}  parameters", "module")?;
        let note = |parameters: usize, trainable: usize| match trainable {
            0 if parameters > 0 => "  frozen".to_owned(),
            n if n < parameters => format!("  {} trained", short(n)),
            _ => String::new(),
        };
        for ModuleParameters { path, parameters, trainable } in &self.modules[..listed] {
            let note = note(*parameters, *trainable);
            writeln!(f, "{path:width$}  {:>10}{note}", short(*parameters))?;
        }
        if let rest @ [_, ..] = &self.modules[listed..] {
            let sum: usize = rest.iter().map(|module| module.parameters).sum();
            writeln!(f, "{:width$}  {:>10}", format!("{} more", rest.len()), short(sum))?;
        }
        write!(
            f,
            "{:width$}  {:>10}, {} trained, in {}",
            "all",
            short(self.parameters),
            short(self.trainable),
            counted(self.units, "unit")
        )?;
        match self.buffers {
            0 => Ok(()),
            n => write!(f, ", and {} in buffers", short(n)),
        }
    }
}

#[cfg(test)]
mod tests {
    use fulgurite_engine::module::{ModuleBuilder, ModuleInit};
    use fulgurite_engine::parameter::{BufferOptions, Init};

    use super::*;

    #[test]
    fn a_table_of_few_modules() {
        let b = ModuleBuilder::new(ModuleInit::default());
        let model = b.pp("model");
        model.pp("embed").parameter("weight", [1000, 10], Init::ONES).unwrap();
        for i in 0..2 {
            model
                .unit(&format!("layers.{i}"), |b| b.parameter("weight", [30, 50], Init::ONES))
                .unwrap();
        }
        model.frozen().pp("head").parameter("weight", [7], Init::ONES).unwrap();
        model.frozen().parameter("scale", [1], Init::ONES).unwrap();
        let options = BufferOptions::default();
        model.buffer("running_mean", [70], Init::ZEROS, options).unwrap();
        insta::assert_snapshot!(ModelSummary::new(&b.finish().unwrap()), @r#"
    module        parameters
    model.embed        10.0k
    model.layers        3.0k
    model.head             7  frozen
    model                  1  frozen
    all                13.0k, 13.0k trained, in 2 units, and 70 in buffers
    "#);
        let b = ModuleBuilder::new(ModuleInit::default());
        for i in 0..20 {
            b.pp(format!("block_{i}")).parameter("weight", [2_000_000], Init::ONES).unwrap();
        }
        insta::assert_snapshot!(ModelSummary::new(&b.finish().unwrap()), @r#"
    module    parameters
    block_0         2.0M
    block_1         2.0M
    block_2         2.0M
    block_3         2.0M
    block_4         2.0M
    block_5         2.0M
    block_6         2.0M
    block_7         2.0M
    block_8         2.0M
    block_9         2.0M
    block_10        2.0M
    block_11        2.0M
    8 more         16.0M
    all            40.0M, 40.0M trained, in 0 units
    "#);
    }
}
