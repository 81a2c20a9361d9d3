//! Links, and files of the repository.

use std::fs;
use std::path::{Component, Path, PathBuf};
use std::sync::LazyLock;

use super::page::Page;
use super::root;

/// The files of the repository, without build and run outputs.
static FILES: LazyLock<Vec<String>> = LazyLock::new(|| {
    let mut files = Vec::new();
    let mut folders = vec![String::new()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(root().join(&folder)).unwrap().flatten() {
            let name = entry.file_name().to_str().unwrap().to_owned();
            let path = if folder.is_empty() { name } else { format!("{folder}/{name}") };
            if !entry.path().is_dir() {
                files.push(path);
            } else if !LEFT_OUT.contains(&path.as_str()) {
                folders.push(path);
            }
        }
    }
    files
});

const LEFT_OUT: [&str; 4] = [".git", "target", "fulgurite_logs", "checkpoints"];

/// Files of a reader's own project.
const OF_READERS: [&str; 1] = ["src/main.rs"];

/// Extensions of files in the repository.
const ENDINGS: [&str; 6] = [".rs", ".md", ".toml", ".py", ".cu", ".Dockerfile"];

/// Complaints about a page, with their lines.
pub(super) fn wrong(page: &Page) -> Vec<(usize, String)> {
    let mut wrong = Vec::new();
    for link in &page.links {
        if let Some(complaint) = wrong_link(page, &link.text) {
            wrong.push((link.line, complaint));
        }
    }
    for span in &page.spans {
        let text = span.text.trim_end_matches('/');
        let plain = |c: char| c.is_ascii_alphanumeric() || "._-/*{},".contains(c);
        if !text.contains('/') || !text.chars().all(plain) || OF_READERS.contains(&text) {
            continue;
        }
        let first = text.split('/').next().unwrap_or_default();
        let is_ours = FILES.iter().any(|file| file.split('/').next() == Some(first))
            && root().join(first).is_dir();
        let is_file = ENDINGS.iter().any(|ending| text.ends_with(ending));
        if (is_ours || is_file) && !alternatives(text).iter().all(|path| exists(path)) {
            wrong.push((span.line, format!("there is no file `{}`", span.text)));
        }
    }
    wrong
}

fn wrong_link(page: &Page, target: &str) -> Option<String> {
    if ["http://", "https://", "mailto:"].iter().any(|scheme| target.starts_with(scheme)) {
        return None;
    }
    let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
    let folder = Path::new(&page.name).parent().unwrap_or(Path::new(""));
    let path = match path {
        "" => PathBuf::from(&page.name),
        path => normal(&folder.join(path)),
    };
    if !path.as_os_str().is_empty() && !root().join(&path).exists() && path != *page.name {
        return Some(format!("the link leads to no file: {target}"));
    }
    if anchor.is_empty() || path.extension().is_none_or(|extension| extension != "md") {
        return None;
    }
    let has = |page: &Page| page.anchors.iter().any(|known| known == anchor);
    let known = match path == *page.name {
        true => has(page),
        false => has(&Page::of("", &fs::read_to_string(root().join(&path)).unwrap())),
    };
    (!known).then(|| format!("the link leads to no heading: {target}"))
}

/// The path without `..`.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => _ = normal.pop(),
            component => normal.push(component),
        }
    }
    normal
}

/// The paths that `a/{b,c}.rs` expands to.
fn alternatives(path: &str) -> Vec<String> {
    let Some((before, rest)) = path.split_once('{') else { return vec![path.to_owned()] };
    let Some((inner, after)) = rest.split_once('}') else { return vec![path.to_owned()] };
    inner.split(',').map(|inner| format!("{before}{inner}{after}")).collect()
}

/// Whether a file or folder has this path or a path that ends with it; `*` matches part of a name.
fn exists(path: &str) -> bool {
    if let Some((before, after)) = path.split_once('*') {
        let matches = |file: &&String| {
            file.match_indices(before).any(|(at, _)| {
                let rest = &file[at + before.len()..];
                (at == 0 || file.as_bytes()[at - 1] == b'/') && rest.contains(after)
            })
        };
        return FILES.iter().any(|file| matches(&file));
    }
    root().join(path).exists()
        || FILES.iter().any(|file| {
            let end = format!("/{path}");
            file.ends_with(&end) || file.contains(&format!("{end}/")) || is_short_for(path, file)
        })
}

/// Whether `nn/gemm.rs` is short for `core/nn/src/gemm.rs`.
fn is_short_for(path: &str, file: &str) -> bool {
    path.split_once('/').is_some_and(|(of, rest)| file.ends_with(&format!("/{of}/src/{rest}")))
}
