//! The payload of segments.

/// Bytes of a message: one piece, or several of one length, each some bytes behind the one before it, as in
/// datagrams that the system has joined.
#[derive(Debug, Clone, Copy)]
pub struct RdBytes<'a> {
    /// From the first byte of the first piece to the last one of the last.
    bytes: &'a [u8],
    piece: usize,
    stride: usize,
    count: usize,
}

impl<'a> RdBytes<'a> {
    /// `count` pieces of `piece` bytes, `stride` bytes apart, the first one at the start of `bytes`.
    pub fn pieces(bytes: &'a [u8], piece: usize, stride: usize, count: usize) -> Self {
        Self { bytes, piece, stride, count }
    }

    /// Bytes of all pieces.
    pub fn len(&self) -> usize {
        self.piece * self.count
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The first piece: of what is one packet, or of no connection's, all there is.
    pub(in crate::qp) fn first(&self) -> &'a [u8] {
        self.bytes.get(..self.piece).unwrap_or(&[])
    }

    /// Each piece, and where it is in all of them.
    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, &'a [u8])> + use<'a> {
        let Self { bytes, piece, stride, count } = *self;
        (0..count).map(move |nth| {
            let at = nth * stride;
            (nth * piece, bytes.get(at..at + piece).unwrap_or(&[]))
        })
    }
}

impl<'a> From<&'a [u8]> for RdBytes<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self { bytes, piece: bytes.len(), stride: 0, count: 1 }
    }
}
