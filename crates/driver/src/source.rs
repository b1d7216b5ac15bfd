//! What the engine serves, and the names for it.

/// What a descriptor is ready for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Readiness {
    /// Bytes, a connection or the end of the stream can be read.
    pub readable: bool,
    /// There is room to send, or a connection attempt has ended.
    pub writable: bool,
    /// Error or hang-up; reading tells which.
    pub hangup: bool,
}

impl Readiness {
    /// Possibly input and room: the source looks for both.
    pub(crate) const ANY: Self = Self { readable: true, writable: true, hangup: false };

    /// What either of the two says.
    pub(crate) fn or(self, other: Self) -> Self {
        Self {
            readable: self.readable || other.readable,
            writable: self.writable || other.writable,
            hangup: self.hangup || other.hangup,
        }
    }
}

/// What a watched descriptor is reported for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interest {
    /// Input and hang-up.
    Input,
    /// Room to send, too.
    InputAndRoom,
}

/// Something that is served when its descriptor is ready, when its readiness was
/// [raised](crate::Engine::raise), or when its timer has expired.
///
/// Calls come from any thread that makes progress, possibly from two at once and possibly without need; they
/// must not block.
pub trait Source: Send + Sync {
    /// It became ready.
    fn ready(&self, readiness: Readiness);
    /// The timer set with [`Engine::set_timer`](crate::Engine::set_timer) expired.
    fn timeout(&self);
    /// What the last call of [`Self::ready`] has found.
    fn found(&self) -> Found {
        Found::News
    }
    /// Whether a thread has polled the descriptor, without the engine, since the last call of this.
    fn polled(&self) -> bool {
        true
    }
    /// The process exits: begin to close what can be closed without loss.
    fn exit(&self) {}
}

/// What a source had to do that was ready. (What becomes ready in memory is reported also where a thread
/// that polls looks by itself.)
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// Nothing: a thread had looked there before.
    Nothing,
    /// Something that a thread of the program would have found soon: it has looked there since the last time.
    Polled,
    /// Something.
    News,
}

/// Names a registered source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token(pub(crate) u64);

impl Token {
    /// The name by which a lower layer that reports by itself calls it.
    pub fn name(self) -> u64 {
        self.0
    }

    pub(crate) const WAKE: Self = Self(u64::MAX);
    /// The engine's bell, for a thread that does not wait for the engine.
    pub(crate) const CALL: Self = Self(u64::MAX - 1);

    pub(crate) fn new(index: usize, generation: u32) -> Self {
        Self(u64::from(generation) << 32 | (index as u64 & 0xFFFF_FFFF))
    }

    pub(crate) fn index(self) -> usize {
        (self.0 & 0xFFFF_FFFF) as usize
    }

    /// Whether the other one, of the same index, was made before it. (They are numbered modulo 2^31.)
    pub(crate) fn is_newer_than(self, other: Self) -> bool {
        let later = (self.0 >> 32).wrapping_sub(other.0 >> 32) & 0x7FFF_FFFF;
        later != 0 && later < 0x4000_0000
    }
}
