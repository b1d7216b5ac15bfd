//! A timer of an id that expires in the moment in which it is no longer needed.

mod common;

use std::net::Ipv4Addr;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use uwarp_cm::{Cm, ConnParam, Event, EventChannel, EventKind, Id, Timeouts};
use uwarp_driver::Nic;
use uwarp_rnic::qp::{QpModify, QpState};
use uwarp_rnic::{RecvWr, SendFlags, SendOp, SendWr};

use common::{qp, qp_and_cq};

/// Longest a test waits for what has to come; reached only when it fails.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long nothing must come.
const QUIET: Duration = Duration::from_millis(20);
/// Longer than an id pauses between two looks whether its completions are polled.
const SEVERAL_LOOKS: Duration = Duration::from_millis(12);

fn expect(channel: &EventChannel, kind: EventKind) -> Event {
    let event = channel.get_within(Some(PATIENCE)).unwrap();
    assert_eq!(event.kind, kind, "{event:?}");
    event
}

/// Whether a thread of this process waits.
fn is_asleep(thread: rustix::process::Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{}/stat", thread.as_raw_nonzero())).unwrap();
    stat.rsplit_once(") ").is_some_and(|(_, state)| state.starts_with('S'))
}

/// The end of a connection waits for the program to poll; the program disconnects instead, and the time after
/// which a queue pair's number may be used again begins. The timer of the first wait had expired and waited
/// for the id's lock. It then took that time for its own, and ended it.
#[test]
fn an_older_timer_does_not_end_timewait() {
    let cm = Cm::new(&Nic::open().unwrap(), Timeouts::default());
    let [server, client] = [(); 2].map(|()| EventChannel::new(cm.nic()).unwrap());
    let listener = Id::new(&cm, &server);
    listener.bind((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    listener.listen(0).unwrap();
    for round in 0..30 {
        let active = Id::new(&cm, &client);
        active.resolve_address(None, listener.local_address().unwrap()).unwrap();
        expect(&client, EventKind::AddressResolved).acknowledge();
        active.resolve_route().unwrap();
        expect(&client, EventKind::RouteResolved).acknowledge();
        let active_qp = qp();
        active.connect(&active_qp, ConnParam::DEFAULT, b"").unwrap();
        let request = expect(&server, EventKind::ConnectRequest);
        let passive = Arc::clone(&request.id);
        request.acknowledge();
        // Hours: no TIMEWAIT_EXIT that comes here comes in time.
        let change = |_, options: &mut uwarp_cm::Options| {
            options.ack_timeout = Some(31);
            Ok(())
        };
        passive.set_options(change).unwrap();
        let (passive_qp, _unpolled) = qp_and_cq();
        passive_qp.modify(&QpModify { state: Some(QpState::Init), ..QpModify::default() }).unwrap();
        passive_qp.post_recv(std::iter::once(RecvWr { wr_id: 1, sges: &[] })).unwrap();
        passive.accept(&passive_qp, None, b"").unwrap();
        expect(&client, EventKind::Established).acknowledge();
        expect(&server, EventKind::Established).acknowledge();
        let op = SendOp::Send { invalidate: None };
        let wr = SendWr { wr_id: 2, op, flags: SendFlags::SIGNALED, sges: &[] };
        active_qp.post_send(std::iter::once(wr)).unwrap();
        let begin = Instant::now();
        while !passive_qp.has_unpolled() {
            assert!(begin.elapsed() < PATIENCE, "no message");
            std::thread::yield_now();
        }
        active.disconnect().unwrap();
        std::thread::sleep(Duration::from_millis(3));

        // The id is in use; first the program waits for it, then the timer.
        let (id_of_thread, thread) = mpsc::channel();
        let mut disconnecting = None;
        let in_use = |_, _: &mut uwarp_cm::Options| {
            let passive = Arc::clone(&passive);
            disconnecting = Some(std::thread::spawn(move || {
                id_of_thread.send(rustix::thread::gettid()).unwrap();
                passive.disconnect().unwrap();
            }));
            let thread = thread.recv().unwrap();
            while !is_asleep(thread) {
                std::thread::yield_now();
            }
            std::thread::sleep(SEVERAL_LOOKS);
            Ok(())
        };
        passive.set_options(in_use).unwrap();
        disconnecting.unwrap().join().unwrap();
        expect(&server, EventKind::Disconnected).acknowledge();
        let more = server.get_within(Some(QUIET));
        assert!(more.is_err(), "round {round}: {more:?}");
        [active, passive].iter().for_each(|id| id.destroy());
        [active_qp, passive_qp].iter().for_each(|qp| qp.destroy());
        while let Ok(event) = client.get_within(Some(Duration::ZERO)) {
            event.acknowledge();
        }
    }
    listener.destroy();
}
