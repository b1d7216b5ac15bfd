//! One line of text for a DDP segment: the form of golden traces and of `UWARP_TRACE`.
//!
//! ```text
//! Send L qn=0 msn=1 mo=0 len=16
//! SendInv L qn=0 msn=2 mo=0 inv=0x1234 len=16
//! Write L stag=0x1234 to=0x7f00 len=64
//! ReadReq L qn=1 msn=1 mo=0 sink=0x1/0x0 src=0x2/0x7f00 size=64
//! Terminate L qn=2 msn=1 mo=0 MPA: CRC mismatch (2/0/02)
//! ```

use core::fmt;

use crate::ddp::{self, Header};
use crate::rdmap::{Ack, AtomicRequest, AtomicResponse, Control, Immediate, Opcode, ReadRequest};
use crate::terminate::Terminate;

/// A DDP segment that prints as one line without a line break.
#[derive(Debug, Clone, Copy)]
pub struct Segment<'a> {
    /// Its header.
    pub header: Header,
    /// What follows the header; of the payload of Sends, Writes and Read Responses only the length is printed.
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
        let control = Control::parse(self.header.rsvdulp());
        let last = if self.header.last() { " L" } else { "" };
        match self.header {
            Header::Tagged(header) => {
                write!(f, "{control}{last} stag={:#x} to={:#x}", header.stag, header.to)?;
            }
            Header::Untagged(header) => {
                write!(f, "{control}{last} qn={} msn={} mo={}", header.qn, header.msn, header.mo)?;
                if control.opcode.info().is_some_and(|info| info.invalidates) {
                    write!(f, " inv={:#x}", header.rsvdulp32)?;
                }
                if header.mo == 0 && self.write_body(f, control.opcode)? {
                    return Ok(());
                }
            }
        }
        write!(f, " len={}", self.payload.len())
    }
}

impl Segment<'_> {
    /// Prints the RDMAP header that stands in the payload, its first word left out (the line has it already).
    /// False when the opcode has none or it is cut short.
    fn write_body(&self, f: &mut fmt::Formatter<'_>, opcode: Opcode) -> Result<bool, fmt::Error> {
        let payload = self.payload;
        let written = match opcode {
            Opcode::ReadRequest => ReadRequest::parse(payload).ok().map(|body| after_name(f, &body)),
            Opcode::Terminate => Terminate::parse(payload).ok().map(|body| after_name(f, &body)),
            Opcode::Immediate | Opcode::ImmediateSe => {
                Immediate::parse(payload).ok().map(|body| after_name(f, &body))
            }
            Opcode::AtomicRequest => AtomicRequest::parse(payload).ok().map(|body| after_name(f, &body)),
            Opcode::AtomicResponse => AtomicResponse::parse(payload).ok().map(|body| after_name(f, &body)),
            Opcode::UwarpAck => Ack::parse(payload).ok().map(|body| after_name(f, &body)),
            _ => None,
        };
        written.transpose().map(|done| done.is_some())
    }
}

/// Writes what `body` displays after its first word.
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
