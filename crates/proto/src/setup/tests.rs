use proptest::prelude::*;
use uwarp_wire::mpa::{
    Enhanced, FLAG_C, FLAG_M, FLAG_R, FLAG_S, FLAG_UWARP_A, FLAG_UWARP_B, KEY_REP, KEY_REQ, NO_AUTO,
};

use super::*;

fn config() -> InitiatorConfig {
    InitiatorConfig {
        revision: Revision::Two,
        crc: true,
        markers: false,
        depths: Depths::negotiated(16, 16),
        max_ird: 128,
        peer: None,
        peer_in_request: false,
    }
}

fn policy() -> ResponderPolicy {
    ResponderPolicy {
        max_revision: Revision::Two,
        crc: true,
        markers: false,
        know_peers: false,
        max_ird: 128,
        host: None,
    }
}

fn params(ird: u16, ord: u16) -> AcceptParams {
    AcceptParams { depths: Depths::negotiated(ird, ord), peer: PeerData { qpn: 0x000102, ..PeerData::new() } }
}

fn frame_bytes(key: [u8; 16], rest: &str) -> Vec<u8> {
    let mut bytes = key.to_vec();
    let digits: Vec<u8> = rest.bytes().filter(u8::is_ascii_hexdigit).collect();
    for pair in digits.chunks(2) {
        bytes.push(u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap());
    }
    bytes
}

fn initiator(config: InitiatorConfig) -> Initiator {
    let mut initiator = Initiator::new(config, b"").unwrap();
    initiator.poll_transmit().unwrap();
    initiator
}

/// Feeds `bytes` in the portions that the machine wants, as a caller with a socket does.
macro_rules! feed {
    ($machine:expr, $bytes:expr) => {{
        let mut rest: &[u8] = $bytes;
        loop {
            let take = $machine.want().min(rest.len());
            let (now, later) = rest.split_at(take);
            rest = later;
            match $machine.handle_input(now) {
                Ok(None) if !rest.is_empty() => continue,
                other => break other.map(|done| (done, rest.len())),
            }
        }
    }};
}

fn reply_to(initiator: &mut Initiator, reply: &[u8]) -> Result<Outcome, SetupError> {
    feed!(initiator, reply).map(|(done, _)| done.expect("reply is whole"))
}

fn accepted(initiator: &mut Initiator, reply: &[u8]) -> Negotiated {
    match reply_to(initiator, reply) {
        Ok(Outcome::Accepted(negotiated)) => negotiated,
        other => panic!("{other:?}"),
    }
}

fn request_to(responder: &mut Responder, request: &[u8]) -> Request {
    feed!(responder, request).unwrap().0.expect("request is whole")
}

// Frames as the Linux siw driver sends them, from captures (conformance/siw).

#[test]
fn siw_client_is_answered_as_a_siw_server_would() {
    let mut responder = Responder::new(ResponderPolicy { crc: false, ..policy() });
    let request = request_to(&mut responder, &frame_bytes(KEY_REQ, "10 02 0004 0001 0001"));
    assert_eq!(request.enhanced, Some(Enhanced { ird: 1, ord: 1, ..Enhanced::default() }));
    let negotiated = responder.accept(params(1, 1), b"").unwrap();
    assert_eq!(responder.poll_transmit(), Some(frame_bytes(KEY_REP, "10 02 0004 0001 0001")));
    assert_eq!((negotiated.ird, negotiated.ord, negotiated.rtr, negotiated.crc), (1, 1, Rtr::None, false));
    assert!(!negotiated.peer_is_uwarp);
}

#[test]
fn siw_client_peer_to_peer_with_crc() {
    let mut responder = Responder::new(policy());
    request_to(&mut responder, &frame_bytes(KEY_REQ, "50 02 0004 8001 c001"));
    let negotiated = responder.accept(params(1, 1), b"").unwrap();
    assert_eq!(responder.poll_transmit(), Some(frame_bytes(KEY_REP, "50 02 0004 8001 c001")));
    assert_eq!((negotiated.rtr, negotiated.crc), (Rtr::Expect, true));
}

#[test]
fn siw_client_revision_one() {
    let mut responder = Responder::new(ResponderPolicy { crc: false, ..policy() });
    let request = request_to(&mut responder, &frame_bytes(KEY_REQ, "00 01 0000"));
    assert_eq!((request.revision, request.enhanced), (Revision::One, None));
    let negotiated = responder.accept(params(3, 4), b"").unwrap();
    assert_eq!(responder.poll_transmit(), Some(frame_bytes(KEY_REP, "00 01 0000")));
    assert_eq!((negotiated.ird, negotiated.ord), (3, 4));
}

#[test]
fn our_request_golden_bytes() {
    let request = |config| Initiator::new(config, b"hi").unwrap().poll_transmit().unwrap();
    assert_eq!(request(config()), frame_bytes(KEY_REQ, "50 02 0006 8010 c010 6869"));
    assert_eq!(
        request(InitiatorConfig { peer: Some(PeerData::new()), ..config() }),
        frame_bytes(KEY_REQ, "54 02 0006 8010 c010 6869"),
        "a stranger sees bit A and exactly the program's private data"
    );
    assert_eq!(
        request(InitiatorConfig { peer: Some(PeerData::new()), peer_in_request: true, ..config() }),
        frame_bytes(KEY_REQ, "56 02 0012 8010 c010 6869 0102e000 00000000 00000000")
    );
    assert_eq!(
        request(InitiatorConfig { depths: Depths { ird: 4, ord: 0, negotiate: true }, ..config() }),
        frame_bytes(KEY_REQ, "50 02 0006 8004 c000 6869"),
        "a Read indication, also without outbound depth"
    );
    assert_eq!(
        request(InitiatorConfig { depths: Depths { ird: 4, ord: 9, negotiate: false }, ..config() }),
        frame_bytes(KEY_REQ, "50 02 0006 bfff ffff 6869")
    );
    assert_eq!(
        request(InitiatorConfig { revision: Revision::One, markers: true, ..config() }),
        frame_bytes(KEY_REQ, "c0 01 0002 6869")
    );
}

#[test]
fn siw_server_echoes_flags_and_stays_a_stranger() {
    let mut ours = Initiator::new(InitiatorConfig { peer: Some(PeerData::new()), ..config() }, b"").unwrap();
    let mut echo = ours.poll_transmit().unwrap();
    echo[..16].copy_from_slice(&KEY_REP);
    let negotiated = accepted(&mut ours, &echo);
    assert!(!negotiated.peer_is_uwarp);
    assert_eq!((negotiated.peer, negotiated.rtr_stag_to), (None, (1, 0)));
    assert_eq!(negotiated.rtr, Rtr::SendWrite);
    assert!(!negotiated.drops_reserved_flags);
}

/// siw was not distinguished from an adapter.
#[test]
fn a_reply_without_our_flag_is_no_siws() {
    let drops = |peer, reply| {
        let ours = InitiatorConfig { peer, ..config() };
        accepted(&mut initiator(ours), &frame_bytes(KEY_REP, reply)).drops_reserved_flags
    };
    let known = Some(PeerData::new());
    assert!(drops(known, "50 02 0004 8010 8010"));
    assert!(
        drops(known, "52 02 0010 8010 8010 0100e000 00000000 00000000"),
        "uwarp does not return it either"
    );
    assert!(!drops(known, "54 02 0004 8010 8010"), "as siw");
    assert!(!drops(None, "50 02 0004 8010 8010"), "no flag was set");
}

/// Chelsio's driver agrees to the Read only, and programs that read nothing set a depth of 0.
#[test]
fn a_read_indication_needs_no_outbound_depth_of_the_program() {
    let depths = Depths { ird: 4, ord: 0, negotiate: true };
    for (reply, ord) in [("50 02 0004 8001 4004", 0), ("50 02 0004 8000 4004", 0)] {
        let mut ours = initiator(InitiatorConfig { depths, ..config() });
        let negotiated = accepted(&mut ours, &frame_bytes(KEY_REP, reply));
        assert_eq!((negotiated.rtr, negotiated.ord), (Rtr::SendRead, ord), "{reply}");
    }
}

/// Twelve bytes of a stranger's private data were taken for ours because of one reserved bit.
#[test]
fn private_data_that_is_not_ours_is_the_programs() {
    let reply = |data: &str| {
        let mut ours = initiator(InitiatorConfig { peer: Some(PeerData::new()), ..config() });
        let mut bytes = frame_bytes(KEY_REP, &format!("52 02 0010 8010 8010 {data}"));
        let length = u16::try_from(bytes.len() - 20).unwrap();
        bytes[18..20].copy_from_slice(&length.to_be_bytes());
        let negotiated = accepted(&mut ours, &bytes);
        assert_eq!(negotiated.peer_is_uwarp, negotiated.peer.is_some());
        (negotiated.peer_is_uwarp, negotiated.private_data.len(), negotiated.rtr_stag_to == RTR_STAG_TO)
    };
    assert_eq!(reply("6869 0100e000 00000001 00000000"), (true, 2, false));
    assert_eq!(reply("6869 01ffe000 00000001 00000000"), (true, 2, false), "unknown features");
    for other in [
        "6869 0000e000 00000001 00000000",
        "6869 0100e001 00000001 00000000",
        "6869 0100e000 80000001 00000000",
        "6869 0100e000 00000001 00000001",
        "6869 0100e000 00000001 01000000",
        "6869 73747261 6e676572 20686572",
    ] {
        assert_eq!(reply(other), (false, 14, true), "{other}");
    }
}

/// A stream that cannot begin ended without a Terminate (RFC 6581 section 9.3).
#[test]
fn an_error_at_this_end_is_told_with_a_terminate() {
    let mut ours = initiator(InitiatorConfig { crc: false, ..config() });
    let negotiated = accepted(&mut ours, &frame_bytes(KEY_REP, "10 02 0004 8010 8010"));
    let terminate =
        &frame_bytes([0; 16], "0016 4147 00000000 00000002 00000001 00000000 20050000 00000000")[16..];
    assert_eq!(negotiated.local_error().as_deref(), Some(terminate));
    let mut first = initiator(InitiatorConfig { revision: Revision::One, ..config() });
    let negotiated = accepted(&mut first, &frame_bytes(KEY_REP, "00 01 0000"));
    assert_eq!(negotiated.local_error(), None, "revision one has no code for it");
}

#[test]
fn depths_are_mirrored_and_clamped() {
    let mut ours = initiator(config());
    let negotiated = accepted(&mut ours, &frame_bytes(KEY_REP, "50 02 0004 8004 8020"));
    assert_eq!(
        (negotiated.ird, negotiated.ord),
        (32, 4),
        "IRD rises to the responder's ORD, ORD falls to its IRD"
    );

    let mut ours = initiator(config());
    let negotiated = accepted(&mut ours, &frame_bytes(KEY_REP, "50 02 0004 bfff bfff"));
    assert_eq!((negotiated.ird, negotiated.ord), (16, 16), "0x3FFF changes neither");

    let mut responder = Responder::new(policy());
    request_to(&mut responder, &frame_bytes(KEY_REQ, "50 02 0004 0002 0009"));
    let negotiated = responder.accept(params(1, 5), b"").unwrap();
    assert_eq!((negotiated.ird, negotiated.ord), (9, 2));
    assert_eq!(responder.poll_transmit(), Some(frame_bytes(KEY_REP, "50 02 0004 0009 0002")));

    let mut responder = Responder::new(policy());
    request_to(&mut responder, &frame_bytes(KEY_REQ, "50 02 0004 3fff 3fff"));
    let negotiated = responder.accept(params(1, 5), b"").unwrap();
    assert_eq!((negotiated.ird, negotiated.ord), (1, 5));
    assert_eq!(responder.poll_transmit(), Some(frame_bytes(KEY_REP, "50 02 0004 3fff 3fff")));

    let mut responder = Responder::new(policy());
    request_to(&mut responder, &frame_bytes(KEY_REQ, "50 02 0004 0000 03e8"));
    let negotiated = responder.accept(params(1, 5), b"").unwrap();
    assert_eq!((negotiated.ird, negotiated.ord), (128, 0), "never more than the device has");
}

/// A program that took no Reads was given as many as the peer requested.
#[test]
fn an_inbound_depth_of_none_is_not_raised() {
    let mut responder = Responder::new(policy());
    request_to(&mut responder, &frame_bytes(KEY_REQ, "50 02 0004 0002 0009"));
    let negotiated = responder.accept(params(0, 5), b"").unwrap();
    assert_eq!((negotiated.ird, negotiated.ord), (0, 2));
    assert_eq!(responder.poll_transmit(), Some(frame_bytes(KEY_REP, "50 02 0004 0000 0002")));
    // A peer that needs a Read to say that it is ready (RFC 6581 section 9.1) has one.
    let mut responder = Responder::new(policy());
    request_to(&mut responder, &frame_bytes(KEY_REQ, "50 02 0004 8002 4009"));
    let negotiated = responder.accept(params(0, 5), b"").unwrap();
    assert_eq!((negotiated.ird, negotiated.ord), (1, 2));
}

#[test]
fn insufficient_ird_is_told_with_a_terminate() {
    let mut ours = initiator(config());
    let error = reply_to(&mut ours, &frame_bytes(KEY_REP, "40 02 0004 8010 8081")).unwrap_err();
    assert_eq!(error, SetupError::NotEnhanced, "enhanced data without S");

    let mut ours = initiator(InitiatorConfig { crc: false, ..config() });
    let error = reply_to(&mut ours, &frame_bytes(KEY_REP, "10 02 0004 8010 8081")).unwrap_err();
    assert_eq!(error, SetupError::InsufficientIrd { wanted: 129, limit: 128 });
    // The frame of siw's own Terminates, with layer 2, type 0, code 6; CRC off, so its field is zero.
    assert_eq!(
        ours.poll_transmit(),
        Some(
            frame_bytes([0; 16], "0016 4147 00000000 00000002 00000001 00000000 20060000 00000000")[16..]
                .to_vec()
        )
    );
    assert_eq!(ours.poll_transmit(), None);
    assert_eq!(ours.fallback(), None);
}

#[test]
fn terminate_has_crc_and_marker_when_agreed() {
    let mut ours = initiator(config());
    let error = reply_to(&mut ours, &frame_bytes(KEY_REP, "90 02 0004 8010 0010")).unwrap_err();
    assert_eq!(error, SetupError::NoMatchingRtr);
    let fpdu = ours.poll_transmit().unwrap();
    assert_eq!(fpdu[..8], [0, 0, 0, 0, 0, 0x16, 0x41, 0x47]);
    let (covered, sum) = fpdu.split_at(fpdu.len() - 4);
    assert_eq!(sum, uwarp_wire::crc::to_wire(uwarp_wire::crc::crc32c(covered)));
    assert_eq!(covered[covered.len() - 4..], [0x20, 7, 0, 0]);
}

#[test]
fn indication_is_a_write_if_it_may_be_and_never_a_send() {
    let rtr = |config, reply| accepted(&mut initiator(config), &frame_bytes(KEY_REP, reply)).rtr;
    assert_eq!(rtr(config(), "50 02 0004 8010 c010"), Rtr::SendWrite);
    assert_eq!(rtr(config(), "50 02 0004 8010 4010"), Rtr::SendRead);
    assert_eq!(
        rtr(config(), "50 02 0004 0010 4010"),
        Rtr::SendWrite,
        "without A the other bits mean nothing"
    );
    assert_eq!(
        rtr(config(), "50 02 0004 0010 0010"),
        Rtr::SendWrite,
        "it was not negotiated, but a server may send first"
    );
    let first = InitiatorConfig { revision: Revision::One, ..config() };
    assert_eq!(rtr(first, "40 01 0000"), Rtr::SendWrite, "in revision one, too");
    let send_only = reply_to(&mut initiator(config()), &frame_bytes(KEY_REP, "50 02 0004 c010 0010"));
    assert_eq!(send_only, Err(SetupError::NoMatchingRtr));

    let answer = |request| {
        let mut responder = Responder::new(policy());
        request_to(&mut responder, &frame_bytes(KEY_REQ, request));
        responder.accept(params(0, 1), b"").unwrap();
        responder.poll_transmit().unwrap()[20..24].to_vec()
    };
    assert_eq!(answer("50 02 0004 8001 8000"), [0x80, 0, 0x80, 1], "Write");
    assert_eq!(answer("50 02 0004 8001 4000"), [0x80, 1, 0x40, 1], "Read needs an inbound depth of one");
    assert_eq!(answer("50 02 0004 c001 0000"), [0x80, 1, 0xC0, 1], "only Send requested: name ours");
    assert_eq!(answer("50 02 0004 0001 c000"), [0, 0, 0, 1], "client-server model");
}

#[test]
fn rejections_carry_private_data() {
    let mut responder = Responder::new(policy());
    request_to(&mut responder, &frame_bytes(KEY_REQ, "10 02 0004 8001 c002"));
    responder.reject(b"no").unwrap();
    let reply = responder.poll_transmit().unwrap();
    assert_eq!(reply, frame_bytes(KEY_REP, "70 02 0006 8002 c001 6e6f"));
    let Outcome::Rejected(rejection) = reply_to(&mut initiator(config()), &reply).unwrap() else { panic!() };
    assert_eq!(rejection.private_data, b"no");
    assert_eq!(rejection.enhanced.map(|enhanced| (enhanced.ird, enhanced.ord)), Some((2, 1)));

    // siw's rejections may set S without data behind it.
    let Outcome::Rejected(rejection) =
        reply_to(&mut initiator(config()), &frame_bytes(KEY_REP, "30 02 0000")).unwrap()
    else {
        panic!()
    };
    assert_eq!((rejection.enhanced, rejection.private_data), (None, vec![]));
}

#[test]
fn fallback_drops_reserved_bits_first_and_enhanced_set_up_next() {
    let mut tried = Vec::new();
    let mut next = Some(InitiatorConfig { peer: Some(PeerData::new()), ..config() });
    while let Some(config) = next {
        let mut ours = Initiator::new(config, b"").unwrap();
        let request = ours.poll_transmit().unwrap();
        tried.push((request[16], request[17]));
        assert_eq!(ours.handle_close(), SetupError::Closed { silent: true });
        next = ours.fallback();
    }
    assert_eq!(tried, [(FLAG_C | FLAG_S | FLAG_UWARP_A, 2), (FLAG_C | FLAG_S, 2), (FLAG_C, 1)]);

    let mut ours = initiator(config());
    assert_eq!(reply_to(&mut ours, &frame_bytes(KEY_REP, "00 01 0000")), Err(SetupError::NotEnhanced));
    assert_eq!(ours.fallback().map(|config| config.revision), Some(Revision::One));

    let mut ours = initiator(config());
    assert_eq!(ours.handle_input(&KEY_REP[..7]), Ok(None));
    assert_eq!(ours.handle_close(), SetupError::Closed { silent: false });
    assert_eq!(ours.fallback(), None, "it had begun to answer");
}

#[test]
fn bad_frames_end_the_connection() {
    let ask = |request: &[u8]| {
        let mut responder = Responder::new(policy());
        feed!(responder, request).map(|(done, _)| done.is_some())
    };
    assert_eq!(ask(b"GET / HTTP/1.1\r\n"), Err(SetupError::BadKey));
    assert_eq!(
        ask(&frame_bytes(KEY_REP, "10 02 0004 0001 0001")),
        Err(SetupError::WrongKind(FrameKind::Reply))
    );
    assert_eq!(ask(&frame_bytes(KEY_REQ, "00 00 0000")), Err(SetupError::Revision(0)));
    assert_eq!(ask(&frame_bytes(KEY_REQ, "00 03 0000")), Err(SetupError::Revision(3)));
    assert_eq!(ask(&frame_bytes(KEY_REQ, "00 01 0201")), Err(SetupError::PrivateDataTooLong(513)));
    assert_eq!(ask(&frame_bytes(KEY_REQ, "10 02 0003 000000")), Err(SetupError::EnhancedMissing));
    assert_eq!(ask(&frame_bytes(KEY_REQ, "30 02 0004 0001 0001")), Ok(true), "R is not checked in a request");
    assert_eq!(ask(&frame_bytes(KEY_REQ, "1f 02 0004 0001 0001")), Ok(true), "nor are reserved bits");
    assert_eq!(ask(&frame_bytes(KEY_REQ, "10 01 0003 000000")), Ok(true), "S is reserved in revision one");

    let answer = |reply: &[u8]| {
        let mut ours = initiator(config());
        reply_to(&mut ours, reply).map(|_| ())
    };
    assert_eq!(
        answer(&frame_bytes(KEY_REQ, "10 02 0004 0001 0001")),
        Err(SetupError::WrongKind(FrameKind::Request))
    );
    assert_eq!(answer(&frame_bytes(KEY_REP, "10 03 0004 0001 0001")), Err(SetupError::Revision(3)));
    assert_eq!(answer(&frame_bytes(KEY_REP, "10 02 0003 000000")), Err(SetupError::EnhancedMissing));
    let mut first = initiator(InitiatorConfig { revision: Revision::One, ..config() });
    assert_eq!(
        reply_to(&mut first, &frame_bytes(KEY_REP, "10 02 0004 0001 0001")),
        Err(SetupError::Revision(2)),
        "the revision was one"
    );
}

#[test]
fn private_data_limits() {
    assert!(Initiator::new(config(), &[7; 508]).is_ok());
    assert_eq!(
        Initiator::new(config(), &[7; 509]).err(),
        Some(SetupError::PrivateDataLimit { len: 509, max: 508 })
    );
    assert!(Initiator::new(InitiatorConfig { revision: Revision::One, ..config() }, &[7; 512]).is_ok());

    let mut responder = Responder::new(ResponderPolicy { know_peers: true, ..policy() });
    request_to(&mut responder, &frame_bytes(KEY_REQ, "14 02 0004 8001 c001"));
    assert_eq!(responder.private_data_limit(), 508);
    assert_eq!(
        responder.accept(params(1, 1), &[7; 509]),
        Err(SetupError::PrivateDataLimit { len: 509, max: 508 })
    );
    let negotiated = responder.accept(params(1, 1), &[7; 508]).unwrap();
    assert!(!negotiated.peer_is_uwarp, "no room for our data behind the program's: answered as a stranger");
    assert_eq!(responder.accept(params(1, 1), b""), Err(SetupError::Misuse));
}

#[test]
fn nothing_after_the_frame_is_taken() {
    let mut bytes = frame_bytes(KEY_REQ, "10 02 0006 8001 c001 6869");
    bytes.extend_from_slice(b"first FPDU");
    let mut responder = Responder::new(policy());
    let (request, left) = feed!(responder, &bytes).unwrap();
    assert_eq!((request.unwrap().private_data, left), (b"hi".to_vec(), 10));
    assert_eq!(responder.want(), 0);
    assert_eq!(responder.handle_input(b"f"), Err(SetupError::Misuse));
}

/// Settings of one end, for the table of all pairs.
#[derive(Clone, Copy)]
struct Settings {
    revision: Revision,
    crc: bool,
    markers: bool,
    uwarp: bool,
}

impl Settings {
    fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for revision in [Revision::One, Revision::Two] {
            for bits in 0..8 {
                all.push(Self { revision, crc: bits & 1 != 0, markers: bits & 2 != 0, uwarp: bits & 4 != 0 });
            }
        }
        all
    }
}

/// Connects two ends, over as many TCP connections as needed. Returns what the responder and the initiator
/// have negotiated, and the number of connections.
fn negotiate(a: Settings, b: Settings) -> (Negotiated, Negotiated, usize) {
    let mut connections = 0;
    let mut next = Some(InitiatorConfig {
        revision: a.revision,
        crc: a.crc,
        markers: a.markers,
        depths: Depths::negotiated(3, 5),
        max_ird: 128,
        peer: a.uwarp.then_some(PeerData { placement_acks: true, qpn: 0xABCDEF, ..PeerData::new() }),
        peer_in_request: false,
    });
    while let Some(config) = next {
        connections += 1;
        let mut initiator = Initiator::new(config, b"question").unwrap();
        let mut responder = Responder::new(ResponderPolicy {
            max_revision: b.revision,
            crc: b.crc,
            markers: b.markers,
            know_peers: b.uwarp,
            max_ird: 128,
            host: None,
        });
        let request = initiator.poll_transmit().unwrap();
        match feed!(responder, &request) {
            Ok((Some(request), 0)) => {
                assert_eq!(request.private_data, b"question");
                let theirs = responder.accept(params(7, 2), b"answer").unwrap();
                let reply = responder.poll_transmit().unwrap();
                let ours = accepted(&mut initiator, &reply);
                assert_eq!(ours.private_data, b"answer");
                return (theirs, ours, connections);
            }
            Err(SetupError::Revision(_)) => {
                assert_eq!(responder.poll_transmit(), None, "closed without an answer");
                initiator.handle_close();
                next = initiator.fallback();
            }
            other => panic!("{other:?}"),
        }
    }
    panic!("the ends did not connect");
}

#[test]
fn every_pair_of_settings_connects() {
    for a in Settings::all() {
        for b in Settings::all() {
            let (theirs, ours, connections) = negotiate(a, b);
            let revision = a.revision.min(b.revision);
            let enhanced = revision == Revision::Two;
            let uwarp = a.uwarp && b.uwarp && enhanced;
            assert_eq!((ours.revision, theirs.revision), (revision, revision));
            let expected_connections = match (a.revision, b.revision) {
                (Revision::Two, Revision::One) => 2 + usize::from(a.uwarp),
                _ => 1,
            };
            assert_eq!(connections, expected_connections);
            assert_eq!((ours.crc, theirs.crc), (a.crc || b.crc, a.crc || b.crc), "off only when both agree");
            assert_eq!((ours.send_markers, theirs.receive_markers), (b.markers, b.markers));
            assert_eq!((theirs.send_markers, ours.receive_markers), (a.markers, a.markers));
            assert_eq!((ours.peer_is_uwarp, theirs.peer_is_uwarp), (uwarp, uwarp));
            assert_eq!(ours.peer.map(|peer| peer.qpn), uwarp.then_some(0x000102));
            let (stag, to) = ours.rtr_stag_to;
            assert_ne!(stag, 0, "some hardware treats it specially");
            assert_eq!(PeerData::from_rtr(stag, to).map(|peer| peer.qpn), uwarp.then_some(0xABCDEF));
            if enhanced {
                assert_eq!((ours.rtr, theirs.rtr), (Rtr::SendWrite, Rtr::Expect));
                assert_eq!((ours.ird, ours.ord, theirs.ird, theirs.ord), (3, 5, 7, 2));
            } else {
                assert_eq!((ours.rtr, theirs.rtr), (Rtr::SendWrite, Rtr::None));
                assert_eq!((ours.ird, ours.ord, theirs.ird, theirs.ord), (3, 5, 7, 2), "each keeps its own");
            }
        }
    }
}

/// The same for requests that uwarp never makes: each flag byte, each revision.
#[test]
fn every_flag_byte_of_a_request_has_its_answer() {
    for revision in 0..=3u8 {
        for flags in 0..=255u8 {
            let mut bytes = KEY_REQ.to_vec();
            bytes.extend_from_slice(&[flags, revision, 0, 4, 0x80, 1, 0xC0, 1]);
            let mut responder = Responder::new(ResponderPolicy { know_peers: true, crc: false, ..policy() });
            match feed!(responder, &bytes) {
                Ok((Some(request), _)) => {
                    assert_eq!(request.private_data.len(), if request.enhanced.is_some() { 0 } else { 4 });
                    responder.accept(params(1, 1), b"").unwrap();
                    let reply = responder.poll_transmit().unwrap();
                    let expect = flags & FLAG_C
                        | if revision == 2 { flags & FLAG_S } else { 0 }
                        | if request.peer_is_uwarp { FLAG_UWARP_B } else { 0 };
                    assert_eq!((reply[16], reply[17]), (expect, revision));
                    assert_eq!(reply[16] & (FLAG_UWARP_A | FLAG_M | FLAG_R), 0);
                    assert_eq!(
                        request.peer_is_uwarp,
                        revision == 2 && flags & (FLAG_S | FLAG_UWARP_A) == FLAG_S | FLAG_UWARP_A
                    );
                }
                Err(SetupError::Revision(r)) => {
                    assert_eq!(r, revision);
                    assert!(revision == 0 || revision == 3);
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

proptest! {
    #[test]
    fn any_reply_in_any_portions(
        bytes in prop::collection::vec(any::<u8>(), 0..600),
        with_key: bool,
        revision in 0u8..4,
        pd_len in 0u16..520,
        cuts in prop::collection::vec(1usize..40, 1..30),
        uwarp: bool,
    ) {
        let mut stream = bytes;
        if with_key && stream.len() >= 20 {
            stream[..16].copy_from_slice(&KEY_REP);
            stream[17] = revision;
            stream[18..20].copy_from_slice(&pd_len.to_be_bytes());
        }
        let config = InitiatorConfig { peer: uwarp.then(PeerData::new), ..config() };
        let mut whole = initiator(config);
        let at_once = feed!(whole, &stream);

        let mut machine = initiator(config);
        let mut rest: &[u8] = &stream;
        let mut cuts = cuts.into_iter().cycle();
        let in_portions = loop {
            let take = machine.want().min(rest.len()).min(cuts.next().unwrap());
            let (now, later) = rest.split_at(take);
            rest = later;
            match machine.handle_input(now) {
                Ok(None) if !rest.is_empty() => continue,
                other => break other.map(|done| (done, rest.len())),
            }
        };
        // A wrong key is found earlier or later, depending on how the bytes arrive; the rest does not matter.
        prop_assert_eq!(at_once.as_ref().map(|r| &r.0), in_portions.as_ref().map(|r| &r.0));
        if let Ok((Some(Outcome::Accepted(negotiated)), _)) = at_once {
            prop_assert!(negotiated.ord <= 16);
            prop_assert!(negotiated.ird <= 128);
            let limit = negotiated.peer_enhanced.filter(|e| e.ird != NO_AUTO);
            prop_assert!(limit.is_none_or(|e| negotiated.ord <= e.ird));
        }
    }

    #[test]
    fn any_request(
        flags: u8,
        private_data in prop::collection::vec(any::<u8>(), 0..=512),
        ird in 0u16..200,
        ord in 0u16..200,
        answer in prop::collection::vec(any::<u8>(), 0..520),
        accept: bool,
    ) {
        let mut bytes = KEY_REQ.to_vec();
        bytes.extend_from_slice(&[flags, 2]);
        bytes.extend_from_slice(&u16::try_from(private_data.len()).unwrap().to_be_bytes());
        bytes.extend_from_slice(&private_data);
        let mut responder = Responder::new(ResponderPolicy { know_peers: true, ..policy() });
        let Ok((Some(request), 0)) = feed!(responder, &bytes) else {
            prop_assert!(flags & FLAG_S != 0 && private_data.len() < 4);
            return Ok(());
        };
        let fits = answer.len() <= responder.private_data_limit();
        if accept {
            let result = responder.accept(params(ird, ord), &answer);
            prop_assert_eq!(result.is_ok(), fits);
            if let (Ok(negotiated), Some(asked)) = (result, request.enhanced) {
                prop_assert!(asked.ird == NO_AUTO || negotiated.ord <= asked.ird);
                // No Reads for a program that wants none, but for the one that says that the peer is ready.
                prop_assert!(ird > 0 || negotiated.ird <= 1);
                prop_assert!(ird == 0 || asked.ord == NO_AUTO || negotiated.ird >= asked.ord.min(128));
            }
        } else {
            prop_assert_eq!(responder.reject(&answer).is_ok(), fits);
        }
        if let Some(reply) = responder.poll_transmit() {
            prop_assert!(reply.len() <= 20 + 512);
            prop_assert_eq!(usize::from(u16::from_be_bytes([reply[18], reply[19]])), reply.len() - 20);
        }
    }
}
