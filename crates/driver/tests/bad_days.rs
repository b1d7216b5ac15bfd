//! Defects that appeared, or could have appeared, with unusual timing, peers or programs.

#![allow(missing_docs, unsafe_code)]

mod common;

use std::io::{Read, Write};
use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::*;
use uwarp_driver::{Disconnect, Nic, Readiness, Rtr, Source, StreamParams};
use uwarp_llp::{Ended, Link, LowerLayer as _};
use uwarp_proto::framing::Framing;
use uwarp_rnic::cq::{Coverage, Direct};
use uwarp_rnic::qp::{QpModify, QpState};
use uwarp_rnic::{Cq, Mr, Pd, SendOp, Sge, Wc, WcOpcode, WcStatus};

const SEND: SendOp = SendOp::Send { invalidate: None };

/// A stream that may be used at once, to a peer that is not uwarp.
fn plain() -> StreamParams {
    StreamParams { rtr: Rtr::None, ..StreamParams::default() }
}

/// Reads to the end of the stream (or its reset).
fn read_to_end(mut socket: &std::net::TcpStream) -> Vec<u8> {
    let mut all = Vec::new();
    // A reset ends the stream as well as an end of file.
    let _ = socket.read_to_end(&mut all);
    all
}

/// The coming close resets the connection.
fn reset_on_close(peer: &std::net::TcpStream) {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    // SAFETY: a socket option with its own structure.
    let rc = unsafe {
        libc::setsockopt(
            std::os::fd::AsRawFd::as_raw_fd(peer),
            libc::SOL_SOCKET,
            libc::SO_LINGER,
            (&raw const linger).cast(),
            size_of_val(&linger) as libc::socklen_t,
        )
    };
    assert_eq!(rc, 0);
}

/// Returns when bytes have reached the peer, which reads none of them, and gives the background thread time
/// to send what else the sockets hold. Too little time only makes a test weaker.
fn fill_the_sockets(peer: &std::net::TcpStream) {
    assert_eq!(peer.peek(&mut [0]).expect("the first byte"), 1);
    std::thread::sleep(Duration::from_millis(100));
}

fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + LIMIT;
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn the_end_of_a_stream_that_comes_with_its_last_bytes_is_seen() {
    // Edge-triggered: bytes and end make one event, and a receive that comes up short does not find the end.
    for _ in 0..200 {
        let (end, peer) = with_raw_peer(plain(), 4096);
        end.recv(&[end.sge(0, 64)]);
        write_all(&peer, &send_message(1, b"last words"));
        peer.shutdown(Shutdown::Write).unwrap();
        assert_eq!(end.watch.wait_end(), Disconnect::PeerClosed);
        assert_eq!(end.look_only().status, WcStatus::Success);
    }
}

#[test]
fn a_receive_of_many_elements_is_filled() {
    // More pieces than one receiving call took: the rest in the socket was overlooked.
    let (mut a, b) = connect(uwarp(), 4 << 20);
    for (i, byte) in a.memory.iter_mut().enumerate() {
        *byte = (i % 251) as u8;
    }
    let (element, messages) = (2000u64, 30);
    let len = 32 * element as u32;
    for m in 0..messages {
        let elements: Vec<Sge> = (0..32).map(|i| b.sge((m * 32 + i) * 2 * element, element as u32)).collect();
        b.recv(&elements);
    }
    for m in 0..messages {
        a.send(SEND, &[a.sge(m * u64::from(len), len)]);
    }
    for _ in 0..messages {
        assert_eq!(a.look_only().status, WcStatus::Success);
        let wc = b.look_only();
        assert_eq!((wc.status, wc.byte_len), (WcStatus::Success, len));
    }
    let element = element as usize;
    for i in 0..messages as usize * 32 {
        assert!(b.memory[i * 2 * element..][..element] == a.memory[i * element..][..element], "element {i}");
    }
}

#[test]
fn a_destroyed_queue_pair_sends_no_memory_that_the_program_has_back() {
    let (mut end, peer) = with_raw_peer(plain(), 16 << 20);
    end.memory.fill(0x11);
    end.send(SendOp::Write { stag: 1, to: 0 }, &[end.sge(0, 16 << 20)]);
    fill_the_sockets(&peer);
    end.qp.destroy();
    end.memory.fill(0xEE);
    let seen = read_to_end(&peer);
    assert!(!seen.is_empty() && !seen.windows(16).any(|w| w == [0xEE; 16]));
}

#[test]
fn a_region_that_is_taken_back_during_a_peers_read_is_sent_no_more() {
    let (mut end, peer) = with_raw_peer(plain(), 16 << 20);
    end.memory.fill(0x11);
    write_all(&peer, &read_request(1, 16 << 20, end.mr.stag(), end.addr()));
    // The response has begun, and gets no further than the socket's buffers.
    let mut first = [0; 4096];
    (&peer).read_exact(&mut first).unwrap();
    fill_the_sockets(&peer);
    end.mr.deregister();
    end.memory.fill(0xEE);
    let seen = read_to_end(&peer);
    assert!(seen.windows(16).any(|w| w == [0x11; 16]) && !seen.windows(16).any(|w| w == [0xEE; 16]));
    assert!(matches!(end.watch.wait_end(), Disconnect::Sent(_)));
}

#[test]
fn memory_that_is_unmapped_while_it_is_sent_costs_the_connection_only() {
    let (end, peer) = with_raw_peer(plain(), 64);
    let size = 16 << 20;
    // SAFETY: a new anonymous mapping.
    let map = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            size,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    assert_ne!(map, libc::MAP_FAILED);
    let addr = map.expose_provenance() as u64;
    let mr = Mr::register(&end.pd, addr, size as u64, addr, all_rights()).unwrap();
    let whole = Sge { addr, length: size as u32, lkey: mr.stag() };
    end.send(SendOp::Write { stag: 1, to: 0 }, &[whole]);
    fill_the_sockets(&peer);
    // SAFETY: the mapping above; nothing of this program refers to it.
    assert_eq!(unsafe { libc::munmap(map, size) }, 0);
    read_to_end(&peer);
    assert_eq!(end.watch.wait_end(), Disconnect::Reset);
    assert_eq!(end.look_only().status, WcStatus::LocProtErr);
}

#[test]
fn readiness_is_not_lost_to_a_query() {
    let (a, b) = connect(uwarp(), 4096);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for end in [&a, &b] {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    end.qp.query();
                }
            });
        }
        let end = Instant::now() + Duration::from_secs(2);
        while Instant::now() < end {
            a.send(SendOp::Read { stag: b.mr.stag(), to: b.addr(), invalidate_local: false }, &[a.sge(0, 8)]);
            assert_eq!(a.look_only().status, WcStatus::Success);
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_disconnect_does_not_drop_what_waits_for_the_first_fpdus_time() {
    // One timer for two purposes: the later one silenced the earlier one.
    let delay = Duration::from_millis(50);
    let (mut end, peer) = with_raw_peer(StreamParams { first_frame_delay: delay, ..plain() }, 4096);
    end.memory.fill(0x77);
    end.send(SendOp::Write { stag: 1, to: 0 }, &[end.sge(0, 64)]);
    end.qp.disconnect();
    let seen = read_to_end(&peer);
    assert!(seen.windows(64).any(|w| w == [0x77; 64]), "{} bytes", seen.len());
    assert_eq!(end.look_only().status, WcStatus::Success);
}

#[test]
fn a_peer_that_misses_the_first_fpdu_is_sent_more() {
    // Linux siw on a busy machine: the connection stood still, although the first FPDU had arrived.
    let (end, mut peer) =
        with_raw_peer(StreamParams { nudge_after: Some(Duration::from_millis(1)), ..plain() }, 64);
    let mut first = [0; 28];
    end.send(SEND, &[end.sge(0, 4)]);
    peer.read_exact(&mut first).unwrap();
    assert_eq!(first[2..4], [0x41, 0x43]);
    // An RDMA Write of no bytes.
    let mut more = [0; 20];
    peer.read_exact(&mut more).unwrap();
    assert_eq!(more[..], fpdu(&[0xC1, 0x40, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]));
    // It has answered, and the connection is as good as any.
    end.recv(&[end.sge(0, 64)]);
    write_all(&peer, &send_message(1, b"here I am"));
    assert_eq!(end.look_only().status, WcStatus::Success);
    assert_eq!(end.look_only().status, WcStatus::Success);
    end.qp.disconnect();
    let rest = read_to_end(&peer);
    assert!(rest.chunks(20).all(|sent| sent == more), "{rest:02x?}");
}

#[test]
fn a_reset_is_no_orderly_end_although_a_send_waits_for_its_receive() {
    // Found by the attacker of `conformance/tests/hostile`: no asynchronous event came.
    let (end, peer) = with_raw_peer(plain(), 4096);
    write_all(&peer, &send_message(1, b"anybody there?"));
    std::thread::sleep(Duration::from_millis(20));
    reset_on_close(&peer);
    drop(peer);
    assert_eq!(end.watch.wait_end(), Disconnect::Reset);
    assert_eq!(end.events.count(), 1);
}

#[test]
fn a_peer_that_goes_while_its_send_waits_for_a_receive_is_missed() {
    for reset in [false, true] {
        let (end, peer) = with_raw_peer(plain(), 4096);
        write_all(&peer, &send_message(1, b"anybody there?"));
        write_all(&peer, &send_message(2, b"no?"));
        std::thread::sleep(Duration::from_millis(20));
        if reset {
            reset_on_close(&peer);
        }
        drop(peer);
        // Nothing is lost on a program that is only slow.
        end.recv(&[end.sge(0, 64)]);
        assert_eq!(end.look_only().status, WcStatus::Success);
        end.watch.wait_end();
    }
}

#[test]
fn a_send_that_fails_does_not_hide_what_the_peer_sent_before_it_went() {
    // Receive completions, or the peer's Terminate, may lie in the socket when a send finds the connection
    // broken.
    for _ in 0..100 {
        let (end, peer) = with_raw_peer(plain(), 1 << 20);
        for _ in 0..4 {
            end.recv(&[end.sge(0, 64)]);
        }
        let full = [end.sge(0, 1 << 20)];
        for _ in 0..16 {
            end.send(SendOp::Write { stag: 1, to: 0 }, &full);
        }
        let mut frames = Vec::new();
        for msn in 1..=4 {
            frames.extend(send_message(msn, b"heed this"));
        }
        write_all(&peer, &frames);
        // Unread input makes this a reset.
        drop(peer);
        while let Ok(()) = end.try_send(1, SendOp::Write { stag: 1, to: 0 }, &[end.sge(0, 8)]) {
            if end.qp.query().state == QpState::Err {
                break;
            }
        }
        end.watch.wait_end();
        let mut received = 0;
        end.cq.poll(1024, |wc| received += usize::from(wc.wr_id == 2 && wc.status == WcStatus::Success));
        assert_eq!(received, 4);
    }
}

#[test]
fn a_long_message_goes_on_while_its_sender_polls_in_earnest() {
    // The system reports no room to a thread that polls in earnest: the thread must continue by itself after
    // a turn.
    for _ in 0..20 {
        let (a, b) = connect(uwarp(), 8 << 20);
        let until = Instant::now() + Duration::from_millis(5);
        while Instant::now() < until {
            assert_eq!(a.nic.poll_cq(&a.cq, 1, |_| ()), 0);
        }
        a.send(SendOp::Write { stag: b.mr.stag(), to: b.addr() }, &[a.sge(0, 8 << 20)]);
        assert_eq!(a.poll().status, WcStatus::Success);
    }
}

#[test]
fn a_queue_pair_is_served_that_was_polled_in_earnest_before_another() {
    // Its socket was not watched because a thread received from it all the time; then this thread did
    // something else.
    let (first, peer) = connect(uwarp(), 4096);
    let (second, _other) = connect(uwarp(), 4096);
    for _ in 0..20 {
        let until = Instant::now() + Duration::from_millis(2);
        while Instant::now() < until {
            assert_eq!(first.nic.poll_cq(&first.cq, 1, |_| ()), 0);
        }
        let op = SendOp::Read { stag: first.mr.stag(), to: first.addr(), invalidate_local: false };
        peer.send(op, &[peer.sge(0, 64)]);
        let end = Instant::now() + LIMIT;
        while peer.cq.is_empty() {
            assert_eq!(second.nic.poll_cq(&second.cq, 1, |_| ()), 0);
            assert!(Instant::now() < end, "nobody serves the first queue pair");
        }
        assert_eq!(peer.look_only().status, WcStatus::Success);
    }
}

struct Ring(AtomicUsize);
impl Source for Ring {
    fn ready(&self, _: Readiness) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
    fn timeout(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn a_thread_that_polls_in_earnest_and_finds_keeps_nobody_else_waiting() {
    // Each completion began the count of empty polls anew, so other sockets were never served, and the
    // background thread stood back all the time.
    let nic = Nic::open().unwrap();
    let events = Arc::new(Events::default());
    let cq = Cq::new(16, 0, None, events);
    let ring = Arc::new(Ring(AtomicUsize::new(0)));
    let token = nic.engine().new_token(ring.clone());
    let end = Instant::now() + LIMIT;
    let mut rounds = 0u32;
    while ring.0.load(Ordering::SeqCst) < 20 {
        assert!(Instant::now() < end, "the timer does not fire");
        if rounds.is_multiple_of(64) {
            nic.engine().set_timer(token, Some(Instant::now()));
        }
        rounds += 1;
        for _ in 0..12 {
            assert_eq!(nic.poll_cq(&cq, 1, |_| ()), 0);
        }
        assert!(cq.push(Wc::new(1, WcStatus::Success, WcOpcode::Send, 1), false));
        assert_eq!(nic.poll_cq(&cq, 1, |_| ()), 1);
    }
    nic.engine().deregister(token);
}

#[test]
fn no_event_follows_a_destroyed_queue_pair() {
    let (end, peer) = with_raw_peer(plain(), 560_000);
    end.send(SendOp::Write { stag: 1, to: 0 }, &[end.sge(0, 560_000)]);
    fill_the_sockets(&peer);
    end.qp.modify(&QpModify { sqd_async_notify: Some(true), ..to(QpState::Sqd) }).unwrap();
    end.qp.destroy();
    read_to_end(&peer);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!((end.events.count(), end.watch.ended()), (0, None));
    assert_eq!(end.cq.poll(16, |_| ()), 0);
}

#[test]
fn each_wait_for_a_receive_has_its_own_time() {
    let patience = Duration::from_secs(5);
    let (end, peer) = with_raw_peer(StreamParams { rnr_timeout: Some(patience), ..plain() }, 4096);
    for msn in 1..=6 {
        write_all(&peer, &send_message(msn, b"next"));
    }
    for _ in 0..5 {
        std::thread::sleep(patience / 4);
        end.recv(&[end.sge(0, 64)]);
        assert_eq!(end.look_only().status, WcStatus::Success);
    }
    // The sixth finds none.
    assert!(matches!(end.watch.wait_end(), Disconnect::Sent(_)));
}

#[test]
fn a_queue_pair_that_was_reset_takes_another_connection_at_once() {
    let (end, peer) = with_raw_peer(plain(), 4096);
    for _ in 0..3 {
        end.qp.modify(&to(QpState::Reset)).unwrap();
        end.qp.modify(&to(QpState::Init)).unwrap();
        let (a, b) = sockets();
        let watch: Arc<Watch> = Arc::default();
        b.set_nonblocking(true).unwrap();
        end.qp.attach(b.into(), StreamParams { framing: Framing::PLAIN, ..plain() }, watch).unwrap();
        end.recv(&[end.sge(0, 64)]);
        write_all(&a, &send_message(1, b"again"));
        assert_eq!(end.look_only().status, WcStatus::Success);
    }
    drop(peer);
}

#[test]
fn a_peer_that_does_not_read_cannot_hold_up_a_disconnect() {
    let (end, peer) = with_raw_peer(plain(), 16 << 20);
    end.send(SendOp::Write { stag: 1, to: 0 }, &[end.sge(0, 16 << 20)]);
    fill_the_sockets(&peer);
    end.qp.disconnect();
    assert_eq!(end.watch.wait_end(), Disconnect::LocalClosed);
    assert_eq!(end.look_only().status, WcStatus::WrFlushErr);
    drop(peer);
}

#[test]
fn a_completion_queue_keeps_all_queue_pairs_that_are_made_at_the_same_time() {
    let nic = Nic::open().unwrap();
    let (pd, events) = (Pd::new(), Arc::new(Events::default()));
    for _ in 0..50 {
        let cq = Cq::new(16, 0, None, events.clone());
        let pairs: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> =
                (0..4).map(|_| scope.spawn(|| queue_pair(&nic, &pd, &cq, &events))).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        let look = |few| cq.make_progress(&Direct { few, favourite: u32::MAX, partial_every: 1 }, false);
        assert_eq!(look(3), Coverage::Partial, "a queue pair was forgotten");
        for qp in pairs {
            qp.destroy();
        }
        assert_eq!(look(0), Coverage::Complete);
    }
}

#[test]
fn nothing_waits_for_ever_for_a_descriptor_that_rings_while_others_poll() {
    // A pipe represents a listener of the connection manager: any thread that looks serves it.
    let nic = Nic::open().unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    let ring = Arc::new(Ring(AtomicUsize::new(0)));
    let fd = std::os::fd::AsRawFd::as_raw_fd(&reader);
    let token = nic.engine().register(fd, ring.clone()).unwrap();
    let (a, b) = connect(uwarp(), 4096);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for (one, first) in [(&a, true), (&b, false)] {
            let stop = &stop;
            scope.spawn(move || {
                // Ping-pong in earnest.
                one.recv(&[one.sge(0, 64)]);
                if first {
                    one.send(SEND, &[one.sge(0, 64)]);
                }
                while !stop.load(Ordering::Relaxed) {
                    let mut received = false;
                    one.nic.poll_cq(&one.cq, 1, |wc| received = wc.wr_id == 2);
                    if received {
                        one.recv(&[one.sge(0, 64)]);
                        one.send(SEND, &[one.sge(0, 64)]);
                    }
                }
            });
        }
        for _ in 0..50 {
            let before = ring.0.load(Ordering::SeqCst);
            (&writer).write_all(b"x").unwrap();
            eventually("nobody looks", || ring.0.load(Ordering::SeqCst) > before);
        }
        stop.store(true, Ordering::Relaxed);
    });
    nic.engine().deregister(token);
}

/// Ends a stream while its last message is under way to a peer that has not read it.
fn end_with_bytes_under_way(end: &End, length: u32) {
    end.send(SendOp::Write { stag: 1, to: 0 }, &[end.sge(0, length)]);
    end.qp.disconnect();
}

#[test]
fn a_peer_that_never_reads_hears_of_the_end_by_a_reset() {
    let (end, peer) = with_raw_peer(plain(), 1 << 20);
    end_with_bytes_under_way(&end, 1 << 20);
    let start = Instant::now();
    let peer = Link::from(peer);
    while peer.ended() != Some(Ended::Broken) {
        assert!(start.elapsed() < LIMIT, "still waiting");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_network_that_is_out_at_the_end_costs_no_bytes() {
    // The last half second without an acknowledgement was taken for a peer that does not read.
    let _nic = Nic::open().unwrap();
    let lo = |state: &str| {
        let ip = std::process::Command::new("ip").args(["link", "set", "lo", state]).status();
        assert!(ip.unwrap().success());
    };
    let apart = std::thread::spawn(move || {
        // SAFETY: concerns the sockets that this thread makes from now on.
        let apart = unsafe { libc::unshare(libc::CLONE_NEWNET) } == 0;
        assert!(apart, "this test makes a network namespace of its own, which needs root");
        lo("up");
        let (end, peer) = with_raw_peer(plain(), 20_000);
        lo("down");
        end_with_bytes_under_way(&end, 20_000);
        // Until this end has nothing to do with it any more.
        std::thread::sleep(Duration::from_millis(2500));
        lo("up");
        peer.set_read_timeout(Some(LIMIT)).unwrap();
        let mut all = Vec::new();
        (&peer).read_to_end(&mut all).unwrap();
        assert!(all.len() > 20_000, "{}", all.len());
    });
    apart.join().unwrap();
}

#[test]
fn every_look_at_the_process_is_answered() {
    use std::os::linux::net::SocketAddrExt as _;
    use std::os::unix::net::{SocketAddr, UnixStream};
    let _end = End::new(64);
    let name = format!("uwarp-stat-{}-{}-0", rustix::process::getuid().as_raw(), std::process::id());
    let at = SocketAddr::from_abstract_name(name).unwrap();
    let lookers: Vec<_> = (0..3)
        .map(|_| {
            let at = at.clone();
            std::thread::spawn(move || {
                let mut answers = 0;
                for _ in 0..200 {
                    let mut socket = UnixStream::connect_addr(&at).unwrap();
                    socket.set_read_timeout(Some(LIMIT)).unwrap();
                    let mut text = String::new();
                    socket.read_to_string(&mut text).unwrap();
                    answers += usize::from(text.starts_with("{\"pid\""));
                }
                answers
            })
        })
        .collect();
    for looker in lookers {
        assert_eq!(looker.join().unwrap(), 200);
    }
}
