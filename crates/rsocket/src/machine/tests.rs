use super::*;

const SIZES: Sizes = Sizes { sends: 16, receives: 16, send_buffer: 8192, receive_buffer: 8192, mappings: 2 };
const OWN: Own = Own {
    table: Target { addr: 0x1000, key: 7, length: 0 },
    buffer: Target { addr: 0x10_0000, key: 8, length: 0 },
};

/// An end, with its memory.
struct Side {
    machine: Machine,
    table: [Target; 2],
    ring: Vec<u8>,
    staged: Vec<u8>,
    /// What was posted and has not completed.
    posted: Vec<Posted>,
}

impl Side {
    fn new(carrier: Carrier) -> Self {
        let peer = Machine::conn_data(SIZES, OWN);
        Self {
            machine: Machine::new(carrier, SIZES, OWN, &peer),
            table: [Target::default(); 2],
            ring: vec![0; SIZES.receive_buffer as usize],
            staged: vec![0; SIZES.send_buffer as usize],
            posted: Vec::new(),
        }
    }

    fn looks(&mut self) {
        while let Some(entry) = self.machine.next_target() {
            let entry = &mut self.table[entry as usize];
            if !self.machine.target(*entry) {
                break;
            }
            entry.length = 0;
        }
    }

    /// Posts what is due, into the peer.
    fn controls(&mut self, peer: &mut Self) {
        while let Some(control) = self.machine.poll_control() {
            let message = match control {
                Control::Message(message) => message,
                Control::Target { to, key, bytes, message } => {
                    assert_eq!(key, OWN.table.key);
                    let entry = usize::try_from((to - OWN.table.addr) / 16).unwrap();
                    assert_eq!(peer.table[entry].length, 0, "an entry that is in use");
                    peer.table[entry] = Target::parse(&bytes, Order::OURS);
                    if self.machine.carrier() == Carrier::Send {
                        self.posted.push(Posted::Control);
                    }
                    message
                }
            };
            self.posted.push(Posted::Control);
            peer.machine.message(message).unwrap();
            peer.looks();
        }
    }

    fn send(&mut self, peer: &mut Self, bytes: &[u8]) -> usize {
        let Some(write) = self.machine.send(bytes.len() as u32) else { return 0 };
        assert_eq!(write.key, OWN.buffer.key);
        let at = usize::try_from(write.to - OWN.buffer.addr).unwrap();
        for (i, byte) in bytes[..write.len as usize].iter().enumerate() {
            let staged = (write.from as usize + i) % self.staged.len();
            self.staged[staged] = *byte;
            peer.ring[at + i] = self.staged[staged];
        }
        self.posted.push(Posted::Data(write.len));
        if self.machine.carrier() == Carrier::Send {
            self.posted.push(Posted::Tail);
        }
        peer.machine.message(write.message.unwrap()).unwrap();
        write.len as usize
    }

    fn read(&mut self, len: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        while (bytes.len() as u32) < len {
            let (at, piece) = self.machine.next(bytes.len() as u32);
            let piece = piece.min(len - bytes.len() as u32);
            if piece == 0 {
                break;
            }
            bytes.extend_from_slice(&self.ring[at as usize..(at + piece) as usize]);
        }
        self.machine.take(bytes.len() as u32);
        bytes
    }

    fn complete(&mut self) {
        for posted in self.posted.drain(..) {
            self.machine.completed(posted);
        }
    }
}

fn pattern(at: usize) -> u8 {
    (at * 7 + at / 251) as u8
}

/// Both rings wrap many times, with pieces of every size, with both carriers.
#[test]
fn bytes_arrive_in_order_and_whole() {
    for carrier in [Carrier::Immediate, Carrier::Send] {
        let (mut a, mut b) = (Side::new(carrier), Side::new(carrier));
        a.controls(&mut b);
        b.controls(&mut a);
        let (mut sent, mut read, mut seed) = (0, 0, 1usize);
        while read < 300_000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let piece = 1 + (seed >> 33) % 3000;
            match (seed >> 20) % 4 {
                0 | 1 => {
                    let bytes: Vec<_> = (sent..sent + piece).map(pattern).collect();
                    sent += a.send(&mut b, &bytes);
                }
                2 => {
                    let bytes = b.read(piece as u32);
                    assert!(bytes.iter().enumerate().all(|(i, byte)| *byte == pattern(read + i)));
                    read += bytes.len();
                    b.controls(&mut a);
                }
                _ => {
                    a.complete();
                    b.complete();
                }
            }
        }
        assert_eq!(b.machine.unread() as usize, sent - read);
    }
}

#[test]
fn a_sender_stops_at_the_peers_ring_and_credits() {
    let (mut a, mut b) = (Side::new(Carrier::Immediate), Side::new(Carrier::Immediate));
    b.controls(&mut a);
    // Two halves of the ring; room in the send buffer comes back with completions.
    let mut sent = 0;
    loop {
        a.complete();
        match a.send(&mut b, &[1; 3000]) {
            0 => break,
            n => sent += n,
        }
    }
    assert_eq!(sent, 8192);
    // A byte each: 16 receives.
    let (mut a, mut b) = (Side::new(Carrier::Immediate), Side::new(Carrier::Immediate));
    let sent: usize = (0..40).map(|_| (a.complete(), a.send(&mut b, &[1])).1).sum();
    assert_eq!(sent, 16);
    // Half of them read: credits for as many.
    assert_eq!(b.read(8).len(), 8);
    b.controls(&mut a);
    let sent: usize = (0..40).map(|_| (a.complete(), a.send(&mut b, &[1])).1).sum();
    assert_eq!(sent, 8);
    // Toward a stranger some receives are kept for control messages.
    let (mut a, mut b) = (Side::new(Carrier::Send), Side::new(Carrier::Send));
    let sent: usize = (0..40).map(|_| (a.complete(), a.send(&mut b, &[1])).1).sum();
    assert_eq!(sent, 8);
}

#[test]
fn work_requests_and_the_send_buffer_limit_what_is_posted() {
    let (mut a, mut b) = (Side::new(Carrier::Send), Side::new(Carrier::Send));
    assert_eq!((0..40).map(|_| a.send(&mut b, &[1])).sum::<usize>(), 6, "(16 - 4) / 2");
    assert!(!a.machine.all_sent());
    a.complete();
    assert!(a.machine.all_sent());
    let (mut a, mut b) = (Side::new(Carrier::Immediate), Side::new(Carrier::Immediate));
    b.controls(&mut a);
    assert_eq!(a.send(&mut b, &[1; 8192]), 4096, "to the end of the first half");
    assert_eq!(a.send(&mut b, &[1; 8192]), 4096);
    assert_eq!(a.machine.room(), 0);
}

/// Only while there is room for much more: a sender that has to wait for completions asks for them.
#[test]
fn completions_are_asked_for_when_half_of_the_room_is_used() {
    let mut side = Side::new(Carrier::Immediate);
    let relaxed = |side: &mut Side, len| side.machine.send(len).unwrap().relaxed;
    let slots = u32::from(SIZES.sends) - CONTROLS;
    let of_slots: Vec<_> = (0..slots).map(|_| relaxed(&mut side, 1)).collect();
    assert_eq!(of_slots.iter().position(|relaxed| !relaxed), Some(slots as usize / 2 - 1));
    assert!(of_slots[slots as usize / 2..].iter().all(|relaxed| !relaxed));
    let mut side = Side::new(Carrier::Immediate);
    assert!(relaxed(&mut side, SIZES.send_buffer / 4));
    assert!(!relaxed(&mut side, SIZES.send_buffer / 4));
}

#[test]
fn a_peer_that_writes_too_much_is_found_out() {
    let mut b = Side::new(Carrier::Immediate);
    assert_eq!(b.machine.message(Message::Data(4097)), Err(Violation::TooManyBytes));
    let mut b = Side::new(Carrier::Immediate);
    let flood = (0..100).find_map(|_| b.machine.message(Message::Data(1)).err());
    assert_eq!(flood, Some(Violation::TooManyMessages));
}

#[test]
fn one_direction_after_the_other_is_shut() {
    let (mut a, mut b) = (Side::new(Carrier::Immediate), Side::new(Carrier::Immediate));
    a.controls(&mut b);
    b.controls(&mut a);
    a.send(&mut b, b"last");
    a.machine.shut_writing();
    a.controls(&mut b);
    assert_eq!((a.machine.room(), b.machine.readable(), b.machine.writable()), (0, false, true));
    assert_eq!(b.read(9), b"last");
    b.send(&mut a, b"answer");
    b.machine.shut_writing();
    b.controls(&mut a);
    assert_eq!((a.machine.ended(), a.read(9)), (Some(End::Disconnected), b"answer".to_vec()));
    assert_eq!(b.machine.ended(), None, "the connection's end follows");
    // Nothing more is said to a peer that has gone.
    a.machine.shut();
    assert_eq!(a.machine.poll_control(), None);
}

/// Each shuts down before it has looked at what the peer said. Neither heard of the other's end.
#[test]
fn both_directions_are_shut_at_once() {
    for carrier in [Carrier::Immediate, Carrier::Send] {
        let (mut a, mut b) = (Side::new(carrier), Side::new(carrier));
        assert_eq!(b.send(&mut a, b"last words"), 10);
        a.machine.shut_writing();
        b.machine.shut_writing();
        a.controls(&mut b);
        assert_eq!((b.machine.readable(), b.machine.ended()), (false, None));
        b.controls(&mut a);
        assert_eq!((a.machine.readable(), a.machine.ended()), (false, Some(End::Disconnected)));
        assert_eq!(b.machine.ended(), Some(End::Done));
        // What b has sent is still on its way, as far as it knows.
        assert!(!b.machine.gone() && !b.machine.all_sent());
        b.complete();
        assert!(b.machine.all_sent());
        assert_eq!(a.read(10), b"last words");
    }
}

/// A peer with siw's largest receive queue gives 0x8000 credits.
#[test]
fn a_peer_may_give_many_credits() {
    let peer = ConnData { credits: 0x8000, ..Machine::conn_data(SIZES, OWN) };
    let mut machine = Machine::new(Carrier::Immediate, SIZES, OWN, &peer);
    assert!(machine.room() > 0);
    machine.message(Message::Credits(0x8001)).unwrap();
    assert_eq!(machine.room(), 0);
}

#[test]
fn a_farewell_waits_for_room() {
    let (mut a, mut b) = (Side::new(Carrier::Send), Side::new(Carrier::Send));
    // All four control messages: two writes of targets with their messages.
    a.controls(&mut b);
    b.send(&mut a, &[0; 4096]);
    a.read(4096);
    a.controls(&mut b);
    a.machine.shut();
    assert_eq!(a.machine.poll_control(), None);
    a.complete();
    assert_eq!(a.machine.poll_control(), Some(Control::Message(Message::Disconnect)));
}

#[test]
fn mappings_are_written_behind_the_table_of_targets() {
    let mut a = Side::new(Carrier::Immediate);
    let write = a.machine.map(1).unwrap();
    assert_eq!((write.to, write.key, write.len), (0x1000 + 2 * 16 + 24, 7, 24));
    assert_eq!(write.message, Some(Message::Mapped(1)));
    assert_eq!(a.machine.map(2), None);
}

/// Whatever a peer says, positions stay in the ring and nothing panics.
#[test]
fn any_sequence_of_messages_is_survived() {
    let mut seed = 7u64;
    let mut next = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (seed >> 32) as u32
    };
    for _ in 0..2000 {
        let peer = ConnData {
            order: Order::Big,
            maps: true,
            credits: next() as u16,
            mappings: next() as u16,
            table: Target { addr: u64::MAX, key: 0, length: next() % 3 },
            buffer: Target { addr: u64::MAX - 5, key: 0, length: next() },
        };
        let mut machine = Machine::new(Carrier::Send, SIZES, OWN, &peer);
        for _ in 0..60 {
            let _ = machine.message(Message::from_bits(next() & (0xE000_0FFF | next())));
            machine.target(Target { addr: 1, key: 2, length: next() });
            if let Some(write) = machine.send(next()) {
                assert!(write.from < SIZES.send_buffer && write.len <= SIZES.send_buffer);
                machine.completed(Posted::Data(write.len));
                machine.completed(Posted::Tail);
            }
            if machine.poll_control().is_some() && next() % 2 == 0 {
                machine.completed(Posted::Control);
            }
            machine.take(next() % 5000);
            let (at, len) = machine.next(0);
            assert!(at + len <= SIZES.receive_buffer);
        }
    }
}
