//! Tables of results: aligned for a terminal, piped for Markdown.

use std::fmt::Write as _;

/// A table with a heading row.
#[derive(Debug, Clone, Default)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these column heads.
    pub fn new(heads: &[&str]) -> Table {
        Table { rows: vec![heads.iter().map(|h| (*h).to_owned()).collect()] }
    }

    /// Adds a row.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }

    /// How many rows there are below the heads.
    pub fn len(&self) -> usize {
        self.rows.len() - 1
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Columns padded with spaces, two between them.
    pub fn terminal(&self) -> String {
        let widths = self.widths();
        let mut out = String::new();
        for (n, row) in self.rows.iter().enumerate() {
            let mut line = String::new();
            for (cell, width) in row.iter().zip(&widths) {
                let _ = write!(line, "{cell:width$}  ");
            }
            let _ = writeln!(out, "{}", line.trim_end());
            if n == 0 {
                let _ = writeln!(out, "{}", "-".repeat(widths.iter().sum::<usize>() + 2 * widths.len()));
            }
        }
        out
    }

    /// The same in Markdown.
    pub fn markdown(&self) -> String {
        let mut out = String::new();
        for (n, row) in self.rows.iter().enumerate() {
            let cells: Vec<String> = row.iter().map(|c| c.replace('|', "\\|")).collect();
            let _ = writeln!(out, "| {} |", cells.join(" | "));
            if n == 0 {
                let _ = writeln!(out, "|{}", "---|".repeat(row.len()));
            }
        }
        out
    }

    fn widths(&self) -> Vec<usize> {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        (0..columns)
            .map(|c| self.rows.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max().unwrap_or(0))
            .collect()
    }
}

/// Writes `text` to `path` unless it is there already, so that an unchanged result leaves the tree unchanged.
pub fn write_if_changed(path: &std::path::Path, text: &str) -> std::io::Result<()> {
    if std::fs::read_to_string(path).is_ok_and(|old| old == text) {
        return Ok(());
    }
    std::fs::write(path, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms() {
        let mut table = Table::new(&["a", "long"]);
        table.row(["x|y".to_owned(), "z".to_owned()]);
        assert_eq!(table.terminal(), "a    long\n-----------\nx|y  z\n");
        assert_eq!(table.markdown(), "| a | long |\n|---|---|\n| x\\|y | z |\n");
    }
}
