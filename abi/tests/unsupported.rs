//! Every name that exists without a function behind it answers `EOPNOTSUPP` and never crashes. The names come
//! from where they are defined, so one that is added is called too.

mod common;

use std::collections::BTreeMap;

const TABLE: &str = include_str!("../symbols.txt");

/// Where nothing but refusals is defined.
const SOURCES: [&str; 1] = [include_str!("../src/ibverbs/unsupported.rs")];

/// Refusals beside what is built.
const OTHERS: [(&str, &str); 5] = [
    ("ibv_import_device", "pointer"),
    ("ibv_import_pd", "pointer"),
    ("ibv_unimport_pd", "void"),
    ("ibv_import_mr", "pointer"),
    ("ibv_unimport_mr", "void"),
];

/// Name, version and convention.
type Symbol = (String, String, String);

/// The table's names: those that have an answer instead of a function, and the versions of the others.
fn table() -> (Vec<Symbol>, BTreeMap<&'static str, &'static str>) {
    let (mut answers, mut versions) = (Vec::new(), BTreeMap::new());
    let mut node = "";
    for line in TABLE.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        if let Some(head) = line.strip_prefix('[') {
            let words: Vec<_> = head.trim_end_matches(']').split(' ').collect();
            match words[..] {
                // The names of another node once more, with this one's number at their ends.
                [new, "=", old] => {
                    let number =
                        |node: &str| node.rsplit('_').next().map(|n| format!("_{n}")).unwrap_or_default();
                    let again = |(name, version, kind): &Symbol| {
                        let stem = name.strip_suffix(&number(old));
                        let name = stem.map_or(name.clone(), |stem| stem.to_owned() + &number(new));
                        (version == old).then(|| (name, new.to_owned(), kind.clone()))
                    };
                    let more: Vec<_> = answers.iter().filter_map(again).collect();
                    answers.extend(more);
                }
                _ => node = words[0],
            }
            continue;
        }
        match line.split_once('=') {
            // One byte, not a function; functions that are built.
            Some((_, kind)) if ["data", "old"].contains(&kind.trim()) => {}
            Some((name, kind)) => {
                let name = name.trim().trim_end_matches('@').trim();
                answers.push((name.to_owned(), node.to_owned(), kind.trim().to_owned()));
            }
            None => {
                versions.insert(line.trim(), node);
            }
        }
    }
    (answers, versions)
}

/// Functions of a source by name, and their return types.
fn functions(source: &str) -> impl Iterator<Item = (&str, &str)> {
    source.split("fn ").skip(1).filter_map(|rest| {
        let (name, rest) = rest.split_once('(')?;
        let (returned, _) = rest.split_once(") -> ")?.1.split_once(" {")?;
        Some((name, returned))
    })
}

fn convention<'a>((name, returned): (&'a str, &str)) -> (&'a str, &'static str) {
    let convention = match returned {
        "Code" => "code",
        "MinusOne" | "MinusOne<c_int>" => "minus_one",
        "MinusOne<isize>" | "MinusOne<off_t>" => "wide_minus_one",
        "()" => "void",
        pointer if pointer.starts_with('*') => "pointer",
        other => panic!("{name} returns {other}: which convention is that?"),
    };
    (name, convention)
}

#[test]
fn every_name_without_a_function_says_so_and_does_not_crash() {
    let (mut symbols, versions) = table();
    let answers = symbols.len();
    // A `slot!` has no name of its own.
    let built = SOURCES.into_iter().flat_map(functions).filter(|(name, _)| versions.contains_key(name));
    symbols.extend(
        built
            .map(convention)
            .chain(OTHERS)
            .map(|(name, kind)| (name.to_owned(), versions[name].to_owned(), kind.to_owned())),
    );
    // Fewer would mean that table or sources have another form than this test reads.
    assert!(answers > 100 && symbols.len() - answers > 10, "{answers} of {}", symbols.len());
    let arguments: Vec<_> =
        symbols.into_iter().flat_map(|(name, version, kind)| [name, version, kind]).collect();
    let program = common::compile("unsupported", &["-libverbs", "-ldl"]);
    common::run_with(&program, &arguments, &[]);
}
