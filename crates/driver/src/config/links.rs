//! What carries streams: `UWARP_LINK`.
//!
//! ```text
//! rules = rule *("," rule)                 the first that matches decides; none: auto
//! rule  = link [":" peer [":" port]]
//! link  = "auto" / "tcp" / "memory" / "rd" / "hybrid:" NUMBER
//! peer  = IPv4 ["/" BITS] / "[" IPv6 ["/" BITS] "]" / "*"
//! port  = FIRST ["-" LAST]                 of the end that listens
//! ```

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

/// What carries a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkChoice {
    /// Memory where both ends can, otherwise TCP.
    Auto,
    /// TCP.
    Tcp,
    /// Memory, or none.
    Memory,
    /// Reliable datagrams, or none.
    Rd,
    /// `Auto` while so many peers or fewer have a link of their own, reliable datagrams for all others: who
    /// connects decides ([`crate::places`]).
    Hybrid(u32),
}

impl LinkChoice {
    /// Whether connections by reliable datagrams are among those that it allows.
    pub fn allows_rd(self) -> bool {
        matches!(self, Self::Rd | Self::Hybrid(_))
    }
}

/// The rules of a process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Links(Vec<Rule>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Rule {
    link: LinkChoice,
    /// A network and its bits; `None`: any peer.
    peer: Option<(IpAddr, u8)>,
    ports: (u16, u16),
}

const ANY_PORT: (u16, u16) = (0, u16::MAX);

/// Where no rule matches.
const DEFAULT: LinkChoice = LinkChoice::Auto;

impl Links {
    /// The choice for connections with `peer`, of which the listening end has this port.
    pub fn choose(&self, peer: IpAddr, port: u16) -> LinkChoice {
        let peer = peer.to_canonical();
        let rule = self.0.iter().find(|rule| {
            let (first, last) = rule.ports;
            rule.peer.is_none_or(|network| is_in(peer, network)) && (first..=last).contains(&port)
        });
        rule.map_or(DEFAULT, |rule| rule.link)
    }

    /// Whether a rule chooses reliable datagrams for some connection.
    pub fn may_choose_rd(&self) -> bool {
        self.0.iter().any(|rule| rule.link.allows_rd())
    }

    /// Whether a rule chooses them for some connection of which the listening end has this port.
    pub fn may_choose_rd_at(&self, port: u16) -> bool {
        let is_for = |rule: &&Rule| (rule.ports.0..=rule.ports.1).contains(&port);
        let rules = self.0.iter().filter(is_for);
        let mut possible = rules.scan(false, |is_decided, rule| {
            let goes_on = !*is_decided;
            *is_decided = rule.peer.is_none();
            goes_on.then_some(rule)
        });
        possible.any(|rule| rule.link.allows_rd())
    }

    /// Whether no connection uses memory. (With `hybrid:0` too a peer may connect over TCP, and ask for it.)
    pub fn need_no_memory(&self) -> bool {
        let all = self.0.iter().position(|rule| rule.peer.is_none() && rule.ports == ANY_PORT);
        let (rules, others) = match all {
            Some(last) => (self.0.get(..=last).unwrap_or_default(), LinkChoice::Tcp),
            None => (&*self.0, DEFAULT),
        };
        let needs_none = |link| matches!(link, LinkChoice::Tcp | LinkChoice::Rd);
        needs_none(others) && rules.iter().all(|rule| needs_none(rule.link))
    }
}

impl FromStr for Links {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let rules = text.split(',').map(str::trim).filter(|rule| !rule.is_empty());
        rules
            .map(|rule| Rule::parse(rule).map_err(|reason| format!("the rule \"{rule}\": {reason}")))
            .collect::<Result<_, _>>()
            .map(Self)
    }
}

impl Rule {
    fn parse(text: &str) -> Result<Self, String> {
        let (link, rest) = text.split_once(':').unwrap_or((text, "*"));
        let link = link.trim().to_ascii_lowercase();
        if link == "hybrid" {
            let (most, rest) = rest.split_once(':').unwrap_or((rest, "*"));
            let most = most.trim().parse().map_err(|_| {
                "\"hybrid\" needs the number of peers that get a link of their own: hybrid:N".to_owned()
            })?;
            return Self::of(LinkChoice::Hybrid(most), rest);
        }
        let link = match link.as_str() {
            "auto" => LinkChoice::Auto,
            "tcp" => LinkChoice::Tcp,
            "memory" => LinkChoice::Memory,
            "rd" => LinkChoice::Rd,
            other => return Err(format!("\"{other}\" is none of: auto, tcp, memory, rd, hybrid:N")),
        };
        Self::of(link, rest)
    }

    /// `rest`: the peer and the port.
    fn of(link: LinkChoice, rest: &str) -> Result<Self, String> {
        let rest = rest.trim();
        let (peer, port) = match rest.strip_prefix('[') {
            Some(v6) => {
                let (peer, port) = v6.split_once(']').ok_or("there is no \"]\" behind the address")?;
                let port = match port {
                    "" => None,
                    port => Some(port.strip_prefix(':').ok_or_else(|| format!("\"{port}\" is not :PORT"))?),
                };
                (network(peer)?, port)
            }
            None if rest.matches(':').count() > 1 => {
                return Err(format!("an IPv6 address stands in brackets: [{rest}]"));
            }
            None => {
                let (peer, port) =
                    rest.split_once(':').map_or((rest, None), |(peer, port)| (peer, Some(port)));
                (network(peer)?, port)
            }
        };
        Ok(Self { link, peer, ports: port.map_or(Ok(ANY_PORT), ports)? })
    }
}

/// For logs, in the words of the rules.
impl fmt::Display for LinkChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Tcp => "tcp",
            Self::Memory => "memory",
            Self::Rd => "rd",
            Self::Hybrid(most) => return write!(f, "hybrid:{most}"),
        })
    }
}

fn network(text: &str) -> Result<Option<(IpAddr, u8)>, String> {
    let text = text.trim();
    if text == "*" {
        return Ok(None);
    }
    let (ip, bits) = text.split_once('/').map_or((text, None), |(ip, bits)| (ip, Some(bits)));
    let ip: IpAddr = ip.parse().map_err(|_| format!("\"{ip}\" is not an IP address"))?;
    let most = if ip.is_ipv4() { 32 } else { 128 };
    let bits = bits.map_or(Some(most), |bits| bits.parse().ok().filter(|bits| *bits <= most));
    Ok(Some((ip, bits.ok_or_else(|| format!("\"{text}\" has no number of bits from 0 to {most}"))?)))
}

fn ports(text: &str) -> Result<(u16, u16), String> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    match (first.trim().parse(), last.trim().parse()) {
        (Ok(first @ 1..), Ok(last)) if first <= last => Ok((first, last)),
        _ => Err(format!("\"{text}\" is not a port, or FIRST-LAST, from 1 to 65535")),
    }
}

fn is_in(ip: IpAddr, (network, bits): (IpAddr, u8)) -> bool {
    let same = |a: u128, b: u128, whole: u8| (a ^ b).checked_shr(u32::from(whole - bits)).unwrap_or(0) == 0;
    match (ip, network) {
        (IpAddr::V4(a), IpAddr::V4(b)) => same(a.to_bits().into(), b.to_bits().into(), 32),
        (IpAddr::V6(a), IpAddr::V6(b)) => same(a.to_bits(), b.to_bits(), 128),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choose(rules: &str, peer: &str, port: u16) -> LinkChoice {
        rules.parse::<Links>().unwrap().choose(peer.parse().unwrap(), port)
    }

    #[test]
    fn the_first_rule_that_matches_decides() {
        use LinkChoice::*;
        for (rules, peer, port, link) in [
            ("", "10.0.0.1", 7, Auto),
            ("tcp", "10.0.0.1", 7, Tcp),
            ("Memory", "::1", 7, Memory),
            ("memory:127.0.0.1", "127.0.0.1", 7, Memory),
            ("memory:127.0.0.1", "127.0.0.2", 7, Auto),
            ("memory:127.0.0.1,tcp", "127.0.0.2", 7, Tcp),
            ("memory:127.0.0.0/8,tcp", "127.9.9.9", 7, Memory),
            ("memory:127.0.0.0/8,tcp", "10.0.0.1", 7, Tcp),
            ("memory:127.0.0.0/8", "::ffff:127.0.0.1", 7, Memory),
            ("tcp:10.0.0.1:7471, memory", "10.0.0.1", 7471, Tcp),
            ("tcp:10.0.0.1:7471, memory", "10.0.0.1", 7472, Memory),
            ("tcp:*:7000-7999", "10.0.0.1", 7471, Tcp),
            ("tcp:*:7000-7999,auto", "10.0.0.1", 8000, Auto),
            ("tcp:[fd00::/8]:7471", "fd12::3", 7471, Tcp),
            ("tcp:[fd00::/8]:7471,auto", "fe80::1", 7471, Auto),
            ("tcp:[::1]", "::1", 1, Tcp),
            ("tcp:0.0.0.0/0,auto", "::1", 1, Auto),
            ("rd", "10.0.0.1", 7, Rd),
            ("RD:10.0.0.0/8:7000-7999", "10.9.0.1", 7471, Rd),
            ("rd:10.0.0.0/8:7000-7999", "10.9.0.1", 8000, Auto),
            ("hybrid:8", "10.0.0.1", 7, Hybrid(8)),
            ("Hybrid: 0", "::1", 7, Hybrid(0)),
            ("hybrid:2:10.0.0.0/8:7000-7999,tcp", "10.9.0.1", 7471, Hybrid(2)),
            ("hybrid:2:10.0.0.0/8:7000-7999,tcp", "10.9.0.1", 8000, Tcp),
            ("hybrid:2:[fd00::/8]:7471,rd", "fd12::3", 7471, Hybrid(2)),
            ("auto:10.0.0.1,hybrid:4:*:7471", "10.0.0.1", 7471, Auto),
            ("auto:10.0.0.1,hybrid:4:*:7471", "10.0.0.2", 7471, Hybrid(4)),
        ] {
            assert_eq!(choose(rules, peer, port), link, "{rules} {peer} {port}");
        }
    }

    #[test]
    fn what_has_no_meaning_says_why() {
        for (rules, word) in [
            ("ring", "auto, tcp, memory, rd, hybrid:N"),
            ("tcp:", "not an IP address"),
            ("tcp:host", "not an IP address"),
            ("tcp:fd00::1", "[fd00::1]"),
            ("tcp:[fd00::1", "no \"]\""),
            ("tcp:[fd00::1]7471", ":PORT"),
            ("tcp:10.0.0.0/33", "0 to 32"),
            ("tcp:10.0.0.1:0", "not a port"),
            ("tcp:10.0.0.1:9-7", "not a port"),
            ("hybrid", "hybrid:N"),
            ("hybrid:", "hybrid:N"),
            ("hybrid:-1", "hybrid:N"),
            ("hybrid:10.0.0.1", "hybrid:N"),
            ("hybrid:2:10.0.0.1:0", "not a port"),
            ("memory,tcp:10.0.0.1:", "the rule \"tcp:10.0.0.1:\""),
        ] {
            let error = rules.parse::<Links>().unwrap_err();
            assert!(error.contains(word), "{rules}: {error}");
        }
    }

    #[test]
    fn a_port_listens_for_reliable_datagrams_if_a_rule_may_choose_them() {
        for (rules, port, may) in [
            ("", 7, false),
            ("rd", 7, true),
            ("tcp,rd", 7, false),
            ("tcp:10.0.0.1,rd", 7, true),
            ("rd:10.0.0.1:7", 7, true),
            ("rd:10.0.0.1:7", 8, false),
            ("tcp:*:1-100,rd", 7, false),
            ("tcp:*:1-100,rd", 101, true),
            ("hybrid:0", 7, true),
            ("hybrid:9:10.0.0.1:7", 7, true),
            ("hybrid:9:10.0.0.1:7", 8, false),
            ("tcp,hybrid:9", 7, false),
        ] {
            let links: Links = rules.parse().unwrap();
            assert_eq!(links.may_choose_rd_at(port), may, "{rules} {port}");
            assert!(links.may_choose_rd() || !may, "{rules}");
        }
    }

    #[test]
    fn only_rules_for_tcp_need_no_memory() {
        for (rules, need_no_memory) in [
            ("tcp", true),
            ("tcp:10.0.0.1,tcp", true),
            ("tcp,memory", true),
            ("", false),
            ("tcp:10.0.0.1", false),
            ("tcp:10.0.0.1,auto", false),
            ("memory:10.0.0.1,tcp", false),
            ("rd", true),
            ("rd:10.0.0.1", false),
            ("rd:10.0.0.1,tcp", true),
            ("hybrid:4", false),
            ("hybrid:0", false),
            ("hybrid:4:10.0.0.1,tcp", false),
            ("tcp,hybrid:4", true),
        ] {
            assert_eq!(rules.parse::<Links>().unwrap().need_no_memory(), need_no_memory, "{rules}");
        }
    }
}
