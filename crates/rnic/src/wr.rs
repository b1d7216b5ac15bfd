//! Work requests and work completions, in the verbs' own shapes.

use bitflags::bitflags;
use uwarp_wire::rdmap::{AtomicOp, AtomicRequest};

use crate::mr::Bind;

/// One piece of local memory: `length` bytes at virtual address `addr`, named by a region's key.
///
/// The layout is that of a verbs scatter/gather element, so a program's list is read in place.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sge {
    /// Address within the region (its I/O virtual address).
    pub addr: u64,
    /// Bytes; zero is allowed.
    pub length: u32,
    /// Local key of the region.
    pub lkey: u32,
}

bitflags! {
    /// Flags of a send work request; the bits are the verbs' own.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct SendFlags: u32 {
        /// Start only when all earlier RDMA Reads and atomic operations of this queue have completed.
        const FENCE = 1;
        /// Make a work completion on success.
        const SIGNALED = 1 << 1;
        /// Request a solicited event at the receiver.
        const SOLICITED = 1 << 2;
        /// Copy the bytes during the post; the buffers may be reused when the post returns and need no key.
        const INLINE = 1 << 3;
        /// The completion may come late: with that of a later work request without this flag, or when a full
        /// queue or the end of the stream asks for it. Requests no acknowledgement of its own (docs/adr/009).
        /// Not a flag of the verbs.
        const RELAXED = 1 << 30;
    }
}

impl SendFlags {
    /// From a program's number.
    pub fn of_program(bits: u32) -> Self {
        Self::from_bits_truncate(bits) - Self::RELAXED
    }
}

/// What a send work request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SendOp {
    /// Send (RFC 5040 section 5.3), with an STag to invalidate at the receiver if given.
    Send {
        /// Remote STag that the receiver invalidates on delivery.
        invalidate: Option<u32>,
    },
    /// Send with immediate data, to another uwarp end only.
    SendImmediate {
        /// In the order of the wire.
        imm: [u8; 4],
    },
    /// RDMA Write with immediate data: an RDMA Write followed by an Immediate Data message (RFC 7306 section
    /// 6), to another uwarp end only.
    WriteImmediate {
        /// Remote STag.
        stag: u32,
        /// Remote tagged offset.
        to: u64,
        /// In the order of the wire.
        imm: [u8; 4],
    },
    /// RDMA Write-Record (docs/datagram-iwarp.md section 15), of datagrams only: a Write with immediate data
    /// that takes no receive. The target keeps a record of it.
    WriteRecord {
        /// Remote STag.
        stag: u32,
        /// Remote tagged offset.
        to: u64,
        /// In the order of the wire.
        imm: [u8; 4],
    },
    /// RDMA Write (RFC 5040 section 5.1).
    Write {
        /// Remote STag.
        stag: u32,
        /// Remote tagged offset.
        to: u64,
    },
    /// RDMA Read (RFC 5040 section 5.2); the scatter list is the sink.
    Read {
        /// Remote source STag.
        stag: u32,
        /// Remote source tagged offset.
        to: u64,
        /// Invalidate the first local key when done (iWARP's Read with Invalidate Local).
        invalidate_local: bool,
    },
    /// Atomic fetch-and-add of eight bytes (RFC 7306 section 5.1.1), to another uwarp end only. The scatter
    /// list gets the value before it, in host byte order.
    FetchAdd {
        /// Remote STag.
        stag: u32,
        /// Remote tagged offset.
        to: u64,
        /// What to add.
        add: u64,
    },
    /// Atomic compare-and-swap of eight bytes (RFC 7306 section 5.1.2); the rest as [`SendOp::FetchAdd`].
    CmpSwap {
        /// Remote STag.
        stag: u32,
        /// Remote tagged offset.
        to: u64,
        /// What must be there.
        compare: u64,
        /// What then replaces it.
        swap: u64,
    },
    /// Invalidate a local STag.
    LocalInvalidate {
        /// The STag.
        stag: u32,
    },
    /// Bind a memory window.
    Bind(Bind),
}

impl SendOp {
    /// The opcode of its completion.
    pub fn completion(self) -> WcOpcode {
        match self {
            Self::Send { .. } | Self::SendImmediate { .. } => WcOpcode::Send,
            Self::Write { .. } | Self::WriteImmediate { .. } | Self::WriteRecord { .. } => {
                WcOpcode::RdmaWrite
            }
            Self::Read { .. } => WcOpcode::RdmaRead,
            Self::FetchAdd { .. } => WcOpcode::FetchAdd,
            Self::CmpSwap { .. } => WcOpcode::CompSwap,
            Self::LocalInvalidate { .. } => WcOpcode::LocalInv,
            Self::Bind(_) => WcOpcode::BindMw,
        }
    }

    /// Whether a second message follows the first.
    pub fn is_pair(self) -> bool {
        matches!(self, Self::WriteImmediate { .. })
    }

    /// Whether it is an atomic operation.
    pub fn is_atomic(self) -> bool {
        matches!(self, Self::FetchAdd { .. } | Self::CmpSwap { .. })
    }

    /// Whether it is about a key of this end: nothing is sent.
    #[inline]
    pub fn is_local(self) -> bool {
        matches!(self, Self::LocalInvalidate { .. } | Self::Bind(_))
    }

    /// Whether the peer answers it, so that it takes a place of the read depth.
    pub fn is_answered(self) -> bool {
        matches!(self, Self::Read { .. }) || self.is_atomic()
    }

    /// Whether its bytes may be posted inline.
    pub fn may_be_inline(self) -> bool {
        match self {
            Self::Send { .. } | Self::SendImmediate { .. } => true,
            Self::Write { .. } | Self::WriteImmediate { .. } | Self::WriteRecord { .. } => true,
            Self::Read { .. }
            | Self::FetchAdd { .. }
            | Self::CmpSwap { .. }
            | Self::LocalInvalidate { .. }
            | Self::Bind(_) => false,
        }
    }

    /// What it asks the peer to do; `None` if it is no atomic operation.
    pub fn atomic_request(self, request_id: u32) -> Option<AtomicRequest> {
        match self {
            Self::FetchAdd { stag, to, add } => Some(AtomicRequest {
                operation: AtomicOp::FetchAdd,
                request_id,
                stag,
                to,
                add_swap_data: add,
                add_swap_mask: 0,
                compare_data: 0,
                compare_mask: u64::MAX,
            }),
            Self::CmpSwap { stag, to, compare, swap } => Some(AtomicRequest {
                operation: AtomicOp::CmpSwap,
                request_id,
                stag,
                to,
                add_swap_data: swap,
                add_swap_mask: u64::MAX,
                compare_data: compare,
                compare_mask: u64::MAX,
            }),
            _ => None,
        }
    }

    /// Whether only another uwarp end is known to understand it: the operation is in no RFC, or in one that
    /// leaves the use of it to agreements outside of the protocol (docs/adr/006, docs/adr/029).
    pub fn wants_uwarp(self) -> bool {
        let has_immediate = matches!(self, Self::SendImmediate { .. } | Self::WriteImmediate { .. });
        has_immediate || matches!(self, Self::WriteRecord { .. }) || self.is_atomic()
    }
}

/// A send work request, its scatter/gather list borrowed from the program.
#[derive(Debug, Clone, Copy)]
pub struct SendWr<'a> {
    /// The program's cookie.
    pub wr_id: u64,
    /// What to do.
    pub op: SendOp,
    /// How.
    pub flags: SendFlags,
    /// Local memory.
    pub sges: &'a [Sge],
}

/// A receive work request.
#[derive(Debug, Clone, Copy)]
pub struct RecvWr<'a> {
    /// The program's cookie.
    pub wr_id: u64,
    /// Local memory.
    pub sges: &'a [Sge],
}

/// Work completion status; the numbers are the verbs' own.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum WcStatus {
    Success = 0,
    LocLenErr = 1,
    LocQpOpErr = 2,
    LocEecOpErr = 3,
    LocProtErr = 4,
    WrFlushErr = 5,
    MwBindErr = 6,
    BadRespErr = 7,
    LocAccessErr = 8,
    RemInvReqErr = 9,
    RemAccessErr = 10,
    RemOpErr = 11,
    RetryExcErr = 12,
    RnrRetryExcErr = 13,
    RemInvRdReqErr = 15,
    RemAbortErr = 16,
    FatalErr = 19,
    RespTimeoutErr = 20,
    GeneralErr = 21,
}

/// What completed; the numbers are the verbs' own.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum WcOpcode {
    Send = 0,
    RdmaWrite = 1,
    RdmaRead = 2,
    CompSwap = 3,
    FetchAdd = 4,
    BindMw = 5,
    LocalInv = 6,
    Recv = 1 << 7,
    RecvRdmaWithImm = (1 << 7) + 1,
    /// A record of an RDMA Write-Record, `IBV_WC_DRIVER1`.
    Record = (1 << 7) + 7,
}

bitflags! {
    /// Flags of a work completion; the bits are the verbs' own.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct WcFlags: u32 {
        /// A global routing header precedes the payload (UD).
        const GRH = 1;
        /// `imm_or_inv` holds immediate data in network byte order.
        const WITH_IMM = 1 << 1;
        /// `imm_or_inv` holds the STag that was invalidated, in host byte order.
        const WITH_INV = 1 << 3;
    }
}

/// A work completion. The layout is that of the verbs' structure, so it is copied to the program as it is.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wc {
    /// Cookie of the work request.
    pub wr_id: u64,
    /// Outcome.
    pub status: WcStatus,
    /// Which operation. Not defined when `status` is an error, but filled in anyway.
    pub opcode: WcOpcode,
    /// Ours: the Terminate's layer, type and code as `0x00LTCC` where one was involved.
    pub vendor_err: u32,
    /// Bytes received or read.
    pub byte_len: u32,
    /// Immediate data or invalidated STag, by `flags`.
    pub imm_or_inv: u32,
    /// Local queue pair number.
    pub qp_num: u32,
    /// Remote queue pair number (UD).
    pub src_qp: u32,
    /// Which optional members hold something.
    pub flags: WcFlags,
    /// UD only.
    pub pkey_index: u16,
    /// UD only.
    pub slid: u16,
    /// UD only.
    pub sl: u8,
    /// UD only.
    pub dlid_path_bits: u8,
}

impl Wc {
    /// A completion with only identity, operation and outcome.
    pub fn new(wr_id: u64, status: WcStatus, opcode: WcOpcode, qp_num: u32) -> Self {
        Self {
            wr_id,
            status,
            opcode,
            vendor_err: 0,
            byte_len: 0,
            imm_or_inv: 0,
            qp_num,
            src_qp: 0,
            flags: WcFlags::empty(),
            pkey_index: 0,
            slid: 0,
            sl: 0,
            dlid_path_bits: 0,
        }
    }
}
