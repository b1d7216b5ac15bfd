//! Checks for any bytes as packets of reliable datagrams. `tests/rd_chunks.rs`, `tests/arbitrary_bytes.rs`
//! and the fuzz target `rd_packet` share this file.

use uwarp_wire::{crc, rd};

fn one_line(value: &dyn std::fmt::Display) {
    let line = value.to_string();
    assert!(!line.is_empty() && !line.contains('\n'), "{line:?}");
}

/// `bytes` as a packet of the reliable service, and as the body of one of each kind with the right CRC: what
/// is accepted is what a sender makes of the same contents.
pub fn check(bytes: &[u8]) {
    if let Ok(packet) = rd::Packet::parse(bytes) {
        assert!(rd::is_reliable(bytes));
        assert_eq!(packet.packet_len(), bytes.len());
        one_line(&packet);
        body(packet.body());
    }
    for kind in 0..8 {
        let header = rd::Header {
            version: rd::VERSION,
            kind: rd::Kind::from_code(kind),
            source_port: 20_001,
            destination_port: 20_000,
            key: 7,
            number: 8,
        };
        let mut whole = header.to_bytes().to_vec();
        whole.extend(bytes);
        let sum = crc::to_wire(crc::crc32c(&whole));
        whole.extend(sum);
        let packet = rd::Packet::parse(&whole).expect("a packet");
        assert!(packet.is_intact());
        assert_eq!((*packet.header(), packet.body()), (header, bytes));
    }
    body(bytes);
}

fn body(bytes: &[u8]) {
    if let Some(hello) = rd::contact::Hello::parse(bytes) {
        one_line(&hello);
        assert!(bytes.len() >= 72);
    }
    if let Ok(challenge) = rd::contact::Challenge::parse(bytes) {
        let mut same = challenge.to_bytes();
        same[1] = bytes[1];
        assert_eq!(same, bytes[..28]);
        one_line(&challenge);
    }
    if let Ok(open) = rd::contact::Open::parse(bytes) {
        let mut same = open.to_bytes();
        same[19] = bytes[19];
        assert_eq!(same, bytes[..24]);
        one_line(&open);
    }
    let (mut at, mut out) = (0, vec![0; bytes.len()]);
    for chunk in rd::chunk::chunks(bytes) {
        let Ok(chunk) = chunk else { return };
        one_line(&chunk);
        let len = usize::from(u16::from_be_bytes([bytes[at + 2], bytes[at + 3]]));
        let sent = &bytes[at..at + len];
        emitted(&chunk, sent, &mut out[..len]);
        at += len;
    }
    assert_eq!(at, bytes.len(), "chunks cover the body");
}

/// A parsed chunk is emitted as it came, but for reserved bits and what follows its fields.
fn emitted(chunk: &rd::chunk::Chunk<'_>, sent: &[u8], out: &mut [u8]) {
    use rd::chunk::{Abandon, Chunk};
    match chunk {
        Chunk::Segment(segment) => {
            let len = segment.emit_head(out);
            assert_eq!(len + segment.payload.len(), sent.len());
            assert_eq!(segment.payload, &sent[len..]);
            out[len..].copy_from_slice(segment.payload);
            assert_eq!(only_chunk(out), *chunk, "{sent:02x?}");
        }
        Chunk::Ack(ack) => {
            let (packets, messages): (Vec<_>, Vec<_>) = (ack.packets().collect(), ack.messages().collect());
            let len = ack.head.emit(&packets, &messages, out);
            assert_eq!(out[4..len], sent[4..len]);
        }
        Chunk::Abandon(abandon) => {
            assert_eq!(Abandon::emit(abandon.messages(), out), sent.len());
            assert_eq!(out[4..], sent[4..]);
        }
        Chunk::Stream(stream) => {
            let len = stream.emit_head(out);
            assert_eq!(out[4..len], sent[4..len]);
        }
        Chunk::Pad(len) => assert_eq!(*len, sent.len()),
        Chunk::Unknown(code) => assert!(*code > 11 && *code < 0x80),
        fixed => {
            let len = fixed.emit_fixed(out);
            assert_eq!(only_chunk(&out[..len]), *chunk, "{sent:02x?}");
        }
    }
}

fn only_chunk(bytes: &[u8]) -> rd::chunk::Chunk<'_> {
    rd::chunk::chunks(bytes).next().expect("a chunk").expect("a valid one")
}
