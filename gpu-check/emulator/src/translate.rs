//! A kernel in PTX as a function in C++, for `runtime/ptx.h`.
//!
//! Registers are words without a type, as in PTX: each instruction says how it reads their bits. Addresses of global
//! memory are those of the host; addresses of shared memory are the lower half of one, as they may be in 32 bits.

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write as _;

use crate::ptx::{Function, Instruction, Module, Statement, Variable, integer};

/// A kernel, ready for a host compiler.
#[derive(Debug)]
pub(crate) struct Translated {
    /// The text of a file of C++, with `fulgurite_alone`, which runs one thread, and `fulgurite_fiber`, which runs the one
    /// that the shim's fibers are at.
    pub(crate) source: String,
    /// Offset and size in bytes of each parameter.
    pub(crate) parameters: Vec<(usize, usize)>,
    /// Whether its threads meet each other, or share memory.
    pub(crate) needs_fibers: bool,
    /// Bytes of shared memory that it declares.
    pub(crate) shared_bytes: usize,
}

/// Translates one kernel with all that it calls.
///
/// # Errors
/// If there is no such kernel, or an instruction is not known.
pub(crate) fn translate(module: &Module, kernel: &str) -> Result<Translated, String> {
    let entry = find(module, kernel).filter(|function| function.is_entry);
    let entry = entry.ok_or_else(|| format!("there is no kernel `{kernel}`"))?;
    let mut called = BTreeSet::new();
    callees(module, entry, &mut called);
    let functions: Vec<&Function> =
        called.iter().filter_map(|name| find(module, name)).chain([entry]).collect();

    let mut source = String::from("#include \"ptx.h\"\nnamespace ptx {\n");
    let mut all = All { module, needs_fibers: false, shared: Vec::new() };
    for variable in &module.variables {
        if variable.space != "shared" && is_used(&functions, &variable.name) {
            global(&mut source, variable)?;
        }
    }
    for function in functions.iter().filter(|function| !function.is_entry) {
        writeln!(source, "{};", declaration(function)).map_err(|e| e.to_string())?;
    }
    for function in &functions {
        source.push_str(&body(&mut all, function)?);
    }
    let name = identifier(&entry.name);
    write!(
        source,
        "extern \"C\" void fulgurite_alone(const shim::Thread &T, const u8 *arguments) {{ F_{name}(T, arguments); }}\n\
         extern \"C\" void fulgurite_fiber(const u8 *arguments) {{ F_{name}(shim::self(), arguments); }}\n}}\n"
    )
    .map_err(|e| e.to_string())?;
    let mut end = 0_usize;
    let parameters = entry.parameters.iter().map(|parameter| {
        let start = end.next_multiple_of(parameter.align);
        end = start + parameter.bytes;
        (start, parameter.bytes)
    });
    let parameters = parameters.collect();
    let shared_bytes = all.shared.iter().map(|(_, bytes)| bytes).sum();
    Ok(Translated { source, parameters, needs_fibers: all.needs_fibers, shared_bytes })
}

fn find<'a>(module: &'a Module, name: &str) -> Option<&'a Function> {
    module.functions.iter().find(|function| function.name == name && function.body.is_some())
}

fn instructions(function: &Function) -> impl Iterator<Item = &Instruction> {
    function.body.iter().flatten().filter_map(|statement| match statement {
        Statement::Instruction(instruction) => Some(instruction),
        _ => None,
    })
}

/// The name of the function that a `call` calls.
fn callee(instruction: &Instruction) -> Option<&str> {
    let is_call = instruction.name.first().is_some_and(|name| name == "call");
    let mut names = instruction.operands.iter().filter(|operand| !operand.starts_with('('));
    names.next().filter(|_| is_call).map(String::as_str)
}

fn callees(module: &Module, function: &Function, found: &mut BTreeSet<String>) {
    for name in instructions(function).filter_map(callee) {
        if let Some(other) = find(module, name)
            && found.insert(name.to_owned())
        {
            callees(module, other, found);
        }
    }
}

fn is_used(functions: &[&Function], name: &str) -> bool {
    functions.iter().any(|function| {
        instructions(function).any(|i| i.operands.iter().any(|operand| operand.contains(name)))
    })
}

fn identifier(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect()
}

/// A constant of the module. Each kernel has its own, so none may be written.
fn global(source: &mut String, variable: &Variable) -> Result<(), String> {
    let values = variable.values.as_ref();
    let values = values.ok_or_else(|| format!("{} is memory without values", variable.name))?;
    let values: Vec<String> = values.iter().map(|value| format!("{value}ull")).collect();
    let bits = variable.element * 8;
    writeln!(
        source,
        "alignas({}) static const u{bits} V_{}[{}] = {{{}}};",
        variable.align.max(8),
        identifier(&variable.name),
        variable.bytes / variable.element,
        values.iter().map(|value| format!("(u{bits}){value}")).collect::<Vec<_>>().join(", ")
    )
    .map_err(|e| e.to_string())
}

/// What all functions of a kernel have together.
struct All<'a> {
    module: &'a Module,
    needs_fibers: bool,
    /// Names and bytes of shared memory; a place's number is what the shim knows it by.
    shared: Vec<(String, usize)>,
}

impl All<'_> {
    fn site(&mut self, variable: &Variable) -> usize {
        let known = self.shared.iter().position(|(name, _)| *name == variable.name);
        known.unwrap_or_else(|| {
            self.shared.push((variable.name.clone(), variable.bytes));
            self.shared.len() - 1
        })
    }
}

fn declaration(function: &Function) -> String {
    let name = identifier(&function.name);
    if function.is_entry {
        return format!("static void F_{name}(const shim::Thread &T, const u8 *arguments)");
    }
    let places = function.returns.iter().chain(&function.parameters);
    let places: String = places.map(|p| format!(", u8 *V_{}", identifier(&p.name))).collect();
    format!("static void F_{name}(const shim::Thread &T{places})")
}

fn body(all: &mut All<'_>, function: &Function) -> Result<String, String> {
    let mut out = format!("{} {{\n(void)T;\nbool CC = false; (void)CC;\n", declaration(function));
    let mut scopes = Scopes { all, names: vec![HashMap::new()] };
    if function.is_entry {
        let mut end = 0_usize;
        for parameter in &function.parameters {
            let start = end.next_multiple_of(parameter.align);
            end = start + parameter.bytes;
            let name = identifier(&parameter.name);
            writeln!(out, "const u8 *const V_{name} = arguments + {start};")
                .map_err(|e| e.to_string())?;
        }
    }
    for parameter in function.parameters.iter().chain(&function.returns) {
        scopes.declare(&parameter.name, Name::Memory);
    }
    for statement in function.body.iter().flatten() {
        let line =
            scopes.statement(statement).map_err(|why| format!("{}: {why}", function.name))?;
        out.push_str(&line);
        out.push('\n');
    }
    out.push_str("}\n");
    Ok(out)
}

/// What a name in a function is.
#[derive(Debug, Clone, PartialEq)]
enum Name {
    /// A register, and its type.
    Register(String),
    /// Memory of the thread, or of the module.
    Memory,
    /// Shared memory: the expression of its address.
    Shared(String),
}

struct Scopes<'a, 'b> {
    all: &'a mut All<'b>,
    names: Vec<HashMap<String, Name>>,
}

const TYPES: [&str; 19] = [
    "u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64", "b8", "b16", "b32", "b64", "f16", "f32",
    "f64", "bf16", "bf16x2", "f16x2", "pred",
];

/// The type in C++ that an instruction's type is.
fn cpp(kind: &str) -> String {
    match kind.strip_prefix('b').filter(|bits| bits.parse::<u32>().is_ok()) {
        Some(bits) => format!("u{bits}"),
        None if kind == "pred" => "bool".to_owned(),
        None => kind.to_owned(),
    }
}

fn size(kind: &str) -> usize {
    match kind.trim_start_matches(|c: char| c.is_ascii_alphabetic()) {
        "8" => 1,
        "16" => 2,
        "64" => 8,
        _ => 4,
    }
}

/// The word of that type's size.
fn word(kind: &str) -> String {
    if kind == "pred" { "bool".to_owned() } else { format!("u{}", size(kind) * 8) }
}

fn rounding(modifiers: &[&str]) -> &'static str {
    match modifiers.iter().find(|m| ["rz", "rm", "rp"].contains(m)) {
        Some(&"rz") => "RZ",
        Some(&"rm") => "RM",
        Some(_) => "RP",
        None => "RN",
    }
}

impl Scopes<'_, '_> {
    fn declare(&mut self, name: &str, what: Name) {
        if let Some(scope) = self.names.last_mut() {
            scope.insert(name.to_owned(), what);
        }
    }

    fn name(&self, name: &str) -> Option<&Name> {
        self.names.iter().rev().find_map(|scope| scope.get(name))
    }

    fn statement(&mut self, statement: &Statement) -> Result<String, String> {
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

    /// The address of memory with a name; of shared memory, its lower half.
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

    /// An operand's value, of type `kind`.
    fn value(&mut self, operand: &str, kind: &str) -> Result<String, String> {
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

    /// `R_register = value`, as a statement; nothing for `_`.
    fn set(&mut self, register: &str, kind: &str, value: &str) -> Result<String, String> {
        match self.name(register) {
            _ if register == "_" => Ok(String::new()),
            Some(Name::Register(_)) => {
                Ok(format!("set<{}>(R_{}, {value});", cpp(kind), identifier(register)))
            }
            _ => Err(format!("`{register}` is no register")),
        }
    }

    /// The address that `[..]` says, in a space.
    fn address(&mut self, operand: &str, space: &str) -> Result<String, String> {
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

    fn instruction(&mut self, instruction: &Instruction) -> Result<String, String> {
        let parts: Vec<&str> = instruction.name.iter().map(String::as_str).collect();
        let kinds: Vec<&str> = parts[1..].iter().copied().filter(|p| TYPES.contains(p)).collect();
        let modifiers: Vec<&str> =
            parts[1..].iter().copied().filter(|p| !TYPES.contains(p)).collect();
        let operands: Vec<&str> = instruction.operands.iter().map(String::as_str).collect();
        let has = |modifier: &str| modifiers.contains(&modifier);
        let kind = kinds.first().copied().unwrap_or("b32");
        let at = |index: usize| operands.get(index).copied().ok_or("too few operands");
        match parts[0] {
            "mov" => self.mov(kind, at(0)?, at(1)?),
            "cvta" if has("shared") => {
                self.all.needs_fibers = true;
                let value = self.value(at(1)?, kind)?;
                let value = match has("to") {
                    true => format!("({})(u32)({value})", cpp(kind)),
                    false => format!("({})window((u32)({value}))", cpp(kind)),
                };
                self.set(at(0)?, kind, &value)
            }
            "cvta" => self.mov(kind, at(0)?, at(1)?),
            "ld" | "ldu" | "st" => self.memory(parts[0], kind, &modifiers, at(0)?, at(1)?),
            "add" | "addc" | "sub" | "subc" if has("cc") || parts[0].ends_with('c') => {
                let (a, b) = (self.value(at(1)?, kind)?, self.value(at(2)?, kind)?);
                let carry = if parts[0].ends_with('c') { "CC" } else { "false" };
                let with = if parts[0].starts_with("add") { "add_carry" } else { "sub_borrow" };
                let out = if has("cc") { "CC" } else { "ignored" };
                let value = format!("{with}<{}>({a}, {b}, {carry}, {out})", word(kind));
                let set = self.set(at(0)?, &word(kind), &value)?;
                Ok(format!("{{ bool ignored; (void)ignored; {set} }}"))
            }
            "mad" | "madc" if has("cc") || parts[0] == "madc" => {
                let half = if has("hi") { "mul_hi" } else { "mul" };
                let ty = cpp(kind);
                let (a, b) = (self.value(at(1)?, kind)?, self.value(at(2)?, kind)?);
                let c = self.value(at(3)?, kind)?;
                let carry = if parts[0] == "madc" { "CC" } else { "false" };
                let out = if has("cc") { "CC" } else { "ignored" };
                let value = format!(
                    "add_carry<{}>({half}<{ty}>({a}, {b}), {c}, {carry}, {out})",
                    word(kind)
                );
                let set = self.set(at(0)?, &word(kind), &value)?;
                Ok(format!("{{ bool ignored; (void)ignored; {set} }}"))
            }
            "mul" if has("hi") => self.apply(&format!("mul_hi<{}>", cpp(kind)), kind, &operands, 2),
            "mul" if has("wide") => {
                let (a, b) = (self.value(at(1)?, kind)?, self.value(at(2)?, kind)?);
                let ty = cpp(kind);
                self.set(at(0)?, &twice(kind), &format!("mul_wide<{ty}>({a}, {b})"))
            }
            "mad" if has("wide") => {
                let (a, b) = (self.value(at(1)?, kind)?, self.value(at(2)?, kind)?);
                let (wide, ty) = (twice(kind), cpp(kind));
                let c = self.value(at(3)?, &wide)?;
                self.set(
                    at(0)?,
                    &wide,
                    &format!("add<{}>(mul_wide<{ty}>({a}, {b}), {c})", cpp(&wide)),
                )
            }
            "mad" if !kind.starts_with('f') => {
                let half = if has("hi") { "mul_hi" } else { "mul" };
                let ty = cpp(kind);
                let (a, b) = (self.value(at(1)?, kind)?, self.value(at(2)?, kind)?);
                let c = self.value(at(3)?, kind)?;
                self.set(at(0)?, kind, &format!("add<{ty}>({half}<{ty}>({a}, {b}), {c})"))
            }
            "add" | "sub" | "mul" | "div" | "fma" | "mad" => {
                let name = if parts[0] == "mad" { "fma" } else { parts[0] };
                let function = format!("{name}<{}, {}>", cpp(kind), rounding(&modifiers));
                let function = match has("sat") {
                    true => format!("saturated({function}"),
                    false => function,
                };
                let count = if name == "fma" { 3 } else { 2 };
                let line = self.apply(&function, kind, &operands, count)?;
                Ok(if has("sat") { line.replace(");", "));") } else { line })
            }
            "rem" => self.apply(&format!("rem<{}>", cpp(kind)), kind, &operands, 2),
            "min" | "max" => {
                let function = format!("{}<{}, {}>", parts[0], cpp(kind), has("NaN"));
                self.apply(&function, kind, &operands, 2)
            }
            "neg" | "abs" => {
                self.apply(&format!("{}<{}>", parts[0], cpp(kind)), kind, &operands, 1)
            }
            "rcp" | "sqrt" | "rsqrt" | "ex2" | "lg2" | "sin" | "cos" | "tanh" => {
                let function = format!("ptx::{}<{}>", parts[0], cpp(kind));
                self.apply(&function, kind, &operands, 1)
            }
            "copysign" => self.apply(&format!("ptx::copysign<{}>", cpp(kind)), kind, &operands, 2),
            "and" | "or" | "xor" => {
                let (a, b) = (self.value(at(1)?, kind)?, self.value(at(2)?, kind)?);
                let sign = match parts[0] {
                    "and" => "&",
                    "or" => "|",
                    _ => "^",
                };
                self.set(at(0)?, kind, &format!("({})({a} {sign} {b})", cpp(kind)))
            }
            "not" => {
                let a = self.value(at(1)?, kind)?;
                let sign = if kind == "pred" { "!" } else { "~" };
                self.set(at(0)?, kind, &format!("({})({sign}({a}))", cpp(kind)))
            }
            "shl" | "shr" => {
                let (a, n) = (self.value(at(1)?, kind)?, self.value(at(2)?, "u32")?);
                self.set(at(0)?, kind, &format!("{}<{}>({a}, {n})", parts[0], cpp(kind)))
            }
            "shf" => {
                let (low, high) = (self.value(at(1)?, "u32")?, self.value(at(2)?, "u32")?);
                let n = self.value(at(3)?, "u32")?;
                let left = has("l");
                self.set(
                    at(0)?,
                    "u32",
                    &format!("funnel<{left}, {}>({low}, {high}, {n})", has("wrap")),
                )
            }
            "clz" | "popc" => {
                let a = self.value(at(1)?, kind)?;
                self.set(at(0)?, "u32", &format!("{}<{}>({a})", parts[0], cpp(kind)))
            }
            "brev" => self.apply(&format!("brev<{}>", cpp(kind)), kind, &operands, 1),
            "bfe" => {
                let a = self.value(at(1)?, kind)?;
                let (start, length) = (self.value(at(2)?, "u32")?, self.value(at(3)?, "u32")?);
                self.set(at(0)?, kind, &format!("bfe<{}>({a}, {start}, {length})", cpp(kind)))
            }
            "bfi" => {
                let (a, b) = (self.value(at(1)?, kind)?, self.value(at(2)?, kind)?);
                let (start, length) = (self.value(at(3)?, "u32")?, self.value(at(4)?, "u32")?);
                self.set(at(0)?, kind, &format!("bfi<{}>({a}, {b}, {start}, {length})", cpp(kind)))
            }
            "prmt" => self.apply("prmt", "b32", &operands, 3),
            "lop3" => {
                let list: Result<Vec<String>, String> =
                    operands[1..].iter().map(|operand| self.value(operand, "b32")).collect();
                self.set(at(0)?, "b32", &format!("lop3({})", list?.join(", ")))
            }
            "selp" => {
                let (a, b) = (self.value(at(1)?, &word(kind))?, self.value(at(2)?, &word(kind))?);
                let p = self.value(at(3)?, "pred")?;
                self.set(at(0)?, &word(kind), &format!("{p} ? {a} : {b}"))
            }
            "setp" => self.setp(&modifiers, kind, &operands),
            "set" => {
                let from = kinds.get(1).copied().ok_or("two types")?;
                let (a, b) = (self.value(at(1)?, from)?, self.value(at(2)?, from)?);
                let compare = compare(modifiers.first().ok_or("a comparison")?);
                let test = format!("ptx::{compare}<{}>({a}, {b})", cpp(from));
                self.set(at(0)?, kind, &format!("truth<{}>({test})", cpp(kind)))
            }
            "cvt" => self.cvt(&kinds, &modifiers, &operands),
            "bra" => Ok(format!("goto L_{};", identifier(at(0)?))),
            "ret" | "exit" => Ok("return;".to_owned()),
            "call" => self.call(instruction),
            "bar" | "barrier" => {
                self.all.needs_fibers = true;
                match (has("warp"), at(0)?, operands.len()) {
                    (true, ..) => Ok("shim::warp_barrier();".to_owned()),
                    (false, "0", 1) => Ok("shim::block_barrier();".to_owned()),
                    _ => Err("a barrier of some threads".to_owned()),
                }
            }
            "shfl" => self.shuffle(&modifiers, &operands),
            "vote" => {
                self.all.needs_fibers = true;
                let p = self.value(at(1)?, "pred")?;
                match has("ballot") {
                    true => self.set(at(0)?, "b32", &format!("ballot({p})")),
                    false => Err("a vote other than ballot".to_owned()),
                }
            }
            "atom" | "red" => self.atomic(parts[0] == "red", kind, &modifiers, &operands),
            "membar" | "fence" | "prefetch" | "prefetchu" | "pragma" => Ok(String::new()),
            "trap" => Ok("fault(\"a trap\", 0);".to_owned()),
            "mma" => self.tensor_cores(&parts, &operands),
            "ldmatrix" => {
                self.all.needs_fibers = true;
                if !has("x4") {
                    return Err("other than four matrices".to_owned());
                }
                let from = self.address(at(1)?, "shared")?;
                let turned = has("trans");
                let mut line =
                    format!("{{ u32 m[4]; load_matrices_of(m, (const void *)({from}), {turned}); ");
                for (index, register) in list(at(0)?).into_iter().enumerate() {
                    line += &self.set(register, "b32", &format!("m[{index}]"))?;
                }
                Ok(line + "}")
            }
            "cp" => self.copy(&modifiers, &operands),
            _ => Err("an instruction that is not known".to_owned()),
        }
    }

    fn apply(
        &mut self,
        function: &str,
        kind: &str,
        operands: &[&str],
        count: usize,
    ) -> Result<String, String> {
        if operands.len() != count + 1 {
            return Err(format!("expected {} operands", count + 1));
        }
        let half = kind.strip_suffix("x2");
        let kind = if half.is_some() { "b32" } else { kind };
        let arguments: Result<Vec<String>, String> =
            operands[1..].iter().map(|operand| self.value(operand, kind)).collect();
        let arguments = arguments?.join(", ");
        let value = match half {
            None => format!("{function}({arguments})"),
            Some(half) => {
                let of_half = function.replace("x2", "");
                format!("halves<{half}>([](auto... x) {{ return {of_half}(x...); }}, {arguments})")
            }
        };
        self.set(operands[0], kind, &value)
    }

    fn mov(&mut self, kind: &str, to: &str, from: &str) -> Result<String, String> {
        let kind = word(kind);
        if to.starts_with('{') {
            let value = self.value(from, &kind)?;
            let parts = list(to);
            let bits = size(&kind) * 8 / parts.len().max(1);
            let mut line = format!("{{ u64 whole = (u64){value}; ");
            for (index, register) in parts.into_iter().enumerate() {
                let part = format!("(u{bits})(whole >> {})", bits * index);
                line += &self.set(register, &format!("u{bits}"), &part)?;
            }
            return Ok(line + "}");
        }
        if from.starts_with('{') {
            let parts = list(from);
            let bits = size(&kind) * 8 / parts.len().max(1);
            let mut value = String::from("0");
            for (index, part) in parts.into_iter().enumerate() {
                let part = self.value(part, &format!("u{bits}"))?;
                value += &format!(" | (u64){part} << {}", bits * index);
            }
            return self.set(to, &kind, &format!("({kind})({value})"));
        }
        let value = self.value(from, &kind)?;
        self.set(to, &kind, &value)
    }

    fn memory(
        &mut self,
        name: &str,
        kind: &str,
        modifiers: &[&str],
        first: &str,
        second: &str,
    ) -> Result<String, String> {
        let spaces = ["param", "global", "shared", "local", "const"];
        let space = modifiers.iter().copied().find(|m| spaces.contains(m)).unwrap_or("generic");
        let (place, registers) = if name == "st" { (first, second) } else { (second, first) };
        let address = self.address(place, space)?;
        let registers = list(registers);
        let (bytes, ty) = (size(kind), cpp(kind));
        let mut line = format!("{{ u64 a = {address}; aligned(a, {}); ", bytes * registers.len());
        for (index, register) in registers.into_iter().enumerate() {
            let place = format!("a + {}", bytes * index);
            line += &match name {
                "st" => format!("write<{ty}>({place}, {});", self.value(register, kind)?),
                _ => self.set(register, kind, &format!("read<{ty}>({place})"))?,
            };
        }
        Ok(line + "}")
    }

    fn setp(
        &mut self,
        modifiers: &[&str],
        kind: &str,
        operands: &[&str],
    ) -> Result<String, String> {
        let [to, a, b, rest @ ..] = operands else { return Err("too few operands".to_owned()) };
        let (a, b) = (self.value(a, kind)?, self.value(b, kind)?);
        let compare = compare(modifiers.first().ok_or("a comparison")?);
        let mut test = format!("ptx::{compare}<{}>({a}, {b})", cpp(kind));
        if let [with] = rest {
            let with = self.value(with, "pred")?;
            let sign = match modifiers.get(1) {
                Some(&"and") => "&&",
                Some(&"or") => "||",
                Some(&"xor") => "!=",
                other => return Err(format!("what is {other:?}?")),
            };
            test = format!("({test}) {sign} ({with})");
        }
        match to.split_once('|') {
            Some(_) => Err("two results".to_owned()),
            None => self.set(to, "pred", &test),
        }
    }

    fn cvt(
        &mut self,
        kinds: &[&str],
        modifiers: &[&str],
        operands: &[&str],
    ) -> Result<String, String> {
        let [to, from] = kinds else { return Err("two types".to_owned()) };
        if let Some(half) = to.strip_suffix("x2") {
            let [register, high, low] = operands else { return Err("three operands".to_owned()) };
            let (high, low) = (self.value(high, from)?, self.value(low, from)?);
            return self.set(register, "b32", &format!("cvt_pair<{half}>({high}, {low})"));
        }
        let [register, operand] = operands else { return Err("two operands".to_owned()) };
        let whole = ["rni", "rzi", "rmi", "rpi"].into_iter().find(|w| modifiers.contains(w));
        let whole = whole.map_or("NOT_WHOLE".to_owned(), str::to_uppercase);
        let (is_saturated, rounding) = (modifiers.contains(&"sat"), rounding(modifiers));
        let value = self.value(operand, from)?;
        let (to_type, from_type) = (cpp(to), cpp(from));
        let value =
            format!("cvt<{to_type}, {from_type}, {whole}, {rounding}, {is_saturated}>({value})");
        self.set(register, to, &value)
    }

    fn call(&mut self, instruction: &Instruction) -> Result<String, String> {
        let name = callee(instruction).ok_or("a call of nothing")?;
        if find(self.all.module, name).is_none() {
            let what = if name == "__assertfail" { "a failed assertion" } else { name };
            return Ok(format!("fault(\"{}\", 0);", what.replace('"', "")));
        }
        let places = instruction.operands.iter().filter(|operand| operand.starts_with('('));
        let places: String = places
            .flat_map(|operand| list(operand))
            .map(|place| format!(", V_{}", identifier(place)))
            .collect();
        Ok(format!("F_{}(T{places});", identifier(name)))
    }

    fn shuffle(&mut self, modifiers: &[&str], operands: &[&str]) -> Result<String, String> {
        self.all.needs_fibers = true;
        let [to, value, by, limits, _mask] = operands else {
            return Err("five operands".to_owned());
        };
        let how = ["up", "down", "bfly", "idx"].into_iter().find(|how| modifiers.contains(how));
        let how = how.ok_or("a way")?.to_uppercase();
        let (value, by) = (self.value(value, "b32")?, self.value(by, "b32")?);
        let limits = self.value(limits, "b32")?;
        let (to, valid) = match to.split_once('|') {
            Some((to, valid)) => (to, Some(valid)),
            None => (*to, None),
        };
        let mut line =
            format!("{{ bool valid; u32 other = shuffle<{how}>({value}, {by}, {limits}, valid); ");
        line += &self.set(to, "b32", "other")?;
        if let Some(valid) = valid {
            line += &self.set(valid, "pred", "valid")?;
        }
        Ok(line + "}")
    }

    fn atomic(
        &mut self,
        is_reduction: bool,
        kind: &str,
        modifiers: &[&str],
        operands: &[&str],
    ) -> Result<String, String> {
        let (to, operands) =
            if is_reduction { ("_", operands) } else { (operands[0], &operands[1..]) };
        let space = modifiers.iter().copied().find(|m| ["global", "shared"].contains(m));
        let place =
            self.address(operands.first().ok_or("an address")?, space.unwrap_or("generic"))?;
        let value = self.value(operands.get(1).ok_or("a value")?, kind)?;
        let ty = cpp(kind);
        let ops = ["add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"];
        let op = ops.into_iter().find(|op| modifiers.contains(op)).ok_or("an operation")?;
        let new = match op {
            "add" => format!("add<{ty}>(old, value)"),
            "min" | "max" => format!("{op}<{ty}, false>(old, value)"),
            "and" => "old & value".to_owned(),
            "or" => "old | value".to_owned(),
            "xor" => "old ^ value".to_owned(),
            "exch" => "value".to_owned(),
            "cas" => {
                let third = self.value(operands.get(2).ok_or("a third operand")?, kind)?;
                format!("old == value ? {third} : old")
            }
            other => return Err(format!("{other} of an atomic")),
        };
        let change = format!(
            "change<{ty}>({place}, [&]({ty} old) {{ {ty} value = {value}; return ({ty})({new}); }})"
        );
        match to {
            "_" => Ok(format!("{change};")),
            to => self.set(to, kind, &change),
        }
    }

    fn tensor_cores(&mut self, parts: &[&str], operands: &[&str]) -> Result<String, String> {
        self.all.needs_fibers = true;
        let half = match parts {
            ["mma", "sync", "aligned", "m16n8k16", "row", "col", "f32", a, b, "f32"] if a == b => a,
            _ => return Err("a product of another shape".to_owned()),
        };
        let [d, a, b, c] = operands else { return Err("four operands".to_owned()) };
        let mut line = String::from("{ float c[4] = {");
        for register in list(c) {
            line += &format!("{}, ", self.value(register, "f32")?);
        }
        line += "}; const u32 a[4] = {";
        for register in list(a) {
            line += &format!("{}, ", self.value(register, "b32")?);
        }
        let b: Result<Vec<String>, String> =
            list(b).into_iter().map(|register| self.value(register, "b32")).collect();
        line += &format!("}}; multiply_add(c, a, {}, {half}{{}}); ", b?.join(", "));
        for (index, register) in list(d).into_iter().enumerate() {
            line += &self.set(register, "f32", &format!("c[{index}]"))?;
        }
        Ok(line + "}")
    }

    fn copy(&mut self, modifiers: &[&str], operands: &[&str]) -> Result<String, String> {
        self.all.needs_fibers = true;
        if modifiers.contains(&"wait_all") {
            return Ok("shim::end_copies();".to_owned());
        }
        if !modifiers.contains(&"global") {
            return Err("another copy than of global memory, or a wait for some".to_owned());
        }
        let [to, from, bytes, rest @ ..] = operands else {
            return Err("three operands".to_owned());
        };
        let (to, from) = (self.address(to, "shared")?, self.address(from, "generic")?);
        let bytes = self.value(bytes, "u32")?;
        let there = match rest {
            [there] => self.value(there, "u32")?,
            _ => bytes.clone(),
        };
        Ok(format!("copy_some({to}, {from}, {bytes}, {there});"))
    }
}

/// The type of twice as many bits.
fn twice(kind: &str) -> String {
    format!("{}{}", &kind[..1].replace('b', "u"), size(kind) * 16)
}

/// `{a, b}` or `(a, b)`, or one alone.
fn list(operand: &str) -> Vec<&str> {
    let inner = operand.trim_matches(['{', '}', '(', ')']);
    inner.split(',').map(str::trim).filter(|part| !part.is_empty()).collect()
}

/// The comparison's name in `ptx.h`.
fn compare<'a>(name: &'a &str) -> &'a str {
    match *name {
        "lo" => "lt",
        "ls" => "le",
        "hi" => "gt",
        "hs" => "ge",
        other => other,
    }
}
