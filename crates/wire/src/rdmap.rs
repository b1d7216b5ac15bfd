//! RDMAP: control byte, opcode table and message headers (RFC 5040 section 4, RFC 7306 sections 4 to 6).

use core::fmt;

use crate::ddp::{QN_ATOMIC_RESPONSE, QN_READ_REQUEST, QN_SEND, QN_TERMINATE};
use crate::{Truncated, be32, be64, head};

/// RDMAP version that is sent. RFC 5040 also allows 0, the RDMA Consortium's version. The connection decides
/// whether it accepts 0; the header does not.
pub const RV: u8 = 1;

/// Opcode of [`Ack`]. The registry reserves 0xF for experiments (RFC 6580 section 3.4), so no later RFC can
/// collide.
pub const UWARP_ACK: u8 = 0x0F;

/// Untagged queue of [`Ack`]. It is far from the registry's queues, which are assigned from 0 upwards.
pub const QN_UWARP_ACK: u32 = 0x7557_0000;

/// Reserved bit of the control field, used between two uwarp ends with Send and Send with Solicited Event:
/// the four bytes where Send with Invalidate has its STag are immediate data. No RFC has this operation
/// (docs/adr/006-immediate-data.md).
pub const UWARP_WITH_IMM: u8 = 0x20;

/// The same bit of an RDMA Write or Write-Record that has an immediate of its own, over reliable datagrams
/// (docs/rd.md section 5.4): its completion is a solicited one.
pub const UWARP_SOLICITED: u8 = 0x20;

/// Reserved bit of the control field, used between two uwarp ends: the sender requests an acknowledgement
/// ([`Ack`]) when this message and all before it are placed. In an `Ack`: of everything sent so far
/// (docs/adr/009-acknowledgements-on-request.md).
pub const UWARP_REQUEST_ACK: u8 = 0x10;

/// Bit of the four bytes of an [`Ack`] where Send with Invalidate has its STag: the three low bits are how
/// often the sender of this frame wants its Sends retried when they find no receive (`rnr_retry`). A program
/// that connects its queue pair by number gives that number when it may send, and the stream can be there
/// before (docs/adr/004-sends-without-a-receive.md).
pub const UWARP_RNR_RETRY: u32 = 0x8;

/// Another bit of the same four bytes: this is the last [`Ack`] of the stream. Its sender places nothing more
/// of what it receives, whatever its system's TCP acknowledges afterwards. A stream that ends without it was
/// ended by the system of a process that is gone (docs/adr/009-acknowledgements-on-request.md).
pub const UWARP_LAST_ACK: u32 = 0x10;

/// Another bit of a last [`Ack`]: its sender's program waits for the peer's program to disconnect, too, as
/// with InfiniBand's connection manager. So the peer ends its side of the stream then, or after a time.
pub const UWARP_AWAITS_ANSWER: u32 = 0x20;

/// RDMAP message type, four bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Opcode {
    /// RDMA Write.
    Write,
    /// RDMA Read Request.
    ReadRequest,
    /// RDMA Read Response.
    ReadResponse,
    /// Send.
    Send,
    /// Send with Invalidate.
    SendInvalidate,
    /// Send with Solicited Event.
    SendSe,
    /// Send with Solicited Event and Invalidate.
    SendSeInvalidate,
    /// Terminate.
    Terminate,
    /// Immediate Data (RFC 7306).
    Immediate,
    /// Immediate Data with Solicited Event (RFC 7306).
    ImmediateSe,
    /// Atomic Request (RFC 7306).
    AtomicRequest,
    /// Atomic Response (RFC 7306).
    AtomicResponse,
    /// Acknowledgement between two uwarp ends. Every other peer takes it for an unexpected opcode.
    UwarpAck,
    /// RDMA Write-Record, of datagrams between two uwarp ends only: a Write of whose bytes the target keeps a
    /// record (docs/datagram-iwarp.md section 15). To a stream it is unassigned.
    WriteRecord,
    /// Unassigned: 0xD and 0xE.
    Unknown(u8),
}

impl Opcode {
    /// From the low four bits of `code`.
    #[inline]
    pub const fn from_code(code: u8) -> Self {
        match code & 0x0F {
            0x0 => Opcode::Write,
            0x1 => Opcode::ReadRequest,
            0x2 => Opcode::ReadResponse,
            0x3 => Opcode::Send,
            0x4 => Opcode::SendInvalidate,
            0x5 => Opcode::SendSe,
            0x6 => Opcode::SendSeInvalidate,
            0x7 => Opcode::Terminate,
            0x8 => Opcode::Immediate,
            0x9 => Opcode::ImmediateSe,
            0xA => Opcode::AtomicRequest,
            0xB => Opcode::AtomicResponse,
            0xC => Opcode::WriteRecord,
            UWARP_ACK => Opcode::UwarpAck,
            other => Opcode::Unknown(other),
        }
    }

    /// The four bits.
    #[inline]
    pub const fn code(self) -> u8 {
        match self {
            Opcode::Write => 0x0,
            Opcode::ReadRequest => 0x1,
            Opcode::ReadResponse => 0x2,
            Opcode::Send => 0x3,
            Opcode::SendInvalidate => 0x4,
            Opcode::SendSe => 0x5,
            Opcode::SendSeInvalidate => 0x6,
            Opcode::Terminate => 0x7,
            Opcode::Immediate => 0x8,
            Opcode::ImmediateSe => 0x9,
            Opcode::AtomicRequest => 0xA,
            Opcode::AtomicResponse => 0xB,
            Opcode::WriteRecord => 0xC,
            Opcode::UwarpAck => UWARP_ACK,
            Opcode::Unknown(code) => code & 0x0F,
        }
    }

    /// This opcode's row of [`OPCODES`]; `None` for those that no stream has.
    #[inline]
    pub const fn info(self) -> Option<&'static OpcodeInfo> {
        match self {
            Opcode::UwarpAck => Some(&OPCODES[12]),
            Opcode::WriteRecord | Opcode::Unknown(_) => None,
            standard => Some(&OPCODES[standard.code() as usize]),
        }
    }

    /// A short name for traces, or `Unknown`.
    pub const fn name(self) -> &'static str {
        match (self, self.info()) {
            (Opcode::WriteRecord, _) => "WriteRecord",
            (_, Some(info)) => info.name,
            (_, None) => "Unknown",
        }
    }
}

/// The short name, or `Unknown(0xd)`.
impl fmt::Display for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Opcode::Unknown(code) => write!(f, "Unknown({code:#x})"),
            known => f.write_str(known.name()),
        }
    }
}

/// What the end that receives a segment does with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivery {
    /// Places the payload in the region that the DDP header names.
    Region,
    /// Places the payload in the sink of the oldest RDMA Read; the last segment completes the Read.
    ReadSink,
    /// Places the payload in the oldest receive; the last segment completes the receive.
    Receive,
    /// Completes the oldest receive without using its memory: the payload is part of the completion.
    Immediate,
    /// Reads the region that the payload names, and answers.
    ReadRequest,
    /// Changes the eight bytes that the payload names, and answers with their old value.
    AtomicRequest,
    /// Completes the oldest atomic operation with the value in the payload.
    AtomicResponse,
    /// Ends the stream.
    Terminate,
    /// Counts messages of the receiving end as placed.
    Acknowledge,
}

/// What a region must allow to be the target of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Right {
    /// Its own program receives or reads into it.
    LocalWrite,
    /// The peer writes to it.
    RemoteWrite,
    /// The peer reads from it.
    RemoteRead,
    /// The peer changes it atomically.
    RemoteAtomic,
}

/// What an opcode implies; a row of [`OPCODES`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpcodeInfo {
    /// The opcode.
    pub opcode: Opcode,
    /// Short name for traces.
    pub name: &'static str,
    /// Uses the tagged buffer model.
    pub tagged: bool,
    /// Untagged queue number; `None` when tagged.
    pub queue: Option<u32>,
    /// Bytes of RDMAP header after the DDP header; for Terminate, the fixed part.
    pub header_len: usize,
    /// Carries an Invalidate STag.
    pub invalidates: bool,
    /// Wakes a completion channel armed for solicited events.
    pub solicited: bool,
    /// What the receiving end does with it.
    pub delivery: Delivery,
    /// What the memory that it uses at that end must allow; `None` if it uses none.
    pub right: Option<Right>,
    /// RFC that defines it.
    pub rfc: &'static str,
}

/// Every opcode that a stream may carry, in the order of the codes (RFC 5040 figures 4 and 5, RFC 7306
/// figures 2 and 3).
pub static OPCODES: [OpcodeInfo; 13] = {
    const RFC5040: OpcodeInfo = OpcodeInfo {
        opcode: Opcode::Write,
        name: "",
        tagged: false,
        queue: None,
        header_len: 0,
        invalidates: false,
        solicited: false,
        delivery: Delivery::Region,
        right: None,
        rfc: "RFC 5040",
    };
    const SEND: OpcodeInfo = OpcodeInfo {
        queue: Some(QN_SEND),
        delivery: Delivery::Receive,
        right: Some(Right::LocalWrite),
        ..RFC5040
    };
    const RFC7306: OpcodeInfo = OpcodeInfo { rfc: "RFC 7306", ..RFC5040 };
    const IMMEDIATE: OpcodeInfo = OpcodeInfo {
        queue: Some(QN_SEND),
        delivery: Delivery::Immediate,
        header_len: Immediate::LEN,
        ..RFC7306
    };
    [
        OpcodeInfo {
            opcode: Opcode::Write,
            name: "Write",
            tagged: true,
            delivery: Delivery::Region,
            right: Some(Right::RemoteWrite),
            ..RFC5040
        },
        OpcodeInfo {
            opcode: Opcode::ReadRequest,
            name: "ReadReq",
            queue: Some(QN_READ_REQUEST),
            header_len: ReadRequest::LEN,
            delivery: Delivery::ReadRequest,
            right: Some(Right::RemoteRead),
            ..RFC5040
        },
        OpcodeInfo {
            opcode: Opcode::ReadResponse,
            name: "ReadResp",
            tagged: true,
            delivery: Delivery::ReadSink,
            right: Some(Right::LocalWrite),
            ..RFC5040
        },
        OpcodeInfo { opcode: Opcode::Send, name: "Send", ..SEND },
        OpcodeInfo { opcode: Opcode::SendInvalidate, name: "SendInv", invalidates: true, ..SEND },
        OpcodeInfo { opcode: Opcode::SendSe, name: "SendSE", solicited: true, ..SEND },
        OpcodeInfo {
            opcode: Opcode::SendSeInvalidate,
            name: "SendSEInv",
            solicited: true,
            invalidates: true,
            ..SEND
        },
        OpcodeInfo {
            opcode: Opcode::Terminate,
            name: "Terminate",
            queue: Some(QN_TERMINATE),
            header_len: crate::terminate::Header::LEN,
            delivery: Delivery::Terminate,
            ..RFC5040
        },
        OpcodeInfo { opcode: Opcode::Immediate, name: "Imm", ..IMMEDIATE },
        OpcodeInfo { opcode: Opcode::ImmediateSe, name: "ImmSE", solicited: true, ..IMMEDIATE },
        OpcodeInfo {
            opcode: Opcode::AtomicRequest,
            name: "AtomicReq",
            queue: Some(QN_READ_REQUEST),
            header_len: AtomicRequest::LEN,
            delivery: Delivery::AtomicRequest,
            right: Some(Right::RemoteAtomic),
            ..RFC7306
        },
        OpcodeInfo {
            opcode: Opcode::AtomicResponse,
            name: "AtomicResp",
            queue: Some(QN_ATOMIC_RESPONSE),
            header_len: AtomicResponse::LEN,
            delivery: Delivery::AtomicResponse,
            right: Some(Right::LocalWrite),
            ..RFC7306
        },
        OpcodeInfo {
            opcode: Opcode::UwarpAck,
            name: "Ack",
            queue: Some(QN_UWARP_ACK),
            header_len: Ack::LEN,
            delivery: Delivery::Acknowledge,
            rfc: "uwarp",
            ..RFC5040
        },
    ]
};

/// The RDMAP control field, one byte: two bits of version, two reserved, four of opcode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Control {
    /// Two bits; [`RV`] is sent.
    pub version: u8,
    /// Four bits.
    pub opcode: Opcode,
}

impl Control {
    /// Version [`RV`] with this opcode.
    #[inline]
    pub const fn new(opcode: Opcode) -> Self {
        Control { version: RV, opcode }
    }

    /// From the byte that DDP carries as RsvdULP. Never fails: the caller must report a wrong version or
    /// opcode.
    #[inline]
    pub const fn parse(byte: u8) -> Self {
        Control { version: byte >> 6, opcode: Opcode::from_code(byte) }
    }

    /// The byte for DDP's RsvdULP.
    #[inline]
    pub const fn to_byte(self) -> u8 {
        (self.version & 0x03) << 6 | self.opcode.code()
    }
}

/// The opcode's name, with `rv=0` before it when the version is not [`RV`].
impl fmt::Display for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.version != RV {
            write!(f, "rv={} ", self.version)?;
        }
        self.opcode.fmt(f)
    }
}

mod field {
    use core::ops::Range;
    pub mod read {
        use super::Range;
        pub const SINK_STAG: Range<usize> = 0..4;
        pub const SINK_TO: Range<usize> = 4..12;
        pub const SIZE: Range<usize> = 12..16;
        pub const SOURCE_STAG: Range<usize> = 16..20;
        pub const SOURCE_TO: Range<usize> = 20..28;
    }
    pub mod atomic {
        use super::Range;
        pub const OPERATION: usize = 3;
        pub const REQUEST_ID: Range<usize> = 4..8;
        pub const STAG: Range<usize> = 8..12;
        pub const TO: Range<usize> = 12..20;
        pub const ADD_SWAP_DATA: Range<usize> = 20..28;
        pub const ADD_SWAP_MASK: Range<usize> = 28..36;
        pub const COMPARE_DATA: Range<usize> = 36..44;
        pub const COMPARE_MASK: Range<usize> = 44..52;

        pub const RESPONSE_ID: Range<usize> = 0..4;
        pub const ORIGINAL: Range<usize> = 4..12;
    }
}

/// STag in zero-length frames that uwarp generates. It names nothing, and the receiver must not check it (RFC
/// 5041 section 5.2). It is not 0, because some hardware may treat STag 0 specially (siw's source says so);
/// siw and cxgb4 write 1 too.
pub const EMPTY_STAG: u32 = 1;

/// Header of an RDMA Read Request (RFC 5040 section 4.4): source and sink of the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ReadRequest {
    /// STag of the requester's buffer, returned in the Read Response.
    pub sink_stag: u32,
    /// Where in that buffer the data goes.
    pub sink_to: u64,
    /// Bytes to read. 0 is legal; the responder must then not check the source.
    pub size: u32,
    /// STag of the responder's buffer.
    pub source_stag: u32,
    /// Where in that buffer the data is.
    pub source_to: u64,
}

impl ReadRequest {
    /// Bytes on the wire.
    pub const LEN: usize = 28;

    /// A zero-length request: its STags and offsets mean nothing, and the responder must not check them.
    pub const EMPTY: Self =
        ReadRequest { sink_stag: EMPTY_STAG, sink_to: 0, size: 0, source_stag: EMPTY_STAG, source_to: 0 };

    /// Reads the header after the DDP header.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<Self, Truncated> {
        use field::read::*;
        let header = head::<{ Self::LEN }>(bytes)?;
        Ok(ReadRequest {
            sink_stag: be32(&header[SINK_STAG]),
            sink_to: be64(&header[SINK_TO]),
            size: be32(&header[SIZE]),
            source_stag: be32(&header[SOURCE_STAG]),
            source_to: be64(&header[SOURCE_TO]),
        })
    }

    /// Writes the header.
    #[inline]
    pub fn emit(&self, out: &mut [u8; Self::LEN]) {
        use field::read::*;
        out[SINK_STAG].copy_from_slice(&self.sink_stag.to_be_bytes());
        out[SINK_TO].copy_from_slice(&self.sink_to.to_be_bytes());
        out[SIZE].copy_from_slice(&self.size.to_be_bytes());
        out[SOURCE_STAG].copy_from_slice(&self.source_stag.to_be_bytes());
        out[SOURCE_TO].copy_from_slice(&self.source_to.to_be_bytes());
    }

    /// The header as bytes.
    #[inline]
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        self.emit(&mut out);
        out
    }
}

/// `ReadReq sink=0x1/0x1000 src=0x2/0x2000 size=64`
impl fmt::Display for ReadRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "ReadReq sink={:#x}/{:#x} src={:#x}/{:#x} size={}",
            self.sink_stag, self.sink_to, self.source_stag, self.source_to, self.size
        )
    }
}

/// What an Atomic Request does (RFC 7306 figure 5), four bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AtomicOp {
    /// Adds, separately in each field into which the mask divides the 64 bits.
    FetchAdd,
    /// Compares under one mask and swaps under another.
    CmpSwap,
    /// 1 is reserved, 3 to 15 are unassigned.
    Unknown(u8),
}

impl AtomicOp {
    /// From the low four bits of `code`.
    pub const fn from_code(code: u8) -> Self {
        match code & 0x0F {
            0x0 => AtomicOp::FetchAdd,
            0x2 => AtomicOp::CmpSwap,
            other => AtomicOp::Unknown(other),
        }
    }

    /// The four bits.
    pub const fn code(self) -> u8 {
        match self {
            AtomicOp::FetchAdd => 0x0,
            AtomicOp::CmpSwap => 0x2,
            AtomicOp::Unknown(code) => code & 0x0F,
        }
    }
}

/// Header of an Atomic Request (RFC 7306 section 5.2.1): 52 bytes for every operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AtomicRequest {
    /// Operation.
    pub operation: AtomicOp,
    /// Chosen by the requester, returned in the response.
    pub request_id: u32,
    /// STag of the responder's buffer.
    pub stag: u32,
    /// Offset in it; the address it names must be a multiple of 8.
    pub to: u64,
    /// Add Data or Swap Data.
    pub add_swap_data: u64,
    /// Add Mask or Swap Mask. For an ordinary fetch-and-add 0, for an ordinary compare-and-swap all ones.
    pub add_swap_mask: u64,
    /// 0 for FetchAdd.
    pub compare_data: u64,
    /// All ones for FetchAdd.
    pub compare_mask: u64,
}

impl AtomicRequest {
    /// Bytes on the wire.
    pub const LEN: usize = 52;

    /// Reads the header after the DDP header.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<Self, Truncated> {
        use field::atomic::*;
        let header = head::<{ Self::LEN }>(bytes)?;
        Ok(AtomicRequest {
            operation: AtomicOp::from_code(header[OPERATION]),
            request_id: be32(&header[REQUEST_ID]),
            stag: be32(&header[STAG]),
            to: be64(&header[TO]),
            add_swap_data: be64(&header[ADD_SWAP_DATA]),
            add_swap_mask: be64(&header[ADD_SWAP_MASK]),
            compare_data: be64(&header[COMPARE_DATA]),
            compare_mask: be64(&header[COMPARE_MASK]),
        })
    }

    /// Writes the header.
    #[inline]
    pub fn emit(&self, out: &mut [u8; Self::LEN]) {
        use field::atomic::*;
        *out = [0; Self::LEN];
        out[OPERATION] = self.operation.code();
        out[REQUEST_ID].copy_from_slice(&self.request_id.to_be_bytes());
        out[STAG].copy_from_slice(&self.stag.to_be_bytes());
        out[TO].copy_from_slice(&self.to.to_be_bytes());
        out[ADD_SWAP_DATA].copy_from_slice(&self.add_swap_data.to_be_bytes());
        out[ADD_SWAP_MASK].copy_from_slice(&self.add_swap_mask.to_be_bytes());
        out[COMPARE_DATA].copy_from_slice(&self.compare_data.to_be_bytes());
        out[COMPARE_MASK].copy_from_slice(&self.compare_mask.to_be_bytes());
    }

    /// The header as bytes.
    #[inline]
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        self.emit(&mut out);
        out
    }

    /// The result of the operation on `original` (RFC 7306 sections 5.1.1 and 5.1.2). `None`: the operation
    /// is not defined.
    #[inline]
    pub fn apply(&self, original: u64) -> Option<u64> {
        let (data, mask) = (self.add_swap_data, self.add_swap_mask);
        match self.operation {
            // Each bit of the mask is the most significant one of a field. The fields are added without these
            // bits, so no carry leaves a field; the bits themselves are added without a carry.
            AtomicOp::FetchAdd => {
                Some((original & !mask).wrapping_add(data & !mask) ^ ((original ^ data) & mask))
            }
            AtomicOp::CmpSwap if (self.compare_data ^ original) & self.compare_mask == 0 => {
                Some((original & !mask) | (data & mask))
            }
            AtomicOp::CmpSwap => Some(original),
            AtomicOp::Unknown(_) => None,
        }
    }
}

/// `AtomicReq FetchAdd id=1 target=0x2/0x2000 data=0x1/0x0` with compare data and mask for CmpSwap
impl fmt::Display for AtomicRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "AtomicReq {:?} id={} target={:#x}/{:#x} data={:#x}/{:#x}",
            self.operation, self.request_id, self.stag, self.to, self.add_swap_data, self.add_swap_mask
        )?;
        if self.operation != AtomicOp::FetchAdd {
            write!(f, " compare={:#x}/{:#x}", self.compare_data, self.compare_mask)?;
        }
        Ok(())
    }
}

/// Header of an Atomic Response (RFC 7306 section 5.2.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AtomicResponse {
    /// From the request.
    pub request_id: u32,
    /// Value before the operation.
    pub original: u64,
}

impl AtomicResponse {
    /// Bytes on the wire.
    pub const LEN: usize = 12;

    /// Reads the header after the DDP header.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<Self, Truncated> {
        use field::atomic::*;
        let header = head::<{ Self::LEN }>(bytes)?;
        Ok(AtomicResponse { request_id: be32(&header[RESPONSE_ID]), original: be64(&header[ORIGINAL]) })
    }

    /// Writes the header.
    #[inline]
    pub fn emit(&self, out: &mut [u8; Self::LEN]) {
        use field::atomic::*;
        out[RESPONSE_ID].copy_from_slice(&self.request_id.to_be_bytes());
        out[ORIGINAL].copy_from_slice(&self.original.to_be_bytes());
    }

    /// The header as bytes.
    #[inline]
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        self.emit(&mut out);
        out
    }
}

/// `AtomicResp id=1 original=0x7`
impl fmt::Display for AtomicResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AtomicResp id={} original={:#x}", self.request_id, self.original)
    }
}

/// The eight bytes of an Immediate Data message (RFC 7306 section 6.2), opaque to RDMAP.
///
/// The verbs have four bytes. They come first, then four zeros. The one adapter whose driver has the
/// operation does the same (docs/adr/006-immediate-data.md).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Immediate {
    /// In network byte order.
    pub data: [u8; 8],
}

impl Immediate {
    /// Bytes on the wire.
    pub const LEN: usize = 8;

    /// From the verbs' immediate data, in network byte order.
    #[inline]
    pub const fn of_verbs(imm: [u8; 4]) -> Self {
        let [a, b, c, d] = imm;
        Immediate { data: [a, b, c, d, 0, 0, 0, 0] }
    }

    /// The verbs' immediate data. The other four bytes are ignored.
    #[inline]
    pub const fn to_verbs(&self) -> [u8; 4] {
        let [a, b, c, d, ..] = self.data;
        [a, b, c, d]
    }

    /// Reads the data after the DDP header.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<Self, Truncated> {
        Ok(Immediate { data: *head(bytes)? })
    }

    /// Writes the data.
    #[inline]
    pub fn emit(&self, out: &mut [u8; Self::LEN]) {
        *out = self.data;
    }

    /// The data.
    #[inline]
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        self.data
    }
}

/// `Imm 0x0000000012345678`
impl fmt::Display for Immediate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Imm {:#018x}", u64::from_be_bytes(self.data))
    }
}

/// Acknowledgement of placed messages, between two uwarp ends. It is cumulative, so a later one replaces an
/// earlier one. It needs no receive buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ack {
    /// Number of messages that the sender of this frame has placed since the connection began.
    pub completed: u64,
}

impl Ack {
    /// Bytes on the wire.
    pub const LEN: usize = 8;

    /// Reads the header after the DDP header.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<Self, Truncated> {
        Ok(Ack { completed: u64::from_be_bytes(*head(bytes)?) })
    }

    /// Writes the header.
    #[inline]
    pub fn emit(&self, out: &mut [u8; Self::LEN]) {
        *out = self.to_bytes();
    }

    /// The header as bytes.
    #[inline]
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        self.completed.to_be_bytes()
    }
}

/// `Ack completed=7`
impl fmt::Display for Ack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ack completed={}", self.completed)
    }
}

#[cfg(test)]
mod tests {
    use std::string::ToString;

    use super::*;

    #[test]
    fn control_bytes() {
        // Send, Terminate and Read Request, as siw sends them.
        for (byte, opcode) in [(0x43, Opcode::Send), (0x47, Opcode::Terminate), (0x41, Opcode::ReadRequest)] {
            assert_eq!(Control::parse(byte), Control::new(opcode));
            assert_eq!(Control::new(opcode).to_byte(), byte);
        }
        assert_eq!(Control::parse(0x73), Control::new(Opcode::Send), "reserved bits are ignored");
        assert_eq!(Control::parse(0x00), Control { version: 0, opcode: Opcode::Write });
        assert_eq!(Control::parse(0xCD), Control { version: 3, opcode: Opcode::Unknown(0xD) });
        assert_eq!(Control::parse(0x4F).to_string(), "Ack");
        assert_eq!(Control::parse(0x4C).to_string(), "WriteRecord");
        assert_eq!(Control::parse(0x8D).to_string(), "rv=2 Unknown(0xd)");
    }

    #[test]
    fn read_request() {
        let header = ReadRequest {
            sink_stag: 0x0102_0304,
            sink_to: 0x0506_0708_090A_0B0C,
            size: 0x0D0E_0F10,
            source_stag: 0x1112_1314,
            source_to: 0x1516_1718_191A_1B1C,
        };
        let bytes: [u8; 28] = core::array::from_fn(|i| i as u8 + 1);
        assert_eq!(header.to_bytes(), bytes);
        assert_eq!(ReadRequest::parse(&bytes), Ok(header));
        assert_eq!(ReadRequest::parse(&bytes[..27]), Err(Truncated));
        assert_eq!(
            header.to_string(),
            "ReadReq sink=0x1020304/0x5060708090a0b0c src=0x11121314/0x15161718191a1b1c size=219025168"
        );
    }

    #[test]
    fn atomic_request() {
        let header = AtomicRequest {
            operation: AtomicOp::CmpSwap,
            request_id: 0x0506_0708,
            stag: 0x090A_0B0C,
            to: 0x0D0E_0F10_1112_1314,
            add_swap_data: 0x1516_1718_191A_1B1C,
            add_swap_mask: 0x1D1E_1F20_2122_2324,
            compare_data: 0x2526_2728_292A_2B2C,
            compare_mask: 0x2D2E_2F30_3132_3334,
        };
        let mut bytes: [u8; 52] = core::array::from_fn(|i| i as u8 + 1);
        bytes[..4].copy_from_slice(&[0, 0, 0, 2]);
        assert_eq!(header.to_bytes(), bytes);
        bytes[..4].copy_from_slice(&[0xFF, 0xFF, 0xFF, 0xF2]);
        assert_eq!(AtomicRequest::parse(&bytes), Ok(header), "reserved bits are ignored");
        bytes[3] = 1;
        assert_eq!(AtomicRequest::parse(&bytes).unwrap().operation, AtomicOp::Unknown(1));
        assert_eq!(AtomicRequest::parse(&bytes[..51]), Err(Truncated));
        let add = AtomicRequest { operation: AtomicOp::FetchAdd, add_swap_mask: 0, ..header };
        assert_eq!(
            add.to_string(),
            "AtomicReq FetchAdd id=84281096 target=0x90a0b0c/0xd0e0f1011121314 data=0x15161718191a1b1c/0x0"
        );
    }

    /// Section 5.1.1's pseudocode, bit by bit.
    fn add_by_bits(original: u64, data: u64, mask: u64) -> u64 {
        let (mut value, mut carry) = (0, 0);
        for bit in 0..64 {
            let sum = carry + (original >> bit & 1) + (data >> bit & 1);
            value |= (sum & 1) << bit;
            carry = if mask >> bit & 1 == 0 { sum >> 1 } else { 0 };
        }
        value
    }

    #[test]
    fn results_of_atomics() {
        let mut request = AtomicRequest::parse(&[0; AtomicRequest::LEN]).unwrap();
        // Any numbers, the same each time.
        let mut random = 1u64;
        let mut next = || {
            random = random.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
            random ^ random >> 29
        };
        let masks = [0, 1 << 63, u64::MAX, 0x8000_0000_8000_0000, 0x8080_8080_8080_8080];
        for round in 0..1000 {
            let original = if round == 0 { u64::MAX } else { next() };
            request.add_swap_data = next();
            for mask in masks.into_iter().chain([next(), next() & next() & next()]) {
                request.add_swap_mask = mask;
                let expected = add_by_bits(original, request.add_swap_data, mask);
                assert_eq!(request.apply(original), Some(expected), "{original:#x} {request}");
            }
        }
        let swap = |original, compare: (u64, u64), swap: (u64, u64)| {
            let request = AtomicRequest {
                operation: AtomicOp::CmpSwap,
                add_swap_data: swap.0,
                add_swap_mask: swap.1,
                compare_data: compare.0,
                compare_mask: compare.1,
                ..request
            };
            request.apply(original).unwrap()
        };
        assert_eq!(swap(5, (5, u64::MAX), (9, u64::MAX)), 9);
        assert_eq!(swap(6, (5, u64::MAX), (9, u64::MAX)), 6);
        assert_eq!(swap(0x1234, (0x30, 0xF0), (0xFFFF, 0x0F00)), 0x1F34);
        assert_eq!(swap(7, (5, 0), (9, u64::MAX)), 9, "nothing is compared: a swap");
        request.operation = AtomicOp::Unknown(1);
        assert_eq!(request.apply(7), None);
    }

    #[test]
    fn short_headers() {
        let response = AtomicResponse { request_id: 0x0102_0304, original: 0x0506_0708_090A_0B0C };
        let bytes = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12];
        assert_eq!(response.to_bytes(), bytes);
        assert_eq!(AtomicResponse::parse(&bytes), Ok(response));
        assert_eq!(AtomicResponse::parse(&bytes[..11]), Err(Truncated));

        let immediate = Immediate { data: [1, 2, 3, 4, 5, 6, 7, 8] };
        assert_eq!(Immediate::parse(&bytes), Ok(immediate));
        assert_eq!(Immediate::parse(&bytes[..7]), Err(Truncated));
        assert_eq!(immediate.to_string(), "Imm 0x0102030405060708");
        assert_eq!(immediate.to_verbs(), [1, 2, 3, 4]);
        assert_eq!(Immediate::of_verbs([1, 2, 3, 4]).to_bytes(), [1, 2, 3, 4, 0, 0, 0, 0]);

        let ack = Ack { completed: 0x0102_0304_0506_0708 };
        assert_eq!(ack.to_bytes(), bytes[..8]);
        assert_eq!(Ack::parse(&bytes), Ok(ack));
        assert_eq!(Ack::parse(&bytes[..7]), Err(Truncated));
    }

    /// The registry is unlikely to reach uwarp's own queue number.
    #[test]
    fn ack_is_apart() {
        assert_eq!(QN_UWARP_ACK.to_be_bytes(), *b"uW\0\0");
        assert_eq!(Opcode::UwarpAck.code(), UWARP_ACK);
    }
}
