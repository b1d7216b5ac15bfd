//! The scripted peer's own encoder. It shares no code with `uwarp-wire`, so that an error there is not
//! repeated here.

/// CRC32c a bit at a time (RFC 5044 section 4.4; RFC 3720 appendix B.4).
fn crc32c(bytes: &[u8]) -> [u8; 4] {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0x82F6_3B78 & 0u32.wrapping_sub(crc & 1));
        }
    }
    (!crc).to_le_bytes()
}

/// An FPDU around a ULPDU.
pub fn fpdu(ulpdu: &[u8]) -> Vec<u8> {
    let mut out = u16::try_from(ulpdu.len()).unwrap().to_be_bytes().to_vec();
    out.extend(ulpdu);
    while out.len() % 4 != 0 {
        out.push(0);
    }
    let sum = crc32c(&out);
    out.extend(sum);
    out
}

/// The same at the start of a stream with markers, which begins with a marker. `pointer` should be 0.
pub fn marked_fpdu(ulpdu: &[u8], pointer: u16) -> Vec<u8> {
    let mut out = vec![0, 0];
    out.extend(pointer.to_be_bytes());
    let plain = fpdu(ulpdu);
    out.extend(&plain[..plain.len() - 4]);
    let sum = crc32c(&out);
    out.extend(sum);
    out
}

/// RDMAP opcodes (RFC 5040 figure 4).
pub const WRITE: u8 = 0;
pub const READ_REQUEST: u8 = 1;
pub const READ_RESPONSE: u8 = 2;
pub const SEND: u8 = 3;
pub const SEND_INVALIDATE: u8 = 4;
pub const TERMINATE: u8 = 7;
pub const IMMEDIATE: u8 = 8;
pub const ATOMIC_REQUEST: u8 = 10;
pub const ATOMIC_RESPONSE: u8 = 11;

/// A tagged segment, every field of which can be wrong.
#[derive(Clone)]
pub struct Tagged {
    pub ddp_version: u8,
    pub last: bool,
    pub rdmap_version: u8,
    pub opcode: u8,
    pub stag: u32,
    pub to: u64,
    pub payload: Vec<u8>,
}

impl Tagged {
    pub fn new(opcode: u8, stag: u32, to: u64, len: usize) -> Self {
        Self { ddp_version: 1, last: true, rdmap_version: 1, opcode, stag, to, payload: vec![0xEE; len] }
    }

    pub fn ulpdu(&self) -> Vec<u8> {
        let mut out =
            vec![0x80 | u8::from(self.last) << 6 | self.ddp_version, self.rdmap_version << 6 | self.opcode];
        out.extend(self.stag.to_be_bytes());
        out.extend(self.to.to_be_bytes());
        out.extend(&self.payload);
        out
    }
}

/// An untagged segment.
#[derive(Clone)]
pub struct Untagged {
    pub ddp_version: u8,
    pub last: bool,
    pub rdmap_version: u8,
    pub opcode: u8,
    pub invalidate: u32,
    pub qn: u32,
    pub msn: u32,
    pub mo: u32,
    pub payload: Vec<u8>,
}

impl Untagged {
    pub fn new(opcode: u8, qn: u32, msn: u32, payload: Vec<u8>) -> Self {
        Self { ddp_version: 1, last: true, rdmap_version: 1, opcode, invalidate: 0, qn, msn, mo: 0, payload }
    }

    pub fn send(msn: u32, len: usize) -> Self {
        Self::new(SEND, 0, msn, vec![0xEE; len])
    }

    pub fn immediate(msn: u32, len: usize) -> Self {
        Self::new(IMMEDIATE, 0, msn, vec![0xEE; len])
    }

    pub fn ulpdu(&self) -> Vec<u8> {
        let mut out =
            vec![u8::from(self.last) << 6 | self.ddp_version, self.rdmap_version << 6 | self.opcode];
        for field in [self.invalidate, self.qn, self.msn, self.mo] {
            out.extend(field.to_be_bytes());
        }
        out.extend(&self.payload);
        out
    }
}

/// The 28 bytes of a Read Request.
pub fn read_request(size: u32, source_stag: u32, source_to: u64) -> Vec<u8> {
    let mut out = Vec::new();
    out.extend(0xAABB_CCDDu32.to_be_bytes());
    out.extend(0x40u64.to_be_bytes());
    out.extend(size.to_be_bytes());
    out.extend(source_stag.to_be_bytes());
    out.extend(source_to.to_be_bytes());
    out
}

/// Which headers a Terminate quotes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quotes {
    Nothing,
    /// DDP segment length and DDP header.
    Ddp,
    /// These and the Read Request.
    Rdmap,
}

/// The FPDU of a Terminate about the segment `offending`.
pub fn terminate(codes: (u8, u8, u8), quotes: Quotes, offending: &[u8]) -> Vec<u8> {
    let (layer, etype, code) = codes;
    let control = match quotes {
        Quotes::Nothing => 0,
        Quotes::Ddp => 0xC0,
        Quotes::Rdmap => 0xE0,
    };
    let mut message = vec![layer << 4 | etype, code, control, 0];
    if quotes != Quotes::Nothing {
        message.extend(u16::try_from(offending.len()).unwrap().to_be_bytes());
        let header = if offending[0] & 0x80 == 0 { 18 } else { 14 };
        let more = if quotes == Quotes::Rdmap { 28 } else { 0 };
        message.extend(&offending[..header + more]);
    }
    fpdu(&Untagged::new(TERMINATE, 2, 1, message).ulpdu())
}
