//! Plots of the figures, as SVG: lines over a logarithmic or linear axis, with a legend. Text only, so that a
//! browser, an editor and a diff can read it.

use std::fmt::Write as _;
use std::path::Path;

use super::protocol::{Failure, Result};

/// Some panels under each other, with one legend.
pub struct Page {
    pub title: String,
    pub panels: Vec<Panel>,
}

pub struct Panel {
    pub title: String,
    /// What the axes show.
    pub x: String,
    pub y: String,
    /// Of x and y.
    pub scales: [Scale; 2],
    pub series: Vec<Series>,
}

/// One line. Series of one name have one colour in all panels.
pub struct Series {
    pub name: String,
    pub points: Vec<(f64, f64)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// Logarithmic, with a mark at each second power of two or at fewer of them; for sizes and counts.
    Doubling,
    /// Logarithmic, with marks at 1, 2 and 5.
    Decimal,
    /// From zero.
    Linear,
}

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 380.0;
/// Around the lines of a panel: left, right, above, below.
const MARGINS: [f64; 4] = [80.0, 20.0, 40.0, 50.0];
const HEAD: f64 = 36.0;
const LEGEND_LINE: f64 = 20.0;
/// Distinct for most eyes that confuse red and green; dashes beside it, as there may be more series.
const COLOURS: [&str; 7] = ["#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];
const DASHES: [&str; 3] = ["none", "7 4", "2 3"];

impl Page {
    /// Writes it to a file.
    pub fn write(&self, file: &Path) -> Result<()> {
        std::fs::write(file, self.svg()).map_err(|error| Failure(format!("{}: {error}", file.display())))
    }

    fn svg(&self) -> String {
        let names = self.names();
        let panels: Vec<_> = self.panels.iter().filter(|panel| panel.has_points()).collect();
        let legend = HEAD + panels.len() as f64 * HEIGHT;
        let whole = legend + names.len().div_ceil(2) as f64 * LEGEND_LINE + 20.0;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {whole}\" \
             font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{whole}\" \
             fill=\"#ffffff\"/>\n"
        );
        text(&mut svg, [WIDTH / 2.0, 24.0], "middle", &self.title, " font-size=\"18\"");
        for (index, panel) in panels.iter().enumerate() {
            panel.draw(&mut svg, HEAD + index as f64 * HEIGHT, &names);
        }
        for (index, name) in names.iter().enumerate() {
            let left = MARGINS[0] + (index % 2) as f64 * (WIDTH - MARGINS[0]) / 2.0;
            let y = legend + 12.0 + (index / 2) as f64 * LEGEND_LINE;
            polyline(&mut svg, &[(left, y), (left + 36.0, y)], index);
            text(&mut svg, [left + 44.0, y + 4.0], "start", name, "");
        }
        svg.push_str("</svg>\n");
        svg
    }

    /// Of all series with points, in the order in which they are first seen.
    fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for series in self.panels.iter().flat_map(|panel| &panel.series) {
            if !series.points.is_empty() && !names.contains(&series.name.as_str()) {
                names.push(&series.name);
            }
        }
        names
    }
}

impl Panel {
    fn has_points(&self) -> bool {
        self.series.iter().any(|series| !series.points.is_empty())
    }

    fn draw(&self, svg: &mut String, top: f64, names: &[&str]) {
        let [left, right, above, below] = MARGINS;
        let points = || self.series.iter().flat_map(|series| &series.points);
        let across = Axis::new(self.scales[0], points().map(|point| point.0), [left, WIDTH - right]);
        let up =
            Axis::new(self.scales[1], points().map(|point| point.1), [top + HEIGHT - below, top + above]);
        text(
            svg,
            [left, top + above - 12.0],
            "start",
            &format!("{}: {}", self.title, self.y),
            " font-weight=\"bold\"",
        );
        for mark in across.marks() {
            let x = across.place(mark);
            rule(svg, [x, top + above], [x, top + HEIGHT - below]);
            text(svg, [x, top + HEIGHT - below + 16.0], "middle", &across.label(mark), "");
        }
        for mark in up.marks() {
            let y = up.place(mark);
            rule(svg, [left, y], [WIDTH - right, y]);
            text(svg, [left - 6.0, y + 4.0], "end", &up.label(mark), "");
        }
        text(svg, [(left + WIDTH - right) / 2.0, top + HEIGHT - below + 34.0], "middle", &self.x, "");
        for series in &self.series {
            let Some(index) = names.iter().position(|name| *name == series.name) else { continue };
            let places: Vec<_> =
                series.points.iter().map(|(x, y)| (across.place(*x), up.place(*y))).collect();
            polyline(svg, &places, index);
            for (x, y) in places {
                let _ = writeln!(
                    svg,
                    "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.5\" fill=\"{}\"/>",
                    colour(index)
                );
            }
        }
    }
}

/// Values to places.
struct Axis {
    scale: Scale,
    /// Least and greatest value, at these places.
    values: [f64; 2],
    places: [f64; 2],
}

impl Axis {
    fn new(scale: Scale, values: impl Iterator<Item = f64>, places: [f64; 2]) -> Axis {
        let found = values
            .filter(|value| value.is_finite() && (*value > 0.0 || scale == Scale::Linear))
            .fold(None, |found: Option<[f64; 2]>, value| {
                Some(found.map_or([value; 2], |[least, most]| [least.min(value), most.max(value)]))
            });
        let [least, most] = found.unwrap_or([1.0, 1.0]);
        let values = match scale {
            Scale::Linear => [0.0_f64.min(least), if most > least.min(0.0) { most * 1.05 } else { 1.0 }],
            // One value alone has room on both sides.
            Scale::Doubling if least == most => [least / 2.0, most * 2.0],
            Scale::Doubling => [least, most],
            Scale::Decimal => [least * 0.8, most * 1.25],
        };
        Axis { scale, values, places }
    }

    fn place(&self, value: f64) -> f64 {
        let along = |value: f64| match self.scale {
            Scale::Linear => value,
            Scale::Doubling | Scale::Decimal => value.max(f64::MIN_POSITIVE).ln(),
        };
        let [least, most] = self.values.map(along);
        let share = (along(value) - least) / (most - least);
        self.places[0] + share.clamp(0.0, 1.0) * (self.places[1] - self.places[0])
    }

    fn marks(&self) -> Vec<f64> {
        let [least, most] = self.values;
        let inside = |mark: &f64| *mark >= least * 0.999_999 && *mark <= most * 1.000_001;
        match self.scale {
            Scale::Linear => {
                let raw = (most - least) / 6.0;
                let power = 10_f64.powf(raw.log10().floor());
                let step = [1.0, 2.0, 5.0, 10.0].map(|n| n * power).into_iter().find(|step| *step >= raw);
                let step = step.unwrap_or(power * 10.0);
                (0..=12).map(|n| f64::from(n) * step).filter(inside).collect()
            }
            Scale::Doubling => {
                let (first, last) = (least.log2().ceil() as i32, most.log2().floor() as i32);
                let step = usize::try_from((last - first) / 10 + 1).unwrap_or(1);
                (first..=last).step_by(step).map(|n| 2_f64.powi(n)).collect()
            }
            Scale::Decimal => {
                let powers = least.log10().floor() as i32..=most.log10().ceil() as i32;
                let marks = powers.flat_map(|n| [1.0, 2.0, 5.0].map(|digit| digit * 10_f64.powi(n)));
                marks.filter(inside).collect()
            }
        }
    }

    fn label(&self, value: f64) -> String {
        if self.scale != Scale::Doubling {
            // As many places as the value needs: marks have one digit.
            return format!("{}", (value * 1e6).round() / 1e6);
        }
        let units = [(1_f64, ""), (1024.0, " Ki"), (1_048_576.0, " Mi")];
        let (unit, name) = units.into_iter().rfind(|(unit, _)| value >= *unit).unwrap_or((1.0, ""));
        format!("{}{name}", value / unit)
    }
}

fn colour(index: usize) -> &'static str {
    COLOURS[index % COLOURS.len()]
}

fn polyline(svg: &mut String, places: &[(f64, f64)], index: usize) {
    let points: Vec<_> = places.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let dash = DASHES[index / COLOURS.len() % DASHES.len()];
    let _ = writeln!(
        svg,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"1.8\" \
         stroke-dasharray=\"{dash}\"/>",
        points.join(" "),
        colour(index)
    );
}

fn rule(svg: &mut String, from: [f64; 2], to: [f64; 2]) {
    let _ = writeln!(
        svg,
        "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"#dddddd\"/>",
        from[0], from[1], to[0], to[1]
    );
}

fn text(svg: &mut String, at: [f64; 2], anchor: &str, words: &str, more: &str) {
    let words = words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let _ = writeln!(
        svg,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\"{more}>{words}</text>",
        at[0], at[1]
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn axis(scale: Scale, values: &[f64]) -> Axis {
        Axis::new(scale, values.iter().copied(), [0.0, 100.0])
    }

    #[test]
    fn marks_are_round_numbers_inside_the_axis() {
        assert_eq!(axis(Scale::Doubling, &[8.0, 64.0]).marks(), [8.0, 16.0, 32.0, 64.0]);
        assert_eq!(axis(Scale::Doubling, &[1.0, 1_048_576.0]).marks().len(), 7);
        assert_eq!(axis(Scale::Decimal, &[4.0, 40.0]).marks(), [5.0, 10.0, 20.0, 50.0]);
        assert_eq!(axis(Scale::Linear, &[3.0, 600.0]).marks(), [0.0, 200.0, 400.0, 600.0]);
    }

    #[test]
    fn places_are_inside_for_any_values() {
        for values in [&[][..], &[5.0], &[0.0, 0.0], &[f64::NAN, 3.0], &[-1.0, 4.0]] {
            for scale in [Scale::Doubling, Scale::Decimal, Scale::Linear] {
                let axis = axis(scale, values);
                for value in values.iter().copied().filter(|value| value.is_finite()) {
                    let place = axis.place(value);
                    assert!((0.0..=100.0).contains(&place), "{values:?}: {value} at {place}");
                }
                assert!(axis.marks().len() <= 40, "{values:?}");
            }
        }
    }

    #[test]
    fn sizes_have_their_usual_names() {
        let axis = axis(Scale::Doubling, &[1.0, 1e7]);
        assert_eq!([64.0, 4096.0, 2_097_152.0].map(|n| axis.label(n)), ["64", "4 Ki", "2 Mi"]);
    }

    #[test]
    fn a_page_has_a_line_for_each_series_and_escapes_names() {
        let series = |name: &str, points: &[(f64, f64)]| Series { name: name.into(), points: points.into() };
        let page = Page {
            title: "a < b".into(),
            panels: vec![Panel {
                title: "t".into(),
                x: "x".into(),
                y: "y".into(),
                scales: [Scale::Doubling, Scale::Decimal],
                series: vec![series("one & two", &[(1.0, 2.0), (2.0, 4.0)]), series("none", &[])],
            }],
        };
        let svg = page.svg();
        assert_eq!(svg.matches("<polyline").count(), 2, "the line and its legend\n{svg}");
        assert!(
            svg.contains("a &lt; b") && svg.contains("one &amp; two") && !svg.contains(">none<"),
            "{svg}"
        );
    }
}
