//! Two queue pairs of one process over a TCP connection on loopback, driven the ways programs drive them.

#![allow(missing_docs)]

use std::time::Duration;

use uwarp_driver::{Disconnect, StreamParams};
use uwarp_proto::framing::Framing;
use uwarp_rnic::qp::QpState;
use uwarp_rnic::{SendOp, Wc, WcStatus};

mod common;
use common::{End, connect, uwarp};

fn ping_pong(a: &End, b: &End, take: fn(&End) -> Wc, rounds: usize) {
    let send = SendOp::Send { invalidate: None };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..rounds {
                b.recv(&[b.sge(0, 64)]);
                let mut seen = 0;
                while seen < 1 {
                    let wc = take(b);
                    assert_eq!(wc.status, WcStatus::Success);
                    seen += usize::from(wc.wr_id == 2);
                }
                b.send(send, &[b.sge(0, 64)]);
            }
        });
        for i in 0..rounds {
            a.recv(&[a.sge(64, 64)]);
            a.send(send, &[a.sge(0, 64)]);
            let mut seen = 0;
            while seen < 1 {
                let wc = take(a);
                assert_eq!(wc.status, WcStatus::Success, "round {i}");
                seen += usize::from(wc.wr_id == 2);
            }
        }
    });
}

#[test]
fn polling_ping_pong() {
    let (a, b) = connect(uwarp(), 4096);
    ping_pong(&a, &b, End::poll, 2000);
    assert_eq!((a.events.count(), b.events.count()), (0, 0));
}

#[test]
fn blocking_ping_pong() {
    let (a, b) = connect(uwarp(), 4096);
    ping_pong(&a, &b, End::wait, 2000);
}

#[test]
fn both_ends_in_one_process_block_on_two_channels() {
    // Only one of two blocked threads can sleep on the sockets; the other must be woken all the same.
    let (a, b) = connect(StreamParams::default(), 4096);
    ping_pong(&a, &b, End::wait, 500);
}

#[test]
fn large_writes_and_reads_arrive_whole() {
    for params in [uwarp(), StreamParams::default(), StreamParams { framing: Framing::PLAIN, ..uwarp() }] {
        let size = 9 << 20;
        let (mut a, mut b) = connect(params, size);
        for (i, byte) in a.memory.iter_mut().enumerate() {
            *byte = (i % 251) as u8;
        }
        let len = 8u32 << 20;
        let to = b.addr() + 5;
        a.send(SendOp::Write { stag: b.mr.stag(), to }, &[a.sge(1, len)]);
        a.send(SendOp::Send { invalidate: None }, &[a.sge(0, 0)]);
        b.recv(&[b.sge(0, 0)]);
        assert_eq!(a.poll().status, WcStatus::Success);
        assert_eq!(a.poll().status, WcStatus::Success);
        assert_eq!(b.poll().status, WcStatus::Success);
        let n = len as usize;
        assert!(b.memory[5..5 + n] == a.memory[1..1 + n]);
        assert!(b.memory[..5].iter().all(|x| *x == 0) && b.memory[5 + n..].iter().all(|x| *x == 0));
        b.memory[..n].fill(0x5a);
        let to = b.addr();
        a.send(SendOp::Read { stag: b.mr.stag(), to, invalidate_local: false }, &[a.sge(3, len)]);
        let wc = a.poll();
        assert_eq!((wc.status, wc.byte_len), (WcStatus::Success, len));
        assert!(a.memory[3..3 + n].iter().all(|x| *x == 0x5a));
    }
}

#[test]
fn disconnect_is_seen_by_both_and_loses_nothing() {
    let (a, b) = connect(uwarp(), 1 << 20);
    b.recv(&[b.sge(0, 1 << 20)]);
    b.recv(&[b.sge(0, 16)]);
    a.send(SendOp::Send { invalidate: None }, &[a.sge(0, 1 << 20)]);
    a.qp.disconnect();
    assert_eq!(b.watch.wait_end(), Disconnect::PeerClosed);
    assert_eq!(a.watch.wait_end(), Disconnect::LocalClosed);
    assert_eq!(a.poll().status, WcStatus::Success);
    let wc = b.poll();
    assert_eq!((wc.status, wc.byte_len), (WcStatus::Success, 1 << 20));
    assert_eq!(b.poll().status, WcStatus::WrFlushErr);
    assert_eq!(b.qp.query().state, QpState::Err);
}

#[test]
fn a_bad_key_terminates_and_is_told_to_both() {
    let (a, b) = connect(uwarp(), 4096);
    b.recv(&[b.sge(0, 16)]);
    let to = b.addr();
    a.send(SendOp::Read { stag: b.mr.stag() ^ 1, to, invalidate_local: false }, &[a.sge(0, 64)]);
    assert_eq!(a.poll().status, WcStatus::RemAccessErr);
    assert!(matches!(a.watch.wait_end(), Disconnect::Terminated(_)));
    assert!(matches!(b.watch.wait_end(), Disconnect::Sent(_)));
    assert_eq!(b.poll().status, WcStatus::WrFlushErr);
    assert_eq!((a.events.count(), b.events.count()), (1, 1));
}

#[test]
fn a_send_waits_for_its_receive() {
    let (a, b) = connect(uwarp(), 4096);
    for _ in 0..10 {
        a.send(SendOp::Send { invalidate: None }, &[a.sge(0, 100)]);
        assert_eq!(a.poll().status, WcStatus::Success);
    }
    std::thread::sleep(Duration::from_millis(20));
    for _ in 0..10 {
        b.recv(&[b.sge(0, 100)]);
        let wc = b.poll();
        assert_eq!((wc.status, wc.byte_len), (WcStatus::Success, 100));
    }
}
