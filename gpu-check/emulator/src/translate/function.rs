//! Statements of a function: meaning of its names, values and addresses of operands.

use std::collections::HashMap;
use std::fmt::Write as _;

use super::types::{cpp, identifier, word};
use crate::ptx::{Module, Statement, Variable, integer};

/// State shared by all functions of a kernel.
pub(super) struct All<'a> {
    pub(super) module: &'a Module,
    pub(super) needs_fibers: bool,
    /// Names and bytes of shared memory; the index identifies it to the shim.
    pub(super) shared: Vec<(String, usize)>,
}

impl<'a> All<'a> {
    pub(super) fn new(module: &'a Module) -> Self {
        Self { module, needs_fibers: false, shared: Vec::new() }
    }

    fn site(&mut self, variable: &Variable) -> usize {
        let known = self.shared.iter().position(|(name, _)| *name == variable.name);
        known.unwrap_or_else(|| {
            self.shared.push((variable.name.clone(), variable.bytes));
            self.shared.len() - 1
        })
    }
}

/// Meaning of a name in a function.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Name {
    /// A register with its type.
    Register(String),
    /// Memory of the thread or of the module.
    Memory,
    /// Shared memory: the expression of its address.
    Shared(String),
}

/// A function that is being translated.
pub(super) struct Scopes<'a, 'b> {
    pub(super) all: &'a mut All<'b>,
    names: Vec<HashMap<String, Name>>,
}

impl<'a, 'b> Scopes<'a, 'b> {
    pub(super) fn new(all: &'a mut All<'b>) -> Self {
        Self { all, names: vec![HashMap::new()] }
    }

    pub(super) fn declare(&mut self, name: &str, what: Name) {
        if let Some(scope) = self.names.last_mut() {
            scope.insert(name.to_owned(), what);
        }
    }

    pub(super) fn name(&self, name: &str) -> Option<&Name> {
        self.names.iter().rev().find_map(|scope| scope.get(name))
    }

    pub(super) fn statement(&mut self, statement: &Statement) -> Result<String, String> {
        Ok(match statement {
            Statement::Open => {
                self.names.push(HashMap::new());
                "{".to_owned()
            }
            Statement::Close => {
                self.names.pop();
                "}".to_owned()
            }
            Statement::Label(label) => format!("L_{}:;", identifier(label)),
            Statement::Registers(kind, names) => {
                let kind = word(kind);
                let mut line = String::new();
                for name in names {
                    self.declare(name, Name::Register(kind.clone()));
                    let _ = write!(line, "[[maybe_unused]] {kind} R_{};", identifier(name));
                }
                line
            }
            Statement::Variable(variable) if variable.space == "shared" => {
                let address = self.shared(variable);
                self.declare(&variable.name, Name::Shared(address));
                String::new()
            }
            Statement::Variable(variable) => {
                self.declare(&variable.name, Name::Memory);
                let name = identifier(&variable.name);
                let align = variable.align.max(8);
                format!("alignas({align}) u8 V_{name}[{}]; (void)V_{name};", variable.bytes.max(1))
            }
            Statement::Instruction(instruction) => {
                let line = self.instruction(instruction).map_err(|why| {
                    let (name, operands) =
                        (instruction.name.join("."), instruction.operands.join(", "));
                    format!("`{name} {operands}`: {why}")
                })?;
                match &instruction.predicate {
                    Some((register, negated)) => {
                        let not = if *negated { "!" } else { "" };
                        format!("if ({not}R_{}) {{ {line} }}", identifier(register))
                    }
                    None => line,
                }
            }
        })
    }

    fn shared(&mut self, variable: &Variable) -> String {
        self.all.needs_fibers = true;
        match variable.bytes {
            0 => "(u64)(uintptr_t)shim::dynamic_shared()".to_owned(),
            bytes => format!("(u64)(uintptr_t)shim::shared({}, {bytes})", self.all.site(variable)),
        }
    }

    /// The address of named memory; for shared memory, the lower half of the address.
    fn address_of(&mut self, name: &str) -> Option<String> {
        match self.name(name).cloned() {
            Some(Name::Memory) => Some(format!("(u64)(uintptr_t)V_{}", identifier(name))),
            Some(Name::Shared(address)) => Some(format!("(u64)(u32)({address})")),
            Some(Name::Register(_)) => None,
            None => {
                let module = self.all.module;
                let variable = module.variables.iter().find(|variable| variable.name == name)?;
                match variable.space.as_str() {
                    "shared" => Some(format!("(u64)(u32)({})", self.shared(variable))),
                    _ => Some(format!("(u64)(uintptr_t)V_{}", identifier(name))),
                }
            }
        }
    }

    /// The expression of an operand's value, of type `kind`.
    pub(super) fn value(&mut self, operand: &str, kind: &str) -> Result<String, String> {
        let ty = cpp(kind);
        if let Some(operand) = operand.strip_prefix('!') {
            return Ok(format!("!({})", self.value(operand, kind)?));
        }
        if let Some(Name::Register(_)) = self.name(operand) {
            return Ok(format!("get<{ty}>(R_{})", identifier(operand)));
        }
        if let Some(special) = self.special(operand) {
            return Ok(format!("({ty}){special}"));
        }
        for (prefix, bits) in [("0f", 32), ("0F", 32), ("0d", 64), ("0D", 64)] {
            let is_float = operand.strip_prefix(prefix).filter(|hex| hex.len() == bits / 4);
            if let Some(hex) = is_float {
                return Ok(format!("get<{ty}>((u{bits})0x{hex}ull)"));
            }
        }
        if let Some(number) = integer(operand) {
            return Ok(match kind {
                "f16" | "bf16" => format!("get<{ty}>((u16){number}ull)"),
                "f32" | "f64" => format!("({ty}){}", number.cast_signed()),
                _ => format!("({ty}){number}ull"),
            });
        }
        if let Some((name, offset)) = operand.split_once('+')
            && let (Some(address), Some(offset)) = (self.address_of(name), integer(offset))
        {
            return Ok(format!("({ty})({address} + {offset}ull)"));
        }
        match self.address_of(operand) {
            Some(address) => Ok(format!("({ty})({address})")),
            None => Err(format!("what is `{operand}`?")),
        }
    }

    fn special(&mut self, operand: &str) -> Option<String> {
        let fixed = match operand {
            "%laneid" => "shim::lane()",
            "WARP_SZ" => "32",
            "%clock" | "%clock64" | "%globaltimer" => "0",
            _ => {
                let (name, dim) = operand.split_once('.')?;
                let of = match name {
                    "%tid" => "thread",
                    "%ntid" => "block_size",
                    "%ctaid" => "block",
                    "%nctaid" => "grid_size",
                    _ => return None,
                };
                return Some(format!("T.{of}.{dim}"));
            }
        };
        self.all.needs_fibers |= operand == "%laneid";
        Some(fixed.to_owned())
    }

    /// The statement `R_register = value`; empty for `_`.
    pub(super) fn set(
        &mut self,
        register: &str,
        kind: &str,
        value: &str,
    ) -> Result<String, String> {
        match self.name(register) {
            _ if register == "_" => Ok(String::new()),
            Some(Name::Register(_)) => {
                Ok(format!("set<{}>(R_{}, {value});", cpp(kind), identifier(register)))
            }
            _ => Err(format!("`{register}` is no register")),
        }
    }

    /// The expression of the address `[..]` in a memory space.
    pub(super) fn address(&mut self, operand: &str, space: &str) -> Result<String, String> {
        let inner = operand.trim_start_matches('[').trim_end_matches(']').trim();
        let (base, offset) = match inner.split_once('+') {
            Some((base, offset)) => (base.trim(), offset.trim()),
            None => (inner, "0"),
        };
        let offset = integer(offset).ok_or_else(|| format!("what is `{offset}`?"))?;
        let base = match self.name(base) {
            Some(Name::Register(kind)) => {
                let kind = kind.clone();
                self.value(base, &kind)?
            }
            _ => self.value(base, "u64")?,
        };
        let sum = format!("(u64){base} + {offset}ull");
        Ok(match space {
            "shared" => {
                self.all.needs_fibers = true;
                format!("window((u32)({sum}))")
            }
            "global" => format!("of_device({sum})"),
            _ => sum,
        })
    }
}
