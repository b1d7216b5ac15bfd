//! Golden traces of reliable datagrams: two processes, every packet on a line with its time.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use uwarp_proto::clock::Now;
use uwarp_proto::rd::{Action, Config, Outgoing, PacketBuf, Placed, QpnPair, Rd, Route, Target, Ticket};
use uwarp_wire::rd::Packet;
use uwarp_wire::rd::segment::First;

/// One way.
const DELAY: Duration = Duration::from_micros(100);

struct Process {
    rd: Rd,
    route: Route,
    /// Receives that are posted; without one, a message finds none.
    receives: usize,
    /// Nothing is posted of itself.
    is_late: bool,
}

/// Two processes, and what they say.
struct Pair {
    start: Instant,
    now: Duration,
    processes: [Process; 2],
    /// On their way, by arrival and order: to whom.
    flying: BTreeMap<(Duration, usize), (usize, Vec<u8>)>,
    sent: usize,
    /// Packets that are lost, counted from 0.
    lost: Vec<usize>,
    lines: Vec<String>,
}

impl Pair {
    fn new(lost: &[usize], receives: usize) -> Self {
        let start = Instant::now();
        let at = |host: u8| ([10, 0, 0, host], 20_000 + u16::from(host)).into();
        let process = |own: u8, other: u8| Process {
            rd: Rd::new(&Now::at(start), Config::default(), &[own; 32]),
            route: Route { local: at(own), remote: at(other) },
            receives,
            is_late: false,
        };
        Self {
            start,
            now: Duration::ZERO,
            processes: [process(1, 2), process(2, 1)],
            flying: BTreeMap::new(),
            sent: 0,
            lost: lost.to_vec(),
            lines: Vec::new(),
        }
    }

    fn at(&self) -> Now {
        Now::at(self.start + self.now)
    }

    fn post(&mut self, from: usize, len: u32, ordered: bool) -> Ticket {
        let now = self.at();
        let process = &mut self.processes[from];
        let message = Outgoing {
            pair: QpnPair { source: 0x01, destination: 0x02 },
            first: First { qkey: 7, ..First::default() },
            target: Target::Untagged { qn: 0, rsvdulp: 0x43, rsvdulp32: 0 },
            len,
            ordered,
            rnr_retry: 7,
            unrepeated: false,
        };
        let ticket = process.rd.post(&now, process.route, message).expect("there is room");
        self.pump(from);
        ticket
    }

    fn pump(&mut self, who: usize) {
        let now = self.at();
        let process = &mut self.processes[who];
        while let Some(action) = process.rd.poll_action() {
            let line = match action {
                Action::Finished { outcome, .. } => format!("{} finished: {outcome:?}", name(who)),
                Action::Deliver { message, .. } => format!("{} delivered {}", name(who), message.number),
                Action::AskLength { .. } => continue,
                Action::TakeBack { message, .. } => format!("{} took back {}", name(who), message.number),
                Action::AskPort { .. } => format!("{} asks for a port", name(who)),
            };
            self.lines.push(format!("{:>7} {line}", self.now.as_micros()));
        }
        let mut packet = PacketBuf::new();
        while process.rd.poll_transmit(&now, &mut packet).is_some() {
            let mut bytes = Vec::new();
            packet.assemble(0, &mut bytes, |payload, out| out.resize(out.len() + payload.len as usize, 0xAB));
            let text = Packet::parse(&bytes).expect("a packet").to_string();
            let text = text.replace("RD ", "").replace("20001->20002 ", "").replace("20002->20001 ", "");
            let text = text.replace(" 20001->20002", "").replace(" 20002->20001", "");
            let is_lost = self.lost.contains(&self.sent);
            let mark = if is_lost { " (lost)" } else { "" };
            self.lines.push(format!("{:>7} {} {text}{mark}", self.now.as_micros(), name(who)));
            if !is_lost {
                self.flying.insert((self.now + DELAY, self.sent), (1 - who, bytes));
            }
            self.sent += 1;
        }
    }

    /// Runs until nothing happens for a second.
    fn run(&mut self) {
        self.run_until(self.now + Duration::from_secs(1));
    }

    fn run_until(&mut self, end: Duration) {
        loop {
            let timers = self.processes.iter().filter_map(|process| process.rd.poll_timeout());
            let timers = timers.map(|at| at.saturating_duration_since(self.start));
            let next = timers.chain(self.flying.keys().map(|(at, _)| *at)).min();
            let Some(next) = next.filter(|next| *next <= end) else { break };
            self.now = self.now.max(next);
            while let Some(first) = self.flying.first_entry().filter(|first| first.key().0 <= self.now) {
                let (who, bytes) = first.remove();
                self.receive(who, &bytes);
            }
            for who in 0..2 {
                let now = self.at();
                self.processes[who].rd.handle_timeout(&now);
                self.pump(who);
            }
        }
    }

    fn receive(&mut self, who: usize, bytes: &[u8]) {
        let now = self.at();
        let process = &mut self.processes[who];
        let mut arrivals = Vec::new();
        process.rd.handle_input(&now, process.route, bytes, &mut arrivals);
        while !arrivals.is_empty() {
            let arrival = arrivals.remove(0);
            let placed = match process.receives {
                0 if process.is_late => Placed::NoReceive(0),
                0 if arrival.offset == 0 => {
                    process.receives = 1;
                    Placed::NoReceive(1)
                }
                _ => Placed::Done,
            };
            process.rd.on_placed(&now, &arrival, placed, &mut arrivals);
        }
        self.pump(who);
    }

    fn check(&self, expected: &str) {
        let got = self.lines.join("\n");
        // A long line goes on in the next one.
        let expected = expected.replace(" |\n            ", " | ");
        assert_eq!(got, expected.trim_matches('\n'), "\n{got}\n");
    }
}

fn name(who: usize) -> char {
    if who == 0 { 'A' } else { 'B' }
}

#[test]
fn first_contact_and_two_messages() {
    let mut pair = Pair::new(&[], 8);
    pair.post(0, 64, true);
    pair.run();
    pair.post(0, 3000, true);
    pair.run();
    pair.check(
        r"
      0 A Hello | Hello v1 features=0x1
    100 B Challenge | Challenge v1 features=0x1 home=20002 credit=78 largest=1472
    200 A Open pn=1 | Open v1 features=0x1 asked=20002 | Segment 0x1->0x2 msg=1 behind=0 0+64/64 first ack
    300 B delivered 1
    300 B Packet pn=1 | Ack 1 delay=0us credit=78 floor=2 packets=0+1
    400 A finished: Ok(())
    650 A Packet pn=2 | Segment 0x1->0x2 msg=2 behind=0 0+1402/3000 first
    650 A Packet pn=3 | Segment 0x1->0x2 msg=2 behind=0 1402+1406/3000
    650 A Packet pn=4 | Segment 0x1->0x2 msg=2 behind=0 2808+192/3000 ack
    750 B delivered 2
    750 B Packet pn=2 | Ack 4 delay=0us credit=78 floor=3 packets=0+4
    850 A finished: Ok(())
",
    );
}

#[test]
fn a_lost_packet_is_sent_again_after_a_round_trip() {
    let mut pair = Pair::new(&[4], 8);
    pair.post(0, 64, false);
    pair.run();
    pair.post(0, 3000, false);
    pair.run();
    pair.check(
        r"
      0 A Hello | Hello v1 features=0x1
    100 B Challenge | Challenge v1 features=0x1 home=20002 credit=78 largest=1472
    200 A Open pn=1 | Open v1 features=0x1 asked=20002 | Segment 0x1->0x2 msg=1 0+64/64 first ack
    300 B delivered 1
    300 B Packet pn=1 | Ack 1 delay=0us credit=78 floor=2 packets=0+1
    400 A finished: Ok(())
    650 A Packet pn=2 | Segment 0x1->0x2 msg=2 0+1402/3000 first (lost)
    650 A Packet pn=3 | Segment 0x1->0x2 msg=2 1402+1406/3000
    650 A Packet pn=4 | Segment 0x1->0x2 msg=2 2808+192/3000 ack
    750 B Packet pn=2 | Ack 3 delay=0us credit=78 floor=2 packets=0+1,1+1
    750 B Packet pn=3 | Ack 4 delay=0us credit=78 floor=2 packets=0+2,1+1
    875 A Packet pn=5 | Segment 0x1->0x2 msg=2 0+1402/3000 first ack
    975 B delivered 2
    975 B Packet pn=4 | Ack 5 delay=0us credit=78 floor=3 packets=0+3,1+1
   1075 A finished: Ok(())
",
    );
}

#[test]
fn a_message_without_a_receive_goes_again() {
    let mut pair = Pair::new(&[], 0);
    pair.post(0, 2000, true);
    pair.post(0, 10, true);
    pair.run();
    pair.check(
        r"
      0 A Hello | Hello v1 features=0x1
    100 B Challenge | Challenge v1 features=0x1 home=20002 credit=78 largest=1472
    200 A Open pn=1 | Open v1 features=0x1 asked=20002 | Segment 0x1->0x2 msg=1 behind=0 0+1378/2000 first
    200 A Open pn=2 | Open v1 features=0x1 asked=20002 | Segment 0x1->0x2 msg=1 behind=0 1378+622/2000 |
            Segment 0x1->0x2 msg=2 behind=1 0+10/10 first ack
    300 B Packet pn=1 | Ack 1 delay=0us credit=78 floor=1 packets=0+1 |
            Verdict msg=1 ReceiverNotReady timer=1 pn=…1
    300 B Packet pn=2 | Ack 2 delay=0us credit=78 floor=1 packets=0+2 |
            Verdict msg=1 ReceiverNotReady timer=1 pn=…1
    410 A Packet pn=3 | Ack 2 delay=8us credit=78 floor=1 packets=0+2 |
            Segment 0x1->0x2 msg=1 behind=0 0+1378/2000 first ack
    510 B delivered 1
    510 B delivered 2
    510 B Packet pn=3 | Ack 3 delay=0us credit=78 floor=3 packets=0+3
    610 A finished: Ok(())
    610 A finished: Ok(())
",
    );
}

/// A packet that needs no repair was lost, and the exchange counted as owed for ever: it ended after the
/// patience, and messages of the peer that came later failed.
#[test]
fn a_lost_ping_does_not_end_an_exchange() {
    let mut pair = Pair::new(&[5, 7, 8], 8);
    pair.post(0, 64, false);
    pair.run();
    pair.lines.clear();
    pair.post(0, 65, false);
    pair.run_until(Duration::from_micros(2110));
    pair.now = Duration::from_micros(2110);
    pair.post(0, 66, false);
    pair.run();
    pair.now += Duration::from_secs(15);
    pair.run();
    pair.post(1, 67, false);
    pair.run();
    pair.check(
        r"
    650 A Packet pn=2 | Segment 0x1->0x2 msg=2 0+65/65 first ack
    750 B delivered 2
    750 B Packet pn=2 | Ack 2 delay=0us credit=78 floor=3 packets=0+2 (lost)
   1100 A Packet pn=3 | Segment 0x1->0x2 msg=2 0+65/65 first ack
   1200 B Packet pn=3 | Ack 3 delay=0us credit=78 floor=3 packets=0+3 (lost)
   2100 A Packet pn=4 | Ping (lost)
   2110 A Packet pn=5 | Segment 0x1->0x2 msg=3 0+66/66 first ack
   2210 B delivered 3
   2210 B Packet pn=4 | Ack 5 delay=0us credit=78 floor=4 packets=0+1,1+3
   2310 A finished: Ok(())
   2310 A finished: Ok(())
15002325 B Packet pn=5 | Segment 0x1->0x2 msg=1 0+67/67 first ack
15002425 A delivered 1
15002425 A Packet pn=6 | Ack 5 delay=0us credit=78 floor=2 packets=0+2,2+1
15002525 B finished: Ok(())
",
    );
}

#[test]
fn a_withdrawn_message_ends_at_once_and_is_abandoned_in_its_turn() {
    // All that is under way is lost.
    let mut pair = Pair::new(&[4, 5, 6], 8);
    pair.post(0, 64, true);
    pair.run();
    pair.lines.clear();
    pair.post(0, 65, true);
    let second = pair.post(0, 66, true);
    pair.post(0, 67, true);
    for ticket in [second, second] {
        pair.processes[0].rd.withdraw(&pair.at(), ticket);
        pair.pump(0);
    }
    pair.run();
    pair.post(0, 68, true);
    pair.run();
    pair.check(
        r"
    650 A Packet pn=2 | Segment 0x1->0x2 msg=2 behind=0 0+65/65 first ack (lost)
    650 A Packet pn=3 | Segment 0x1->0x2 msg=3 behind=1 0+66/66 first ack (lost)
    650 A Packet pn=4 | Segment 0x1->0x2 msg=4 behind=1 0+67/67 first ack (lost)
    650 A finished: Err(Withdrawn)
   1100 A Packet pn=5 | Segment 0x1->0x2 msg=2 behind=0 0+65/65 first ack
   1200 B delivered 2
   1200 B Packet pn=2 | Ack 5 delay=0us credit=78 floor=3 packets=0+1,3+1
   1300 A finished: Ok(())
   1300 A finished: Err(Flushed)
   1300 A Packet pn=6 | Abandon 3 4
   1400 B Packet pn=3 | Ack 6 delay=0us credit=78 floor=5 packets=0+2,3+1
   1750 A Packet pn=7 | Segment 0x1->0x2 msg=5 behind=0 0+68/68 first ack
   1850 B delivered 5
   1850 B Packet pn=4 | Ack 7 delay=0us credit=78 floor=6 packets=0+3,3+1
   1950 A finished: Ok(())
",
    );
}

#[test]
fn what_was_never_sent_disappears_with_what_is_queued_behind_it() {
    let mut pair = Pair::new(&[], 8);
    let tickets = [1, 2, 3].map(|len| pair.post(0, len, len != 2));
    pair.processes[0].rd.withdraw(&pair.at(), tickets[0]);
    pair.pump(0);
    pair.run_until(Duration::from_micros(150));
    pair.now = Duration::from_micros(150);
    pair.processes[0].rd.withdraw(&pair.at(), tickets[1]);
    pair.pump(0);
    pair.run();
    pair.post(0, 4, true);
    pair.run();
    pair.check(
        r"
      0 A Hello | Hello v1 features=0x1
      0 A finished: Err(Withdrawn)
      0 A finished: Err(Flushed)
    100 B Challenge | Challenge v1 features=0x1 home=20002 credit=78 largest=1472
    150 A finished: Err(Withdrawn)
    200 A Hello | Hello v1 features=0x1
    300 B Challenge | Challenge v1 features=0x1 home=20002 credit=78 largest=1472
    400 A Open pn=1 | Open v1 features=0x1 asked=20002 | Segment 0x1->0x2 msg=1 behind=0 0+4/4 first ack
    500 B delivered 1
    500 B Packet pn=1 | Ack 1 delay=0us credit=78 floor=2 packets=0+1
    600 A finished: Ok(())
",
    );
}

#[test]
fn a_posted_receive_ends_the_wait_for_it() {
    // READY is lost once, and the timer is that of 655 ms. The repair of what a probe has brought
    // already is one more READY, and costs no more than a try.
    let mut pair = Pair::new(&[5], 0);
    pair.processes[1].is_late = true;
    pair.post(0, 10, true);
    pair.post(0, 11, false);
    pair.run_until(Duration::from_micros(1000));
    pair.now = Duration::from_micros(1000);
    pair.processes[1].receives = 1;
    for _ in 0..2 {
        // The second time nobody waits.
        pair.processes[1].rd.on_receives_posted(&pair.at(), 2, 1);
    }
    pair.pump(1);
    pair.run();
    pair.check(
        r"
      0 A Hello | Hello v1 features=0x1
    100 B Challenge | Challenge v1 features=0x1 home=20002 credit=78 largest=1472
    200 A Open pn=1 | Open v1 features=0x1 asked=20002 | Segment 0x1->0x2 msg=1 behind=0 0+10/10 first |
            Segment 0x1->0x2 msg=2 0+11/11 first ack
    300 B Packet pn=1 | Ack 1 delay=0us credit=78 floor=1 packets=0+1 |
            Verdict msg=1 ReceiverNotReady timer=0 pn=…1 |
            Verdict msg=2 ReceiverNotReady timer=0 pn=…1
    450 A Packet pn=2 | Ack 1 delay=48us credit=78 floor=1 packets=0+1
   1000 B Packet pn=2 | Ready 0x2 receives=1 (lost)
   1454 B Packet pn=3 | Ready 0x2 receives=1
   1554 A Packet pn=3 | Ack 3 delay=0us credit=78 floor=1 packets=0+1,1+1 |
            Segment 0x1->0x2 msg=1 behind=0 0+10/10 first ack
   1654 B delivered 1
   1654 B Packet pn=4 | Ack 3 delay=0us credit=78 floor=2 packets=0+3 | Ready 0x2 receives=1
   1754 A finished: Ok(())
   1754 A Packet pn=4 | Ack 4 delay=0us credit=78 floor=1 packets=0+2 |
            Segment 0x1->0x2 msg=2 0+11/11 first ack
   1854 B delivered 2
   1854 B Packet pn=5 | Ack 4 delay=0us credit=78 floor=3 packets=0+4
   1954 A finished: Ok(())
",
    );
}

#[test]
fn two_that_begin_at_once_cross() {
    let mut pair = Pair::new(&[], 8);
    pair.post(0, 64, true);
    pair.post(1, 65, true);
    pair.run();
    pair.check(
        r"
      0 A Hello | Hello v1 features=0x1
      0 B Hello | Hello v1 features=0x1
    100 B Challenge | Challenge v1 features=0x1 home=20002 credit=78 largest=1472
    100 A Challenge | Challenge v1 features=0x1 home=20001 credit=78 largest=1472
    200 A Open pn=1 | Open v1 features=0x1 asked=20002 | Segment 0x1->0x2 msg=1 behind=0 0+64/64 first ack
    200 B Open pn=1 | Open v1 features=0x1 asked=20001 | Segment 0x1->0x2 msg=1 behind=0 0+65/65 first ack
    300 B Cross
    650 B Open pn=2 | Open v1 features=0x1 asked=20001 | Segment 0x1->0x2 msg=1 behind=0 0+65/65 first ack
    750 A delivered 1
    750 A Packet pn=1 | Ack 2 delay=0us credit=78 floor=2 packets=0+1 |
            Segment 0x1->0x2 msg=1 behind=0 0+64/64 first ack
    850 B finished: Ok(())
    850 B delivered 1
    850 B Packet pn=3 | Ack 1 delay=0us credit=78 floor=2 packets=0+1
    950 A finished: Ok(())
",
    );
}
