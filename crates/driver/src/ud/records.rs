//! RDMA Write-Records of a datagram queue pair: when those end of which a part is missing.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use uwarp_rnic::VerbsError;
use uwarp_rnic::qp::{Arrival, Dropped, QpInit, Record, Source as Allowed, UdCore};
use uwarp_wire::datagram::record::Segment;

use super::queue_pair::Inner;
use super::{Looked, UdQp};
use crate::alarm::Alarm;
use crate::nic::Nic;
use crate::source::{Readiness, Source};

/// Set only to earlier times: most segments then need nothing of the engine.
#[derive(Default)]
pub(super) struct RecordTimer {
    alarm: Option<Alarm>,
    at: Option<Instant>,
    /// How often it has rung for the same records, because the socket was not empty.
    postponed: u32,
}

/// How often, at most: whoever fills the socket for ever must not keep a record open.
const POSTPONED_MOST: u32 = 64;
/// How long a thread that receives has to look for what came before.
const RECEIVING: Duration = Duration::from_millis(1);

impl UdQp {
    /// As [`Self::create`], for RDMA Write-Records, too; see [`UdCore::with_records`].
    pub fn create_with_records(
        nic: &Arc<Nic>,
        init: QpInit,
        job_key: u64,
        most: u32,
    ) -> Result<Arc<Self>, VerbsError> {
        Self::create_of(nic, init, |qpn, init| UdCore::with_records(qpn, init, job_key, most))
    }

    /// A segment of an RDMA Write-Record has come.
    pub(super) fn take_record(&self, segment: &Segment<'_>, arrival: &Arrival) -> Result<(), Dropped> {
        let now = Instant::now();
        let mut inner = self.inner.lock();
        let taken = inner.core.deliver_record(segment, arrival, now);
        self.set_timer(&mut inner, now);
        taken
    }

    fn set_timer(&self, inner: &mut Inner, now: Instant) {
        let Some(due) = inner.core.records_due() else { return };
        // An alarm that has rung is gone.
        if inner.timer.at.is_some_and(|at| at <= due && at > now) {
            return;
        }
        let alarm = inner.timer.alarm.get_or_insert_with(|| {
            let me: Weak<dyn Source> = self.me.clone();
            Alarm::new(self.port.engine(), me)
        });
        alarm.set(due);
        inner.timer.at = Some(due);
    }

    /// A record that has completed, until the program frees it.
    pub fn record(&self, name: u64) -> Option<Record> {
        self.inner.lock().core.record(name)
    }

    /// The program does not need a record any more. False: there is none of this name.
    pub fn free_record(&self, name: u64) -> bool {
        self.inner.lock().core.free_record(name)
    }

    /// Names peers that may name memory; once there is one, all others may not.
    pub fn allow_source(&self, source: Allowed) -> Result<(), VerbsError> {
        self.inner.lock().core.allow_source(source)
    }
}

impl Source for UdQp {
    fn ready(&self, _: Readiness) {}

    fn timeout(&self) {
        // What waits in the socket has come in time.
        let looked = self.port.look();
        let now = Instant::now();
        let mut inner = self.inner.lock();
        let timer = &mut inner.timer;
        timer.at = None;
        if looked != Looked::Empty && timer.postponed < POSTPONED_MOST {
            timer.postponed += 1;
            let at = if looked == Looked::Busy { now + RECEIVING } else { now };
            if let Some(alarm) = &mut timer.alarm {
                alarm.set(at);
                timer.at = Some(at);
            }
            return;
        }
        timer.postponed = 0;
        inner.core.expire_records(now);
        self.set_timer(&mut inner, now);
    }
}
