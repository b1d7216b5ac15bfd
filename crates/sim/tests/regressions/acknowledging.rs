//! Last acknowledgements: when they are said once more, and what they are not (docs/adr/009).

use uwarp_mem as mem;
use uwarp_proto::setup::PeerData;
use uwarp_rnic::qp::{Answers, Disconnect, LinkEvent, Now, QpModify, QpState, Rtr, StreamParams};
use uwarp_rnic::{EventKind, SendOp, WcStatus};
use uwarp_sim::Side::{self, A, B};
use uwarp_sim::{Arena, EndConfig, NetParams, World};

use super::duo::{Duo, SEND, all_rights, params, with_rtr};

fn infiniband(params: [StreamParams; 2]) -> [StreamParams; 2] {
    let peer = Some(PeerData { placement_acks: true, ..PeerData::new() });
    params.map(|p| StreamParams { placement_acks: true, infiniband: true, peer, ..p })
}

/// What `side` sends next.
fn next_bytes(duo: &mut Duo, side: Side) -> Vec<u8> {
    let core = &mut duo.world.end(side).core;
    let out = core.poll_transmit(&Now::unread()).unwrap();
    let mut bytes = Vec::new();
    out.gather(usize::MAX, |seg| mem::copy_out(seg, &mut bytes).unwrap());
    core.transmitted(&Now::unread(), bytes.len());
    bytes
}

/// A has sent a message that B has placed. B's acknowledgement is queued, and its link has no room yet.
fn with_queued_ack() -> Duo {
    let mut duo = Duo::new(infiniband(params()));
    duo.recv(B, 7, 0, 64);
    let sge = duo.sge(A, 0, 8);
    duo.queue(A, 1, SEND, sge);
    let bytes = next_bytes(&mut duo, A);
    let core = &mut duo.world.end(B).core;
    assert_eq!(core.handle_input(&Now::unread(), &bytes), bytes.len());
    assert!(core.poll_transmit(&Now::unread()).is_some());
    duo
}

/// The acknowledgement was dropped with everything else that was queued, and counted as said: the peer took
/// the good message for the bad one.
#[test]
fn an_acknowledgement_that_was_dropped_is_said_again_before_a_terminate() {
    let mut duo = with_queued_ack();
    let sge = duo.sge(A, 0, 8);
    duo.queue(A, 2, SendOp::Write { stag: 0x77, to: 0 }, sge);
    let bytes = next_bytes(&mut duo, A);
    duo.world.end(B).core.handle_input(&Now::unread(), &bytes);
    duo.world.settle();
    assert_eq!(duo.sends(A), [(1, WcStatus::Success), (2, WcStatus::RemAccessErr)]);
}

/// A peer that was silent for too long saw a reset when it came back, whatever had been placed.
#[test]
fn a_peer_that_was_silent_gets_a_last_acknowledgement_in_case_it_comes_back() {
    let mut duo = with_queued_ack();
    duo.world.end(B).core.handle_link(&Now::unread(), LinkEvent::Lost(Disconnect::Timeout));
    duo.world.settle();
    assert_eq!(duo.sends(A), [(1, WcStatus::Success)]);
    assert_eq!(duo.world.end(A).disconnected, [Disconnect::PeerClosed]);
}

/// A queue pair in RTR that had received nothing but the end of its stream reported a message.
#[test]
fn a_last_acknowledgement_is_no_message() {
    let params = infiniband(with_rtr(Rtr::SendWrite)).map(|p| StreamParams { by_number: true, ..p });
    let config = EndConfig::default();
    let mut world = World::new(1, [config, config], NetParams::default(), [None, None]);
    let memory = [Arena::new(4096), Arena::new(4096)];
    let _regions = world.init(&memory, all_rights());
    let to = |state| QpModify { state: Some(state), awaits_stream: true, ..QpModify::default() };
    for side in Side::BOTH {
        world.end(side).core.modify(&to(QpState::Rtr)).unwrap();
    }
    world.end(A).core.modify(&to(QpState::Rts)).unwrap();
    world.attach(params);
    world.settle_for(1_000_000);
    world.disconnect(A);
    world.settle();
    let none: [EventKind; 0] = [];
    assert_eq!(world.end(B).events.kinds(), none);
}

/// Nobody waits for the acknowledgement of a peer whose system does not answer.
#[test]
fn no_acknowledgement_is_expected_of_a_silent_peer() {
    let mut duo = Duo::new(infiniband(params()));
    let sge = duo.sge(A, 0, 8);
    duo.queue(A, 1, SEND, sge);
    duo.world.pump(A);
    let core = &mut duo.world.end(A).core;
    assert!(core.demand_ack() && core.expects_ack());
    let answers = Answers { pending: true, doubtful: true, last: std::time::Duration::from_secs(1) };
    core.handle_link(&Now::unread(), LinkEvent::Answers(Some(answers)));
    assert!(!core.expects_ack());
}
