//! Collectives on serialisable values, for control messages. Not for bulk data.

use candle_core::{DType, Device, Tensor};
use serde::Serialize;
use serde::de::DeserializeOwned;
use twox_hash::XxHash3_64;

use super::{AllGather, Collective, ProcessGroup};
use crate::{Error, Result};
use fulgurite_tensor::execution::read;

/// Sends group rank `src`'s value to every rank. Collective; other ranks' `value` is ignored.
pub fn broadcast_object<T: Serialize + DeserializeOwned>(
    group: &dyn ProcessGroup,
    value: &T,
    src: usize,
) -> Result<T> {
    let bytes = to_bytes(value)?;
    let len = Tensor::new(&[bytes.len() as i64], &Device::Cpu)?;
    group.run(Collective::broadcast(&len, src))?;
    let len = read::host::<i64>(&len)?[0] as usize;
    // Other ranks' own bytes stay if the group's ranks do not run (`DryRunGroup`).
    let mut bytes = bytes;
    bytes.resize(len, 0);
    let buffer = Tensor::from_vec(bytes, len, &Device::Cpu)?;
    group.run(Collective::broadcast(&buffer, src))?;
    from_bytes(&read::host::<u8>(&buffer)?)
}

/// Gathers every rank's value, in rank order. Collective.
pub fn all_gather_object<T: Serialize + DeserializeOwned>(
    group: &dyn ProcessGroup,
    value: &T,
) -> Result<Vec<T>> {
    let bytes = to_bytes(value)?;
    let own = Tensor::new(&[bytes.len() as i64], &Device::Cpu)?;
    let lens = Tensor::zeros(group.size(), DType::I64, &Device::Cpu)?;
    let part = AllGather::even(&lens, &own, group.size());
    group.run(Collective::all_gather_into(vec![part]))?;
    let counts: Vec<usize> = read::host::<i64>(&lens)?.into_iter().map(|n| n as usize).collect();
    let input = Tensor::from_vec(bytes, counts[group.rank()], &Device::Cpu)?;
    let output = Tensor::zeros(counts.iter().sum::<usize>(), DType::U8, &Device::Cpu)?;
    let part = AllGather { input, output: output.clone(), counts: counts.clone() };
    group.run(Collective::all_gather_into(vec![part]))?;
    let all = read::host::<u8>(&output)?;
    let mut rest = all.as_slice();
    counts
        .into_iter()
        .map(|n| {
            let (head, tail) = rest.split_at(n);
            rest = tail;
            from_bytes(head)
        })
        .collect()
}

/// The first difference between the ranks' lists: the first rank whose list differs from rank 0's,
/// and its first differing line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// The group rank.
    pub rank: usize,
    /// The line's index.
    pub index: usize,
    /// The line on rank 0; `nothing` if its list has ended.
    pub here: String,
    /// The line on `rank`; `nothing` if its list has ended.
    pub there: String,
}

/// Compares a list that should be the same on all ranks. Every rank gets the first difference, or
/// `None`. Collective.
///
/// # Errors
/// If a peer fails.
pub fn first_difference(group: &dyn ProcessGroup, lines: &[String]) -> Result<Option<Difference>> {
    let digest = XxHash3_64::oneshot(lines.join("\n").as_bytes());
    // The lists are gathered only if their digests differ.
    if all_gather_object(group, &digest)?.windows(2).all(|pair| pair[0] == pair[1]) {
        return Ok(None);
    }
    let all = all_gather_object(group, &lines.to_vec())?;
    let line = |rank: usize, index: usize| all[rank].get(index).map_or("nothing", String::as_str);
    Ok((1..all.len()).find_map(|rank| {
        let longest = all[rank].len().max(all[0].len());
        let index = (0..longest).find(|&i| all[rank].get(i) != all[0].get(i))?;
        let (here, there) = (line(0, index).to_owned(), line(rank, index).to_owned());
        Some(Difference { rank, index, here, there })
    }))
}

fn to_bytes<T: Serialize>(value: &T) -> Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(|e| Error::other(format!("encoding a control message: {e}")))
}

fn from_bytes<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes)
        .map_err(|e| Error::other(format!("decoding a control message: {e}")))
}
