//! What must hold of a lane whatever is written into the memory that its ends share: no panic, nothing beyond
//! a buffer or a ring. As long as nobody spoils it, every byte arrives, in order, and a wait has a reason.
//! Shared by `tests/any_peer.rs` and the fuzz target `lane`.

use std::collections::VecDeque;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use uwarp_llp::link::Counts;
use uwarp_llp::memory::datagrams::{Inbox, Outbox, Put, Took};
use uwarp_llp::memory::lane::{End, Lane};
use uwarp_llp::memory::pair::Pair;
use uwarp_llp::memory::slab::{Carries, LONG_RING, Slab};
use uwarp_llp::{LowerLayer as _, Stop};
use uwarp_mem::shared::{LINE, Shared};
use uwarp_mem::{MemSeg, copy_in};
use uwarp_process::Descriptor;

const RING: usize = 512 * 1024;
/// Where lines and rings begin: what a peer knows of the version.
const LINES: usize = 4096;
const RINGS: usize = LINES + 2 * 64 * LINE;
const SLAB: usize = RINGS + 2 * 64 * RING;
/// Longest transfer of one call, more than a ring.
const LONGEST: usize = 600_000;

pub const STEP: usize = 11;

/// What was sent one way, and is not received yet.
#[derive(Default)]
struct Way {
    sent: u64,
    bytes: VecDeque<u8>,
    /// Bytes that the sender has surely shown.
    shown: usize,
    /// Bytes taken that the receiver has not surely shown.
    taken: usize,
    finished: bool,
}

struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    fn word(&mut self) -> usize {
        usize::from(u16::from_le_bytes([self.byte(), self.byte()]))
    }

    /// A length: short, or long.
    fn length(&mut self) -> usize {
        let (word, factor) = (self.word(), self.byte());
        if factor < 200 { word % 600 + 1 } else { (word * 10).clamp(1, LONGEST) }
    }

    /// Any word, with more of those that nearly make sense.
    fn value(&mut self, near: u64) -> u64 {
        let by = self.word() as u64;
        match self.byte() % 5 {
            0 => near.wrapping_add(by),
            1 => near.wrapping_sub(by),
            2 => by,
            3 => by << 48,
            _ => u64::MAX - by,
        }
    }
}

/// Two ends of a lane, and somebody who has the same memory. Each step is a byte and ten for its arguments.
pub fn lane(bytes: &[u8]) {
    uwarp_mem::guard::arm();
    let (made, fd) = Slab::create(Arc::new(Pair::default())).expect("memory");
    let stranger = Shared::open(std::os::fd::AsFd::as_fd(&fd), SLAB, true).expect("memory");
    let opened = Slab::open(fd, Arc::new(Pair::default())).expect("memory");
    let number = made.take_lane().expect("a lane");
    assert!(opened.claim_lane(number) && !opened.claim_lane(number));
    let (a, b) = UnixStream::pair().expect("sockets");
    let mut sockets = [a, b].into_iter();
    let mut lanes = [&made, &opened].map(|slab| {
        let socket = sockets.next().expect("a socket for each");
        Lane::new(End::new(slab.clone(), number), Descriptor::new(socket.into()))
    });
    // Bytes from end 0, bytes from end 1.
    let mut ways = [Way::default(), Way::default()];
    let mut spoiled = false;
    for step in bytes.chunks(STEP) {
        let mut input = Input(step);
        let step = input.byte();
        let (end, step) = (usize::from(step & 1), step >> 1);
        let lane = &mut lanes[end];
        match step % 12 {
            0 | 1 => send(lane, &mut ways[end], &mut input, spoiled),
            2 | 3 => receive(lane, &mut ways[1 - end], &mut input, spoiled),
            4 => scattered(lane, &mut ways[1 - end], &mut input, spoiled),
            5 => {
                let [acked, wanted] = [(); 2].map(|()| u64::from(input.byte()));
                lane.flush(Counts { acked, placed: acked + 1 }, wanted);
                ways[end].shown = ways[end].bytes.len();
                ways[1 - end].taken = 0;
            }
            6 => {
                lane.finish();
                ways[end].shown = ways[end].bytes.len();
                ways[end].finished = true;
            }
            7 => {
                // The peer's process is gone.
                let _ = rustix::net::shutdown(lane.tcp(), rustix::net::Shutdown::Both);
                lanes[1 - end].look_at_end();
                spoiled = true;
            }
            8 => {
                let line = stranger.line(LINES + (number * 2 + end) * LINE);
                let word = &line[usize::from(input.byte()) % line.len()];
                word.store(input.value(word.load(Ordering::SeqCst)), Ordering::SeqCst);
                spoiled = true;
            }
            9 => {
                let at = RINGS + (number * 2 + end) * RING + input.length() % RING;
                if input.byte() < 128 {
                    let _ = copy_in(stranger.seg(at, 3), &[input.byte(), 0, 255]);
                } else {
                    stranger.clear(at / 4096 * 4096, 16384);
                }
                spoiled = true;
            }
            10 => stranger.line(end * LINE)[0].store(input.value(1 << number), Ordering::SeqCst),
            _ => {
                let (mut reported, slab) = (0, [&made, &opened][end]);
                lane.set_name(u64::from(input.byte()) + 1);
                slab.harvest(|_| reported += 1);
                assert!(reported <= 1, "one lane has a name");
                assert!(lane.unacknowledged() <= RING);
                let _ = lane.has_news(1);
                let _ = (lane.is_ending(), lane.has_room_again(), lane.ended(), lane.peer_received());
            }
        }
    }
}

/// Whether a receive may have found nothing.
fn nothing(way: &Way, stop: Stop, spoiled: bool) {
    assert!(spoiled || way.shown == 0, "{stop:?} with {} bytes", way.shown);
    assert!(spoiled || !matches!(stop, Stop::Ended(_)) || way.finished, "nobody has ended it");
}

fn send(lane: &mut Lane, way: &mut Way, input: &mut Input<'_>, spoiled: bool) {
    if way.finished {
        return;
    }
    let first = way.sent;
    let bytes: Vec<u8> = (0..input.length() as u64).map(|i| ((first + i) % 251) as u8).collect();
    let all = MemSeg { addr: bytes.as_ptr().expose_provenance() as u64, len: bytes.len() };
    let third = bytes.len() / 3;
    let sent = if input.byte() < 128 {
        lane.send_bytes(&bytes)
    } else {
        lane.send(&[all.part(0, third), all.part(third, 0), all.part(third, bytes.len())], 0)
    };
    match sent {
        Ok(n) => {
            assert!(n >= 1 && n <= bytes.len());
            way.sent += n as u64;
            if !spoiled {
                way.bytes.extend(&bytes[..n]);
            }
        }
        Err(stop) => {
            let free = RING.saturating_sub(way.bytes.len() + way.taken);
            assert!(spoiled || (stop == Stop::Later && free == 0), "{stop:?} with room for {free}");
        }
    }
}

fn arrived(way: &mut Way, bytes: &[u8], spoiled: bool) {
    if spoiled {
        return;
    }
    assert!(bytes.len() <= way.bytes.len(), "bytes that nobody has sent");
    for byte in bytes {
        assert_eq!(way.bytes.pop_front(), Some(*byte), "another byte");
    }
    way.taken += bytes.len();
    way.shown = way.shown.saturating_sub(bytes.len());
}

fn receive(lane: &mut Lane, way: &mut Way, input: &mut Input<'_>, spoiled: bool) {
    let mut buffer = vec![0; input.length()];
    match lane.receive(&mut buffer) {
        Ok(received) => {
            assert!(received.bytes >= 1 && received.bytes <= buffer.len());
            arrived(way, &buffer[..received.bytes], spoiled);
        }
        Err(stop) => nothing(way, stop, spoiled),
    }
}

/// Into two pieces with a byte between, and a buffer for the rest.
fn scattered(lane: &mut Lane, way: &mut Way, input: &mut Input<'_>, spoiled: bool) {
    let (first, second) = (input.length(), input.length());
    let (mut placed, mut rest) = (vec![0xEE_u8; first + second + 2], vec![0; input.length()]);
    let all = MemSeg { addr: placed.as_mut_ptr().expose_provenance() as u64, len: placed.len() };
    let pieces = [all.part(0, first), all.part(first + 1, second)];
    let received = lane.receive_scattered(&pieces, &mut rest);
    assert_eq!((placed[first], placed[first + second + 1]), (0xEE, 0xEE), "a byte beside a piece");
    match received {
        Ok(received) => {
            let got = received.bytes;
            assert!(got >= 1 && got <= first + second + rest.len());
            arrived(way, &placed[..got.min(first)], spoiled);
            arrived(way, &placed[first + 1..][..got.saturating_sub(first).min(second)], spoiled);
            arrived(way, &rest[..got.saturating_sub(first + second)], spoiled);
        }
        Err(stop) => nothing(way, stop, spoiled),
    }
}

/// The same of a lane with datagrams.
pub fn datagrams(bytes: &[u8]) {
    uwarp_mem::guard::arm();
    let ring = LONG_RING as usize;
    let (made, fd) = Slab::create_for(Carries::Datagrams, Arc::new(Pair::default())).expect("memory");
    let stranger = Shared::open(std::os::fd::AsFd::as_fd(&fd), SLAB, true).expect("memory");
    let opened = Slab::open_for(Carries::Datagrams, fd, Arc::new(Pair::default())).expect("memory");
    let number = made.take_lane().expect("a lane");
    assert!(opened.claim_lane(number));
    let mut ends = [&made, &opened].map(|slab| End::new(slab.clone(), number).into_datagrams());
    let mut ways: [Datagrams; 2] = [(); 2].map(|()| Datagrams::default());
    let mut spoiled = false;
    for step in bytes.chunks(STEP) {
        let mut input = Input(step);
        let step = input.byte();
        let (end, step) = (usize::from(step & 1), step >> 1);
        let (outbox, inbox) = &mut ends[end];
        match step % 9 {
            0 | 1 => put(outbox, &mut ways[end], &mut input, spoiled),
            2 => {
                outbox.show();
                ways[end].shown = ways[end].sent.len();
            }
            3 | 4 => take(inbox, &mut ways[1 - end], spoiled),
            5 => {
                inbox.release();
                ways[1 - end].unreleased = 0;
            }
            6 => {
                let lost = inbox.newly_lost();
                let way = &mut ways[1 - end];
                assert!(spoiled || lost == std::mem::take(&mut way.lost));
                assert!(spoiled || inbox.has_news() == (way.shown > 0) || way.empty > 0);
            }
            7 => {
                let line = stranger.line(LINES + (number * 2 + end) * LINE);
                let word = &line[usize::from(input.byte()) % line.len()];
                word.store(input.value(word.load(Ordering::SeqCst)), Ordering::SeqCst);
                spoiled = true;
            }
            _ => {
                let at = RINGS + (number * 2 + end) * ring + input.length() % ring;
                if input.byte() < 200 {
                    let _ = copy_in(stranger.seg(at / 8 * 8, 8), &[input.byte(), input.byte(), 0]);
                } else {
                    stranger.clear(at / 4096 * 4096, 16384);
                }
                spoiled = true;
            }
        }
    }
}

/// Datagrams one way.
#[derive(Default)]
struct Datagrams {
    sent: VecDeque<Vec<u8>>,
    shown: usize,
    /// Bytes of the ring that were read, and not released.
    unreleased: u64,
    lost: u64,
    empty: usize,
}

fn record(len: usize) -> u64 {
    8 + (len as u64).next_multiple_of(8)
}

fn put(outbox: &mut Outbox, way: &mut Datagrams, input: &mut Input<'_>, spoiled: bool) {
    let (first, len) = (input.byte(), input.length() % 65_508);
    let bytes: Vec<u8> = (0..len).map(|i| first.wrapping_add(i as u8)).collect();
    let put = outbox.put(&bytes);
    if spoiled {
        return;
    }
    let used = way.unreleased + way.sent.iter().map(|bytes| record(bytes.len())).sum::<u64>();
    // Empty records are not followed here: their room is free later than it seems.
    match put {
        Put::Taken => assert!(used + record(len) <= LONG_RING, "there is no room"),
        Put::Full => {
            assert!(used + record(len) + 8 * way.empty as u64 > LONG_RING, "there is room");
            if first < 128 {
                outbox.wants_room();
            } else {
                outbox.lose();
                way.lost += 1;
            }
            return;
        }
        Put::Over => panic!("nobody has ended it"),
    }
    if bytes.is_empty() {
        way.empty += 1;
    } else {
        way.sent.push_back(bytes);
    }
}

fn take(inbox: &mut Inbox, way: &mut Datagrams, spoiled: bool) {
    let mut stage = vec![0; 65_536];
    let took = inbox.take(&mut stage);
    if spoiled {
        return;
    }
    match took {
        Took::Datagram(len) => {
            assert!(way.shown > 0, "a datagram that was not shown");
            way.shown -= 1;
            let sent = way.sent.pop_front().expect("a datagram that nobody has sent");
            assert!(sent == stage[..len], "another datagram");
            way.unreleased += record(len);
        }
        Took::Nothing => assert_eq!(way.shown, 0, "a datagram is missing"),
        Took::Over => panic!("nobody has ended it"),
    }
}
