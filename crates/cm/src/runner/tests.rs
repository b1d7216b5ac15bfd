//! What the shell asks its environment, and when: around a real stream, a real alarm and calls.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use uwarp_driver::{Nic, Qp};
use uwarp_proto::setup::{Negotiated, Revision, Rtr};
use uwarp_rnic::qp::{Now, QpCaps, QpInit, QpModify, QpState, StreamParams};
use uwarp_rnic::{AsyncEvent, AsyncSink, Cq, Pd};

use crate::cm::Cm;
use crate::event::ConnParam;
use crate::machine::{Action, ConnKey, Input, Machine, Recipient, Space, StreamEvent, Transmit, Want};
use crate::params::stream_params;
use crate::runner::{Environment, Runner};
use crate::timeouts::ACK_TIMEOUT;

/// A bound of hangs.
const LONG: Duration = Duration::from_secs(60);

/// What the machine and its environment see, in order.
#[derive(Clone, Default)]
struct Log(Arc<(Mutex<Vec<String>>, Condvar)>);

impl Log {
    fn add(&self, line: impl Into<String>) {
        self.0.0.lock().unwrap().push(line.into());
        self.0.1.notify_all();
    }

    /// All of it, once this line is in it.
    fn until(&self, last: &str) -> Vec<String> {
        let lines = self.0.0.lock().unwrap();
        let missing = |lines: &mut Vec<String>| !lines.iter().any(|line| line == last);
        let (lines, over) = self.0.1.wait_timeout_while(lines, LONG, missing).unwrap();
        assert!(!over.timed_out(), "no {last:?} after {lines:?}");
        lines.clone()
    }
}

/// Notes what it is told, and what was around it then.
struct Noting {
    log: Log,
    around: u32,
    at: Option<Instant>,
    attaches: Option<Action<u32>>,
}

impl Machine for Noting {
    type Report = u32;

    fn handle_input(&mut self, _: &Now, input: Input<'_>) {
        match input {
            Input::Stream { event, .. } => self.log.add(match event {
                StreamEvent::Ended(_) => "ended".to_owned(),
                event => format!("{event:?}").to_lowercase(),
            }),
            Input::Datagram { .. } => self.log.add(format!("datagram, around {}", self.around)),
            _ => {}
        }
    }

    fn handle_timeout(&mut self, now: &Now) {
        if self.at.take_if(|at| *at <= now.get()).is_some() {
            self.log.add(format!("timeout, around {}", self.around));
        }
    }

    fn poll_transmit(&mut self) -> Option<Transmit<'_>> {
        None
    }

    fn poll_timeout(&self) -> Option<Instant> {
        self.at
    }

    fn poll_action(&mut self) -> Option<Action<u32>> {
        self.attaches.take()
    }

    fn want(&self, _: ConnKey) -> Want {
        Want::Nothing
    }
}

struct Around {
    log: Log,
    number: AtomicU32,
    used: AtomicBool,
    qp: OnceLock<Weak<Qp>>,
}

impl Environment<Noting> for Around {
    fn queue_pair(&self, _: Recipient) -> Option<Arc<Qp>> {
        self.qp.get()?.upgrade()
    }

    fn stream_params(&self, _: &Qp, said: &Negotiated, param: ConnParam) -> StreamParams {
        stream_params(said, param, ACK_TIMEOUT, 0)
    }

    fn report(&self, _: u32) {}

    fn was_used(&self, to: Recipient) -> bool {
        self.log.add(format!("asked of {to:?}"));
        self.used.load(Ordering::Relaxed)
    }

    fn before_timeout(&self, runner: &Runner<Noting, Self>) {
        // Without a lock: it may call the machine.
        runner.call(|noting, _| noting.log.add("before the timeout"));
        self.number.fetch_add(1, Ordering::Relaxed);
    }

    fn prepare(&self, noting: &mut Noting, _: &Now) {
        noting.around = self.number.load(Ordering::Relaxed);
    }
}

struct Ignore;

impl AsyncSink for Ignore {
    fn async_event(&self, _: AsyncEvent) {}
}

fn queue_pair() -> Arc<Qp> {
    let cq = Cq::new(8, 0, None, Arc::new(Ignore));
    let caps =
        QpCaps { max_send_wr: 1, max_recv_wr: 1, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 };
    let init = QpInit {
        pd: Pd::new(),
        send_cq: Arc::clone(&cq),
        recv_cq: cq,
        srq: None,
        caps,
        sq_sig_all: true,
        cookie: 0,
        async_sink: Arc::new(Ignore),
    };
    let qp = Qp::create(&Nic::open().unwrap(), init).unwrap();
    qp.modify(&QpModify { state: Some(QpState::Init), ..QpModify::default() }).unwrap();
    qp
}

fn new(log: &Log) -> (Noting, Around) {
    let noting = Noting { log: log.clone(), around: 0, at: None, attaches: None };
    let number = AtomicU32::new(1);
    (noting, Around { log: log.clone(), number, used: AtomicBool::new(false), qp: OnceLock::new() })
}

/// The responder's end of a connection without an indication.
fn said() -> Box<Negotiated> {
    Box::new(Negotiated {
        initiator: false,
        revision: Revision::Two,
        crc: true,
        send_markers: false,
        receive_markers: false,
        ird: 1,
        ord: 1,
        rtr: Rtr::None,
        peer_enhanced: None,
        drops_reserved_flags: false,
        peer_is_uwarp: false,
        peer: None,
        host: None,
        rtr_stag_to: (0, 0),
        private_data: Vec::new(),
    })
}

/// It is asked when the stream has ended, and the machine learns the answer before the end.
#[test]
fn the_machine_learns_whether_a_stream_was_used_before_it_learns_of_the_end() {
    let cm = Cm::of_process().unwrap();
    for used in [false, true] {
        let (log, qp) = (Log::default(), queue_pair());
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let socket = crate::carriers::adopt(listener.accept().unwrap().0.into()).unwrap();
        let (mut noting, around) = new(&log);
        around.qp.set(Arc::downgrade(&qp)).unwrap();
        around.used.store(used, Ordering::Relaxed);
        let conn = Space::new(0).name();
        let (to, param) = (Recipient::Own, ConnParam::DEFAULT);
        noting.attaches = Some(Action::Attach { conn, to, said: said(), param });
        let runner = Runner::start(cm.engine(), around, noting, [(conn, socket)]);
        log.until("attached");
        drop(peer);
        let lines: Vec<String> =
            log.until("ended").into_iter().filter(|line| line != "established").collect();
        let mut wanted = vec!["attached", "asked of Own", "used", "ended"];
        wanted.retain(|line| used || *line != "used");
        assert_eq!(lines, wanted);
        drop(runner);
        qp.destroy();
    }
}

/// The environment comes first when the alarm goes off, and may call the machine then.
#[test]
fn the_environment_comes_before_the_machine_when_its_time_is_over() {
    let cm = Cm::of_process().unwrap();
    let log = Log::default();
    let (mut noting, around) = new(&log);
    noting.at = Some(Instant::now() + Duration::from_millis(1));
    let runner = Runner::start(cm.engine(), around, noting, []);
    assert_eq!(log.until("timeout, around 2"), ["before the timeout", "timeout, around 2"]);
    assert_eq!(runner.read(Machine::poll_timeout), None);
}

/// What has changed around a machine it knows before anything else: in a call, with an input, at its time.
#[test]
fn a_machine_knows_what_is_around_it_before_it_is_called() {
    let cm = Cm::of_process().unwrap();
    let log = Log::default();
    let (noting, around) = new(&log);
    let runner = Runner::start(cm.engine(), around, noting, []);
    let set = |number| runner.env().number.store(number, Ordering::Relaxed);
    for number in [5, 6] {
        set(number);
        assert_eq!(runner.call(|noting, _| noting.around), number);
    }
    set(7);
    let here = Ipv4Addr::LOCALHOST;
    runner.datagram(SocketAddr::from((here, 1)), here.into(), b"x");
    log.until("datagram, around 7");
    set(20);
    // The environment adds one before it.
    runner.call(|noting, now| noting.at = Some(now.get() + Duration::from_millis(1)));
    log.until("timeout, around 21");
}
