//! Settings from the environment. Read once.

mod links;

use std::ffi::{CStr, CString};
use std::ops::RangeInclusive;
use std::os::unix::ffi::OsStrExt as _;

use uwarp_process::OnceValue;

pub use links::{LinkChoice, Links};

/// How the device presents itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum View {
    /// RNIC, transport iWARP.
    Iwarp,
    /// Transport InfiniBand, link layer Ethernet. Why it is the default: docs/adr/008.
    #[default]
    Roce,
    /// Transport and link layer InfiniBand.
    Ib,
}

/// Which devices programs see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Devices {
    /// One with all addresses of the host.
    #[default]
    One,
    /// One for each network interface.
    PerInterface,
}

/// Which peers that are not uwarp are requested to acknowledge placement, in the views where a completion
/// means placement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Ask {
    /// Those that are certainly not Linux siw: docs/adr/008.
    #[default]
    Auto,
    /// All.
    On,
    /// None.
    Off,
}

/// How long messages of datagrams may be: the port's active MTU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum UdMtu {
    /// 4,096 bytes. What is longer than a packet of the path goes in parts.
    #[default]
    Auto,
    /// As long as a packet of the interface.
    Interface,
}

/// Settings; every one has an environment variable and an option of `uwarp run`.
#[derive(Debug, Clone)]
pub struct Config {
    /// `UWARP_VIEW`: iwarp, roce or ib.
    pub view: View,
    /// `UWARP_DEVICES`: one or per-interface.
    pub devices: Devices,
    /// `UWARP_CRC`: off means that we can do without; CRCs are off only when the peer agrees.
    pub crc: bool,
    /// `UWARP_MARKERS`: ask peers for markers.
    pub markers: bool,
    /// `UWARP_MPA_REVISION`: the highest MPA revision used, 1 or 2.
    pub mpa_revision: u8,
    /// `UWARP_PROGRESS=spin`: the background thread never sleeps.
    pub spin: bool,
    /// `UWARP_PORT_RANGE`: ports for queue pair numbers.
    pub ports: Option<RangeInclusive<u16>>,
    /// `UWARP_MCAST_PORT`: the UDP port of multicast groups; the same on all hosts.
    pub multicast_port: u16,
    /// `UWARP_PEER=off`: do not use reserved bits to find out whether the peer is uwarp.
    pub find_uwarp_peers: bool,
    /// `UWARP_ASK`: in the roce and ib views, request strangers to acknowledge placement: auto, on or off.
    pub ask: Ask,
    /// `UWARP_STAT=off`: `uwarp stat` does not see this process.
    pub stat: bool,
    /// `UWARP_GUARD=off`: no handler for faults on registered memory.
    pub guard: bool,
    /// `UWARP_UD_MTU`: how long datagrams may be.
    pub ud_mtu: UdMtu,
    /// `UWARP_LINK`: what carries streams to peers on this host.
    pub links: Links,
}

impl Config {
    /// The settings of this process.
    pub fn get() -> &'static Self {
        static CONFIG: OnceValue<Config> = OnceValue::new();
        CONFIG.get_or_make(|| Self::from_lookup(|name| std::env::var(name).ok()))
    }

    /// Settings from any lookup of names. A value that is not valid is logged, and the default stays.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Self {
        let switch = |name: &str, default: bool| {
            choice(lookup(name), name, "on, off", default, &[(ON, true), (OFF, false)])
        };
        let views: &[(&[&str], View)] =
            &[(&["roce"], View::Roce), (&["iwarp"], View::Iwarp), (&["ib"], View::Ib)];
        let asks: &[(&[&str], Ask)] = &[(&["auto"], Ask::Auto), (ON, Ask::On), (OFF, Ask::Off)];
        let revisions: &[(&[&str], u8)] = &[(&["2"], 2), (&["1"], 1)];
        let progress: &[(&[&str], bool)] = &[(&["auto"], false), (&["spin"], true)];
        let ports = lookup("UWARP_PORT_RANGE").filter(|v| !v.is_empty()).and_then(|value| {
            let range = value.split_once('-').and_then(|(a, b)| {
                let (a, b) = (a.trim().parse().ok()?, b.trim().parse().ok()?);
                (1 <= a && a <= b).then_some(a..=b)
            });
            if range.is_none() {
                odd("UWARP_PORT_RANGE", &value, "FIRST-LAST, such as 40000-40100");
            }
            range
        });
        let multicast_port = match lookup("UWARP_MCAST_PORT").filter(|value| !value.is_empty()) {
            None => MULTICAST_PORT,
            Some(value) => value.trim().parse().ok().filter(|port| *port != 0).unwrap_or_else(|| {
                odd("UWARP_MCAST_PORT", &value, "1 to 65535");
                MULTICAST_PORT
            }),
        };
        let devices: &[(&[&str], Devices)] =
            &[(&["one"], Devices::One), (&["per-interface"], Devices::PerInterface)];
        let ud_mtus: &[(&[&str], UdMtu)] = &[(&["auto"], UdMtu::Auto), (&["interface"], UdMtu::Interface)];
        Self {
            view: choice(lookup("UWARP_VIEW"), "UWARP_VIEW", "iwarp, roce, ib", View::Roce, views),
            devices: choice(
                lookup("UWARP_DEVICES"),
                "UWARP_DEVICES",
                "one, per-interface",
                Devices::One,
                devices,
            ),
            crc: switch("UWARP_CRC", true),
            markers: switch("UWARP_MARKERS", false),
            mpa_revision: choice(lookup("UWARP_MPA_REVISION"), "UWARP_MPA_REVISION", "1, 2", 2, revisions),
            spin: choice(lookup("UWARP_PROGRESS"), "UWARP_PROGRESS", "auto, spin", false, progress),
            ports,
            multicast_port,
            find_uwarp_peers: switch("UWARP_PEER", true),
            ask: choice(lookup("UWARP_ASK"), "UWARP_ASK", "auto, on, off", Ask::Auto, asks),
            stat: switch("UWARP_STAT", true),
            guard: switch("UWARP_GUARD", true),
            ud_mtu: choice(lookup("UWARP_UD_MTU"), "UWARP_UD_MTU", "auto, interface", UdMtu::Auto, ud_mtus),
            links: lookup("UWARP_LINK").unwrap_or_default().parse().unwrap_or_else(|why| {
                tracing::error!("UWARP_LINK is ignored: {why}");
                Links::default()
            }),
        }
    }
}

const ON: &[&str] = &["1", "on", "yes", "true"];
const OFF: &[&str] = &["0", "off", "no", "false"];

/// The value of the first choice that has this word. Without a word, or with an invalid one, the default.
fn choice<T: Copy>(
    word: Option<String>,
    name: &str,
    allowed: &str,
    default: T,
    choices: &[(&[&str], T)],
) -> T {
    let word = word.unwrap_or_default();
    if word.is_empty() {
        return default;
    }
    let is_it = |other: &&str| other.eq_ignore_ascii_case(&word);
    let found = choices.iter().find(|(words, _)| words.iter().any(is_it));
    found.map_or_else(
        || {
            odd(name, &word, allowed);
            default
        },
        |(_, value)| *value,
    )
}

fn odd(name: &str, value: &str, allowed: &str) {
    tracing::warn!("{name}={value} is not valid and is ignored; allowed: {allowed}");
}

/// Default of `UWARP_MCAST_PORT`.
pub const MULTICAST_PORT: u16 = 18514;

/// Levels of `UWARP_LOG`.
const LOG_LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

/// Checks the value of `UWARP_LOG`: a level, or a list such as `warn,uwarp_cm=debug`.
///
/// The subscriber takes a bare word that is not a level for a part of the program, and all other parts fall
/// silent. So only a name that begins with `uwarp` may stand without a level.
///
/// # Errors
/// A sentence that names the part that is not valid.
pub fn check_log_filter(text: &str) -> Result<(), String> {
    let is_level = |word: &str| {
        let word = word.trim();
        LOG_LEVELS.contains(&word.to_ascii_lowercase().as_str()) || matches!(word.parse::<u8>(), Ok(0..=5))
    };
    let valid = |part: &str| match part.rsplit_once('=') {
        // A list of fields: of spans, which nothing here has.
        _ if part.contains('[') => false,
        Some((_, level)) => is_level(level),
        None => part.is_empty() || part.starts_with("uwarp") || is_level(part),
    };
    match text.split(',').map(str::trim).find(|part| !valid(part)) {
        Some(part) => Err(format!("{part} is not a level; the levels are {}", LOG_LEVELS.join(", "))),
        None => Ok(()),
    }
}

/// A sentence for the person who runs the program, without the number that the standard library puts behind
/// an error: `No such file or directory (os error 2)`.
pub fn without_error_numbers(sentence: &str) -> String {
    let mut parts = sentence.split(" (os error ");
    let mut short = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let number = part.split_once(')').filter(|(number, _)| number.parse::<i32>().is_ok());
        match number {
            Some((_, rest)) => short += rest,
            None => short += &format!(" (os error {part}"),
        }
    }
    short
}

/// Where sysfs is mounted. `SYSFS_PATH` moves it, as libsysfs once did.
pub fn sysfs_path() -> &'static CStr {
    static PATH: OnceValue<CString> = OnceValue::new();
    PATH.get_or_make(|| {
        std::env::var_os("SYSFS_PATH")
            // As in libibverbs: the caller's environment must not steer a program that has more rights.
            .filter(|path| !path.is_empty() && !crate::has_more_rights_than_its_caller())
            .and_then(|path| {
                let bytes = path.as_bytes();
                let end = bytes.iter().rposition(|b| *b != b'/').map_or(bytes.len(), |last| last + 1);
                CString::new(&bytes[..end]).ok()
            })
            .unwrap_or_else(|| c"/sys".to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_log_level_is_refused_and_does_not_silence_warnings() {
        for good in ["", "warn", "DEBUG", "off", "warn,uwarp_cm=debug", "uwarp_cm", "uwarp_cm=trace,", "3"] {
            assert_eq!(check_log_filter(good), Ok(()), "{good}");
        }
        for bad in ["loud", "debgu", "warn,debgu", "uwarp_cm=loud", "warn uwarp_cm", "6", "[span]=info"] {
            let error = check_log_filter(bad).unwrap_err();
            assert!(error.ends_with("off, error, warn, info, debug, trace"), "{bad}: {error}");
        }
    }

    #[test]
    fn sentences_for_people_have_no_numbers_of_errors() {
        for (full, short) in [
            (
                "cannot read /a: Permission denied (os error 13); give /b",
                "cannot read /a: Permission denied; give /b",
            ),
            ("a: Try again (os error 11): b: Broken pipe (os error 32)", "a: Try again: b: Broken pipe"),
            (
                "nothing of the kind (os error of another kind)",
                "nothing of the kind (os error of another kind)",
            ),
            ("", ""),
        ] {
            assert_eq!(without_error_numbers(full), short);
        }
    }

    fn from(pairs: &[(&str, &str)]) -> Config {
        Config::from_lookup(|n| pairs.iter().find(|(k, _)| *k == n).map(|(_, v)| (*v).to_owned()))
    }

    #[test]
    fn defaults_are_the_standard() {
        let c = from(&[]);
        assert!(c.crc && !c.markers && !c.spin && c.find_uwarp_peers);
        // The words of `uwarp run`, in any case; empty is as if it were not set.
        let c = from(&[("UWARP_CRC", "0"), ("UWARP_MARKERS", "On"), ("UWARP_VIEW", "IB"), ("UWARP_ASK", "")]);
        assert!(!c.crc && c.markers);
        assert_eq!((c.view, c.ask), (View::Ib, Ask::Auto));
        let c = from(&[]);
        assert_eq!((c.view, c.mpa_revision, c.ports, c.ask), (View::Roce, 2, None, Ask::Auto));
    }

    #[test]
    fn nonsense_leaves_the_default() {
        let c = from(&[("UWARP_CRC", "maybe"), ("UWARP_MPA_REVISION", "7"), ("UWARP_PORT_RANGE", "9-3")]);
        assert!(c.crc);
        assert_eq!((c.mpa_revision, c.ports), (2, None));
        let port = |text| from(&[("UWARP_MCAST_PORT", text)]).multicast_port;
        assert_eq!([port("7"), port("0"), port("x"), port("")], [7, 18514, 18514, 18514]);
        assert_eq!(from(&[("UWARP_PORT_RANGE", "40000-40100")]).ports, Some(40000..=40100));
    }

    #[test]
    fn requests_to_strangers_have_three_settings() {
        let asks = [("auto", Ask::Auto), ("on", Ask::On), ("off", Ask::Off), ("sometimes", Ask::Auto)];
        for (word, ask) in asks {
            assert_eq!(from(&[("UWARP_ASK", word)]).ask, ask, "{word}");
        }
    }
}
