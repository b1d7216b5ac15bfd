//! A DDP segment as one line of text, for golden traces and `UWARP_TRACE`.
//!
//! ```text
//! Send L qn=0 msn=1 mo=0 len=16
//! SendInv L qn=0 msn=2 mo=0 inv=0x1234 len=16
//! Write L stag=0x1234 to=0x7f00 len=64
//! ReadReq L qn=1 msn=1 mo=0 sink=0x1/0x0 src=0x2/0x7f00 size=64
//! Terminate L qn=2 msn=1 mo=0 MPA: CRC mismatch (2/0/02)
//! ```
//!
//! And a datagram, with the extension header in front:
//!
//! ```text
//! UD src=0x4e2103 dst=0x4e2007 qkey=0x11111111 inc=0xcafef00d Send L qn=0 msn=1 mo=0 len=11
//! ```

use core::fmt;

use crate::be32;
use crate::datagram;
use crate::datagram::lookup::{Reply, Request};
use crate::datagram::memory::Memory;
use crate::datagram::part::{Offer, Part};
use crate::datagram::proof::Proof;
use crate::datagram::record;
use crate::ddp::{self, Header};
use crate::rd;
use crate::rdmap::{
    Ack, AtomicRequest, AtomicResponse, Control, Delivery, Immediate, Opcode, QN_UWARP_ACK, ReadRequest,
    UWARP_REQUEST_ACK, UWARP_RNR_RETRY, UWARP_WITH_IMM,
};
use crate::terminate::Terminate;

/// A DDP segment that prints as one line, without a line break.
#[derive(Debug, Clone, Copy)]
pub struct Segment<'a> {
    /// Its header.
    pub header: Header,
    /// The bytes after the header. For Sends, Writes and Read Responses only the length is printed.
    pub payload: &'a [u8],
}

impl<'a> Segment<'a> {
    /// From a whole ULPDU.
    pub fn parse(ulpdu: &'a [u8]) -> Result<Self, ddp::Error> {
        let (header, len) = Header::parse(ulpdu)?;
        Ok(Segment { header, payload: ulpdu.get(len..).unwrap_or(&[]) })
    }
}

impl fmt::Display for Segment<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_header(f, &self.header)?;
        if !write_rdmap_header(f, &self.header, self.payload)? {
            write!(f, " len={}", self.payload.len())?;
        }
        Ok(())
    }
}

/// A DDP segment of which only the headers are available, as one line.
#[derive(Debug, Clone, Copy)]
pub struct Line<'a> {
    /// Its DDP header.
    pub header: Header,
    /// The start of its payload: enough for an RDMAP header where the operation has one.
    pub head: &'a [u8],
    /// Payload bytes in all.
    pub len: usize,
}

impl fmt::Display for Line<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_header(f, &self.header)?;
        if !write_rdmap_header(f, &self.header, self.head)? {
            write!(f, " len={}", self.len)?;
        }
        Ok(())
    }
}

/// A datagram of which only the headers are available, as one line. Where they are no headers of a message,
/// it shows how many bytes there are.
#[derive(Debug, Clone, Copy)]
pub struct DatagramLine<'a> {
    /// The start of the datagram: its headers, and the body of an Error Message. Of a reliable one, all of
    /// it.
    pub head: &'a [u8],
    /// Bytes of the datagram in all, its CRC included.
    pub len: usize,
}

impl fmt::Display for DatagramLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if rd::is_reliable(self.head) && self.head.len() == self.len {
            return match rd::Packet::parse(self.head) {
                Ok(packet) => packet.fmt(f),
                Err(error) => write!(f, "RD, {} bytes: {error}", self.len),
            };
        }
        let Ok(extension) = datagram::Header::parse(self.head) else {
            return write!(f, "{} bytes", self.len);
        };
        // Of a lookup, a proof, and what is about memory, all of it is there.
        if self.head.len() == self.len
            && let Ok(whole) = datagram::Datagram::parse(self.head)
        {
            if let Ok(request) = Request::parse(&whole) {
                return request.fmt(f);
            }
            if let Ok(reply) = Reply::parse(&whole) {
                return reply.fmt(f);
            }
            if let Some(proof) = Proof::parse(&whole) {
                return proof.fmt(f);
            }
            if let Some(memory) = Memory::parse(&whole) {
                return memory.fmt(f);
            }
            if let Some(offer) = Offer::parse(&whole) {
                return offer.fmt(f);
            }
            if let Some(part) = Part::parse(self.head) {
                return part.fmt(f);
            }
        }
        write!(f, "{extension} ")?;
        let body = self.head.get(datagram::Header::LEN..).unwrap_or(&[]);
        if extension.kind() == datagram::Kind::Record
            && let Some((own, ddp)) = body.split_first_chunk::<{ record::OWN_LEN }>()
            && let Ok((header, _)) = Header::parse(ddp)
        {
            let word = |at: usize| own.get(at..at + 4).map_or(0, be32);
            write!(f, "record message={} offset={} of={} ", word(0), word(4), word(8))?;
            return Line { header, head: &[], len: self.len.saturating_sub(record::Head::OVERHEAD) }.fmt(f);
        }
        let Ok((header, len)) = Header::parse(body) else { return write!(f, "{} bytes", self.len) };
        if extension.kind() != datagram::Kind::Message {
            return write!(f, "{}, {} bytes", extension.kind(), self.len);
        }
        let around = datagram::Header::LEN + len + datagram::CRC_LEN;
        let head = body.get(len..).unwrap_or(&[]);
        Line { header, head, len: self.len.saturating_sub(around) }.fmt(f)
    }
}

/// Headers of a segment without its payload, as a Terminate quotes them.
pub(crate) struct Headers<'a> {
    pub(crate) header: Header,
    pub(crate) rdmap_header: &'a [u8],
}

impl fmt::Display for Headers<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_header(f, &self.header)?;
        write_rdmap_header(f, &self.header, self.rdmap_header).map(drop)
    }
}

fn write_header(f: &mut fmt::Formatter<'_>, header: &Header) -> fmt::Result {
    let control = Control::parse(header.rsvdulp());
    let last = if header.last() { " L" } else { "" };
    let ack_request = if header.rsvdulp() & UWARP_REQUEST_ACK != 0 { " ackreq" } else { "" };
    write!(f, "{control}{last}{ack_request}")?;
    match header {
        Header::Tagged(header) => write!(f, " stag={:#x} to={:#x}", header.stag, header.to),
        Header::Untagged(header) => {
            write!(f, " qn={} msn={} mo={}", Queue(header.qn), header.msn, header.mo)?;
            match control.opcode.info() {
                Some(info) if info.invalidates => write!(f, " inv={:#x}", header.rsvdulp32),
                Some(info) if info.delivery == Delivery::Receive && header.rsvdulp & UWARP_WITH_IMM != 0 => {
                    write!(f, " imm={:#010x}", header.rsvdulp32)
                }
                Some(info) if info.opcode == Opcode::UwarpAck && header.rsvdulp32 & UWARP_RNR_RETRY != 0 => {
                    write!(f, " rnr_retry={}", header.rsvdulp32 & 7)
                }
                _ => Ok(()),
            }
        }
    }
}

/// Prints the RDMAP header of an untagged message without its first word, which the line already has. Returns
/// false if the message has no RDMAP header, if the header is truncated, or if this is not the message's
/// first segment.
fn write_rdmap_header(f: &mut fmt::Formatter<'_>, header: &Header, bytes: &[u8]) -> Result<bool, fmt::Error> {
    let Header::Untagged(ddp::Untagged { mo: 0, rsvdulp, .. }) = *header else { return Ok(false) };
    let written = match Control::parse(rsvdulp).opcode {
        Opcode::ReadRequest => ReadRequest::parse(bytes).ok().map(|header| after_name(f, &header)),
        Opcode::Terminate => Terminate::parse(bytes).ok().map(|header| after_name(f, &header)),
        Opcode::Immediate | Opcode::ImmediateSe => {
            Immediate::parse(bytes).ok().map(|header| after_name(f, &header))
        }
        Opcode::AtomicRequest => AtomicRequest::parse(bytes).ok().map(|header| after_name(f, &header)),
        Opcode::AtomicResponse => AtomicResponse::parse(bytes).ok().map(|header| after_name(f, &header)),
        Opcode::UwarpAck => Ack::parse(bytes).ok().map(|header| after_name(f, &header)),
        _ => None,
    };
    Ok(written.transpose()?.is_some())
}

/// A queue number. uwarp's own queue has a name, because its number means nothing to a reader.
struct Queue(u32);

impl fmt::Display for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            QN_UWARP_ACK => f.write_str("ack"),
            number => write!(f, "{number}"),
        }
    }
}

/// Writes what `body` displays, from its first space on.
fn after_name(f: &mut fmt::Formatter<'_>, body: &dyn fmt::Display) -> fmt::Result {
    struct SkipWord<'a, 'b> {
        out: &'a mut fmt::Formatter<'b>,
        skipping: bool,
    }
    impl fmt::Write for SkipWord<'_, '_> {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            if !self.skipping {
                return self.out.write_str(text);
            }
            match text.find(' ') {
                Some(space) => {
                    self.skipping = false;
                    self.out.write_str(&text[space..])
                }
                None => Ok(()),
            }
        }
    }
    fmt::write(&mut SkipWord { out: f, skipping: true }, format_args!("{body}"))
}

#[cfg(test)]
mod tests {
    use std::string::{String, ToString};
    use std::vec::Vec;

    use super::*;
    use crate::ddp::{Tagged, Untagged};
    use crate::introduction::Cookie;
    use crate::rdmap::AtomicOp;
    use crate::terminate::{Mpa, TerminateError};

    fn untagged(opcode: Opcode, rsvdulp32: u32, mo: u32, payload: &[u8]) -> String {
        let qn = opcode.info().and_then(|info| info.queue).unwrap_or(9);
        let rsvdulp = Control::new(opcode).to_byte();
        let header = Header::Untagged(Untagged { last: true, rsvdulp, rsvdulp32, qn, msn: 1, mo });
        Segment { header, payload }.to_string()
    }

    fn tagged(opcode: Opcode, last: bool, payload: &[u8]) -> String {
        let rsvdulp = Control::new(opcode).to_byte();
        let header = Header::Tagged(Tagged { last, stag: 0x1234, to: 0x7F00, rsvdulp });
        Segment { header, payload }.to_string()
    }

    #[test]
    fn lines() {
        let read = ReadRequest { sink_stag: 1, sink_to: 0, size: 64, source_stag: 2, source_to: 0x7F00 };
        let atomic = AtomicRequest {
            operation: AtomicOp::CmpSwap,
            request_id: 7,
            stag: 2,
            to: 0x7F00,
            add_swap_data: 5,
            add_swap_mask: 0xFF,
            compare_data: 4,
            compare_mask: 0xFF,
        };
        let terminate = Terminate::new(TerminateError::Mpa(Mpa::Crc), None);
        let mut reason = [0; 4];
        terminate.emit(&mut reason);
        let lines: Vec<String> = [
            untagged(Opcode::Send, 0, 0, &[0; 16]),
            untagged(Opcode::SendSeInvalidate, 0x1234, 1024, &[0; 16]),
            tagged(Opcode::Write, true, &[0; 64]),
            tagged(Opcode::ReadResponse, false, &[]),
            untagged(Opcode::ReadRequest, 0, 0, &read.to_bytes()),
            untagged(Opcode::ReadRequest, 0, 0, &read.to_bytes()[..27]),
            untagged(Opcode::Terminate, 0, 0, &reason),
            untagged(Opcode::ImmediateSe, 0, 0, &[0, 0, 0, 0, 0, 0, 0, 9]),
            untagged(Opcode::AtomicRequest, 0, 0, &atomic.to_bytes()),
            untagged(Opcode::AtomicResponse, 0, 0, &[0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 4]),
            untagged(Opcode::UwarpAck, 0, 0, &[0, 0, 0, 0, 0, 0, 0, 3]),
            untagged(Opcode::Unknown(0xD), 0, 0, &[0; 5]),
        ]
        .into();
        insta::assert_snapshot!(lines.join("\n"), @r"
        Send L qn=0 msn=1 mo=0 len=16
        SendSEInv L qn=0 msn=1 mo=1024 inv=0x1234 len=16
        Write L stag=0x1234 to=0x7f00 len=64
        ReadResp stag=0x1234 to=0x7f00 len=0
        ReadReq L qn=1 msn=1 mo=0 sink=0x1/0x0 src=0x2/0x7f00 size=64
        ReadReq L qn=1 msn=1 mo=0 len=27
        Terminate L qn=2 msn=1 mo=0 MPA: CRC mismatch (2/0/02)
        ImmSE L qn=0 msn=1 mo=0 0x0000000000000009
        AtomicReq L qn=1 msn=1 mo=0 CmpSwap id=7 target=0x2/0x7f00 data=0x5/0xff compare=0x4/0xff
        AtomicResp L qn=3 msn=1 mo=0 id=7 original=0x4
        Ack L qn=ack msn=1 mo=0 completed=3
        Unknown(0xd) L qn=9 msn=1 mo=0 len=5
        ");
    }

    #[test]
    fn lines_of_datagrams() {
        let extension = |flags| datagram::Header {
            flags,
            source_qpn: 0x11,
            destination_qpn: 0x22,
            qkey: 1,
            immediate: 7,
            incarnation: 9,
        };
        let ddp = |opcode, qn| Untagged {
            last: true,
            rsvdulp: Control::new(opcode).to_byte(),
            rsvdulp32: 0,
            qn,
            msn: 5,
            mo: 0,
        };
        let line = |flags, ddp: Untagged, body: &[u8], len| {
            let head = [&extension(flags).to_bytes()[..], &ddp.to_bytes(), body].concat();
            DatagramLine { head: &head, len }.to_string()
        };
        let ask = Proof { source_qpn: 0x11, destination_qpn: 0x22, token: 3, cookie: None };
        let cookie = Some(Cookie { made: 4, hash: 5 });
        let piece = record::Head {
            source_qpn: 0x11,
            destination_qpn: 0x22,
            qkey: 1,
            immediate: [0, 0, 0, 7],
            solicited: false,
            incarnation: 9,
            message: 3,
            offset: 200,
            message_len: 999,
            job_key: 4,
            stag: 0x1234,
            to: 0x7f00,
        };
        let answer = Proof { source_qpn: 0x22, destination_qpn: 0x11, cookie, ..ask };
        let lines: Vec<String> = [
            line(0, ddp(Opcode::Send, 0), &[], 42 + 11),
            line(datagram::FLAG_IMMEDIATE, ddp(Opcode::SendSe, 0), &[], 42),
            line(0, ddp(Opcode::Terminate, 2), &[0x12, 1, 0, 0], 46),
            line(1, ddp(Opcode::Send, 0), &[], 176),
            line(3, ddp(Opcode::Send, 0), &[], 48),
            DatagramLine { head: &ask.to_bytes(), len: Proof::LEN }.to_string(),
            DatagramLine { head: &answer.to_bytes(), len: Proof::LEN }.to_string(),
            DatagramLine { head: &piece.to_bytes(false), len: record::Head::OVERHEAD + 100 }
                .to_string()
                .replace("UD src=0x11 dst=0x22 qkey=0x1 imm=0x7", "…"),
            DatagramLine { head: &piece.to_bytes(true)[..30], len: record::Head::OVERHEAD + 100 }.to_string(),
            DatagramLine { head: &extension(0).to_bytes(), len: 24 }.to_string(),
            DatagramLine { head: &[9; 60], len: 60 }.to_string(),
            DatagramLine { head: &[], len: 0 }.to_string(),
        ]
        .into();
        insta::assert_snapshot!(lines.join("\n"), @r"
        UD src=0x11 dst=0x22 qkey=0x1 inc=0x9 Send L qn=0 msn=5 mo=0 len=11
        UD src=0x11 dst=0x22 qkey=0x1 imm=0x7 inc=0x9 SendSE L qn=0 msn=5 mo=0 len=0
        UD src=0x11 dst=0x22 qkey=0x1 inc=0x9 Terminate L qn=2 msn=5 mo=0 DDP: invalid queue number (1/2/01)
        UD src=0x11 dst=0x22 qkey=0x1 inc=0x9 lookup request, 176 bytes
        UD src=0x11 dst=0x22 qkey=0x1 inc=0x9 proof request, 48 bytes
        ProofRequest src=0x11 dst=0x22
        ProofReply src=0x22 dst=0x11
        … inc=0x9 record message=3 offset=200 of=999 WriteRecord stag=0x1234 to=0x7fc8 len=100
        UD src=0x11 dst=0x22 qkey=0x1 imm=0x7 inc=0x9 158 bytes
        UD src=0x11 dst=0x22 qkey=0x1 inc=0x9 24 bytes
        60 bytes
        0 bytes
        ");
    }
}
