//! A packet that is being built: headers here, payload by name.

use uwarp_wire::crc;
use uwarp_wire::datagram::CRC_LEN;
use uwarp_wire::rd::Header;
use uwarp_wire::rd::ack;
use uwarp_wire::rd::chunk::{self, Abandon, Chunk, Stream};
use uwarp_wire::rd::run::Run;
use uwarp_wire::rd::segment::{ACKNOWLEDGE, Segment};

use super::message::{Payload, Ticket};

/// A packet to send, made by [`Rd::poll_transmit`](super::Rd::poll_transmit), or several that differ in
/// counts alone ([`Self::allow`]). It is reused, so that nothing is allocated for each packet.
///
/// The machine has no payload. So the packet is a string of headers, and a list of payloads that go in front
/// of some of their bytes; the CRC over all of it goes behind.
#[derive(Debug, Default)]
pub struct PacketBuf {
    heads: Vec<u8>,
    payloads: Vec<Payload>,
    /// Where the segment of each payload begins.
    starts: Vec<usize>,
    /// Bytes of all payloads.
    payload_len: usize,
    /// Where the flags of the last segment are.
    last_segment: Option<usize>,
    /// The packet is in `heads`, with its CRC.
    is_sealed: bool,
    /// Further packets that may be made with the next one, and bytes of all.
    most_more: u32,
    most_bytes: usize,
    /// Those that were made with this one, and whether the last of them asks for an acknowledgement.
    run: Option<Run>,
    more: u32,
    run_asks: bool,
}

impl PacketBuf {
    /// Without a packet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Lets the next one be up to so many packets to the same peer, all of one length, with so many bytes; in
    /// any case it is one.
    pub fn allow(&mut self, packets: usize, bytes: usize) {
        self.most_more = u32::try_from(packets.saturating_sub(1)).unwrap_or(u32::MAX);
        self.most_bytes = bytes;
    }

    /// How many packets there are.
    pub fn packets(&self) -> u32 {
        self.more + 1
    }

    /// All headers, one after the other: of the first packet, like what follows.
    pub fn heads(&self) -> &[u8] {
        &self.heads
    }

    /// The payloads, ascending by their place.
    pub fn payloads(&self) -> &[Payload] {
        &self.payloads
    }

    /// Bytes of the whole packet.
    pub fn packet_len(&self) -> usize {
        self.heads.len() + self.payload_len + if self.is_sealed { 0 } else { CRC_LEN }
    }

    /// Writes a whole packet behind what is in `out`: the first one, or one of those behind it, up to
    /// [`Self::packets`]. `copy` adds the bytes of a payload there.
    pub fn assemble(&self, nth: u32, out: &mut Vec<u8>, mut copy: impl FnMut(&Payload, &mut Vec<u8>)) {
        let start = out.len();
        let mut at = 0;
        if let (Some(run), Some(payload), 1..) = (&self.run, self.payloads.first(), nth) {
            let head = run.head(nth, self.run_asks && nth == self.more);
            out.extend_from_slice(head.bytes());
            copy(
                &Payload { offset: payload.offset.wrapping_add(nth.wrapping_mul(payload.len)), ..*payload },
                out,
            );
            return seal(start, out);
        }
        for payload in &self.payloads {
            out.extend_from_slice(self.heads.get(at..payload.at).unwrap_or(&[]));
            copy(payload, out);
            at = payload.at;
        }
        out.extend_from_slice(self.heads.get(at..).unwrap_or(&[]));
        if !self.is_sealed {
            seal(start, out);
        }
    }

    /// Takes out the segments of some messages, which cannot be read. Returns whether anything is left.
    pub fn leave_out(&mut self, is_out: impl Fn(Ticket) -> bool) -> bool {
        let mut index = 0;
        while let (Some(payload), Some(&start)) = (self.payloads.get(index), self.starts.get(index)) {
            if !is_out(payload.ticket) {
                index += 1;
                continue;
            }
            let (end, len) = (payload.at, payload.at - start);
            self.payload_len -= payload.len as usize;
            self.heads.drain(start..end);
            self.payloads.remove(index);
            self.starts.remove(index);
            self.payloads.iter_mut().skip(index).for_each(|later| later.at -= len);
            self.starts.iter_mut().skip(index).for_each(|later| *later -= len);
            // Whoever is not asked for an acknowledgement sends it a little later.
            self.last_segment = match self.last_segment {
                Some(at) if at >= end => Some(at - len),
                at => at.filter(|at| *at < start),
            };
        }
        self.heads.len() > Header::LEN
    }

    pub(super) fn begin(&mut self, header: &Header) {
        self.heads.clear();
        self.heads.extend_from_slice(&header.to_bytes());
        self.payloads.clear();
        self.starts.clear();
        (self.payload_len, self.last_segment, self.is_sealed) = (0, None, false);
        (self.run, self.more, self.run_asks) = (None, 0, false);
    }

    /// A whole packet that needs nothing more.
    pub(super) fn put_sealed(&mut self, packet: &[u8]) {
        self.heads.clear();
        self.heads.extend_from_slice(packet);
        self.payloads.clear();
        self.starts.clear();
        (self.payload_len, self.last_segment, self.is_sealed) = (0, None, true);
        (self.run, self.more, self.run_asks) = (None, 0, false);
    }

    pub(super) fn put(&mut self, bytes: &[u8]) {
        self.heads.extend_from_slice(bytes);
    }

    fn grow(&mut self, len: usize) -> &mut [u8] {
        let at = self.heads.len();
        self.heads.resize(at + len, 0);
        self.heads.get_mut(at..).unwrap_or(&mut [])
    }

    /// A chunk of fixed length.
    pub(super) fn put_chunk(&mut self, chunk: &Chunk<'_>) {
        let mut out = [0; 24];
        let len = chunk.emit_fixed(&mut out);
        self.put(out.get(..len).unwrap_or(&[]));
    }

    /// Nothing, so that the packet has this length, if it is not that long yet.
    pub(super) fn pad_to(&mut self, len: usize) {
        let missing = len.saturating_sub(self.packet_len());
        if missing >= chunk::HEADER_LEN {
            chunk::emit_pad(missing, self.grow(missing));
        }
    }

    pub(super) fn put_ack(&mut self, head: &ack::Head, packets: &[ack::Range], messages: &[ack::Range]) {
        let out = self.grow(head.chunk_len(packets.len() + messages.len()));
        head.emit(packets, messages, out);
    }

    pub(super) fn put_abandon(&mut self, messages: &[u64]) {
        let out = self.grow(Abandon::chunk_len(messages.len()));
        Abandon::emit(messages.iter().map(|message| uwarp_wire::rd::low(*message)), out);
    }

    pub(super) fn put_segment(&mut self, segment: &Segment<'_>, mut payload: Payload) {
        let start = self.heads.len();
        self.last_segment = Some(start + 1);
        let len = payload.len as usize;
        let rest = segment.ddp.len() + len;
        let out = self.grow(segment.head_len());
        let at = segment.head.emit(rest, out);
        segment.ddp.emit(out.get_mut(at..).unwrap_or(&mut []));
        if len > 0 {
            payload.at = self.heads.len();
            self.payload_len += len;
            self.payloads.push(payload);
            self.starts.push(start);
        }
    }

    /// A part of a stream, which counts as a segment here.
    pub(super) fn put_stream(&mut self, chunk: &Stream<'_>, mut payload: Payload) {
        let start = self.heads.len();
        self.last_segment = Some(start + 1);
        let len = payload.len as usize;
        let out = self.grow(chunk.head_len());
        chunk.emit_head_for(len, out);
        if len > 0 {
            payload.at = self.heads.len();
            self.payload_len += len;
            self.payloads.push(payload);
            self.starts.push(start);
        }
    }

    pub(super) fn has_segments(&self) -> bool {
        self.last_segment.is_some()
    }

    /// How many packets may be made with this one that bring the next parts of its message.
    pub(super) fn may_go_on(&mut self) -> u32 {
        let [payload] = self.payloads[..] else { return 0 };
        if self.most_more == 0 || payload.at != self.heads.len() {
            return 0;
        }
        self.run = Run::of(&self.heads, self.payload_len);
        let of_bytes = (self.most_bytes / self.packet_len()).saturating_sub(1);
        let most = self.most_more.min(u32::try_from(of_bytes).unwrap_or(u32::MAX));
        self.run.as_ref().map_or(0, |run| run.most().min(most))
    }

    /// There is one more.
    pub(super) fn go_on(&mut self) {
        self.more += 1;
    }

    /// The last segment asks for an acknowledgement at once.
    pub(super) fn ask_for_ack(&mut self) {
        if self.more > 0 {
            self.run_asks = true;
            return;
        }
        if let Some(flags) = self.last_segment.and_then(|at| self.heads.get_mut(at)) {
            *flags |= ACKNOWLEDGE;
        }
    }
}

/// Adds the CRC of a packet that begins at `start`.
fn seal(start: usize, out: &mut Vec<u8>) {
    let sum = crc::crc32c(out.get(start..).unwrap_or(&[]));
    out.extend_from_slice(&crc::to_wire(sum));
}
