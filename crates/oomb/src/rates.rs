//! Measured rates of devices, kept in one file of the user's: what [`Plan::predict`](crate::plan::Plan::predict) divides by. It must not
//! know how they are measured.

use crate::plan::time::Rates;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Names the file to read and write instead of the user's own.
pub const VARIABLE: &str = "OOMB_RATES";

/// Why rates cannot be read or saved.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The system refuses.
    #[error("cannot {action} {path}: {source}", path = path.display())]
    Io {
        /// `"read"`, `"write"`.
        action: &'static str,
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It is not what [`save`] writes.
    #[error("{path} does not hold rates: {problem}; remove it, and measure again with oomb bench rates", path = path.display())]
    Damaged {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// There is no home folder.
    #[error("there is no place for rates: neither {VARIABLE} nor XDG_DATA_HOME nor HOME is set")]
    NoPlace,
}

/// The user's file: `$OOMB_RATES`, or `oomb/rates.json` in `$XDG_DATA_HOME` or `~/.local/share`.
pub fn place() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let data = || set("XDG_DATA_HOME").or_else(|| set("HOME").map(|home| home.join(".local/share")));
    set(VARIABLE).or_else(|| data().map(|data| data.join("oomb/rates.json")))
}

/// The rates of `hardware`, and where they come from in words; `None` where it was never measured.
///
/// # Errors
/// If there is a file that cannot be read.
pub fn of(hardware: &str) -> Result<Option<(Rates, String)>, Error> {
    if let Some(path) = place()
        && let Some(rates) = read(&path)?.remove(hardware)
    {
        return Ok(Some((rates, format!("rates of {hardware} in {}", path.display()))));
    }
    Ok(Rates::built_in(hardware).map(|rates| (rates, format!("built-in rates of {hardware}"))))
}

/// Adds the rates of `hardware` to the user's file, or replaces them; returns where that is.
///
/// # Errors
/// If the file cannot be read or written.
pub fn save(hardware: &str, rates: &Rates) -> Result<PathBuf, Error> {
    let path = place().ok_or(Error::NoPlace)?;
    let mut all = read(&path)?;
    all.insert(hardware.to_owned(), rates.clone());
    let io = |source| Error::Io { action: "write", path: path.clone(), source };
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(io)?;
    }
    let text = serde_json::to_string_pretty(&all).expect("numbers and names") + "\n";
    let partial = path.with_extension("partial");
    std::fs::write(&partial, text).and_then(|()| std::fs::rename(&partial, &path)).map_err(io)?;
    Ok(path)
}

fn read(path: &Path) -> Result<BTreeMap<String, Rates>, Error> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        Err(source) => return Err(Error::Io { action: "read", path: path.to_owned(), source }),
    };
    let damaged = |problem| Error::Damaged { path: path.to_owned(), problem };
    let all: BTreeMap<String, Rates> = serde_json::from_str(&text).map_err(|error| damaged(error.to_string()))?;
    match all.iter().find(|(_, rates)| !rates.are_positive()) {
        Some((hardware, _)) => Err(damaged(format!("a rate of {hardware} is not above 0"))),
        None => Ok(all),
    }
}
