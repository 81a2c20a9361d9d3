//! PTX types, and the C++ spelling of names, lists and comparisons.

/// All types that an instruction's name can contain.
pub(super) const TYPES: [&str; 19] = [
    "u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64", "b8", "b16", "b32", "b64", "f16", "f32",
    "f64", "bf16", "bf16x2", "f16x2", "pred",
];

/// The C++ type for an instruction's type.
pub(super) fn cpp(kind: &str) -> String {
    match kind.strip_prefix('b').filter(|bits| bits.parse::<u32>().is_ok()) {
        Some(bits) => format!("u{bits}"),
        None if kind == "pred" => "bool".to_owned(),
        None => kind.to_owned(),
    }
}

/// Size of a type in bytes.
pub(super) fn size(kind: &str) -> usize {
    match kind.trim_start_matches(|c: char| c.is_ascii_alphabetic()) {
        "8" => 1,
        "16" => 2,
        "64" => 8,
        _ => 4,
    }
}

/// The C++ word of the type's size.
pub(super) fn word(kind: &str) -> String {
    if kind == "pred" { "bool".to_owned() } else { format!("u{}", size(kind) * 8) }
}

/// The instruction's rounding direction.
pub(super) fn rounding(modifiers: &[&str]) -> &'static str {
    match modifiers.iter().find(|m| ["rz", "rm", "rp"].contains(m)) {
        Some(&"rz") => "RZ",
        Some(&"rm") => "RM",
        Some(_) => "RP",
        None => "RN",
    }
}

/// The type with twice as many bits.
pub(super) fn twice(kind: &str) -> String {
    format!("{}{}", &kind[..1].replace('b', "u"), size(kind) * 16)
}

/// Splits `{a, b}` or `(a, b)`; a single operand gives one element.
pub(super) fn list(operand: &str) -> Vec<&str> {
    let inner = operand.trim_matches(['{', '}', '(', ')']);
    inner.split(',').map(str::trim).filter(|part| !part.is_empty()).collect()
}

/// The comparison's name in `ptx.h`.
pub(super) fn compare<'a>(name: &'a &str) -> &'a str {
    match *name {
        "lo" => "lt",
        "ls" => "le",
        "hi" => "gt",
        "hs" => "ge",
        other => other,
    }
}

/// A PTX name as a C++ identifier.
pub(super) fn identifier(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect()
}
