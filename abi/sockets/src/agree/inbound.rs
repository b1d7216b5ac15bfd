//! Plain bytes that were received ahead of the program, in which the peer's marker is looked for. No sockets,
//! no clock.

use super::wire::{MARKER_LEN, Pattern, Word};

/// Beginnings of a marker that are shorter than this come up by chance.
const BY_CHANCE: usize = 8;

/// As many bytes that the program has taken are given up.
const COMPACT: usize = 1 << 20;

/// What was received.
#[derive(Debug, Default)]
pub struct Inbound {
    bytes: Vec<u8>,
    /// Up to here the program has them.
    taken: usize,
    /// Up to here they are the program's. What follows is like the beginning of a marker.
    plain: usize,
    /// The marker that is looked for.
    pattern: Option<Pattern>,
    found: Option<Found>,
    /// Few bytes that are like the beginning of a marker are given to the program at once. If they were one,
    /// it cannot be taken out any more.
    hasty: bool,
    end: Option<End>,
}

/// How the peer's bytes have ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// It sends no more.
    Done,
    /// The connection has failed; the program has not been told.
    Failed(i32),
}

/// What was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// A marker. It is taken out; what follows it is not the program's yet.
    Marker(Word),
    /// The nonces of a marker and no word.
    Nonsense,
}

impl Inbound {
    /// From now on a marker is looked for.
    pub fn look_for(&mut self, pattern: Pattern) {
        self.pattern = Some(pattern);
        self.scan();
    }

    /// All that is here and all that comes is the program's.
    pub fn is_plain(&mut self) {
        (self.pattern, self.found) = (None, None);
        self.scan();
    }

    /// No marker is expected any more, but one may come: the program does not wait for the end of what is
    /// like the beginning of one.
    pub fn be_hasty(&mut self) {
        self.hasty = true;
        self.scan();
    }

    /// More bytes.
    pub fn push(&mut self, more: &[u8]) {
        // The program may never catch up with what is received.
        let done = self.taken.min(self.plain);
        if done == self.bytes.len() || (done >= COMPACT && done >= self.bytes.len() / 2) {
            self.bytes.drain(..done);
            (self.taken, self.plain) = (self.taken - done, self.plain - done);
        }
        self.bytes.extend_from_slice(more);
        self.scan();
    }

    /// No more bytes come. Few that are like the beginning of a marker are the program's; more of them are
    /// one that was cut off.
    pub fn finish(&mut self, end: End) {
        self.end.get_or_insert(end);
        if self.found.is_none() {
            if self.pattern.is_some() && self.bytes.len() - self.plain >= BY_CHANCE {
                if self.taken > self.plain {
                    // The program has some of it, and must know.
                    self.end = Some(End::Failed(libc::ECONNRESET));
                }
                self.bytes.truncate(self.plain.max(self.taken));
            }
            self.pattern = None;
            self.plain = self.bytes.len();
        }
    }

    /// Whether a marker is looked for, and none has come.
    pub fn is_looking(&self) -> bool {
        self.pattern.is_some() && self.found.is_none()
    }

    /// What was found.
    pub fn found(&self) -> Option<Found> {
        self.found
    }

    /// How the peer's bytes have ended.
    pub fn end(&self) -> Option<End> {
        self.end
    }

    /// Takes the error that the program must be told.
    pub fn take_error(&mut self) -> Option<i32> {
        match self.end {
            Some(End::Failed(errno)) => {
                self.end = Some(End::Done);
                Some(errno)
            }
            _ => None,
        }
    }

    /// The program's bytes.
    pub fn ready(&self) -> &[u8] {
        self.bytes.get(self.taken..self.shown()).unwrap_or_default()
    }

    fn shown(&self) -> usize {
        let few = self.bytes.len() - self.plain < BY_CHANCE;
        if self.hasty && few && self.found.is_none() { self.bytes.len() } else { self.plain }
    }

    /// Bytes that are here, the program's or not.
    pub fn len(&self) -> usize {
        self.bytes.len() - self.taken
    }

    /// Bytes behind a marker.
    pub fn behind(&self) -> usize {
        if self.found.is_some() { self.bytes.len() - self.plain } else { 0 }
    }

    /// The program has taken so many.
    pub fn take(&mut self, bytes: usize) {
        self.taken = (self.taken + bytes).min(self.shown());
        if self.taken == self.bytes.len() && self.plain == self.taken {
            // The memory too: there may have been much of it, and will hardly be as much again.
            *self = Self { taken: 0, plain: 0, bytes: Vec::new(), ..std::mem::take(self) };
        }
    }

    fn scan(&mut self) {
        if self.found.is_some() {
            return;
        }
        let Some(pattern) = self.pattern else {
            self.plain = self.bytes.len();
            return;
        };
        while let Some(rest) = self.bytes.get(self.plain..).filter(|rest| !rest.is_empty()) {
            let Some(at) = rest.iter().position(|byte| *byte == pattern[0]) else {
                self.plain = self.bytes.len();
                return;
            };
            self.plain += at;
            let here = self.bytes.get(self.plain..).unwrap_or_default();
            let len = here.len().min(pattern.len());
            if here.get(..len) != pattern.get(..len) {
                self.plain += 1;
            } else if let Some(marker) = here.get(..MARKER_LEN) {
                let word = marker.get(pattern.len()..).and_then(Word::parse);
                let whole = self.taken <= self.plain;
                self.found = Some(word.filter(|_| whole).map_or(Found::Nonsense, Found::Marker));
                self.bytes.drain(self.plain..self.plain + MARKER_LEN);
                self.taken = self.taken.min(self.plain);
                return;
            } else {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::wire::marker;
    use super::*;

    fn nonces() -> Pattern {
        std::array::from_fn(|at| if at < 16 { 100 + at as u8 } else { 184 + at as u8 })
    }

    /// All that the program gets if the bytes come in pieces of this length.
    fn read_in_pieces(bytes: &[u8], piece: usize) -> (Vec<u8>, Inbound) {
        let mut inbound = Inbound::default();
        inbound.look_for(nonces());
        let mut got = Vec::new();
        for part in bytes.chunks(piece) {
            inbound.push(part);
            let ready = inbound.ready().to_vec();
            inbound.take(ready.len());
            got.extend(ready);
        }
        (got, inbound)
    }

    #[test]
    fn a_marker_is_found_wherever_the_network_cuts_it() {
        let plain: Vec<u8> = (0..300).map(|i| (i * 7 % 256) as u8).chain([100, 101, 100]).collect();
        let all = [&plain[..], &marker(&nonces(), Word::Yes), b"behind"].concat();
        for piece in 1..all.len() {
            let (got, mut inbound) = read_in_pieces(&all, piece);
            assert_eq!(got, plain, "in pieces of {piece}");
            assert_eq!(inbound.found(), Some(Found::Marker(Word::Yes)));
            assert_eq!((inbound.ready(), inbound.behind()), (&[][..], 6));
            inbound.is_plain();
            assert_eq!((inbound.ready(), inbound.behind()), (&b"behind"[..], 0));
        }
    }

    #[test]
    fn what_is_like_a_marker_is_the_programs() {
        let mut almost = marker(&nonces(), Word::Mark);
        almost[31] ^= 1;
        for piece in 1..60 {
            let (got, inbound) = read_in_pieces(&[&almost[..], b"more"].concat(), piece);
            assert_eq!(got, [&almost[..], b"more"].concat());
            assert_eq!(inbound.found(), None);
        }
    }

    #[test]
    fn nonces_without_a_word_are_nonsense() {
        let mut bytes = marker(&nonces(), Word::Mark);
        bytes[47] ^= 1;
        assert_eq!(read_in_pieces(&bytes, 48).1.found(), Some(Found::Nonsense));
    }

    #[test]
    fn the_beginning_of_a_marker_waits_for_its_end() {
        let (got, mut inbound) = read_in_pieces(&[1, 2, 100, 101], 4);
        assert_eq!((&got[..], inbound.len()), (&[1, 2][..], 2));
        inbound.finish(End::Done);
        assert_eq!(inbound.ready(), [100, 101]);
        let (_, mut inbound) = read_in_pieces(&[1, 2, 100, 101], 4);
        inbound.be_hasty();
        assert_eq!(inbound.ready(), [100, 101]);
        // More of it is no chance.
        let (_, mut inbound) = read_in_pieces(&marker(&nonces(), Word::Mark)[..9], 9);
        inbound.be_hasty();
        assert_eq!(inbound.ready(), []);
        inbound.push(&marker(&nonces(), Word::Mark)[9..]);
        assert_eq!(inbound.found(), Some(Found::Marker(Word::Mark)));
    }

    #[test]
    fn a_marker_whose_beginning_the_program_has_is_an_error() {
        let marker = marker(&nonces(), Word::Mark);
        for taken in 0..=5 {
            let (_, mut inbound) = read_in_pieces(b"plain", 5);
            inbound.be_hasty();
            inbound.push(&marker[..5]);
            assert_eq!(inbound.ready(), &marker[..5]);
            inbound.take(taken);
            inbound.push(&marker[5..]);
            let found = if taken == 0 { Found::Marker(Word::Mark) } else { Found::Nonsense };
            assert_eq!((inbound.found(), inbound.ready()), (Some(found), &[][..]));
        }
        // What only began like one is the program's, whatever it has of it.
        let (_, mut inbound) = read_in_pieces(b"plain", 5);
        inbound.be_hasty();
        inbound.push(&marker[..5]);
        inbound.take(3);
        inbound.push(b"other");
        assert_eq!(inbound.ready(), [&marker[3..5], b"other"].concat());
        assert_eq!(inbound.found(), None);
    }

    #[test]
    fn a_marker_that_is_cut_off_is_not_the_programs() {
        for len in 0..MARKER_LEN {
            let (_, mut inbound) = read_in_pieces(b"plain", 5);
            inbound.push(&marker(&nonces(), Word::Mark)[..len]);
            inbound.finish(End::Done);
            assert_eq!(inbound.ready().len(), if len < BY_CHANCE { len } else { 0 });
        }
    }

    #[test]
    fn a_program_that_lags_behind_does_not_fill_memory() {
        let mut inbound = Inbound::default();
        inbound.look_for(nonces());
        inbound.push(&[1; 3000]);
        for _ in 0..20_000 {
            inbound.push(&[1; 1000]);
            inbound.take(1000);
        }
        assert_eq!(inbound.ready().len(), 3000);
        assert!(inbound.bytes.capacity() <= 4 * COMPACT, "{}", inbound.bytes.capacity());
    }

    #[test]
    fn an_error_is_told_once() {
        let mut inbound = Inbound::default();
        inbound.finish(End::Failed(104));
        assert_eq!((inbound.take_error(), inbound.take_error()), (Some(104), None));
        assert_eq!(inbound.end(), Some(End::Done));
    }
}
