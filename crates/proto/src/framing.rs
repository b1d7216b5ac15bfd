//! Framing: how DDP segments (ULPDUs) are delimited and protected in what the lower layer carries, both ways.
//!
//! [`Framing`] is what set-up has negotiated. A [`Sender`] and a [`Receiver`] are made from it for each
//! stream. MPA (RFC 5044) is the only framing today; another one would be a second variant of each enum here.
//! Every call is a `match`, so dispatch is static.
//!
//! This module does not touch registered memory. On the way out the owner appends the payload to the buffer
//! that the sender fills, or queues a reference to it between the bytes that [`Sender::begin`] and
//! [`Sender::end`] append. On the way in the receiver finds the place of a ULPDU, or how much of a large one
//! can be received straight into place. So `crates/rnic` frames nothing itself. Datagrams have no stream and
//! so no `Framing` (docs/adr/024).
//!
//! Rejected: a trait with a type parameter, because the queue pair would become generic, and with it the
//! driver's queue pair, its maps and its handles; trait objects, because of an indirect call for each segment
//! and no inlining of the copy with its CRC.

pub mod input;
pub mod mpa;

use std::convert::Infallible;

use uwarp_wire::crc::Crc32c;
use uwarp_wire::terminate::TerminateError;

pub use input::{Large, Rest, Step};
pub use mpa::Mpa;

use crate::tx::OutSegment;

/// What both ends have negotiated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Framing {
    /// FPDUs in a byte stream.
    Mpa(Mpa),
}

impl Framing {
    /// MPA without CRC and without markers.
    pub const PLAIN: Self = Self::Mpa(Mpa { crc: false, send_markers: false, receive_markers: false });

    /// Largest ULPDU to send. `emss` is the effective maximum segment size of the path in bytes. A uwarp peer
    /// takes larger ones.
    pub fn mulpdu(&self, emss: usize, uwarp_peer: bool) -> usize {
        match self {
            Self::Mpa(mpa) => mpa.mulpdu(emss, uwarp_peer),
        }
    }

    /// The sending side of a stream that starts now.
    pub fn sender(&self) -> Sender {
        match self {
            Self::Mpa(mpa) => Sender::Mpa(mpa::Sender::new(mpa)),
        }
    }

    /// The receiving side of a stream that starts now.
    pub fn receiver(&self) -> Receiver {
        match self {
            Self::Mpa(mpa) => Receiver::Mpa(mpa::Receiver::new(mpa)),
        }
    }
}

/// MPA with CRC and without markers.
impl Default for Framing {
    fn default() -> Self {
        Self::Mpa(Mpa::default())
    }
}

/// Makes frames.
#[derive(Debug)]
pub enum Sender {
    /// FPDUs.
    Mpa(mpa::Sender),
}

impl Sender {
    /// Whether the payload of this segment may be referred to until the lower layer takes it: then call
    /// [`Self::begin`] and [`Self::end`]. Otherwise it must be copied: call [`Self::stage`].
    #[inline]
    pub fn takes_reference(&self, segment: &OutSegment) -> bool {
        match self {
            Self::Mpa(mpa) => mpa.takes_reference(segment),
        }
    }

    /// Appends one whole frame to `buf`. `payload` appends the segment's payload, and adds it to the CRC
    /// while it copies, if it gets one. If `payload` fails, `buf` is unchanged.
    ///
    /// The CRC is always computed over bytes in `buf`, which nothing else can change (docs/adr/003).
    #[inline]
    pub fn stage<E>(
        &mut self,
        buf: &mut Vec<u8>,
        segment: &OutSegment,
        payload: impl FnOnce(&mut Vec<u8>, Option<&mut Crc32c>) -> Result<(), E>,
    ) -> Result<(), E> {
        match self {
            Self::Mpa(mpa) => mpa.stage(buf, segment, payload),
        }
    }

    /// The same with the payload in a slice.
    #[inline]
    pub fn stage_bytes(&mut self, buf: &mut Vec<u8>, segment: &OutSegment, bytes: &[u8]) {
        let Ok(()) = self.stage(buf, segment, |buf, crc| {
            buf.extend_from_slice(bytes);
            if let Some(crc) = crc {
                crc.update(bytes);
            }
            Ok::<_, Infallible>(())
        });
    }

    /// Appends the bytes before a referenced payload.
    #[inline]
    pub fn begin(&mut self, buf: &mut Vec<u8>, segment: &OutSegment) {
        match self {
            Self::Mpa(mpa) => mpa.begin(buf, segment),
        }
    }

    /// Appends the bytes after a referenced payload.
    #[inline]
    pub fn end(&mut self, buf: &mut Vec<u8>, segment: &OutSegment) {
        match self {
            Self::Mpa(mpa) => mpa.end(buf, segment),
        }
    }

    /// The last `bytes` bytes that were appended, which are whole frames, will not be sent after all.
    pub fn unsend(&mut self, bytes: usize) {
        match self {
            Self::Mpa(mpa) => mpa.unsend(bytes),
        }
    }

    /// How to find its frames again in a buffer of bytes to send.
    pub fn boundaries(&self) -> Boundaries {
        match self {
            Self::Mpa(mpa) if mpa.lengths_are_whole() => Boundaries::MpaLength,
            Self::Mpa(_) => Boundaries::Unknown,
        }
    }
}

/// How to find the frames in a buffer of bytes to send again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Boundaries {
    /// Each begins with MPA's length field.
    #[default]
    MpaLength,
    /// They cannot be found.
    Unknown,
}

impl Boundaries {
    /// Whether [`Self::next`] finds them.
    #[inline]
    pub fn are_known(self) -> bool {
        self != Self::Unknown
    }

    /// Where the frame after the one at `at` begins; `usize::MAX` if that is not known.
    pub fn next(self, buf: &[u8], at: usize) -> usize {
        let rest = buf.get(at..).unwrap_or(&[]);
        let len = match self {
            Self::MpaLength => mpa::frame_len(rest),
            Self::Unknown => None,
        };
        len.map_or(usize::MAX, |len| at + len)
    }
}

/// Finds ULPDUs in received bytes. Holds no received bytes.
#[derive(Debug)]
pub enum Receiver {
    /// In a stream of FPDUs.
    Mpa(mpa::Receiver),
}

impl Receiver {
    /// Looks for a ULPDU at the start of `input`, which begins where the last frame ended. `scratch` holds a
    /// ULPDU that is not contiguous in `input`.
    ///
    /// Call again with the rest after [`Step::Ulpdu`], with more bytes after [`Step::Incomplete`]. An error
    /// ends the stream: the Terminate to send is returned (RFC 5044 section 8).
    #[inline]
    pub fn next<'a>(
        &mut self,
        input: &'a [u8],
        scratch: &'a mut Vec<u8>,
    ) -> Result<Step<'a>, TerminateError> {
        match self {
            Self::Mpa(mpa) => mpa.next(input, scratch),
        }
    }

    /// Takes back the last ULPDU, of `consumed` bytes: the owner could not place it yet and will pass it in
    /// again.
    pub fn rewind(&mut self, consumed: usize) {
        match self {
            Self::Mpa(mpa) => mpa.rewind(consumed),
        }
    }

    /// How many bytes the owner's buffer of `buffer` bytes should hold at most after the next receive,
    /// including `left_over`, which begins where the last frame ended.
    #[inline]
    pub fn plan(&mut self, left_over: &[u8], buffer: usize) -> usize {
        match self {
            Self::Mpa(mpa) => mpa.plan(left_over, buffer),
        }
    }

    /// The large frame that `input` begins with, if it is incomplete and the rest of its payload can be
    /// received straight into place.
    pub fn large<'a>(&self, input: &'a [u8]) -> Option<Large<'a>> {
        match self {
            Self::Mpa(mpa) => mpa.large(input),
        }
    }

    /// From now on the rest of `large` is received straight into place: all but the first `there` of the
    /// `payload_len` bytes of its payload.
    pub fn begin_rest(&mut self, large: &Large<'_>, payload_len: usize, there: usize) -> Rest {
        match self {
            Self::Mpa(mpa) => mpa.begin_rest(large, payload_len, there),
        }
    }

    /// The error of a peer that ends the stream inside a frame.
    pub fn cut_short(&self) -> TerminateError {
        match self {
            Self::Mpa(mpa) => mpa.cut_short(),
        }
    }
}
