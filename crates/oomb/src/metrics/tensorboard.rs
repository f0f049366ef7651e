//! Event files that TensorBoard reads: records framed by masked CRC-32C, each a protocol buffer `Event` of scalars. It must not
//! know what is measured.
//!
//! Written here because the crates for it are unmaintained; it is three messages and five fields.

use super::Record;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// Name of the folder of event files in a run's folder.
pub const TENSORBOARD_FOLDER: &str = "tensorboard";

/// One event file, appended to step by step.
#[derive(Debug)]
pub struct EventFile<W: Write> {
    out: W,
}

impl EventFile<File> {
    /// Creates a new file in the folder `tensorboard` of `run`; a continued run adds a second one, which TensorBoard joins on.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn create(run: &Path) -> io::Result<Self> {
        let folder = run.join(TENSORBOARD_FOLDER);
        let now = now();
        let path = folder.join(format!("events.out.tfevents.{:010}.oomb.{}", now as u64, std::process::id()));
        let named = |e: io::Error| io::Error::new(e.kind(), format!("cannot create {}: {e}", path.display()));
        fs::create_dir_all(&folder).map_err(named)?;
        Self::new(OpenOptions::new().append(true).create_new(true).open(&path).map_err(named)?, now)
    }
}

impl<W: Write> EventFile<W> {
    /// Starts a file with its version; `wall_time` is in seconds since 1970.
    ///
    /// # Errors
    /// If the output refuses.
    pub fn new(out: W, wall_time: f64) -> io::Result<Self> {
        let mut file = Self { out };
        let mut event = Message::default();
        event.double(1, wall_time);
        event.bytes(3, b"brain.Event:2");
        file.record(&event.0)?;
        Ok(file)
    }

    /// Appends the scalars of a step, now.
    ///
    /// # Errors
    /// If the output refuses, most often because the disk is full.
    pub fn append(&mut self, record: &Record) -> io::Result<()> {
        self.append_at(record, now())
    }

    /// The same at a given time, in seconds since 1970.
    ///
    /// # Errors
    /// As [`Self::append`].
    pub fn append_at(&mut self, record: &Record, wall_time: f64) -> io::Result<()> {
        let mut summary = Message::default();
        let mut scalar = |tag: &str, number: f64| {
            let mut value = Message::default();
            value.bytes(1, tag.as_bytes());
            value.float(2, number as f32);
            summary.bytes(1, &value.0);
        };
        scalar("loss/train", record.loss);
        if let Some(loss) = record.validation_loss {
            scalar("loss/validation", loss);
        }
        scalar("grad_norm", record.grad_norm);
        scalar("lr", record.lr);
        scalar("tokens_per_second", record.tokens_per_second);
        scalar("memory_gib/device", record.device_bytes as f64 / GIB);
        scalar("memory_gib/host", record.host_bytes as f64 / GIB);
        scalar("epoch", record.epoch);
        if record.in_bytes + record.out_bytes > 0 {
            scalar("moved_gib/in", record.in_bytes as f64 / GIB);
            scalar("moved_gib/out", record.out_bytes as f64 / GIB);
        }
        if let Some(rate) = record.page_hit_rate {
            scalar("page_hit_rate", rate);
        }
        let mut event = Message::default();
        event.double(1, wall_time);
        event.varint(2, record.step as u64);
        event.bytes(5, &summary.0);
        self.record(&event.0)
    }

    /// Length, its checksum, the bytes, their checksum: in one write, so that a killed run leaves whole records.
    fn record(&mut self, bytes: &[u8]) -> io::Result<()> {
        let length = (bytes.len() as u64).to_le_bytes();
        let framed = [&length[..], &masked_crc(&length).to_le_bytes(), bytes, &masked_crc(bytes).to_le_bytes()].concat();
        let named = |e: io::Error| io::Error::new(e.kind(), format!("cannot write events for TensorBoard: {e}"));
        self.out.write_all(&framed).and_then(|()| self.out.flush()).map_err(named)
    }
}

const GIB: f64 = (1u64 << 30) as f64;

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// CRC-32C, rotated and offset as the record format wants it, so that a checksum of checksums does not vanish.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// A protocol buffer under construction: fields by number and wire type.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn varint(&mut self, field: u32, value: u64) {
        self.raw(u64::from(field << 3));
        self.raw(value);
    }

    fn double(&mut self, field: u32, value: f64) {
        self.raw(u64::from(field << 3 | 1));
        self.0.extend(value.to_le_bytes());
    }

    fn bytes(&mut self, field: u32, value: &[u8]) {
        self.raw(u64::from(field << 3 | 2));
        self.raw(value.len() as u64);
        self.0.extend(value);
    }

    fn float(&mut self, field: u32, value: f32) {
        self.raw(u64::from(field << 3 | 5));
        self.0.extend(value.to_le_bytes());
    }

    fn raw(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
}
