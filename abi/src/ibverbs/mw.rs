//! Memory windows (docs/adr/030).

use uwarp_abi_types::verbs::*;
use uwarp_driver::QueuePair;
use uwarp_driver::quota::Place;
use uwarp_rnic::mr::{Bind, WindowType, add_window, remove_window};
use uwarp_rnic::{Access, SendFlags, SendOp, SendWr};

use super::context::Context;
use super::mr::{self, CMr, CPd};
use super::qp::CQp;
use crate::convention::Code;
use crate::failure::{Failure, required};
use crate::object::{self, Object, Use, Visible, look, zeroed};
use crate::slot;

/// A memory window.
#[repr(C)]
#[derive(Debug)]
pub struct CMw {
    c: Visible<ibv_mw>,
    kind: WindowType,
    /// Its first key, which names it.
    key: u32,
    _place: Place,
    _pd: Use,
    _context: Use,
}

// SAFETY: repr(C), the C structure first.
unsafe impl Object for CMw {
    type C = ibv_mw;
    const NAME: &'static str = "mw";
}

/// The rights that a window may grant, and the flag that makes its offsets begin at zero. Others mean nothing
/// for a window, and are ignored: programs pass those of the region, and drivers take them.
const RIGHTS: Access =
    Access::REMOTE_READ.union(Access::REMOTE_WRITE).union(Access::REMOTE_ATOMIC).union(Access::ZERO_BASED);

/// A bind in the RNIC's form; `key` is the new key.
///
/// # Safety
/// The region is alive or NULL.
unsafe fn bind(key: u32, info: &ibv_mw_bind_info) -> Result<SendOp, Failure> {
    let access = mr::access(info.mw_access_flags)? & RIGHTS;
    let region = if info.mr.is_null() && info.length == 0 {
        0
    } else {
        // SAFETY: the caller's promise.
        unsafe { look::<CMr>(info.mr) }?.stag()
    };
    Ok(SendOp::Bind(Bind { key, region, addr: info.addr, len: info.length, access }))
}

/// A bind as a work request, for a window of type 2: the program chooses the last byte of its key, and the
/// rest of `rkey` is ignored, as drivers do. Other errors show when the request is processed
/// (`IBV_WC_MW_BIND_ERR`).
///
/// # Safety
/// Window and region are alive.
pub unsafe fn bind_request(mw: *mut ibv_mw, rkey: u32, info: &ibv_mw_bind_info) -> Result<SendOp, Failure> {
    // SAFETY: the caller's promise.
    let window = unsafe { look::<CMw>(mw) }?;
    if window.kind != WindowType::Two {
        return Err(Failure::invalid("windows of type 1 are bound by ibv_bind_mw"));
    }
    // SAFETY: as above.
    unsafe { bind(window.key & !0xFF | rkey & 0xFF, info) }
}

slot! {
    /// ibv_alloc_mw(3).
    verb fn alloc_mw(pd: *mut ibv_pd, kind: ibv_mw_type) -> *mut ibv_mw {
        let domain = look::<CPd>(pd)?;
        let context = look::<Context>((*pd).context)?;
        let window = match kind {
            IBV_MW_TYPE_1 => WindowType::One,
            IBV_MW_TYPE_2 => WindowType::Two,
            _ => return Err(Failure::invalid("unknown type of memory window")),
        };
        let place = context.device.made.mws.take(context.nic.limits().max_mw)?;
        let key = add_window(domain.pd.id(), window)?;
        let mut c: ibv_mw = zeroed();
        (c.context, c.pd, c.rkey, c.handle, c.type_) = ((*pd).context, pd, key, key, kind);
        Ok(object::give(CMw {
            c: Visible::new(c),
            kind: window,
            key,
            _place: place,
            _pd: domain.users.hold(),
            _context: context.users.hold(),
        }))
    }

    /// ibv_bind_mw(3): a window of type 1, which gets another key. A window of another domain shows when the
    /// request is processed (`IBV_WC_MW_BIND_ERR`).
    verb fn bind_mw(qp: *mut ibv_qp, mw: *mut ibv_mw, mw_bind: *mut ibv_mw_bind) -> Code {
        let (pair, window) = (look::<CQp>(qp)?, look::<CMw>(mw)?);
        let request = &*required(mw_bind, "mw_bind")?;
        if window.kind != WindowType::One {
            return Err(Failure::invalid("windows of type 2 are bound by a work request"));
        }
        let QueuePair::Rc(rc) = &pair.qp else {
            return Err(Failure::invalid("a datagram queue pair has Sends only"));
        };
        let key = ibv_inc_rkey((*mw).rkey);
        let wr = SendWr {
            wr_id: request.wr_id,
            op: bind(key, &request.bind_info)?,
            flags: SendFlags::of_program(request.send_flags) - SendFlags::INLINE,
            sges: &[],
        };
        rc.post_send(std::iter::once(wr)).map_err(|(_, error)| error)?;
        (*mw).rkey = key;
        Ok(())
    }

    /// ibv_alloc_mw(3). A window that is bound is unbound first.
    verb fn dealloc_mw(mw: *mut ibv_mw) -> Code {
        remove_window(object::take::<CMw>(mw)?.key);
        Ok(())
    }
}

/// As in verbs.h: the next key of the same window.
fn ibv_inc_rkey(rkey: u32) -> u32 {
    rkey & !0xFF | rkey.wrapping_add(1) & 0xFF
}
