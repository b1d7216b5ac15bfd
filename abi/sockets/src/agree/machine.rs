//! How two ends agree that their TCP connection becomes an iWARP stream. No sockets; the time is an argument.
//!
//! ```text
//!        end that accepted (A)                                  end that connected (C)
//!  Quiet │ first call of the program                                             │ Quiet
//! Asking │ ──── HELLO ──────────────── datagrams ──────────────────────────────▶ │ first call of its program
//!        │ ◀──────────────────────────────────────────────────────── QUESTION ── │ across hosts only:
//!        │ ──── HELLO with the nonce of the QUESTION ──────────────────────────▶ │ no other HELLO counts
//!        │ ◀─────────────────────────────────────────────────────────WELCOME ─── │ Looking
//!  Asked │ ──── marker "Mark" ──────── in the stream ──────────────────────────▶ │
//!        │ ◀──────────────────────────────────────────────── marker "Yes" ────── │ Agreed
//! Agreed │ ──── MPA's request ───────── (docs/adr/043) ────────────────────────▶ │
//! ```
//!
//! Datagrams commit nobody to anything: one that is lost costs the upgrade or a repetition. A is committed by
//! its marker: it sends no plain byte until C's marker, or C's end, says how C has decided. C is committed by
//! its own. Both markers are in the stream, so no byte can be on the wrong side of one. docs/adr/044 says why
//! it is so.
//!
//! Who is the peer is decided before any of this: on one host by its descriptor of the connection, across
//! hosts by the key of the rule (docs/adr/044). What is not proven does not come here.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::inbound::Found;
use super::said::Why;
use super::wire::{Datagram, Ends, Kind, Nonce, Pattern, Word, pattern};
use uwarp_preload::rules::Key;

/// Which end this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// It connected. It responds to MPA's request.
    Connected,
    /// It accepted.
    Accepted,
}

/// Pauses behind the HELLOs of an end that accepted. The program that connected may first use the connection
/// seconds later (sockperf does after two), and hears then those that wait for it.
const HELLOS_MS: [u64; 9] = [2, 10, 50, 150, 300, 500, 1000, 2000, 4000];
/// Pauses behind the WELCOMEs of an end that connected.
const WELCOMES_MS: [u64; 7] = [2, 10, 50, 150, 300, 500, 1000];
/// As many refusals of HELLO end it, of those since bytes have come from the other end: before, its library
/// may not be ready. A datagram and its refusal may be on their way then.
const REFUSALS: u8 = 3;
/// How long an end that connected waits for a HELLO.
const FOR_HELLO: Duration = Duration::from_secs(5);
/// Pauses of NEVER, while late WELCOMEs are answered.
const FAREWELLS_MS: [u64; 3] = [100, 900, 2000];

/// What the owner has to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Send this datagram.
    Send(Datagram),
    /// Come between the program and its socket, and make all that a stream needs; then
    /// [`Agreement::prepared`]. From here on this pattern is looked for in what comes.
    Prepare(Pattern),
    /// Send this marker as the last plain bytes.
    Mark(Pattern, Word),
    /// Make the stream, and send this marker as the last plain bytes; if the stream cannot be made, send the
    /// second one and stay with plain bytes.
    Respond(Pattern),
    /// Make the stream; the peer has sent its last plain byte.
    Initiate,
    /// The connection stays TCP.
    Stay,
    /// No marker is expected any more.
    Doubt,
    /// The peer has broken the protocol: end the connection with an error.
    Break,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The program has not used the connection.
    Quiet,
    /// A: HELLO is sent. C: HELLO may come.
    Asking,
    /// Until [`Agreement::prepared`].
    Preparing,
    /// A: its marker is sent, and C's is looked for. C: WELCOME is sent, and A's marker is looked for.
    Marking,
    /// Decided.
    Over,
}

/// The agreement of one end.
#[derive(Debug)]
pub struct Agreement {
    role: Role,
    ends: Ends,
    /// Of the rule, for connections to other hosts.
    key: Option<Key>,
    accepted: Nonce,
    connected: Nonce,
    stage: Stage,
    /// A has sent NEVER and repeats it.
    farewell: bool,
    /// The program has done something after which there is no upgrade.
    vetoed: bool,
    /// Of the pauses.
    step: usize,
    refusals: u8,
    /// Another user has the name of the connection, as far as is known.
    foreign: bool,
    /// Why a stream cannot be made, if not for want of room.
    obstacle: Option<Why>,
    welcomes: u32,
    /// It stays TCP.
    why: Option<Why>,
    next: Option<Instant>,
}

fn after(now: Instant, ms: u64) -> Option<Instant> {
    now.checked_add(Duration::from_millis(ms))
}

impl Agreement {
    /// `nonce`: of this end.
    pub fn new(role: Role, ends: Ends, nonce: Nonce, key: Option<Key>) -> Self {
        let (connected, accepted) = match role {
            Role::Connected => (nonce, [0; 16]),
            Role::Accepted => ([0; 16], nonce),
        };
        Self {
            role,
            ends,
            key,
            accepted,
            connected,
            stage: Stage::Quiet,
            farewell: false,
            vetoed: false,
            step: 0,
            refusals: 0,
            foreign: false,
            obstacle: None,
            welcomes: 0,
            why: None,
            next: None,
        }
    }

    /// The same end of the same connection, in another process.
    pub fn anew(&self, nonce: Nonce) -> Self {
        Self::new(self.role, self.ends, nonce, self.key)
    }

    /// The key with which datagrams are made.
    pub fn key(&self) -> Option<&Key> {
        self.key.as_ref()
    }

    /// The nonces of the markers that this end sends.
    fn own_pattern(&self) -> Pattern {
        match self.role {
            Role::Connected => self.pattern(&self.connected, &self.accepted),
            Role::Accepted => self.pattern(&self.accepted, &self.connected),
        }
    }

    /// And of those of the other end.
    fn peers_pattern(&self) -> Pattern {
        match self.role {
            Role::Connected => self.pattern(&self.accepted, &self.connected),
            Role::Accepted => self.pattern(&self.connected, &self.accepted),
        }
    }

    fn pattern(&self, own: &Nonce, peers: &Nonce) -> Pattern {
        pattern(own, peers, &self.ends, self.key.as_ref())
    }

    /// The connection.
    pub fn ends(&self) -> Ends {
        self.ends
    }

    /// The other end.
    pub fn peer(&self) -> SocketAddr {
        match self.role {
            Role::Connected => self.ends.accepted,
            Role::Accepted => self.ends.connected,
        }
    }

    /// Which end this is.
    pub fn role(&self) -> Role {
        self.role
    }

    /// The nonce of the end that accepted. Of that end: it never changes.
    pub fn accepted(&self) -> Nonce {
        self.accepted
    }

    /// Why it stays TCP.
    pub fn why(&self) -> Why {
        self.why.unwrap_or(Why::Vetoed)
    }

    /// When [`Self::timeout`] is to be called.
    pub fn next(&self) -> Option<Instant> {
        self.next
    }

    /// Whether datagrams have no meaning any more.
    pub fn is_deaf(&self) -> bool {
        self.stage == Stage::Over && !self.farewell
    }

    /// The program's first call.
    pub fn used(&mut self, now: Instant) -> Option<Action> {
        if self.stage != Stage::Quiet {
            return None;
        }
        self.stage = Stage::Asking;
        match self.role {
            Role::Connected => {
                self.next = now.checked_add(FOR_HELLO);
                None
            }
            Role::Accepted => Some(self.repeat(now, Kind::Hello)),
        }
    }

    fn missing(&self) -> Why {
        if self.vetoed { Why::Vetoed } else { self.obstacle.unwrap_or(Why::NoRoom) }
    }

    fn say(&self, kind: Kind) -> Action {
        let Self { ends, accepted, connected, .. } = *self;
        Action::Send(Datagram { kind, accepted, connected, ends })
    }

    fn pauses(&self) -> &'static [u64] {
        match self.role {
            Role::Accepted => &HELLOS_MS,
            Role::Connected => &WELCOMES_MS,
        }
    }

    fn repeat(&mut self, now: Instant, kind: Kind) -> Action {
        self.next = self.pauses().get(self.step).and_then(|ms| after(now, *ms));
        self.step += 1;
        self.say(kind)
    }

    fn over(&mut self) {
        (self.stage, self.next, self.farewell) = (Stage::Over, None, false);
    }

    fn stay(&mut self, why: Why) -> Vec<Action> {
        self.why = Some(why);
        self.over();
        vec![Action::Stay]
    }

    /// A gives up. C may have said WELCOME and look for a marker, so it is told, and late WELCOMEs are
    /// answered.
    fn stay_and_tell(&mut self, now: Instant, why: Why) -> Vec<Action> {
        self.why = Some(why);
        self.over();
        self.farewell = true;
        self.step = 0;
        vec![Action::Stay, self.bid_farewell(now)]
    }

    fn bid_farewell(&mut self, now: Instant) -> Action {
        self.next = FAREWELLS_MS.get(self.step).and_then(|ms| after(now, *ms));
        self.farewell = self.next.is_some();
        self.step += 1;
        self.say(Kind::Never)
    }

    /// A datagram has come, made with the key. `proven`: by the peer itself, who has shown its end of the
    /// connection. If not, it may be an old one, or from somebody who receives nothing at the peer's address.
    pub fn datagram(&mut self, datagram: &Datagram, proven: bool, now: Instant) -> Vec<Action> {
        if !datagram.ends.are(&self.ends) {
            return Vec::new();
        }
        match (self.role, datagram.kind, self.stage) {
            (Role::Connected, Kind::Hello, Stage::Asking) => {
                if !proven && datagram.connected != self.connected {
                    let question = Datagram { kind: Kind::Question, connected: self.connected, ..*datagram };
                    return vec![Action::Send(question)];
                }
                if self.vetoed {
                    return self.stay(Why::Vetoed);
                }
                self.accepted = datagram.accepted;
                (self.stage, self.next) = (Stage::Preparing, None);
                vec![Action::Prepare(self.peers_pattern())]
            }
            // WELCOME was lost.
            (Role::Connected, Kind::Hello, Stage::Marking) if datagram.accepted == self.accepted => {
                self.welcomes += 1;
                vec![self.say(Kind::Welcome)]
            }
            (Role::Connected, Kind::Never, Stage::Marking) if datagram.accepted == self.accepted => {
                self.stay(Why::Peer)
            }
            // However long it takes, there is nothing to doubt.
            (Role::Connected, Kind::Marked, Stage::Marking) if datagram.accepted == self.accepted => {
                self.next = None;
                Vec::new()
            }
            (Role::Accepted, _, _) if datagram.accepted != self.accepted => Vec::new(),
            (Role::Accepted, Kind::Question, Stage::Asking) => {
                self.connected = datagram.connected;
                vec![self.say(Kind::Hello)]
            }
            (Role::Accepted, Kind::Welcome, Stage::Marking) => vec![self.say(Kind::Marked)],
            (Role::Accepted, Kind::Welcome, Stage::Asking) => {
                self.connected = datagram.connected;
                if self.vetoed {
                    return self.stay_and_tell(now, Why::Vetoed);
                }
                (self.stage, self.next) = (Stage::Preparing, None);
                vec![Action::Prepare(self.peers_pattern())]
            }
            (Role::Accepted, Kind::Welcome, Stage::Over) if self.farewell => {
                self.connected = datagram.connected;
                vec![self.say(Kind::Never)]
            }
            _ => Vec::new(),
        }
    }

    /// All is made that a stream needs, and the library is between the program and its socket; or not.
    pub fn prepared(&mut self, done: bool, now: Instant) -> Vec<Action> {
        if self.stage != Stage::Preparing {
            return Vec::new();
        }
        (self.stage, self.step) = (Stage::Marking, 0);
        match (self.role, done && !self.vetoed) {
            (Role::Connected, true) => {
                self.welcomes = 1;
                vec![self.repeat(now, Kind::Welcome)]
            }
            (Role::Connected, false) => self.stay(self.missing()),
            (Role::Accepted, true) => {
                vec![Action::Mark(self.own_pattern(), Word::Mark)]
            }
            (Role::Accepted, false) => self.stay_and_tell(now, self.missing()),
        }
    }

    /// The peer's system has refused a datagram: no socket is there. `heard`: bytes of the peer's program had
    /// come before. It cannot send any before its library is ready.
    pub fn refused(&mut self, heard: bool) -> Vec<Action> {
        match (self.role, self.stage) {
            (Role::Accepted, Stage::Asking) => {
                self.refusals += u8::from(heard);
                if self.refusals < REFUSALS { Vec::new() } else { self.stay(Why::Refused) }
            }
            // Nobody got the only WELCOME. After more than one, somebody may have got an earlier one.
            (Role::Connected, Stage::Marking) if self.welcomes == 1 => self.stay(Why::Peer),
            (Role::Accepted, Stage::Over) => {
                self.over();
                Vec::new()
            }
            _ => Vec::new(),
        }
    }

    /// A stream cannot be made, for this reason.
    pub fn cannot(&mut self, why: Why) {
        self.obstacle = Some(why);
    }

    /// Whether the last datagram was not sent because another user has the connection's name. He may let go
    /// of it, so this end goes on asking.
    pub fn name_is_foreign(&mut self, foreign: bool) {
        self.foreign = foreign;
    }

    /// The way on which the peer's datagrams come has ended. On one host no datagram is lost there, so none
    /// comes any more; the marker may be on its way.
    pub fn unlinked(&mut self, heard: bool) -> Vec<Action> {
        match (self.role, self.stage) {
            (Role::Accepted, Stage::Asking) => self.refused(heard),
            (Role::Connected, Stage::Marking) => {
                self.next = None;
                vec![Action::Doubt]
            }
            (_, Stage::Over) => {
                self.over();
                Vec::new()
            }
            _ => Vec::new(),
        }
    }

    /// The time of [`Self::next`] has come.
    pub fn timeout(&mut self, now: Instant) -> Vec<Action> {
        if self.next.is_none_or(|next| now < next) {
            return Vec::new();
        }
        self.next = None;
        match (self.role, self.stage) {
            (Role::Accepted, Stage::Asking) if self.step < HELLOS_MS.len() => {
                vec![self.repeat(now, Kind::Hello)]
            }
            (Role::Accepted, Stage::Asking) => {
                self.stay_and_tell(now, if self.foreign { Why::OtherUser } else { Why::NoAnswer })
            }
            (Role::Connected, Stage::Asking) => self.stay(Why::NotAsked),
            (Role::Connected, Stage::Marking) if self.step < WELCOMES_MS.len() => {
                self.welcomes += 1;
                vec![self.repeat(now, Kind::Welcome)]
            }
            (Role::Connected, Stage::Marking) => vec![Action::Doubt],
            (_, Stage::Over) if self.farewell => vec![self.bid_farewell(now)],
            _ => Vec::new(),
        }
    }

    /// What was looked for has come.
    pub fn found(&mut self, found: Found) -> Vec<Action> {
        if self.stage != Stage::Marking {
            return Vec::new();
        }
        self.over();
        self.why = Some(if self.vetoed { Why::Vetoed } else { Why::Peer });
        let own = self.own_pattern();
        match (self.role, found) {
            (Role::Connected, Found::Marker(Word::Mark)) if self.vetoed => {
                vec![Action::Mark(own, Word::No), Action::Stay]
            }
            (Role::Connected, Found::Marker(Word::Mark)) => vec![Action::Respond(own)],
            (Role::Accepted, Found::Marker(Word::Yes)) => vec![Action::Initiate],
            (Role::Accepted, Found::Marker(Word::No)) => vec![Action::Stay],
            _ => vec![Action::Break],
        }
    }

    /// The peer sends no more, or the connection has failed. An end that has sent everything cannot answer a
    /// marker, so this is an answer.
    pub fn ended(&mut self) -> Vec<Action> {
        if self.stage == Stage::Over { Vec::new() } else { self.stay(Why::Ended) }
    }

    /// The program does something after which there must be no upgrade. True: that is so; false: this end has
    /// committed itself already.
    pub fn veto(&mut self) -> bool {
        self.vetoed = true;
        match (self.role, self.stage) {
            (_, Stage::Quiet | Stage::Asking | Stage::Preparing) => true,
            (role, Stage::Marking) => role == Role::Connected,
            (_, Stage::Over) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Two {
        now: Instant,
        a: Agreement,
        c: Agreement,
    }

    impl Two {
        fn new() -> Self {
            let ends = Ends {
                connected: "10.0.0.1:40000".parse().unwrap(),
                accepted: "10.0.0.2:80".parse().unwrap(),
            };
            Self {
                now: Instant::now(),
                a: Agreement::new(Role::Accepted, ends, [1; 16], None),
                c: Agreement::new(Role::Connected, ends, [2; 16], None),
            }
        }

        fn with_key() -> Self {
            let mut two = Self::new();
            (two.a.key, two.c.key) = (Some(Key([7; 16])), Some(Key([7; 16])));
            two
        }

        fn hello(&mut self) -> Datagram {
            sent(&self.a.used(self.now).into_iter().collect::<Vec<_>>())
        }

        /// C has said WELCOME.
        fn welcome(&mut self) -> Datagram {
            let hello = self.hello();
            assert_eq!(self.c.used(self.now), None);
            let actions = self.c.datagram(&hello, true, self.now);
            assert_eq!(actions, [Action::Prepare(self.a.pattern(&[1; 16], &[2; 16]))]);
            sent(&self.c.prepared(true, self.now))
        }

        /// A has sent its marker.
        fn marked(&mut self) {
            let welcome = self.welcome();
            let actions = self.a.datagram(&welcome, true, self.now);
            assert_eq!(actions, [Action::Prepare(self.c.pattern(&[2; 16], &[1; 16]))]);
            let actions = self.a.prepared(true, self.now);
            assert_eq!(actions, [Action::Mark(self.c.pattern(&[1; 16], &[2; 16]), Word::Mark)]);
        }
    }

    fn sent(actions: &[Action]) -> Datagram {
        match actions {
            [.., Action::Send(datagram)] => *datagram,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn two_ends_agree() {
        let mut two = Two::new();
        two.marked();
        let actions = two.c.found(Found::Marker(Word::Mark));
        assert_eq!(actions, [Action::Respond(two.c.pattern(&[2; 16], &[1; 16]))]);
        assert_eq!(two.a.found(Found::Marker(Word::Yes)), [Action::Initiate]);
        assert!(two.a.is_deaf() && two.c.is_deaf());
        assert_eq!((two.a.next(), two.c.next()), (None, None));
    }

    /// A HELLO of anybody was answered with the nonce, and the connection got a stand-in.
    #[test]
    fn a_hello_without_proof_is_asked_for_the_nonce() {
        for mut two in [Two::new(), Two::with_key()] {
            let hello = two.hello();
            two.c.used(two.now);
            let question = sent(&two.c.datagram(&hello, false, two.now));
            assert_eq!((question.kind, question.accepted), (Kind::Question, [1; 16]));
            let guess = Datagram { connected: [3; 16], ..hello };
            assert_eq!(sent(&two.c.datagram(&guess, false, two.now)).kind, Kind::Question);
            let foreign = Datagram { accepted: [9; 16], ..question };
            assert_eq!(two.a.datagram(&foreign, false, two.now), []);
            let again = sent(&two.a.datagram(&question, false, two.now));
            assert_eq!((again.kind, again.connected), (Kind::Hello, [2; 16]));
            let actions = two.c.datagram(&again, false, two.now);
            assert!(matches!(actions[..], [Action::Prepare(_)]));
            let welcome = sent(&two.c.prepared(true, two.now));
            assert!(matches!(two.a.datagram(&welcome, false, two.now)[..], [Action::Prepare(_)]));
            // Markers are not what was said in datagrams, if there is a key.
            let open = two.a.peers_pattern() == pattern(&[2; 16], &[1; 16], &two.a.ends, None);
            assert_eq!(open, two.a.key.is_none());
        }
    }

    #[test]
    fn a_link_that_ends_leaves_the_marker_to_come() {
        let mut two = Two::new();
        two.marked();
        assert_eq!((two.a.unlinked(true), two.c.unlinked(true)), (vec![], vec![Action::Doubt]));
        assert_eq!(two.c.next(), None);
        assert!(matches!(two.c.found(Found::Marker(Word::Mark))[..], [Action::Respond(_)]));
    }

    #[test]
    fn a_marker_that_is_long_on_its_way_is_not_doubted() {
        let mut two = Two::new();
        two.marked();
        let again = sent(&two.c.timeout(two.c.next().unwrap()));
        let marked = sent(&two.a.datagram(&again, true, two.now));
        assert_eq!(marked.kind, Kind::Marked);
        let foreign = Datagram { accepted: [9; 16], ..marked };
        assert_eq!((two.c.datagram(&foreign, true, two.now), two.c.next().is_some()), (vec![], true));
        assert_eq!((two.c.datagram(&marked, true, two.now), two.c.next()), (vec![], None));
        assert_eq!(two.c.found(Found::Marker(Word::Mark)).len(), 1);
    }

    #[test]
    fn nobody_there_is_tcp() {
        let mut two = Two::new();
        two.hello();
        for _ in 0..100 {
            assert_eq!(two.a.refused(false), [], "the other end may not be ready");
        }
        for refusal in 1..=REFUSALS {
            let actions = two.a.refused(true);
            assert_eq!(actions.is_empty(), refusal < REFUSALS);
        }
        assert!(two.a.is_deaf());
        two.c.used(two.now);
        let late = two.c.next().unwrap();
        assert_eq!(two.c.timeout(late), [Action::Stay]);
    }

    #[test]
    fn a_name_that_another_user_keeps_is_the_reason() {
        for (last, why) in [(true, Why::OtherUser), (false, Why::NoAnswer)] {
            let mut two = Two::new();
            two.hello();
            two.a.name_is_foreign(true);
            while two.a.stage != Stage::Over {
                two.a.name_is_foreign(last);
                two.a.timeout(two.a.next().unwrap());
            }
            assert_eq!(two.a.why(), why);
        }
    }

    #[test]
    fn silence_ends_hellos_and_late_welcomes_hear_so() {
        let mut two = Two::new();
        let hello = two.hello();
        let mut hellos = 1;
        let actions = loop {
            let actions = two.a.timeout(two.a.next().unwrap());
            match &actions[..] {
                [Action::Send(again)] => assert_eq!(*again, hello),
                _ => break actions,
            }
            hellos += 1;
        };
        assert_eq!(hellos, HELLOS_MS.len());
        assert_eq!(actions[0], Action::Stay);
        two.c.used(two.now);
        two.c.datagram(&hello, true, two.now);
        let welcome = sent(&two.c.prepared(true, two.now));
        let never = sent(&two.a.datagram(&welcome, true, two.now));
        assert_eq!(two.c.datagram(&never, true, two.now), [Action::Stay]);
        while let Some(next) = two.a.next() {
            assert_eq!(sent(&two.a.timeout(next)).kind, Kind::Never);
        }
        assert!(two.a.is_deaf());
    }

    #[test]
    fn lost_welcomes_are_repeated_without_end_of_patience() {
        let mut two = Two::new();
        let first = two.welcome();
        let hello = two.a.say(Kind::Hello);
        let Action::Send(hello) = hello else { panic!() };
        assert_eq!(sent(&two.c.datagram(&hello, true, two.now)), first);
        loop {
            let actions = two.c.timeout(two.c.next().unwrap());
            if actions == [Action::Doubt] {
                break;
            }
            assert_eq!(sent(&actions), first);
        }
        // A's marker may still be on its way.
        assert_eq!(two.c.refused(true), []);
        assert!(matches!(two.c.found(Found::Marker(Word::Mark))[..], [Action::Respond(_)]));
    }

    #[test]
    fn the_only_welcome_that_is_refused_ends_it() {
        let mut two = Two::new();
        two.welcome();
        assert_eq!(two.c.refused(true), [Action::Stay]);
    }

    #[test]
    fn liars_are_not_heard() {
        let mut two = Two::new();
        let hello = two.hello();
        two.c.used(two.now);
        let elsewhere =
            Datagram { ends: Ends { accepted: "10.0.0.9:80".parse().unwrap(), ..hello.ends }, ..hello };
        assert_eq!(two.c.datagram(&elsewhere, true, two.now), []);
        let welcome = Datagram { kind: Kind::Welcome, accepted: [9; 16], ..hello };
        assert_eq!(two.a.datagram(&welcome, true, two.now), []);
        // Not before a HELLO, and not from the wrong end.
        for kind in [Kind::Welcome, Kind::Never] {
            assert_eq!(two.c.datagram(&Datagram { kind, ..hello }, true, two.now), []);
        }
        assert_eq!(two.a.datagram(&hello, true, two.now), []);
        two.c.datagram(&hello, true, two.now);
        two.c.prepared(true, two.now);
        let never = Datagram { kind: Kind::Never, accepted: [9; 16], ..hello };
        assert_eq!(two.c.datagram(&never, true, two.now), []);
        assert_eq!(two.c.found(Found::Marker(Word::Yes)), [Action::Break]);
    }

    #[test]
    fn whoever_vetoes_early_enough_has_tcp() {
        // A, before WELCOME.
        let mut two = Two::new();
        let welcome = two.welcome();
        assert!(two.a.veto());
        let never = sent(&two.a.datagram(&welcome, true, two.now));
        assert_eq!((never.kind, two.c.datagram(&never, true, two.now)), (Kind::Never, vec![Action::Stay]));
        // A, after its marker.
        let mut two = Two::new();
        two.marked();
        assert!(!two.a.veto());
        // C, before A's marker.
        let mut two = Two::new();
        two.marked();
        assert!(two.c.veto());
        let own = two.c.pattern(&[2; 16], &[1; 16]);
        assert_eq!(two.c.found(Found::Marker(Word::Mark)), [Action::Mark(own, Word::No), Action::Stay]);
        assert_eq!(two.a.found(Found::Marker(Word::No)), [Action::Stay]);
    }

    #[test]
    fn the_peers_end_is_an_answer() {
        let mut two = Two::new();
        two.marked();
        assert_eq!((two.a.ended(), two.c.ended()), (vec![Action::Stay], vec![Action::Stay]));
        assert_eq!((two.a.ended(), two.c.ended()), (vec![], vec![]));
    }

    #[test]
    fn an_end_without_a_device_stays() {
        let mut two = Two::new();
        let hello = two.hello();
        two.c.used(two.now);
        two.c.datagram(&hello, true, two.now);
        assert_eq!(two.c.prepared(false, two.now), [Action::Stay]);
        let mut two = Two::new();
        let welcome = two.welcome();
        two.a.datagram(&welcome, true, two.now);
        let never = sent(&two.a.prepared(false, two.now));
        assert_eq!(two.c.datagram(&never, true, two.now), [Action::Stay]);
    }
}
