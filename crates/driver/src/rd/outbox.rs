//! Packets that wait for the socket.

use std::collections::VecDeque;

use uwarp_llp::udp;

/// Packets are made when fewer than this wait for the socket.
const MOST_WAITING: usize = udp::RUN;

/// Packets of one length to one peer, one behind the other.
struct Waiting {
    route: udp::Route,
    len: usize,
    count: usize,
}

/// Packets that wait for the socket, one behind the other.
#[derive(Default)]
pub(super) struct Outbox {
    /// Whoever adds packets writes them here first.
    pub bytes: Vec<u8>,
    /// Bytes of `bytes` that were sent.
    taken: usize,
    waiting: VecDeque<Waiting>,
    /// How many there are.
    packets: usize,
    /// Packets that the socket took.
    pub sent: usize,
    /// The socket has no room, and the port knows.
    pub is_blocked: bool,
}

impl Outbox {
    pub fn is_empty(&self) -> bool {
        self.packets == 0
    }

    /// The last bytes, from `start` on, are a packet.
    pub fn add(&mut self, route: udp::Route, start: usize) {
        let len = self.bytes.len() - start;
        self.packets += 1;
        match self.waiting.back_mut() {
            Some(last) if last.len == len && last.route == route => last.count += 1,
            _ => self.waiting.push_back(Waiting { route, len, count: 1 }),
        }
    }

    /// How many packets there is room for beside those that wait, and how many bytes: what one call sends
    /// goes out before the next packets are made.
    pub fn room(&self) -> (usize, usize) {
        let waits = self.bytes.len() - self.taken;
        (MOST_WAITING.saturating_sub(self.packets), udp::MOST_JOINED.saturating_sub(waits))
    }

    /// Whether there is room for another packet, as long as the first of those that wait.
    pub fn wants_more(&self) -> bool {
        let (packets, bytes) = self.room();
        packets > 0 && self.waiting.front().map_or(0, |first| first.len) <= bytes
    }

    /// Where the first packets go, their bytes and the length of each: as many as one call of the system
    /// sends. The last may be shorter.
    pub fn first(&self) -> Option<(&udp::Route, &[u8], usize)> {
        let first = self.waiting.front()?;
        let most = (udp::MOST_JOINED / first.len.max(1)).clamp(1, udp::RUN);
        let count = first.count.min(most);
        let mut bytes = count * first.len;
        if let Some(next) = self.waiting.get(1).filter(|_| count == first.count && count < most)
            && next.len < first.len
            && next.route == first.route
            && bytes + next.len <= udp::MOST_JOINED
        {
            bytes += next.len;
        }
        Some((&first.route, self.bytes.get(self.taken..self.taken + bytes)?, first.len))
    }

    /// The socket took the first `count` packets.
    pub fn took(&mut self, count: usize) {
        let mut left = count;
        while left > 0
            && let Some(first) = self.waiting.front_mut()
        {
            let some = left.min(first.count);
            first.count -= some;
            self.taken += some * first.len;
            self.packets -= some;
            self.sent += some;
            left -= some;
            if first.count == 0 {
                self.waiting.pop_front();
            }
        }
        if self.is_empty() {
            self.bytes.clear();
            self.taken = 0;
        } else if self.taken > self.bytes.len() / 2 {
            self.bytes.drain(..self.taken);
            self.taken = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};

    use super::*;

    fn route(port: u16) -> udp::Route {
        udp::Route { to: SocketAddr::from((Ipv4Addr::LOCALHOST, port)), from: None }
    }

    fn add(outbox: &mut Outbox, port: u16, len: usize, byte: u8) {
        let start = outbox.bytes.len();
        outbox.bytes.resize(start + len, byte);
        outbox.add(route(port), start);
    }

    /// Takes what one call would send: the port, the bytes of each packet, and their first bytes.
    fn take(outbox: &mut Outbox) -> (u16, usize, Vec<u8>) {
        let (route, bytes, len) = outbox.first().unwrap();
        let packets: Vec<u8> = bytes.chunks(len).map(|packet| packet[0]).collect();
        let taken = (route.to.port(), bytes.len(), packets);
        outbox.took(taken.2.len());
        taken
    }

    #[test]
    fn packets_of_one_length_go_together_and_a_shorter_one_ends_them() {
        let mut outbox = Outbox::default();
        assert_eq!((outbox.room(), outbox.wants_more()), ((MOST_WAITING, udp::MOST_JOINED), true));
        for (port, len, byte) in [(1, 9, 1), (1, 9, 2), (1, 5, 3), (1, 9, 4), (2, 9, 5), (2, 10, 6)] {
            add(&mut outbox, port, len, byte);
        }
        assert_eq!(outbox.room(), (MOST_WAITING - 6, udp::MOST_JOINED - 51));
        assert_eq!(take(&mut outbox), (1, 23, vec![1, 2, 3]));
        assert_eq!(take(&mut outbox), (1, 9, vec![4]));
        assert_eq!(take(&mut outbox), (2, 9, vec![5]));
        assert_eq!((outbox.sent, outbox.is_empty()), (5, false));
        assert_eq!(take(&mut outbox), (2, 10, vec![6]));
        assert_eq!((outbox.first().is_none(), outbox.is_empty(), outbox.bytes.len()), (true, true, 0));
    }

    #[test]
    fn the_system_takes_so_many_bytes_at_a_time() {
        let mut outbox = Outbox::default();
        (0..10).for_each(|byte| add(&mut outbox, 1, 9000, byte));
        assert_eq!((outbox.room(), outbox.wants_more()), ((MOST_WAITING - 10, 0), false));
        assert_eq!(take(&mut outbox), (1, 63_000, (0..7).collect()));
        outbox.took(1);
        assert_eq!(
            outbox.first().map(|(_, bytes, len)| (bytes[0], bytes.len(), len)),
            Some((8, 18_000, 9000))
        );
        (10..70).for_each(|byte| add(&mut outbox, 1, 100, byte));
        assert_eq!(take(&mut outbox), (1, 18_100, vec![8, 9, 10]));
        assert_eq!(take(&mut outbox), (1, 4400, (11..55).collect()));
    }
}
