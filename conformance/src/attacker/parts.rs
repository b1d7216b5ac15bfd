//! Parts of datagrams, and the question whether a process takes them (docs/datagram-iwarp.md section 16), by
//! the attacker's own hand.

/// The Q_Key of the honest programs, which the attacker knows.
pub const QKEY: u32 = 0x1111_1111;

const PART: u32 = 9;
const QUESTION: u32 = 10;
const ANSWER: u32 = 11;

/// The header of a part, with any value in each field.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    /// Whose it says that it is.
    pub source: u32,
    /// For whom.
    pub destination: u32,
    /// That of the destination, or not.
    pub qkey: u32,
    /// Bytes of the whole.
    pub length: u16,
    /// Where it begins.
    pub offset: u16,
    /// Which of the sender's datagrams.
    pub number: u32,
}

impl Part {
    /// With these bytes.
    pub fn with(&self, bytes: &[u8]) -> Vec<u8> {
        let place = u32::from(self.length) << 16 | u32::from(self.offset);
        let words = [1 << 24 | self.source, PART << 24 | self.destination, self.qkey, place, self.number];
        let mut out: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
        out.extend(bytes);
        out
    }
}

fn offer(kind: u32, source: u32, destination: u32, token: u64, length: usize) -> Vec<u8> {
    let words = [1 << 24 | source, kind << 24 | destination, 0, (token >> 32) as u32, token as u32];
    let mut out: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
    out.resize(length.max(out.len() + 4) - 4, 0);
    out.extend(crc32c::crc32c(&out).to_le_bytes());
    out
}

/// Whether parts are taken, in this many bytes.
pub fn question(source: u32, destination: u32, token: u64, length: usize) -> Vec<u8> {
    offer(QUESTION, source, destination, token, length)
}

/// They are, says who was not asked.
pub fn answer(source: u32, destination: u32, token: u64) -> Vec<u8> {
    offer(ANSWER, source, destination, token, 0)
}

/// Whether a datagram is an answer to the question with this token.
pub fn is_answer(datagram: &[u8], token: u64) -> bool {
    datagram.get(4).is_some_and(|kind| u32::from(*kind & 0xF) == ANSWER)
        && datagram.get(12..20) == Some(&token.to_be_bytes())
}
