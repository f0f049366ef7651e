//! One chart as SVG: axes, lines, dots. It must not know runs, nor what its numbers mean.

use super::page::escape;
use std::fmt::Write;

const WIDTH: f64 = 560.0;
const HEIGHT: f64 = 250.0;
const LEFT: f64 = 58.0;
const RIGHT: f64 = 548.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 216.0;

/// Largest over smallest value from which an axis is logarithmic at first.
const LOG_FROM: f64 = 60.0;

/// How a series is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Style {
    /// What is looked at.
    Line,
    /// Single values behind a smoothed line.
    Faint,
    /// Measured now and then: dots on a dashed line.
    Dots,
    /// Constant from each point to the next.
    Stairs,
}

/// Points that belong together, in order of x.
pub(super) struct Series {
    pub label: String,
    /// Index into the page's colours.
    pub colour: usize,
    pub style: Style,
    pub points: Vec<(f64, f64)>,
}

/// A chart; series without points are left out.
pub(super) struct Chart {
    pub title: &'static str,
    /// What the y axis counts.
    pub unit: &'static str,
    pub x_label: &'static str,
    /// Whether the y axis begins at 0.
    pub from_zero: bool,
    pub series: Vec<Series>,
}

/// One axis: values to pixels.
struct Axis {
    low: f64,
    high: f64,
    log: bool,
    pixels: (f64, f64),
}

impl Axis {
    fn place(&self, value: f64) -> f64 {
        let scale = |value: f64| if self.log { value.ln() } else { value };
        let share = (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low));
        self.pixels.0 + share * (self.pixels.1 - self.pixels.0)
    }

    /// Round values within the axis.
    fn ticks(&self) -> Vec<f64> {
        if self.log {
            let (from, to) = (self.low.log10().floor() as i32, self.high.log10().ceil() as i32);
            let decades = (from..=to).flat_map(|power| [1.0, 2.0, 5.0].map(|digit| digit * 10f64.powi(power)));
            let inside: Vec<f64> = decades.filter(|tick| (self.low..=self.high).contains(tick)).collect();
            let step = inside.len().div_ceil(7).max(1);
            return inside.into_iter().step_by(step).collect();
        }
        let step = round_step((self.high - self.low) / 6.0);
        let first = (self.low / step).ceil() as i64;
        (first..first + 12).map(|index| index as f64 * step).take_while(|tick| *tick <= self.high + step * 1e-9).collect()
    }
}

/// The least of 1, 2, 5 times a power of ten that is not below `rough`.
fn round_step(rough: f64) -> f64 {
    let power = 10f64.powf(rough.log10().floor());
    let digit = [1.0, 2.0, 5.0].into_iter().find(|digit| digit * power >= rough * (1.0 - 1e-9)).unwrap_or(10.0);
    digit * power
}

/// 1234567 as "1.23M", 0.00002 as "2e-5".
pub(super) fn short(value: f64) -> String {
    let size = value.abs();
    let trim = |text: String| if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text };
    match size {
        0.0 => "0".to_owned(),
        _ if size >= 1e9 => trim(format!("{:.2}", value / 1e9)) + "G",
        _ if size >= 1e6 => trim(format!("{:.2}", value / 1e6)) + "M",
        _ if size >= 1e4 => trim(format!("{:.1}", value / 1e3)) + "k",
        _ if size >= 100.0 => trim(format!("{value:.1}")),
        _ if size >= 0.01 => trim(format!("{value:.3}")),
        _ => {
            let text = format!("{value:.1e}");
            text.replacen(".0e", "e", 1)
        }
    }
}

fn bounds(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values.filter(|value| value.is_finite()).fold(None, |bounds, value| {
        let (low, high) = bounds.unwrap_or((value, value));
        Some((value.min(low), value.max(high)))
    })
}

impl Chart {
    /// The figure, or nothing where no series has a point.
    pub(super) fn figure(&self) -> String {
        let Some((low, high)) = self.bounds_of_y() else { return String::new() };
        // Both are drawn where both make sense; the reader switches.
        let can_be_log = !self.from_zero && low > 0.0 && high > low;
        let begins_log = can_be_log && high / low > LOG_FROM;
        let log = if can_be_log { self.svg(true) } else { String::new() };
        let button = if can_be_log { "<button type=\"button\">log</button>" } else { "" };
        let class = if begins_log { "chart log" } else { "chart" };
        let (title, unit) = (escape(self.title), escape(self.unit));
        format!(
            "<figure class=\"{class}\">\n<figcaption>{title} <small>{unit}</small>{button}</figcaption>\n{}{log}\
             <div class=\"tip\"></div>\n<script type=\"application/json\">{}</script>\n</figure>\n",
            self.svg(false),
            self.data(),
        )
    }

    /// The drawing with a linear or a logarithmic y axis.
    fn svg(&self, log: bool) -> String {
        let Some((x, y)) = self.axes(log) else { return String::new() };
        let mut svg = String::new();
        self.draw_axes(&mut svg, &x, &y);
        for series in self.series.iter().filter(|series| !series.points.is_empty()) {
            draw(&mut svg, series, &x, &y);
        }
        format!(
            "<svg class=\"{}\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{} by {}\" \
             data-x=\"{LEFT} {RIGHT} {} {}\">\n{svg}<line class=\"cursor\" y1=\"{TOP}\" y2=\"{BOTTOM}\"/></svg>\n",
            if log { "logarithmic" } else { "linear" },
            escape(self.title),
            self.x_label,
            x.low,
            x.high,
        )
    }

    fn bounds_of_y(&self) -> Option<(f64, f64)> {
        bounds(self.series.iter().flat_map(|series| &series.points).map(|point| point.1))
    }

    fn axes(&self, log: bool) -> Option<(Axis, Axis)> {
        let points = || self.series.iter().flat_map(|series| &series.points);
        let (x_low, mut x_high) = bounds(points().map(|point| point.0))?;
        let (mut low, mut high) = self.bounds_of_y()?;
        if x_high <= x_low {
            x_high = x_low + 1.0;
        }
        if self.from_zero {
            low = low.min(0.0);
        }
        if log {
            let margin = (high / low).powf(0.06);
            (low, high) = (low / margin, high * margin);
        } else {
            // A flat curve lies in the middle of its chart.
            let margin = if high > low { (high - low) * 0.06 } else { high.abs().max(1e-12) * 0.1 };
            (low, high) = (if self.from_zero && low == 0.0 { 0.0 } else { low - margin }, high + margin);
        }
        let x = Axis { low: x_low, high: x_high, log: false, pixels: (LEFT, RIGHT) };
        Some((x, Axis { low, high, log, pixels: (BOTTOM, TOP) }))
    }

    fn draw_axes(&self, svg: &mut String, x: &Axis, y: &Axis) {
        for tick in y.ticks() {
            let at = y.place(tick);
            let _ = writeln!(svg, "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{RIGHT}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>");
            let _ = writeln!(svg, "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>", LEFT - 7.0, at + 4.0, short(tick));
        }
        for tick in x.ticks().into_iter().filter(|tick| tick.fract() == 0.0) {
            let at = x.place(tick);
            let _ = writeln!(svg, "<text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>", BOTTOM + 16.0, short(tick));
        }
        let _ = writeln!(svg, "<line class=\"axis\" x1=\"{LEFT}\" x2=\"{RIGHT}\" y1=\"{BOTTOM}\" y2=\"{BOTTOM}\"/>");
        let _ = writeln!(svg, "<text x=\"{RIGHT}\" y=\"{}\" text-anchor=\"end\">{}</text>", BOTTOM + 31.0, escape(self.x_label));
    }

    /// The numbers, for values under the pointer.
    fn data(&self) -> String {
        let shown = self.series.iter().filter(|series| !series.points.is_empty());
        let series: Vec<_> = shown
            .map(|series| {
                let (x, y): (Vec<f64>, Vec<f64>) = series.points.iter().copied().unzip();
                serde_json::json!({"label": series.label, "colour": series.colour, "stairs": series.style == Style::Stairs,
                    "hidden": series.style == Style::Faint, "x": x, "y": y})
            })
            .collect();
        let text = serde_json::json!({"x": self.x_label, "series": series}).to_string();
        // No text can end the script that it lies in.
        text.replace('<', "\\u003c")
    }
}

fn draw(svg: &mut String, series: &Series, x: &Axis, y: &Axis) {
    let mut path = String::new();
    let mut last = None;
    for &(at, value) in &series.points {
        let place = (x.place(at), y.place(value));
        match (last, series.style) {
            (None, _) => drop(write!(path, "M{:.1} {:.1}", place.0, place.1)),
            (Some(_), Style::Stairs) => drop(write!(path, "H{:.1}V{:.1}", place.0, place.1)),
            (Some(_), _) => drop(write!(path, "L{:.1} {:.1}", place.0, place.1)),
        }
        last = Some(place);
    }
    let class = match series.style {
        Style::Line | Style::Stairs => "line",
        Style::Faint => "faint",
        Style::Dots => "dashed",
    };
    let colour = series.colour;
    let _ = writeln!(svg, "<path class=\"{class} c{colour}\" d=\"{path}\"/>");
    // A single point has no line.
    if series.style == Style::Dots || series.points.len() == 1 {
        for &(at, value) in &series.points {
            let _ = writeln!(svg, "<circle class=\"c{colour}\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\"/>", x.place(at), y.place(value));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        let shown = [0.0, 2e-5, 0.0123, 3.1, 120.0, 8192.0, 43_583.4, 1.5e6, 8.7e9].map(short);
        assert_eq!(shown, ["0", "2e-5", "0.012", "3.1", "120", "8192", "43.6k", "1.5M", "8.7G"]);
    }

    #[test]
    fn ticks_are_round_and_within() {
        let axis = |low, high, log| Axis { low, high, log, pixels: (0.0, 1.0) };
        assert_eq!(axis(1.0, 12.0, false).ticks(), [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]);
        assert_eq!(axis(2.0, 3.5, false).ticks(), [2.0, 2.5, 3.0, 3.5]);
        assert_eq!(axis(0.5, 150.0, true).ticks(), [0.5, 2.0, 10.0, 50.0]);
    }

    #[test]
    fn a_flat_or_single_value_has_a_place() {
        for points in [vec![(1.0, 2.0)], vec![(1.0, 0.0), (2.0, 0.0)]] {
            let series = vec![Series { label: "a".into(), colour: 0, style: Style::Line, points }];
            let chart = Chart { title: "t", unit: "u", x_label: "step", from_zero: true, series };
            let figure = chart.figure();
            assert!(figure.contains("<path") && !figure.contains("NaN") && !figure.contains("inf"), "{figure}");
        }
    }
}
