//! The lower layers that connections are made over. Nothing else in this crate names one.

use std::sync::Arc;

use rustix::io::Errno;
use uwarp_driver::{Engine, Source, Token};
use uwarp_llp::carrier::{Carrier, Watch, tcp};

pub(crate) use uwarp_llp::carrier::tcp::{adopt, check_type};

/// What connects and listens.
pub(crate) fn carrier() -> &'static dyn Carrier {
    &tcp::Tcp
}

/// Makes the engine call `source` for what a lower layer reports.
pub(crate) fn watch(engine: &Engine, watch: Watch<'_>, source: Arc<dyn Source>) -> Result<Token, Errno> {
    let fd = watch.descriptor().ok_or(Errno::NOTSUP)?;
    engine
        .register(fd, source)
        .map_err(|error| error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error))
}
