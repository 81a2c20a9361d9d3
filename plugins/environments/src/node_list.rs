//! Slurm's compressed lists of host names.

/// Returns the first host of a Slurm node list: `alpha[3,1], beta` → `alpha3`. `None` if the list
/// is empty or malformed.
pub(crate) fn first_node(list: &str) -> Option<String> {
    let mut name = String::new();
    let mut rest = list.trim_start();
    loop {
        let end = rest.find([',', ' ', '\t', '[']).unwrap_or(rest.len());
        name.push_str(&rest[..end]);
        rest = &rest[end..];
        let Some(bracket) = rest.strip_prefix('[') else { break };
        let (ranges, after) = bracket.split_once(']')?;
        let first = ranges.split([',', '-']).next().unwrap_or_default().trim();
        if first.is_empty() {
            return None;
        }
        name.push_str(first);
        rest = after;
    }
    let clean = !name.is_empty() && !name.contains(']');
    clean.then_some(name)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_first_host_of_a_list() {
        for (list, first) in [
            ("alpha", "alpha"),
            ("alpha,beta", "alpha"),
            ("alpha beta", "alpha"),
            ("1.2.3.[100-110]", "1.2.3.100"),
            ("1.2.3.[089, 100-110]", "1.2.3.089"),
            ("host[22]", "host22"),
            ("host[22,5-9],other", "host22"),
            ("rack[1-2]node[003-010]", "rack1node003"),
            ("host[1,5-9]", "host1"),
            ("host[5-9,1]", "host5"),
            ("alpha[3,1], beta", "alpha3"),
            ("a-b[01-03]-ib0,c", "a-b01-ib0"),
            ("  lead", "lead"),
        ] {
            assert_eq!(first_node(list).as_deref(), Some(first), "{list}");
        }
    }

    #[test]
    fn malformed_lists_have_no_first_host() {
        for list in ["", " ", ",a", "host[", "host[1", "host[]", "host]", "[,]"] {
            assert_eq!(first_node(list), None, "{list}");
        }
    }

    proptest! {
        #[test]
        fn never_panics(list in ".*") {
            if let Some(host) = first_node(&list) {
                prop_assert!(!host.is_empty());
            }
        }
    }
}
