//! What `make test` and `make programs` install. A row of `make test` that starts a program of another
//! package works where that happens to be there, and fails on a fresh machine.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Mutex, OnceLock};

use uwarp_conformance::process::{Cmd, find_program};
use uwarp_conformance::{Context, Outcome, fail};

/// The packages in those groups of `scripts/packages` that this target of the Makefile sets up.
pub fn by_make(target: &str) -> Outcome<BTreeSet<String>> {
    let read = |name: &str| {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name);
        std::fs::read_to_string(&file).context(file.display())
    };
    let makefile = read("Makefile")?;
    let mut lines = makefile.lines().skip_while(|line| line.split_once(':').map(|(t, _)| t) != Some(target));
    let groups = lines.find_map(|line| line.trim().strip_prefix("@scripts/setup "));
    let Some(groups) = groups else { fail!("make {target} runs no scripts/setup") };
    let groups: Vec<&str> = groups.split(' ').collect();
    let mut packages = BTreeSet::new();
    for line in read("scripts/packages")?.lines() {
        let mut words = line.split_whitespace();
        if words.next().is_some_and(|group| groups.contains(&group)) {
            packages.extend(words.map(str::to_owned));
        }
    }
    Ok(packages)
}

/// The package that this program's file is of.
pub fn owner(program: &str) -> Option<String> {
    let file = find_program(program.as_ref()).ok()?.canonicalize().ok()?;
    let of = |file: &Path| {
        let out = Cmd::new("dpkg").arg("-S").arg(file).run_ok().ok()?;
        Some(out.stdout.split_once(':')?.0.to_owned())
    };
    // dpkg knows a part of them by their names before /bin became a link.
    of(&file).or_else(|| of(&Path::new("/").join(file.strip_prefix("/usr").ok()?)))
}

/// Fails if one of these commands starts a program of Debian's that `make test` does not install.
pub fn are_in_make_test(started: &[Cmd]) -> Outcome {
    static OWNERS: Mutex<BTreeMap<String, Option<String>>> = Mutex::new(BTreeMap::new());
    let mut owners = OWNERS.lock().unwrap_or_else(|e| e.into_inner());
    let Some(all) = in_make_test() else { return Ok(()) };
    for program in started.iter().flat_map(programs) {
        let owner = owners.entry(program.clone()).or_insert_with(|| owner(&program));
        let Some(package) = owner.as_ref().filter(|package| !all.contains(*package)) else { continue };
        fail!("{program} is of {package}, which scripts/packages has in no group of make test");
    }
    Ok(())
}

/// The programs in a command: the first word, one behind `--`, and those that are called by path.
fn programs(cmd: &Cmd) -> Vec<String> {
    let words: Vec<String> = cmd.words().collect();
    let behind = words.windows(2).filter(|pair| pair[0] == "--").map(|pair| &pair[1]);
    let paths = words.iter().filter(|word| ["/usr/bin/", "/usr/sbin/"].iter().any(|at| word.starts_with(at)));
    words.first().into_iter().chain(behind).chain(paths).cloned().collect()
}

/// What every Debian has, what `make test` installs, and what these depend on. `None` without dpkg.
fn in_make_test() -> Option<&'static BTreeSet<String>> {
    static ALL: OnceLock<Option<BTreeSet<String>>> = OnceLock::new();
    ALL.get_or_init(|| {
        let format = "${Package}\t${Essential}${Priority}\t${Provides}\t${Pre-Depends},${Depends}\n";
        let out = Cmd::line("dpkg-query -W -f").arg(format).run_ok().ok()?;
        Some(with_dependencies(&out.stdout, by_make("test").ok()?))
    })
    .as_ref()
}

/// From lines of a package, its importance, what it provides, and what it depends on. All alternatives of a
/// dependency count.
fn with_dependencies(installed: &str, wanted: BTreeSet<String>) -> BTreeSet<String> {
    let name = |text: &str| text.trim().split([' ', ':', '(']).next().unwrap_or_default().to_owned();
    let mut depends: BTreeMap<String, &str> = BTreeMap::new();
    let mut provide: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut found = BTreeSet::new();
    let mut left: Vec<String> = wanted.into_iter().collect();
    for line in installed.lines() {
        let mut fields = line.split('\t');
        let [Some(package), Some(importance), Some(provides), Some(needs)] =
            [fields.next(), fields.next(), fields.next(), fields.next()]
        else {
            continue;
        };
        if importance.starts_with("yes") || importance == "required" {
            left.push(package.to_owned());
        }
        for virtual_name in provides.split(',').map(name).filter(|name| !name.is_empty()) {
            provide.entry(virtual_name).or_default().push(package.to_owned());
        }
        depends.insert(package.to_owned(), needs);
    }
    while let Some(package) = left.pop() {
        if !found.insert(package.clone()) {
            continue;
        }
        let needs = depends.get(&package).copied().unwrap_or_default();
        for need in needs.split(',').flat_map(|need| need.split('|')).map(name) {
            left.extend(provide.get(&need).into_iter().flatten().cloned());
            left.push(need);
        }
    }
    found
}
