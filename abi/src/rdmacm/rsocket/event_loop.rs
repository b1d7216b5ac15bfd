//! For `libuwarp-sockets.so`: a thread that waits for descriptors of the program makes progress meanwhile
//! (`abi/sockets/src/event_loop.rs`).

use std::ffi::c_int;
use std::sync::Arc;

use uwarp_abi_types::preload::{FOR_EVER, NO_MORE, progress};
use uwarp_driver::event_loop::Sleep;
use uwarp_driver::{Engine, Uncancelled};
use uwarp_process::{OnceValue, PerProcess};
use uwarp_rsocket::Socket;

/// The engine of the process.
static ENGINE: PerProcess<OnceValue<Arc<Engine>>> = PerProcess::new(OnceValue::new);

/// What the device of this socket offers.
pub fn progress_of(socket: &Socket) -> progress {
    let engine = ENGINE.get_or_make(|| Arc::clone(socket.nic().engine()));
    progress { fd: engine.fd(), look, begin, limit, serve, end }
}

/// Runs `call`, and lets no panic leave: it is reported where it happens, and the caller goes on without
/// progress. A thread is not cancelled in it: the unwinding would end at what catches panics here, and the
/// process with it. The call that waits is a point of cancellation, behind this.
fn guarded<T>(otherwise: T, call: impl FnOnce(&Engine) -> T) -> T {
    let Some(engine) = ENGINE.get() else { return otherwise };
    let _uncancelled = Uncancelled::begin();
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| call(engine)));
    result.unwrap_or(otherwise)
}

extern "C" fn look() {
    guarded((), Engine::serve_now);
}

extern "C" fn begin() -> u64 {
    guarded(None, Engine::begin_loop).unwrap_or(0)
}

extern "C" fn limit(lead: u64) -> i64 {
    match guarded(Sleep::NoMore, |engine| engine.may_sleep(lead)) {
        Sleep::For(None) => FOR_EVER,
        Sleep::For(Some(limit)) => i64::try_from(limit.as_nanos()).unwrap_or(i64::MAX),
        Sleep::NoMore => NO_MORE,
    }
}

extern "C" fn serve(lead: u64) {
    guarded((), |engine| engine.serve_loop(lead));
}

extern "C" fn end(lead: u64, sleeps: c_int) {
    guarded((), |engine| engine.end_loop(lead, sleeps != 0));
}
