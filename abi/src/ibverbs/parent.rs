//! Thread domains, and parent domains: a protection domain together with a thread domain.
//!
//! A thread domain is the program's promise that only one thread at a time uses the objects in it. We take
//! our locks all the same: an uncontended lock costs nanoseconds, and a broken promise does no harm. So both
//! kinds of domain only group objects.

use uwarp_abi_types::verbs::*;

use super::context::Context;
use super::mr::{self, CPd};
use crate::convention::Code;
use crate::failure::{Failure, required};
use crate::object::{self, Object, Use, Users, Visible, look};
use crate::slot;

/// A thread domain.
#[repr(C)]
#[derive(Debug)]
pub struct CTd {
    c: Visible<ibv_td>,
    /// Parent domains that contain it.
    users: Users,
    _context: Use,
}

// SAFETY: repr(C), the C structure first.
unsafe impl Object for CTd {
    type C = ibv_td;
    const NAME: &'static str = "td";
}

/// The parts of a parent domain; they cannot be destroyed before it.
#[derive(Debug)]
pub struct Contents {
    _domain: Use,
    _thread: Option<Use>,
}

/// The parent domain of this context at `pd`.
///
/// # Safety
/// `pd` is alive or NULL.
pub unsafe fn look_at_parent<'a>(pd: *mut ibv_pd, context: *mut ibv_context) -> Result<&'a CPd, Failure> {
    // SAFETY: the caller's promise.
    let (domain, of) = unsafe { (look::<CPd>(pd)?, (*pd).context) };
    if !domain.is_parent() || of != context {
        return Err(Failure::invalid("not a parent domain of this context"));
    }
    Ok(domain)
}

slot! {
    /// ibv_alloc_td(3).
    verb fn alloc_td(context: *mut ibv_context, attr: *mut ibv_td_init_attr) -> *mut ibv_td {
        let opened = look::<Context>(context)?;
        if (*required(attr, "init_attr")?).comp_mask != 0 {
            return Err(Failure::unsupported("members in comp_mask"));
        }
        Ok(object::give(CTd {
            c: Visible::new(ibv_td { context }),
            users: Users::default(),
            _context: opened.users.hold(),
        }))
    }

    /// ibv_alloc_td(3).
    verb fn dealloc_td(td: *mut ibv_td) -> Code {
        look::<CTd>(td)?.users.none()?;
        drop(object::take::<CTd>(td)?);
        Ok(())
    }

    /// ibv_alloc_parent_domain(3). The program's allocators are for buffers that an adapter reads and writes;
    /// we have no such buffers.
    verb fn alloc_parent_domain(
        context: *mut ibv_context,
        attr: *mut ibv_parent_domain_init_attr,
    ) -> *mut ibv_pd {
        let attr = &*required(attr, "attr")?;
        if attr.comp_mask & !IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT != 0 {
            return Err(Failure::unsupported("allocators of the program"));
        }
        let domain = look::<CPd>(attr.pd)?;
        let thread = if attr.td.is_null() { None } else { Some(look::<CTd>(attr.td)?) };
        let elsewhere = thread.is_some_and(|_| (*attr.td).context != context);
        if (*attr.pd).context != context || elsewhere || domain.is_parent() {
            return Err(Failure::invalid("the protection or thread domain is of another context"));
        }
        let contents =
            Contents { _domain: domain.users.hold(), _thread: thread.map(|thread| thread.users.hold()) };
        mr::give_domain(context, domain.pd.clone(), Some(contents))
    }
}
