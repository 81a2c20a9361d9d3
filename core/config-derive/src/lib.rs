//! The derive macro `Documented`: a configuration table's keys, with the documentation and the
//! defaults of the struct's fields.
//!
//! `fulgurite` and `fulgurite-core` export it beside the trait.
//!
//! ```ignore
//! use fulgurite::prelude::*;
//!
//! #[derive(Clone, Serialize, Deserialize, Documented)]
//! #[serde(deny_unknown_fields, default)]
//! struct NetConfig {
//!     /// Width of the residual stream.
//!     #[default(64)]
//!     dim: usize,
//!     /// Whether layers have biases.
//!     bias: bool,
//! }
//! ```
//!
//! A struct with `#[default(…)]` on some of its fields is [`Default`] as well. Its other fields
//! have the defaults of their types.

use proc_macro::{Delimiter, TokenStream, TokenTree};

/// For crates that depend on `fulgurite`.
#[proc_macro_derive(DocumentedForPrograms, attributes(serde, default))]
pub fn documented_for_programs(item: TokenStream) -> TokenStream {
    expand(item, "::fulgurite::core::config")
}

/// For crates that depend on `fulgurite-core`.
#[proc_macro_derive(DocumentedForPlugins, attributes(serde, default))]
pub fn documented_for_plugins(item: TokenStream) -> TokenStream {
    expand(item, "::fulgurite_core::config")
}

/// For the crates inside `fulgurite-core`.
#[proc_macro_derive(Documented, attributes(serde, default))]
pub fn documented(item: TokenStream) -> TokenStream {
    expand(item, "::fulgurite_config")
}

fn expand(item: TokenStream, config: &str) -> TokenStream {
    let code = match parse(item) {
        Ok((name, fields)) => implementation(config, &name, &fields) + &default(&name, &fields),
        Err(message) => format!("::std::compile_error!({message:?});"),
    };
    code.parse().expect("the generated code is Rust")
}

/// A field of the struct.
#[derive(Default)]
struct Field {
    name: String,
    key: String,
    ty: String,
    /// Source text of the literals.
    doc: Vec<String>,
    skipped: bool,
    /// Source text of `#[default(…)]`.
    default: Option<String>,
}

fn implementation(config: &str, name: &str, fields: &[Field]) -> String {
    let keys =
        fields.iter().filter(|field| !field.skipped).map(|Field { key, ty, doc, .. }| {
            let doc = doc.iter().map(|line| format!("{line}, \"\\n\",")).collect::<String>();
            format!(
                "{config}::KeyDoc {{
                name: ::std::borrow::Cow::Borrowed({key:?}),
                ty: {{
                    #[allow(unused_imports)]
                    use {config}::__private::{{KnownWords as _, UnknownWords as _}};
                    (&{config}::__private::Words::<{ty}>::NEW).words()
                }},
                doc: ::std::concat!({doc}),
            }},"
            )
        });
    format!(
        "#[automatically_derived]
        impl {config}::Documented for {name} {{
            fn keys() -> ::std::vec::Vec<{config}::KeyDoc> {{
                ::std::vec![{}]
            }}
        }}
        {config}::__private::inventory::submit! {{
            {config}::DocumentedType::new::<{name}>()
        }}",
        keys.collect::<String>()
    )
}

/// Implements `Default` if a field has a default.
fn default(name: &str, fields: &[Field]) -> String {
    if fields.iter().all(|field| field.default.is_none()) {
        return String::new();
    }
    let fields = fields.iter().map(|Field { name, default, .. }| {
        let default = default.as_deref().unwrap_or("::std::default::Default::default()");
        format!("{name}: {default},")
    });
    format!(
        "#[automatically_derived]
        impl ::std::default::Default for {name} {{
            fn default() -> Self {{
                Self {{ {} }}
            }}
        }}",
        fields.collect::<String>()
    )
}

/// Returns the name of a struct, and its fields.
fn parse(item: TokenStream) -> Result<(String, Vec<Field>), String> {
    let mut tokens = item.into_iter().skip_while(|token| token.to_string() != "struct").skip(1);
    let name = match tokens.next() {
        Some(TokenTree::Ident(name)) => name.to_string(),
        _ => return Err("`Documented` is for structs with named fields".to_owned()),
    };
    match tokens.next() {
        Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => {
            Ok((name, fields(group.stream())?))
        }
        _ => Err(format!(
            "`Documented` is for structs with named fields and without generic parameters, and `{name}` \
             is none"
        )),
    }
}

fn fields(stream: TokenStream) -> Result<Vec<Field>, String> {
    let mut fields = Vec::new();
    let mut field = Field::default();
    let mut tokens = stream.into_iter().peekable();
    while let Some(token) = tokens.next() {
        match token {
            TokenTree::Punct(punct) if punct.as_char() == '#' => {
                if let Some(TokenTree::Group(attribute)) = tokens.next() {
                    read_attribute(attribute.stream(), &mut field)?;
                }
            }
            // `pub`, `pub(crate)`.
            TokenTree::Ident(word) if word.to_string() == "pub" => {
                if let Some(TokenTree::Group(_)) = tokens.peek() {
                    tokens.next();
                }
            }
            TokenTree::Ident(name) => {
                field.name = name.to_string();
                if field.key.is_empty() {
                    field.key = field.name.trim_start_matches("r#").to_owned();
                }
                // Skips the colon, then reads the type up to the first comma outside of `<…>`.
                tokens.next();
                let (mut ty, mut depth) = (TokenStream::new(), 0);
                for token in tokens.by_ref() {
                    if let TokenTree::Punct(punct) = &token {
                        match punct.as_char() {
                            '<' => depth += 1,
                            '>' => depth -= 1,
                            ',' if depth == 0 => break,
                            _ => {}
                        }
                    }
                    ty.extend([token]);
                }
                field.ty = ty.to_string();
                fields.push(std::mem::take(&mut field));
            }
            other => return Err(format!("`Documented` does not understand `{other}` here")),
        }
    }
    Ok(fields)
}

fn read_attribute(attribute: TokenStream, field: &mut Field) -> Result<(), String> {
    let mut tokens = attribute.into_iter();
    match (tokens.next().map(|token| token.to_string()).as_deref(), tokens.next()) {
        (Some("doc"), Some(TokenTree::Punct(_))) => {
            field.doc.extend(tokens.map(|token| token.to_string()));
        }
        (Some("default"), Some(TokenTree::Group(group))) if !group.stream().is_empty() => {
            field.default = Some(group.stream().to_string());
        }
        (Some("default"), _) => {
            return Err("a default is written as `#[default(64)]`".to_owned());
        }
        (Some("serde"), Some(TokenTree::Group(group))) => {
            let arguments: Vec<TokenTree> = group.stream().into_iter().collect();
            for (i, argument) in arguments.iter().enumerate() {
                match argument.to_string().as_str() {
                    "skip" => field.skipped = true,
                    "flatten" => {
                        return Err(
                            "`Documented` does not know the keys of a flattened field".to_owned()
                        );
                    }
                    "rename" => {
                        let name =
                            arguments.get(i + 2).map(ToString::to_string).unwrap_or_default();
                        name.trim_matches('"').clone_into(&mut field.key);
                    }
                    _ => {}
                }
            }
        }
        _ => {}
    }
    Ok(())
}
