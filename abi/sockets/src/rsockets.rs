//! The library's calls, of `<rdma/rsocket.h>`. It is loaded when the first rule applies: before that, and in
//! programs to which none ever applies, nothing of it is in memory.

use std::ffi::{CStr, CString, c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use libc::{msghdr, nfds_t, pollfd, sockaddr, socklen_t};
use uwarp_abi_types::preload::{
    SOL_UWARP_PRELOAD, UWARP_JOINED, UWARP_LAST_WORDS, UWARP_LOOK, UWARP_PREPARE, UWARP_PROGRESS,
    UWARP_TAKE_OVER, UWARP_UNREAD, UWARP_WATCH, progress, take_over, watch,
};
use uwarp_preload::set_errno;

use crate::sys;

macro_rules! table {
    ($(fn $name:ident($($type:ty),*) -> $result:ty;)*) => {
        /// The functions, by their names.
        pub struct Rsockets {
            $(pub $name: unsafe extern "C" fn($($type),*) -> $result,)*
        }

        impl Rsockets {
            /// # Safety
            /// `library` is a handle of dlopen(3).
            unsafe fn of(library: *mut c_void) -> Option<Self> {
                Some(Self {$(
                    $name: {
                        let name = CString::new(stringify!($name)).ok()?;
                        // SAFETY: the caller's promise, and a C string.
                        let found = unsafe { libc::dlsym(library, name.as_ptr()) };
                        if found.is_null() {
                            return None;
                        }
                        // SAFETY: the function of this name has this type.
                        unsafe {
                            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($type),*) -> $result>(
                                found,
                            )
                        }
                    },
                )*})
            }
        }
    };
}

table! {
    fn rsocket(c_int, c_int, c_int) -> c_int;
    fn rbind(c_int, *const sockaddr, socklen_t) -> c_int;
    fn rlisten(c_int, c_int) -> c_int;
    fn raccept(c_int, *mut sockaddr, *mut socklen_t) -> c_int;
    fn rconnect(c_int, *const sockaddr, socklen_t) -> c_int;
    fn rshutdown(c_int, c_int) -> c_int;
    fn rclose(c_int) -> c_int;
    fn rrecv(c_int, *mut c_void, usize, c_int) -> isize;
    fn rrecvmsg(c_int, *mut msghdr, c_int) -> isize;
    fn rsend(c_int, *const c_void, usize, c_int) -> isize;
    fn rsendmsg(c_int, *const msghdr, c_int) -> isize;
    fn rpoll(*mut pollfd, nfds_t, c_int) -> c_int;
    fn rgetpeername(c_int, *mut sockaddr, *mut socklen_t) -> c_int;
    fn rgetsockname(c_int, *mut sockaddr, *mut socklen_t) -> c_int;
    fn rsetsockopt(c_int, c_int, c_int, *const c_void, socklen_t) -> c_int;
    fn rgetsockopt(c_int, c_int, c_int, *mut c_void, *mut socklen_t) -> c_int;
    fn rfcntl(c_int, c_int, libc::c_long) -> c_int;
}

/// A child that is forked meanwhile cannot load it.
static LOADING: AtomicBool = AtomicBool::new(false);
static LOADED: OnceLock<Option<Rsockets>> = OnceLock::new();

/// Loads the library at the first call. `None`, and `ENODEV`: it cannot be loaded; a line has said why.
pub fn load() -> Option<&'static Rsockets> {
    let loaded = LOADED.get_or_init(|| {
        LOADING.store(true, Ordering::SeqCst);
        match find() {
            Ok(found) => Some(found),
            Err(reason) => {
                sys::complain(&reason);
                None
            }
        }
    });
    if loaded.is_none() {
        set_errno(libc::ENODEV);
    }
    loaded.as_ref()
}

/// The library that is loaded. Only for sockets that a rule has chosen: then it is.
pub fn loaded() -> Option<&'static Rsockets> {
    LOADED.get()?.as_ref()
}

/// Whether it is loaded, or about to be.
pub fn is_loading() -> bool {
    LOADING.load(Ordering::SeqCst)
}

fn find() -> Result<Rsockets, String> {
    // Beside this one, also if the program has cleared its environment.
    let path = directory().ok_or("cannot find the directory of libuwarp-sockets.so")?;
    let path = CString::new(format!("{path}/librdmacm.so.1")).map_err(|error| error.to_string())?;
    // SAFETY: a C string.
    let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if library.is_null() {
        // SAFETY: NULL or a C string, of this thread.
        let why = unsafe { libc::dlerror() };
        // SAFETY: as above.
        let why = (!why.is_null()).then(|| unsafe { CStr::from_ptr(why) }.to_string_lossy().into_owned());
        return Err(format!("cannot load the library: {}", why.unwrap_or_default()));
    }
    // SAFETY: a handle of dlopen.
    unsafe { Rsockets::of(library) }.ok_or_else(|| format!("{} is not uwarp's", path.to_string_lossy()))
}

/// Where this library is.
fn directory() -> Option<String> {
    // SAFETY: zeros are a value of this structure, which the call fills in; our own address.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        let here: fn() -> Option<String> = directory;
        if libc::dladdr(here as *const c_void, &raw mut info) == 0 || info.dli_fname.is_null() {
            return None;
        }
        let name = CStr::from_ptr(info.dli_fname).to_str().ok()?;
        Some(name.rsplit_once('/').map_or(".", |(directory, _)| directory).to_owned())
    }
}

impl Rsockets {
    /// What the socket is ready for, in poll(2)'s bits; the next change of it is reported to the watch.
    /// `None`: it is closed.
    pub fn look(&self, socket: c_int, edges: bool) -> Option<i16> {
        // In: whether each change is to be reported, although the socket stays ready.
        self.number(socket, SOL_UWARP_PRELOAD, UWARP_LOOK, c_int::from(edges)).map(|bits| bits as i16)
    }

    /// Bytes that can be read.
    pub fn unread(&self, socket: c_int) -> Option<c_int> {
        self.number(socket, SOL_UWARP_PRELOAD, UWARP_UNREAD, 0)
    }

    /// An option that is a number. Leaves `errno` as it was.
    pub fn number(&self, socket: c_int, level: c_int, name: c_int, before: c_int) -> Option<c_int> {
        let (mut value, mut len) = (before, size_of::<c_int>() as socklen_t);
        let got = sys::quietly(|| {
            // SAFETY: a number and its length.
            unsafe { (self.rgetsockopt)(socket, level, name, (&raw mut value).cast(), &raw mut len) }
        });
        (got == 0).then_some(value)
    }

    /// Sets an option that is a number, if there is such an option. Leaves `errno` as it was.
    pub fn set_number(&self, socket: c_int, level: c_int, name: c_int, value: c_int) {
        let len = size_of::<c_int>() as socklen_t;
        // SAFETY: a number and its length.
        sys::quietly(|| unsafe { (self.rsetsockopt)(socket, level, name, (&raw const value).cast(), len) });
    }

    /// The function that sends what the process has sent, and ends streams; any socket of the process does.
    pub fn last_words(&self, socket: c_int) -> Option<extern "C" fn()> {
        let (mut at, mut len) = (0_usize, size_of::<usize>() as socklen_t);
        let (level, name) = (SOL_UWARP_PRELOAD, UWARP_LAST_WORDS);
        let got = sys::quietly(|| {
            // SAFETY: a number and its length.
            unsafe { (self.rgetsockopt)(socket, level, name, (&raw mut at).cast(), &raw mut len) }
        });
        // SAFETY: what the option says it is; the library is never unloaded.
        (got == 0 && at != 0).then(|| unsafe { std::mem::transmute::<usize, extern "C" fn()>(at) })
    }

    /// From now on `changed` is called with `key` when the socket has changed.
    /// Calling [`watch::settle`] follows from changes that come with `later`.
    pub fn watch(
        &self,
        socket: c_int,
        changed: extern "C" fn(usize, c_int),
        key: usize,
        settle: extern "C" fn(),
    ) -> bool {
        let watch = watch { changed, key, settle };
        let (value, len) = ((&raw const watch).cast(), size_of::<watch>() as socklen_t);
        // SAFETY: the structure and its length.
        let set = || unsafe { (self.rsetsockopt)(socket, SOL_UWARP_PRELOAD, UWARP_WATCH, value, len) };
        sys::quietly(set) == 0
    }

    /// How threads that wait make progress.
    pub fn progress(&self, socket: c_int) -> Option<progress> {
        let mut progress = std::mem::MaybeUninit::<progress>::uninit();
        let mut len = size_of::<progress>() as socklen_t;
        let got = sys::quietly(|| {
            let to = progress.as_mut_ptr().cast();
            // SAFETY: room for the structure, and its length.
            unsafe { (self.rgetsockopt)(socket, SOL_UWARP_PRELOAD, UWARP_PROGRESS, to, &raw mut len) }
        });
        // SAFETY: the call has written it.
        (got == 0).then(|| unsafe { progress.assume_init() })
    }

    /// Makes all that [`Self::take_over`] needs. `EOPNOTSUPP`: `UWARP_LINK` has a rule that no TCP connection
    /// can follow.
    pub fn prepare(&self, socket: c_int, with: &take_over) -> Result<(), c_int> {
        self.set_take_over(socket, UWARP_PREPARE, with)
    }

    /// [`Self::take_over`] will not follow, or its stream is not wanted any more. Afterwards that runs
    /// ([`Self::joined`]), or nothing reads the connection.
    pub fn give_up(&self, socket: c_int) {
        let _ = self.set_take_over(socket, UWARP_PREPARE, &take_over { fd: -1, initiates: 0 });
    }

    /// The connection of the TCP socket that was prepared becomes this socket's.
    pub fn take_over(&self, socket: c_int, with: &take_over) -> bool {
        self.set_take_over(socket, UWARP_TAKE_OVER, with).is_ok()
    }

    fn set_take_over(&self, socket: c_int, name: c_int, with: &take_over) -> Result<(), c_int> {
        let (value, len) = (std::ptr::from_ref(with).cast(), size_of::<take_over>() as socklen_t);
        // SAFETY: the structure and its length.
        let set = || unsafe { (self.rsetsockopt)(socket, SOL_UWARP_PRELOAD, name, value, len) };
        sys::quietly(|| if set() == 0 { Ok(()) } else { Err(uwarp_preload::errno()) })
    }

    /// What has become of that: `None`: nothing yet.
    pub fn joined(&self, socket: c_int) -> Option<Result<(), c_int>> {
        match self.number(socket, SOL_UWARP_PRELOAD, UWARP_JOINED, 0) {
            None => Some(Err(libc::ECONNRESET)),
            Some(0) => None,
            Some(number) if number > 0 => Some(Ok(())),
            Some(number) => Some(Err(-number)),
        }
    }

    /// Sets or clears `O_NONBLOCK`.
    pub fn set_nonblocking(&self, socket: c_int, on: bool) {
        let flags = if on { libc::O_NONBLOCK } else { 0 };
        // SAFETY: no pointer.
        sys::quietly(|| unsafe { (self.rfcntl)(socket, libc::F_SETFL, flags.into()) });
    }

    /// Waits until the socket is ready for `events`; 0: `limit` milliseconds are over, -1: errno says why.
    pub fn wait(&self, socket: c_int, events: i16, limit: c_int) -> c_int {
        let mut entry = pollfd { fd: socket, events, revents: 0 };
        // SAFETY: one entry.
        unsafe { (self.rpoll)(&raw mut entry, 1, limit) }
    }
}

/// Says once that the program passes on what is no file.
pub fn say_passed() {
    static SAID: AtomicBool = AtomicBool::new(false);
    if !SAID.swap(true, Ordering::Relaxed) {
        sys::warn(
            "an iWARP socket cannot be passed to another process (SCM_RIGHTS). Keep this port on TCP by a \
             rule such as tcp:port=PORT",
        );
    }
}

/// Says once that a child process has no device.
pub fn say_forked() {
    static SAID: AtomicBool = AtomicBool::new(false);
    if !SAID.swap(true, Ordering::Relaxed) {
        sys::warn(
            "a child process cannot use an iWARP socket of its parent. Keep this port on TCP by a rule such \
             as tcp:port=PORT, or run the server without child processes",
        );
    }
    set_errno(libc::ENODEV);
}
