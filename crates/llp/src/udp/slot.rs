//! What one call has received into one slot of its buffer.

use super::Incoming;

/// A datagram, or several of one sender that the system has joined: all of one length, the last may be
/// shorter.
#[derive(Debug, Clone, Copy)]
pub struct Slot<'a> {
    bytes: &'a [u8],
    /// Of each, but perhaps the last.
    length: usize,
    incoming: Incoming,
}

impl<'a> Slot<'a> {
    pub(super) fn new(bytes: &'a [u8], length: usize, incoming: Incoming) -> Self {
        Self { bytes, length, incoming }
    }

    /// Where they came from, and to what address; place and length are those of all together. If it is
    /// truncated, the last one is.
    pub fn incoming(&self) -> &Incoming {
        &self.incoming
    }

    /// How many they are, at least one.
    pub fn count(&self) -> usize {
        self.bytes.len().div_ceil(self.length.max(1)).max(1)
    }

    /// The datagrams in order of arrival.
    #[inline]
    pub fn datagrams(&self) -> Datagrams<'a> {
        Datagrams { rest: Some(self.bytes), length: self.length }
    }

    /// The same, each with its own place.
    pub fn each(&self) -> impl Iterator<Item = (&'a [u8], Incoming)> + use<'a> {
        let (whole, mut at) = (self.incoming, 0);
        self.datagrams().map(move |bytes| {
            let (start, len) = (whole.start + at, bytes.len());
            at += len;
            (bytes, Incoming { start, len, truncated: whole.truncated && at == whole.len, ..whole })
        })
    }
}

/// See [`Slot::datagrams`].
#[derive(Debug, Clone)]
pub struct Datagrams<'a> {
    rest: Option<&'a [u8]>,
    length: usize,
}

impl<'a> Datagrams<'a> {
    /// The next one, with all that are behind it.
    #[inline]
    pub fn rest(&self) -> &'a [u8] {
        self.rest.unwrap_or(&[])
    }
}

impl<'a> Iterator for Datagrams<'a> {
    type Item = &'a [u8];

    #[inline]
    fn next(&mut self) -> Option<&'a [u8]> {
        let rest = self.rest?;
        let (first, behind) = rest.split_at_checked(self.length).unwrap_or((rest, &[]));
        // (One without a byte is a datagram, too.)
        self.rest = Some(behind).filter(|behind| !behind.is_empty());
        Some(first)
    }
}
