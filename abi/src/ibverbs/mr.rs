//! Protection domains and memory regions.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use uwarp_abi_types::verbs::*;
use uwarp_driver::quota::Place;
use uwarp_mem::populate;
use uwarp_process::Mutex;
use uwarp_rnic::mr::{AccessError, MrCache, Part};
use uwarp_rnic::{Access, Mr, Pd, VerbsError};

use super::buffer;
use super::context::{Context, same_device};
use super::dmabuf::Mapping;
use super::parent::Contents;
use crate::convention::{Code, Outcome, Reregistered};
use crate::failure::{Failure, required};
use crate::object::{self, Object, Use, Users, Visible, look, zeroed};
use crate::{entry, slot};

/// A protection domain.
#[repr(C)]
#[derive(Debug)]
pub struct CPd {
    c: Visible<ibv_pd>,
    /// The RNIC's.
    pub pd: Arc<Pd>,
    /// Regions, memory windows, queue pairs and shared receive queues made in it.
    pub users: Users,
    /// Of a parent domain.
    contents: Option<Contents>,
    _place: Place,
    _context: Use,
}

impl CPd {
    /// Whether it is a parent domain.
    pub fn is_parent(&self) -> bool {
        self.contents.is_some()
    }
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
    inner: Mutex<(Arc<Mr>, Use), 22>,
    backing: Backing,
    _place: Place,
    _context: Use,
}

/// Whose the memory of a region is.
#[derive(Debug)]
pub enum Backing {
    /// The program's.
    Program,
    /// A buffer that another device shares.
    Mapped(#[allow(dead_code, reason = "unmapped by its drop")] Mapping),
    /// Device memory.
    Device(#[allow(dead_code, reason = "a use, until its drop")] Use),
}

// SAFETY: repr(C), the C structure first.
unsafe impl Object for CMr {
    type C = ibv_mr;
    const NAME: &'static str = "mr";
}

impl CMr {
    /// The region's key.
    pub fn stag(&self) -> u32 {
        self.inner.lock().0.stag()
    }
}

/// Flags that a device may ignore when it has no use for them.
const OPTIONAL: u32 = (IB_UVERBS_ACCESS_OPTIONAL_LAST << 1) - IB_UVERBS_ACCESS_OPTIONAL_FIRST;

/// IBV_ADVISE_MR_FLAG_FLUSH.
const ADVISE_FLUSH: u32 = 1;

/// Rights in the RNIC's form.
pub fn access(flags: u32) -> Result<Access, Failure> {
    let known = flags & !OPTIONAL;
    let access = Access::from_bits(known).ok_or_else(|| Failure::invalid("unknown access flags"))?;
    Ok(access | Access::from_bits_truncate(flags & OPTIONAL))
}

fn check_memory(address: u64, length: u64, access: Access) -> Result<(), Failure> {
    if access.contains(Access::ON_DEMAND) {
        return Ok(());
    }
    let writable = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    Ok(populate::check(address as usize, length as usize, access.intersects(writable))
        .map_err(VerbsError::from)?)
}

/// Registers `length` bytes at `address`; their offsets begin at `iova`.
///
/// # Safety
/// `pd` is a live protection domain or NULL.
pub unsafe fn register(
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    iova: u64,
    flags: u32,
) -> Result<*mut ibv_mr, Failure> {
    // SAFETY: the caller's promise.
    unsafe { register_with(pd, address, length, iova, flags, Backing::Program) }
}

/// Registers `length` bytes of a buffer that another device or process owns, from `offset` on. `iova` has the
/// same place in its page.
///
/// # Safety
/// As [`register`].
unsafe fn register_buffer(
    pd: *mut ibv_pd,
    fd: c_int,
    offset: u64,
    length: usize,
    iova: u64,
    flags: u32,
) -> Result<*mut ibv_mr, Failure> {
    // SAFETY: the caller's promise.
    unsafe { look::<CPd>(pd) }?;
    if access(flags)?.intersects(Access::ON_DEMAND | Access::ZERO_BASED) {
        return Err(Failure::unsupported("on-demand paging and zero-based offsets of shared buffers"));
    }
    if !(offset ^ iova).is_multiple_of(rustix::param::page_size() as u64) {
        return Err(Failure::invalid("iova and offset have different places in their pages"));
    }
    let mapping = Mapping::of(fd, offset, length, access(flags)?)?;
    let address = mapping.address();
    // SAFETY: as above.
    let mr = unsafe { register_with(pd, address, length, iova, flags, Backing::Mapped(mapping)) }?;
    // SAFETY: made just now. Adapters show the offset, as they have no address in this process.
    unsafe { (*mr).addr = std::ptr::without_provenance_mut(offset as usize) };
    Ok(mr)
}

/// [`register`], of memory that may be ours.
///
/// # Safety
/// As [`register`].
pub unsafe fn register_with(
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    iova: u64,
    flags: u32,
    backing: Backing,
) -> Result<*mut ibv_mr, Failure> {
    // SAFETY: the caller's promise.
    let domain = unsafe { look::<CPd>(pd) }?;
    // SAFETY: a live domain's context is alive.
    let context = unsafe { look::<Context>((*pd).context) }?;
    let access = access(flags)?;
    let range = (address.addr() as u64, length as u64);
    check_memory(range.0, range.1, access)?;
    let place = context.device.made.mrs.take(context.nic.limits().max_mr)?;
    let mr = Mr::register(&domain.pd, range.0, range.1, iova, access)?;
    // SAFETY: plain C data.
    let mut c: ibv_mr = unsafe { zeroed() };
    // SAFETY: alive.
    c.context = unsafe { (*pd).context };
    c.pd = pd;
    c.addr = address;
    c.length = length;
    (c.handle, c.lkey, c.rkey) = (mr.stag(), mr.stag(), mr.stag());
    Ok(object::give(CMr {
        c: Visible::new(c),
        inner: Mutex::new((mr, domain.users.hold())),
        backing,
        _place: place,
        _context: context.users.hold(),
    }))
}

/// ibv_alloc_pd(3).
///
/// # Safety
/// `context` is alive or NULL.
pub unsafe fn alloc_pd(context: *mut ibv_context) -> Result<*mut ibv_pd, Failure> {
    // SAFETY: the caller's promise.
    unsafe { give_domain(context, Pd::new(), None) }
}

/// Gives the program a handle of a domain.
///
/// # Safety
/// `context` is alive or NULL.
pub unsafe fn give_domain(
    context: *mut ibv_context,
    pd: Arc<Pd>,
    contents: Option<Contents>,
) -> Result<*mut ibv_pd, Failure> {
    // SAFETY: the caller's promise.
    let opened = unsafe { look::<Context>(context) }?;
    Ok(object::give(CPd {
        c: Visible::new(ibv_pd { context, handle: pd.id() }),
        pd,
        users: Users::default(),
        contents,
        _place: opened.device.made.pds.take(opened.nic.limits().max_pd)?,
        _context: opened.users.hold(),
    }))
}

/// ibv_reg_mr_ex(3), for memory given by address, descriptor or buffer.
///
/// # Safety
/// `pd` is a live protection domain or NULL; `attr` is valid or NULL.
unsafe fn register_ex(pd: *mut ibv_pd, attr: *mut ibv_mr_init_attr) -> Result<*mut ibv_mr, Failure> {
    // SAFETY: the caller's promise.
    let attr = unsafe { &*required(attr, "mr_init_attr")? };
    let given = |bits: u32| attr.comp_mask & u64::from(bits) != 0;
    let range = IBV_REG_MR_MASK_IOVA | IBV_REG_MR_MASK_ADDR | IBV_REG_MR_MASK_FD | IBV_REG_MR_MASK_FD_OFFSET;
    if given(IBV_REG_MR_MASK_DMAH) {
        return Err(Failure::unsupported("DMA handles"));
    }
    if attr.comp_mask & !u64::from(range | IBV_REG_MR_MASK_BUF) != 0 {
        return Err(Failure::unsupported("unknown members in comp_mask"));
    }
    if given(IBV_REG_MR_MASK_BUF) {
        if !given(IBV_REG_MR_MASK_ADDR) {
            return Err(Failure::invalid("a range in a buffer needs an address"));
        }
        // SAFETY: the caller's promise.
        unsafe { buffer::check(pd, attr.buf, attr.addr, attr.length) }?;
    }
    let flags = attr.access.cast_unsigned();
    match (given(IBV_REG_MR_MASK_FD), given(IBV_REG_MR_MASK_ADDR)) {
        (true, false) => {
            if !given(IBV_REG_MR_MASK_FD_OFFSET) || !given(IBV_REG_MR_MASK_IOVA) {
                return Err(Failure::invalid("a descriptor needs an offset and an iova"));
            }
            // SAFETY: the caller's promise.
            unsafe { register_buffer(pd, attr.fd, attr.fd_offset, attr.length, attr.iova, flags) }
        }
        (false, true) if !given(IBV_REG_MR_MASK_FD_OFFSET) => {
            let iova = if given(IBV_REG_MR_MASK_IOVA) { attr.iova } else { attr.addr.addr() as u64 };
            // SAFETY: the caller's promise.
            unsafe { register(pd, attr.addr, attr.length, iova, flags) }
        }
        _ => Err(Failure::invalid("either an address or a descriptor is needed")),
    }
}

entry! {
    /// ibv_alloc_pd(3).
    fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
        alloc_pd(context)
    }

    /// ibv_dealloc_pd(3).
    fn ibv_dealloc_pd(pd: *mut ibv_pd) -> Code {
        look::<CPd>(pd)?.users.none()?;
        drop(object::take::<CPd>(pd)?);
        Ok(())
    }

    /// ibv_reg_mr(3).
    fn ibv_reg_mr(pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int) -> *mut ibv_mr {
        register(pd, addr, length, addr.addr() as u64, access.cast_unsigned())
    }

    /// ibv_reg_mr(3), with offsets that count from `iova`.
    fn ibv_reg_mr_iova(
        pd: *mut ibv_pd,
        addr: *mut c_void,
        length: usize,
        iova: u64,
        access: c_int,
    ) -> *mut ibv_mr {
        register(pd, addr, length, iova, access.cast_unsigned())
    }

    /// ibv_reg_mr(3) as newer headers call it.
    fn ibv_reg_mr_iova2(
        pd: *mut ibv_pd,
        addr: *mut c_void,
        length: usize,
        iova: u64,
        access: u32,
    ) -> *mut ibv_mr {
        register(pd, addr, length, iova, access)
    }

    /// ibv_reg_mr_ex(3).
    fn ibv_reg_mr_ex(pd: *mut ibv_pd, attr: *mut ibv_mr_init_attr) -> *mut ibv_mr {
        register_ex(pd, attr)
    }

    /// ibv_reg_dmabuf_mr(3), for buffers that can be mapped.
    fn ibv_reg_dmabuf_mr(
        pd: *mut ibv_pd,
        offset: u64,
        length: usize,
        iova: u64,
        fd: c_int,
        access: c_int,
    ) -> *mut ibv_mr {
        register_buffer(pd, fd, offset, length, iova, access.cast_unsigned())
    }

    /// ibv_rereg_mr(3). Keys change with domain and range, which makes the old ones useless; they stay when
    /// only rights change. A failure changes nothing: the old region is still valid.
    fn ibv_rereg_mr(
        mr: *mut ibv_mr,
        flags: c_int,
        pd: *mut ibv_pd,
        addr: *mut c_void,
        length: usize,
        flags_access: c_int,
    ) -> Reregistered {
        let region = look::<CMr>(mr)?;
        let wants = |flag: u32| flags.cast_unsigned() & flag != 0;
        // What libibverbs refuses itself.
        if flags.cast_unsigned() & !IBV_REREG_MR_FLAGS_SUPPORTED != 0
            || (flags_access != 0 && !wants(IBV_REREG_MR_CHANGE_ACCESS))
            || (wants(IBV_REREG_MR_CHANGE_TRANSLATION) && (addr.is_null() || length == 0))
            || !matches!(region.backing, Backing::Program)
        {
            return Ok(Outcome::WrongInput);
        }
        if flags == 0 {
            return Err(Failure::invalid("nothing to change"));
        }
        let domain = if wants(IBV_REREG_MR_CHANGE_PD) { Some(look::<CPd>(pd)?) } else { None };
        if domain.is_some() {
            same_device((*mr).context, (*pd).context)?;
        }
        let mut inner = region.inner.lock();
        let new_access = match flags_access.cast_unsigned() {
            flags if wants(IBV_REREG_MR_CHANGE_ACCESS) => Some(access(flags)?),
            _ => None,
        };
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
        Ok(Outcome::Done)
    }

    /// ibv_dereg_mr(3). Waits for a receive into the region that is in progress. EBUSY while windows are
    /// bound to it.
    fn ibv_dereg_mr(mr: *mut ibv_mr) -> Code {
        if !look::<CMr>(mr)?.inner.lock().0.deregister() {
            // Memory windows are bound to it.
            return Err(VerbsError::Busy.into());
        }
        drop(object::take::<CMr>(mr)?);
        Ok(())
    }

    /// ibv_import_pd(3).
    fn ibv_import_pd(_context: *mut ibv_context, _handle: u32) -> *mut ibv_pd {
        Err(Failure::unsupported("importing a protection domain"))
    }

    /// ibv_unimport_pd(3).
    fn ibv_unimport_pd(_pd: *mut ibv_pd) -> () {
        Ok(())
    }

    /// ibv_import_mr(3).
    fn ibv_import_mr(_pd: *mut ibv_pd, _handle: u32) -> *mut ibv_mr {
        Err(Failure::unsupported("importing a memory region"))
    }

    /// ibv_unimport_mr(3).
    fn ibv_unimport_mr(_mr: *mut ibv_mr) -> () {
        Ok(())
    }

    /// ibv_fork_init(3). Our regions are ordinary memory: a child's copy on write does no harm.
    fn ibv_fork_init() -> Code {
        Ok(())
    }

    /// ibv_is_fork_initialized(3): fork is safe without any call.
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
    /// ibv_reg_mr_ex(3).
    verb fn reg_mr_ex(pd: *mut ibv_pd, attr: *mut ibv_mr_init_attr) -> *mut ibv_mr {
        register_ex(pd, attr)
    }

    /// ibv_advise_mr(3): prefetches the pages of the given pieces of regions. Done when it returns, also
    /// without `IBV_ADVISE_MR_FLAG_FLUSH`.
    verb fn advise_mr(
        pd: *mut ibv_pd,
        advice: ib_uverbs_advise_mr_advice,
        flags: u32,
        sges: *mut ibv_sge,
        num_sges: u32,
    ) -> Code {
        let domain = look::<CPd>(pd)?;
        if flags & !ADVISE_FLUSH != 0 || sges.is_null() != (num_sges == 0) {
            return Err(Failure::invalid("wrong flags or no list"));
        }
        let write = match advice {
            IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH | IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT => false,
            IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE => true,
            _ => return Err(Failure::unsupported("this kind of advice")),
        };
        let need = if write { Access::LOCAL_WRITE } else { Access::empty() };
        let mut regions = MrCache::default();
        for i in 0..num_sges as usize {
            let sge = &*sges.add(i);
            let part = Part { stag: sge.lkey, to: sge.addr, len: sge.length as usize };
            let (memory, _use) = regions.enter(part, domain.pd.id(), need).map_err(|e| match e {
                AccessError::WrongPd | AccessError::Rights => {
                    Failure::new(libc::EPERM, "a region of another protection domain, or a read-only one")
                }
                _ => Failure::new(libc::EFAULT, "no such region, or beyond its end"),
            })?;
            // NO_FAULT is about pages that are present; they need nothing.
            if advice != IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT {
                populate::check(memory.addr as usize, memory.len, write).map_err(VerbsError::from)?;
            }
        }
        Ok(())
    }
}
