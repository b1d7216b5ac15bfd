//! Lookups of rdma_cm, answered from elsewhere: by another user of the same host and from another host.

use std::time::Duration;

use uwarp_conformance::attacker::numbers::{lookup_reply, transaction};
use uwarp_conformance::attacker::stranger::Stranger;
use uwarp_conformance::process::Cmd;
use uwarp_conformance::{Context, Outcome, fail, require};

use crate::by_number::Stage;

/// The port that udaddy asks, and knows no other.
const PORT: u16 = 7174;
const QKEY: u32 = 0x0123_4567;
const ANSWERS: usize = 20;

/// The attacker has seen the question, and knows everything but the server's port. From there comes a wrong
/// transaction. The client believes neither; it does believe an answer from the server's port, so the
/// attack would have been seen.
pub fn answers_from_elsewhere(stage: &mut Stage<'_>) -> Outcome {
    let [(server, host), (_, clients), (elsewhere, _)] = stage.hosts.ends();
    let mut owner = Stranger::start(host)?;
    let asked = owner.bind(server, PORT)?;
    // The queue pair that all answers name: whoever believes one sends to this port.
    let named = owner.bind(server, 0)?;
    let qpn = u32::from(named.number()?) << 8 | 1;
    // From another host even the port is the same.
    let own = stage.stranger.bind(elsewhere, if elsewhere == server { 0 } else { PORT })?;
    let client = Cmd::line(&format!("udaddy -s {server} -c 1 -C 1"));
    let client = client.env("LD_LIBRARY_PATH", stage.dist.lib()).in_ns(Some(clients)).spawn()?;
    let mut bytes = [0; 512];
    asked.udp.set_read_timeout(Some(Duration::from_secs(60))).context("time limit")?;
    let (len, from) = asked.udp.recv_from(&mut bytes).context("the client's question")?;
    let Some(right) = transaction(&bytes[..len]) else { fail!("no lookup: {:x?}", &bytes[..len]) };
    for round in 1..=ANSWERS as u32 {
        own.udp.send_to(&lookup_reply(right, qpn, QKEY), from).context("an answer")?;
        asked.udp.send_to(&lookup_reply(right ^ round, qpn, QKEY), from).context("an answer")?;
    }
    named.udp.set_read_timeout(Some(Duration::from_secs(1))).context("time limit")?;
    let led_away = named.udp.recv(&mut bytes).is_ok();
    require!(!led_away, "the client believed an answer of a stranger\n{}", client.so_far());
    require!(client.is_running(), "the client has given up\n{}", client.so_far());
    asked.udp.send_to(&lookup_reply(right, qpn, QKEY), from).context("the answer")?;
    named.udp.set_read_timeout(Some(Duration::from_secs(60))).context("time limit")?;
    named.udp.recv(&mut bytes).context("the client's message")?;
    Ok(())
}
