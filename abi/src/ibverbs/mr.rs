//! Protection domains and memory regions.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use parking_lot::Mutex;
use uwarp_abi_types::verbs::*;
use uwarp_rnic::{Access, Mr, Pd};

use super::device::Context;
use super::memory;
use crate::entry::{Code, Failure};
use crate::object::{self, Object, Use, Users, Visible, look, zeroed};
use crate::{entry, slot};

/// A protection domain.
#[repr(C)]
#[derive(Debug)]
pub struct CPd {
    c: Visible<ibv_pd>,
    /// The RNIC's.
    pub pd: Arc<Pd>,
    /// Regions, queue pairs and shared receive queues made in it.
    pub users: Users,
    _context: Use,
}

// SAFETY: repr(C), the C structure first.
unsafe impl Object for CPd {
    type C = ibv_pd;
    const NAME: &'static str = "pd";
}

/// A memory region.
#[repr(C)]
#[derive(Debug)]
pub struct CMr {
    c: Visible<ibv_mr>,
    /// The RNIC's, and the domain it is in; re-registration changes both.
    inner: Mutex<(Arc<Mr>, Use)>,
    _context: Use,
}

// SAFETY: repr(C), the C structure first.
unsafe impl Object for CMr {
    type C = ibv_mr;
    const NAME: &'static str = "mr";
}

/// Flags that a device may ignore when it has no use for them.
const OPTIONAL: u32 = (IB_UVERBS_ACCESS_OPTIONAL_LAST << 1) - IB_UVERBS_ACCESS_OPTIONAL_FIRST;

/// IBV_ADVISE_MR_FLAG_FLUSH: wait until it is done. We always do.
const ADVISE_FLUSH: u32 = 1;

fn access(flags: u32) -> Result<Access, Failure> {
    let known = flags & !OPTIONAL;
    let access = Access::from_bits(known).ok_or_else(|| Failure::invalid("unknown access flags"))?;
    Ok(access | Access::from_bits_truncate(flags & OPTIONAL))
}

fn check_memory(address: u64, length: u64, access: Access) -> Result<(), Failure> {
    if access.contains(Access::ON_DEMAND) {
        return Ok(());
    }
    let writable = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    Ok(memory::check(address as usize, length as usize, access.intersects(writable))?)
}

/// Registers `length` bytes at `address`, which keys and offsets name from `iova` on.
///
/// # Safety
/// `pd` is a live protection domain or NULL.
unsafe fn register(
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    iova: u64,
    flags: u32,
) -> Result<*mut ibv_mr, Failure> {
    // SAFETY: the caller's promise.
    let domain = unsafe { look::<CPd>(pd) }?;
    // SAFETY: a live domain's context is alive.
    let context = unsafe { look::<Context>((*pd).context) }?;
    let access = access(flags)?;
    let range = (address.addr() as u64, length as u64);
    check_memory(range.0, range.1, access)?;
    let mr = Mr::register(&domain.pd, range.0, range.1, iova, access)?;
    // SAFETY: plain C data.
    let mut c: ibv_mr = unsafe { zeroed() };
    // SAFETY: alive.
    c.context = unsafe { (*pd).context };
    c.pd = pd;
    c.addr = address;
    c.length = length;
    (c.handle, c.lkey, c.rkey) = (mr.stag(), mr.stag(), mr.stag());
    Ok(object::give(Box::new(CMr {
        c: Visible::new(c),
        inner: Mutex::new((mr, domain.users.hold())),
        _context: context.users.hold(),
    })))
}

entry! {
    /// ibv_alloc_pd(3).
    verb fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
        let open = look::<Context>(context)?;
        let pd = Pd::new();
        Ok(object::give(Box::new(CPd {
            c: Visible::new(ibv_pd { context, handle: pd.id() }),
            pd,
            users: Users::default(),
            _context: open.users.hold(),
        })))
    }

    /// ibv_dealloc_pd(3).
    verb fn ibv_dealloc_pd(pd: *mut ibv_pd) -> Code {
        look::<CPd>(pd)?.users.none()?;
        drop(object::take::<CPd>(pd)?);
        Ok(())
    }

    /// ibv_reg_mr(3).
    verb fn ibv_reg_mr(pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int) -> *mut ibv_mr {
        register(pd, addr, length, addr.addr() as u64, access.cast_unsigned())
    }

    /// ibv_reg_mr(3), with offsets that count from `iova`.
    verb fn ibv_reg_mr_iova(
        pd: *mut ibv_pd,
        addr: *mut c_void,
        length: usize,
        iova: u64,
        access: c_int,
    ) -> *mut ibv_mr {
        register(pd, addr, length, iova, access.cast_unsigned())
    }

    /// ibv_reg_mr(3) as newer headers call it.
    verb fn ibv_reg_mr_iova2(
        pd: *mut ibv_pd,
        addr: *mut c_void,
        length: usize,
        iova: u64,
        access: u32,
    ) -> *mut ibv_mr {
        register(pd, addr, length, iova, access)
    }

    /// ibv_reg_mr_ex(3) for memory given by address.
    verb fn ibv_reg_mr_ex(pd: *mut ibv_pd, attr: *mut ibv_mr_init_attr) -> *mut ibv_mr {
        let attr = &*entry::required(attr, "mr_init_attr")?;
        let known = u64::from(IBV_REG_MR_MASK_IOVA | IBV_REG_MR_MASK_ADDR);
        let all = known
            | u64::from(IBV_REG_MR_MASK_FD | IBV_REG_MR_MASK_FD_OFFSET | IBV_REG_MR_MASK_DMAH | IBV_REG_MR_MASK_BUF);
        if attr.comp_mask & !all != 0 {
            return Err(Failure::invalid("unknown members in comp_mask"));
        }
        if attr.comp_mask & !known != 0 {
            return Err(Failure::unsupported("regions of buffers that are not memory of this process"));
        }
        if attr.comp_mask & u64::from(IBV_REG_MR_MASK_ADDR) == 0 {
            return Err(Failure::invalid("an address is needed"));
        }
        let given = attr.comp_mask & u64::from(IBV_REG_MR_MASK_IOVA) != 0;
        let iova = if given { attr.iova } else { attr.addr.addr() as u64 };
        register(pd, attr.addr, attr.length, iova, attr.access.cast_unsigned())
    }

    /// ibv_reg_mr(3): memory of other devices is out of reach.
    verb fn ibv_reg_dmabuf_mr(
        pd: *mut ibv_pd,
        _offset: u64,
        _length: usize,
        _iova: u64,
        _fd: c_int,
        _access: c_int,
    ) -> *mut ibv_mr {
        look::<CPd>(pd)?;
        Err(Failure::unsupported("dma-buf regions"))
    }

    /// ibv_rereg_mr(3). Keys change with domain and range: that is what makes old ones useless. They stay when only rights change.
    verb fn ibv_rereg_mr(
        mr: *mut ibv_mr,
        flags: c_int,
        pd: *mut ibv_pd,
        addr: *mut c_void,
        length: usize,
        flags_access: c_int,
    ) -> RereregCode {
        let region = look::<CMr>(mr)?;
        let wants = |flag: u32| flags.cast_unsigned() & flag != 0;
        if flags.cast_unsigned() & !IBV_REREG_MR_FLAGS_SUPPORTED != 0 {
            return Err(Failure::invalid("unknown flags"));
        }
        if flags_access != 0 && !wants(IBV_REREG_MR_CHANGE_ACCESS) {
            return Err(Failure::invalid("rights without IBV_REREG_MR_CHANGE_ACCESS"));
        }
        if wants(IBV_REREG_MR_CHANGE_TRANSLATION) && (addr.is_null() || length == 0) {
            return Err(Failure::invalid("a new translation needs an address and a length"));
        }
        let domain = if wants(IBV_REREG_MR_CHANGE_PD) { Some(look::<CPd>(pd)?) } else { None };
        let mut inner = region.inner.lock();
        let new_access =
            if wants(IBV_REREG_MR_CHANGE_ACCESS) { Some(access(flags_access.cast_unsigned())?) } else { None };
        let range = wants(IBV_REREG_MR_CHANGE_TRANSLATION)
            .then_some((addr.addr() as u64, length as u64, addr.addr() as u64));
        let (old_addr, old_len, _) = inner.0.range();
        let (check_addr, check_len) = range.map_or((old_addr, old_len), |(addr, len, _)| (addr, len));
        check_memory(check_addr, check_len, new_access.unwrap_or(inner.0.access()))?;
        let new = inner.0.reregister(domain.map(|d| &d.pd), range, new_access)?;
        ((*mr).handle, (*mr).lkey, (*mr).rkey) = (new.stag(), new.stag(), new.stag());
        if range.is_some() {
            ((*mr).addr, (*mr).length) = (addr, length);
        }
        inner.0 = new;
        if let Some(domain) = domain {
            (*mr).pd = pd;
            inner.1 = domain.users.hold();
        }
        Ok(())
    }

    /// ibv_dereg_mr(3). Waits for a receive into the region that is in progress.
    verb fn ibv_dereg_mr(mr: *mut ibv_mr) -> Code {
        let region = object::take::<CMr>(mr)?;
        region.inner.lock().0.deregister();
        Ok(())
    }

    /// ibv_import_pd(3).
    verb fn ibv_import_pd(_context: *mut ibv_context, _handle: u32) -> *mut ibv_pd {
        Err(Failure::unsupported("importing a protection domain"))
    }

    /// ibv_unimport_pd(3).
    verb fn ibv_unimport_pd(_pd: *mut ibv_pd) -> () {
        Ok(())
    }

    /// ibv_import_mr(3).
    verb fn ibv_import_mr(_pd: *mut ibv_pd, _handle: u32) -> *mut ibv_mr {
        Err(Failure::unsupported("importing a memory region"))
    }

    /// ibv_unimport_mr(3).
    verb fn ibv_unimport_mr(_mr: *mut ibv_mr) -> () {
        Ok(())
    }

    /// ibv_fork_init(3). Our regions are ordinary memory: a child's copy on write harms nobody.
    fn ibv_fork_init() -> Code {
        Ok(())
    }

    /// ibv_is_fork_initialized(3): fork is safe without anybody's help.
    fn ibv_is_fork_initialized() -> u32 {
        Ok(IBV_FORK_UNNEEDED)
    }

    /// Part of what vendor drivers call. Nothing to do, as above.
    fn ibv_dontfork_range(_base: *mut c_void, _size: usize) -> Code {
        Ok(())
    }

    /// Part of what vendor drivers call. Nothing to do, as above.
    fn ibv_dofork_range(_base: *mut c_void, _size: usize) -> Code {
        Ok(())
    }
}

slot! {
    /// ibv_advise_mr(3): prefetches the pages of the given pieces of regions.
    verb fn advise_mr(
        pd: *mut ibv_pd,
        advice: ib_uverbs_advise_mr_advice,
        flags: u32,
        sges: *mut ibv_sge,
        num_sges: u32,
    ) -> Code {
        look::<CPd>(pd)?;
        if flags & !ADVISE_FLUSH != 0 || sges.is_null() != (num_sges == 0) {
            return Err(Failure::invalid("flags or list"));
        }
        let write = match advice {
            IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH | IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT => false,
            IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE => true,
            _ => return Err(Failure::unsupported("this advice")),
        };
        for i in 0..num_sges as usize {
            let sge = &*sges.add(i);
            // Without NO_FAULT a prefetch faults pages in; with it only what is there counts, and that needs nothing.
            if advice != IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT {
                memory::check(sge.addr as usize, sge.length as usize, write)?;
            }
        }
        Ok(())
    }
}

/// `enum ibv_rereg_mr_err_code`: 0, or -1 for input that cannot be used, with `errno`.
#[derive(Debug)]
pub struct RereregCode;

impl entry::Convention for RereregCode {
    type C = c_int;
    type Value = ();
    fn success((): ()) -> c_int {
        0
    }
    fn failure(errno: c_int) -> c_int {
        entry::set_errno(errno);
        // IBV_REREG_MR_ERR_INPUT. Nothing was changed: the old region is still good.
        -1
    }
}
