//! What the environment says. Read once.

use std::ops::RangeInclusive;
use std::sync::OnceLock;

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

/// Whether peers that are not uwarp are asked what they have placed, in the views where a completion means that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Ask {
    /// Those that are no Linux siw for certain: docs/adr/008.
    #[default]
    Auto,
    /// All.
    On,
    /// None.
    Off,
}

/// Settings; every one has an environment variable and an option of `uwarp run`.
#[derive(Debug, Clone)]
pub struct Config {
    /// `UWARP_VIEW`: iwarp, roce or ib.
    pub view: View,
    /// `UWARP_CRC`: off says we can do without; CRCs are off only when the peer says so too.
    pub crc: bool,
    /// `UWARP_MARKERS`: ask peers for markers.
    pub markers: bool,
    /// `UWARP_MPA_REVISION`: the highest MPA revision used, 1 or 2.
    pub mpa_revision: u8,
    /// `UWARP_PROGRESS=spin`: the background thread never sleeps.
    pub spin: bool,
    /// `UWARP_PORT_RANGE`: ports for queue pair numbers.
    pub ports: Option<RangeInclusive<u16>>,
    /// `UWARP_PEER=off`: use no reserved bits to find out whether the peer is uwarp.
    pub find_uwarp_peers: bool,
    /// `UWARP_ASK`: in the roce and ib views, ask strangers what they have placed: auto, on or off.
    pub ask: Ask,
    /// `UWARP_STAT=off`: `uwarp stat` does not see this process.
    pub stat: bool,
    /// `UWARP_GUARD=off`: no handler for faults at registered memory.
    pub guard: bool,
}

impl Config {
    /// The settings of this process.
    pub fn get() -> &'static Self {
        static CONFIG: OnceLock<Config> = OnceLock::new();
        CONFIG.get_or_init(|| Self::from_lookup(|name| std::env::var(name).ok()))
    }

    /// Settings from any lookup of names. What cannot be understood is reported and left at its default.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Self {
        let odd = |name: &str, value: &str, allowed: &str| {
            tracing::warn!("{name}={value} is not understood and ignored; allowed: {allowed}");
        };
        let switch = |name: &str, default: bool| match lookup(name).as_deref() {
            None | Some("") => default,
            Some("1" | "on" | "yes" | "true") => true,
            Some("0" | "off" | "no" | "false") => false,
            Some(other) => {
                odd(name, other, "on, off");
                default
            }
        };
        let view = match lookup("UWARP_VIEW").as_deref() {
            None | Some("" | "roce") => View::Roce,
            Some("iwarp") => View::Iwarp,
            Some("ib") => View::Ib,
            Some(other) => {
                odd("UWARP_VIEW", other, "iwarp, roce, ib");
                View::Roce
            }
        };
        let mpa_revision = match lookup("UWARP_MPA_REVISION").as_deref() {
            None | Some("" | "2") => 2,
            Some("1") => 1,
            Some(other) => {
                odd("UWARP_MPA_REVISION", other, "1, 2");
                2
            }
        };
        let spin = match lookup("UWARP_PROGRESS").as_deref() {
            None | Some("" | "auto") => false,
            Some("spin") => true,
            Some(other) => {
                odd("UWARP_PROGRESS", other, "auto, spin");
                false
            }
        };
        let ask = match lookup("UWARP_ASK").as_deref() {
            None | Some("" | "auto") => Ask::Auto,
            Some("1" | "on" | "yes" | "true") => Ask::On,
            Some("0" | "off" | "no" | "false") => Ask::Off,
            Some(other) => {
                odd("UWARP_ASK", other, "auto, on, off");
                Ask::Auto
            }
        };
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
        match lookup("UWARP_DEVICES").as_deref() {
            None | Some("" | "one") => {}
            Some("per-interface") => tracing::warn!(
                "UWARP_DEVICES=per-interface is accepted and not built yet: there is one device with all addresses"
            ),
            Some(other) => odd("UWARP_DEVICES", other, "one, per-interface"),
        }
        Self {
            view,
            crc: switch("UWARP_CRC", true),
            markers: switch("UWARP_MARKERS", false),
            mpa_revision,
            spin,
            ports,
            find_uwarp_peers: switch("UWARP_PEER", true),
            ask,
            stat: switch("UWARP_STAT", true),
            guard: switch("UWARP_GUARD", true),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(pairs: &[(&str, &str)]) -> Config {
        Config::from_lookup(|n| pairs.iter().find(|(k, _)| *k == n).map(|(_, v)| (*v).to_owned()))
    }

    #[test]
    fn defaults_are_the_standard() {
        let c = from(&[]);
        assert!(c.crc && !c.markers && !c.spin && c.find_uwarp_peers);
        assert_eq!((c.view, c.mpa_revision, c.ports, c.ask), (View::Roce, 2, None, Ask::Auto));
    }

    #[test]
    fn nonsense_leaves_the_default() {
        let c = from(&[("UWARP_CRC", "maybe"), ("UWARP_MPA_REVISION", "7"), ("UWARP_PORT_RANGE", "9-3")]);
        assert!(c.crc);
        assert_eq!((c.mpa_revision, c.ports), (2, None));
        assert_eq!(from(&[("UWARP_PORT_RANGE", "40000-40100")]).ports, Some(40000..=40100));
    }

    #[test]
    fn asking_strangers_has_three_settings() {
        let asks = [("auto", Ask::Auto), ("on", Ask::On), ("off", Ask::Off), ("sometimes", Ask::Auto)];
        for (word, ask) in asks {
            assert_eq!(from(&[("UWARP_ASK", word)]).ask, ask, "{word}");
        }
    }
}
