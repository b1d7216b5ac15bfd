//! Streams whose link changes before the first byte.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{End, LIMIT, attach, sockets, uwarp};
use uwarp_driver::config::LinkChoice;
use uwarp_driver::host::{self, Settling};
use uwarp_driver::places::Place;
use uwarp_driver::{Rtr, StreamParams};
use uwarp_llp::carrier::{Ends, SetUp as _};
use uwarp_llp::streams::{Carries, Pipe, StreamLink};
use uwarp_llp::{Link, LowerLayer as _};
use uwarp_proto::framing::Framing;
use uwarp_proto::setup::{Host, Negotiated, Revision};
use uwarp_rnic::{SendOp, WcStatus};

fn responder() -> StreamParams {
    StreamParams { initiator: false, rtr: Rtr::Expect, wait_first_frame: true, ..uwarp() }
}

fn initiator(framing: Framing) -> StreamParams {
    StreamParams { rtr: Rtr::SendWrite, framing, ..uwarp() }
}

fn link(socket: std::net::TcpStream) -> Link {
    socket.set_nonblocking(true).unwrap();
    socket.into()
}

const SEND: SendOp = SendOp::Send { invalidate: None };

/// The responder has work posted, and polls in earnest, so that its first link may be parked.
#[test]
fn a_responder_goes_on_over_another_link() {
    for polls in [0, 3000] {
        let (mut a, b) = (End::new(4096), End::new(4096));
        let ((_kept, before), (one, other)) = (sockets(), sockets());
        before.set_nonblocking(true).unwrap();
        let number = b.qp.attach(before.into(), responder(), b.watch.clone()).unwrap();
        b.recv(&[b.sge(0, 1000)]);
        b.send(SEND, &[b.sge(2000, 500)]);
        for _ in 0..polls {
            b.nic.poll_cq(&b.cq, 1, |_| panic!("nothing was sent"));
        }
        let other = link(other);
        b.qp.settle(number, Framing::PLAIN, other.caps(), |left| {
            // The old link moves nothing any more.
            drop(left);
            other
        })
        .unwrap();
        a.memory[..1000].fill(7);
        a.recv(&[a.sge(2000, 500)]);
        attach(&a, one, initiator(Framing::PLAIN));
        a.send(SEND, &[a.sge(0, 1000)]);
        for end in [&b, &a] {
            assert_eq!([end.poll(), end.poll()].map(|wc| wc.status), [WcStatus::Success; 2]);
        }
        assert_eq!(b.memory[..1000], [7; 1000]);
        // Nothing of the engine has kept it: neither link is watched any more.
        let (queue_pair, end) = (Arc::downgrade(&b.qp), Instant::now() + LIMIT);
        drop(b);
        while queue_pair.strong_count() > 0 {
            assert!(Instant::now() < end, "it is still served");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// After the first byte, or for a stream that is not the present one, the link stays.
#[test]
fn a_stream_in_use_keeps_its_link() {
    let (a, b) = (End::new(4096), End::new(4096));
    let ((one, other), (_kept, spare)) = (sockets(), sockets());
    b.recv(&[b.sge(0, 1000)]);
    other.set_nonblocking(true).unwrap();
    let number = b.qp.attach(other.into(), responder(), b.watch.clone()).unwrap();
    attach(&a, one, initiator(Framing::default()));
    a.send(SEND, &[a.sge(0, 1000)]);
    assert_eq!(b.poll().status, WcStatus::Success);
    let caps = link(spare).caps();
    let change = |_| panic!("it keeps its link");
    assert!(b.qp.settle(number, Framing::PLAIN, caps, change).is_err(), "it is in use");
    b.send(SEND, &[b.sge(0, 100)]);
    a.recv(&[a.sge(0, 1000)]);
    assert_eq!([a.poll(), a.poll()].map(|wc| wc.status), [WcStatus::Success; 2]);
    // An initiator has sent its indication.
    let c = End::new(4096);
    let (d, _peer) = sockets();
    d.set_nonblocking(true).unwrap();
    let number = c.qp.attach(d.into(), initiator(Framing::default()), c.watch.clone()).unwrap();
    assert!(c.qp.settle(number, Framing::PLAIN, caps, change).is_err(), "it has sent");
    c.qp.destroy();
    assert!(c.qp.settle(number, Framing::PLAIN, caps, change).is_err(), "it has ended");
}

/// What has a stream of reliable datagrams.
struct Nobody;

impl Carries for Nobody {
    fn attend(&self, _: &Arc<Pipe>, _: bool) {}
    fn answers(&self, _: &Pipe) -> Option<(bool, Duration)> {
        None
    }
    fn look(&self, _: bool) -> bool {
        true
    }
    fn rest(&self) {}
    fn raise(&self, _: u64) {}
}

/// Whatever its rule says: nobody could tell by the stream's bytes where they go on.
#[test]
fn a_stream_of_reliable_datagrams_keeps_its_link() {
    let (b, (_kept, spare)) = (End::new(4096), sockets());
    let ends = Ends { local: ([10, 0, 0, 1], 5).into(), peer: ([10, 0, 0, 2], 6).into() };
    let stream: Link = Box::new(StreamLink::new(Pipe::new(ends, None), Arc::new(Nobody))).into_link();
    let said = negotiated(false, nobody());
    let settling = Settling::begin(LinkChoice::Memory, &said, [ends.local, ends.peer]);
    let attached = b.qp.attach_unsettled(stream, responder(), b.watch.clone(), settling);
    let number = attached.map_err(|(error, _)| error).unwrap();
    let change = |_| panic!("it keeps its link");
    assert!(b.qp.settle(number, Framing::PLAIN, link(spare).caps(), change).is_err());
}

#[test]
fn a_peer_has_its_place_until_its_stream_ends() {
    let [peer, other] = [1, 2].map(|port| ([10, 0, 0, 9], port).into());
    let (a, (one, _kept)) = (End::new(4096), sockets());
    let number = a.qp.attach(link(one), initiator(Framing::default()), a.watch.clone()).unwrap();
    a.qp.keep_place(number, Place::hold(peer));
    assert!(Place::take(other, 1).is_none());
    a.qp.destroy();
    assert!(Place::take(other, 1).is_some());
    // The stream has ended meanwhile.
    a.qp.keep_place(number, Place::hold(peer));
    assert!(Place::take(other, 1).is_some());
}

/// Whoever finds the initiator's first bytes in memory tells the program of them: here often the thread that
/// polls the responder's queue, and not the engine.
#[test]
fn who_polls_finds_the_beginning_in_memory() {
    for round in 0..500u16 {
        let (a, b) = (End::new(4096), End::new(4096));
        let (one, other) = sockets();
        let ends = [&one, &other].map(|socket| [socket.local_addr().unwrap(), socket.peer_addr().unwrap()]);
        let nonce = [round.to_ne_bytes(); 8].as_flattened().try_into().unwrap();
        let host = Host { incarnation: b.nic.neighbours().unwrap().key().incarnation, nonce };
        let mut attached = Vec::new();
        for (end, socket, params, ends) in
            [(&b, other, responder(), ends[1]), (&a, one, initiator(Framing::default()), ends[0])]
        {
            let said = negotiated(params.initiator, host);
            let settling = Settling::begin(LinkChoice::Memory, &said, ends);
            let number = end
                .qp
                .attach_unsettled(link(socket), params, end.watch.clone(), settling)
                .map_err(|(e, _)| e);
            attached.push((end, number.unwrap(), said, ends));
        }
        for (end, number, said, ends) in &attached {
            host::begin(&end.qp, *number, LinkChoice::Memory, said, *ends);
        }
        let until = Instant::now() + LIMIT;
        while !b.watch.has_begun() {
            b.nic.poll_cq(&b.cq, 1, |_| panic!("nothing was posted"));
            assert!(
                Instant::now() < until,
                "round {round}: the first bytes were received, and not told: {:?}",
                b.watch.ended()
            );
        }
    }
}

fn nobody() -> Host {
    Host { incarnation: [0; 16], nonce: [0; 16] }
}

fn negotiated(initiator: bool, host: Host) -> Negotiated {
    Negotiated {
        initiator,
        revision: Revision::Two,
        crc: false,
        send_markers: false,
        receive_markers: false,
        ird: 1,
        ord: 1,
        rtr: Rtr::SendWrite,
        peer_enhanced: None,
        drops_reserved_flags: false,
        peer_is_uwarp: true,
        peer: None,
        host: Some(host),
        rtr_stag_to: (1, 0),
        private_data: Vec::new(),
    }
}
