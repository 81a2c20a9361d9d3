//! Assignment of devices to ranks.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Error, Result, counted};

/// The host and devices a rank sees.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankDevices {
    /// The rank's host.
    pub host: String,
    /// The kind of device it would take.
    pub kind: String,
    /// Identifiers of the devices of this kind it may use; `None`: the host, which all ranks share.
    pub devices: Option<Vec<String>>,
}

/// The index of each rank's device, among the devices it sees.
///
/// Ranks of a host that see the same devices take them in rank order. A rank that its launcher
/// bound to its own devices takes the first.
///
/// # Errors
/// The same on all ranks: if kinds differ between ranks, or if a host has more ranks than devices
/// and devices are not `shared`.
pub fn place(ranks: &[RankDevices], shared: bool) -> Result<Vec<usize>> {
    let error = |message: String| Err(Error::Config(format!("`trainer.accelerator`: {message}")));
    if let Some(rank) = ranks.iter().position(|one| one.kind != ranks[0].kind) {
        let of =
            |rank: usize| format!("rank {rank} on {} has `{}`", ranks[rank].host, ranks[rank].kind);
        return error(format!("{}, {}: name one that all hosts have", of(0), of(rank)));
    }
    let mut indices = Vec::with_capacity(ranks.len());
    let mut taken = BTreeMap::<(&str, &str), usize>::new();
    for (rank, own) in ranks.iter().enumerate() {
        let Some(devices) = &own.devices else {
            indices.push(0);
            continue;
        };
        let on_host = || ranks.iter().filter(|other| other.host == own.host);
        let local_rank = ranks[..rank].iter().filter(|other| other.host == own.host).count();
        let index = match on_host().all(|other| other.devices == own.devices) {
            true if devices.is_empty() => {
                return error(format!("rank {rank} sees no {} device on {}", own.kind, own.host));
            }
            true if shared => local_rank % devices.len(),
            true if local_rank >= devices.len() => {
                return error(format!(
                    "{} on {}, which has {}. Start as many ranks as there are devices; \
                     {{ type = \"{}\", shared = true }} lets several take one, which is slow",
                    counted(on_host().count(), "rank"),
                    own.host,
                    counted(devices.len(), &format!("{} device", own.kind)),
                    own.kind
                ));
            }
            true => local_rank,
            false => 0,
        };
        let Some(device) = devices.get(index) else {
            return error(format!("rank {rank} sees no {} device on {}", own.kind, own.host));
        };
        if let Some(other) = taken.insert((&own.host, device), rank).filter(|_| !shared) {
            return error(format!(
                "ranks {other} and {rank} on {} would take the same device, {device}, as they see different ones: \
                 bind each rank to one of its own, or none to any",
                own.host
            ));
        }
        indices.push(index);
    }
    Ok(indices)
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    fn rank(host: &str, devices: &[&str]) -> RankDevices {
        let devices = devices.iter().map(|&id| id.to_owned()).collect();
        RankDevices { host: host.to_owned(), kind: "cuda".to_owned(), devices: Some(devices) }
    }

    #[test]
    fn host_ranks_take_devices_in_order() {
        let (a, b) = (rank("a", &["0", "1"]), rank("b", &["0", "1"]));
        // The order of hosts does not matter.
        let ranks = [a.clone(), b.clone(), a.clone(), b];
        assert_eq!(place(&ranks, false).unwrap(), [0, 0, 1, 1]);
        // Bound by a launcher.
        let bound = [rank("a", &["0"]), rank("a", &["1"]), rank("b", &["0"])];
        assert_eq!(place(&bound, false).unwrap(), [0, 0, 0]);
        // Host cores are shared by all ranks.
        let host = RankDevices { devices: None, ..a };
        assert_eq!(place(&[host.clone(), host], false).unwrap(), [0, 0]);
    }

    #[test]
    fn unshared_device_has_one_rank() {
        let three = [(); 3].map(|()| rank("a", &["0", "1"]));
        assert_eq!(place(&three, true).unwrap(), [0, 1, 0]);
        assert_says!(place(&three, false).unwrap_err(), "`trainer.accelerator`: 3 … 2 cuda …");
        let overlapping = [rank("a", &["0", "1"]), rank("a", &["0"])];
        assert_says!(
            place(&overlapping, false).unwrap_err(),
            "`trainer.accelerator`: ranks 0 and 1 on a … take the same device, 0 … bind each …"
        );
        assert_says!(
            place(&[rank("a", &[])], true).unwrap_err(),
            "`trainer.accelerator`: rank 0 sees no cuda device on a"
        );
        assert_says!(
            place(&[rank("a", &["0"]), rank("a", &[])], false).unwrap_err(),
            "`trainer.accelerator`: rank 1 sees no cuda device on a"
        );
        let other = RankDevices { kind: "cpu".to_owned(), devices: None, ..rank("b", &[]) };
        assert_says!(
            place(&[rank("a", &["0"]), other], false).unwrap_err(),
            "`trainer.accelerator`: rank 0 on a has `cuda`, rank 1 on b has `cpu` …"
        );
    }
}
