//! RDMA Write-Records that arrive (docs/rd.md section 5.4): Writes that take a record instead of a receive.
//! Nothing of them is missing when they are delivered.

use std::sync::Arc;

use rustc_hash::FxHashMap;
use uwarp_proto::rd::{MessageId, Placed};
use uwarp_wire::rd::chunk::Reason;

use super::RdCore;
use super::receive::{RdSegment, Receives, is_solicited};
use crate::cq::Cq;
use crate::error::VerbsError;
use crate::qp::datagrams::Arrival;
use crate::qp::records::{About, Record, Records};

/// The records of a queue pair, and which messages have begun one.
pub(super) struct Recording {
    pub records: Records,
    open: FxHashMap<MessageId, u64>,
}

impl Recording {
    pub fn new(qpn: u32, most: u32, cq: Arc<Cq>) -> Result<Self, VerbsError> {
        Ok(Self { records: Records::new(qpn, most, cq)?, open: FxHashMap::default() })
    }

    /// Takes all records from messages that are not delivered.
    pub fn lose_all(&mut self, receives: &mut Receives) {
        for (message, record) in self.open.drain() {
            self.records.drop_open(record);
            receives.lose(message, Reason::Aborted);
        }
    }
}

impl RdCore {
    /// Whether a message has a record.
    pub(super) fn has_record(&self, message: MessageId) -> bool {
        self.recording.as_ref().is_some_and(|recording| recording.open.contains_key(&message))
    }

    /// Begins a record for the message of this segment. `at`: the memory of its first byte.
    pub(super) fn bind_record(
        &mut self,
        segment: &RdSegment<'_>,
        at: (u32, u64),
        arrival: &Arrival,
    ) -> Result<(), Placed> {
        let invalid = Placed::Refused(Reason::InvalidRequest);
        let recording = self.recording.as_mut().ok_or(invalid)?;
        let about = About {
            arrival: *arrival,
            source_qpn: segment.source_qpn,
            stag: at.0,
            to: at.1,
            len: segment.message_len,
            immediate: segment.first.and_then(|first| first.immediate).ok_or(invalid)?,
            solicited: is_solicited(segment),
        };
        let Some(record) = recording.records.begin(about) else {
            self.drops.no_record += 1;
            self.receives.want();
            // (Its upper bits are not the program's.)
            return Err(Placed::NoReceive(self.shell.attr.min_rnr_timer & 0x1f));
        };
        recording.open.insert(segment.message, record);
        Ok(())
    }

    /// A message is complete, and it is its turn: completes its record. False: it has none.
    pub(super) fn deliver_record(&mut self, message: MessageId) -> bool {
        let Some(recording) = &mut self.recording else { return false };
        let Some(record) = recording.open.remove(&message) else { return false };
        if let Some(about) = recording.records.about(record) {
            recording.records.mark(record, &(0..about.len));
        }
        if !recording.records.end(record) {
            self.shell.note_overflow();
            self.check_overflow();
        }
        true
    }

    /// A message is given up, or begins again, and has no record any more. False: it had none.
    pub(super) fn take_back_record(&mut self, message: MessageId) -> bool {
        let Some(recording) = &mut self.recording else { return false };
        let Some(record) = recording.open.remove(&message) else { return false };
        recording.records.drop_open(record);
        self.receives.added();
        true
    }

    /// A record that has completed, until the program frees it.
    pub fn record(&mut self, name: u64) -> Option<Record> {
        self.recording.as_mut()?.records.read(name)
    }

    /// The program does not need a record any more. False: there is none of this name. See
    /// [`Self::take_ready`].
    pub fn free_record(&mut self, name: u64) -> bool {
        let freed = self.recording.as_mut().is_some_and(|recording| recording.records.free(name));
        if freed {
            self.receives.added();
        }
        freed
    }
}
