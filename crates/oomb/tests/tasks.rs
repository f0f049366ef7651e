//! Long-context tasks: exact lengths with two tokenizers, answers that can be found, and the way from a prompt to a score.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use oomb::config::TokenizerSource;
use oomb::data::Tokenizer;
use oomb::tasks::{AnswerError, Answerer, Error, Haystack, Sample, Suite, Task};
use std::collections::BTreeMap;

const NOVEL: &str = include_str!("../../../data/emma.txt");

fn bytes() -> Tokenizer {
    Tokenizer::load(&TokenizerSource::Bytes).unwrap()
}

/// Words, numbers and marks as tokens, all of them unknown: as few tokens as the bytes are many.
fn words(folder: &std::path::Path) -> Tokenizer {
    let path = folder.join("tokenizer.json");
    let text = r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,
        "pre_tokenizer":{"type":"Whitespace"},"post_processor":null,"decoder":null,
        "model":{"type":"WordLevel","vocab":{"[UNK]":0},"unk_token":"[UNK]"}}"#;
    std::fs::write(&path, text).unwrap();
    Tokenizer::load(&TokenizerSource::Path(path)).unwrap()
}

fn suite(lengths: &[usize]) -> Suite {
    Suite { tasks: Task::ALL.to_vec(), lengths: lengths.to_vec(), depths: vec![0, 50, 100], samples: 2, seed: 3 }
}

#[test]
fn samples_are_as_long_as_asked_and_no_longer() {
    let folder = tempfile::tempdir().unwrap();
    for (tokenizer, lengths, slack) in [(bytes(), [4096, 20_000], 64), (words(folder.path()), [1000, 16_384], 24)] {
        for haystack in [Haystack::noise(), Haystack::text(NOVEL).unwrap()] {
            let suite = suite(&lengths);
            for cell in suite.cells() {
                let sample = suite.sample(cell, 0, &haystack, &tokenizer).unwrap();
                assert_eq!(tokenizer.encode(&sample.prompt).unwrap(), sample.ids);
                let tokens = sample.ids.len() + sample.task.answer_tokens();
                assert!((cell.1 - slack..=cell.1).contains(&tokens), "{cell:?}: {tokens} tokens");
                assert_eq!(sample.score(&sample.answers.join(" and ").to_uppercase()), 1.0);
                assert!(sample.answers.iter().all(|answer| sample.prompt.contains(answer.as_str())));
            }
        }
    }
}

#[test]
fn a_needle_stands_at_its_depth_and_samples_follow_the_seed() {
    let (haystack, tokenizer) = (Haystack::text(NOVEL).unwrap(), bytes());
    let mut suite = suite(&[8192]);
    for depth in [0, 50, 100] {
        let cell = (Task::Needle, 8192, Some(depth));
        let sample = suite.sample(cell, 0, &haystack, &tokenizer).unwrap();
        let at = 100.0 * sample.prompt.find(&sample.answers[0]).unwrap() as f64 / sample.prompt.len() as f64;
        assert!((at - f64::from(depth)).abs() < 8.0, "depth {depth} at {at}");
        assert_eq!(sample, suite.sample(cell, 0, &haystack, &tokenizer).unwrap());
        assert_ne!(sample.answers, suite.sample(cell, 1, &haystack, &tokenizer).unwrap().answers);
        suite.seed += 1;
        assert_ne!(sample.answers, suite.sample(cell, 0, &haystack, &tokenizer).unwrap().answers);
    }
    let message = suite.sample((Task::CommonWords, 300, None), 0, &haystack, &tokenizer).unwrap_err().to_string();
    assert!(message.contains("common") && message.contains("300"), "{message}");
}

/// Reads the prompt as a person would; knows nothing of what the sample's maker put where.
struct Reader {
    /// Answers half of what is asked.
    lazy: bool,
}

impl Reader {
    fn read(prompt: &str) -> Vec<String> {
        let question = prompt.rsplit("\n\n").next().unwrap();
        let list = |text: &str| text.split_whitespace().map(|word| word.trim_end_matches('.').to_owned()).collect::<Vec<_>>();
        if let Some((_, value)) = question.split_once("were assigned the value ") {
            let mut known = vec![value.split(' ').next().unwrap().to_owned()];
            let words = list(prompt);
            for window in words.windows(5) {
                let [var, name, equals, source, next] = window else { unreachable!() };
                let source = if source == "VAR" { next } else { source };
                if var == "VAR" && equals == "=" && known.contains(source) {
                    known.push(name.clone());
                }
            }
            return known.split_off(1);
        }
        let counted = |most: usize| {
            let text = prompt.rsplit_once("\n\n").unwrap().0;
            let mut counts: BTreeMap<String, usize> = BTreeMap::new();
            for word in list(text).into_iter().filter(|word| word.len() == 6 && word.chars().all(|c| c.is_ascii_lowercase())) {
                *counts.entry(word).or_default() += 1;
            }
            let mut words: Vec<_> = counts.into_iter().collect();
            words.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
            words.into_iter().take(most).map(|(word, _)| word).collect()
        };
        if question.contains("10 most common") {
            return counted(10);
        }
        if question.contains("three most frequent") {
            return counted(3);
        }
        let needles = prompt.split("One of the secret numbers of ").skip(1);
        let needles = needles.filter_map(|rest| rest.split('.').next()?.split_once(" is: "));
        needles.filter(|(key, _)| question.contains(key)).map(|(_, number)| number.to_owned()).collect()
    }
}

impl Answerer for Reader {
    fn answer(&mut self, sample: &Sample, max_tokens: usize) -> Result<String, AnswerError> {
        let mut answers = Self::read(&sample.prompt);
        if self.lazy {
            answers.truncate(answers.len() / 2);
        }
        let answer = answers.join(", ");
        // The budget is enough even where every byte is a token.
        if answer.len() > max_tokens { Err(format!("{answer} is longer than {max_tokens}").into()) } else { Ok(answer) }
    }
}

#[test]
fn who_reads_the_prompt_can_answer_and_the_report_says_so() {
    let (haystack, tokenizer) = (Haystack::text(NOVEL).unwrap(), bytes());
    let suite = suite(&[4096, 16_384]);
    let mut asked = 0;
    let report = suite.run(&haystack, &tokenizer, &mut Reader { lazy: false }, &mut |done, _| asked = done).unwrap();
    assert_eq!((report.cells.len(), report.samples.len(), asked), (2 * (2 * 3 + 5), 44, 44));
    for sample in &report.samples {
        assert_eq!(sample.score, 1.0, "{sample:?}");
    }
    assert!(report.cells.iter().all(|cell| cell.accuracy == 1.0 && cell.samples == 2));

    let lazy = suite.run(&haystack, &tokenizer, &mut Reader { lazy: true }, &mut |_, _| ()).unwrap();
    let of = |task: Task| lazy.cells.iter().find(|cell| cell.task == task.name()).unwrap().accuracy;
    assert_eq!([of(Task::Needle), of(Task::MultiValue), of(Task::CommonWords)], [0.0, 0.5, 0.5]);
    let (table, svg) = (lazy.table(), lazy.svg("a title"));
    assert!(table.contains("4K") && table.contains("needle, depth 50 %") && table.contains("50.0"), "{table}");
    assert_eq!(svg.matches("<rect").count(), 1 + lazy.cells.len());
    let json = serde_json::to_value(&lazy).unwrap();
    assert_eq!(json["cells"][0]["task"], "needle");
    assert_eq!(json["samples"][0]["depth"], 0);
}

#[test]
fn who_cannot_answer_ends_the_evaluation() {
    struct Mute;
    impl Answerer for Mute {
        fn answer(&mut self, _: &Sample, _: usize) -> Result<String, AnswerError> {
            Err("no voice".into())
        }
    }
    let error = suite(&[4096]).run(&Haystack::noise(), &bytes(), &mut Mute, &mut |_, _| ()).unwrap_err();
    assert!(
        matches!(&error, Error::Answer { task: "needle", length: 4096, source } if source.to_string() == "no voice"),
        "{error}"
    );
}
