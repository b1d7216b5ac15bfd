//! A queue pair with its streams: the one that it has, and those that are still being closed, as the driver
//! keeps them.

use uwarp_cm::machine::ConnKey;
use uwarp_llp::carrier::SetUp;
use uwarp_rnic::VerbsError;
use uwarp_rnic::qp::{Disconnect, QpModify, StreamParams};

use super::network::{TcpId, network};
use crate::Time;
use crate::end::{Closing, End};
use crate::net::Pipe;

/// A stream that a queue pair has, or that is being closed.
pub struct Stream {
    /// The connection that it began on.
    pub conn: ConnKey,
    /// The network's name for it.
    pub id: TcpId,
    /// Which end.
    pub side: usize,
    /// Closed when it is dropped.
    _set_up: Box<dyn SetUp>,
    /// Its first FPDU has come.
    pub established: bool,
}

/// See the head of this file.
pub struct Streams {
    /// The queue pair.
    pub end: End,
    /// Its stream.
    pub stream: Option<Stream>,
    closing: Vec<(Closing, Stream, Option<Disconnect>)>,
}

/// What a stream does, for the connection manager.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum News {
    /// It is up.
    Established(ConnKey, TcpId, usize),
    /// It has ended.
    Ended(ConnKey, TcpId, usize, Disconnect),
}

impl Streams {
    /// Without a stream.
    pub fn new(end: End) -> Self {
        Self { end, stream: None, closing: Vec::new() }
    }

    /// Gives the queue pair a stream on this connection; refused, the connection comes back.
    pub fn attach(
        &mut self,
        now: Time,
        conn: ConnKey,
        set_up: Box<dyn SetUp>,
        params: StreamParams,
    ) -> Result<(TcpId, usize), (VerbsError, Box<dyn SetUp>)> {
        let ends = set_up.ends();
        let found = network(|network| network.find(ends.local, ends.peer));
        let (id, side) = found.expect("a connection that is open");
        if let Err(error) = self.end.attach_at(now, params) {
            return Err((error, set_up));
        }
        self.stream = Some(Stream { conn, id, side, _set_up: set_up, established: false });
        Ok((id, side))
    }

    /// Changes attributes or state. To be pumped afterwards.
    pub fn modify(&mut self, now: Time, change: &QpModify) -> Result<(), VerbsError> {
        let Self { end, stream, .. } = self;
        match stream {
            Some(stream) => stream.with_pipes(|input, output| end.modify(now, change, input, output)),
            None => end.core.modify(change),
        }
    }

    /// The program has disconnected: a peer that has done so before is told.
    pub fn answer(&mut self) {
        self.closing.iter_mut().for_each(|(closing, ..)| closing.release());
    }

    /// The queue pair is destroyed: nothing is reported.
    pub fn forget_reports(&mut self) {
        self.answer();
        self.closing.iter_mut().for_each(|(.., report)| *report = None);
    }

    /// Moves what can be moved. Returns whether anything was.
    pub fn pump(&mut self, now: Time, news: &mut Vec<News>) -> bool {
        let Self { end, stream, closing } = self;
        let before = (end.moved(), end.established, end.disconnected.len(), closing.len());
        if end.timeout().is_some_and(|at| at <= now) {
            end.handle_timeout(now);
            assert!(
                end.timeout().is_none_or(|at| at > now),
                "a queue pair's deadline is over after its timeout"
            );
        }
        match stream {
            Some(stream) => stream.with_pipes(|input, output| end.run(now, input, output)),
            None => end.idle(now),
        }
        if let Some(stream) = stream
            && end.established > before.1
        {
            stream.established = true;
            news.push(News::Established(stream.conn, stream.id, stream.side));
        }
        if let Some(why) = end.disconnected.get(before.2).copied()
            && let Some(stream) = stream.take()
        {
            let Some(left) = end.take_closing() else { unreachable!("a stream that has ended is closed") };
            let report = left.awaits_answer.then_some(why);
            if report.is_none() {
                news.push(News::Ended(stream.conn, stream.id, stream.side, why));
            }
            closing.push((left, stream, report));
        }
        let mut moved = 0;
        closing.retain_mut(|(closing, stream, report)| {
            let (over, bytes) = stream.with_pipes(|input, output| closing.step(now, input, output));
            moved += bytes;
            if let Some(why) = report.take_if(|_| over) {
                news.push(News::Ended(stream.conn, stream.id, stream.side, why));
            }
            !over
        });
        let after = (end.moved(), end.established, end.disconnected.len(), closing.len());
        before != after || moved > 0
    }

    /// When it must be pumped even if nothing arrives.
    pub fn next_time(&mut self) -> Option<Time> {
        let closing = self.closing.iter().map(|(closing, ..)| closing.deadline());
        closing.chain(self.end.timeout()).min()
    }

    /// Streams that it has, or had and still closes.
    pub fn count(&self) -> usize {
        usize::from(self.stream.is_some()) + self.closing.len()
    }
}

impl Stream {
    fn with_pipes<T>(&self, f: impl FnOnce(&mut Pipe, &mut Pipe) -> T) -> T {
        network(|network| {
            let tcp = network.tcp.get_mut(&self.id).expect("an end that is not closed");
            let (input, output) = tcp.pipes(self.side);
            f(input, output)
        })
    }
}
