//! What a run's data is and what became of its documents, in words. It must not know where the words go.

use oomb::config::format_count;
use oomb::data::Windows;

/// Documents that are named for each fate.
const NAMED: usize = 5;

/// A line for what is used, and one for each way in which documents are not used whole; `what` is "training data".
pub(crate) fn data_report(windows: &Windows, what: &str) -> String {
    let (fates, dataset) = (windows.fates(), windows.dataset());
    let tokens: u64 = (0..windows.len()).map(|index| windows.num_tokens(index)).sum();
    let mut text = format!(
        "{what}: {} tokens, {} of {} document(s), in {} sequence(s)\n",
        format_count(tokens),
        format_count(fates.num_used as u64),
        format_count(dataset.num_documents() as u64),
        format_count(windows.len() as u64),
    );
    let lists = [
        ("cut short to a sequence", &fates.truncated),
        ("left out, longer than a sequence", &fates.too_long),
        ("left out, nothing of them within a sequence is trained", &fates.without_labels),
    ];
    for (fate, documents) in lists.iter().filter(|(_, documents)| !documents.is_empty()) {
        let mut names: Vec<String> = documents.iter().take(NAMED).map(|&index| dataset.document_name(index)).collect();
        if documents.len() > NAMED {
            names.push("…".to_owned());
        }
        text += &format!("  {} {fate}: {}\n", format_count(documents.len() as u64), names.join(", "));
    }
    let unprepared: u64 = dataset.index().files.iter().map(|file| file.num_empty + file.num_malformed).sum();
    if unprepared > 0 {
        let list = dataset.folder().join("left_out.jsonl");
        text += &format!("  {} row(s) left out when it was prepared: {}\n", format_count(unprepared), list.display());
    }
    text
}
