//! Bytes from a position of a stream on, that leave in their order.

/// Bytes are added to the first of two buffers until it has so many, then to the second one, which takes its
/// place when it is used up. So nothing is ever moved, and much may wait in the second one.
const BLOCK: usize = 128 * 1024;
/// Room of a buffer that is kept while there are no bytes.
const KEPT: usize = 16 * 1024;

/// See above.
#[derive(Debug, Default)]
pub(super) struct Ring {
    front: Vec<u8>,
    /// Bytes of `front` that have left.
    gone: usize,
    back: Vec<u8>,
    /// The position of the first byte.
    start: u64,
}

impl Ring {
    pub(super) fn len(&self) -> usize {
        self.front.len() - self.gone + self.back.len()
    }

    /// The position of the first byte.
    pub(super) fn start(&self) -> u64 {
        self.start
    }

    /// The position behind the last one.
    pub(super) fn end(&self) -> u64 {
        self.start + self.len() as u64
    }

    /// So many bytes from this position on, or fewer, in up to two pieces.
    pub(super) fn get(&self, position: u64, len: usize) -> [&[u8]; 2] {
        let from = usize::try_from(position.saturating_sub(self.start)).unwrap_or(usize::MAX);
        let first = part(self.front.get(self.gone..).unwrap_or_default(), from, len);
        let from = from.saturating_sub(self.front.len() - self.gone);
        [first, part(&self.back, from, len - first.len())]
    }

    /// The bytes below this position leave.
    pub(super) fn drop_below(&mut self, position: u64) {
        let len = usize::try_from(position.saturating_sub(self.start)).unwrap_or(usize::MAX).min(self.len());
        self.start += len as u64;
        self.gone += len;
        if self.gone >= self.front.len() {
            self.gone -= self.front.len();
            std::mem::swap(&mut self.front, &mut self.back);
            self.back.clear();
        }
        if self.gone == self.front.len() {
            self.front.clear();
            self.gone = 0;
            for buffer in [&mut self.front, &mut self.back] {
                if buffer.capacity() > KEPT {
                    *buffer = Vec::new();
                }
            }
        }
    }

    /// Where the next bytes are added.
    pub(super) fn tail(&mut self) -> &mut Vec<u8> {
        if self.back.is_empty() && self.front.len() < BLOCK { &mut self.front } else { &mut self.back }
    }

    /// Bytes from this position on, which may lie behind others that have not come yet. Those that have left
    /// are none of them.
    pub(super) fn put(&mut self, position: u64, bytes: &[u8]) {
        let Some(at) = position.checked_sub(self.start).and_then(|at| usize::try_from(at).ok()) else {
            return;
        };
        if at == self.len() {
            return self.tail().extend_from_slice(bytes);
        }
        if self.back.is_empty() && self.front.len() < BLOCK {
            return write(&mut self.front, self.gone + at, bytes);
        }
        let in_front = self.front.len() - self.gone;
        let (first, second) = bytes.split_at(in_front.saturating_sub(at).min(bytes.len()));
        if !first.is_empty() {
            write(&mut self.front, self.gone + at, first);
        }
        if !second.is_empty() {
            write(&mut self.back, (at + first.len()) - in_front, second);
        }
    }
}

fn part(bytes: &[u8], from: usize, len: usize) -> &[u8] {
    let to = from.saturating_add(len).min(bytes.len());
    bytes.get(from..to).unwrap_or_default()
}

fn write(to: &mut Vec<u8>, at: usize, bytes: &[u8]) {
    let end = at + bytes.len();
    if to.len() < end {
        to.resize(end, 0);
    }
    if let Some(place) = to.get_mut(at..end) {
        place.copy_from_slice(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The byte at a position.
    fn byte(position: u64) -> u8 {
        (position % 251) as u8
    }

    fn bytes(from: u64, len: usize) -> Vec<u8> {
        (from..from + len as u64).map(byte).collect()
    }

    /// Pieces come in any order, and are read behind the first gap only.
    #[test]
    fn what_was_put_is_there() {
        let mut draws = 7u64;
        let mut draw = |below: usize| {
            draws = draws.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (draws >> 33) as usize % below
        };
        let (mut ring, mut end, mut most) = (Ring::default(), 0u64, 0);
        while end < 20_000_000 {
            // The next ones, the last first.
            let mut pieces = Vec::new();
            for _ in 0..1 + draw(4) {
                let len = 1 + draw(40_000);
                pieces.push((end, len));
                end += len as u64;
            }
            if draw(2) == 0 {
                pieces.reverse();
            }
            for (at, len) in pieces {
                ring.put(at, &bytes(at, len));
                // Again, if that has not left.
                ring.put(at, &bytes(at, len));
            }
            assert_eq!(ring.end(), end);
            most = most.max(ring.len());
            while ring.len() > 300_000 || draw(3) > 0 && ring.len() > 0 {
                let (start, len) = (ring.start(), 1 + draw(70_000));
                let got = ring.get(start, len).concat();
                assert!(got == bytes(start, len.min(ring.len())), "at {start}");
                ring.drop_below(start + got.len() as u64);
                ring.put(start, b"late");
            }
        }
        assert!(most > 3 * BLOCK);
        ring.drop_below(u64::MAX);
        assert_eq!((ring.len(), ring.start(), ring.front.capacity() <= KEPT), (0, end, true));
    }
}
