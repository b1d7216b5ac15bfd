//! A queue pair and what the driver keeps beside it, without the socket.
//!
//! [`End::pump`] does what the driver's pump does, call for call: a difference between the two is a mistake here.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use uwarp_rnic::mem::{self, MemSeg};
use uwarp_rnic::qp::{Disconnect, QpCaps, QpCore, QpInit, QpModify, QpState, RxPlan, StreamParams};
use uwarp_rnic::srq::Waiter;
use uwarp_rnic::{
    AsyncEvent, AsyncSink, CompletionSink, Cq, EventKind, Pd, RecvWr, SendWr, Srq, SrqInit, VerbsError, Wc,
};

use crate::net::{Pipe, Refusal};
use crate::{Rng, Time};

/// Size of the receive buffer, the driver's.
const STAGE: usize = 256 * 1024;
/// Pieces handed to one send, the driver's.
const PIECES: usize = 64;
/// How long posted work may take to go out after a disconnect, and how long input is drained after that.
const LIMIT: Time = 2_000_000_000;
/// How long an acknowledgement waits at most for something to ride on.
const ACK_LIMIT: Time = 250_000;

/// What an end is made from.
#[derive(Debug, Clone, Copy)]
pub struct EndConfig {
    /// Queue sizes.
    pub caps: QpCaps,
    /// Receives come from a shared receive queue of the size that the queue pair's own would have.
    pub shared_recv: bool,
    /// Every send makes a completion.
    pub sq_sig_all: bool,
    /// Entries of each completion queue; none: as many as the work queue that completes there has places.
    pub cq_depth: Option<u32>,
    /// Its number, which completions carry.
    pub qpn: u32,
}

impl Default for EndConfig {
    fn default() -> Self {
        Self {
            caps: QpCaps {
                max_send_wr: 64,
                max_recv_wr: 64,
                max_send_sge: 8,
                max_recv_sge: 8,
                max_inline_data: 256,
            },
            shared_recv: false,
            sq_sig_all: false,
            cq_depth: None,
            qpn: 0x101,
        }
    }
}

/// What was told outside completions.
#[derive(Debug, Default)]
pub struct Events {
    kinds: Mutex<Vec<EventKind>>,
    completions: Mutex<u32>,
}

impl Events {
    /// Asynchronous events so far.
    pub fn kinds(&self) -> Vec<EventKind> {
        self.kinds.lock().map(|k| k.clone()).unwrap_or_default()
    }

    /// Completion events so far.
    pub fn completions(&self) -> u32 {
        self.completions.lock().map(|n| *n).unwrap_or_default()
    }
}

impl AsyncSink for Events {
    fn async_event(&self, event: AsyncEvent) {
        if let Ok(mut kinds) = self.kinds.lock() {
            kinds.push(event.kind);
        }
    }
}

impl CompletionSink for Events {
    fn completion_event(&self, _: u64) {
        if let Ok(mut n) = self.completions.lock() {
            *n += 1;
        }
    }
}

/// A receive is kept for the Send that waits.
#[derive(Default)]
struct Kept(AtomicBool);

impl Waiter for Kept {
    fn receive_kept(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A queue pair with the driver's state.
pub struct End {
    /// The queue pair.
    pub core: QpCore,
    /// Its protection domain.
    pub pd: Arc<Pd>,
    /// Where its sends complete.
    pub send_cq: Arc<Cq>,
    /// Where its receives complete.
    pub recv_cq: Arc<Cq>,
    /// Where its receives come from, if they are shared.
    pub srq: Option<Arc<Srq>>,
    kept: Arc<Kept>,
    /// What it was told beside completions.
    pub events: Arc<Events>,
    left_over: Vec<u8>,
    stage: Vec<u8>,
    /// How often the observer was told that the stream is up.
    pub established: u32,
    /// What the observer was told at the end, each time.
    pub disconnected: Vec<Disconnect>,
    send_deadline: Option<Time>,
    ack_deadline: Option<Time>,
    rnr_deadline: Option<Time>,
    /// The peer hung up while nobody reads; when to believe that.
    gone_deadline: Option<Time>,
    /// Sending failed. The peer's last messages may still be there to be read.
    broken: bool,
    closing: Option<Closing>,
    /// Until when work requests wait for a peer that is gone.
    retry_deadline: Option<Time>,
    /// Bytes moved since the start, both ways.
    moved: u64,
}

struct Closing {
    fin_sent: bool,
    eof: bool,
    deadline: Time,
}

impl End {
    /// An end in RESET, with completion queues and a protection domain of its own.
    pub fn new(config: EndConfig) -> Self {
        Self::new_in(config, Pd::new())
    }

    /// The same, with a protection domain that there is.
    pub fn new_in(config: EndConfig, pd: Arc<Pd>) -> Self {
        let events = Arc::new(Events::default());
        let cq = |places| Cq::new(config.cq_depth.unwrap_or(places), 0, Some(events.clone()), events.clone());
        let (send_cq, recv_cq) = (cq(config.caps.max_send_wr), cq(config.caps.max_recv_wr));
        let srq = config.shared_recv.then(|| {
            Srq::new(SrqInit {
                pd: pd.clone(),
                max_wr: config.caps.max_recv_wr,
                max_sge: config.caps.max_recv_sge,
                cookie: 0,
                async_sink: events.clone(),
            })
        });
        let init = QpInit {
            pd: pd.clone(),
            send_cq: send_cq.clone(),
            recv_cq: recv_cq.clone(),
            srq: srq.clone(),
            caps: config.caps,
            sq_sig_all: config.sq_sig_all,
            cookie: 0,
            async_sink: events.clone(),
        };
        let mut core = QpCore::new(config.qpn, init);
        let kept = Arc::new(Kept::default());
        core.set_waiter(Arc::downgrade(&kept) as Weak<dyn Waiter>);
        Self {
            core,
            pd,
            send_cq,
            recv_cq,
            srq,
            kept,
            events,
            left_over: Vec::new(),
            stage: vec![0; STAGE],
            established: 0,
            disconnected: Vec::new(),
            send_deadline: None,
            ack_deadline: None,
            rnr_deadline: None,
            gone_deadline: None,
            broken: false,
            closing: None,
            retry_deadline: None,
            moved: 0,
        }
    }

    /// Moves to INIT, so that receives can be posted.
    pub fn init(&mut self) {
        let init = QpModify { state: Some(QpState::Init), ..QpModify::default() };
        self.core.modify(&init).expect("RESET may become INIT");
    }

    /// Gives the queue pair its stream.
    pub fn attach(&mut self, params: StreamParams) -> Result<(), VerbsError> {
        self.core.attach(params)
    }

    /// The completions of its sends since the last call.
    pub fn sends(&self) -> Vec<Wc> {
        take(&self.send_cq)
    }

    /// The completions of its receives since the last call.
    pub fn recvs(&self) -> Vec<Wc> {
        take(&self.recv_cq)
    }

    /// Whether there is nothing to poll.
    pub fn is_empty_of_completions(&self) -> bool {
        self.send_cq.is_empty() && self.recv_cq.is_empty()
    }

    /// Bytes moved since the start, both ways; stands still when nothing happens.
    pub fn moved(&self) -> u64 {
        self.moved
    }

    /// Whether the stream is closed for good.
    pub fn is_closed(&self) -> bool {
        !self.core.attached()
    }

    /// Posts and sends, as the driver does in one call.
    pub fn post_send(
        &mut self,
        now: Time,
        wr: &SendWr<'_>,
        input: &mut Pipe,
        output: &mut Pipe,
    ) -> Result<(), VerbsError> {
        self.core.post_send(wr)?;
        self.send_and_look(now, input, output);
        self.news(now);
        Ok(())
    }

    /// Posts a receive, and goes on with a stalled stream.
    pub fn post_recv(
        &mut self,
        now: Time,
        wr: &RecvWr<'_>,
        input: &mut Pipe,
        output: &mut Pipe,
    ) -> Result<(), VerbsError> {
        if let Some(srq) = &self.srq {
            let (result, woken) = srq.post_recv(std::iter::once(*wr));
            woken.wake();
            result.map_err(|(_, e)| e)?;
            self.pump(now, input, output);
            return Ok(());
        }
        self.core.post_recv(wr)?;
        if self.core.awaits_receive() {
            self.core.unstall();
            self.pump(now, input, output);
        }
        Ok(())
    }

    /// Begins an orderly end.
    pub fn disconnect(&mut self, now: Time, input: &mut Pipe, output: &mut Pipe) {
        if self.core.attached() && self.closing.is_none() && self.send_deadline.is_none() {
            self.send_deadline = Some(now + LIMIT);
            self.core.tell_all();
            self.core.ask_placed(true);
            self.pump(now, input, output);
        } else if !self.core.attached() {
            self.core.leave_gone_peer();
        }
    }

    /// When it has to be pumped although nothing arrives.
    pub fn timeout(&self) -> Option<Time> {
        let ack = self.ack_deadline.filter(|_| self.core.ack_waits());
        let closing = self.closing.as_ref().filter(|_| self.core.attached()).map(|c| c.deadline);
        let send = self.send_deadline.filter(|_| self.closing.is_none());
        let retry = self.retry_deadline.filter(|_| self.core.retry_limit().is_some());
        [self.rnr_deadline, self.gone_deadline, send, closing, ack, retry].into_iter().flatten().min()
    }

    /// What is due by the clock.
    pub fn handle_timeout(&mut self, now: Time) {
        if self.gone_deadline.is_some_and(|at| at <= now) {
            self.gone_deadline = None;
            if self.core.stalled() {
                self.end_of_input(false);
            }
        }
        if self.rnr_deadline.is_some_and(|at| at <= now) {
            self.rnr_deadline = None;
            if self.core.awaits_receive() {
                self.core.receive_missing();
            }
        }
        if self.send_deadline.is_some_and(|at| at <= now) {
            self.core.close();
        }
        if self.retry_deadline.take_if(|at| *at <= now).is_some() {
            self.core.retries_exceeded();
        }
        if self.ack_deadline.take_if(|at| *at <= now).is_some() {
            self.core.tell_placed();
            self.core.ask_placed(true);
        }
    }

    /// Moves what can be moved, in both directions.
    pub fn pump(&mut self, now: Time, input: &mut Pipe, output: &mut Pipe) {
        self.receive(now, input, output);
        self.send_and_look(now, input, output);
        self.news(now);
        if self.closing.is_some() && self.core.attached() {
            self.receive(now, input, output);
            self.send(now, output);
        }
        self.wind_down(now, output);
        self.news(now);
    }

    fn send_and_look(&mut self, now: Time, input: &mut Pipe, output: &mut Pipe) {
        let stalled = self.core.stalled();
        self.send(now, output);
        // A Read has begun, and its Response is to be received past the Send that waits.
        if stalled && !self.core.stalled() {
            self.receive(now, input, output);
            self.send(now, output);
        }
    }

    fn send(&mut self, now: Time, output: &mut Pipe) {
        self.send_all(now, output);
        if self.core.ack_waits() {
            self.ack_deadline.get_or_insert(now + ACK_LIMIT);
        }
    }

    fn send_all(&mut self, now: Time, output: &mut Pipe) {
        if self.broken || self.closing.as_ref().is_some_and(|c| c.fin_sent) {
            return;
        }
        loop {
            self.core.build();
            let Some(out) = self.core.out().filter(|o| !o.is_empty()) else { return };
            let mut bytes = Vec::new();
            let gathered = out.gather(PIECES, |seg: MemSeg| mem::copy_out(seg, &mut bytes).expect("mapped"));
            assert_eq!(gathered, bytes.len(), "gather() tells what it handed out");
            if let Some(staged) = out.only_staged() {
                assert!(staged == bytes, "both ways to the bytes give the same");
            }
            match output.send(now, &bytes) {
                Ok(n) => {
                    self.core.taken(n);
                    self.moved += n as u64;
                    if n < bytes.len() {
                        return;
                    }
                }
                Err(Refusal::WouldBlock) => return,
                Err(Refusal::Reset) => {
                    self.broken = true;
                    return;
                }
            }
        }
    }

    fn receive(&mut self, now: Time, input: &mut Pipe, output: &mut Pipe) {
        if self.core.awaits_receive() && self.kept.0.swap(false, Ordering::Relaxed) {
            self.core.unstall();
        }
        if self.core.attached() {
            while self.receive_all(now, input, true) {
                self.send(now, output);
                if self.core.ack_presses() {
                    // It has to wait, but what comes does not.
                    self.receive_all(now, input, false);
                    break;
                }
            }
        }
        if !self.core.awaits_receive() {
            (self.rnr_deadline, self.gone_deadline) = (None, None);
            return;
        }
        if self.rnr_deadline.is_none()
            && let Some(limit) = self.core.rnr_timeout()
        {
            self.rnr_deadline = Some(now + Time::try_from(limit.as_nanos()).unwrap_or(Time::MAX));
        }
        if self.core.stalled() && self.gone_deadline.is_none() && input.hung_up(now) {
            self.gone_deadline = Some(now + LIMIT);
        }
    }

    /// Says whether an acknowledgement is to go out before more is received.
    fn receive_all(&mut self, now: Time, input: &mut Pipe, heed_acks: bool) -> bool {
        if self.closing.as_ref().is_some_and(|c| c.eof) {
            return false;
        }
        if !self.left_over.is_empty() && !self.core.stalled() && self.core.closing().is_none() {
            let used = self.core.handle_input(&self.left_over);
            assert!(used <= self.left_over.len());
            self.left_over.drain(..used);
        }
        loop {
            if self.core.closing().is_some() {
                self.left_over.clear();
            }
            let left = self.left_over.len();
            let plan = self.core.rx_plan(&self.left_over, self.stage.len());
            let (result, direct) = match &plan {
                RxPlan::Stop => return false,
                RxPlan::Stage { max } => {
                    let max = (*max).max(left + 1).min(self.stage.len());
                    assert!(max > left, "no room to receive into: an FPDU does not fit the buffer");
                    self.stage[..left].copy_from_slice(&self.left_over);
                    (input.recv(now, max - left), 0)
                }
                RxPlan::Direct { place, tail } => {
                    assert_eq!(left, 0, "bytes are left over in front of a direct placement");
                    let direct: usize = place.iter().map(|s| s.len).sum();
                    (input.recv(now, direct + tail), direct)
                }
            };
            let bytes = match result {
                Ok(bytes) if !bytes.is_empty() => bytes,
                end => {
                    if matches!(plan, RxPlan::Direct { .. }) {
                        self.core.direct_received(0);
                    }
                    match end {
                        Err(Refusal::WouldBlock) => return false,
                        Err(Refusal::Reset) => self.core.connection_lost(Disconnect::Reset),
                        Ok(_) => self.end_of_input(left > 0 || direct > 0),
                    }
                    if let Some(closing) = &mut self.closing {
                        closing.eof = true;
                    }
                    return false;
                }
            };
            self.moved += bytes.len() as u64;
            let staged = match &plan {
                RxPlan::Direct { place, .. } => {
                    let mut rest = &bytes[..];
                    for seg in place {
                        let n = mem::copy_in(*seg, rest).expect("mapped");
                        rest = &rest[n..];
                    }
                    self.core.direct_received(bytes.len() - rest.len());
                    self.stage[..rest.len()].copy_from_slice(rest);
                    rest.len()
                }
                _ => {
                    self.stage[left..left + bytes.len()].copy_from_slice(&bytes);
                    left + bytes.len()
                }
            };
            let used = self.core.handle_input(&self.stage[..staged]);
            assert!(used <= staged);
            self.left_over.clear();
            self.left_over.extend_from_slice(&self.stage[used..staged]);
            if heed_acks && self.core.ack_presses() {
                return true;
            }
        }
    }

    /// Nothing more comes from the peer. `partial`: in the middle of an FPDU.
    fn end_of_input(&mut self, partial: bool) {
        if self.broken {
            self.core.connection_lost(Disconnect::Reset);
        } else {
            self.core.peer_closed(partial);
        }
    }

    /// What the driver tells its observer.
    fn news(&mut self, now: Time) {
        if self.core.take_established() {
            self.established += 1;
        }
        match self.core.retry_limit() {
            Some(limit) => {
                let at = now + Time::try_from(limit.as_nanos()).unwrap_or(Time::MAX);
                self.retry_deadline.get_or_insert(at);
            }
            None => self.retry_deadline = None,
        }
        if let Some(why) = self.core.closing()
            && self.closing.is_none()
        {
            if self.send_deadline.is_some() {
                self.core.leave_gone_peer();
            }
            self.closing = Some(Closing { fin_sent: false, eof: false, deadline: now + LIMIT });
            (self.rnr_deadline, self.gone_deadline) = (None, None);
            self.left_over.clear();
            self.disconnected.push(why);
        }
    }

    fn wind_down(&mut self, now: Time, output: &mut Pipe) {
        if !self.core.attached() {
            return;
        }
        if self.send_deadline.is_some() && self.core.closing().is_none() {
            if self.core.send_idle() {
                self.core.tell_all();
                self.send_all(now, output);
                self.core.close();
            } else if self.core.ack_waits() {
                self.core.ask_placed(true);
                self.send_all(now, output);
            }
        }
        let flushed = self.broken || self.core.out().is_none_or(|o| o.is_empty());
        let Some(closing) = &mut self.closing else { return };
        if flushed && !closing.fin_sent {
            closing.fin_sent = true;
            output.close(now);
        }
        if (closing.fin_sent && closing.eof) || now >= closing.deadline {
            // Closing a socket with unread input resets the connection; what was sent is lost with it.
            output.close(now);
            self.core.detach();
        }
    }
}

fn take(cq: &Cq) -> Vec<Wc> {
    let mut out = Vec::new();
    cq.poll(usize::MAX, |wc| out.push(wc));
    out
}

/// The generator of an end's own choices is the world's.
pub(crate) fn shuffle<T>(rng: &mut Rng, list: &mut [T]) {
    for i in (1..list.len()).rev() {
        let j = rng.size(0, i);
        list.swap(i, j);
    }
}
