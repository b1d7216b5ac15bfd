//! The default settings.

pub struct Config {
    pub spin: bool,
}

impl Config {
    pub fn get() -> &'static Self {
        &Self { spin: false }
    }
}
