//! Work requests that a program builds call by call, and posts together.

use std::cell::UnsafeCell;
use std::sync::Arc;

use lock_api::RawMutex as _;
use uwarp_process::RawMutex;
use uwarp_rnic::ah::Ah;
use uwarp_rnic::qp::UdSendWr;
use uwarp_rnic::{SendFlags, SendOp, SendWr, Sge};

use crate::failure::Failure;

/// Work requests between `ibv_wr_start` and `ibv_wr_complete`.
pub struct Batch {
    /// Held from `ibv_wr_start` to `ibv_wr_complete` or `ibv_wr_abort`.
    pub lock: RawMutex<0>,
    building: UnsafeCell<Building>,
}

// SAFETY: `building` is used by the thread that holds `lock`.
unsafe impl Sync for Batch {}

/// See [`Batch`].
#[derive(Default)]
pub struct Building {
    requests: Vec<Request>,
    sges: Vec<Sge>,
    /// Inline bytes. Their pieces are ranges until the batch is posted, because the vector may move while it
    /// grows.
    inline: Vec<u8>,
    failure: Option<Failure>,
}

struct Request {
    wr_id: u64,
    op: SendOp,
    flags: SendFlags,
    data: Data,
    /// Of a datagram: where it goes.
    to: Option<Destination>,
    /// Of a reliable one: the job key, if not the queue pair's own.
    job_key: Option<u64>,
}

/// The receiver of a datagram.
struct Destination {
    ah: Arc<Ah>,
    qpn: u32,
    qkey: u32,
}

enum Data {
    /// A range of `sges`.
    Sges(std::ops::Range<usize>),
    /// A range of `inline`.
    Inline(std::ops::Range<usize>),
}

impl Default for Batch {
    fn default() -> Self {
        Self { lock: RawMutex::INIT, building: UnsafeCell::default() }
    }
}

impl Batch {
    /// What is in it.
    ///
    /// # Safety
    /// The caller holds `lock`.
    #[allow(clippy::mut_from_ref, reason = "the lock makes it exclusive")]
    pub unsafe fn building(&self) -> &mut Building {
        // SAFETY: the caller's promise.
        unsafe { &mut *self.building.get() }
    }
}

impl Building {
    /// Drops everything.
    pub fn clear(&mut self) {
        self.requests.clear();
        self.sges.clear();
        self.inline.clear();
        self.failure = None;
    }

    /// Records the first mistake; the batch is then not posted.
    pub fn fail(&mut self, why: Failure) {
        self.failure.get_or_insert(why);
    }

    /// Adds a work request; its data is set next.
    pub fn begin(&mut self, wr_id: u64, op: SendOp, flags: SendFlags) {
        // The setter decides whether data is inline.
        let flags = flags - SendFlags::INLINE;
        self.requests.push(Request { wr_id, op, flags, data: Data::Sges(0..0), to: None, job_key: None });
    }

    fn set(&mut self, data: Data) {
        match self.requests.last_mut() {
            Some(request) => request.data = data,
            None => self.fail(Failure::invalid("data without a work request")),
        }
    }

    /// Sets where the last work request, a datagram, goes.
    pub fn set_destination(&mut self, ah: &Arc<Ah>, qpn: u32, qkey: u32) {
        match self.requests.last_mut() {
            Some(request) => request.to = Some(Destination { ah: Arc::clone(ah), qpn, qkey }),
            None => self.fail(Failure::invalid("a destination without a work request")),
        }
    }

    /// Sets the job key of the last work request.
    pub fn set_job_key(&mut self, job_key: u64) {
        match self.requests.last_mut() {
            Some(request) => request.job_key = Some(job_key),
            None => self.fail(Failure::invalid("a job key without a work request")),
        }
    }

    /// Sets the elements of the last work request.
    pub fn set_sges(&mut self, sges: &[Sge]) {
        let start = self.sges.len();
        self.sges.extend_from_slice(sges);
        self.set(Data::Sges(start..start + sges.len()));
    }

    /// Copies the inline data of the last work request.
    ///
    /// # Safety
    /// Each piece is an address and that many bytes.
    pub unsafe fn set_inline(&mut self, pieces: impl Iterator<Item = (*const u8, usize)>) {
        let start = self.inline.len();
        for (addr, length) in pieces {
            // SAFETY: the caller's promise.
            unsafe { self.append(addr, length) };
        }
        self.set(Data::Inline(start..self.inline.len()));
    }

    /// Copies inline data. Far too much of it is refused before it is copied; the queue pair's own limit is
    /// checked when the request is posted.
    ///
    /// # Safety
    /// `addr` points to `length` bytes.
    unsafe fn append(&mut self, addr: *const u8, length: usize) {
        const LIMIT: usize = 1 << 20;
        if length > LIMIT {
            self.fail(Failure::invalid("inline data is longer than the queue pair allows"));
        } else if length > 0 {
            // SAFETY: the caller's promise; no thread writes it while it is copied, by the same promise.
            self.inline.extend_from_slice(unsafe { std::slice::from_raw_parts(addr, length) });
        }
    }

    /// The work requests, to be posted.
    pub fn finish(&mut self) -> Result<impl Iterator<Item = SendWr<'_>> + Clone, Failure> {
        self.settle()?;
        Ok(self.requests.iter().map(|request| request.posted(&self.sges)))
    }

    /// The same of a datagram queue pair.
    pub fn finish_datagrams(&mut self) -> Result<impl Iterator<Item = UdSendWr<'_>> + Clone, Failure> {
        self.settle()?;
        if self.requests.iter().any(|request| request.to.is_none()) {
            return Err(Failure::invalid("a datagram without a destination"));
        }
        Ok(self.requests.iter().filter_map(|request| {
            let to = request.to.as_ref()?;
            let wr = request.posted(&self.sges);
            Some(UdSendWr {
                wr,
                ah: &to.ah,
                remote_qpn: to.qpn,
                remote_qkey: to.qkey,
                job_key: request.job_key,
            })
        }))
    }

    /// Turns inline pieces into elements, because they no longer move.
    fn settle(&mut self) -> Result<(), Failure> {
        if let Some(failure) = self.failure.take() {
            return Err(failure);
        }
        let base = self.inline.as_ptr().addr();
        for request in &mut self.requests {
            if let Data::Inline(range) = &request.data {
                let length =
                    u32::try_from(range.len()).map_err(|_| Failure::invalid("too much inline data"))?;
                let at = self.sges.len();
                self.sges.push(Sge { addr: (base + range.start) as u64, length, lkey: 0 });
                request.data = Data::Sges(at..at + 1);
                request.flags |= SendFlags::INLINE;
            }
        }
        Ok(())
    }
}

impl Request {
    /// As it is posted, once [`Building::settle`] has run.
    fn posted<'a>(&self, sges: &'a [Sge]) -> SendWr<'a> {
        let Data::Sges(range) = &self.data else { unreachable!("turned into elements") };
        SendWr { wr_id: self.wr_id, op: self.op, flags: self.flags, sges: &sges[range.clone()] }
    }
}
