//! One connection between a replica and the program, in either role. What both ends did is put into words,
//! which the table of cases holds.

use std::io::{ErrorKind, Read};
use std::net::TcpListener;
use std::time::Duration;

use uwarp_conformance::attacker::encode::{MARKERS, Setup, UWARP_A, Untagged, terminate};
use uwarp_conformance::attacker::peer::{End, Peer};
use uwarp_conformance::{Context, Outcome, fail, require};

use crate::adapter::{Adapter, Depths, Rtr, Verdict, split};
use crate::program::{Program, QUIET, World};
use crate::talk::{Reads, Talk};

/// How a connection ends after the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The adapter closes.
    Closes,
    /// The adapter aborts.
    Resets,
    /// The program disconnects.
    Program,
}

/// What happens once the first frame has come.
#[derive(Clone, Copy)]
pub enum Then {
    /// The connection comes up, and data goes both ways.
    Data(Ending),
    /// One end rejects: the program if the adapter is active, else the adapter's.
    Rejected,
    /// The adapter's program gets the request, and the adapter resets the connection instead of answering.
    Aborted,
    /// The peer's answer is changed on its way, and the adapter does what it does about a wrong one.
    Wrong(fn(&mut Setup)),
    /// The first FPDU is not of the kind that the driver tells its firmware to expect.
    Unknown,
    /// The adapter's frame is one that uwarp need not take: what becomes of it.
    Watched,
}

/// A connection.
#[derive(Clone, Copy)]
pub struct Scene {
    pub adapter: &'static dyn Adapter,
    /// The adapter's program's.
    pub depths: Depths,
    /// And its private data.
    pub private_data: &'static [u8],
    /// Arguments of uwarp's program, and its environment.
    pub program: &'static str,
    pub env: &'static [(&'static str, &'static str)],
    pub then: Then,
}

/// What a case saw, in the order in which it happened.
#[derive(Default)]
struct Notes {
    said: Vec<String>,
    /// The program waits for what will not come.
    waits: bool,
}

impl Notes {
    fn add(&mut self, note: impl Into<String>) {
        self.said.push(note.into());
    }
}

/// What both ends did, or why it failed, with what the program said of it.
fn finished(ran: Outcome<Notes>, program: Program) -> Outcome<String> {
    match ran {
        Ok(notes) => {
            let saw = if notes.waits { program.saw_so_far() } else { program.saw() };
            let all = [notes.said, vec![format!("program: {}", saw?)]].concat();
            Ok(all.join("; "))
        }
        Err(failure) => fail!("{failure}\n{}", program.text()),
    }
}

impl Scene {
    fn arguments(&self, first: &str) -> String {
        let close = matches!(self.then, Then::Data(Ending::Program));
        format!("{first} {} {}", self.program, if close { "close=self" } else { "" })
    }

    /// The adapter connects.
    pub fn active(&self, world: &World) -> Outcome<String> {
        let program = world.start(&self.arguments("listen"), self.env)?;
        let ran = self.connect(&program);
        finished(ran, program)
    }

    fn connect(&self, program: &Program) -> Outcome<Notes> {
        let mut peer = Peer::connect(program.port()?)?;
        let request = self.adapter.request(self.depths, self.private_data);
        peer.send(&request.bytes())?;
        let mut notes = Notes::default();
        let mut answer = match frame(&mut peer, self.adapter.one_segment())? {
            First::Frame(bytes) => bytes,
            First::Nothing(how) => {
                notes.add(format!("uwarp {how} without an answer"));
                notes.waits = true;
                return Ok(notes);
            }
        };
        if let Then::Wrong(change) = self.then {
            let Some((mut wrong, [])) = split(&answer) else { fail!("no frame to change: {answer:?}") };
            change(&mut wrong);
            answer = wrong.bytes();
        }
        match self.adapter.judge_reply(&request, self.depths, &answer) {
            Verdict::Up(rtr) => {
                require!(matches!(self.then, Then::Data(_)), "the adapter is content with {answer:?}");
                let markers = split(&answer).is_some_and(|(frame, _)| frame.flags & MARKERS != 0);
                self.talk_first(peer, rtr, markers, program, &mut notes)?;
            }
            Verdict::Rejected { program, private_data, resets } => {
                require!(matches!(self.then, Then::Rejected), "rejected: {answer:?}");
                let text = String::from_utf8_lossy(&private_data).into_owned();
                notes.add(format!("the adapter's program gets {program} \"{text}\""));
                if resets {
                    peer.reset();
                } else {
                    notes.add(ended(&mut peer)?);
                }
            }
            verdict => {
                require!(
                    matches!(self.then, Then::Wrong(_)),
                    "the adapter answers {verdict:?} to {answer:?}"
                );
                self.refuse(peer, verdict, &mut notes)?;
            }
        }
        Ok(notes)
    }

    /// The adapter sends first.
    fn talk_first(
        &self,
        mut peer: Peer,
        rtr: Rtr,
        markers: bool,
        program: &Program,
        notes: &mut Notes,
    ) -> Outcome {
        notes.add(match rtr {
            Rtr::None => "no indication",
            Rtr::Write { .. } => "the adapter indicates by a Write",
            Rtr::Read { .. } => "the adapter indicates by a Read",
        });
        if rtr == Rtr::None {
            quiet(&peer)?;
        }
        let mut talk = Talk::new(&mut peer, self.adapter, markers);
        talk.begin(rtr)?;
        talk.exchange(self.reads(), self.program.contains("first=yes"))?;
        self.end(peer, program, notes)
    }

    /// What an adapter does instead of bringing the connection up.
    fn refuse(&self, mut peer: Peer, verdict: Verdict, notes: &mut Notes) -> Outcome {
        match verdict {
            Verdict::Terminate(codes) => {
                let (layer, kind, code) = codes;
                notes.add(format!("the adapter sends Terminate {layer}/{kind}/{code}"));
                peer.send(&Untagged::terminate(terminate(layer, kind, code, 0, &[])).fpdu())?;
                peer.finish();
                notes.add(ended(&mut peer)?);
            }
            Verdict::Reset => {
                notes.add("the adapter resets");
                peer.reset();
            }
            _ => {
                notes.add("the adapter closes");
                peer.finish();
                notes.add(ended(&mut peer)?);
            }
        }
        Ok(())
    }

    fn end(&self, mut peer: Peer, program: &Program, notes: &mut Notes) -> Outcome {
        let Then::Data(ending) = self.then else { return Ok(()) };
        program.says("data good")?;
        match ending {
            Ending::Closes => {
                peer.finish();
                notes.add(format!("the adapter closes; {}", ended(&mut peer)?));
            }
            Ending::Resets => {
                notes.add("the adapter resets");
                peer.reset();
            }
            Ending::Program => notes.add(ended(&mut peer)?),
        }
        Ok(())
    }

    /// Whether uwarp's program may read, and whether it lets the adapter read.
    fn reads(&self) -> Reads {
        Reads { program: !self.program.contains("ord=0"), adapter: !self.program.contains("ird=0") }
    }

    /// The program connects.
    pub fn passive(&self, world: &World) -> Outcome<String> {
        let listener = TcpListener::bind("127.0.0.1:0").context("listen")?;
        let port = listener.local_addr().context("address")?.port();
        listener.set_nonblocking(true).context("non-blocking")?;
        let program = world.start(&self.arguments(&format!("connect {port}")), self.env)?;
        let ran = self.accept(&listener, &program);
        finished(ran, program)
    }

    fn accept(&self, listener: &TcpListener, program: &Program) -> Outcome<Notes> {
        let mut notes = Notes::default();
        while let Some(mut peer) = next(listener, program)? {
            let First::Frame(bytes) = frame(&mut peer, self.adapter.one_segment())? else {
                fail!("no request")
            };
            let Some((asked, _)) = split(&bytes) else { fail!("half a request: {bytes:?}") };
            let known = if asked.flags & UWARP_A == 0 { "" } else { " with uwarp's bit" };
            notes.add(format!("uwarp asks with revision {}{known}", asked.revision));
            let mut done = true;
            match self.adapter.judge_request(&bytes) {
                Verdict::Up(_) if matches!(self.then, Then::Aborted) => {
                    notes.add("its program gets the request; the adapter resets");
                    peer.reset();
                    done = false;
                }
                Verdict::Up(rtr) => self.answer(peer, &asked, rtr, program, &mut notes)?,
                Verdict::Answer(answer) => {
                    notes.add("the driver rejects");
                    peer.send(&answer)?;
                    peer.finish();
                    notes.add(ended(&mut peer)?);
                }
                _ => {
                    notes.add("the adapter resets");
                    peer.reset();
                    done = false;
                }
            }
            if done {
                break;
            }
        }
        Ok(notes)
    }

    /// The adapter's program accepts or rejects.
    fn answer(
        &self,
        mut peer: Peer,
        asked: &Setup,
        rtr: Rtr,
        program: &Program,
        notes: &mut Notes,
    ) -> Outcome {
        if let Then::Rejected = self.then {
            let Some(answer) = self.adapter.rejection(asked, self.private_data) else {
                fail!("this adapter rejects by a reset")
            };
            peer.send(&answer)?;
            peer.finish();
            notes.add(format!("the adapter's program rejects; {}", ended(&mut peer)?));
            return Ok(());
        }
        peer.send(&self.adapter.reply(asked, self.depths, self.private_data))?;
        let mut talk = Talk::new(&mut peer, self.adapter, asked.flags & MARKERS != 0);
        if let Then::Watched = self.then {
            notes.add(talk.serve_to_the_end()?);
            return Ok(());
        }
        let (what, fits) = talk.await_rtr(rtr)?;
        notes.add(format!("uwarp indicates by {what}"));
        if let Then::Unknown = self.then {
            require!(!fits, "{rtr:?} was expected, and came");
            notes.add("what the firmware does with that is not known; here it resets");
            peer.reset();
            return Ok(());
        }
        require!(fits, "agreed on {rtr:?}, and the first FPDU is {what}");
        talk.exchange(self.reads(), self.program.contains("first=yes"))?;
        self.end(peer, program, notes)
    }
}

/// Waits for the next connection; `None` when the program has ended instead.
fn next(listener: &TcpListener, program: &Program) -> Outcome<Option<Peer>> {
    loop {
        let runs = program.is_running();
        match listener.accept() {
            Ok((tcp, _)) => {
                tcp.set_nonblocking(false).context("blocking")?;
                return Peer::over(tcp).map(Some);
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock && runs => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(None),
            Err(e) => fail!("accept: {e}"),
        }
    }
}

/// What comes first.
enum First {
    Frame(Vec<u8>),
    /// uwarp ends the connection: so.
    Nothing(&'static str),
}

/// Reads a set-up frame. A driver that takes each segment for a frame gets what one read returns: uwarp must
/// send its frames in one piece, and nothing behind them.
fn frame(peer: &mut Peer, one_segment: bool) -> Outcome<First> {
    let mut bytes = Vec::new();
    let mut buffer = [0; 1024];
    let how = loop {
        match peer.tcp.read(&mut buffer) {
            Ok(0) => break "closes",
            Err(e) if e.kind() == ErrorKind::ConnectionReset => break "resets",
            Ok(n) => bytes.extend(&buffer[..n]),
            Err(e) => fail!("reading a frame: {e}"),
        }
        if one_segment || split(&bytes).is_some() {
            quiet(peer)?;
            return Ok(First::Frame(bytes));
        }
    };
    require!(bytes.is_empty(), "hung up within a frame: {bytes:?}");
    Ok(First::Nothing(how))
}

/// Nothing may come now: the peer waits for us. Its end may.
fn quiet(peer: &Peer) -> Outcome {
    std::thread::sleep(QUIET);
    peer.tcp.set_nonblocking(true).context("non-blocking")?;
    let came = peer.tcp.peek(&mut [0; 64]);
    peer.tcp.set_nonblocking(false).context("blocking")?;
    require!(!matches!(came, Ok(n) if n > 0), "{came:?} bytes where nothing may come");
    Ok(())
}

/// How uwarp ends the stream.
fn ended(peer: &mut Peer) -> Outcome<String> {
    let answer = peer.answer()?;
    let how = if answer.end == End::Closed { "uwarp closes" } else { "uwarp resets" };
    Ok(match answer.terminate()? {
        Some((layer, kind, code)) => format!("uwarp sends Terminate {layer}/{kind}/{code} and closes"),
        None => how.into(),
    })
}
