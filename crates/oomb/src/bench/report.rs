//! Figures as a table for people and as JSON for scripts. It must not know how they were measured.

use super::{Ceilings, Timing};
use serde_json::{Value, json};
use std::fmt;

/// What one call did, and the rate that counts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Work {
    /// Multiplications and additions.
    Flops(f64),
    /// Bytes moved.
    Bytes(f64),
}

impl Work {
    fn amount(self) -> f64 {
        match self {
            Self::Flops(flops) => flops,
            Self::Bytes(bytes) => bytes,
        }
    }

    /// Unit of the rate, and what a rate is divided by for it.
    fn unit(self) -> (&'static str, f64) {
        match self {
            Self::Flops(_) => ("TFLOP/s", 1e12),
            Self::Bytes(_) => ("GB/s", 1e9),
        }
    }
}

/// One figure.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// What was measured: `"gate_up"`.
    pub name: &'static str,
    /// At which size, in words: `"8192 x 37888 x 3584"`.
    pub size: String,
    /// `"forward"`, `"backward input"`, `"in"`.
    pub direction: &'static str,
    /// Of one call.
    pub timing: Timing,
    /// Of one call.
    pub work: Work,
    /// The rate that bounds it, in units of `work` per second, where one is known.
    pub ceiling: Option<f64>,
}

impl Row {
    /// FLOP or bytes of one call.
    pub fn amount(&self) -> f64 {
        self.work.amount()
    }

    /// FLOP or bytes per second, by the median.
    pub fn rate(&self) -> f64 {
        self.work.amount() / self.timing.median
    }

    /// Rate over ceiling.
    pub fn share(&self) -> Option<f64> {
        self.ceiling.map(|ceiling| self.rate() / ceiling)
    }

    fn cells(&self) -> [String; 7] {
        let (unit, scale) = self.work.unit();
        let rate = |rate: Option<f64>| rate.map_or("-".to_owned(), |rate| digits(rate / scale));
        [
            self.name.to_owned(),
            self.size.clone(),
            self.direction.to_owned(),
            digits(1e3 * self.timing.median),
            format!("{} {unit}", rate(Some(self.rate()))),
            rate(self.ceiling),
            self.share().map_or("-".to_owned(), |share| format!("{:.1} %", 100.0 * share)),
        ]
    }

    fn json(&self) -> Value {
        let (unit, scale) = self.work.unit();
        json!({
            "name": self.name,
            "size": self.size,
            "direction": self.direction,
            "milliseconds": { "median": 1e3 * self.timing.median, "min": 1e3 * self.timing.min, "max": 1e3 * self.timing.max },
            "unit": unit,
            "rate": self.rate() / scale,
            "ceiling": self.ceiling.map(|ceiling| ceiling / scale),
            "share": self.share(),
        })
    }
}

/// Three significant digits and no exponent.
fn digits(x: f64) -> String {
    let before_point = x.abs().max(f64::MIN_POSITIVE).log10().floor() as i32 + 1;
    format!("{x:.*}", (3 - before_point).clamp(0, 6) as usize)
}

/// All figures of one call of the program.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// As the user names it: `"cuda:0"`.
    pub device: String,
    /// As its driver names it: `"NVIDIA H200"`.
    pub hardware: String,
    /// What all figures share, in words.
    pub setup: String,
    /// The figures.
    pub rows: Vec<Row>,
}

impl Report {
    /// Everything, with unrounded numbers.
    pub fn json(&self) -> Value {
        let rows: Vec<_> = self.rows.iter().map(Row::json).collect();
        json!({
            "device": self.device,
            "hardware": self.hardware,
            "setup": self.setup,
            "version": env!("CARGO_PKG_VERSION"),
            "rows": rows,
        })
    }

    fn has_ceilings(&self) -> bool {
        Ceilings::of(&self.hardware).is_some()
    }
}

const HEADINGS: [&str; 7] = ["what", "size", "direction", "ms", "rate", "ceiling", "share"];
/// Columns of numbers are aligned to the right.
const FIRST_NUMBER: usize = 3;

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} ({}): {}", self.device, self.hardware, self.setup)?;
        let lines: Vec<_> = std::iter::once(HEADINGS.map(str::to_owned)).chain(self.rows.iter().map(Row::cells)).collect();
        f.write_str(&aligned(&lines, FIRST_NUMBER))?;
        if !self.has_ceilings() {
            writeln!(f, "no ceilings were measured for this hardware")?;
        }
        Ok(())
    }
}

/// Lines of cells below each other; columns from `first_number` on are aligned to the right.
pub fn aligned<const N: usize>(lines: &[[String; N]], first_number: usize) -> String {
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; N] = std::array::from_fn(width);
    let mut text = String::new();
    for line in lines {
        let cell = |(column, text): (usize, &String)| {
            let width = widths[column];
            if column < first_number { format!("{text:width$}") } else { format!("{text:>width$}") }
        };
        let cells: Vec<_> = line.iter().enumerate().map(cell).collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_rate_over_ceiling() {
        let timing = Timing { median: 2e-3, min: 1e-3, max: 4e-3 };
        let row = |ceiling| Row {
            name: "qkv",
            size: "8 x 8 x 8".to_owned(),
            direction: "forward",
            timing,
            work: Work::Flops(8e11),
            ceiling,
        };
        let rows = vec![row(Some(800e12)), row(None)];
        let report = Report { device: "cuda:0".into(), hardware: "X".into(), setup: "tiny".into(), rows };
        assert_eq!(report.rows[0].share(), Some(0.5));
        let expected = "cuda:0 (X): tiny\n\
            what  size       direction    ms         rate  ceiling   share\n\
            qkv   8 x 8 x 8  forward    2.00  400 TFLOP/s      800  50.0 %\n\
            qkv   8 x 8 x 8  forward    2.00  400 TFLOP/s        -       -\n\
            no ceilings were measured for this hardware\n";
        assert_eq!(report.to_string(), expected);
        assert_eq!(report.json()["rows"][0]["milliseconds"]["max"], 4.0);
        assert_eq!(report.json()["rows"][1]["share"], Value::Null);
    }

    #[test]
    fn three_digits_are_enough() {
        assert_eq!(
            [0.001234, 0.5, 12.345, 987.6, 123_456.0, 0.0].map(digits),
            ["0.00123", "0.500", "12.3", "988", "123456", "0.000000"]
        );
    }
}
