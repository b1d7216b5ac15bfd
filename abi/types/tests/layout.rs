//! The checked-in types against the headers installed on this machine.
//!
//! The bindings come from the newest headers; programs are compiled against older ones. Every field an older
//! header defines must lie where the bindings have it, and structures may have grown only as listed here. The
//! C compiler is asked about each offset that the generated files assert (so the Rust side of each number is
//! checked by rustc).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::process::Command;

const SOURCES: [&str; 4] = [
    include_str!("../src/verbs.rs"),
    include_str!("../src/rdmacm.rs"),
    include_str!("../src/kern.rs"),
    include_str!("../src/lib.rs"),
];

/// Structures that grew after rdma-core 44 (Debian 12), and what was added. The caller's length or a mask
/// says how much of them a program knows, or the library allocates them.
const GROWN: [(&str, &[&str]); 4] = [
    ("ibv_port_attr", &["active_speed_ex"]),
    ("ibv_qp_ex", &["wr_flush"]),
    (
        "verbs_context",
        &["free_buf", "alloc_buf", "dm_export_dmabuf_fd", "reg_mr_ex", "dealloc_dmah", "alloc_dmah"],
    ),
    ("rdma_cm_event", &["param.arg"]),
];

/// Structures that did not exist in rdma-core 44.
const NEW: [&str; 9] = [
    "ibv_dmah",
    "ibv_dmah_init_attr",
    "ibv_mr_init_attr",
    "ibv_fd_arr",
    "ibv_comp_cntr",
    "ibv_comp_cntr_caps",
    "ibv_comp_cntr_init_attr",
    "ibv_qp_attach_comp_cntr_attr",
    "ibv_buf",
];

/// What one asserts about a C type.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Ask {
    Size,
    /// Member designator in C, such as `wr.rdma.rkey`.
    Offset(String),
    /// The value of the constant of that name.
    Constant,
}

#[test]
fn installed_headers_agree() {
    let types = Types::parse();
    let asks = types.asks();
    assert!(
        asks.len() > 1000,
        "only {} sizes, offsets and constants found in the generated files",
        asks.len()
    );

    let (answers, absent) = ask_compiler(&asks);
    for (index, name) in &absent {
        let (c_type, ask, _) = &asks[*index];
        let bare = c_type.rsplit(' ').next().unwrap_or(c_type);
        let known = *ask == Ask::Constant
            || NEW.contains(&bare)
            || GROWN.iter().any(|(grown, fields)| {
                *grown == bare && matches!(ask, Ask::Offset(field) if fields.contains(&field.as_str()))
            });
        assert!(known, "the installed headers know nothing of {name}, which should not be new");
    }

    let context_at = types.offset("verbs_context", "context");
    let mut wrong = String::new();
    for (index, (c_type, ask, ours)) in asks.iter().enumerate() {
        let Some(theirs) = answers.get(&index) else { continue };
        let bare = c_type.rsplit(' ').next().unwrap_or(c_type);
        let grown = GROWN.iter().any(|(name, _)| *name == bare);
        let fine = match ask {
            // It grows at the front: what counts is the distance to the end.
            Ask::Offset(_) if bare == "verbs_context" => {
                let end = answers[&asks
                    .iter()
                    .position(|a| a.0 == *c_type && a.1 == Ask::Offset("context".into()))
                    .expect("verbs_context.context is asked for")];
                context_at - ours == end - theirs
            }
            Ask::Size if grown => theirs <= ours,
            _ => theirs == ours,
        };
        if !fine {
            let _ = writeln!(wrong, "{c_type} {ask:?}: ours {ours}, installed headers {theirs}");
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

/// What the generated files say about types.
struct Types {
    /// "struct" or "union" by name.
    kind: BTreeMap<String, &'static str>,
    /// Type of each field.
    fields: BTreeMap<(String, String), String>,
    sizes: BTreeMap<String, usize>,
    offsets: BTreeMap<(String, String), usize>,
    constants: BTreeMap<String, usize>,
}

impl Types {
    fn parse() -> Self {
        let mut types = Self {
            kind: BTreeMap::new(),
            fields: BTreeMap::new(),
            sizes: BTreeMap::new(),
            offsets: BTreeMap::new(),
            constants: BTreeMap::new(),
        };
        for source in SOURCES {
            let mut inside = None;
            // rustfmt breaks long assertions over lines; ends of statements are what counts.
            for line in source.lines().map(str::trim) {
                for (keyword, kind) in [("pub struct ", "struct"), ("pub union ", "union")] {
                    if let Some(name) = line.strip_prefix(keyword).and_then(|rest| rest.strip_suffix(" {")) {
                        types.kind.insert(name.to_owned(), kind);
                        inside = Some(name.to_owned());
                    }
                }
                if line == "}" {
                    inside = None;
                }
                if let (Some(owner), Some((field, kind))) =
                    (&inside, line.strip_prefix("pub ").and_then(|rest| rest.split_once(": ")))
                {
                    types
                        .fields
                        .insert((owner.clone(), field.to_owned()), kind.trim_end_matches(',').to_owned());
                }
            }
            let flat: String = source.split_whitespace().collect::<Vec<_>>().join(" ");
            for statement in flat.split(';') {
                if let Some((name, value)) =
                    statement.trim().strip_prefix("pub const ").and_then(|c| c.split_once(": "))
                    && let Some((_, value)) = value.split_once(" = ")
                {
                    // Compared as C's size_t, so negative ones wrap on both sides.
                    let value: i64 = value.parse().expect("a number");
                    types.constants.insert(name.to_owned(), value as usize);
                }
                let number = || {
                    statement
                        .rsplit_once(" - ")?
                        .1
                        .trim_end_matches([']', ' ', ','])
                        .strip_suffix("usize")?
                        .parse()
                        .ok()
                };
                if let Some(name) = quoted(statement, "[\"Size of ") {
                    types.sizes.insert(name.to_owned(), number().expect("a size"));
                } else if let Some((owner, field)) =
                    quoted(statement, "[\"Offset of field: ").and_then(|name| name.split_once("::"))
                {
                    types.offsets.insert((owner.to_owned(), field.to_owned()), number().expect("an offset"));
                }
            }
        }
        types
    }

    fn offset(&self, owner: &str, field: &str) -> usize {
        self.offsets[&(owner.to_owned(), field.to_owned())]
    }

    /// Every size and offset, with nested and anonymous members spelled as C spells them.
    fn asks(&self) -> Vec<(String, Ask, usize)> {
        let mut asks = Vec::new();
        for (name, size) in &self.sizes {
            // Types without a name in C are reached through their owners.
            if name.contains("__bindgen") || name.starts_with('_') {
                continue;
            }
            let c_type = format!("{} {name}", self.kind.get(name).unwrap_or(&"struct"));
            asks.push((c_type.clone(), Ask::Size, *size));
            self.members(&c_type, name, "", 0, &mut asks);
        }
        asks.extend(self.constants.iter().map(|(name, value)| (name.clone(), Ask::Constant, *value)));
        asks
    }

    fn members(
        &self,
        c_type: &str,
        owner: &str,
        prefix: &str,
        base: usize,
        asks: &mut Vec<(String, Ask, usize)>,
    ) {
        for ((of, field), kind) in &self.fields {
            if of != owner || field.starts_with("_bitfield") || field.starts_with("__bindgen") {
                continue;
            }
            // bindgen asserts no offsets of union members: they are zero.
            let offset = base + self.offsets.get(&(of.clone(), field.clone())).copied().unwrap_or(0);
            let anonymous = field.starts_with("anon_");
            let path = if anonymous {
                prefix.to_owned()
            } else {
                format!("{prefix}{}", field.trim_end_matches('_'))
            };
            if !anonymous {
                asks.push((c_type.to_owned(), Ask::Offset(path.clone()), offset));
            }
            if kind.contains("__bindgen_ty") && self.kind.contains_key(kind) {
                let prefix = if anonymous { path } else { path + "." };
                self.members(c_type, kind, &prefix, offset, asks);
            }
        }
    }
}

fn quoted<'a>(statement: &'a str, start: &str) -> Option<&'a str> {
    let at = statement.find(start)? + start.len();
    statement[at..].split('"').next()
}

/// Compiles and runs a program that prints every number; questions the headers cannot answer are left out.
fn ask_compiler(asks: &[(String, Ask, usize)]) -> (BTreeMap<usize, usize>, BTreeMap<usize, String>) {
    let dir = std::env::temp_dir().join(format!("uwarp-layout-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a scratch directory");
    let source = dir.join("layout.c");
    let program = dir.join("layout");
    let mut absent: BTreeMap<usize, String> = BTreeMap::new();
    let mut left_out = BTreeSet::new();
    let answers = loop {
        let mut text = String::from(
            "#define _GNU_SOURCE\n#include <stdio.h>\n#include <stddef.h>\n#include <rdma/rdma_cma.h>\n\
             #include <infiniband/tm_types.h>\n#include <rdma/ib_user_verbs.h>\n\
             #include <rdma/ib_user_sa.h>\n\
             int main(void) {\n",
        );
        let first_line = text.lines().count() + 1;
        for (index, (c_type, ask, _)) in asks.iter().enumerate() {
            let expression = match ask {
                _ if left_out.contains(&index) => {
                    text.push('\n');
                    continue;
                }
                Ask::Size => format!("sizeof({c_type})"),
                Ask::Offset(field) => format!("offsetof({c_type}, {field})"),
                Ask::Constant => format!("(size_t)({c_type})"),
            };
            let _ = writeln!(text, "printf(\"{index} %zu\\n\", {expression});");
        }
        text.push_str("return 0; }\n");
        std::fs::write(&source, text).expect("the program is written");
        let cc = Command::new("cc")
            .args(["-w", "-fmax-errors=0", "-o"])
            .args([&program, &source])
            .output()
            .expect("a C compiler and the development packages of libibverbs and librdmacm are needed");
        if cc.status.success() {
            let run = Command::new(&program).output().expect("the program runs");
            break String::from_utf8(run.stdout).expect("text");
        }
        let errors = String::from_utf8_lossy(&cc.stderr).into_owned();
        let before = left_out.len();
        for line in errors.lines().filter(|line| line.contains(" error: ")) {
            let number = line.split(':').nth(1).and_then(|n| n.parse::<usize>().ok());
            let index = number.and_then(|n| n.checked_sub(first_line)).filter(|i| *i < asks.len());
            let index = index.unwrap_or_else(|| panic!("the C compiler says:\n{errors}"));
            absent.insert(index, format!("{} {:?}", asks[index].0, asks[index].1));
            left_out.insert(index);
        }
        assert!(left_out.len() > before, "the C compiler says:\n{errors}");
    };
    let _ = std::fs::remove_dir_all(&dir);
    let answers = answers
        .lines()
        .map(|line| {
            let (index, value) = line.split_once(' ').expect("two numbers");
            (index.parse().expect("an index"), value.parse().expect("a number"))
        })
        .collect();
    (answers, absent)
}
