//! Takes exactly one set-up frame from a stream.

use uwarp_wire::mpa::{self, FrameKind, SetupFrame};

use super::SetupError;

/// A frame that is being received.
#[derive(Debug)]
pub(super) struct FrameReader {
    kind: FrameKind,
    bytes: Vec<u8>,
    frame: Option<SetupFrame>,
}

/// A whole frame.
#[derive(Debug)]
pub(super) struct Received {
    pub frame: SetupFrame,
    pub private_data: Vec<u8>,
}

impl FrameReader {
    pub fn new(kind: FrameKind) -> Self {
        Self { kind, bytes: Vec::with_capacity(mpa::FRAME_LEN), frame: None }
    }

    /// Bytes to read next: the rest of the fixed part, then the rest of the private data, then none.
    pub fn want(&self) -> usize {
        let total = match self.frame {
            None => mpa::FRAME_LEN,
            Some(frame) => mpa::FRAME_LEN + usize::from(frame.private_data_len),
        };
        total - self.bytes.len()
    }

    /// Whether nothing has arrived.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Takes up to `want()` bytes.
    pub fn push(&mut self, input: &[u8]) -> Result<Option<Received>, SetupError> {
        let want = self.want();
        if input.len() > want {
            return Err(SetupError::Misuse);
        }
        self.bytes.extend_from_slice(input);
        if self.frame.is_none() {
            let frame = match SetupFrame::parse(&self.bytes) {
                Ok(frame) => frame,
                Err(mpa::SetupError::Truncated) => return Ok(None),
                Err(mpa::SetupError::BadKey) => return Err(SetupError::BadKey),
            };
            if frame.kind != self.kind {
                return Err(SetupError::WrongKind(frame.kind));
            }
            if usize::from(frame.private_data_len) > mpa::MAX_PRIVATE_DATA {
                return Err(SetupError::PrivateDataTooLong(frame.private_data_len));
            }
            self.frame = Some(frame);
        }
        match self.frame {
            Some(frame) if self.want() == 0 => {
                let private_data = self.bytes.split_off(mpa::FRAME_LEN);
                self.bytes.clear();
                self.frame = None;
                Ok(Some(Received { frame, private_data }))
            }
            _ => Ok(None),
        }
    }
}
