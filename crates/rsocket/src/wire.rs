//! What rsockets put on the wire: private data, messages, and what is written into the peer's memory
//! (docs/rsockets.md).
//!
//! `parse` takes any bytes and never panics; `to_bytes` returns an array.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

/// The order of the bytes in the memory of a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Least significant byte first.
    Little,
    /// Most significant byte first.
    Big,
}

impl Order {
    /// This host's.
    pub const OURS: Self = if cfg!(target_endian = "big") { Self::Big } else { Self::Little };

    fn bytes4(self, value: u32) -> [u8; 4] {
        match self {
            Self::Little => value.to_le_bytes(),
            Self::Big => value.to_be_bytes(),
        }
    }

    fn bytes8(self, value: u64) -> [u8; 8] {
        match self {
            Self::Little => value.to_le_bytes(),
            Self::Big => value.to_be_bytes(),
        }
    }

    fn number4(self, bytes: [u8; 4]) -> u32 {
        match self {
            Self::Little => u32::from_le_bytes(bytes),
            Self::Big => u32::from_be_bytes(bytes),
        }
    }

    fn number8(self, bytes: [u8; 8]) -> u64 {
        match self {
            Self::Little => u64::from_le_bytes(bytes),
            Self::Big => u64::from_be_bytes(bytes),
        }
    }
}

fn part<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk::<N>().copied()
}

/// A stretch of a peer's memory: where it may be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Target {
    /// Tagged offset of the first byte.
    pub addr: u64,
    /// STag.
    pub key: u32,
    /// Bytes, or entries where it names a table.
    pub length: u32,
}

impl Target {
    /// Bytes on the wire and in memory.
    pub const LEN: usize = 16;
    /// Where the length is.
    pub const LENGTH_AT: usize = 12;

    /// From memory of this order; missing bytes are zero.
    pub fn parse(bytes: &[u8; Self::LEN], order: Order) -> Self {
        Self {
            addr: order.number8(part(bytes, 0).unwrap_or_default()),
            key: order.number4(part(bytes, 8).unwrap_or_default()),
            length: order.number4(part(bytes, Self::LENGTH_AT).unwrap_or_default()),
        }
    }

    /// For memory of this order.
    pub fn to_bytes(self, order: Order) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(&order.bytes8(self.addr));
        bytes[8..12].copy_from_slice(&order.bytes4(self.key));
        bytes[12..].copy_from_slice(&order.bytes4(self.length));
        bytes
    }
}

/// An entry of a table of mapped buffers (riomap(3)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Mapping {
    /// The offset that the peer's program gives for the first byte.
    pub offset: u64,
    /// The buffer.
    pub target: Target,
}

impl Mapping {
    /// Bytes on the wire and in memory.
    pub const LEN: usize = 24;

    /// From memory of this order.
    pub fn parse(bytes: &[u8; Self::LEN], order: Order) -> Self {
        Self {
            offset: order.number8(part(bytes, 0).unwrap_or_default()),
            target: Target::parse(&part(bytes, 8).unwrap_or_default(), order),
        }
    }

    /// For memory of this order.
    pub fn to_bytes(self, order: Order) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(&order.bytes8(self.offset));
        bytes[8..].copy_from_slice(&self.target.to_bytes(order));
        bytes
    }
}

/// The private data of request and reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnData {
    /// The order of bytes in the sender's memory.
    pub order: Order,
    /// Whether the sender has a table of mapped buffers behind its table of targets.
    pub maps: bool,
    /// Receives that the sender has posted.
    pub credits: u16,
    /// Entries of the table of mapped buffers, as [`scale`] puts them into one byte.
    pub mappings: u16,
    /// The sender's table of targets: the receiver of this writes there where it may be written.
    pub table: Target,
    /// The first half of the sender's receive buffer.
    pub buffer: Target,
}

mod flag {
    pub const BIG_ENDIAN: u8 = 1;
    pub const MAPS: u8 = 1 << 1;
}

impl ConnData {
    /// Bytes on the wire.
    pub const LEN: usize = 40;
    const VERSION: u8 = 1;

    /// `None`: too short, or of another version.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes: [u8; Self::LEN] = part(bytes, 0)?;
        let [version, flags, credits @ .., _, _, _, mappings] = part::<8>(&bytes, 0)?;
        (version == Self::VERSION).then_some(())?;
        Some(Self {
            order: if flags & flag::BIG_ENDIAN == 0 { Order::Little } else { Order::Big },
            maps: flags & flag::MAPS != 0,
            credits: u16::from_be_bytes(credits),
            mappings: unscale(mappings),
            table: Target::parse(&part(&bytes, 8)?, Order::Big),
            buffer: Target::parse(&part(&bytes, 24)?, Order::Big),
        })
    }

    /// As on the wire.
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[0] = Self::VERSION;
        bytes[1] = if self.order == Order::Big { flag::BIG_ENDIAN } else { 0 };
        bytes[1] |= if self.maps { flag::MAPS } else { 0 };
        bytes[2..4].copy_from_slice(&self.credits.to_be_bytes());
        bytes[7] = scale(self.mappings);
        bytes[8..24].copy_from_slice(&self.table.to_bytes(Order::Big));
        bytes[24..].copy_from_slice(&self.buffer.to_bytes(Order::Big));
        bytes
    }
}

/// A number of table entries in one byte: exact up to 128, above that in steps of 256.
pub fn scale(entries: u16) -> u8 {
    if entries <= 128 { entries as u8 } else { 128 | (entries >> 8) as u8 }
}

/// The number behind [`scale`].
pub fn unscale(byte: u8) -> u16 {
    if byte <= 128 { u16::from(byte) } else { u16::from(byte & 127) << 8 }
}

/// A message: 32 bits beside what is written into memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Message {
    /// So many bytes were written into the receive buffer.
    Data(u32),
    /// So many messages of data may be sent in all, by their lower 16 bits; and the table of targets may have
    /// changed.
    Credits(u16),
    /// This entry of the table of mapped buffers was written.
    Mapped(u16),
    /// The sender neither sends nor receives any more.
    Disconnect,
    /// The sender sends no more data.
    Shutdown,
    /// The sender lives.
    Keepalive,
    /// One that this implementation does not know.
    Unknown(u32),
}

mod op {
    pub const SHIFT: u32 = 29;
    pub const REST: u32 = (1 << SHIFT) - 1;
    pub const DATA: u32 = 0;
    pub const CREDITS: u32 = 4;
    pub const MAPPED: u32 = 6;
    pub const CONTROL: u32 = 7;
    pub const DISCONNECT: u32 = 0;
    pub const KEEPALIVE: u32 = 1;
    pub const SHUTDOWN: u32 = 2;
}

/// The largest number of bytes that one message of data can name.
pub const MAX_DATA: u32 = op::REST;

impl Message {
    /// From the number on the wire.
    pub fn from_bits(bits: u32) -> Self {
        let rest = bits & op::REST;
        // Credits and indices are kept in 16 bits by every sender; what is above does not count.
        match bits >> op::SHIFT {
            op::DATA => Self::Data(rest),
            op::CREDITS => Self::Credits(rest as u16),
            op::MAPPED => Self::Mapped(rest as u16),
            op::CONTROL if rest == op::DISCONNECT => Self::Disconnect,
            op::CONTROL if rest == op::SHUTDOWN => Self::Shutdown,
            op::CONTROL if rest == op::KEEPALIVE => Self::Keepalive,
            _ => Self::Unknown(bits),
        }
    }

    /// The number on the wire.
    pub fn bits(self) -> u32 {
        let of = |code: u32, rest: u32| code << op::SHIFT | rest & op::REST;
        match self {
            Self::Data(bytes) => of(op::DATA, bytes),
            Self::Credits(allowed) => of(op::CREDITS, u32::from(allowed)),
            Self::Mapped(index) => of(op::MAPPED, u32::from(index)),
            Self::Disconnect => of(op::CONTROL, op::DISCONNECT),
            Self::Shutdown => of(op::CONTROL, op::SHUTDOWN),
            Self::Keepalive => of(op::CONTROL, op::KEEPALIVE),
            Self::Unknown(bits) => bits,
        }
    }

    /// As immediate data.
    pub fn immediate(self) -> [u8; 4] {
        self.bits().to_be_bytes()
    }

    /// As a Send of four bytes: they are in the order of the sender's memory.
    pub fn bytes(self) -> [u8; 4] {
        Order::OURS.bytes4(self.bits())
    }

    /// From a Send of four bytes.
    pub fn from_bytes(bytes: [u8; 4], sender: Order) -> Self {
        Self::from_bits(sender.number4(bytes))
    }
}

/// What precedes the bytes of a datagram between queue pairs: where it comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DatagramHeader {
    /// The sender's address and UDP port.
    pub from: SocketAddr,
}

impl DatagramHeader {
    const V4_LEN: usize = 8;
    const V6_LEN: usize = 24;

    /// Bytes on the wire.
    #[allow(clippy::len_without_is_empty, reason = "a header is never empty")]
    pub fn len(&self) -> usize {
        if self.from.is_ipv4() { Self::V4_LEN } else { Self::V6_LEN }
    }

    /// `None`: too short, or of another form.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let [version, length] = part(bytes, 0)?;
        let port = u16::from_be_bytes(part(bytes, 2)?);
        let from = match (version, usize::from(length)) {
            (4, Self::V4_LEN) => SocketAddr::new(Ipv4Addr::from(part::<4>(bytes, 4)?).into(), port),
            (6, Self::V6_LEN) => {
                let flow = u32::from_be_bytes(part(bytes, 4)?);
                SocketAddrV6::new(Ipv6Addr::from(part::<16>(bytes, 8)?), port, flow, 0).into()
            }
            _ => return None,
        };
        Some(Self { from })
    }

    /// As on the wire.
    pub fn to_bytes(&self) -> Vec<u8> {
        let version = if self.from.is_ipv4() { 4 } else { 6 };
        let mut bytes = vec![version, self.len() as u8];
        bytes.extend(self.from.port().to_be_bytes());
        match self.from {
            SocketAddr::V4(from) => bytes.extend(from.ip().octets()),
            SocketAddr::V6(from) => {
                bytes.extend(from.flowinfo().to_be_bytes());
                bytes.extend(from.ip().octets());
            }
        }
        bytes
    }
}

/// What goes to the UDP socket of a datagram socket whose queue pair is not known: the number of our queue
/// pair, and the program's bytes behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Announcement {
    /// Whether the program's bytes follow; if not, it is an answer.
    pub data: bool,
    /// The sender's queue pair.
    pub qpn: u32,
    /// The sender's address.
    pub from: IpAddr,
}

impl Announcement {
    /// Bytes of the longest.
    pub const MAX_LEN: usize = 28;
    const TAG: [u8; 4] = [0x55; 4];

    /// Bytes on the wire.
    pub fn len_of(v6: bool) -> usize {
        if v6 { Self::MAX_LEN } else { 16 }
    }

    /// `None`: too short, of another form, or not of this address family.
    pub fn parse(bytes: &[u8], v6: bool) -> Option<Self> {
        let [version, code, length, _] = part(bytes, 4)?;
        let fits = version == if v6 { 6 } else { 4 } && usize::from(length) == Self::len_of(v6);
        (fits && part::<4>(bytes, 0)? == Self::TAG).then_some(())?;
        let from = if v6 {
            Ipv6Addr::from(part::<16>(bytes, 12)?).into()
        } else {
            Ipv4Addr::from(part::<4>(bytes, 12)?).into()
        };
        let data = match u32::from(code) {
            op::DATA => true,
            op::CONTROL => false,
            _ => return None,
        };
        Some(Self { data, qpn: u32::from_be_bytes(part(bytes, 8)?) & 0xFF_FFFF, from })
    }

    /// As on the wire.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Self::TAG.to_vec();
        let code = if self.data { op::DATA } else { op::CONTROL };
        let length = Self::len_of(self.from.is_ipv6());
        bytes.extend([if self.from.is_ipv6() { 6 } else { 4 }, code as u8, length as u8, 0]);
        bytes.extend(self.qpn.to_be_bytes());
        match self.from {
            IpAddr::V4(from) => bytes.extend(from.octets()),
            IpAddr::V6(from) => bytes.extend(from.octets()),
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_data_has_this_form() {
        let data = ConnData {
            order: Order::Little,
            maps: true,
            credits: 384,
            mappings: 0x8400,
            table: Target { addr: 0x0102_0304_0506_0708, key: 0x1122_3344, length: 2 },
            buffer: Target { addr: 9, key: 0x5566_7788, length: 0x1_0000 },
        };
        let bytes = data.to_bytes();
        assert_eq!(bytes[..8], [1, 2, 1, 0x80, 0, 0, 0, 128 | 4]);
        assert_eq!(bytes[8..24], [1, 2, 3, 4, 5, 6, 7, 8, 0x11, 0x22, 0x33, 0x44, 0, 0, 0, 2]);
        assert_eq!(bytes[24..], [0, 0, 0, 0, 0, 0, 0, 9, 0x55, 0x66, 0x77, 0x88, 0, 1, 0, 0]);
        let parsed = ConnData::parse(&bytes).unwrap();
        assert_eq!(parsed, ConnData { mappings: 0x400, ..data });
        assert_eq!(ConnData::parse(&bytes[..39]), None);
        let mut later = bytes;
        later[0] = 2;
        assert_eq!(ConnData::parse(&later), None);
    }

    #[test]
    fn messages_have_these_numbers() {
        for (message, bits) in [
            (Message::Data(0x1FFF_FFFF), 0x1FFF_FFFF),
            (Message::Credits(0x1234), 0x8000_1234),
            (Message::Mapped(3), 0xC000_0003),
            (Message::Disconnect, 0xE000_0000),
            (Message::Keepalive, 0xE000_0001),
            (Message::Shutdown, 0xE000_0002),
            (Message::Unknown(0xE000_0003), 0xE000_0003),
            (Message::Unknown(0x2000_0000), 0x2000_0000),
        ] {
            assert_eq!((message.bits(), Message::from_bits(bits)), (bits, message));
            assert_eq!(Message::from_bytes(message.bytes(), Order::OURS), message);
        }
        // rdma-core adds two numbers of 16 bits and sends the sum.
        assert_eq!(Message::from_bits(0x8001_0002), Message::Credits(2));
        assert_eq!(Message::from_bytes([0x80, 0, 0, 7], Order::Big), Message::Credits(7));
    }

    #[test]
    fn targets_and_mappings_keep_the_order_of_memory() {
        let target = Target { addr: 1, key: 2, length: 3 };
        assert_eq!(target.to_bytes(Order::Little), [1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0]);
        for order in [Order::Little, Order::Big] {
            assert_eq!(Target::parse(&target.to_bytes(order), order), target);
            let mapping = Mapping { offset: 77, target };
            assert_eq!(Mapping::parse(&mapping.to_bytes(order), order), mapping);
        }
    }

    #[test]
    fn counts_of_table_entries_fit_one_byte() {
        for (entries, back) in [(0, 0), (128, 128), (129, 128), (256, 256), (300, 256), (32512, 32512)] {
            assert_eq!(unscale(scale(entries)), back);
        }
    }

    #[test]
    fn datagrams_say_where_they_come_from() {
        for (from, bytes) in [
            ("1.2.3.4:258", vec![4, 8, 1, 2, 1, 2, 3, 4]),
            ("[::1]:1", [vec![6, 24, 0, 1, 0, 0, 0, 0], vec![0; 15], vec![1]].concat()),
        ] {
            let header = DatagramHeader { from: from.parse().unwrap() };
            assert_eq!((header.to_bytes(), header.len()), (bytes.clone(), bytes.len()));
            assert_eq!(DatagramHeader::parse(&bytes), Some(header));
            assert_eq!(DatagramHeader::parse(&bytes[..bytes.len() - 1]), None);
        }
        let four = Announcement { data: true, qpn: 0x12_3456, from: "1.2.3.4".parse().unwrap() };
        let bytes = four.to_bytes();
        assert_eq!(bytes, [0x55, 0x55, 0x55, 0x55, 4, 0, 16, 0, 0, 0x12, 0x34, 0x56, 1, 2, 3, 4]);
        let six = Announcement { data: false, from: "::1".parse().unwrap(), ..four };
        assert_eq!(six.to_bytes()[4..8], [6, 7, 28, 0]);
        for (one, v6) in [(four, false), (six, true)] {
            assert_eq!(Announcement::parse(&one.to_bytes(), v6), Some(one));
            assert_eq!(Announcement::parse(&one.to_bytes(), !v6), None);
            assert_eq!(Announcement::parse(&one.to_bytes()[..Announcement::len_of(v6) - 1], v6), None);
        }
    }
}
