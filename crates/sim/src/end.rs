//! A queue pair with the driver's pump, over a virtual network instead of a link.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use uwarp_driver::pump::Pump;
use uwarp_llp::closing::{self, Manner, Step};
use uwarp_rnic::qp::{
    Action, Disconnect, DisconnectReply, End as Ending, Now, QpCaps, QpInit, QpModify, QpState, RcCore,
    StreamParams,
};
use uwarp_rnic::srq::Waiter;
use uwarp_rnic::{
    AsyncEvent, AsyncSink, CompletionSink, Cq, EventKind, Pd, RecvWr, SendWr, Srq, SrqInit, VerbsError, Wc,
};

use crate::lower::Network;
use crate::net::Pipe;
use crate::{Rng, Time, instant, time};

/// What an end is created from.
#[derive(Debug, Clone, Copy)]
pub struct EndConfig {
    /// Queue sizes.
    pub caps: QpCaps,
    /// Receives come from a shared receive queue, of the size that the queue pair's own would have.
    pub shared_recv: bool,
    /// Every send makes a completion.
    pub sq_sig_all: bool,
    /// Entries of each completion queue; `None`: as many as the work queue that completes there has places.
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

/// Events that are not completions.
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

/// What an end's pump is told, and has requested.
#[derive(Default)]
pub(crate) struct Kept {
    /// A receive of the shared queue is reserved for the Send that waits.
    pub receive: AtomicBool,
    /// If the process is killed, the stream ends with a reset.
    pub reset_on_close: AtomicBool,
}

/// A process is gone, and its system closes the connection. `reset`: the process has requested a reset.
pub(crate) fn leave(now: Time, input: &mut Pipe, output: &mut Pipe, reset: bool) {
    if input.orphan(now) || reset {
        output.break_off();
    } else {
        output.close(now);
    }
}

impl Waiter for Kept {
    fn receive_kept(&self) {
        self.receive.store(true, Ordering::Relaxed);
    }
}

/// A queue pair with the driver's state.
pub struct End {
    /// The queue pair.
    pub core: RcCore,
    /// Its protection domain.
    pub pd: Arc<Pd>,
    /// Where its sends complete.
    pub send_cq: Arc<Cq>,
    /// Where its receives complete.
    pub recv_cq: Arc<Cq>,
    /// Where its receives come from, if they are shared.
    pub srq: Option<Arc<Srq>>,
    kept: Arc<Kept>,
    /// Its events that are not completions.
    pub events: Arc<Events>,
    pump: Pump,
    /// How often the stream was reported to be up.
    pub established: u32,
    /// Each report of the end of a stream.
    pub disconnected: Vec<Disconnect>,
    closing: Option<Closing>,
    attached: bool,
    /// Bytes moved since the start, both ways.
    moved: u64,
}

/// A stream that has ended and whose connection is still open, with the driver's machine.
pub struct Closing {
    machine: closing::Closing,
    kept: Kept,
    /// The end is reported when the peer's program has disconnected, too.
    pub(crate) awaits_answer: bool,
}

impl End {
    /// An end in RESET, with completion queues and a protection domain of its own.
    pub fn new(config: EndConfig) -> Self {
        Self::new_in(config, Pd::new())
    }

    /// The same, with an existing protection domain.
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
        let kept = Arc::new(Kept::default());
        let core = RcCore::new(config.qpn, init, Some(Arc::downgrade(&kept) as Weak<dyn Waiter>));
        Self {
            core,
            pd,
            send_cq,
            recv_cq,
            srq,
            kept,
            events,
            pump: Pump::default(),
            established: 0,
            disconnected: Vec::new(),
            closing: None,
            attached: false,
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
        self.attach_at(0, params)
    }

    /// The same, at this time.
    pub fn attach_at(&mut self, now: Time, params: StreamParams) -> Result<(), VerbsError> {
        self.core.attach(&at(now), params)?;
        self.attached = true;
        Ok(())
    }

    /// Changes attributes or state, as the driver does; [`Self::pump`] follows.
    pub fn modify(
        &mut self,
        now: Time,
        change: &QpModify,
        input: &mut Pipe,
        output: &mut Pipe,
    ) -> Result<(), VerbsError> {
        if matches!(change.state, Some(QpState::Err | QpState::Reset)) {
            let Self { core, pump, kept, moved, .. } = self;
            pump.receive(core, &at(now), &mut Network { now, input, output, kept, moved });
        }
        self.core.modify(change)
    }

    /// Takes the connection of a stream that has ended from the queue pair, which may get the next one.
    pub fn take_closing(&mut self) -> Option<Closing> {
        self.attached &= self.closing.is_none();
        self.closing.take()
    }

    /// What [`Self::pump`] is for a queue pair without a stream.
    pub fn idle(&mut self, now: Time) {
        _ = self.core.poll_transmit(&at(now));
        while let Some(action) = self.core.poll_action() {
            match action {
                Action::Wake(woken) => woken.wake(),
                Action::Disconnected { why, .. } => self.disconnected.push(why),
                _ => {}
            }
        }
    }

    /// The completions of its sends since the last call.
    pub fn sends(&self) -> Vec<Wc> {
        take(&self.send_cq)
    }

    /// The completions of its receives since the last call.
    pub fn recvs(&self) -> Vec<Wc> {
        take(&self.recv_cq)
    }

    /// Whether there are no completions to poll.
    pub fn is_empty_of_completions(&self) -> bool {
        self.send_cq.is_empty() && self.recv_cq.is_empty()
    }

    /// Bytes moved since the start, both ways; does not change while nothing happens.
    pub fn moved(&self) -> u64 {
        self.moved
    }

    /// Whether the stream is closed for good.
    pub fn is_closed(&self) -> bool {
        !self.attached
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
        let Self { core, pump, kept, moved, .. } = self;
        pump.send(core, &at(now), &mut Network { now, input, output, kept, moved });
        self.act(now, input, output);
        Ok(())
    }

    /// Posts a receive, and resumes a stalled stream.
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
            self.core.resume(&at(now));
            self.pump(now, input, output);
        }
        Ok(())
    }

    /// The process is killed: its system closes the connection as Linux does. What the process had sent still
    /// arrives.
    pub fn kill(&mut self, now: Time, input: &mut Pipe, output: &mut Pipe) {
        let at_end =
            self.closing.as_ref().is_some_and(|closing| closing.kept.reset_on_close.load(Ordering::Relaxed));
        let reset = at_end || self.kept.reset_on_close.load(Ordering::Relaxed);
        leave(now, input, output, reset);
        self.attached = false;
    }

    /// Disconnects in an orderly way.
    pub fn disconnect(&mut self, now: Time, input: &mut Pipe, output: &mut Pipe) {
        self.core.disconnect(&at(now), false);
        self.pump(now, input, output);
    }

    /// When it must be pumped even if nothing arrives.
    pub fn timeout(&mut self) -> Option<Time> {
        let closing = self.closing.as_ref().map(Closing::deadline);
        [self.core.poll_timeout().map(time), closing].into_iter().flatten().min()
    }

    /// Handles deadlines.
    pub fn handle_timeout(&mut self, now: Time) {
        self.core.handle_timeout(&at(now));
    }

    /// Moves what can be moved, in both directions.
    pub fn pump(&mut self, now: Time, input: &mut Pipe, output: &mut Pipe) {
        self.run(now, input, output);
        self.linger(now, input, output);
    }

    /// The same, but a stream that has ended is left to who calls [`Self::take_closing`].
    pub fn run(&mut self, now: Time, input: &mut Pipe, output: &mut Pipe) {
        let Self { core, pump, kept, moved, .. } = self;
        pump.run(core, &at(now), &mut Network { now, input, output, kept, moved });
        self.act(now, input, output);
    }

    /// Carries out the core's actions, as the driver does.
    fn act(&mut self, now: Time, input: &mut Pipe, output: &mut Pipe) {
        let Self { core, pump, kept, moved, .. } = self;
        let mut network = Network { now, input, output, kept, moved };
        while let Some(action) = pump.poll_action(core, &at(now), &mut network) {
            match action {
                Action::Wake(woken) => woken.wake(),
                Action::Established => self.established += 1,
                Action::Disconnected { why, unsent, end, answer } => {
                    // Of the next stream.
                    *pump = Pump::default();
                    network.kept.reset_on_close.store(false, Ordering::Relaxed);
                    let kept = Kept::default();
                    let manner = match end {
                        Ending::Plain => Manner::Plain,
                        Ending::Told => Manner::WholeOrReset,
                        Ending::Reset => Manner::Reset,
                    };
                    let held = answer == DisconnectReply::Owed;
                    let Network { input, output, moved, .. } = &mut network;
                    let closing = Network { now, input, output, kept: &kept, moved };
                    let machine = closing::Closing::new(unsent, manner, held, instant(now), &closing);
                    let awaits_answer = answer == DisconnectReply::Awaited;
                    self.closing = Some(Closing { machine, kept, awaits_answer });
                    self.disconnected.push(why);
                }
                Action::Muted | Action::Recall | Action::CheckHangUp | Action::CheckAnswers { .. } => {}
            }
        }
    }

    fn linger(&mut self, now: Time, input: &mut Pipe, output: &mut Pipe) {
        let Some(closing) = &mut self.closing else { return };
        let (over, moved) = closing.step(now, input, output);
        self.moved += moved;
        if over {
            self.closing = None;
            self.attached = false;
        }
    }
}

impl Closing {
    /// Continues as far as possible. Returns whether it is over, and how many bytes it has moved.
    pub fn step(&mut self, now: Time, input: &mut Pipe, output: &mut Pipe) -> (bool, u64) {
        let (mut moved, mut over) = (0, false);
        loop {
            let mut network = Network { now, input, output, kept: &self.kept, moved: &mut moved };
            match self.machine.step(instant(now), &mut network) {
                Step::Again => {}
                Step::Wait => break,
                Step::Over(_) => {
                    over = true;
                    break;
                }
            }
        }
        if over {
            // The system closes the connection.
            if self.kept.reset_on_close.load(Ordering::Relaxed) {
                output.break_off()
            } else {
                output.close(now)
            }
        }
        (over, moved)
    }

    /// The program has disconnected, too.
    pub fn release(&mut self) {
        self.machine.release();
    }

    /// When it must be stepped at the latest.
    pub fn deadline(&self) -> Time {
        time(self.machine.poll_timeout())
    }
}

fn at(now: Time) -> Now {
    Now::at(instant(now))
}

fn take(cq: &Cq) -> Vec<Wc> {
    let mut out = Vec::new();
    cq.poll(usize::MAX, |wc| out.push(wc));
    out
}

/// An end uses the world's generator for its own choices.
pub(crate) fn shuffle<T>(rng: &mut Rng, list: &mut [T]) {
    for i in (1..list.len()).rev() {
        let j = rng.size(0, i);
        list.swap(i, j);
    }
}
