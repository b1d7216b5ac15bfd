//! The attacker's encoder. Numbers and layouts are from the RFCs' figures.

/// First 16 bytes of an MPA request (RFC 5044 section 7.1.1).
pub const REQUEST: [u8; 16] = *b"MPA ID Req Frame";
/// First 16 bytes of an MPA reply.
pub const REPLY: [u8; 16] = *b"MPA ID Rep Frame";

/// Flag bits of both (RFC 5044 section 7.1.1, RFC 6581 section 6).
pub const MARKERS: u8 = 0x80;
/// CRC wanted.
pub const CRC: u8 = 0x40;
/// Rejected.
pub const REJECT: u8 = 0x20;
/// Enhanced set-up data follows.
pub const ENHANCED: u8 = 0x10;
/// The reserved bit by which a uwarp initiator shows itself (the project's ADR 002).
pub const UWARP_A: u8 = 0x04;
/// The reserved bit by which a uwarp responder answers.
pub const UWARP_B: u8 = 0x02;

/// Control bits of the enhanced data: peer-to-peer model, and the three ready-to-receive indications
/// (RFC 6581 section 9.2), in the order A, B, C, D.
pub const P2P: u8 = 8;
/// A zero-length Write may be the indication.
pub const RTR_WRITE: u8 = 2;
/// A zero-length Read may be.
pub const RTR_READ: u8 = 1;

/// RDMAP opcodes (RFC 5040 figure 4).
pub const WRITE: u8 = 0;
/// Read Request.
pub const READ_REQUEST: u8 = 1;
/// Read Response.
pub const READ_RESPONSE: u8 = 2;
/// Send.
pub const SEND: u8 = 3;
/// Send with Invalidate.
pub const SEND_INVALIDATE: u8 = 4;
/// Terminate.
pub const TERMINATE: u8 = 7;
/// Atomic Request (RFC 7306 figure 4).
pub const ATOMIC_REQUEST: u8 = 10;
/// Atomic Response.
pub const ATOMIC_RESPONSE: u8 = 11;

/// Operations of an Atomic Request (RFC 7306 figure 6).
pub const FETCH_ADD: u8 = 0;
/// Compare and swap.
pub const CMP_SWAP: u8 = 2;

/// An MPA request or reply, every field of which can be wrong.
#[derive(Debug, Clone)]
pub struct Setup {
    /// Which frame.
    pub key: [u8; 16],
    /// All eight bits.
    pub flags: u8,
    /// Revision.
    pub revision: u8,
    /// The value of the length field; `None`: the true length.
    pub length: Option<u16>,
    /// Everything behind the fixed part.
    pub private_data: Vec<u8>,
}

impl Setup {
    /// A plain request of revision 1.
    pub fn request1() -> Self {
        Self { key: REQUEST, flags: CRC, revision: 1, length: None, private_data: vec![] }
    }

    /// A request of revision 2 for the peer-to-peer model with a Write as indication.
    pub fn request2() -> Self {
        let private_data = enhanced(P2P | RTR_WRITE, 4, 4).to_vec();
        Self { key: REQUEST, flags: CRC | ENHANCED, revision: 2, length: None, private_data }
    }

    /// As [`Self::request2`], from an attacker that claims to be uwarp.
    pub fn uwarp() -> Self {
        Self { flags: CRC | ENHANCED | UWARP_A, ..Self::request2() }
    }

    /// A reply of revision 2 that accepts, with a Write as indication.
    pub fn reply2() -> Self {
        Self { key: REPLY, ..Self::request2() }
    }

    /// On the wire.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = self.key.to_vec();
        out.extend([self.flags, self.revision]);
        let length = self.length.unwrap_or(self.private_data.len() as u16);
        out.extend(length.to_be_bytes());
        out.extend(&self.private_data);
        out
    }
}

/// Enhanced set-up data: `bits` in the order A, B, C, D from the highest.
pub fn enhanced(bits: u8, ird: u16, ord: u16) -> [u8; 4] {
    let high = u16::from(bits >> 2 & 3) << 14 | ird & 0x3FFF;
    let low = u16::from(bits & 3) << 14 | ord & 0x3FFF;
    let ([a, b], [c, d]) = (high.to_be_bytes(), low.to_be_bytes());
    [a, b, c, d]
}

/// An FPDU around a ULPDU, and what must be wrong in it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Frame<'a> {
    /// The length field; `None`: the true length.
    pub length: Option<u16>,
    /// The pad; `None`: the right number of zeros.
    pub pad: Option<&'a [u8]>,
    /// Bits that are flipped in the CRC.
    pub crc_flip: u32,
}

impl Frame<'_> {
    /// On the wire.
    pub fn bytes(&self, ulpdu: &[u8]) -> Vec<u8> {
        let mut out = self.length.unwrap_or(ulpdu.len() as u16).to_be_bytes().to_vec();
        out.extend(ulpdu);
        match self.pad {
            Some(pad) => out.extend(pad),
            None => out.resize(out.len().next_multiple_of(4), 0),
        }
        let sum = crc32c::crc32c(&out) ^ self.crc_flip;
        out.extend(sum.to_le_bytes());
        out
    }
}

/// A good FPDU.
pub fn fpdu(ulpdu: &[u8]) -> Vec<u8> {
    Frame::default().bytes(ulpdu)
}

/// Good FPDUs one behind the other.
pub fn fpdus<U: AsRef<[u8]>>(ulpdus: impl IntoIterator<Item = U>) -> Vec<u8> {
    ulpdus.into_iter().flat_map(|ulpdu| fpdu(ulpdu.as_ref())).collect()
}

/// FPDUs with markers (RFC 5044 section 4.3), for the direction from the attacker to a victim that asks for
/// them.
#[derive(Debug, Default)]
pub struct Marked {
    position: usize,
}

impl Marked {
    /// The next FPDU. `lie` is added to the pointer of every marker in it.
    pub fn fpdu(&mut self, ulpdu: &[u8], lie: u16) -> Vec<u8> {
        let plain = fpdu(ulpdu);
        let body = &plain[..plain.len() - 4];
        let mut out = Vec::new();
        // Distance of the next byte from the length field, markers between included.
        let mut behind = 0u16;
        for byte in body {
            if self.position == 0 {
                out.extend([0, 0]);
                out.extend(behind.wrapping_add(lie).to_be_bytes());
                self.position = 4;
                behind += if behind > 0 { 4 } else { 0 };
            }
            out.push(*byte);
            behind += 1;
            self.position = (self.position + 1) % 512;
        }
        if self.position == 0 {
            out.extend([0, 0]);
            out.extend(behind.wrapping_add(lie).to_be_bytes());
            self.position = 4;
        }
        let sum = crc32c::crc32c(&out);
        out.extend(sum.to_le_bytes());
        self.position = (self.position + 4) % 512;
        out
    }
}

/// A tagged DDP segment.
#[derive(Debug, Clone)]
pub struct Tagged {
    /// The first byte: T, L, four reserved bits, version.
    pub ddp: u8,
    /// The second: RDMAP version, two reserved bits, opcode.
    pub rdmap: u8,
    /// STag.
    pub stag: u32,
    /// Tagged offset.
    pub to: u64,
    /// What is behind the header.
    pub payload: Vec<u8>,
}

impl Tagged {
    /// A last segment with everything right and this payload length.
    pub fn new(opcode: u8, stag: u32, to: u64, len: usize) -> Self {
        Self { ddp: 0xC1, rdmap: 0x40 | opcode, stag, to, payload: vec![0xEE; len] }
    }

    /// An RDMA Write.
    pub fn write(stag: u32, to: u64, len: usize) -> Self {
        Self::new(WRITE, stag, to, len)
    }

    /// Not the last segment of its message.
    pub fn more(mut self) -> Self {
        self.ddp &= !0x40;
        self
    }

    /// The ULPDU.
    pub fn ulpdu(&self) -> Vec<u8> {
        let mut out = vec![self.ddp, self.rdmap];
        out.extend(self.stag.to_be_bytes());
        out.extend(self.to.to_be_bytes());
        out.extend(&self.payload);
        out
    }

    /// A good FPDU around it.
    pub fn fpdu(&self) -> Vec<u8> {
        fpdu(&self.ulpdu())
    }
}

/// An untagged DDP segment.
#[derive(Debug, Clone)]
pub struct Untagged {
    /// The first byte: T, L, four reserved bits, version.
    pub ddp: u8,
    /// The second: RDMAP version, two reserved bits, opcode.
    pub rdmap: u8,
    /// The Invalidate STag of some Sends, reserved in other messages.
    pub invalidate: u32,
    /// Queue number.
    pub qn: u32,
    /// Message sequence number.
    pub msn: u32,
    /// Message offset.
    pub mo: u32,
    /// What is behind the header.
    pub payload: Vec<u8>,
}

impl Untagged {
    /// A last segment at offset 0 with everything right.
    pub fn new(opcode: u8, qn: u32, msn: u32, payload: Vec<u8>) -> Self {
        Self { ddp: 0x41, rdmap: 0x40 | opcode, invalidate: 0, qn, msn, mo: 0, payload }
    }

    /// A Send.
    pub fn send(msn: u32, len: usize) -> Self {
        Self::new(SEND, 0, msn, vec![0xEE; len])
    }

    /// A Read Request.
    pub fn read(msn: u32, request: &ReadRequest) -> Self {
        Self::new(READ_REQUEST, 1, msn, request.bytes())
    }

    /// An Atomic Request.
    pub fn atomic(msn: u32, request: &AtomicRequest) -> Self {
        Self::new(ATOMIC_REQUEST, 1, msn, request.bytes())
    }

    /// An Atomic Response.
    pub fn atomic_response(msn: u32, request_id: u32, original: u64) -> Self {
        let payload = [&request_id.to_be_bytes()[..], &original.to_be_bytes()].concat();
        Self::new(ATOMIC_RESPONSE, 3, msn, payload)
    }

    /// A Terminate.
    pub fn terminate(message: Vec<u8>) -> Self {
        Self::new(TERMINATE, 2, 1, message)
    }

    /// Not the last segment of its message.
    pub fn more(mut self) -> Self {
        self.ddp &= !0x40;
        self
    }

    /// At another message offset.
    pub fn at(mut self, mo: u32) -> Self {
        self.mo = mo;
        self
    }

    /// The ULPDU.
    pub fn ulpdu(&self) -> Vec<u8> {
        let mut out = vec![self.ddp, self.rdmap];
        for field in [self.invalidate, self.qn, self.msn, self.mo] {
            out.extend(field.to_be_bytes());
        }
        out.extend(&self.payload);
        out
    }

    /// A good FPDU around it.
    pub fn fpdu(&self) -> Vec<u8> {
        fpdu(&self.ulpdu())
    }
}

/// The payload of a Read Request (RFC 5040 section 4.4).
#[derive(Debug, Clone, Copy)]
pub struct ReadRequest {
    /// Where the response goes.
    pub sink: (u32, u64),
    /// Bytes.
    pub size: u32,
    /// Where it comes from.
    pub source: (u32, u64),
}

impl ReadRequest {
    /// To a sink that the attacker made up.
    pub fn new(size: u32, stag: u32, to: u64) -> Self {
        Self { sink: (0xAABB_CCDD, 0x40), size, source: (stag, to) }
    }

    /// On the wire.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = self.sink.0.to_be_bytes().to_vec();
        out.extend(self.sink.1.to_be_bytes());
        out.extend(self.size.to_be_bytes());
        out.extend(self.source.0.to_be_bytes());
        out.extend(self.source.1.to_be_bytes());
        out
    }
}

/// The payload of an Atomic Request (RFC 7306 section 5.2.1).
#[derive(Debug, Clone, Copy)]
pub struct AtomicRequest {
    /// The first word: 28 reserved bits and the operation.
    pub operation: u32,
    /// Comes back with the response.
    pub request_id: u32,
    /// The eight bytes.
    pub target: (u32, u64),
    /// To add or to store, and its mask.
    pub data: (u64, u64),
    /// To compare with, and its mask.
    pub compare: (u64, u64),
}

impl AtomicRequest {
    /// Adds 1.
    pub fn fetch_add(request_id: u32, stag: u32, to: u64) -> Self {
        let operation = u32::from(FETCH_ADD);
        Self { operation, request_id, target: (stag, to), data: (1, 0), compare: (0, 0) }
    }

    /// Stores `swap` if `compare` is found.
    pub fn cmp_swap(request_id: u32, stag: u32, to: u64, compare: u64, swap: u64) -> Self {
        let (data, compare) = ((swap, u64::MAX), (compare, u64::MAX));
        Self { operation: u32::from(CMP_SWAP), request_id, target: (stag, to), data, compare }
    }

    /// On the wire.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = self.operation.to_be_bytes().to_vec();
        out.extend(self.request_id.to_be_bytes());
        out.extend(self.target.0.to_be_bytes());
        out.extend(self.target.1.to_be_bytes());
        for number in [self.data.0, self.data.1, self.compare.0, self.compare.1] {
            out.extend(number.to_be_bytes());
        }
        out
    }
}

/// The message of a Terminate: codes, header control bits, and the bytes that follow.
pub fn terminate(layer: u8, etype: u8, code: u8, control: u8, rest: &[u8]) -> Vec<u8> {
    let mut out = vec![layer << 4 | etype & 0xF, code, control, 0];
    out.extend(rest);
    out
}

/// What a Terminate says: layer, type, code.
pub type Codes = (u8, u8, u8);

/// A segment that came back.
#[derive(Debug, Clone)]
pub struct Seen {
    /// All of it.
    pub ulpdu: Vec<u8>,
}

impl Seen {
    /// RDMAP opcode.
    pub fn opcode(&self) -> u8 {
        self.ulpdu.get(1).map_or(0xFF, |b| b & 0xF)
    }

    /// The STag (of a tagged segment).
    pub fn stag(&self) -> u32 {
        self.word(2)
    }

    /// Four bytes.
    pub fn word(&self, at: usize) -> u32 {
        self.ulpdu.get(at..at + 4).map_or(0, |b| u32::from_be_bytes([b[0], b[1], b[2], b[3]]))
    }

    /// The request identifier and the value of an Atomic Response.
    pub fn atomic_result(&self) -> Option<(u32, u64)> {
        let (id, value) = self.payload().split_first_chunk::<4>()?;
        let value = u64::from_be_bytes(value.try_into().ok()?);
        (self.opcode() == ATOMIC_RESPONSE && self.word(6) == 3).then_some((u32::from_be_bytes(*id), value))
    }

    /// What is behind the header.
    pub fn payload(&self) -> &[u8] {
        let header = if self.ulpdu.first().is_some_and(|b| b & 0x80 != 0) { 14 } else { 18 };
        self.ulpdu.get(header..).unwrap_or(&[])
    }

    /// The codes, if it is a Terminate.
    pub fn codes(&self) -> Option<Codes> {
        let message = self.payload();
        (self.opcode() == TERMINATE && message.len() >= 4)
            .then(|| (message[0] >> 4, message[0] & 0xF, message[1]))
    }
}

/// Takes whole FPDUs from the start of a stream. An FPDU whose CRC is wrong ends it with an error.
pub fn unframe(stream: &[u8], markers: bool, crc: bool) -> Result<(Vec<Seen>, usize), String> {
    let mut seen = Vec::new();
    let mut at = 0;
    while let Some((ulpdu, len)) =
        unframe_one(&stream[at..], if markers { Some(at % 512) } else { None }, crc)?
    {
        seen.push(Seen { ulpdu });
        at += len;
    }
    Ok((seen, stream.len() - at))
}

fn unframe_one(
    stream: &[u8],
    position: Option<usize>,
    crc: bool,
) -> Result<Option<(Vec<u8>, usize)>, String> {
    // One byte at a time, which is slow but simple.
    let mut own = Vec::new();
    let mut at = 0;
    loop {
        if position.is_some_and(|p| (p + at).is_multiple_of(512)) {
            let Some(marker) = stream.get(at..at + 4) else { return Ok(None) };
            // Up to 64 KiB behind the length field; the attacker asks for small segments.
            let behind = if own.is_empty() { 0 } else { at - if position == Some(0) { 4 } else { 0 } };
            if usize::from(u16::from_be_bytes([marker[2], marker[3]])) != behind {
                return Err(format!(
                    "a marker says {marker:?}, the length field is {behind} bytes before it"
                ));
            }
            at += 4;
            continue;
        }
        if own.len() >= 2 {
            let len = usize::from(u16::from_be_bytes([own[0], own[1]]));
            let whole = (2 + len).next_multiple_of(4) + 4;
            if own.len() == whole {
                let covered = &stream[..at - 4];
                if crc && crc32c::crc32c(covered).to_le_bytes() != stream[at - 4..at] {
                    return Err("a wrong CRC".into());
                }
                return Ok(Some((own[2..2 + len].to_vec(), at)));
            }
        }
        let Some(byte) = stream.get(at) else { return Ok(None) };
        own.push(*byte);
        at += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markers_there_and_back() {
        let mut marked = Marked::default();
        let stream: Vec<u8> =
            (0..40).flat_map(|n| marked.fpdu(&Untagged::send(n, n as usize * 37).ulpdu(), 0)).collect();
        let (seen, rest) = unframe(&stream, true, true).unwrap();
        assert_eq!((seen.len(), rest), (40, 0));
        assert!(seen.iter().enumerate().all(|(n, s)| s.payload().len() == n * 37));
    }

    #[test]
    fn rfc5044_annotated_example() {
        // RFC 5044 section 4.4: the first FPDU of a stream with markers.
        let ulpdu = [&[0x41, 0x43][..], &[0; 8], &[0, 0, 0, 1], &[0; 4], &[0; 24]].concat();
        let stream = Marked::default().fpdu(&ulpdu, 0);
        assert_eq!(stream[..8], [0, 0, 0, 0, 0, 0x2A, 0x41, 0x43]);
        assert_eq!(stream[stream.len() - 4..], [0x52, 0x23, 0x99, 0x83]);
    }
}
