//! One kind of ownership for each C type: a box that we allocate. C holds it by a pointer to the structure
//! embedded in it, and the destroying verb takes it back.
//!
//! The conversions between pointers and references live here and nowhere else.

use std::cell::UnsafeCell;
use std::mem::{MaybeUninit, offset_of};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use uwarp_driver::Birth;
use uwarp_process::{Condvar, Mutex};
use uwarp_rnic::VerbsError;

use crate::failure::Failure;

/// The part of an object that C sees. The program reads it at any time and writes some members of it, so
/// there is never a Rust reference into it: members are read and written through the pointer, one at a time.
#[repr(transparent)]
pub struct Visible<T>(UnsafeCell<T>);

impl<T> std::fmt::Debug for Visible<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(std::any::type_name::<T>())
    }
}

// SAFETY: it is a block of plain C memory that is only accessed by raw pointer; the code that does so answers
// for races, as C programs do.
unsafe impl<T> Send for Visible<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Visible<T> {}

impl<T> Visible<T> {
    /// Wraps it.
    pub const fn new(value: T) -> Self {
        Self(UnsafeCell::new(value))
    }

    /// Its address.
    pub const fn get(&self) -> *mut T {
        self.0.get()
    }
}

/// All bits zero.
///
/// # Safety
/// That must be a valid `T`. It is for C's structures (numbers, nullable pointers, pthread objects' initial
/// values).
pub unsafe fn zeroed<T>() -> T {
    // SAFETY: the caller's promise.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

/// An object that C knows by a structure inside it.
///
/// # Safety
/// `Self` is `repr(C)` and has a `Visible<_>` that holds, at `OFFSET` bytes from the start of `Self`, a
/// `Self::C`.
pub unsafe trait Object: Sized {
    /// The C structure.
    type C;
    /// Bytes from the start of `Self` to the C structure.
    const OFFSET: usize = 0;
    /// The argument's name in messages.
    const NAME: &'static str;
}

/// An object as it lies in memory.
struct Given<T> {
    /// A child has a copy of what its parent has, and must not use it.
    birth: Birth,
    object: T,
}

/// The address C knows an object by.
pub fn address<T: Object>(object: &T) -> *mut T::C {
    // The C structure lies behind a `Visible`, so writing through a pointer made from a shared reference is
    // allowed.
    std::ptr::from_ref(object).cast::<u8>().wrapping_add(T::OFFSET).cast::<T::C>().cast_mut()
}

/// Gives an object to the program, until [`take`].
pub fn give<T: Object>(object: T) -> *mut T::C {
    let given = Box::into_raw(Box::new(Given { birth: Birth::here(), object }));
    inside::<T>(given)
}

/// The address that C knows, in memory that may not be written yet.
fn inside<T: Object>(given: *mut Given<T>) -> *mut T::C {
    given.cast::<u8>().wrapping_add(offset_of!(Given<T>, object) + T::OFFSET).cast()
}

/// The object around what C knows.
fn around<T: Object>(c: *mut T::C) -> *mut Given<T> {
    c.cast::<u8>().wrapping_sub(offset_of!(Given<T>, object) + T::OFFSET).cast()
}

/// Creates an object whose parts need its address, and gives it to the program.
///
/// `make` gets the address that C will use; nothing may read it before `make` has returned.
pub fn give_with<T: Object>(
    make: impl FnOnce(*mut T::C) -> Result<T, Failure>,
) -> Result<*mut T::C, Failure> {
    let mut place = Box::<Given<T>>::new_uninit();
    let address = inside::<T>(place.as_mut_ptr());
    place.write(Given { birth: Birth::here(), object: make(address)? });
    Ok(inside::<T>(Box::into_raw(place).cast()))
}

/// A reference to an object that the program holds. NULL is `EINVAL`; in a child, an object of its parent's
/// is `ENODEV`.
///
/// # Safety
/// `c` is NULL or came from [`give`] and was not given to [`take`]; it stays so while the reference is used.
#[inline]
pub unsafe fn look<'a, T: Object>(c: *mut T::C) -> Result<&'a T, Failure> {
    if c.is_null() {
        return Err(Failure::new(libc::EINVAL, format!("{} is NULL", T::NAME)));
    }
    // SAFETY: by the caller's promise it lies inside a live object, which `give` made from a box.
    let given = unsafe { &*around::<T>(c) };
    if given.birth.is_parents() { Err(VerbsError::Forked.into()) } else { Ok(&given.object) }
}

/// Takes an object back from the program, to drop it.
///
/// # Safety
/// As [`look`], and nothing uses the object any more.
pub unsafe fn take<T: Object>(c: *mut T::C) -> Result<T, Failure> {
    if c.is_null() {
        return Err(Failure::new(libc::EINVAL, format!("{} is NULL", T::NAME)));
    }
    // SAFETY: the caller's promise.
    unsafe { look::<T>(c) }?;
    // SAFETY: by the caller's promise it is the box that `give` gave away.
    Ok(unsafe { Box::from_raw(around::<T>(c)) }.object)
}

/// Counts the objects that use another one, which can then not be destroyed (`EBUSY`).
#[derive(Debug, Default, Clone)]
pub struct Users(Arc<AtomicUsize>);

/// One use; ends with its drop.
#[derive(Debug)]
pub struct Use(Arc<AtomicUsize>);

impl Users {
    /// Begins a use.
    pub fn hold(&self) -> Use {
        self.0.fetch_add(1, Ordering::Relaxed);
        Use(self.0.clone())
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.load(Ordering::Acquire)
    }

    /// Refuses destruction while there are uses.
    pub fn none(&self) -> Result<(), Failure> {
        if self.count() == 0 { Ok(()) } else { Err(VerbsError::Busy.into()) }
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

/// Events of an object that were queued and that the program has not acknowledged.
///
/// An event is counted when it is queued, not when the program takes it: so there is no moment at which it is
/// neither in the queue nor counted, and a destroying verb cannot miss one.
#[derive(Debug, Default)]
pub struct Unacknowledged {
    count: Mutex<usize, 24>,
    none: Condvar,
}

impl Unacknowledged {
    /// An event was queued.
    pub fn queued(&self) {
        *self.count.lock() += 1;
    }

    /// The program acknowledged `n` events, or `n` were dropped from the queue. A larger `n` than there are
    /// events means all.
    pub fn done(&self, n: usize) {
        let mut count = self.count.lock();
        *count = count.saturating_sub(n);
        if *count == 0 {
            self.none.notify_all();
        }
    }

    /// Blocks until the program has acknowledged all it took, as ibv_destroy_cq(3) and ibv_destroy_qp(3)
    /// promise.
    pub fn wait(&self) {
        let mut count = self.count.lock();
        while *count != 0 {
            self.none.wait(&mut count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    struct Thing {
        before: u64,
        c: Visible<u32>,
        dropped: Arc<AtomicUsize>,
    }

    // SAFETY: repr(C), `c` at the offset given.
    unsafe impl Object for Thing {
        type C = u32;
        const OFFSET: usize = std::mem::offset_of!(Thing, c);
        const NAME: &'static str = "thing";
    }

    #[test]
    fn an_object_is_found_by_its_inner_structure_and_dropped_once() {
        let dropped = Arc::new(AtomicUsize::new(0));
        let c = give_with(|at: *mut u32| {
            Ok(Thing { before: at.addr() as u64, c: Visible::new(7), dropped: dropped.clone() })
        })
        .unwrap();
        // SAFETY: `c` is alive.
        let thing = unsafe { look::<Thing>(c) }.unwrap();
        assert_eq!((thing.before, address(thing)), (c.addr() as u64, c));
        // SAFETY: `c` is alive, and no other thread uses it.
        assert_eq!(unsafe { *c }, 7);
        // SAFETY: nothing uses it any more.
        drop(unsafe { take::<Thing>(c) }.unwrap());
        assert_eq!(Arc::strong_count(&dropped), 1);
        // SAFETY: NULL is allowed.
        assert_eq!(unsafe { look::<Thing>(std::ptr::null_mut()) }.err().map(|e| e.errno), Some(libc::EINVAL));
    }

    #[test]
    fn uses_are_counted() {
        let users = Users::default();
        let a = users.hold();
        assert_eq!(users.none().err().map(|e| e.errno), Some(libc::EBUSY));
        drop(a);
        assert!(users.none().is_ok());
    }
}
