//! The settings as they are without any.

pub struct Config {
    pub spin: bool,
}

impl Config {
    pub fn get() -> &'static Self {
        &Self { spin: false }
    }
}
