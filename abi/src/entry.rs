//! The one way in: what every C entry point does around its own work.
//!
//! [`entry!`](crate::entry!) wraps a body that returns `Result<_, Failure>` into an exported `extern "C"` function. The wrapper
//! sets up logging on the first call, traces call and refusal, refuses verbs in a forked child, turns a failure into the
//! calling convention's errno, and stops panics: a bug of ours becomes `EIO` and a log line, never unwinding through the
//! program's frames.

use std::borrow::Cow;
use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::os::fd::RawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::Duration;

use uwarp_cm::EventChannel;
use uwarp_driver::{Channel, ChannelError};
use uwarp_rnic::VerbsError;

use crate::log;

/// Why an entry point fails: the errno the program gets and a reason for the log.
#[derive(Debug, Clone)]
pub struct Failure {
    /// The error number, positive.
    pub errno: c_int,
    /// Shown under `UWARP_LOG=debug`.
    pub why: Cow<'static, str>,
}

impl Failure {
    /// A failure with a reason.
    pub fn new(errno: c_int, why: impl Into<Cow<'static, str>>) -> Self {
        Self { errno, why: why.into() }
    }

    /// `EINVAL` with a reason.
    pub fn invalid(why: &'static str) -> Self {
        Self::new(libc::EINVAL, why)
    }

    /// `EOPNOTSUPP`: the call exists, this device does not offer it.
    pub fn unsupported(what: &'static str) -> Self {
        Self::new(libc::EOPNOTSUPP, what)
    }
}

impl From<VerbsError> for Failure {
    fn from(error: VerbsError) -> Self {
        // A full queue is an answer programs ask for again and again: no allocation for a text nobody may read.
        let why = match error {
            VerbsError::Invalid(why) | VerbsError::NoResources(why) | VerbsError::NotSupported(why) => {
                why.into()
            }
            VerbsError::QueueFull => "the queue is full".into(),
            other => Cow::Owned(other.to_string()),
        };
        Self::new(error.errno(), why)
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::new(error.raw_os_error().unwrap_or(libc::EIO), error.to_string())
    }
}

impl From<rustix::io::Errno> for Failure {
    fn from(error: rustix::io::Errno) -> Self {
        Self::new(error.raw_os_error(), error.to_string())
    }
}

/// How a C function says success and failure.
pub trait Convention {
    /// The C return type.
    type C;
    /// What the body returns on success.
    type Value;
    /// Converts a success.
    fn success(value: Self::Value) -> Self::C;
    /// Converts a failure; sets `errno` where the convention says so.
    fn failure(errno: c_int) -> Self::C;
}

/// Most verbs: 0, or the error number itself (and `errno`, which some programs read instead).
#[derive(Debug)]
pub struct Code;

impl Convention for Code {
    type C = c_int;
    type Value = ();
    fn success((): ()) -> c_int {
        0
    }
    fn failure(errno: c_int) -> c_int {
        set_errno(errno);
        errno
    }
}

/// librdmacm and some verbs: a value (0 mostly), or -1 and `errno`.
#[derive(Debug)]
pub struct MinusOne<T = ()>(std::marker::PhantomData<T>);

impl Convention for MinusOne<()> {
    type C = c_int;
    type Value = ();
    fn success((): ()) -> c_int {
        0
    }
    fn failure(errno: c_int) -> c_int {
        set_errno(errno);
        -1
    }
}

/// Values returned with the "-1 and errno" convention.
macro_rules! minus_one {
    ($($type:ty),*) => {$(
        impl Convention for MinusOne<$type> {
            type C = $type;
            type Value = $type;
            fn success(value: $type) -> $type {
                value
            }
            fn failure(errno: c_int) -> $type {
                set_errno(errno);
                -1
            }
        }
    )*};
}
minus_one!(c_int, isize, i64);

/// Functions whose failures are negative error numbers (and whose successes are not negative).
#[derive(Debug)]
pub struct Negative;

impl Convention for Negative {
    type C = c_int;
    type Value = c_int;
    fn success(value: c_int) -> c_int {
        value
    }
    fn failure(errno: c_int) -> c_int {
        set_errno(errno);
        -errno
    }
}

impl<T> Convention for *mut T {
    type C = *mut T;
    type Value = *mut T;
    fn success(value: *mut T) -> *mut T {
        value
    }
    fn failure(errno: c_int) -> *mut T {
        set_errno(errno);
        std::ptr::null_mut()
    }
}

impl<T> Convention for *const T {
    type C = *const T;
    type Value = *const T;
    fn success(value: *const T) -> *const T {
        value
    }
    fn failure(errno: c_int) -> *const T {
        set_errno(errno);
        std::ptr::null()
    }
}

/// Functions without a result, or whose result has no room for a failure (the zero value stands for it).
macro_rules! zero {
    ($($type:ty = $zero:expr),*) => {$(
        impl Convention for $type {
            type C = $type;
            type Value = $type;
            fn success(value: $type) -> $type {
                value
            }
            fn failure(errno: c_int) -> $type {
                set_errno(errno);
                $zero
            }
        }
    )*};
}
zero!(() = (), u8 = 0, u16 = 0, u32 = 0, u64 = 0, i32 = 0);

/// Sets the calling thread's `errno`.
pub fn set_errno(errno: c_int) {
    // SAFETY: the location is the thread's own and always valid.
    unsafe { *libc::__errno_location() = errno }
}

/// Reads the calling thread's `errno`.
pub fn errno() -> c_int {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() }
}

/// Whether a call makes sense in a child forked after the device was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterFork {
    /// A verb: refused with `ENODEV`.
    Refuse,
    /// A query of constants: answered.
    Allow,
}

/// Runs the body of an entry point under the policies of this module. Use [`entry!`](crate::entry!).
#[inline]
pub fn run<R: Convention>(
    name: &'static str,
    after_fork: AfterFork,
    body: impl FnOnce() -> Result<R::Value, Failure>,
) -> R::C {
    let _whole = Uncancelled::begin();
    let _under_way = UnderWay::begin();
    log::init();
    tracing::trace!(target: "uwarp::abi", "{name}");
    if after_fork == AfterFork::Refuse && uwarp_driver::forked() {
        return refuse::<R>(name, VerbsError::Forked.into());
    }
    contain::<R>(name, body)
}

/// Like [`run`] for calls made millions of times a second: no log set-up, no trace. Use [`slot!`](crate::slot!).
#[inline]
pub fn contain<R: Convention>(name: &'static str, body: impl FnOnce() -> Result<R::Value, Failure>) -> R::C {
    // A panic may leave our own state half changed. All of it is behind locks that do not poison, and the program is
    // told EIO; going on is the lesser harm compared with ending somebody's process.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => R::success(value),
        Ok(Err(failure)) => refuse::<R>(name, failure),
        Err(payload) => panicked::<R>(name, payload.as_ref()),
    }
}

// Cancellation points: glibc unwinds a cancelled thread out of them, so they are not what Rust takes a C function for.
unsafe extern "C-unwind" {
    fn pthread_testcancel();
    fn poll(fds: *mut libc::pollfd, count: libc::nfds_t, timeout: c_int) -> c_int;
}

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
}

/// While it lives, a cancellation of the calling thread (`pthread_cancel`) is put off. glibc unwinds a cancelled thread out of
/// whichever system call the thread makes next through the C library; in our frames that ends the process.
pub struct Uncancelled(c_int);

impl Uncancelled {
    /// From now on.
    #[inline]
    pub fn begin() -> Self {
        const PTHREAD_CANCEL_DISABLE: c_int = 1;
        let mut old = 0;
        // SAFETY: writes the old state.
        unsafe { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &raw mut old) };
        Self(old)
    }
}

impl Drop for Uncancelled {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the state that was. Going back to it acts on nothing by itself.
        unsafe { pthread_setcancelstate(self.0, null_mut()) };
    }
}

/// While it lives, the process counts as having something open. A child that is forked meanwhile, by another thread, has a copy of
/// every lock that the call holds, and nobody who releases it: it is refused, rather than to begin afresh and wait for ever.
struct UnderWay;

impl UnderWay {
    #[inline]
    fn begin() -> Self {
        uwarp_driver::object_made();
        Self
    }
}

impl Drop for UnderWay {
    #[inline]
    fn drop(&mut self) {
        uwarp_driver::object_gone();
    }
}

/// What a verb waits on.
pub trait Waits: Send + Sync + 'static {
    /// Its descriptor is readable while there is something.
    fn channel(&self) -> &Channel;
}

impl Waits for Channel {
    fn channel(&self) -> &Channel {
        self
    }
}

impl Waits for EventChannel {
    fn channel(&self) -> &Channel {
        self.doorbell()
    }
}

/// What the calling thread waits on, or has waited on when it left the call: cancelled, or with a jump out of a signal's handler.
struct WaitsOn(Cell<Option<Arc<dyn Waits>>>);

impl WaitsOn {
    fn set(&self, on: Option<Arc<dyn Waits>>) {
        if let Some(left) = self.0.replace(on) {
            left.channel().abandon();
        }
    }
}

impl Drop for WaitsOn {
    fn drop(&mut self) {
        self.set(None);
    }
}

thread_local! {
    static WAITS_ON: WaitsOn = const { WaitsOn(Cell::new(None)) };
}

/// The policies of [`run`] for a verb that waits without a limit, and is a cancellation point as the `read` is that other
/// implementations wait in: finds what to wait on, then takes what there is (`first`: at the beginning of the call) as often as there may
/// be something, until `take` says that it has.
///
/// The thread sleeps in `poll`, with nothing in hand: it may be cancelled there, and a signal's handler may jump out. What comes
/// then stays for others.
///
/// To be called by functions of the ABI "C-unwind" that have nothing to drop.
///
/// # Errors
/// -1 with `errno`.
pub fn wait<T: Waits>(
    name: &'static str,
    find: impl FnOnce() -> Result<Arc<T>, Failure>,
    mut take: impl FnMut(&T, bool) -> Result<Option<()>, Failure>,
) -> c_int {
    // SAFETY: no frame of ours that is left by it has anything to drop, here and below.
    unsafe { pthread_testcancel() };
    let mut on: *const T = std::ptr::null();
    let found = find_one(name, find, &mut on);
    if found != 0 {
        return found;
    }
    let mut first = true;
    loop {
        // What is there stays for others if the thread was cancelled before it takes it.
        // SAFETY: as above.
        unsafe { pthread_testcancel() };
        let (answer, next) = go_on(name, on, first, &mut take);
        match next {
            Next::Return => return answer,
            Next::Take => {}
            Next::Sleep(fd) => {
                let mut fds = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
                // SAFETY: one descriptor, which the thread's hold on the channel keeps open.
                let ready = unsafe { poll(&raw mut fds, 1, -1) };
                if ready < 0 && errno() == libc::EINTR && Channel::interruptible() {
                    // An event that has come meanwhile is the answer all the same.
                    return give_up(name, on, &mut take);
                }
            }
        }
        first = false;
    }
}

/// What a thread that waits does next.
#[derive(Clone, Copy)]
enum Next {
    Return,
    /// There is something, or was.
    Take,
    /// Until this descriptor is readable.
    Sleep(RawFd),
}

/// Frames that have something to drop are not [`wait`]'s own.
#[inline(never)]
fn find_one<T: Waits>(
    name: &'static str,
    find: impl FnOnce() -> Result<Arc<T>, Failure>,
    on: &mut *const T,
) -> c_int {
    run::<MinusOne>(name, AfterFork::Refuse, || {
        // A hold of its own, for the program may destroy what the thread waits on.
        let found = find()?;
        *on = Arc::as_ptr(&found);
        WAITS_ON
            .try_with(|waits_on| waits_on.set(Some(found)))
            .map_err(|_| Failure::invalid("the thread is about to end"))
    })
}

#[inline(never)]
fn go_on<T: Waits>(
    name: &'static str,
    on: *const T,
    first: bool,
    take: &mut impl FnMut(&T, bool) -> Result<Option<()>, Failure>,
) -> (c_int, Next) {
    let whole = Uncancelled::begin();
    let mut next = Next::Return;
    let answer = contain::<MinusOne>(name, || {
        // SAFETY: the thread holds it.
        let on = unsafe { &*on };
        if take(on, first)?.is_some() {
            return Ok(());
        }
        uwarp_driver::cancelled_as(Some(whole.0));
        let attended = on.channel().attend(None);
        uwarp_driver::cancelled_as(None);
        next = match attended {
            Ok(true) => Next::Take,
            Ok(false) => Next::Sleep(on.channel().fd()),
            Err(ChannelError::Interrupted) => return Err(interrupted()),
            Err(ChannelError::WouldBlock | ChannelError::NothingYet) => {
                return Err(Failure::new(libc::EAGAIN, "no event"));
            }
        };
        Ok(())
    });
    if matches!(next, Next::Return) {
        release();
    }
    (answer, next)
}

#[inline(never)]
fn give_up<T: Waits>(
    name: &'static str,
    on: *const T,
    take: &mut impl FnMut(&T, bool) -> Result<Option<()>, Failure>,
) -> c_int {
    let _whole = Uncancelled::begin();
    let answer = contain::<MinusOne>(name, || {
        // SAFETY: the thread holds it.
        take(unsafe { &*on }, false)?.ok_or_else(interrupted)
    });
    release();
    answer
}

fn interrupted() -> Failure {
    Failure::new(libc::EINTR, "interrupted by a signal")
}

fn release() {
    let errno = errno();
    // Nothing is left to take care of: dropped without more.
    let _ = WAITS_ON.try_with(|waits_on| drop(waits_on.0.take()));
    set_errno(errno);
}

/// Sleeps, as a cancellation point; to be called as [`wait`] is.
pub fn sleep(time: Duration) {
    let errno = errno();
    // SAFETY: no descriptors; no frame of ours that is left has anything to drop.
    unsafe { poll(null_mut(), 0, c_int::try_from(time.as_millis()).unwrap_or(c_int::MAX)) };
    set_errno(errno);
}

#[cold]
fn refuse<R: Convention>(name: &'static str, failure: Failure) -> R::C {
    let error = std::io::Error::from_raw_os_error(failure.errno);
    tracing::debug!(target: "uwarp::abi", "{name}: {}: {error}", failure.why);
    R::failure(failure.errno)
}

#[cold]
fn panicked<R: Convention>(name: &'static str, payload: &(dyn std::any::Any + Send)) -> R::C {
    let what = payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message");
    tracing::error!(target: "uwarp::abi", "{name}: a bug in uwarp: {what}");
    R::failure(libc::EIO)
}

/// Defines exported C functions.
///
/// ```ignore
/// entry! {
///     /// ibv_dealloc_pd(3).
///     verb fn ibv_dealloc_pd(pd: *mut ibv_pd) -> Code {
///         ...                               // Result<(), Failure>; `?` works on VerbsError and io errors
///     }
///     /// ibv_node_type_str(3).
///     fn ibv_node_type_str(node_type: c_int) -> *const c_char { ... }
/// }
/// ```
///
/// `verb fn` is refused in a forked child, plain `fn` is not. The return type is a [`Convention`]. The body is an unsafe
/// context, as the body of an `unsafe fn` once was: an entry point believes its pointers because C gives it no other
/// choice. Where it does more than convert and call, it says why that is sound.
#[macro_export]
macro_rules! entry {
    () => {};
    ($(#[$meta:meta])* verb fn $name:ident($($arg:ident: $type:ty),* $(,)?) -> $ret:ty $body:block $($rest:tt)*) => {
        $crate::entry!(@define Refuse $(#[$meta])* $name($($arg: $type),*) -> $ret $body);
        $crate::entry! { $($rest)* }
    };
    ($(#[$meta:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) -> $ret:ty $body:block $($rest:tt)*) => {
        $crate::entry!(@define Allow $(#[$meta])* $name($($arg: $type),*) -> $ret $body);
        $crate::entry! { $($rest)* }
    };
    (@define $fork:ident $(#[$meta:meta])* $name:ident($($arg:ident: $type:ty),*) -> $ret:ty $body:block) => {
        $(#[$meta])*
        ///
        /// # Safety
        /// The pointers are what the C interface says: valid, of the right kind, not used after they were given up.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> <$ret as $crate::entry::Convention>::C {
            $crate::entry::run::<$ret>(stringify!($name), $crate::entry::AfterFork::$fork, move || {
                #[allow(unused_unsafe, clippy::undocumented_unsafe_blocks, reason = "see the macro's documentation")]
                unsafe { $body }
            })
        }
    };
}

/// Defines functions that programs reach through a table of function pointers; not exported.
///
/// Same form as [`entry!`]: `verb fn` has all its policies; `hot fn` is called millions of times a second, so it sets up
/// no log, leaves no trace and sees to forks itself.
#[macro_export]
macro_rules! slot {
    () => {};
    ($(#[$meta:meta])* verb fn $name:ident($($arg:ident: $type:ty),* $(,)?) -> $ret:ty $body:block $($rest:tt)*) => {
        $(#[$meta])*
        ///
        /// # Safety
        /// The pointers are what the C interface says: valid, of the right kind, not used after they were given up.
        pub unsafe extern "C" fn $name($($arg: $type),*) -> <$ret as $crate::entry::Convention>::C {
            $crate::entry::run::<$ret>(stringify!($name), $crate::entry::AfterFork::Refuse, move || {
                #[allow(unused_unsafe, clippy::undocumented_unsafe_blocks, reason = "see the macro's documentation")]
                unsafe { $body }
            })
        }
        $crate::slot! { $($rest)* }
    };
    ($(#[$meta:meta])* hot fn $name:ident($($arg:ident: $type:ty),* $(,)?) -> $ret:ty $body:block $($rest:tt)*) => {
        $(#[$meta])*
        ///
        /// # Safety
        /// The pointers are what the C interface says: valid, of the right kind, not used after they were given up.
        pub unsafe extern "C" fn $name($($arg: $type),*) -> <$ret as $crate::entry::Convention>::C {
            $crate::entry::contain::<$ret>(stringify!($name), move || {
                #[allow(unused_unsafe, clippy::undocumented_unsafe_blocks, reason = "see the macro's documentation")]
                unsafe { $body }
            })
        }
        $crate::slot! { $($rest)* }
    };
}

/// A null check with the program's own name for the argument.
pub fn required<T>(pointer: *mut T, name: &'static str) -> Result<*mut T, Failure> {
    if pointer.is_null() { Err(Failure::new(libc::EINVAL, format!("{name} is NULL"))) } else { Ok(pointer) }
}

/// A pointer to nothing in particular.
pub type Opaque = *mut c_void;

#[cfg(test)]
mod tests {
    use super::*;

    entry! {
        /// Succeeds, fails or panics.
        fn uwarp_test_code(what: c_int) -> Code {
            match what {
                0 => Ok(()),
                1 => Err(Failure::invalid("asked for")),
                _ => panic!("asked for"),
            }
        }
        /// The same with the other convention.
        fn uwarp_test_minus_one(what: c_int) -> MinusOne {
            match what {
                0 => Ok(()),
                1 => Err(VerbsError::QueueFull.into()),
                _ => panic!("asked for"),
            }
        }
        /// The same for pointers.
        fn uwarp_test_pointer(what: c_int) -> *mut c_int {
            match what {
                0 => Ok(std::ptr::dangling_mut()),
                1 => Err(VerbsError::BadAddress.into()),
                _ => panic!("asked for"),
            }
        }
    }

    entry! {
        /// Forks, as another thread might at this moment; says whether the child is refused.
        fn uwarp_test_fork() -> MinusOne<c_int> {
            // SAFETY: the child only reads an atomic and ends.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: no pointers.
                unsafe { libc::_exit(c_int::from(uwarp_driver::forked())) };
            }
            let mut status = 0;
            // SAFETY: a child of this call; writes the status.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            Ok(libc::WEXITSTATUS(status))
        }
    }

    #[test]
    fn a_child_forked_in_the_middle_of_a_call_is_refused() {
        // Has the handlers for forks.
        uwarp_driver::Nic::open().unwrap();
        // SAFETY: no pointers.
        assert_eq!(unsafe { uwarp_test_fork() }, 1);
    }

    #[test]
    fn each_convention_reports_success_failure_and_bug() {
        let seen: Vec<_> = (0..3)
            .map(|what| {
                set_errno(0);
                // SAFETY: no pointers.
                let code = (unsafe { uwarp_test_code(what) }, errno());
                // SAFETY: no pointers.
                let minus_one = (unsafe { uwarp_test_minus_one(what) }, errno());
                // SAFETY: no pointers.
                let pointer = (unsafe { uwarp_test_pointer(what) }.is_null(), errno());
                (code, minus_one, pointer)
            })
            .collect();
        assert_eq!(
            seen,
            [
                ((0, 0), (0, 0), (false, 0)),
                ((libc::EINVAL, libc::EINVAL), (-1, libc::ENOMEM), (true, libc::EFAULT)),
                ((libc::EIO, libc::EIO), (-1, libc::EIO), (true, libc::EIO)),
            ]
        );
    }
}
