//! The lower layers that connections are made over. Nothing else in this crate names one.

use std::sync::Arc;

use rustix::io::Errno;
use uwarp_driver::{Engine, Source, Token};
use uwarp_llp::carrier::Watch;

pub(crate) use uwarp_driver::carriers::carrier;
pub(crate) use uwarp_llp::carrier::tcp::{adopt, check_type};

/// Makes the engine call `source` for what a lower layer reports.
pub(crate) fn watch(engine: &Engine, watch: Watch<'_>, source: Arc<dyn Source>) -> Result<Token, Errno> {
    engine
        .register_watch(watch, source)
        .map_err(|error| error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error))
}
