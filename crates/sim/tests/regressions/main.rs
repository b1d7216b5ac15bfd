//! Each test is named for what broke.

mod duo;
mod introducing;
mod leaving;
mod receiving;
mod sending;
