//! The two tables of `docs/compare.md` that are made from the replicas and the cases. The rest of the page is
//! written by hand.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use uwarp_conformance::attacker::encode::{CRC, ENHANCED, MARKERS, REJECT, Setup};
use uwarp_conformance::report::write_if_changed;
use uwarp_conformance::{Context, Outcome, require};

use crate::adapter::{Adapter, Depths, Rtr, Terms, Verdict, request, split};
use crate::cases::{AMSO1100, CASES, CXGB3, CXGB4, I40IW, IRDMA, Role, SIW};

/// What stands around a table that is made.
const FRAMES: [&str; 2] = ["<!-- frames: made by the test -->\n", "<!-- end of frames -->\n"];
const ROWS: [&str; 2] = ["<!-- cases: made by the test -->\n", "<!-- end of cases -->\n"];

fn file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/compare.md")
}

/// The page has the tables as they are now. With `COMPARE=write` it is made so.
pub fn check() -> Outcome {
    let old = std::fs::read_to_string(file()).context("docs/compare.md")?;
    let new = with(&with(&old, FRAMES, &frames())?, ROWS, &rows())?;
    if std::env::var("COMPARE").is_ok_and(|value| value == "write") {
        return write_if_changed(&file(), &new).context("docs/compare.md");
    }
    require!(old == new, "docs/compare.md is not what the replicas and cases say: run with COMPARE=write");
    Ok(())
}

/// The page with this table between its marks.
fn with(page: &str, [begin, end]: [&str; 2], table: &str) -> Outcome<String> {
    let parts = page.split_once(begin).and_then(|(head, rest)| Some((head, rest.split_once(end)?.1)));
    let Some((head, tail)) = parts else { uwarp_conformance::fail!("no {begin} in docs/compare.md") };
    Ok(format!("{head}{begin}\n{table}\n{end}{tail}"))
}

fn rows() -> String {
    let mut out = String::from(
        "| adapter | connects | what is special | what both ends do | test |\n|---|---|---|---|---|\n",
    );
    for case in CASES {
        let connects = if case.role == Role::Active { "adapter" } else { "uwarp" };
        let _ = writeln!(
            out,
            "| {} | {connects} | {} | {} | `{}` |",
            case.adapter, case.what, case.saw, case.name
        );
    }
    out
}

fn frames() -> String {
    let adapters: [(&str, &dyn Adapter); 6] = [
        ("cxgb3", CXGB3),
        ("cxgb4", CXGB4),
        ("i40iw", I40IW),
        ("irdma", IRDMA),
        ("amso1100 (assumed)", AMSO1100),
        ("siw", SIW),
    ];
    let mut out = String::from(
        "| replica | request | reply to uwarp's request | rejection | first FPDU after uwarp's reply |\n",
    );
    out += "|---|---|---|---|---|\n";
    for (name, adapter) in adapters {
        let depths = Depths { ird: 3, ord: 5 };
        let asked = asked_of(adapter);
        let reply = shown_bytes(&adapter.reply(&asked, depths, &[]));
        let rejection = adapter.rejection(&asked, &[]);
        let rejection = rejection.map_or("not known from the driver".into(), |bytes| shown_bytes(&bytes));
        let first = first_fpdu(adapter, depths);
        let request = shown(&adapter.request(depths, &[]));
        let _ = writeln!(out, "| {name} | {request} | {reply} | {rejection} | {first} |");
    }
    out
}

/// uwarp's request that this adapter does not reset, without its reserved bits: depths 4 and 4.
fn asked_of(adapter: &dyn Adapter) -> Setup {
    let terms = Terms { ird: 4, ord: 4, peer_to_peer: true, write: true, read: true };
    let enhanced = request(CRC | ENHANCED, 2, Some(terms.bytes()), &[]);
    if adapter.judge_request(&enhanced.bytes()) == Verdict::Reset {
        request(CRC, 1, None, &[])
    } else {
        enhanced
    }
}

/// What it sends first when uwarp accepts with all that it was offered.
fn first_fpdu(adapter: &dyn Adapter, depths: Depths) -> String {
    let asked = adapter.request(depths, &[]);
    let terms = Terms::of_enhanced(&asked).map(|t| Terms { ird: t.ord, ord: t.ird, ..t }.bytes());
    let flags = if terms.is_some() { CRC | ENHANCED } else { CRC };
    let reply = crate::adapter::reply(flags, asked.revision, terms, &[]);
    match adapter.judge_reply(&asked, depths, &reply.bytes()) {
        Verdict::Up(Rtr::None) => "its program's".into(),
        Verdict::Up(Rtr::Write { stag, to }) => format!("a Write of no data, STag {stag:#x}, offset {to}"),
        Verdict::Up(Rtr::Read { source, sink }) => format!(
            "a Read of no data from STag {:#x}, offset {}, into {:#x}, {}",
            source.0, source.1, sink.0, sink.1
        ),
        other => format!("{other:?}"),
    }
}

fn shown_bytes(bytes: &[u8]) -> String {
    split(bytes).map_or("no frame".into(), |(frame, _)| shown(&frame))
}

/// `revision 2, flags C S, IRD 4, ORD 4, peer-to-peer: Write, Read`.
fn shown(frame: &Setup) -> String {
    let mut out = format!("revision {}, flags", frame.revision);
    let named = [(MARKERS, " M"), (CRC, " C"), (REJECT, " R"), (ENHANCED, " S")];
    let set: String = named.iter().filter(|(bit, _)| frame.flags & bit != 0).map(|(_, name)| *name).collect();
    out += if set.is_empty() { " none" } else { &set };
    let Some(terms) = Terms::of_enhanced(frame) else { return out };
    let _ = write!(out, ", IRD {}, ORD {}", terms.ird, terms.ord);
    if terms.peer_to_peer {
        let send = frame.private_data[0] & 0x40 != 0;
        let kinds = [(send, "Send"), (terms.write, "Write"), (terms.read, "Read")];
        let kinds: Vec<_> = kinds.iter().filter(|(named, _)| *named).map(|(_, name)| *name).collect();
        let _ = write!(out, ", peer-to-peer: {}", kinds.join(", "));
    }
    out
}
