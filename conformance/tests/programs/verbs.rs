//! Programs that use verbs which the other rows leave out.

use std::path::Path;

use uwarp_conformance::netns::Veth;
use uwarp_conformance::topology::Place;
use uwarp_conformance::topology::Topology::*;
use uwarp_conformance::{Outcome, check, require};

use super::Run::Custom;
use super::{Case, LONG, World};

/// All rows.
pub fn cases() -> Vec<Case> {
    vec![
        Case {
            program: "ibv_asyncwatch",
            manner: "veth goes down and up",
            checked: "PORT_ERR and PORT_ACTIVE, GID_CHANGE with each",
            at: &[Veth1500V4],
            run: Custom(asyncwatch),
        },
        Case {
            program: "pyverbs",
            manner: "conformance/py/traffic.py",
            checked: "device, GID table, RC and UD by number, data compared",
            at: &[Loopback4],
            run: Custom(pyverbs),
        },
        refusal("ibv_xsrq_pingpong", "-g 0", |w, p| {
            w.refuses("ibv_xsrq_pingpong -g 0", "Couldn't Open the XRC Domain 95", p)
        }),
    ]
}

fn refusal(program: &'static str, manner: &'static str, run: fn(&World, Place<'_>) -> Outcome) -> Case {
    let checked = "the device refuses; the program says so and ends by itself";
    Case { program, manner, checked, at: &[Loopback4], run: Custom(run) }
}

impl World {
    /// A program that needs what the device does not offer.
    fn refuses(&self, line: &str, complaint: &str, place: Place<'_>) -> Outcome {
        let out = self.over_uwarp(line, place.server)?.limit(LONG).run()?;
        let ended = out.status.is_some_and(|status| status.code() == Some(1));
        require!(ended && out.stderr.contains(complaint), "wanted \"{complaint}\" and 1\n{}", out.text());
        Ok(())
    }
}

fn pyverbs(world: &World, place: Place<'_>) -> Outcome {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("py/traffic.py");
    // Debian's, which its package of pyverbs is for.
    let line = format!("/usr/bin/python3 {}", script.display());
    let out = world.over_uwarp(&line, place.server)?.limit(LONG * 2).run()?;
    check::statements(&out)?;
    check::has(&out, "ok the device is closed")
}

/// In namespaces of its own: the interface that others use stays up.
fn asyncwatch(world: &World, _place: Place<'_>) -> Outcome {
    let veth = Veth::new(1500)?;
    let watch = world.over_uwarp("ibv_asyncwatch", Some(&veth.client))?.spawn()?;
    let says = |what: &'static [&str]| {
        watch.until(LONG, what[0], move |w| {
            let text = w.so_far();
            let mut rest = text.as_str();
            // In this order, with others between.
            what.iter().all(|word| match rest.split_once(word) {
                Some((_, after)) => {
                    rest = after;
                    true
                }
                None => false,
            })
        })
    };
    says(&["async event FD"])?;
    veth.client.ip("link set veth0 down")?;
    says(&["IBV_EVENT_PORT_ERR (10), port 1", "IBV_EVENT_GID_CHANGE (18), port 1"])?;
    veth.client.ip("link set veth0 up")?;
    says(&["PORT_ERR", "IBV_EVENT_PORT_ACTIVE (9), port 1", "IBV_EVENT_GID_CHANGE (18), port 1"])?;
    require!(watch.is_running(), "it ended\n{}", watch.stop().text());
    Ok(())
}
