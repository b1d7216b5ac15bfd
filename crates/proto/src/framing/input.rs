//! What a receiver finds in its input.

/// What was found at the start of the input.
#[derive(Debug, PartialEq, Eq)]
pub enum Step<'a> {
    /// The frame at the start of the input is incomplete; at least `need` bytes are needed. (`need` may grow
    /// if the length field itself was missing.)
    Incomplete {
        /// Bytes that must be there, from the start of the input.
        need: usize,
    },
    /// A whole frame.
    Ulpdu {
        /// The DDP segment in it.
        ulpdu: &'a [u8],
        /// Bytes of the input that the frame took.
        consumed: usize,
    },
}

/// The start of a large frame.
#[derive(Debug, Clone, Copy)]
pub struct Large<'a> {
    /// The start of its ULPDU, the whole DDP header at least.
    pub ulpdu: &'a [u8],
    /// Bytes of the whole ULPDU.
    pub ulpdu_len: usize,
}

/// The rest of a frame whose payload is received straight into place.
#[derive(Debug, Clone, Copy)]
pub struct Rest {
    payload: usize,
    trailer: usize,
    read_ahead: usize,
}

impl Rest {
    /// `payload` bytes of payload are missing, `trailer` bytes follow it, and a receive may read `read_ahead`
    /// bytes beyond them.
    pub(super) fn new(payload: usize, trailer: usize, read_ahead: usize) -> Self {
        Self { payload, trailer, read_ahead }
    }

    /// Payload bytes that are still to come.
    #[inline]
    pub fn payload(&self) -> usize {
        self.payload
    }

    /// Bytes to receive after the payload: the frame's end and the start of the next one.
    #[inline]
    pub fn behind(&self) -> usize {
        self.trailer + self.read_ahead
    }

    /// `n` more bytes of the payload are in place.
    #[inline]
    pub fn placed(&mut self, n: usize) {
        self.payload = self.payload.saturating_sub(n);
    }

    /// How many bytes of `input`, which begins after the payload, are the end of the frame; `None` while some
    /// are missing.
    #[inline]
    pub fn end(&self, input: &[u8]) -> Option<usize> {
        (self.payload == 0 && input.len() >= self.trailer).then_some(self.trailer)
    }
}
