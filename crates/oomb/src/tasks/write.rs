//! The prompts: what is hidden, where, and how it is asked for. It must not count tokens: a draft renders to any size.

use super::words::{coined_words, keys, numbers, values, variables};
use super::{Haystack, Task};
use crate::random::Random;

/// A prompt of any size, and what a good answer to it contains.
pub(super) struct Draft<'a> {
    pub answers: Vec<String>,
    /// The prompt with so many units of text around what counts.
    pub render: Box<dyn Fn(usize) -> String + 'a>,
}

/// Keys and numbers of the tasks with several.
const SEVERAL: usize = 4;
/// Variables of a chain.
const CHAIN: usize = 5;
const COMMON_WORDS: usize = 10;
const FREQUENT_WORDS: usize = 3;

/// A draft of `task`; `room` is the tokens that the prompt may have.
pub(super) fn draft<'a>(task: Task, room: usize, depth: Option<u8>, haystack: &'a Haystack, random: &mut Random) -> Draft<'a> {
    match task {
        Task::Needle | Task::MultiKey | Task::MultiValue | Task::MultiQuery => needles(task, depth, haystack, random),
        Task::Variables => assignments(haystack, random),
        Task::CommonWords => common_words(room, random),
        Task::FrequentWords => frequent_words(random),
    }
}

fn anywhere(random: &mut Random) -> f64 {
    100.0 * random.unit()
}

fn needles<'a>(task: Task, depth: Option<u8>, haystack: &'a Haystack, random: &mut Random) -> Draft<'a> {
    let (num_keys, each, asked) = match task {
        Task::Needle => (1, 1, 1),
        Task::MultiKey => (SEVERAL, 1, 1),
        Task::MultiValue => (1, SEVERAL, 1),
        _ => (SEVERAL, 1, SEVERAL),
    };
    let (keys, numbers) = (keys(random, num_keys), numbers(random, num_keys * each));
    let sentence = |(index, number): (usize, &String)| {
        let at = if index == 0 { depth.map(f64::from) } else { None };
        let at = at.unwrap_or_else(|| anywhere(random));
        (at, format!("One of the secret numbers of {} is: {number}.", keys[index / each]))
    };
    let inserts: Vec<(f64, String)> = numbers.iter().enumerate().map(sentence).collect();
    let answers = numbers[..asked * each].to_vec();
    let asked = listed(&keys[..asked]);
    let (numbers, are) = if answers.len() > 1 { ("secret numbers", "are") } else { ("secret number", "is") };
    let introduction =
        format!("The following text hides {numbers}. Remember them: you will be asked for the {numbers} afterwards.");
    let question = format!(
        "What {are} the {numbers} of {asked} that the text above mentions? The {numbers} of {asked} that the text above mentions {are}"
    );
    let start = haystack.start(random);
    let render = move |size| format!("{introduction}\n\n{}\n\n{question}", haystack.with(start, size, &inserts));
    Draft { answers, render: Box::new(render) }
}

/// "a, b and c".
fn listed(words: &[String]) -> String {
    match words {
        [earlier @ .., last] if !earlier.is_empty() => format!("{} and {last}", earlier.join(", ")),
        _ => words.concat(),
    }
}

fn assignments<'a>(haystack: &'a Haystack, random: &mut Random) -> Draft<'a> {
    // A second chain, so that not every variable is an answer.
    let (names, values) = (variables(random, 2 * CHAIN), values(random, 2));
    let mut inserts = Vec::new();
    for (chain, value) in names.chunks(CHAIN).zip(&values) {
        let mut depths: Vec<f64> = chain.iter().map(|_| anywhere(random)).collect();
        depths.sort_by(f64::total_cmp);
        let sources = std::iter::once(value.clone()).chain(chain.iter().map(|name| format!("VAR {name}")));
        let statements = chain.iter().zip(sources).map(|(name, source)| format!("VAR {name} = {source}."));
        inserts.extend(depths.into_iter().zip(statements));
    }
    let value = &values[0];
    let introduction = "The following text hides assignments of variables. Follow each chain of assignments.";
    let question = format!(
        "Question: which variables were assigned the value {value} in the text above, directly or through other variables?\n\
         Answer: by the assignments in the text above, {CHAIN} variables have the value {value}. They are:"
    );
    let start = haystack.start(random);
    let render = move |size| format!("{introduction}\n\n{}\n\n{question}", haystack.with(start, size, &inserts));
    Draft { answers: names[..CHAIN].to_vec(), render: Box::new(render) }
}

/// Ten words that stand in the list ten times as often as any other: 30 and 3 times, as in RULER, or 10 and once where the
/// list is short.
fn common_words(room: usize, random: &mut Random) -> Draft<'static> {
    let (common, rare) = if room >= 8192 { (30, 3) } else { (10, 1) };
    let (answers, seed) = (coined_words(random, COMMON_WORDS), random.bits());
    let words = answers.clone();
    let render = move |size: usize| {
        let mut random = Random::new(seed);
        let mut others = coined_words(&mut random, size.div_ceil(rare) + COMMON_WORDS);
        others.retain(|word| !words.contains(word));
        let mut list: Vec<&str> = words.iter().flat_map(|word| std::iter::repeat_n(word.as_str(), common)).collect();
        list.extend((0..size).map(|index| others[index / rare].as_str()));
        random.shuffle(&mut list);
        let lines: Vec<String> = list.iter().enumerate().map(|(index, word)| format!("{}. {word}", index + 1)).collect();
        format!(
            "Below is a numbered list of words. Some stand in it more often than others. Remember those that stand in it most often.\n\
             {}\n\nQuestion: what are the {COMMON_WORDS} most common words of the list above?\n\
             Answer: the {COMMON_WORDS} words that stand in the list most often are:",
            lines.join(" ")
        )
    };
    Draft { answers, render: Box::new(render) }
}

/// Words of which the k-th stands there in proportion to 1/k².
fn frequent_words(random: &mut Random) -> Draft<'static> {
    const VOCABULARY: usize = 200;
    /// With fewer the third would not stand out.
    const FEWEST: usize = 60;
    let (words, seed) = (coined_words(random, VOCABULARY), random.bits());
    let answers = words[..FREQUENT_WORDS].to_vec();
    let render = move |size: usize| {
        let size = size + FEWEST;
        let all: f64 = (1..=VOCABULARY).map(|k| 1.0 / (k * k) as f64).sum();
        let of = |k: usize| (size as f64 / (all * (k * k) as f64)) as usize;
        let mut text: Vec<&str> = (0..VOCABULARY).flat_map(|k| std::iter::repeat_n(words[k].as_str(), of(k + 1))).collect();
        // What rounding left out goes to rare words, one each.
        let missing = size - text.len();
        text.extend((0..missing).map(|index| words[VOCABULARY - 1 - index % (VOCABULARY / 2)].as_str()));
        Random::new(seed).shuffle(&mut text);
        format!(
            "Read the following text in code and count how often each of its words comes.\n\n{}\n\n\
             Question: what are the three most frequent words of the text above? Do not explain.\n\
             Answer: the three most frequent words of the text above are:",
            text.join(" ")
        )
    };
    Draft { answers, render: Box::new(render) }
}
