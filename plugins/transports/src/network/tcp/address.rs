//! The address that a rank listens on.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};

use fulgurite_core::collective::GroupContext;
use fulgurite_core::{Error, Result, advice};

use super::config::Tcp;

/// Listens at the configured address.
pub(super) fn listen(config: &Tcp, context: &GroupContext) -> Result<TcpListener> {
    let ip = address(config, context)?;
    let [first, last] = config.ports.unwrap_or([0, 0]);
    let mut refused = None;
    for port in first..=last {
        match TcpListener::bind(SocketAddr::new(ip, port)) {
            Ok(listener) => return Ok(listener),
            Err(error) => refused = Some(error),
        }
    }
    let why = refused.map_or_else(String::new, |e| format!(": {e}{}", advice(&e)));
    let ports = match config.ports {
        None => String::new(),
        Some(_) => format!(", on any of the ports {first} to {last} (trainer.process_group.ports)"),
    };
    Err(Error::Launch(format!("rank {} cannot listen at {ip}{ports}{why}", context.rank)))
}

fn address(config: &Tcp, context: &GroupContext) -> Result<IpAddr> {
    if let Some(interface) = &config.interface {
        return of_interface(interface);
    }
    if context.local_world_size == context.world_size {
        return Ok(Ipv4Addr::LOCALHOST.into());
    }
    context.address.ok_or_else(|| {
        Error::Launch(
            "it is not known at which address the ranks of other hosts reach this one; name the network \
             interface: trainer.process_group = { type = \"tcp\", interface = \"eth0\" }"
                .to_owned(),
        )
    })
}

/// Returns the address of an interface of this host, given by name or address. Prefers IPv4 to
/// IPv6.
fn of_interface(interface: &str) -> Result<IpAddr> {
    if let Ok(ip) = interface.parse() {
        return Ok(ip);
    }
    let all = if_addrs::get_if_addrs()
        .map_err(|e| Error::Launch(format!("listing the network interfaces of this host: {e}")))?;
    let mut own: Vec<IpAddr> =
        all.iter().filter(|one| one.name == interface).map(|one| one.ip()).collect();
    own.sort_by_key(IpAddr::is_ipv6);
    own.first().copied().ok_or_else(|| {
        let mut names: Vec<&str> = all.iter().map(|one| one.name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        Error::Config(format!(
            "trainer.process_group.interface is `{interface}`; this host has no such network interface \
             with an address, but {}",
            names.join(", ")
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interface_is_found_by_name_or_address() {
        assert_eq!(of_interface("lo").unwrap(), IpAddr::from(Ipv4Addr::LOCALHOST));
        assert_eq!(of_interface("::1").unwrap(), "::1".parse::<IpAddr>().unwrap());
        let error = of_interface("no0").unwrap_err().to_string();
        assert!(error.contains("`no0`") && error.contains("lo"), "{error}");
    }
}
