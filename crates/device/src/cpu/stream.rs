//! Streams as worker threads with in-order queues, events as flags, and failures that surface later.
//!
//! It must not know memory or ops: a command is a closure and a name.

use super::Delays;
use crate::{Error, Result, Stream};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Commands that a queue holds before enqueueing waits: keeps captured buffers from piling up behind a slow stream.
const QUEUE_COMMANDS: usize = 4096;

type Work = Box<dyn FnOnce() + Send>;

enum Command {
    Run { op: &'static str, work: Work },
    Record(Event),
    Wait(Event),
}

/// A point in a stream of a [`super::Cpu`].
#[derive(Clone, Default)]
pub struct Event(Arc<(Mutex<bool>, Condvar)>);

impl Event {
    fn fire(&self) {
        *lock(&self.0.0) = true;
        self.0.1.notify_all();
    }

    fn block(&self) {
        let mut reached = lock(&self.0.0);
        while !*reached {
            reached = self.0.1.wait(reached).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// The first failure since the last report; while there is one, work is skipped.
#[derive(Default)]
struct Failure(Mutex<Option<Error>>);

impl Failure {
    fn pending(&self) -> bool {
        lock(&self.0).is_some()
    }

    fn set(&self, op: &'static str, panic: &(dyn Any + Send)) {
        let detail = panic.downcast_ref::<String>().cloned();
        let detail = detail.or_else(|| panic.downcast_ref::<&str>().map(|&s| s.to_owned()));
        let detail = detail.unwrap_or_else(|| "panicked without a message".to_owned());
        lock(&self.0).get_or_insert(Error::Failed { op: op.to_owned(), detail });
    }
}

/// The three queues of one device.
pub(super) struct Streams {
    queues: [Option<SyncSender<Command>>; 3],
    workers: [Option<JoinHandle<()>>; 3],
    failure: Arc<Failure>,
}

impl Streams {
    pub(super) fn start(delays: Option<Delays>) -> Self {
        let failure = Arc::new(Failure::default());
        let seed = delays.map_or(0, |d| d.seed);
        let worker = |name: &str, max: Option<Duration>, salt: u64| {
            let (queue, commands) = sync_channel(QUEUE_COMMANDS);
            let failure = failure.clone();
            let sleeps = max.map(|max| Sleeps { max, state: seed ^ (salt << 32) });
            let body = move || run_commands(&commands, &failure, sleeps);
            let handle = thread::Builder::new().name(name.to_owned()).spawn(body);
            (Some(queue), Some(handle.expect("the system gives a process three threads")))
        };
        let compute = worker("cpu-compute", delays.map(|d| d.compute), 1);
        let copy_in = worker("cpu-in", delays.map(|d| d.copy_in), 2);
        let copy_out = worker("cpu-out", delays.map(|d| d.copy_out), 3);
        Self { queues: [compute.0, copy_in.0, copy_out.0], workers: [compute.1, copy_in.1, copy_out.1], failure }
    }

    /// Appends work; `op` names it in a failure.
    pub(super) fn enqueue(&self, stream: Stream, op: &'static str, work: impl FnOnce() + Send + 'static) {
        self.send(stream, Command::Run { op, work: Box::new(work) });
    }

    pub(super) fn record(&self, stream: Stream) -> Event {
        let event = Event::default();
        self.send(stream, Command::Record(event.clone()));
        event
    }

    pub(super) fn wait(&self, stream: Stream, event: &Event) {
        self.send(stream, Command::Wait(event.clone()));
    }

    /// Blocks the caller until everything enqueued in `streams` has run; takes the failure, if there is one.
    pub(super) fn finish(&self, streams: &[Stream]) -> Result<()> {
        let events: Vec<Event> = streams.iter().map(|&stream| self.record(stream)).collect();
        events.iter().for_each(Event::block);
        lock(&self.failure.0).take().map_or(Ok(()), Err)
    }

    fn send(&self, stream: Stream, command: Command) {
        let queue = self.queues[stream as usize].as_ref().expect("queues are taken by drop only");
        queue.send(command).expect("a worker outlives its queue: panics of work are caught");
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        self.queues.iter_mut().for_each(|queue| drop(queue.take()));
        for worker in self.workers.iter_mut().filter_map(Option::take) {
            // The last handle may die with a closure on a worker, which cannot join itself.
            if worker.thread().id() != thread::current().id() {
                // A worker ends without panicking; there is nothing to report while dropping.
                let _ = worker.join();
            }
        }
    }
}

fn run_commands(commands: &Receiver<Command>, failure: &Failure, mut sleeps: Option<Sleeps>) {
    while let Ok(command) = commands.recv() {
        match command {
            Command::Record(event) => event.fire(),
            Command::Wait(event) => event.block(),
            Command::Run { op, work } => {
                if let Some(sleeps) = &mut sleeps {
                    thread::sleep(sleeps.next());
                }
                if !failure.pending()
                    && let Err(panic) = catch_unwind(AssertUnwindSafe(work))
                {
                    failure.set(op, &*panic);
                }
            }
        }
    }
}

struct Sleeps {
    max: Duration,
    state: u64,
}

impl Sleeps {
    fn next(&mut self) -> Duration {
        self.state = self.state.wrapping_add(super::real::SPLITMIX_STEP);
        let unit = (super::real::splitmix64(self.state) >> 40) as f64 / (1u64 << 24) as f64;
        self.max.mul_f64(unit)
    }
}

/// A panic while a lock is held leaves plain values behind, which stay usable.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
