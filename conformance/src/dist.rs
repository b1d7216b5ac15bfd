//! Where the thing under test is: the tree that `make` builds.

use std::path::{Path, PathBuf};

use crate::{Outcome, fail, require};

/// An installable tree: `bin/uwarp`, `lib/uwarp/libuwarp.so` and the two names it is loaded by.
#[derive(Debug, Clone)]
pub struct Dist {
    root: PathBuf,
}

impl Dist {
    /// `$UWARP_DIST`, or `dist/` beside the workspace's members. Fails when `make` has not been run.
    pub fn find() -> Outcome<Dist> {
        let root = match std::env::var_os("UWARP_DIST") {
            Some(dir) => PathBuf::from(dir),
            None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../dist"),
        };
        Dist::at(&root)
    }

    /// The tree in this directory.
    pub fn at(root: &Path) -> Outcome<Dist> {
        let Ok(root) = root.canonicalize() else {
            fail!("{} is not there: run `make` first (or point UWARP_DIST at a built tree)", root.display())
        };
        let dist = Dist { root };
        for name in ["libuwarp.so", "libibverbs.so.1", "librdmacm.so.1"] {
            let file = dist.lib().join(name);
            require!(file.exists(), "{} is not there: run `make` first", file.display());
        }
        Ok(dist)
    }

    /// The directory that belongs in `LD_LIBRARY_PATH`.
    pub fn lib(&self) -> PathBuf {
        self.root.join("lib/uwarp")
    }

    /// The CLI; fails when it was not built.
    pub fn uwarp(&self) -> Outcome<PathBuf> {
        let file = self.root.join("bin/uwarp");
        require!(file.exists(), "{} is not there: run `make` first", file.display());
        Ok(file)
    }

    /// A file below `share/`; fails when it is not installed.
    pub fn share(&self, name: &str) -> Outcome<PathBuf> {
        let file = self.root.join("share").join(name);
        require!(file.exists(), "{} is not there: run `make` first", file.display());
        Ok(file)
    }
}
