//! Checks for any bytes: no parser panics, no text line panics, and `emit` returns what a parser accepted,
//! except for bits that the RFCs reserve. `tests/arbitrary_bytes.rs` and the fuzz target `wire_parse` share
//! this file.

mod reliable;

use uwarp_wire::datagram::error::ErrorMessage;
use uwarp_wire::datagram::proof::Proof;
use uwarp_wire::datagram::{Datagram, lookup};
use uwarp_wire::introduction::{self, Introduction, TurnedAway};
use uwarp_wire::terminate::{self, Terminate, TerminateError};
use uwarp_wire::{crc, datagram, ddp, grh, mpa, rdmap, text};

/// Runs every check on `bytes`. Panics when one fails.
pub fn check(bytes: &[u8]) {
    setup(bytes);
    segment(bytes);
    rdmap_headers(bytes);
    terminate(bytes);
    extension_header(bytes);
    grh_area(bytes);
    introduction(bytes);
    reliable::check(bytes);
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
    // A fuzzer seldom finds the 16 bytes of a key, so prepend both keys.
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
    // M, D and R are in the RFC's places: this was not siw, so the header's own bytes must come back too.
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
    whole_datagram(bytes);
    // A fuzzer seldom finds a version, a kind and a DDP header that agree: give it all of them.
    for kind in 0..6 {
        let mut framed = versioned.clone();
        if let Some(flags) = framed.get_mut(4) {
            *flags = kind;
        }
        whole_datagram(&framed);
        if let Some(ddp) = framed.get_mut(20..22) {
            ddp.copy_from_slice(&[0x41, 0x43 | ddp[1] & 0x04]);
        }
        whole_datagram(&framed);
    }
}

fn whole_datagram(bytes: &[u8]) {
    let datagram = match Datagram::parse(bytes) {
        Ok(datagram) => datagram,
        Err(error) => return one_line(&error),
    };
    assert_eq!(datagram.datagram_len(), bytes.len());
    assert_eq!(datagram.body().len(), bytes.len() - datagram::MIN_LEN);
    let intact = datagram.covered().len() + datagram::CRC_LEN == bytes.len()
        && crc::to_wire(crc::crc32c(datagram.covered())) == bytes[datagram.covered().len()..];
    assert_eq!(datagram.is_intact(), intact);
    match ErrorMessage::parse(&datagram) {
        Ok(error) => one_line(&error),
        Err(error) => one_line(&error),
    }
    lookup_request(&datagram);
    lookup_reply(&datagram);
    proof(&datagram);
    let error = TerminateError::from_codes(1, 2, 5);
    if let Some(answer) = ErrorMessage::answer(&datagram, error) {
        assert!(answer.to_bytes().len() <= bytes.len(), "an answer is never longer than its cause");
        let answer_bytes = answer.to_bytes();
        let answer_read = Datagram::parse(&answer_bytes).expect("a whole datagram");
        assert!(answer_read.is_intact());
        assert_eq!(ErrorMessage::answer(&answer_read, error), None, "no answer to an answer");
        assert_eq!(ErrorMessage::parse(&answer_read), Ok(answer));
    }
}

fn proof(datagram: &Datagram<'_>) {
    let Some(proof) = Proof::parse(datagram) else { return };
    one_line(&proof);
    assert_eq!(datagram.datagram_len(), Proof::LEN, "an answer is never longer than its question");
    let out = proof.to_bytes();
    let again = Datagram::parse(&out).expect("what was emitted");
    assert!(again.is_intact());
    assert_eq!(Proof::parse(&again), Some(proof));
}

fn lookup_request(datagram: &Datagram<'_>) {
    match lookup::Request::parse(datagram) {
        Ok(request) => {
            one_line(&request);
            let mut out = [0; lookup::Request::MAX_DATAGRAM_LEN];
            let len = request.emit(&mut out);
            assert!((lookup::Request::MIN_DATAGRAM_LEN..=out.len()).contains(&len));
            let again = Datagram::parse(&out[..len]).expect("what was emitted");
            assert!(again.is_intact());
            assert_eq!(lookup::Request::parse(&again), Ok(request));
        }
        Err(error) => one_line(&error),
    }
}

fn lookup_reply(datagram: &Datagram<'_>) {
    match lookup::Reply::parse(datagram) {
        Ok(reply) => {
            one_line(&reply);
            let mut out = [0; lookup::Reply::MAX_DATAGRAM_LEN];
            let len = reply.emit(&mut out);
            assert!(len <= lookup::Request::MIN_DATAGRAM_LEN, "never longer than a request");
            let again = Datagram::parse(&out[..len]).expect("what was emitted");
            assert!(again.is_intact());
            assert_eq!(lookup::Reply::parse(&again), Ok(reply));
        }
        Err(error) => one_line(&error),
    }
}

/// As they are, and with the magic of each version, which a fuzzer seldom finds.
fn introduction(bytes: &[u8]) {
    one_introduction(bytes);
    for version in [1, introduction::VERSION] {
        one_introduction(&[&b"uQP"[..], &[version], bytes].concat());
    }
}

fn one_introduction(bytes: &[u8]) {
    if let Some(introduction) = Introduction::parse(bytes) {
        assert_eq!(introduction::version(bytes), Some(introduction::VERSION));
        let out = introduction.to_bytes();
        assert_eq!(Introduction::parse(&out), Some(introduction));
        // Numbers have 24 bits, and the flags say which halves are valid: the rest is reserved.
        for at in (0..4).chain([5, 6, 7, 9, 10, 11]).chain(16..Introduction::LEN) {
            assert_eq!(out[at], bytes[at], "byte {at}");
        }
        assert_eq!(out[12] & 0xC0, bytes[12] & 0xC0);
    }
    if let Some(reason) = TurnedAway::parse(bytes) {
        one_line(&reason);
        assert_eq!(TurnedAway::parse(&reason.to_bytes()), Some(reason));
    }
}

fn grh_area(bytes: &[u8]) {
    let Some(area) = bytes.first_chunk() else { return };
    if let Some(grh) = grh::Grh::parse(area) {
        let mut out = *area;
        grh.emit(&mut out);
        // No header can express a length of less than an IP header.
        let parsed = grh::Grh::parse(&out).expect("what was emitted");
        assert_eq!((parsed.source, parsed.destination), (grh.source, grh.destination));
        assert_eq!((parsed.traffic_class, parsed.hop_limit), (grh.traffic_class, grh.hop_limit));
    }
}
