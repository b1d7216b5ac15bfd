//! Lossy packet links for any number of hosts: datagrams between addresses, in virtual time.
//!
//! ```text
//!   send ─▶ MTU ─▶ loss ─▶ queue, rate ─▶ copies ─▶ delay, spikes, reordering ─▶ corruption ─▶ receive
//! ```
//!
//! Each direction between two hosts is a link of its own, so a partition may be one-way. A seed repeats
//! everything.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use crate::{Rng, Time};

/// One direction between two hosts. All frequencies are in thousandths.
#[derive(Debug, Clone, Copy)]
pub struct LinkParams {
    /// Bytes in a second; 0: without limit.
    pub rate: u64,
    /// Bytes that wait for the rate at most; more are lost.
    pub queue: u64,
    /// Shortest and longest delay.
    pub delay: (Time, Time),
    /// How often the delay is longer by up to `spike`, and later datagrams do not overtake.
    pub spikes: u32,
    /// The longest spike.
    pub spike: Time,
    /// Lost datagrams.
    pub loss: u32,
    /// Datagrams that others overtake: they take up to `reordering_by` longer.
    pub reordering: u32,
    /// How much longer at most.
    pub reordering_by: Time,
    /// Datagrams of which a copy arrives too, some time later.
    pub duplication: u32,
    /// How much later at most.
    pub duplication_by: Time,
    /// Datagrams of which one bit is flipped.
    pub corruption: u32,
    /// Bytes of the longest datagram that passes.
    pub mtu: usize,
}

impl Default for LinkParams {
    /// A good link in one room.
    fn default() -> Self {
        Self {
            rate: 0,
            queue: 0,
            delay: (10_000, 12_000),
            spikes: 0,
            spike: 0,
            loss: 0,
            reordering: 0,
            reordering_by: 0,
            duplication: 0,
            duplication_by: 0,
            corruption: 0,
            mtu: 65_507,
        }
    }
}

/// A datagram on its way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Datagram {
    /// The address that it says it comes from.
    pub from: SocketAddr,
    /// Where it goes.
    pub to: SocketAddr,
    /// UDP payload.
    pub bytes: Vec<u8>,
}

/// What became of datagrams.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(missing_docs)]
pub struct Tally {
    pub sent: u64,
    pub lost: u64,
    pub copies: u64,
    pub corrupted: u64,
    pub too_long: u64,
    pub blocked: u64,
}

#[derive(Debug, Default)]
struct Link {
    params: Option<LinkParams>,
    blocked: bool,
    /// Until when the rate is used up.
    busy_until: Time,
    /// Nothing that is not reordered arrives before this.
    last_arrival: Time,
}

/// The network.
#[derive(Debug)]
pub struct Links {
    rng: Rng,
    params: LinkParams,
    links: BTreeMap<(IpAddr, IpAddr), Link>,
    flying: BTreeMap<(Time, u64), Datagram>,
    order: u64,
    tally: Tally,
}

impl Links {
    /// All links are alike at first.
    pub fn new(rng: Rng, params: LinkParams) -> Self {
        let (links, flying) = (BTreeMap::new(), BTreeMap::new());
        Self { rng, params, links, flying, order: 0, tally: Tally::default() }
    }

    /// All links are like this from now on; what is on its way is not affected.
    pub fn set_all(&mut self, params: LinkParams) {
        self.params = params;
        self.links.values_mut().for_each(|link| link.params = None);
    }

    /// One direction is like this from now on.
    pub fn set(&mut self, from: IpAddr, to: IpAddr, params: LinkParams) {
        self.links.entry((from, to)).or_default().params = Some(params);
    }

    /// Nothing passes in this direction, or it does again.
    pub fn block(&mut self, from: IpAddr, to: IpAddr, blocked: bool) {
        self.links.entry((from, to)).or_default().blocked = blocked;
    }

    /// Everything passes again.
    pub fn unblock_all(&mut self) {
        self.links.values_mut().for_each(|link| link.blocked = false);
    }

    /// What became of all datagrams so far.
    pub fn tally(&self) -> Tally {
        self.tally
    }

    /// A host sends. `via` is where it really is: its address may be forged.
    pub fn send(&mut self, now: Time, via: IpAddr, mut datagram: Datagram) {
        self.tally.sent += 1;
        let link = self.links.entry((via, datagram.to.ip())).or_default();
        let params = link.params.unwrap_or(self.params);
        if link.blocked {
            self.tally.blocked += 1;
            return;
        }
        if datagram.bytes.len() > params.mtu {
            self.tally.too_long += 1;
            return;
        }
        if self.rng.chance(params.loss) {
            self.tally.lost += 1;
            return;
        }
        let mut leaves = now;
        if params.rate > 0 {
            let waiting = link.busy_until.saturating_sub(now);
            let queued = u128::from(waiting) * u128::from(params.rate) / 1_000_000_000;
            if queued > u128::from(params.queue) {
                self.tally.lost += 1;
                return;
            }
            let takes = datagram.bytes.len() as u64 * 1_000_000_000 / params.rate;
            leaves = link.busy_until.max(now) + takes;
            link.busy_until = leaves;
        }
        let (shortest, longest) = params.delay;
        let mut arrives = leaves + shortest + self.rng.below(longest.saturating_sub(shortest) + 1);
        if self.rng.chance(params.spikes) {
            arrives += self.rng.below(params.spike + 1);
        }
        if self.rng.chance(params.reordering) {
            arrives += self.rng.below(params.reordering_by + 1);
        } else {
            arrives = arrives.max(link.last_arrival);
            link.last_arrival = arrives;
        }
        if self.rng.chance(params.duplication) {
            self.tally.copies += 1;
            let later = arrives + self.rng.below(params.duplication_by + 1);
            self.fly(later, datagram.clone());
        }
        if self.rng.chance(params.corruption) && !datagram.bytes.is_empty() {
            self.tally.corrupted += 1;
            let bit = self.rng.size(0, datagram.bytes.len() * 8 - 1);
            datagram.bytes[bit / 8] ^= 1 << (bit % 8);
        }
        self.fly(arrives, datagram);
    }

    fn fly(&mut self, at: Time, datagram: Datagram) {
        self.flying.insert((at, self.order), datagram);
        self.order += 1;
    }

    /// When the next datagram arrives.
    pub fn next(&self) -> Option<Time> {
        self.flying.keys().next().map(|(at, _)| *at)
    }

    /// The next datagram that has arrived by now.
    pub fn receive(&mut self, now: Time) -> Option<Datagram> {
        let first = self.flying.first_entry().filter(|first| first.key().0 <= now)?;
        Some(first.remove())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(host: u8) -> SocketAddr {
        ([10, 0, 0, host], 20_000).into()
    }

    fn datagram(number: u32) -> Datagram {
        Datagram { from: at(1), to: at(2), bytes: number.to_be_bytes().to_vec() }
    }

    /// Numbers in the order in which they arrive, with the time of the last.
    fn run(params: LinkParams, count: u32, gap: Time) -> (Vec<Vec<u8>>, Time, Tally) {
        let mut links = Links::new(Rng::new(7), params);
        (0..count).for_each(|number| links.send(Time::from(number) * gap, at(1).ip(), datagram(number)));
        let (mut arrived, mut last) = (Vec::new(), 0);
        while let Some(now) = links.next() {
            last = now;
            arrived.extend(links.receive(now).map(|datagram| datagram.bytes));
        }
        (arrived, last, links.tally())
    }

    #[test]
    fn a_good_link_keeps_order_and_loses_nothing() {
        let params = LinkParams { delay: (0, 5_000), spikes: 100, spike: 50_000, ..LinkParams::default() };
        let (arrived, _, tally) = run(params, 1000, 100);
        let sent: Vec<_> = (0..1000u32).map(|number| number.to_be_bytes().to_vec()).collect();
        assert_eq!(arrived, sent);
        assert_eq!(tally, Tally { sent: 1000, ..Tally::default() });
    }

    #[test]
    fn faults_come_as_often_as_they_should() {
        let params = LinkParams {
            loss: 200,
            duplication: 100,
            corruption: 50,
            reordering: 300,
            reordering_by: 10_000,
            ..LinkParams::default()
        };
        let (arrived, _, tally) = run(params, 10_000, 100);
        assert!((1800..2200).contains(&tally.lost), "{tally:?}");
        assert!((700..900).contains(&tally.copies), "{tally:?}");
        assert!((300..500).contains(&tally.corrupted), "{tally:?}");
        assert_eq!(arrived.len() as u64, tally.sent - tally.lost + tally.copies);
        assert!(arrived.windows(2).any(|pair| pair[0] > pair[1]), "out of order");
        assert_eq!(run(params, 10_000, 100).0, arrived, "a seed repeats");
    }

    #[test]
    fn a_rate_delays_and_its_queue_overflows() {
        // 4 bytes each at 4 bytes in a microsecond.
        let params = LinkParams { rate: 4_000_000, queue: 40, delay: (0, 0), ..LinkParams::default() };
        let (arrived, last, _) = run(params, 100, 1000);
        assert_eq!((arrived.len(), last), (100, 100_000), "as fast as they come");
        let (arrived, last, tally) = run(params, 100, 0);
        assert_eq!((arrived.len(), last), (11, 11_000), "what the queue takes");
        assert_eq!(tally.lost, 89);
    }

    #[test]
    fn a_partition_may_be_one_way_and_an_mtu_small() {
        let mut links = Links::new(Rng::new(1), LinkParams::default());
        links.block(at(1).ip(), at(2).ip(), true);
        links.send(0, at(1).ip(), datagram(1));
        links.send(0, at(2).ip(), Datagram { from: at(2), to: at(1), bytes: vec![1] });
        assert_eq!(links.receive(20_000).map(|datagram| datagram.to), Some(at(1)));
        assert_eq!(links.next(), None);
        links.unblock_all();
        links.set(at(1).ip(), at(2).ip(), LinkParams { mtu: 3, ..LinkParams::default() });
        links.send(0, at(1).ip(), datagram(1));
        assert_eq!((links.next(), links.tally().too_long, links.tally().blocked), (None, 1, 1));
    }
}
