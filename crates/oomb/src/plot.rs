//! Small pictures as SVG, self-contained: lines over a logarithmic or linear axis, and a grid of coloured cells. It must not
//! know what is drawn.

use std::fmt::Write;

const WIDTH: f64 = 720.0;
const LEFT: f64 = 64.0;
const TOP: f64 = 40.0;
const HEIGHT: f64 = 280.0;

/// A line through points of which x is above 0 where the axis is logarithmic.
pub struct LinePlot<'a> {
    /// Above the picture.
    pub title: &'a str,
    /// Below the axis.
    pub x_label: &'a str,
    /// Whether x counts in powers of two.
    pub log_x: bool,
    /// (x, y), ascending in x.
    pub points: &'a [(f64, f64)],
}

/// Cells coloured by a value from 0 to 1; `None` is left grey.
pub struct HeatMap<'a> {
    /// Above the picture.
    pub title: &'a str,
    /// Names of the columns.
    pub columns: &'a [String],
    /// Below the columns.
    pub x_label: &'a str,
    /// Name and cells of each row.
    pub rows: &'a [(String, Vec<Option<f64>>)],
}

/// Text that may stand in XML.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

struct Svg(String);

impl Svg {
    fn new(width: f64, height: f64, title: &str) -> Self {
        let mut svg = Self(format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" \
             font-family=\"sans-serif\" font-size=\"12\" fill=\"#333\"><rect width=\"{width}\" height=\"{height}\" fill=\"#fff\"/>"
        ));
        svg.text(LEFT, 20.0, "start", title);
        svg
    }

    fn add(&mut self, element: std::fmt::Arguments<'_>) {
        self.0.write_fmt(element).expect("writing to a string cannot fail");
    }

    fn text(&mut self, x: f64, y: f64, anchor: &str, text: &str) {
        self.add(format_args!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>", escaped(text)));
    }

    fn line(&mut self, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) {
        self.add(format_args!("<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"#ddd\"/>"));
    }

    fn end(mut self) -> String {
        self.0.push_str("</svg>\n");
        self.0
    }
}

/// A length in tokens as people write it: `4K`, `1M`, `100`.
pub fn short_count(count: u64) -> String {
    match count {
        0 => "0".to_owned(),
        _ if count.is_multiple_of(1 << 20) => format!("{}M", count >> 20),
        _ if count.is_multiple_of(1 << 10) => format!("{}K", count >> 10),
        _ => count.to_string(),
    }
}

impl LinePlot<'_> {
    /// The picture; points that are not finite are left out.
    pub fn svg(&self) -> String {
        let mut svg = Svg::new(WIDTH, TOP + HEIGHT + 48.0, self.title);
        let place = |x: f64| if self.log_x { x.max(f64::MIN_POSITIVE).log2() } else { x };
        let points: Vec<_> = self.points.iter().filter(|(x, y)| x.is_finite() && y.is_finite()).collect();
        let (Some((first, _)), Some((last, _))) = (points.first(), points.last()) else { return svg.end() };
        let low = points.iter().fold(f64::INFINITY, |low, (_, y)| low.min(*y));
        let high = points.iter().fold(f64::NEG_INFINITY, |high, (_, y)| high.max(*y));
        let step = nice_step((high - low).max(1e-3) / 5.0);
        let (bottom, top) = ((low / step).floor() * step, (high / step).floor() * step + step);
        let span = (place(*last) - place(*first)).max(f64::EPSILON);
        let at_x = |x: f64| LEFT + (place(x) - place(*first)) / span * (WIDTH - LEFT - 24.0);
        let at_y = |y: f64| TOP + (top - y) / (top - bottom) * HEIGHT;
        for tick in 0..=((top - bottom) / step).round() as usize {
            let y = bottom + tick as f64 * step;
            svg.line((LEFT, at_y(y)), (WIDTH - 24.0, at_y(y)));
            let decimals = (-step.log10().floor()).max(0.0) as usize;
            svg.text(LEFT - 8.0, at_y(y) + 4.0, "end", &format!("{y:.decimals$}"));
        }
        for (x, _) in points.iter().step_by(points.len().div_ceil(10)) {
            svg.text(at_x(*x), TOP + HEIGHT + 18.0, "middle", &short_count(x.round() as u64));
        }
        svg.text((LEFT + WIDTH) / 2.0, TOP + HEIGHT + 38.0, "middle", self.x_label);
        let path: Vec<String> = points.iter().map(|(x, y)| format!("{:.1},{:.1}", at_x(*x), at_y(*y))).collect();
        svg.add(format_args!("<polyline points=\"{}\" fill=\"none\" stroke=\"#1f6feb\" stroke-width=\"2\"/>", path.join(" ")));
        for (x, y) in points {
            svg.add(format_args!("<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"#1f6feb\"/>", at_x(*x), at_y(*y)));
        }
        svg.end()
    }
}

/// The smallest of 1, 2, 5 times a power of ten that is not below `step`.
fn nice_step(step: f64) -> f64 {
    let power = 10f64.powf(step.log10().floor());
    [1.0, 2.0, 5.0].into_iter().map(|factor| factor * power).find(|nice| *nice >= step).unwrap_or(10.0 * power)
}

impl HeatMap<'_> {
    /// The picture, one row per entry.
    pub fn svg(&self) -> String {
        const ROW: f64 = 28.0;
        let left = 40.0 + 7.0 * self.rows.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0) as f64;
        let cell = ((WIDTH - left - 24.0) / self.columns.len().max(1) as f64).min(120.0);
        let bottom = TOP + ROW * self.rows.len() as f64;
        let mut svg = Svg::new(WIDTH, bottom + 48.0, self.title);
        for (index, (name, cells)) in self.rows.iter().enumerate() {
            let y = TOP + index as f64 * ROW;
            svg.text(left - 8.0, y + 18.0, "end", name);
            for (column, value) in cells.iter().enumerate() {
                let x = left + column as f64 * cell;
                // From red by yellow to green.
                let fill = value.map_or("#eee".to_owned(), |value| format!("hsl({:.0},70%,72%)", 120.0 * value.clamp(0.0, 1.0)));
                svg.add(format_args!(
                    "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{fill}\"/>",
                    cell - 2.0,
                    ROW - 2.0
                ));
                let shown = value.map_or("–".to_owned(), |value| format!("{:.0}", 100.0 * value));
                svg.text(x + cell / 2.0, y + 18.0, "middle", &shown);
            }
        }
        for (column, name) in self.columns.iter().enumerate() {
            svg.text(left + (column as f64 + 0.5) * cell, bottom + 18.0, "middle", name);
        }
        svg.text(left + cell * self.columns.len() as f64 / 2.0, bottom + 38.0, "middle", self.x_label);
        svg.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pictures_hold_every_value_and_no_loose_markup() {
        let points = [(64.0, 3.5), (128.0, 3.1), (256.0, f64::NAN), (1024.0, 2.95)];
        let svg = LinePlot { title: "loss <by> \"position\" & more", x_label: "position", log_x: true, points: &points }.svg();
        assert_eq!(svg.matches("<circle").count(), 3);
        assert!(svg.contains("loss &lt;by&gt; &quot;position&quot; &amp; more") && !svg.contains("NaN"), "{svg}");
        assert!(svg.contains(">1K<") && svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
        let rows = [("needle, depth 0 %".to_owned(), vec![Some(0.5), None])];
        let columns = ["4K".to_owned(), "8K".to_owned()];
        let svg = HeatMap { title: "accuracy", columns: &columns, x_label: "tokens", rows: &rows }.svg();
        assert!(svg.contains("hsl(60,70%,72%)") && svg.contains(">50<") && svg.contains("#eee") && svg.contains(">8K<"), "{svg}");
        // One value is a picture too, and so is none.
        for points in [&points[..1], &[]] {
            let svg = LinePlot { title: "", x_label: "", log_x: false, points }.svg();
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
        assert_eq!([0, 100, 1024, 3 << 20].map(short_count), ["0", "100", "1K", "3M"]);
    }

    #[test]
    fn steps_are_round() {
        for (step, nice) in [(0.013, 0.02), (0.3, 0.5), (7.0, 10.0), (1.0, 1.0)] {
            assert!((nice_step(step) / nice - 1.0).abs() < 1e-9, "{step}: {}", nice_step(step));
        }
    }
}
