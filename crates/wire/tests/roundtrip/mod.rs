//! What must hold for any bytes: no parser panics, no line of text panics, and what a parser accepted comes out of
//! `emit` as it went in, but for the bits that the RFCs reserve. Shared by `tests/arbitrary_bytes.rs` and the fuzz
//! target `wire_parse`.

use uwarp_wire::terminate::{self, Terminate, TerminateError};
use uwarp_wire::{crc, datagram, ddp, mpa, rdmap, text};

/// Runs every check on `bytes`. Panics when one fails.
pub fn check(bytes: &[u8]) {
    setup(bytes);
    segment(bytes);
    rdmap_headers(bytes);
    terminate(bytes);
    extension_header(bytes);
    for &byte in bytes.iter().take(4) {
        let control = rdmap::Control::parse(byte);
        assert_eq!(control.to_byte(), byte & 0xCF);
        one_line(&control);
    }
    let mut pieces = crc::Crc32c::new();
    let (front, back) = bytes.split_at(bytes.len() / 3);
    pieces.update(front);
    pieces.update(back);
    assert_eq!(pieces.finish(), crc::crc32c(bytes));
}

fn one_line(value: &dyn std::fmt::Display) {
    let line = value.to_string();
    assert!(!line.is_empty() && !line.contains('\n'), "{line:?}");
}

fn setup(bytes: &[u8]) {
    // A fuzzer seldom finds 16 bytes of key: give it both.
    for key in [mpa::KEY_REQ, mpa::KEY_REP] {
        let mut frame = key.to_vec();
        frame.extend(bytes);
        match mpa::SetupFrame::parse(&frame) {
            Ok(setup) => {
                assert_eq!(setup.to_bytes(), frame[..mpa::FRAME_LEN]);
                one_line(&setup);
            }
            Err(error) => assert_eq!((error, bytes.len() < 4), (mpa::SetupError::Truncated, true)),
        }
    }
    if let Ok(setup) = mpa::SetupFrame::parse(bytes) {
        assert_eq!(setup.to_bytes(), bytes[..mpa::FRAME_LEN]);
    }
    if let Ok(enhanced) = mpa::Enhanced::parse(bytes) {
        assert_eq!(enhanced.to_bytes(), bytes[..4]);
        one_line(&enhanced);
    }
    if let Ok(marker) = mpa::Marker::parse(bytes) {
        assert_eq!(marker.to_bytes(), [0, 0, bytes[2], bytes[3] & 0xFC]);
        one_line(&marker);
    }
}

fn segment(bytes: &[u8]) {
    match ddp::Header::parse(bytes) {
        Ok((header, len)) => {
            assert_eq!(len, header.len());
            assert_eq!(len, ddp::Header::len_for(bytes[0]));
            let mut expected = bytes[..len].to_vec();
            expected[0] &= 0xC3;
            let mut out = [0xEE; ddp::Header::MAX_LEN];
            assert_eq!(header.emit(&mut out), len);
            assert_eq!(out[..len], expected);
            assert!(out[len..].iter().all(|&byte| byte == 0xEE));
            one_line(&header);
        }
        Err(error) => one_line(&error),
    }
    if let Ok(segment) = text::Segment::parse(bytes) {
        assert_eq!(segment.header.len() + segment.payload.len(), bytes.len());
        one_line(&segment);
    }
}

fn rdmap_headers(bytes: &[u8]) {
    if let Ok(header) = rdmap::ReadRequest::parse(bytes) {
        assert_eq!(header.to_bytes(), bytes[..rdmap::ReadRequest::LEN]);
        one_line(&header);
    }
    if let Ok(header) = rdmap::AtomicRequest::parse(bytes) {
        let mut expected = bytes[..rdmap::AtomicRequest::LEN].to_vec();
        expected[..3].fill(0);
        expected[3] &= 0x0F;
        assert_eq!(header.to_bytes(), expected[..]);
        one_line(&header);
    }
    if let Ok(header) = rdmap::AtomicResponse::parse(bytes) {
        assert_eq!(header.to_bytes(), bytes[..rdmap::AtomicResponse::LEN]);
        one_line(&header);
    }
    if let Ok(header) = rdmap::Immediate::parse(bytes) {
        assert_eq!(header.to_bytes(), bytes[..rdmap::Immediate::LEN]);
        one_line(&header);
    }
    if let Ok(header) = rdmap::Ack::parse(bytes) {
        assert_eq!(header.to_bytes(), bytes[..rdmap::Ack::LEN]);
        one_line(&header);
    }
}

fn terminate(bytes: &[u8]) {
    let Ok(first) = Terminate::parse(bytes) else {
        assert!(bytes.len() < terminate::Header::LEN);
        return;
    };
    one_line(&first);
    let (layer, etype, code) = first.header.error.codes();
    assert_eq!(TerminateError::from_codes(layer, etype, code), first.header.error);

    let mut out = [0; Terminate::MAX_LEN];
    let len = first.emit(&mut out);
    assert_eq!(len, first.len());
    let second = Terminate::parse(&out[..len]).expect("four bytes and more");

    let promised_is_there = first.header.d == first.ddp_header.is_some()
        && first.header.r == first.rdmap_header.is_some()
        && (first.header.m || first.header.d) == first.ddp_segment_len.is_some();
    if promised_is_there {
        assert_eq!(second, first, "{bytes:02x?}");
        assert_eq!(out[terminate::Header::LEN..len], bytes[terminate::Header::LEN..len]);
    }
    // M, D and R where the RFC puts them: this was not siw, so the header's own bytes come back as well.
    if promised_is_there && bytes[2] & 0xE0 != 0 {
        let code = if bytes[0] == 0 { 0 } else { bytes[1] };
        assert_eq!(out[..4], [bytes[0], code, bytes[2] & 0xE0, 0]);
    }
}

fn extension_header(bytes: &[u8]) {
    let mut versioned = bytes.to_vec();
    if let Some(version) = versioned.first_mut() {
        *version = datagram::VERSION;
    }
    match datagram::Header::parse(&versioned) {
        Ok(header) => {
            assert_eq!(header.to_bytes(), versioned[..datagram::Header::LEN]);
            one_line(&header);
        }
        Err(error) => {
            assert_eq!((error, versioned.len() < datagram::Header::LEN), (datagram::Error::Truncated, true))
        }
    }
    let _ = datagram::Header::parse(bytes);
}
