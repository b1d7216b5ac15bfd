//! Rules: which TCP sockets become iWARP's, and how the two ends agree (docs/sockets.md).
//!
//! ```text
//! rules     = rule *( (";" / newline) rule)       the first that matches decides; none: TCP
//! rule      = way [":" condition *("," condition)]
//! way       = "rsockets" / "upgrade" / "tcp"
//! condition = "all" / "port=" FIRST ["-" LAST] / "address=" IP ["/" BITS]
//!           / "connect" / "listen" / "fallback"
//!           / "key=" FILE / "no-other-users"          of "upgrade": who is believed on other hosts
//! ```
//!
//! Conditions of one kind are alternatives; those of different kinds must all hold.

use std::fmt;
use std::fs::OpenOptions;
use std::io::{ErrorKind, Read};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};

/// The environment variable with rules, or with `@` and a file's name.
pub const VARIABLE: &str = "UWARP_SOCKETS";

/// What a socket becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// It stays the kernel's.
    Tcp,
    /// An rsocket. `fallback`: if it cannot connect, it connects by TCP.
    Rsockets {
        /// See above.
        fallback: bool,
    },
    /// A TCP connection, which becomes the iWARP stream itself if the peer's end agrees.
    Upgrade(Trust),
}

/// Which claims of another host's ends are believed. On this host the kernel is asked, whatever the rule
/// says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trust {
    /// None: connections to other hosts stay TCP.
    ThisHost,
    /// All: the user says that the hosts have no other users.
    NoOtherUsers,
    /// Those made with this key.
    Key(Key),
}

/// A key that the hosts of a rule share.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Key(pub [u8; 16]);

/// Without the key.
impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key")
    }
}

/// The user whose rights this process has. (The owner of its directory in /proc may be root instead.)
fn own_user() -> Option<u32> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    status.lines().find_map(|line| line.strip_prefix("Uid:"))?.split_ascii_whitespace().nth(1)?.parse().ok()
}

impl Key {
    /// Reads a file with 32 hexadecimal digits, which other users cannot read or change.
    fn read(file: &str) -> Result<Self, String> {
        const MAKE: &str = "make one by: (umask 077; head -c 16 /dev/urandom | od -An -tx1 > FILE)";
        if !file.starts_with('/') {
            return Err(format!("\"{file}\" is not an absolute path, and programs change their directory"));
        }
        let failed = |error: std::io::Error| match error.kind() {
            ErrorKind::NotFound => format!("there is no key in {file}: {MAKE}"),
            kind => format!("cannot read the key in {file}: {kind}"),
        };
        // Opening a pipe would wait.
        let mut options = OpenOptions::new();
        let mut from = options.read(true).custom_flags(libc::O_NONBLOCK).open(file).map_err(failed)?;
        let about = from.metadata().map_err(failed)?;
        if !about.is_file() {
            return Err(format!("{file} is not a regular file: {MAKE}"));
        }
        if about.mode() & 0o027 != 0 {
            return Err(format!("other users of this host can use the key in {file}: chmod g-w,o= {file}"));
        }
        let own = own_user().unwrap_or(about.uid());
        if about.uid() != 0 && about.uid() != own {
            return Err(format!("the key in {file} belongs to another user ({}): chown it", about.uid()));
        }
        let mut text = String::new();
        from.by_ref().take(200).read_to_string(&mut text).map_err(failed)?;
        let digits: Option<Vec<u8>> = text
            .chars()
            .filter(|digit| !digit.is_whitespace())
            .map(|digit| digit.to_digit(16).and_then(|digit| u8::try_from(digit).ok()))
            .collect();
        let pair = |two: &[u8]| two.iter().fold(0, |all, four| all << 4 | four);
        let bytes = digits.filter(|all| all.len() == 32).map(|all| all.chunks(2).map(pair).collect());
        let key = bytes.and_then(|bytes: Vec<u8>| bytes.try_into().ok());
        key.map(Self).ok_or_else(|| format!("{file} is not a key of 32 hexadecimal digits: {MAKE}"))
    }
}

/// What a socket does when a rule decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// It connects; the address is the peer's.
    Connect,
    /// It listens; the address is its own. The address of a rule for upgrades is the peer's, which is not
    /// known then: such a rule applies to listeners whatever its address, and [`Rules::upgrades`] decides.
    Listen,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Rule {
    way: Way,
    ports: Vec<(u16, u16)>,
    networks: Vec<(IpAddr, u8)>,
    roles: Vec<Role>,
}

/// A list of rules.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rules(Vec<Rule>);

/// Why a text has no meaning.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Malformed {
    rule: String,
    reason: String,
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the rule \"{}\": {}", self.rule, self.reason)
    }
}

impl Rules {
    /// Reads rules. In a line, `#` begins a comment.
    pub fn parse(text: &str) -> Result<Self, Malformed> {
        let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default());
        let rules = lines.flat_map(|line| line.split(';')).map(str::trim).filter(|rule| !rule.is_empty());
        let parsed =
            rules.map(|rule| Rule::parse(rule).map_err(|reason| Malformed { rule: rule.to_owned(), reason }));
        parsed.collect::<Result<_, _>>().map(Self)
    }

    /// Reads what a user gave: rules, or `@` and the name of a file with rules.
    pub fn read(given: &str) -> Result<Self, String> {
        let Some(file) = given.strip_prefix('@') else {
            return Self::parse(given).map_err(|malformed| malformed.to_string());
        };
        let text = std::fs::read_to_string(file).map_err(|error| match error.kind() {
            ErrorKind::NotFound => format!("there is no file {file}"),
            kind => format!("cannot read {file}: {kind}"),
        })?;
        Self::parse(&text).map_err(|malformed| format!("{file}: {malformed}"))
    }

    /// Whether no socket is anything but the kernel's.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|rule| rule.way == Way::Tcp)
    }

    /// What a socket becomes.
    pub fn decide(&self, role: Role, address: SocketAddr) -> Way {
        self.0.iter().find(|rule| rule.matches(role, address)).map_or(Way::Tcp, |rule| rule.way)
    }

    /// Whether a connection that a listener of the kernel has accepted may become iWARP's, and who is
    /// believed then. `own`: its address at this end.
    pub fn upgrades(&self, own: SocketAddr, peer: IpAddr) -> Option<Trust> {
        let applies = |rule: &&Rule| match rule.way {
            Way::Upgrade(_) => rule.matches(Role::Listen, own) && rule.has_address(peer.to_canonical()),
            _ => rule.matches(Role::Listen, own),
        };
        match self.0.iter().find(applies)?.way {
            Way::Upgrade(trust) => Some(trust),
            _ => None,
        }
    }
}

impl Rule {
    fn parse(text: &str) -> Result<Self, String> {
        let (way, conditions) = text.split_once(':').unwrap_or((text, ""));
        let mut rule = Self {
            way: match way.trim() {
                "rsockets" => Way::Rsockets { fallback: false },
                "upgrade" => Way::Upgrade(Trust::ThisHost),
                "tcp" => Way::Tcp,
                other => return Err(format!("\"{other}\" is none of: rsockets, upgrade, tcp")),
            },
            ports: Vec::new(),
            networks: Vec::new(),
            roles: Vec::new(),
        };
        for condition in conditions.split(',').map(str::trim).filter(|condition| !condition.is_empty()) {
            rule.condition(condition)?;
        }
        Ok(rule)
    }

    fn condition(&mut self, text: &str) -> Result<(), String> {
        match text.split_once('=').map_or((text, None), |(name, value)| (name.trim(), Some(value.trim()))) {
            ("all", None) => {}
            ("connect", None) => self.roles.push(Role::Connect),
            ("listen", None) => self.roles.push(Role::Listen),
            ("fallback", None) => match &mut self.way {
                Way::Rsockets { fallback } => *fallback = true,
                Way::Tcp => return Err("\"fallback\" has no meaning for tcp".to_owned()),
                Way::Upgrade(_) => {
                    return Err("\"fallback\" has no meaning for upgrade, which begins as TCP".to_owned());
                }
            },
            ("no-other-users", None) => self.trust(text, Trust::NoOtherUsers)?,
            ("key", Some(file)) => self.trust(text, Trust::Key(Key::read(file)?))?,
            ("port", Some(value)) => self.ports.push(ports(value)?),
            ("address", Some(value)) => self.networks.push(network(value)?),
            _ => {
                return Err(format!(
                    "\"{text}\" is none of: all, port=FIRST[-LAST], address=IP[/BITS], connect, listen, \
                     fallback, key=FILE, no-other-users"
                ));
            }
        }
        Ok(())
    }

    fn trust(&mut self, text: &str, new: Trust) -> Result<(), String> {
        match &mut self.way {
            Way::Upgrade(trust @ Trust::ThisHost) => *trust = new,
            Way::Upgrade(_) => {
                return Err(format!("\"{text}\" is one too many: write one key, or no-other-users"));
            }
            _ => return Err(format!("\"{text}\" has a meaning for upgrade only")),
        }
        Ok(())
    }

    fn matches(&self, role: Role, address: SocketAddr) -> bool {
        let (ip, port) = (address.ip().to_canonical(), address.port());
        (self.roles.is_empty() || self.roles.contains(&role))
            && (self.ports.is_empty()
                || self.ports.iter().any(|(first, last)| (first..=last).contains(&&port)))
            && (matches!((self.way, role), (Way::Upgrade(_), Role::Listen)) || self.has_address(ip))
    }

    fn has_address(&self, ip: IpAddr) -> bool {
        self.networks.is_empty() || self.networks.iter().any(|network| is_in(ip, *network))
    }
}

fn ports(text: &str) -> Result<(u16, u16), String> {
    let port = |text: &str| {
        let port = text.trim().parse().ok().filter(|port| *port > 0);
        port.ok_or_else(|| format!("\"{text}\" is not a port: write a number from 1 to 65535"))
    };
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let (first, last) = (port(first)?, port(last)?);
    if first > last {
        return Err(format!("the first port, {first}, is above the last, {last}"));
    }
    Ok((first, last))
}

fn network(text: &str) -> Result<(IpAddr, u8), String> {
    let (ip, bits) = text.split_once('/').map_or((text, None), |(ip, bits)| (ip, Some(bits)));
    let ip: IpAddr = ip.trim().parse().map_err(|_| {
        format!(
            "\"{ip}\" is not an IP address: write one such as 10.0.0.0 or fd00::, with /BITS for a network"
        )
    })?;
    let most = if ip.is_ipv4() { 32 } else { 128 };
    let bits = match bits {
        None => most,
        Some(bits) => bits
            .trim()
            .parse()
            .ok()
            .filter(|bits| *bits <= most)
            .ok_or_else(|| format!("\"{bits}\" is not a number of bits from 0 to {most}"))?,
    };
    Ok((ip, bits))
}

fn is_in(ip: IpAddr, (network, bits): (IpAddr, u8)) -> bool {
    let differ = |a: u128, b: u128, whole: u8| (a ^ b).checked_shr(u32::from(whole - bits)).unwrap_or(0) != 0;
    match (ip, network) {
        (IpAddr::V4(a), IpAddr::V4(b)) => !differ(a.to_bits().into(), b.to_bits().into(), 32),
        (IpAddr::V6(a), IpAddr::V6(b)) => !differ(a.to_bits(), b.to_bits(), 128),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const RSOCKETS: Way = Way::Rsockets { fallback: false };

    fn decide(rules: &str, role: Role, address: &str) -> Way {
        Rules::parse(rules).unwrap().decide(role, address.parse().unwrap())
    }

    #[test]
    fn the_first_rule_that_matches_decides() {
        use Role::*;
        for (rules, role, address, way) in [
            ("", Connect, "10.0.0.1:80", Way::Tcp),
            ("rsockets", Listen, "[::]:1", RSOCKETS),
            ("rsockets:all", Connect, "10.0.0.1:80", RSOCKETS),
            ("rsockets:port=80", Connect, "10.0.0.1:80", RSOCKETS),
            ("rsockets:port=80", Connect, "10.0.0.1:81", Way::Tcp),
            ("rsockets:port=80-90,port=5", Connect, "10.0.0.1:90", RSOCKETS),
            ("rsockets:port=80-90,port=5", Connect, "10.0.0.1:5", RSOCKETS),
            ("rsockets:port=80-90,port=5", Connect, "10.0.0.1:91", Way::Tcp),
            ("tcp:port=22; rsockets:all,fallback", Connect, "[::1]:22", Way::Tcp),
            ("tcp:port=22; rsockets:all,fallback", Connect, "[::1]:23", Way::Rsockets { fallback: true }),
            ("rsockets:listen", Connect, "10.0.0.1:80", Way::Tcp),
            ("rsockets:listen", Listen, "10.0.0.1:80", RSOCKETS),
            ("rsockets:address=10.1.0.0/16", Connect, "10.1.2.3:1", RSOCKETS),
            ("rsockets:address=10.1.0.0/16", Connect, "[::ffff:10.1.2.3]:1", RSOCKETS),
            ("rsockets:address=10.1.0.0/16", Connect, "10.2.2.3:1", Way::Tcp),
            ("rsockets:address=10.1.0.0/16", Connect, "[fd00::1]:1", Way::Tcp),
            ("rsockets:address=0.0.0.0/0", Connect, "10.2.2.3:1", RSOCKETS),
            ("rsockets:address=::/0", Connect, "[fd00::1]:1", RSOCKETS),
            ("rsockets:address=fd00::1", Connect, "[fd00::2]:1", Way::Tcp),
            ("# all\nrsockets : port = 7 # one\n", Connect, "10.0.0.1:7", RSOCKETS),
        ] {
            assert_eq!(decide(rules, role, address), way, "{rules} {address}");
        }
    }

    #[test]
    fn a_rule_for_upgrades_is_looked_at_again_with_the_peers_address() {
        use Role::*;
        let near = "upgrade:port=80,address=10.1.0.0/16";
        for (rules, peer, upgrades) in [
            ("upgrade", "10.2.0.1", true),
            (near, "10.1.0.1", true),
            (near, "::ffff:10.1.0.1", true),
            (near, "10.2.0.1", false),
            ("upgrade:port=81", "10.1.0.1", false),
            ("upgrade:connect", "10.1.0.1", false),
            ("tcp:port=80;upgrade", "10.1.0.1", false),
            ("rsockets:connect;upgrade:listen", "10.1.0.1", true),
        ] {
            let own = "192.168.0.1:80".parse().unwrap();
            let read = Rules::parse(rules).unwrap();
            assert_eq!(read.upgrades(own, peer.parse().unwrap()).is_some(), upgrades, "{rules} {peer}");
        }
        assert_eq!(decide(near, Listen, "0.0.0.0:80"), Way::Upgrade(Trust::ThisHost));
        assert_eq!(decide(near, Connect, "10.1.0.1:80"), Way::Upgrade(Trust::ThisHost));
        let word = Way::Upgrade(Trust::NoOtherUsers);
        assert_eq!(decide("upgrade:all,no-other-users", Connect, "10.1.0.1:80"), word);
        assert_eq!(decide(near, Connect, "10.2.0.1:80"), Way::Tcp);
    }

    #[test]
    fn errors_say_what_can_be_written() {
        for (rules, part) in [
            ("udp", "\"udp\" is none of: rsockets, upgrade, tcp"),
            ("upgrade:fallback", "no meaning for upgrade"),
            ("rsockets:port=0", "\"0\" is not a port"),
            ("rsockets:port=9-8", "the first port, 9, is above the last, 8"),
            ("rsockets:port", "\"port\" is none of: all, port=FIRST[-LAST]"),
            ("rsockets:address=host", "\"host\" is not an IP address"),
            ("rsockets:address=10.0.0.0/33", "\"33\" is not a number of bits from 0 to 32"),
            ("tcp:fallback", "no meaning for tcp"),
            ("rsockets:no-other-users", "\"no-other-users\" has a meaning for upgrade only"),
            ("upgrade:key=secret", "\"secret\" is not an absolute path"),
            ("upgrade:key=/does/not/exist", "there is no key in /does/not/exist: make one by: "),
            ("upgrade:key", "\"key\" is none of: all"),
            ("upgrade:no-other-users,no-other-users", "is one too many"),
        ] {
            let text = Rules::parse(rules).unwrap_err().to_string();
            assert!(text.contains(part) && text.contains(rules), "{text}");
        }
        assert!(Rules::read("@/does/not/exist").unwrap_err().contains("there is no file /does/not/exist"));
    }

    #[test]
    fn a_key_is_read_from_a_file_that_other_users_cannot_use() {
        let file = std::env::temp_dir().join(format!("uwarp-key-{}", std::process::id()));
        let path = file.display();
        let rules = format!("upgrade:key={path}");
        let read = |text: &str, mode: u32| {
            std::fs::write(&file, text).unwrap();
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
            Rules::parse(&rules).map_err(|error| error.to_string())
        };
        let digits = " 00 01 02 03 04 05 06 07 08 09 0a 0B 0c 0d 0e 0f\n";
        let key = Way::Upgrade(Trust::Key(Key(std::array::from_fn(|at| at as u8))));
        let address = "10.0.0.1:80".parse().unwrap();
        assert_eq!(read(digits, 0o640).unwrap().decide(Role::Connect, address), key);
        assert!(read(digits, 0o644).unwrap_err().contains("other users of this host can use the key"));
        for wrong in
            ["", "00", &"0".repeat(31), &digits.replace('a', "g"), &format!("{digits}00"), &"0".repeat(4000)]
        {
            let error = read(wrong, 0o600).unwrap_err();
            assert!(error.contains("is not a key of 32 hexadecimal digits"), "{error}");
        }
        std::fs::remove_file(&file).unwrap();
    }

    #[test]
    fn rules_that_only_keep_tcp_are_none() {
        assert!(Rules::parse("tcp:port=22").unwrap().is_empty());
        assert!(Rules::parse(" ; \n").unwrap().is_empty());
        assert!(!Rules::parse("tcp:port=22;rsockets").unwrap().is_empty());
    }
}
