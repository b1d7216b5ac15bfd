//! What queue pairs say to each other that are brought up by number (docs/datagram-iwarp.md section 13,
//! docs/contracts.md "Bring-up"): introductions, and requests for cookies. And answers to lookups (section
//! 8), which name a queue pair.

use super::encode::{
    CRC, ENHANCED, P2P, REPLY, REQUEST, RTR_READ, RTR_WRITE, Setup, UWARP_A, UWARP_B, enhanced,
};

/// A cookie as it came, 16 bytes.
pub type Cookie = [u8; 16];

/// An introduction of version 2, every field of which can be wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Introduction {
    /// Number of the sender's queue pair.
    pub source: u32,
    /// Number of the receiver's.
    pub destination: u32,
    /// The word with both halves and their flags: "expects" above "begins".
    pub halves: u32,
    /// Incarnation.
    pub incarnation: u64,
    /// Cookie.
    pub cookie: Cookie,
}

/// The word of both halves, 12 bits each, and that both are valid.
pub const fn halves(expects: u32, begins: u32) -> u32 {
    0xC000_0000 | (expects & 0xFFF) << 16 | begins & 0xFFF
}

impl Introduction {
    /// On the wire.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"uQP\x02".to_vec();
        for word in [self.source, self.destination, self.halves] {
            out.extend(word.to_be_bytes());
        }
        out.extend(self.incarnation.to_be_bytes());
        out.extend(self.cookie);
        out
    }
}

/// An introduction of version 1: whole packet sequence numbers, and nothing that proves anything.
pub fn introduction1(source: u32, destination: u32, expects: u32, begins: u32) -> Vec<u8> {
    let mut out = b"uQP\x01".to_vec();
    for word in [source, destination, expects, begins | 1 << 31] {
        out.extend(word.to_be_bytes());
    }
    out.extend(7_u64.to_be_bytes());
    out
}

/// What the echo of an introduction of either version says: all that was sent, with the numbers swapped. Of
/// the packet sequence numbers, too: what one end begins with, the other one expects.
pub fn echo(introduction: &[u8]) -> Vec<u8> {
    let mut out = introduction.to_vec();
    if out.len() < 20 {
        return out;
    }
    let (head, tail) = out.split_at_mut(8);
    head[4..8].swap_with_slice(&mut tail[..4]);
    if out[3] == 1 {
        let (expects, begins) = out[12..20].split_at_mut(4);
        begins[0] = 0;
        expects.swap_with_slice(begins);
        out[16] |= 0x80;
    } else {
        let word = u32::from_be_bytes([out[12], out[13], out[14], out[15]]);
        let flags = (word >> 31) << 30 | (word >> 30 & 1) << 31;
        let swapped = flags | (word & 0xFFF) << 16 | word >> 16 & 0xFFF;
        out[12..16].copy_from_slice(&swapped.to_be_bytes());
    }
    out
}

/// A request of MPA with this introduction, as uwarp's.
pub fn request(introduction: &[u8]) -> Setup {
    let mut private_data = enhanced(P2P | RTR_WRITE | RTR_READ, 4, 4).to_vec();
    private_data.extend(introduction);
    Setup { key: REQUEST, flags: CRC | ENHANCED | UWARP_A, revision: 2, length: None, private_data }
}

/// The reply to `request`, which accepts, with this introduction. `peer` is uwarp's own data: version 1,
/// without features.
pub fn reply(request: &Setup, introduction: &[u8]) -> Setup {
    let mut private_data = request.private_data.get(..4).unwrap_or(&[]).to_vec();
    private_data.extend(introduction);
    Setup { key: REPLY, flags: request.flags & !UWARP_A | UWARP_B, private_data, ..request.clone() }
}

/// The introduction of a set-up frame, or why a request was turned away.
pub fn said(frame: &Setup) -> &[u8] {
    let data = &frame.private_data;
    let at = data.windows(3).position(|word| word == b"uQP").unwrap_or(data.len());
    &data[at..]
}

const REQUEST_FOR_COOKIE: u8 = 3;
const COOKIE: u8 = 4;

/// A request for a cookie.
pub fn cookie_request(source: u32, destination: u32, token: u64) -> Vec<u8> {
    proof(REQUEST_FOR_COOKIE, source, destination, token, &[0; 16])
}

/// The answer to one, with any cookie. `None`: the datagram is no such request.
pub fn cookie_reply(request: &[u8], cookie: &Cookie) -> Option<Vec<u8>> {
    let word = |at: usize| Some(u32::from_be_bytes(*request.get(at..)?.first_chunk()?) & 0xFF_FFFF);
    let token = u64::from_be_bytes(*request.get(20..)?.first_chunk()?);
    (request.get(4)? & 0xF == REQUEST_FOR_COOKIE).then_some(())?;
    Some(proof(COOKIE, word(4)?, word(0)?, token, cookie))
}

/// The cookie of an answer to the request with this token.
pub fn cookie_of(datagram: &[u8], token: u64) -> Option<Cookie> {
    let matches = datagram.get(4)? & 0xF == COOKIE && datagram.get(20..28)? == token.to_be_bytes();
    matches.then(|| datagram.get(28..)?.first_chunk().copied()).flatten()
}

/// The transaction of a lookup.
pub fn transaction(lookup: &[u8]) -> Option<u32> {
    const LOOKUP_REQUEST: u8 = 1;
    (lookup.get(4)? & 0xF == LOOKUP_REQUEST).then_some(())?;
    Some(u32::from_be_bytes(*lookup.get(16..)?.first_chunk()?))
}

/// The answer to a lookup that names this queue pair.
pub fn lookup_reply(transaction: u32, qpn: u32, qkey: u32) -> Vec<u8> {
    const LOOKUP_REPLY: u32 = 2;
    let mut out = Vec::new();
    for word in [1 << 24 | qpn, LOOKUP_REPLY << 24, qkey, 0, transaction] {
        out.extend(word.to_be_bytes());
    }
    out.extend([0; 16]);
    sealed(out)
}

/// With its CRC.
fn sealed(mut covered: Vec<u8>) -> Vec<u8> {
    let sum = crc32c::crc32c(&covered);
    covered.extend(sum.to_le_bytes());
    covered
}

fn proof(kind: u8, source: u32, destination: u32, token: u64, cookie: &Cookie) -> Vec<u8> {
    let mut out = (1 << 24 | source).to_be_bytes().to_vec();
    out.extend((u32::from(kind) << 24 | destination).to_be_bytes());
    out.extend([0; 12]);
    out.extend(token.to_be_bytes());
    out.extend(cookie);
    sealed(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_echo_is_what_the_other_end_would_say() {
        let sent =
            Introduction { source: 1, destination: 2, halves: halves(3, 4), incarnation: 5, cookie: [6; 16] };
        let back = Introduction { source: 2, destination: 1, halves: halves(4, 3), ..sent };
        assert_eq!(echo(&sent.bytes()), back.bytes());
        let early = Introduction { halves: 0x8003_0000, ..sent };
        assert_eq!(echo(&early.bytes()), Introduction { halves: 0x4000_0003, ..back }.bytes());
        assert_eq!(echo(&introduction1(1, 2, 3, 4)), introduction1(2, 1, 4, 3));
    }
}
