//! Tables: with borders, and as wide as the terminal, where that shows them; plain columns in a pipe, a file
//! and a locale without UTF-8, so that `awk` and `sort` can read them.

use std::env;
use std::io::{IsTerminal, stdout};

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

/// How tables look to the reader of standard output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Looks {
    borders: bool,
    width: Option<u16>,
}

impl Looks {
    /// Those of this process.
    pub fn of_stdout() -> Self {
        let terminal = stdout().is_terminal();
        let locale = ["LC_ALL", "LC_CTYPE", "LANG"].map(|name| env::var(name).unwrap_or_default());
        let columns = env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
        let size = || rustix::termios::tcgetwinsize(stdout()).ok().map(|size| size.ws_col);
        let width = columns.or_else(size).filter(|width| *width > 0);
        Self::of(terminal, &locale, width)
    }

    fn of(terminal: bool, locale: &[String], width: Option<u16>) -> Self {
        let locale = locale.iter().find(|value| !value.is_empty()).map(|value| value.to_ascii_lowercase());
        let utf8 = locale.is_some_and(|locale| locale.ends_with("utf-8") || locale.ends_with("utf8"));
        Self { borders: terminal && utf8, width: if terminal { width } else { None } }
    }

    fn dress(self, table: &mut Table) {
        if self.borders {
            table.load_style(presets::UTF8_BORDERS_ONLY);
        } else {
            table.load_style(presets::NOTHING);
        }
        if let Some(width) = self.width {
            table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width);
        }
    }

    fn text(self, table: &mut Table) -> String {
        if !self.borders {
            for column in table.column_iter_mut() {
                column.set_padding((0, 2));
            }
        }
        let lines: Vec<_> = table.lines().map(|line| line.trim_end().to_owned()).collect();
        lines.join("\n")
    }
}

/// A table with this header.
pub fn new<T: AsRef<str>>(header: &[T]) -> Table {
    let mut table = Table::new();
    Looks::of_stdout().dress(&mut table);
    table.set_header(header.iter().map(AsRef::as_ref));
    table
}

/// Whether such a table fits into the terminal without a broken line.
pub fn fits(header: &[String], rows: &[Vec<String>]) -> bool {
    fits_in(Looks::of_stdout().width, header, rows)
}

/// The same for a terminal of this width; a pipe has none.
pub fn fits_in(width: Option<u16>, header: &[String], rows: &[Vec<String>]) -> bool {
    let longest = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).chain(header.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    // Three spaces between columns, and the borders.
    let needed: usize = (0..header.len()).map(|column| longest(column) + 3).sum::<usize>() + 1;
    width.is_none_or(|width| needed <= usize::from(width))
}

/// The columns from this one on have numbers.
pub fn align(table: &mut Table, from: usize) {
    for column in table.column_iter_mut().skip(from) {
        column.set_cell_alignment(CellAlignment::Right);
    }
}

/// The lines of a table.
pub fn text(mut table: Table) -> String {
    Looks::of_stdout().text(&mut table)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(looks: Looks) -> String {
        let mut table = Table::new();
        looks.dress(&mut table);
        table.set_header(["name", "state"]);
        table.add_row(["uwarp0", "the first of several words"]);
        looks.text(&mut table)
    }

    #[test]
    fn a_pipe_and_a_locale_without_utf_8_get_plain_columns() {
        let utf8 = ["".to_owned(), "de_DE.UTF-8".to_owned()];
        let plain = "name    state\nuwarp0  the first of several words";
        assert_eq!(shown(Looks::of(false, &utf8, Some(20))), plain);
        assert_eq!(shown(Looks::of(true, &["C".to_owned()], Some(80))), plain);
        assert!(shown(Looks::of(true, &utf8, Some(80))).starts_with('┌'));
    }

    #[test]
    fn a_table_fits_the_terminal() {
        for locale in ["C", "C.UTF-8"] {
            let text = shown(Looks::of(true, &[locale.to_owned()], Some(24)));
            assert!(text.lines().all(|line| line.chars().count() <= 24), "{text}");
            assert!(text.lines().count() > 2, "{text}");
        }
    }
}
