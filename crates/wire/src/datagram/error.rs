//! The Error Message, which replaces the Terminate of a connection (docs/datagram-iwarp.md section 7): a
//! message on queue 2 that names a message by its MSN and says what was wrong with it.
//!
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +---------------------------------------------------------------+
//! |                   extension header, 20 bytes                  |
//! +---------------------------------------------------------------+
//! | untagged DDP header, 18 bytes: opcode Terminate, QN 2, the    |
//! | MSN of the message in error, MO 0                             |
//! +-------+-------+---------------+-------------------------------+
//! | Layer | EType |  Error Code   |              Zero             |
//! +-------+-------+---------------+-------------------------------+
//! |                            CRC32c                             |
//! +---------------------------------------------------------------+
//! ```

use core::fmt;

use super::{CRC_LEN, Datagram, Header, Kind, QPN_MULTICAST, seal};
use crate::ddp::{self, QN_TERMINATE, Untagged};
use crate::rdmap::{Control, Opcode, RV};
use crate::terminate::TerminateError;

/// Why a datagram is not an Error Message. The receiver counts and drops it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Error {
    /// The extension header has flags or a kind that Error Messages do not have.
    Flags(u8),
    /// The DDP or RDMAP header is not that of an Error Message.
    Headers,
    /// Another length than [`ErrorMessage::LEN`].
    Length(usize),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Flags(flags) => write!(f, "flags {flags:#04x} in an Error Message"),
            Error::Headers => f.write_str("not an Error Message"),
            Error::Length(len) => {
                write!(f, "Error Message of {len} bytes, expected {}", ErrorMessage::LEN)
            }
        }
    }
}

impl core::error::Error for Error {}

/// An Error Message. It is advisory: it ends nothing and changes no state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ErrorMessage {
    /// The queue pair that found the error.
    pub source_qpn: u32,
    /// The queue pair that sent the message in error.
    pub destination_qpn: u32,
    /// Copied from the message in error.
    pub qkey: u32,
    /// Copied from the message in error: the sender accepts only its own.
    pub incarnation: u32,
    /// Of the message in error.
    pub msn: u32,
    /// What was wrong.
    pub error: TerminateError,
}

impl ErrorMessage {
    /// Bytes of the whole datagram.
    pub const LEN: usize = Header::LEN + Untagged::LEN + Self::BODY_LEN + CRC_LEN;

    const BODY_LEN: usize = 4;

    /// Reads a datagram. The caller checks the CRC, the destination, the Q_Key and the incarnation.
    pub fn parse(datagram: &Datagram<'_>) -> Result<Self, Error> {
        let header = datagram.header();
        if header.flags != Kind::Message.code() {
            return Err(Error::Flags(header.flags));
        }
        let Ok((ddp::Header::Untagged(ddp), len)) = ddp::Header::parse(datagram.body()) else {
            return Err(Error::Headers);
        };
        let control = Control::parse(ddp.rsvdulp);
        let is_error = control.version == RV && control.opcode == Opcode::Terminate;
        if !is_error || !ddp.last || ddp.qn != QN_TERMINATE || ddp.mo != 0 {
            return Err(Error::Headers);
        }
        let &[layer_etype, code, _, _] = datagram.body().get(len..).unwrap_or(&[]) else {
            return Err(Error::Length(datagram.datagram_len()));
        };
        Ok(ErrorMessage {
            source_qpn: header.source_qpn,
            destination_qpn: header.destination_qpn,
            qkey: header.qkey,
            incarnation: header.incarnation,
            msn: ddp.msn,
            error: TerminateError::from_codes(layer_etype >> 4, layer_etype, code),
        })
    }

    /// The answer to a datagram. `None` if there must be none: the answer would be longer than the datagram,
    /// the datagram went to a group, it has no MSN, or it is an Error Message itself.
    pub fn answer(datagram: &Datagram<'_>, error: TerminateError) -> Option<Self> {
        let header = datagram.header();
        // The MSN lies at the same place in every untagged header, even if other fields are wrong.
        let ddp = datagram.body().first_chunk::<{ Untagged::LEN }>()?;
        let is_tagged = ddp[0] & 0x80 != 0;
        let is_error = Control::parse(ddp[1]).opcode == Opcode::Terminate;
        let to_group = header.destination_qpn == QPN_MULTICAST;
        let is_short = datagram.datagram_len() < Self::LEN;
        if header.kind() != Kind::Message || is_tagged || is_error || to_group || is_short {
            return None;
        }
        Some(ErrorMessage {
            source_qpn: header.destination_qpn,
            destination_qpn: header.source_qpn,
            qkey: header.qkey,
            incarnation: header.incarnation,
            msn: crate::be32(&ddp[10..14]),
            error,
        })
    }

    /// Writes the whole datagram with its CRC.
    pub fn emit(&self, out: &mut [u8; Self::LEN]) {
        let header = Header {
            flags: Kind::Message.code(),
            source_qpn: self.source_qpn,
            destination_qpn: self.destination_qpn,
            qkey: self.qkey,
            immediate: 0,
            incarnation: self.incarnation,
        };
        let rsvdulp = Control::new(Opcode::Terminate).to_byte();
        let ddp = Untagged { last: true, rsvdulp, rsvdulp32: 0, qn: QN_TERMINATE, msn: self.msn, mo: 0 };
        let (layer, etype, code) = self.error.codes();
        const BODY: usize = Header::LEN + Untagged::LEN;
        out[..Header::LEN].copy_from_slice(&header.to_bytes());
        out[Header::LEN..BODY].copy_from_slice(&ddp.to_bytes());
        out[BODY..Self::LEN - CRC_LEN].copy_from_slice(&[layer << 4 | etype, code, 0, 0]);
        seal(out);
    }

    /// The whole datagram.
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        self.emit(&mut out);
        out
    }
}

/// `UD src=0x22 dst=0x11 qkey=0x1 inc=0x9 Error msn=1 DDP: message too long for its buffer (1/2/05)`
impl fmt::Display for ErrorMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ErrorMessage { source_qpn, destination_qpn, qkey, incarnation, msn, error } = self;
        write!(
            f,
            "UD src={source_qpn:#x} dst={destination_qpn:#x} qkey={qkey:#x} inc={incarnation:#x} \
             Error msn={msn} {error}"
        )
    }
}
