//! The GRH area: the first 40 bytes of every receive buffer of a datagram queue pair, as RoCE v2 shows them
//! (docs/datagram-iwarp.md section 5). It is never sent: the receiver builds it from what the kernel reports
//! about a datagram.
//!
//! ```text
//!        IPv4                                  IPv6
//!   0 +--------------------------+        0 +--------------------------+
//!     |  20 bytes left unchanged |          |  IPv6 header, 40 bytes   |
//!  20 +--------------------------+          |                          |
//!     |  IPv4 header, 20 bytes   |          |                          |
//!  40 +--------------------------+       40 +--------------------------+
//! ```

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::{be16, be32};

/// Bytes of an IPv4 header, which fills the end of the area.
pub const V4_LEN: usize = v4::LEN;
/// Bytes of the area.
pub const LEN: usize = 40;

const UDP: u8 = 17;
const UDP_HEADER_LEN: usize = 8;

mod v4 {
    use core::ops::Range;
    pub const AT: usize = 20;
    pub const LEN: usize = 20;

    pub const VERSION_IHL: usize = 0;
    pub const TOS: usize = 1;
    pub const TOTAL_LENGTH: Range<usize> = 2..4;
    pub const FLAGS: usize = 6;
    pub const TTL: usize = 8;
    pub const PROTOCOL: usize = 9;
    pub const CHECKSUM: Range<usize> = 10..12;
    pub const SOURCE: Range<usize> = 12..16;
    pub const DESTINATION: Range<usize> = 16..20;

    pub const VERSION_4_IHL_5: u8 = 0x45;
    pub const DONT_FRAGMENT: u8 = 0x40;
}

mod v6 {
    use core::ops::Range;
    pub const WORD: Range<usize> = 0..4;
    pub const PAYLOAD_LENGTH: Range<usize> = 4..6;
    pub const NEXT_HEADER: usize = 6;
    pub const HOP_LIMIT: usize = 7;
    pub const SOURCE: Range<usize> = 8..24;
    pub const DESTINATION: Range<usize> = 24..40;
}

/// Contents of the area.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Grh {
    /// The sender's address.
    pub source: IpAddr,
    /// The address that the datagram went to; a group if it was multicast. Of the same family.
    pub destination: IpAddr,
    /// IPv4's TOS, IPv6's traffic class.
    pub traffic_class: u8,
    /// IPv4's TTL, IPv6's hop limit.
    pub hop_limit: u8,
    /// 20 bits; IPv4 has none.
    pub flow_label: u32,
    /// Bytes of the UDP datagram without its UDP header.
    pub datagram_len: u16,
}

impl Grh {
    /// The area of a datagram from `source` to `destination`. The other fields have default values, because
    /// the system does not report them. Of two families, both addresses are shown as IPv6.
    pub fn of_datagram(source: IpAddr, destination: IpAddr, datagram_len: u16) -> Self {
        Self { source, destination, traffic_class: 0, hop_limit: 64, flow_label: 0, datagram_len }
    }

    /// Writes the area. With IPv4 the first 20 bytes stay as they are: RoCE v2 adapters leave them, and
    /// programs look there to tell the families apart.
    pub fn emit(&self, out: &mut [u8; LEN]) {
        match (self.source, self.destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                out[v4::AT..].copy_from_slice(&self.v4(source, destination));
            }
            (source, destination) => *out = self.v6(to_v6(source), to_v6(destination)),
        }
    }

    fn v4(&self, source: Ipv4Addr, destination: Ipv4Addr) -> [u8; v4::LEN] {
        let mut header = [0; v4::LEN];
        header[v4::VERSION_IHL] = v4::VERSION_4_IHL_5;
        header[v4::TOS] = self.traffic_class;
        let total = self.datagram_len.saturating_add((v4::LEN + UDP_HEADER_LEN) as u16);
        header[v4::TOTAL_LENGTH].copy_from_slice(&total.to_be_bytes());
        header[v4::FLAGS] = v4::DONT_FRAGMENT;
        header[v4::TTL] = self.hop_limit;
        header[v4::PROTOCOL] = UDP;
        header[v4::SOURCE].copy_from_slice(&source.octets());
        header[v4::DESTINATION].copy_from_slice(&destination.octets());
        // libibverbs recognizes an IPv4 header by its checksum (ibv_init_ah_from_wc).
        let checksum = checksum(&header);
        header[v4::CHECKSUM].copy_from_slice(&checksum.to_be_bytes());
        header
    }

    fn v6(&self, source: Ipv6Addr, destination: Ipv6Addr) -> [u8; LEN] {
        let mut header = [0; LEN];
        let word = 6 << 28 | u32::from(self.traffic_class) << 20 | self.flow_label & 0x000F_FFFF;
        header[v6::WORD].copy_from_slice(&word.to_be_bytes());
        let payload = self.datagram_len.saturating_add(UDP_HEADER_LEN as u16);
        header[v6::PAYLOAD_LENGTH].copy_from_slice(&payload.to_be_bytes());
        header[v6::NEXT_HEADER] = UDP;
        header[v6::HOP_LIMIT] = self.hop_limit;
        header[v6::SOURCE].copy_from_slice(&source.octets());
        header[v6::DESTINATION].copy_from_slice(&destination.octets());
        header
    }

    /// Reads an area, for `ibv_init_ah_from_wc`. It is IPv4 if the first nibble is not 6 or the IPv4 header's
    /// checksum is correct, because with IPv4 the first 20 bytes are whatever the program left there. `None`
    /// if neither header is present.
    pub fn parse(area: &[u8; LEN]) -> Option<Self> {
        let first = area[0] >> 4;
        let tail = area.last_chunk::<{ v4::LEN }>()?;
        let is_v4 = tail[v4::VERSION_IHL] == v4::VERSION_4_IHL_5 && (first != 6 || checksum(tail) == 0);
        if is_v4 {
            let total = be16(&tail[v4::TOTAL_LENGTH]);
            return Some(Grh {
                source: IpAddr::V4(Ipv4Addr::from(be32(&tail[v4::SOURCE]))),
                destination: IpAddr::V4(Ipv4Addr::from(be32(&tail[v4::DESTINATION]))),
                traffic_class: tail[v4::TOS],
                hop_limit: tail[v4::TTL],
                flow_label: 0,
                datagram_len: total.saturating_sub((v4::LEN + UDP_HEADER_LEN) as u16),
            });
        }
        if first != 6 {
            return None;
        }
        let address = |bytes: &[u8]| {
            let mut octets = [0; 16];
            octets.copy_from_slice(bytes);
            IpAddr::V6(Ipv6Addr::from(octets))
        };
        let word = be32(&area[v6::WORD]);
        Some(Grh {
            source: address(&area[v6::SOURCE]),
            destination: address(&area[v6::DESTINATION]),
            traffic_class: (word >> 20 & 0xFF) as u8,
            hop_limit: area[v6::HOP_LIMIT],
            flow_label: word & 0x000F_FFFF,
            datagram_len: be16(&area[v6::PAYLOAD_LENGTH]).saturating_sub(UDP_HEADER_LEN as u16),
        })
    }
}

fn to_v6(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    }
}

/// The internet checksum; 0 over a header whose checksum is correct.
fn checksum(header: &[u8; v4::LEN]) -> u16 {
    let sum: u32 = header.chunks_exact(2).map(|pair| u32::from(be16(pair))).sum();
    let folded = (sum & 0xFFFF) + (sum >> 16);
    !((folded & 0xFFFF) + (folded >> 16)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grh(source: &str, destination: &str) -> Grh {
        Grh {
            source: source.parse().unwrap(),
            destination: destination.parse().unwrap(),
            traffic_class: 0x02,
            hop_limit: 64,
            flow_label: 0,
            datagram_len: 1068,
        }
    }

    #[test]
    fn golden_ipv4() {
        let grh = grh("192.0.2.1", "192.0.2.2");
        let mut area = [0xFF; LEN];
        grh.emit(&mut area);
        assert_eq!(area[..20], [0xFF; 20], "left unchanged");
        let head = [0x45, 0x02, 0x04, 0x48, 0, 0, 0x40, 0, 64, 17];
        assert_eq!(area[20..30], head);
        assert_eq!(area[32..], [192, 0, 2, 1, 192, 0, 2, 2]);
        assert_eq!(checksum(area.last_chunk().unwrap()), 0);
        assert_eq!(Grh::parse(&area), Some(grh));
        // A program's buffer that happens to begin like IPv6.
        area[0] = 0x60;
        assert_eq!(Grh::parse(&area), Some(grh));
        area[39] ^= 1;
        assert!(matches!(Grh::parse(&area), Some(Grh { source: IpAddr::V6(_), .. })));
    }

    #[test]
    fn golden_ipv6() {
        let grh = Grh { flow_label: 0xABCDE, ..grh("2001:db8::1", "ff02::1") };
        let mut area = [0xFF; LEN];
        grh.emit(&mut area);
        assert_eq!(area[..8], [0x60, 0x2A, 0xBC, 0xDE, 0x04, 0x34, 17, 64]);
        assert_eq!(area[8..10], [0x20, 0x01]);
        assert_eq!(area[24..26], [0xFF, 0x02]);
        assert_eq!(Grh::parse(&area), Some(grh));
    }

    #[test]
    fn neither_family() {
        assert_eq!(Grh::parse(&[0; LEN]), None);
        assert_eq!(Grh::parse(&[0xFF; LEN]), None);
    }
}
