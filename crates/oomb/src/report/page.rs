//! The page: summary, charts, memory, plan, settings. It must not know files.

use super::chart::{Chart, Series, Style, short};
use super::read::RunFiles;
use crate::config::{Bytes, format_count};

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// Colours in `page.css`; more runs than that share them.
const NUM_COLOURS: usize = 8;

/// Steps from which a curve is drawn smoothed, over its single values.
const SMOOTH_FROM: usize = 150;

/// Text as HTML, within elements and quoted attributes.
pub(super) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            _ => escaped.push(c),
        }
    }
    escaped
}

pub(super) fn page(runs: &[RunFiles]) -> String {
    let names: Vec<_> = runs.iter().map(|run| escape(&run.name)).collect();
    let title = names.join(", ");
    let legend = if runs.len() > 1 { legend(&names) } else { String::new() };
    let body = [summary(runs), legend, charts(runs), memory(runs), differences(runs), details(runs)].concat();
    format!(
        "<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width\">\n\
         <title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>\n{body}</main>\n\
         <script>\n{SCRIPT}</script>\n</body>\n</html>\n"
    )
}

fn legend(names: &[String]) -> String {
    let entry = |(index, name): (usize, &String)| format!("<span><i class=\"b{}\"></i>{name}</span>", index % NUM_COLOURS);
    let entries: Vec<_> = names.iter().enumerate().map(entry).collect();
    format!("<p class=\"legend\">{}</p>\n", entries.join(" "))
}

/// A row per run; of what no run has there is no column.
fn summary(runs: &[RunFiles]) -> String {
    type Column = (&'static str, fn(&RunFiles) -> Option<String>);
    let columns: [Column; 9] = [
        ("steps", |run| Some(format_count(run.steps.len() as u64))),
        ("tokens", |run| Some(short(total(run, "tokens")?))),
        ("last loss", |run| Some(format!("{:.4}", run.series("loss").last()?.1))),
        ("best validation loss", |run| {
            let (step, loss) = run.series("validation_loss").into_iter().min_by(|a, b| a.1.total_cmp(&b.1))?;
            Some(format!("{loss:.4} <small>step {step}</small>"))
        }),
        ("tokens/s <small>median</small>", |run| Some(format_count(median(run, "tokens_per_second")? as u64))),
        ("seconds a step <small>median</small>", |run| Some(short(median(run, "seconds")?))),
        ("time <small>in steps</small>", |run| Some(duration(total(run, "seconds")?))),
        ("device", |run| Some(Bytes(peak(run, "device_bytes")?).to_string())),
        ("host", |run| Some(Bytes(peak(run, "host_bytes")?).to_string())),
    ];
    let shown: Vec<_> = columns.iter().filter(|(_, value)| runs.iter().any(|run| value(run).is_some())).collect();
    let head: String = shown.iter().map(|(name, _)| format!("<th>{name}</th>")).collect();
    let rows: String = runs
        .iter()
        .enumerate()
        .map(|(index, run)| {
            let cells: String = shown.iter().map(|(_, value)| format!("<td>{}</td>", value(run).unwrap_or_default())).collect();
            format!("<tr><th><i class=\"b{}\"></i>{}</th>{cells}</tr>\n", index % NUM_COLOURS, escape(&run.name))
        })
        .collect();
    let notes: String = runs
        .iter()
        .filter(|run| run.num_unreadable > 0)
        .map(|run| {
            let (name, count) = (escape(&run.name), run.num_unreadable);
            format!("<p class=\"note\">{name}: {count} line(s) of metrics.jsonl could not be read and are left out.</p>\n")
        })
        .collect();
    format!("<div class=\"wide\"><table class=\"numbers\">\n<tr><th>run</th>{head}</tr>\n{rows}</table></div>\n{notes}")
}

fn total(run: &RunFiles, name: &str) -> Option<f64> {
    let values = run.series(name);
    (!values.is_empty()).then(|| values.iter().map(|point| point.1).sum())
}

fn median(run: &RunFiles, name: &str) -> Option<f64> {
    let mut values: Vec<f64> = run.series(name).into_iter().map(|point| point.1).collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

fn peak(run: &RunFiles, name: &str) -> Option<u64> {
    run.series(name).into_iter().map(|point| point.1 as u64).max()
}

fn duration(seconds: f64) -> String {
    let seconds = seconds.round() as u64;
    format!("{}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

fn charts(runs: &[RunFiles]) -> String {
    let by_step = |title, unit, names: &[(&str, Style)]| Chart {
        title,
        unit,
        x_label: "step",
        from_zero: false,
        series: runs.iter().enumerate().flat_map(|(index, run)| curves(index, run, names)).collect(),
    };
    let mut throughput = by_step("Throughput", "tokens/s", &[("tokens_per_second", Style::Line)]);
    throughput.from_zero = true;
    let mut rate = by_step("Learning rate", "", &[("lr", Style::Line)]);
    rate.from_zero = true;
    let figures = [
        by_step("Loss", "nats; dots: validation", &[("loss", Style::Line), ("validation_loss", Style::Dots)]),
        by_position(runs),
        by_step("Gradient norm", "before clipping", &[("grad_norm", Style::Line)]),
        rate,
        throughput,
    ];
    format!("<div class=\"charts\">\n{}</div>\n", figures.map(|chart| chart.figure()).concat())
}

fn curves(index: usize, run: &RunFiles, names: &[(&str, Style)]) -> Vec<Series> {
    let colour = index % NUM_COLOURS;
    let mut curves = Vec::new();
    for &(name, style) in names {
        let points = run.series(name);
        let label = if name == "validation_loss" { format!("{}, validation", run.name) } else { run.name.clone() };
        let smooth = (style == Style::Line && points.len() >= SMOOTH_FROM && name != "lr").then(|| smoothed(&points));
        if let Some(smooth) = smooth {
            curves.push(Series { label: String::new(), colour, style: Style::Faint, points });
            curves.push(Series { label: format!("{label}, smoothed"), colour, style, points: smooth });
        } else {
            curves.push(Series { label, colour, style, points });
        }
    }
    curves
}

/// The mean over the 2 % of steps around each.
fn smoothed(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let reach = (points.len() / 100).max(2);
    let mean = |index: usize| {
        let around = &points[index.saturating_sub(reach)..(index + reach + 1).min(points.len())];
        (points[index].0, around.iter().map(|point| point.1).sum::<f64>() / around.len() as f64)
    };
    (0..points.len()).map(mean).collect()
}

fn by_position(runs: &[RunFiles]) -> Chart {
    let series = runs.iter().enumerate().map(|(index, run)| {
        let measured = || run.buckets.iter().filter_map(|bucket| Some((bucket, bucket.loss?)));
        let mut points: Vec<_> = measured().map(|(bucket, loss)| (bucket.from as f64, loss)).collect();
        points.extend(measured().next_back().map(|(bucket, loss)| (bucket.to as f64, loss)));
        Series { label: run.name.clone(), colour: index % NUM_COLOURS, style: Style::Stairs, points }
    });
    let unit = "nats, of the last evaluation";
    Chart { title: "Loss by position", unit, x_label: "position in the sequence", from_zero: false, series: series.collect() }
}

/// A bar per run and tier, on one scale.
fn memory(runs: &[RunFiles]) -> String {
    let tiers = [("device", "device_bytes"), ("host", "host_bytes")];
    let bytes = |run: &RunFiles, key| peak(run, key);
    let largest = runs.iter().flat_map(|run| tiers.map(|(_, key)| bytes(run, key))).flatten().max().unwrap_or(0);
    if largest == 0 {
        return String::new();
    }
    let mut rows = String::new();
    for (index, run) in runs.iter().enumerate() {
        for (tier, key) in tiers {
            let Some(bytes) = bytes(run, key) else { continue };
            let (share, name) = (bytes as f64 / largest as f64 * 100.0, escape(&run.name));
            let label = if runs.len() > 1 { format!("{name}, {tier}") } else { tier.to_owned() };
            let bar = format!("<b class=\"b{} {tier}\" style=\"width:{share:.2}%\"></b>", index % NUM_COLOURS);
            rows.push_str(&format!("<tr><td>{label}</td><td>{}</td><td class=\"bar\">{bar}</td></tr>\n", Bytes(bytes)));
        }
    }
    format!("<h2>Memory by tier <small>most allocated</small></h2>\n<table class=\"bars\">\n{rows}</table>\n")
}

/// Settings that are not the same in all runs.
fn differences(runs: &[RunFiles]) -> String {
    if runs.len() < 2 || runs.iter().all(|run| run.settings.is_empty()) {
        return String::new();
    }
    let value = |run: &RunFiles, key: &str| run.settings.iter().find(|(own, _)| own == key).map(|(_, value)| value.clone());
    let mut keys: Vec<&str> = Vec::new();
    for (key, _) in runs.iter().flat_map(|run| &run.settings) {
        if !keys.contains(&key.as_str()) {
            keys.push(key);
        }
    }
    // Every run has a folder of its own.
    keys.retain(|key| *key != "run.out" && runs.iter().any(|run| value(run, key) != value(&runs[0], key)));
    if keys.is_empty() {
        return "<h2>Settings that differ</h2>\n<p>None but run.out.</p>\n".to_owned();
    }
    let head: String = runs.iter().map(|run| format!("<th>{}</th>", escape(&run.name))).collect();
    let cell = |run: &RunFiles, key: &str| {
        format!("<td>{}</td>", value(run, key).map_or_else(|| "–".to_owned(), |value| escape(&value)))
    };
    let row = |key: &&str| {
        let cells: String = runs.iter().map(|run| cell(run, key)).collect();
        format!("<tr><th>{}</th>{cells}</tr>\n", escape(key))
    };
    let rows: String = keys.iter().map(row).collect();
    format!("<h2>Settings that differ</h2>\n<div class=\"wide\"><table>\n<tr><th>key</th>{head}</tr>\n{rows}</table></div>\n")
}

/// Plan and configuration of each run, folded away where there are several.
fn details(runs: &[RunFiles]) -> String {
    let open = if runs.len() == 1 { " open" } else { "" };
    let of = |run: &RunFiles, what: &str| {
        if runs.len() == 1 { what.to_owned() } else { format!("{what} of {}", escape(&run.name)) }
    };
    let mut text = String::new();
    for run in runs {
        if let Some(plan) = &run.plan {
            let (title, plan) = (of(run, "Plan"), escape(plan));
            text.push_str(&format!("<details{open}><summary>{title}</summary>\n<pre>{plan}</pre></details>\n"));
        }
        if !run.settings.is_empty() {
            let row = |(key, value): &(String, String)| format!("<tr><th>{}</th><td>{}</td></tr>\n", escape(key), escape(value));
            let (title, rows) = (of(run, "Configuration"), run.settings.iter().map(row).collect::<String>());
            text.push_str(&format!(
                "<details{open}><summary>{title}</summary>\n<div class=\"wide\"><table>\n{rows}</table></div></details>\n"
            ));
        }
    }
    text
}
