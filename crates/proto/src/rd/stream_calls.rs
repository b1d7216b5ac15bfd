//! What the exchange, its peer and the whole machine do for [`streams`](super::streams).

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use uwarp_wire::rd::chunk::{Chunk, Stream as StreamChunk, StreamCredit, StreamReset};
use uwarp_wire::rd::{contact, low};

use super::contact::{PostError, Rd};
use super::exchange::{Exchange, Phase};
use super::joined::Pieces;
use super::message::{Failure, Route, Ticket};
use super::packet::PacketBuf;
use super::peer::{Peer, PeerId};
use super::recovery::{Content, Contents};
use super::streams::{Came, Control, Stream, StreamEnd, StreamEvent, StreamNews};
use crate::clock::Now;

/// Nothing has come for so long from a peer with which there are streams: it is asked whether it is there.
const QUIET: Duration = Duration::from_secs(5);

/// What peers may open streams for, and names for those that they open.
#[derive(Debug, Default)]
pub(super) struct Services {
    pub(super) taken: BTreeSet<u32>,
    pub(super) next_ticket: u64,
}

impl Services {
    /// Never used twice in a process.
    pub(super) fn ticket(&mut self) -> Ticket {
        self.next_ticket += 1;
        Ticket(self.next_ticket)
    }
}

impl Exchange {
    /// Whether both ends know streams.
    pub(super) fn has_streams(&self) -> bool {
        self.start.features & contact::STREAMS != 0
    }

    /// There are bytes of streams that could be sent if there is room.
    pub(super) fn has_stream_bytes(&self) -> bool {
        self.phase == Phase::Up && self.streams.is_sendable()
    }

    /// A stream begins with its first bytes. Not in an Open: one that is answered with Cross was ignored in
    /// words.
    pub(super) fn open_stream(&mut self, stream: Stream) {
        if self.has_streams() {
            let is_responder = self.is_responder();
            self.streams.open(stream, is_responder);
        } else {
            let what = StreamNews::Ended(StreamEnd::Failed(Failure::Incompatible));
            self.streams.news.push(StreamEvent { stream: stream.ticket, what });
        }
    }

    /// Returns whether there was room for it.
    pub(super) fn on_stream(
        &mut self,
        chunk: &StreamChunk<'_>,
        pieces: &Pieces,
        services: &mut Services,
    ) -> bool {
        if !self.has_streams() {
            return true;
        }
        let route = self.start.route;
        let open = |service| services.taken.contains(&service).then(|| services.ticket());
        let is_responder = self.is_responder();
        self.streams.on_stream(is_responder, route, chunk, pieces, open) != Came::NoRoom
    }

    /// When the peer is asked whether it is there, because there are streams and it says nothing.
    pub(super) fn stream_ping_at(&self) -> Option<Instant> {
        let is_quiet = self.phase == Phase::Up && self.nothing_is_owed() && !self.streams.is_empty();
        is_quiet.then(|| self.last_heard() + QUIET)
    }

    /// Whether streams go first into this packet.
    pub(super) fn takes_turn(&mut self) -> bool {
        self.is_streams_turn = !self.is_streams_turn;
        self.is_streams_turn
    }

    pub(super) fn put_control(&mut self, out: &mut PacketBuf, contents: &mut Contents) {
        let mut said = 0;
        while let Some((control, granted)) = self.streams.next_control(said) {
            match control {
                Control::Credit(stream) => {
                    out.put_chunk(&Chunk::StreamCredit(StreamCredit { stream, limit: low(granted) }));
                }
                Control::Reset(stream) => {
                    out.put_chunk(&Chunk::StreamReset(StreamReset { stream, reason: 0 }));
                }
            }
            contents.push(Content::Control(control));
            said += 1;
        }
    }

    /// Fills the packet with parts of streams.
    pub(super) fn put_streams(
        &mut self,
        longest: usize,
        out: &mut PacketBuf,
        contents: &mut Contents,
        alone: &mut bool,
    ) {
        if self.phase != Phase::Up {
            return;
        }
        while let Some(room) = longest.checked_sub(out.packet_len()).filter(|room| *room > 0) {
            let Some(part) = self.streams.next_part(room, *alone) else { return };
            *alone = false;
            out.put_stream(&part.chunk, part.payload);
            contents.push(Content::Stream(part.content));
        }
    }
}

impl Peer {
    /// Streams that wait for the exchange begin in it.
    pub(super) fn begin_streams(&mut self) {
        if let Some(exchange) = self.exchange.as_mut().filter(|exchange| exchange.phase == Phase::Up) {
            self.waiting_streams.drain(..).for_each(|stream| exchange.open_stream(stream));
        }
    }

    pub(super) fn fail_streams(&mut self, failure: Failure) {
        let what = |stream: Stream| StreamEvent {
            stream: stream.ticket,
            what: StreamNews::Ended(StreamEnd::Failed(failure)),
        };
        self.stream_news.extend(self.waiting_streams.drain(..).map(what));
    }

    /// A call of the owner for one of its streams.
    fn with_stream(&mut self, ticket: Ticket, call: impl FnOnce(&mut Stream)) {
        if let Some(stream) = self.waiting_streams.iter_mut().find(|stream| stream.ticket == ticket) {
            call(stream);
        } else if let Some(exchange) = &mut self.exchange {
            exchange.streams.with(ticket, call);
        }
    }

    fn reset_stream(&mut self, ticket: Ticket) {
        let before = self.waiting_streams.len();
        self.waiting_streams.retain(|stream| stream.ticket != ticket);
        if self.waiting_streams.len() < before {
            let what = StreamNews::Ended(StreamEnd::Reset);
            self.stream_news.push(StreamEvent { stream: ticket, what });
        } else if let Some(exchange) = &mut self.exchange {
            exchange.streams.reset(ticket);
        }
    }

    pub(super) fn has_stream_news(&self) -> bool {
        let in_exchange = self.exchange.as_ref().is_some_and(|exchange| !exchange.streams.news.is_empty());
        in_exchange || !self.stream_news.is_empty()
    }

    /// What has happened to streams, in its order.
    pub(super) fn take_stream_news(&mut self, news: &mut Vec<StreamEvent>) {
        if let Some(exchange) = &mut self.exchange {
            self.stream_news.append(&mut exchange.streams.news);
        }
        news.append(&mut self.stream_news);
    }
}

impl Rd {
    /// From now on peers may open streams for this service, or not any more. Those that are open stay.
    pub fn take_streams(&mut self, service: u32, takes: bool) {
        if takes {
            self.services.taken.insert(service);
        } else {
            self.services.taken.remove(&service);
        }
    }

    /// Opens a stream to a service of a peer. It begins with the first bytes that are offered; contact with
    /// a peer that is not known begins at once. It ends with [`StreamNews::Ended`], once.
    pub fn open_stream(&mut self, now: &Now, route: Route, service: u32) -> Result<Ticket, PostError> {
        let id = self.peer_for(route)?;
        let ticket = self.services.ticket();
        let now = now.get();
        if let Some(peer) = self.peers.get_mut(id) {
            peer.waiting_streams.push(Stream::new(ticket, Some(service)));
            peer.waiting_since.get_or_insert(now);
        }
        self.streams.insert(ticket, id);
        self.after(now, id);
        Ok(ticket)
    }

    /// The owner has bytes of a stream up to this position. [`Payload`](super::Payload) asks for them.
    pub fn offer(&mut self, now: &Now, stream: Ticket, end: u64) {
        self.with_stream(now, stream, |peer| peer.with_stream(stream, |stream| stream.offer(end)));
    }

    /// Nothing follows what was offered of a stream.
    pub fn finish_stream(&mut self, now: &Now, stream: Ticket) {
        self.with_stream(now, stream, |peer| peer.with_stream(stream, Stream::finish));
    }

    /// The program has taken all bytes below this position.
    pub fn taken(&mut self, now: &Now, stream: Ticket, position: u64) {
        self.with_stream(now, stream, |peer| {
            if let Some(exchange) = &mut peer.exchange {
                exchange.streams.taken(stream, position);
            }
        });
    }

    /// The owner takes nothing of it any more. What was offered is sent, then its end. It is over when the
    /// peer has that, and after half a minute at the latest.
    ///
    /// There are bounds on how many are left, and on their bytes. Then one is ended: the one that was left
    /// first, of this peer if that has many, or else of all.
    pub fn leave_stream(&mut self, now: &Now, stream: Ticket) {
        let at = now.get();
        let mut kept = None;
        let leave = |stream: &mut Stream| {
            stream.leave(at);
            kept = Some(stream.kept());
        };
        self.with_stream(now, stream, |peer| peer.with_stream(stream, leave));
        if let Some(kept) = kept {
            self.left.enter(stream, kept);
        }
        while let Some(over) = self.left.excess(self.first_left_beside(stream)) {
            self.reset_stream(now, over);
        }
    }

    /// Another one of its peer, if that has many.
    fn first_left_beside(&self, stream: Ticket) -> Option<Ticket> {
        let peer = self.peers.get(*self.streams.get(&stream)?)?;
        peer.exchange.as_ref()?.streams.first_left_of_many().filter(|oldest| *oldest != stream)
    }

    /// Ends a stream without its rest.
    pub fn reset_stream(&mut self, now: &Now, stream: Ticket) {
        self.with_stream(now, stream, |peer| peer.reset_stream(stream));
    }

    /// What has happened to streams. To be asked after each call of another verb, until there is nothing.
    pub fn poll_stream_event(&mut self) -> Option<StreamEvent> {
        let event = self.stream_news.pop_front()?;
        if matches!(event.what, StreamNews::Ended(_)) {
            self.streams.remove(&event.stream);
            self.left.remove(event.stream);
        }
        Some(event)
    }

    /// Whether [`Self::poll_stream_event`] has something to say.
    pub fn has_stream_events(&self) -> bool {
        !self.stream_news.is_empty()
    }

    /// How the peer of a stream answers.
    pub fn stream_answers(&self, now: &Now, stream: Ticket) -> Option<StreamAnswers> {
        let peer = self.peers.get(*self.streams.get(&stream)?)?;
        let exchange = peer.exchange.as_ref()?;
        Some(StreamAnswers {
            doubtful: exchange.is_doubtful() && !exchange.is_stopped(),
            last: now.get().saturating_duration_since(exchange.last_heard()),
        })
    }

    fn with_stream(&mut self, now: &Now, stream: Ticket, call: impl FnOnce(&mut Peer)) {
        let Some(id) = self.streams.get(&stream).copied() else { return };
        if let Some(peer) = self.peers.get_mut(id) {
            call(peer);
            self.after(now.get(), id);
        }
    }

    /// After anything that concerns a peer: its streams' news are the process's.
    pub(super) fn gather_stream_news(&mut self, id: PeerId) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        let mut news = Vec::new();
        peer.take_stream_news(&mut news);
        for event in news {
            match event.what {
                StreamNews::Opened { .. } => _ = self.streams.insert(event.stream, id),
                StreamNews::Acknowledged(_) if self.left.is_any() => {
                    let kept =
                        peer.exchange.as_ref().map_or(0, |exchange| exchange.streams.kept(event.stream));
                    self.left.update(event.stream, kept);
                }
                _ => {}
            }
            self.stream_news.push_back(event);
        }
    }
}

/// How the peer's process answers what a stream sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamAnswers {
    /// Probes had no answer, and its system does not say that it is only stopped: it may be gone.
    pub doubtful: bool,
    /// Time since its last packet.
    pub last: Duration,
}
