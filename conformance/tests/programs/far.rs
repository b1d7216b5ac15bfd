//! Reliable datagrams through a path of our own: 10 ms there and back, and packets that are lost, late or
//! come twice, each by itself (a firewall sees what the system has joined as one packet).

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use uwarp_bottleneck::Shape;
use uwarp_conformance::netns::Far;
use uwarp_conformance::topology::Place;
use uwarp_conformance::topology::Topology::{self, *};
use uwarp_conformance::{Outcome, require};

use super::Run::Custom;
use super::{Case, World};

/// They make namespaces of their own, with these addresses.
const AT: &[Topology] = &[Veth1500V4];

const MS: Duration = Duration::from_millis(1);
/// One way.
const DELAY: Duration = Duration::from_millis(5);

const FAR: Shape =
    Shape { rate: None, queue: 0, delay: DELAY, loss: 0, late: 0, lateness: MS, twice: 0, longest: None };
/// A late packet is overtaken by all that is sent in the three milliseconds behind it.
const BAD: Shape = Shape { loss: 20, late: 30, lateness: Duration::from_millis(3), twice: 10, ..FAR };

const BAD_PATH: &str = "10 ms away, 2 % lost, 3 % late by 3 ms, 1 % come twice";

pub fn cases() -> Vec<Case> {
    let row = |program, manner, checked, run| Case { program, manner, checked, at: AT, run: Custom(run) };
    vec![
        row("rd_pingpong.c", BAD_PATH, "every message comes back as it was sent", |w, _| {
            w.far(1500, BAD, |w, place| {
                w.echoes(("64", "100"), place)?;
                w.echoes(("300000", "10"), place)
            })
        }),
        row(
            "rd_memory.c",
            BAD_PATH,
            "what is read is what was written, and each round is counted",
            |w, _| {
                w.far(1500, BAD, |w, place| {
                    w.reaches_memory(("64", "50"), place)?;
                    w.reaches_memory(("100000", "10"), place)
                })
            },
        ),
        row("write_record.c", BAD_PATH, "every byte that a record calls valid is right", |w, _| {
            w.far(1500, BAD, |w, place| {
                w.records("rd", ("65536", "50"), place)?;
                w.records("ud", ("65536", "50"), place).map(drop)
            })
        }),
        row(
            "ibv_rc_pingpong",
            "over rd, 10 ms away, a bad path",
            "every byte, and the link is rd",
            |w, _| w.far(1500, BAD, |w, place| w.pingpong_over_rd("-g 0 -c -s 65536 -n 40", place)),
        ),
        row(
            "ib_send_bw",
            "over rd, -R -D 2, 10 ms away",
            "more than one message is under way at once",
            |w, _| w.more_than_one_under_way(),
        ),
        row(
            "rd_pingpong.c",
            "interfaces take 9,000 bytes, and the path 1,500",
            "every message comes back; what was too long was a probe",
            |w, _| w.long_packets_are_lost(),
        ),
        row(
            "rd_pingpong.c",
            "a path that shrinks from 9,000 bytes to 1,500",
            "every message comes back as it was sent",
            |w, _| w.path_shrinks(),
        ),
        row(
            "rd_pingpong.c",
            "nothing comes one way for a second",
            "every message comes back as it was sent",
            |w, _| w.nothing_comes_for_a_while(),
        ),
    ]
}

impl World {
    /// At both ends of such a path, which lost and delayed what it says.
    fn far(&self, mtu: u32, shape: Shape, run: impl Fn(&World, Place<'_>) -> Outcome) -> Outcome {
        let far = Far::new(mtu, shape)?;
        run(self, self.ends_of(&far)?)?;
        for counts in far.path.counts() {
            let as_it_says = (counts.lost > 0) == (shape.loss > 0) && (counts.late > 0) == (shape.late > 0);
            require!(as_it_says, "another path than {shape:?}: {counts:?}");
        }
        Ok(())
    }

    fn ends_of<'a>(&self, far: &'a Far) -> Outcome<Place<'a>> {
        Ok(Place { server: Some(&far.server), client: Some(&far.client), ..self.net.place(Veth1500V4)? })
    }

    /// The sender has a window: one message in a round trip would be 0.8 MB/s here.
    fn more_than_one_under_way(&self) -> Outcome {
        const MESSAGE: u64 = 8192;
        let far = Far::new(1500, FAR)?;
        self.perftest_over(&format!("ib_send_bw -R -s {MESSAGE}"), ["rd"; 2], "rd", self.ends_of(&far)?)?;
        let most = far.path.counts()[0].most_bytes;
        // With its headers one message has 7 % more. (Longer ones fill the credit of a stock socket, 138
        // packets, with three, and where the ends share a processor with others they do not always get so
        // far.)
        require!(most > MESSAGE * 5 / 2, "{most} bytes were under way at most");
        Ok(())
    }

    fn long_packets_are_lost(&self) -> Outcome {
        let far = Far::new(9000, Shape { longest: Some(1500), ..FAR })?;
        self.echoes(("300000", "20"), self.ends_of(&far)?)?;
        // A length that two probes did not show is not tried again for ten minutes; there are three lengths.
        for counts in far.path.counts() {
            require!((1..=6).contains(&counts.too_long), "{counts:?}");
        }
        Ok(())
    }

    fn path_shrinks(&self) -> Outcome {
        let far = Far::new(9000, FAR)?;
        self.meanwhile(&far, ("300000", "50"), 1500, || {
            // By now long packets have been found to pass: with short ones, these would be seven rounds.
            far.path.reshape([Shape { longest: Some(1500), ..FAR }; 2]);
        })?;
        let counts = far.path.counts();
        require!(counts.iter().any(|counts| counts.too_long > 0), "nothing was too long: {counts:?}");
        Ok(())
    }

    fn nothing_comes_for_a_while(&self) -> Outcome {
        let far = Far::new(1500, FAR)?;
        self.meanwhile(&far, ("64", "200"), 80, || {
            far.path.reshape([FAR, Shape { loss: 1000, ..FAR }]);
            std::thread::sleep(1000 * MS);
            far.path.reshape([FAR; 2]);
        })?;
        let [_, back] = far.path.counts();
        require!(back.lost > 0, "nothing was lost: {back:?}");
        Ok(())
    }

    /// While messages go there and back, after so many packets.
    fn meanwhile(&self, far: &Far, way: (&str, &str), packets: u64, change: impl FnOnce() + Send) -> Outcome {
        let (place, over) = (self.ends_of(far)?, AtomicBool::new(false));
        std::thread::scope(|scope| {
            let over = &over;
            let changes = scope.spawn(move || {
                while far.path.counts()[0].carried < packets {
                    if over.load(Relaxed) {
                        return false;
                    }
                    std::thread::sleep(MS);
                }
                change();
                true
            });
            let result = self.echoes(way, place);
            over.store(true, Relaxed);
            let changed = changes.join().unwrap_or(false);
            result?;
            require!(changed, "it was over before {packets} packets: {:?}", far.path.counts());
            Ok(())
        })
    }
}
