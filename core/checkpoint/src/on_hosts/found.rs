//! Finding checkpoints in the memory of hosts that still have all their files.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::manifest::MANIFEST;
use crate::{CheckpointIO, Manifest, Result};
use fulgurite_engine::checkpoint_io::{is_temporary, replaced_base};

/// The part of a checkpoint that one host has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostPart {
    /// The checkpoint's name.
    pub name: String,
    /// The place of the host's checkpoints.
    pub root: PathBuf,
    /// The manifest's digest. Parts with the same name and digest are of the same save.
    pub digest: Option<String>,
    /// All files of the checkpoint, and their lengths.
    pub all: BTreeMap<String, u64>,
    /// The files that the host has, and their lengths.
    pub here: BTreeMap<String, u64>,
}

/// Returns the parts of committed checkpoints in `io`, a host's place. Not collective.
///
/// # Errors
/// If the place cannot be listed, or a file in it cannot be read.
pub fn parts_on_host(io: &dyn CheckpointIO) -> Result<Vec<HostPart>> {
    let mut parts = Vec::new();
    for entry in io.list("")?.into_iter().filter(|entry| entry.is_directory) {
        let name = entry.name;
        if is_temporary(&name) || replaced_base(&name).is_some() {
            continue;
        }
        let path = format!("{name}/{MANIFEST}");
        let found = io.load(&path).and_then(|bytes| {
            let manifest = Manifest::parse(&bytes, &io.location(&path))?;
            Ok((manifest, bytes.len() as u64))
        });
        let (manifest, len) = match found {
            Ok(found) => found,
            Err(error) => {
                tracing::warn!("a copy of the state is not used: {error}");
                continue;
            }
        };
        let mut all = manifest.files;
        let folders: BTreeSet<&str> =
            all.keys().map(|file| file.rsplit_once('/').map_or("", |(folder, _)| folder)).collect();
        let mut here = BTreeMap::new();
        for folder in folders {
            for file in io.list(&format!("{name}/{folder}"))? {
                here.insert(format!("{folder}/{}", file.name), file.bytes);
            }
        }
        all.insert(MANIFEST.to_owned(), len);
        here.insert(MANIFEST.to_owned(), len);
        here.retain(|file, len| all.get(file) == Some(len));
        let (root, digest) = (io.location(""), manifest.digest);
        parts.push(HostPart { name, root, digest, all, here });
    }
    Ok(parts)
}

/// A checkpoint in the memory of hosts, with all its files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OnHosts {
    /// The checkpoint's name.
    pub name: String,
    /// The place of each host's checkpoints; `None` for a host without a part.
    pub(super) roots: Vec<Option<PathBuf>>,
    /// All files.
    pub(super) files: BTreeMap<String, Found>,
}

/// A file that hosts have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) bytes: u64,
    /// The hosts that have it, at least one.
    pub(super) hosts: Vec<usize>,
}

/// Returns the checkpoints of which all files are on hosts, given each host's parts.
pub fn whole_on_hosts(parts: &[Vec<HostPart>]) -> Vec<OnHosts> {
    // By name and digest: the hosts that have parts of a save.
    let mut saves: BTreeMap<_, Vec<(usize, &HostPart)>> = BTreeMap::new();
    for (host, parts) in parts.iter().enumerate() {
        for part in parts {
            saves.entry((&part.name, &part.digest)).or_default().push((host, part));
        }
    }
    let whole = saves.into_iter().filter_map(|((name, _), held)| {
        let (_, first) = held.first()?;
        let mut files = BTreeMap::new();
        for (file, bytes) in &first.all {
            let has = held.iter().filter(|(_, part)| part.here.get(file) == Some(bytes));
            let hosts: Vec<usize> = has.map(|(host, _)| *host).collect();
            if hosts.is_empty() {
                return None;
            }
            files.insert(file.clone(), Found { bytes: *bytes, hosts });
        }
        let mut roots = vec![None; parts.len()];
        for (host, part) in &held {
            roots[*host] = Some(part.root.clone());
        }
        Some(OnHosts { name: name.clone(), roots, files })
    });
    whole.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(name: &str, digest: &str, here: &[&str]) -> HostPart {
        let files = |names: &[&str]| names.iter().map(|name| ((*name).to_owned(), 8)).collect();
        HostPart {
            name: name.to_owned(),
            root: PathBuf::from("/memory"),
            digest: Some(digest.to_owned()),
            all: files(&["model/1", "model/2", "model/3"]),
            here: files(here),
        }
    }

    fn names(parts: &[Vec<HostPart>]) -> Vec<String> {
        whole_on_hosts(parts).into_iter().map(|whole| whole.name).collect()
    }

    #[test]
    fn files_of_two_hosts_make_a_whole() {
        let first = vec![part("a", "x", &["model/1", "model/3"])];
        let second = vec![part("a", "x", &["model/1", "model/2"])];
        let found = whole_on_hosts(&[first.clone(), Vec::new(), second]);
        assert_eq!(found[0].files["model/1"].hosts, [0, 2]);
        assert_eq!(found[0].files["model/2"].hosts, [2]);
        assert_eq!(found[0].roots[1], None);
        assert_eq!(names(&[first]), [""; 0]);
    }

    #[test]
    fn parts_of_two_saves_are_not_mixed() {
        let first = vec![part("a", "x", &["model/1", "model/3"])];
        let second = vec![
            part("a", "y", &["model/1", "model/2"]),
            part("b", "z", &["model/1", "model/2", "model/3"]),
        ];
        assert_eq!(names(&[first, second]), ["b"]);
    }

    #[test]
    fn a_shorter_file_is_none() {
        let mut torn = part("a", "x", &["model/1", "model/2", "model/3"]);
        torn.here.insert("model/2".to_owned(), 7);
        assert_eq!(names(&[vec![torn]]), [""; 0]);
    }
}
