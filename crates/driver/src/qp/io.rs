//! Moving bytes between a queue pair and its socket, in both directions, and what is due by the clock.

use std::cell::RefCell;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use uwarp_llp::tcp::{self, Piece, Scattered};
use uwarp_rnic::mem::MemSeg;
use uwarp_rnic::qp::{Disconnect, QpCore, RxPlan};

use super::{Conn, Inner, MUTE_LIMIT, Mute, Qp};

/// Bytes moved for one queue pair before another has its turn.
const TURN: usize = 512 * 1024;
/// Size of a thread's receive buffer.
const STAGE: usize = 256 * 1024;
/// How often one call sends and receives again past a Send that waits, before others have their turn.
const LOOKS: usize = 4;
/// Pieces handed to one sending call.
const PIECES: usize = 64;
/// How long a Send that arrived may wait for its receive once the peer is gone: the program may be slow, but it has to hear
/// of the end.
const GONE_LIMIT: Duration = Duration::from_secs(2);

thread_local! {
    static STAGING: RefCell<Box<[u8]>> = RefCell::new(vec![0; STAGE].into_boxed_slice());
}

/// One queue pair's turn to receive.
pub(super) struct Turn {
    /// Bytes so far.
    moved: usize,
    /// It may be interrupted to acknowledge what the peer waits for.
    heeds_acks: bool,
    /// And was: there is more to receive.
    interrupted: bool,
}

impl Qp {
    /// Moves what can be moved, in both directions.
    pub(super) fn pump(&self, inner: &mut Inner) {
        self.receive(inner);
        self.send(inner);
        self.wind_down(inner);
    }

    pub(super) fn send(&self, inner: &mut Inner) {
        for _ in 0..LOOKS {
            let stalled = inner.core.stalled();
            self.transmit(inner);
            if !stalled || inner.core.stalled() {
                return;
            }
            // What was sent waits for the peer, whose answer is to be received past the Send that waits here.
            self.receive(inner);
        }
        if let Some(conn) = &inner.conn {
            self.nic.engine().rearm(conn.token);
        }
    }

    pub(super) fn transmit(&self, inner: &mut Inner) {
        let Some(conn) = &mut inner.conn else { return };
        if self.room.load(Ordering::Relaxed) && self.room.swap(false, Ordering::Acquire) {
            conn.writable = true;
        }
        if conn.hold_until.is_some() || conn.broken {
            return;
        }
        conn.unfinished = false;
        let mut moved = 0;
        let mut most = PIECES;
        loop {
            inner.core.build();
            if !conn.writable {
                // Room is told of only while the descriptor is watched.
                self.watch(conn);
                return;
            }
            let Some(out) = inner.core.out().filter(|o| !o.is_empty()) else {
                if matches!(conn.mute, Mute::Look) && inner.core.muted() {
                    conn.mute = Mute::Until(Instant::now() + MUTE_LIMIT);
                    conn.new_deadline = true;
                }
                return;
            };
            let (result, bytes) = match out.only_staged() {
                Some(bytes) => (tcp::send_bytes(conn.fd.as_fd(), bytes), bytes.len()),
                None => {
                    let mut pieces = smallvec::SmallVec::<[Piece; PIECES]>::new();
                    let bytes = out.gather(most, |seg: MemSeg| pieces.push(Piece::new(seg.addr, seg.len)));
                    (tcp::send(conn.fd.as_fd(), &pieces), bytes)
                }
            };
            match result {
                Ok(n) => {
                    // A send that came up short has used up the room; the system tells when there is some again.
                    conn.writable = n == bytes;
                    inner.core.taken(n);
                    if n < bytes {
                        inner.core.no_room();
                    }
                    moved += n;
                    conn.new_deadline |= conn.silence.sent();
                    if moved >= TURN && conn.writable {
                        // Whoever hears of it first goes on: the system says again that there is room, but not to a thread that
                        // polls the socket unwatched.
                        conn.unfinished = true;
                        self.nic.engine().rearm(conn.token);
                        return;
                    }
                }
                Err(Errno::AGAIN) => {
                    conn.writable = false;
                    inner.core.no_room();
                }
                Err(Errno::INTR) => {}
                // The program unmapped what it had posted. One by one: the kernel does not say which piece it was, and the ones before
                // it are good.
                Err(Errno::FAULT) if most > 1 => most = 1,
                Err(Errno::FAULT) => {
                    tracing::warn!(qpn = self.qpn, "memory of a work request is not mapped any more");
                    inner.core.unreadable();
                    return;
                }
                Err(e) => {
                    tracing::debug!(qpn = self.qpn, "sending failed: {e}");
                    // The peer's last messages, and why it went, may lie in the socket unread.
                    conn.broken = true;
                    self.hung_up.store(true, Ordering::Release);
                    if !self.watch(conn) {
                        self.nic.engine().rearm(conn.token);
                    }
                    return;
                }
            }
        }
    }

    /// Receives what there is. Says whether that was anything: bytes, an end, an error.
    pub(super) fn receive(&self, inner: &mut Inner) -> bool {
        if inner.core.awaits_receive() && self.kept.swap(false, Ordering::Acquire) {
            go_on(inner);
        }
        let (mut turn, mut some) = (Turn { moved: 0, heeds_acks: true, interrupted: false }, false);
        loop {
            let Some(conn) = &mut inner.conn else { return some };
            let done = STAGING.try_with(|stage| match stage.try_borrow_mut() {
                Ok(mut stage) => self.receive_into(&mut inner.core, conn, &mut stage, &mut turn),
                // A completion's observer came back in: rare, and it may allocate.
                Err(_) => self.receive_into(&mut inner.core, conn, &mut vec![0; STAGE], &mut turn),
            });
            // A thread that is ending has no thread-local buffer any more.
            some |= done
                .unwrap_or_else(|_| self.receive_into(&mut inner.core, conn, &mut vec![0; STAGE], &mut turn));
            if !std::mem::take(&mut turn.interrupted) {
                break;
            }
            self.transmit(inner);
            // It may have to wait, but what comes does not.
            turn.heeds_acks = !inner.core.ack_presses();
        }
        let Some(conn) = &mut inner.conn else { return some };
        if !inner.core.awaits_receive() {
            (conn.rnr_deadline, conn.gone_deadline) = (None, None);
            return some;
        }
        conn.new_deadline = true;
        let from_now = |limit| Some(Instant::now() + limit);
        if conn.rnr_deadline.is_none() {
            conn.rnr_deadline = inner.core.rnr_timeout().and_then(from_now);
        }
        if !inner.core.stalled() {
            return some;
        }
        // Nobody reads the socket now, so nobody would find its end.
        self.watch(conn);
        if conn.gone_deadline.is_none() && self.hung_up.load(Ordering::Acquire) {
            conn.gone_deadline = from_now(GONE_LIMIT);
        }
        true
    }

    /// Has the system tell of the descriptor again, if it does not for the sake of a thread that polls. Whatever it is ready
    /// for is then told anew. Says whether that was so.
    pub(super) fn watch(&self, conn: &mut Conn) -> bool {
        let engine = self.nic.engine();
        let parked = conn.parked.take().is_some_and(|mark| engine.is_parked(mark));
        if parked {
            engine.unpark();
        }
        parked
    }

    pub(super) fn receive_into(
        &self,
        core: &mut QpCore,
        conn: &mut Conn,
        stage: &mut [u8],
        turn: &mut Turn,
    ) -> bool {
        // What a stalled queue pair left may be taken now.
        let mut some = false;
        if !conn.left_over.is_empty() && !core.stalled() && core.closing().is_none() {
            let used = core.handle_input(&conn.left_over);
            conn.left_over.drain(..used.min(conn.left_over.len()));
            some = used > 0;
        }
        loop {
            if core.closing().is_some() {
                return true;
            }
            let left = conn.left_over.len();
            let plan = core.rx_plan(&conn.left_over, stage.len());
            let (result, direct) = match &plan {
                RxPlan::Stop => return true,
                RxPlan::Stage { max } => {
                    let max = (*max).max(left + 1).min(stage.len());
                    let Some((head, tail)) = stage.get_mut(..max).and_then(|s| s.split_at_mut_checked(left))
                    else {
                        return true;
                    };
                    head.copy_from_slice(&conn.left_over);
                    let room = tail.len();
                    if room == 0 {
                        // Nothing received would look like the end.
                        return true;
                    }
                    let received = tcp::recv(conn.fd.as_fd(), tail);
                    (received.map(|bytes| Scattered { bytes, short: bytes < room }), 0)
                }
                RxPlan::Direct { place, tail } => {
                    let pieces: smallvec::SmallVec<[Piece; 8]> =
                        place.iter().map(|s| Piece::new(s.addr, s.len)).collect();
                    let direct: usize = place.iter().map(|s| s.len).sum();
                    let tail = stage.get_mut(..*tail).unwrap_or_default();
                    (tcp::recv_scattered(conn.fd.as_fd(), &pieces, tail), direct)
                }
            };
            let (n, short) = match result {
                Ok(Scattered { bytes, short }) => (bytes, short),
                Err(e) => {
                    if matches!(plan, RxPlan::Direct { .. }) {
                        core.direct_received(0);
                    }
                    match e {
                        Errno::INTR => continue,
                        Errno::AGAIN => return some,
                        Errno::FAULT => {
                            tracing::warn!(qpn = self.qpn, "a registered region is not mapped any more");
                            core.place_unmapped();
                        }
                        e => {
                            tracing::debug!(qpn = self.qpn, "receiving failed: {e}");
                            // The system's own questions to a quiet peer were not answered.
                            let dead = matches!(e, Errno::TIMEDOUT | Errno::HOSTUNREACH | Errno::NETUNREACH);
                            core.connection_lost(if dead { Disconnect::Timeout } else { Disconnect::Reset });
                        }
                    }
                    return true;
                }
            };
            some = true;
            if n == 0 {
                if matches!(plan, RxPlan::Direct { .. }) {
                    core.direct_received(0);
                }
                if core.awaits_receive() && !core.stalled() && left == 0 && direct == 0 {
                    // The program has as long for them as for a Send that waits in the socket.
                    self.hung_up.store(true, Ordering::Release);
                    core.stall();
                    return true;
                }
                end_of_input(core, conn, left > 0 || direct > 0);
                return true;
            }
            let staged = match &plan {
                RxPlan::Direct { .. } => {
                    core.direct_received(n.min(direct));
                    n.saturating_sub(direct)
                }
                _ => left + n,
            };
            let input = stage.get(..staged).unwrap_or(&[]);
            let used = core.handle_input(input);
            conn.left_over.clear();
            conn.left_over.extend_from_slice(input.get(used..).unwrap_or(&[]));
            if conn.left_over.is_empty() && conn.left_over.capacity() > 4096 {
                conn.left_over = Vec::new();
            }
            turn.moved += n;
            // A receive that came up short has emptied the socket, unless the end of the stream came with the last bytes: the
            // system will not say that again.
            if short && !self.hung_up.load(Ordering::Acquire) {
                return true;
            }
            if turn.moved >= TURN {
                self.nic.engine().rearm(conn.token);
                return true;
            }
            if turn.heeds_acks && core.ack_presses() {
                turn.interrupted = true;
                return true;
            }
        }
    }

    pub(super) fn run_deadlines(&self, inner: &mut Inner) {
        let now = Instant::now();
        if inner.retrying.is_some_and(|(at, _)| at <= now) {
            inner.core.retries_exceeded();
        }
        let Inner { core, conn: Some(conn), .. } = inner else { return };
        let over = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        (conn.timer, conn.new_deadline) = (None, true);
        if over(conn.hold_until) {
            conn.hold_until = None;
        }
        if over(conn.gone_deadline) {
            conn.gone_deadline = None;
            if core.stalled() && tcp::hung_up(conn.fd.as_fd()) {
                conn.broken |= tcp::broken(conn.fd.as_fd());
                end_of_input(core, conn, false);
            }
        }
        if over(conn.rnr_deadline) {
            conn.rnr_deadline = None;
            if core.awaits_receive() {
                core.receive_missing();
            }
        }
        if over(conn.send_deadline) {
            core.close();
        }
        if let Some(deadline) = conn.ack_deadline
            && deadline.at <= now
        {
            conn.ack_deadline = None;
            // What is newer has its own time, from when the lock is let go.
            if core.acks_sent() == deadline.acks {
                core.tell_placed();
            }
            core.ask_placed(core.messages_sent() == deadline.messages);
        }
        if let Mute::Until(at) = conn.mute
            && at <= now
        {
            conn.mute = Mute::No;
            if core.muted() {
                let [_, peer] = tcp::addresses(conn.fd.as_fd());
                tracing::warn!(
                    qpn = self.qpn,
                    ?peer,
                    "this end may not speak first, so posted work waits for the peer's first message (RFC 5044 section \
                     7.1.2); the peer asked for no peer-to-peer model"
                );
            }
        }
        if conn.silence.is_over(conn.fd.as_fd(), now) {
            core.connection_lost(Disconnect::Timeout);
        }
    }

    /// Closes a stream from which the program has disconnected, once all is sent.
    pub(super) fn wind_down(&self, inner: &mut Inner) {
        let disconnecting = inner.conn.as_ref().is_some_and(|conn| conn.send_deadline.is_some());
        if !disconnecting || inner.core.closing().is_some() {
            return;
        }
        if inner.core.send_idle() {
            // What came since.
            inner.core.tell_all();
            self.transmit(inner);
            inner.core.close();
        } else if inner.core.ack_waits() {
            // What was cut or acknowledged since the program disconnected may leave a rest that nobody asked about.
            inner.core.ask_placed(true);
            self.transmit(inner);
        }
    }
}

/// There may be a receive now for the Send that waits.
pub(super) fn go_on(inner: &mut Inner) {
    inner.core.unstall();
    if let Some(conn) = &mut inner.conn {
        // The next wait has its own time.
        (conn.rnr_deadline, conn.gone_deadline) = (None, None);
    }
}

/// Nothing more comes from the peer. `partial`: in the middle of an FPDU.
fn end_of_input(core: &mut QpCore, conn: &Conn, partial: bool) {
    if conn.broken {
        core.connection_lost(Disconnect::Reset);
    } else {
        core.peer_closed(partial);
    }
}
