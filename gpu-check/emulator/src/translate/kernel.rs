//! Translation of a kernel and all functions that it calls.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::function::{All, Name, Scopes};
use super::types::identifier;
use crate::ptx::{Function, Instruction, Module, Statement, Variable};

/// A kernel, ready for a host compiler.
#[derive(Debug)]
pub(crate) struct Translated {
    /// C++ source with two entry points: `fulgurite_alone` runs one thread, and `fulgurite_fiber`
    /// runs the thread of the current fiber.
    pub(crate) source: String,
    /// Offset and size in bytes of each parameter.
    pub(crate) parameters: Vec<(usize, usize)>,
    /// Whether its threads depend on each other: barriers, lanes of a warp or shared memory.
    pub(crate) needs_fibers: bool,
    /// Bytes of shared memory that the kernel declares.
    pub(crate) shared_bytes: usize,
}

/// Translates one kernel and all functions that it calls.
///
/// # Errors
/// If the kernel does not exist, or an instruction is unknown.
pub(crate) fn translate(module: &Module, kernel: &str) -> Result<Translated, String> {
    let entry = module.function(kernel).filter(|function| function.is_entry);
    let entry = entry.ok_or_else(|| format!("there is no kernel `{kernel}`"))?;
    let mut called = BTreeSet::new();
    callees(module, entry, &mut called);
    let functions: Vec<&Function> =
        called.iter().filter_map(|name| module.function(name)).chain([entry]).collect();

    let mut source = String::from("#include \"ptx.h\"\nnamespace ptx {\n");
    let mut all = All::new(module);
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

fn instructions(function: &Function) -> impl Iterator<Item = &Instruction> {
    function.body.iter().flatten().filter_map(|statement| match statement {
        Statement::Instruction(instruction) => Some(instruction),
        _ => None,
    })
}

fn callees(module: &Module, function: &Function, found: &mut BTreeSet<String>) {
    for name in instructions(function).filter_map(Instruction::callee) {
        if let Some(other) = module.function(name)
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

/// Writes a constant of the module. Each kernel has its own copy, so none may be written to.
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
    let mut scopes = Scopes::new(all);
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
