//! A peer that says anything, between calls of the program, to the machine of one stream.

use uwarp_rsocket::machine::{Carrier, Control, Machine, Own, Posted, Sizes};
use uwarp_rsocket::wire::{Announcement, ConnData, DatagramHeader, Mapping, Message, Order, Target};

const SIZES: Sizes =
    Sizes { sends: 20, receives: 16, send_buffer: 6000 & !63, receive_buffer: 8192, mappings: 3 };
const OWN: Own = Own {
    table: Target { addr: 0x1000, key: 7, length: 0 },
    buffer: Target { addr: 0x10_0000, key: 8, length: 0 },
};

struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn number(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        std::array::from_fn(|_| self.byte().unwrap_or_default())
    }
}

/// What is on its way, and what was granted.
struct World {
    machine: Machine,
    posted: Vec<Posted>,
    granted: u64,
    received: u64,
}

impl World {
    fn post(&mut self, posted: Posted, with_message: bool) {
        self.posted.push(posted);
        if with_message && self.machine.carrier() == Carrier::Send {
            self.posted.push(match posted {
                Posted::Data(_) => Posted::Tail,
                other => other,
            });
        }
    }

    fn control(&mut self) {
        match self.machine.poll_control() {
            None => {}
            Some(Control::Message(_)) => self.post(Posted::Control, false),
            Some(Control::Target { bytes, .. }) => {
                let target = Target::parse(&bytes, self.machine.peer_order());
                let from = target.addr - OWN.buffer.addr;
                assert!(from + u64::from(target.length) <= u64::from(SIZES.receive_buffer));
                assert_eq!(target.key, OWN.buffer.key);
                self.granted += u64::from(target.length);
                self.post(Posted::Control, true);
            }
        }
    }

    fn message(&mut self, message: Message) {
        if self.machine.message(message).is_ok()
            && let Message::Data(len) = message
        {
            self.received += u64::from(len);
        }
    }

    fn check(&self) {
        let on_the_way = |kind: fn(&Posted) -> bool| self.posted.iter().filter(|p| kind(p)).count();
        let bytes: u64 =
            self.posted.iter().map(|p| if let Posted::Data(n) = p { u64::from(*n) } else { 0 }).sum();
        assert!(bytes <= u64::from(SIZES.send_buffer));
        assert!(on_the_way(|_| true) <= usize::from(SIZES.sends), "more than the queue holds");
        assert!(on_the_way(|p| *p == Posted::Control) <= 4);
        assert!(self.received <= self.granted, "more than was granted");
        let (at, len) = self.machine.next(0);
        assert!(at + len <= SIZES.receive_buffer && len <= self.machine.unread());
        assert!(self.machine.unread() <= SIZES.receive_buffer);
    }
}

/// Any bytes: private data first, then what peer and program do.
pub fn check(bytes: &[u8]) {
    let _ =
        (DatagramHeader::parse(bytes), Announcement::parse(bytes, true), Announcement::parse(bytes, false));
    let mut input = Input(bytes);
    let carrier = if input.byte().unwrap_or_default() & 1 == 0 { Carrier::Send } else { Carrier::Immediate };
    let mut data: [u8; ConnData::LEN] = input.array();
    data[0] = 1;
    let Some(peer) = ConnData::parse(&data) else { unreachable!("the version and the length are right") };
    let machine = Machine::new(carrier, SIZES, OWN, &peer);
    let half = u64::from(SIZES.receive_buffer / 2);
    let mut world = World { machine, posted: Vec::new(), granted: half, received: 0 };
    while let Some(what) = input.byte() {
        match what % 12 {
            0 | 1 => world.message(Message::Data(input.number() % 5000)),
            2 => world.message(Message::from_bits(input.number())),
            3 => {
                let target = Target::parse(&input.array(), Order::OURS);
                world.machine.target(target);
            }
            4 => {
                if let Some(write) = world.machine.send(input.number() % 7000) {
                    assert!(write.from < SIZES.send_buffer && write.len > 0);
                    world.post(Posted::Data(write.len), true);
                }
            }
            5 | 6 => {
                if let Some(posted) = world.posted.pop() {
                    world.machine.completed(posted);
                }
            }
            7 => world.machine.take(input.number() % 9000),
            8 | 9 => world.control(),
            10 => {
                let index = u16::from(input.byte().unwrap_or_default());
                if let Some(write) = world.machine.map(index) {
                    assert_eq!(write.len as usize, Mapping::LEN);
                    world.post(Posted::Data(write.len), true);
                }
            }
            _ => match input.byte().unwrap_or_default() % 8 {
                0 => world.machine.shut(),
                1 => world.machine.shut_reading(),
                2 => world.machine.shut_writing(),
                3 => {
                    if world.machine.keepalive() {
                        world.post(Posted::Control, false);
                    }
                }
                _ => {
                    if let Some(write) = world.machine.write_direct(input.number() % 7000, 1, 2) {
                        world.post(Posted::Data(write.len), false);
                    }
                }
            },
        }
        world.check();
    }
}
