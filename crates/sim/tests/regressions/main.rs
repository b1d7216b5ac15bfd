//! Each test is named for what broke.

mod acknowledging;
mod duo;
mod introducing;
mod killed;
mod leaving;
mod receiving;
mod sending;
