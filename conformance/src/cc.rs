//! The C programs of `conformance/c`, compiled as a user would compile them: with the distribution's
//! `<infiniband/verbs.h>` and `<rdma/rdma_cma.h>`, and no header of uwarp.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::dist::Dist;
use crate::process::Cmd;
use crate::{Context, Outcome, require};

/// Compiles `c/NAME.c` into `dir` and returns the program. Any warning is an error.
pub fn build(name: &str, dir: &Path) -> Outcome<PathBuf> {
    build_with(name, dir, "")
}

/// The same with more options.
pub fn build_with(name: &str, dir: &Path, options: &str) -> Outcome<PathBuf> {
    build_by("cc", name, dir, &format!("-lrdmacm -libverbs {options}"))
}

/// The same by another compiler, and with no library but what `options` name.
pub fn build_by(compiler: &str, name: &str, dir: &Path, options: &str) -> Outcome<PathBuf> {
    require!(
        Path::new("/usr/include/infiniband/verbs.h").exists()
            && Path::new("/usr/include/rdma/rdma_cma.h").exists(),
        "the headers of rdma-core are not there: apt-get install libibverbs-dev librdmacm-dev"
    );
    std::fs::create_dir_all(dir).context(dir.display())?;
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("c").join(format!("{name}.c"));
    let program = dir.join(Path::new(name).file_name().unwrap_or_default());
    let compiler = Cmd::line(&format!("{compiler} -std=gnu11 -O1 -g -Wall -Wextra -Werror -pthread -o"));
    let command = compiler.arg(&program).arg(&source).args(options).limit(Duration::from_secs(180));
    unless_done(&command, &program)?;
    Ok(program)
}

/// An installed example, compiled against the installed header, and linked with these installed libraries.
pub fn build_example(name: &str, program: &Path, dist: &Dist, libraries: &str) -> Outcome {
    let (lib, root) = (dist.lib(), dist.lib().join("../.."));
    let compiler = Cmd::line("cc -std=gnu11 -Wall -Wextra -Werror -o").arg(program);
    let source = compiler.arg(root.join(format!("share/doc/uwarp/examples/{name}.c")));
    let options = source.arg("-I").arg(root.join("include")).arg("-L").arg(&lib).args(libraries);
    options.limit(Duration::from_secs(180)).run_ok().map(drop)
}

/// The same of `c/NAME.cc`, by `g++`.
pub fn build_cpp(name: &str, dir: &Path, options: &str) -> Outcome<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("c").join(format!("{name}.cc"));
    let program = dir.join(name);
    let compiler = Cmd::line("g++ -std=c++17 -O1 -g -Wall -Wextra -Werror -pthread -o").arg(&program);
    unless_done(&compiler.arg(&source).args(options).limit(Duration::from_secs(600)), &program)?;
    Ok(program)
}

/// Runs a compiler unless the same words have made this program since the last change of a source or of a
/// header that they name: a row that is run a hundred times would compile for most of its time.
fn unless_done(command: &Cmd, program: &Path) -> Outcome {
    let words: Vec<String> = command.words().collect();
    let included = words.windows(2).filter(|pair| pair[0] == "-I").map(|pair| PathBuf::from(&pair[1]));
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("c");
    let changed = std::iter::once(sources).chain(included).filter_map(|dir| last_change(&dir)).max();
    let note = program.with_extension("made");
    let made = std::fs::metadata(program).and_then(|made| made.modified()).ok();
    let same = std::fs::read_to_string(&note).is_ok_and(|by| by == words.join(" "));
    if same && made > changed {
        return Ok(());
    }
    _ = std::fs::remove_file(&note);
    command.run_ok()?;
    std::fs::write(&note, words.join(" ")).context(note.display())
}

/// When anything in this directory was last changed.
fn last_change(dir: &Path) -> Option<SystemTime> {
    let of = |entry: std::fs::DirEntry| match entry.file_type() {
        Ok(kind) if kind.is_dir() => last_change(&entry.path()),
        _ => entry.metadata().and_then(|data| data.modified()).ok(),
    };
    std::fs::read_dir(dir).ok()?.flatten().filter_map(of).max()
}
