//! From logits to the next token: greedy, or drawn by temperature, top-k and top-p. It must not know a model or a device.

use crate::random::Random;

/// How the next token is chosen. The order is that of transformers: temperature, then top-k, then top-p.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the best token always.
    pub temperature: f64,
    /// Only the so many best tokens; 0 is all.
    pub top_k: usize,
    /// Only the best tokens whose probabilities together first reach this; 1 is all.
    pub top_p: f64,
    /// Same seed, same logits, same tokens.
    pub seed: u64,
}

impl Sampling {
    /// The best token always.
    pub const GREEDY: Self = Self { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0 };
}

/// Chooses tokens one after the other.
#[derive(Debug, Clone)]
pub struct Sampler {
    sampling: Sampling,
    random: Random,
}

impl Sampler {
    /// A sampler at the start of its seed's stream.
    pub fn new(sampling: Sampling) -> Self {
        Self { sampling, random: Random::new(sampling.seed) }
    }

    /// The next token; `None` where a logit is not a number. Of equal logits the smaller id goes first.
    pub fn next(&mut self, logits: &[f32]) -> Option<u32> {
        if logits.is_empty() || logits.iter().any(|logit| logit.is_nan()) {
            return None;
        }
        let Sampling { temperature, top_k, top_p, .. } = self.sampling;
        let better = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
        let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
        if temperature == 0.0 {
            return ids.into_iter().min_by(better);
        }
        if (1..ids.len()).contains(&top_k) {
            ids.select_nth_unstable_by(top_k - 1, better);
            ids.truncate(top_k);
        }
        ids.sort_unstable_by(better);
        let best = f64::from(logits[ids[0] as usize]);
        let weight = |id: &u32| ((f64::from(logits[*id as usize]) - best) / temperature).exp();
        let weights: Vec<f64> = ids.iter().map(weight).collect();
        let all: f64 = weights.iter().sum();
        let mut sum = 0.0;
        let reached = weights.iter().position(|weight| {
            sum += weight;
            sum >= top_p * all
        });
        let kept = reached.map_or(ids.len(), |last| last + 1);
        let mut left = self.random.unit() * weights[..kept].iter().sum::<f64>();
        let chosen = weights[..kept].iter().position(|weight| {
            left -= weight;
            left < 0.0
        });
        Some(ids[chosen.unwrap_or(kept - 1)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frequencies(sampling: Sampling, logits: &[f32]) -> Vec<f64> {
        let (mut sampler, mut counts) = (Sampler::new(sampling), vec![0.0; logits.len()]);
        for _ in 0..20_000 {
            counts[sampler.next(logits).unwrap() as usize] += 1.0 / 20_000.0;
        }
        counts
    }

    #[test]
    fn tokens_are_drawn_by_their_probability() {
        let logits = [0.0f32, 2.0, 1.0, -1.0];
        let sampling = Sampling { temperature: 2.0, top_k: 0, top_p: 1.0, seed: 5 };
        let weights = logits.map(|logit| (f64::from(logit) / 2.0).exp());
        let all: f64 = weights.iter().sum();
        for (got, weight) in frequencies(sampling, &logits).into_iter().zip(weights) {
            assert!((got - weight / all).abs() < 0.015, "{got} {}", weight / all);
        }
    }

    #[test]
    fn top_k_and_top_p_cut_the_tail() {
        // Probabilities 0.4, 0.3, 0.2, 0.1 at the ids 2, 0, 3, 1.
        let logits = [0.3f32.ln(), 0.1f32.ln(), 0.4f32.ln(), 0.2f32.ln()];
        let with = |top_k, top_p| {
            let drawn = frequencies(Sampling { temperature: 1.0, top_k, top_p, seed: 1 }, &logits);
            drawn.iter().map(|&frequency| frequency > 0.0).collect::<Vec<_>>()
        };
        assert_eq!(with(0, 1.0), [true, true, true, true]);
        assert_eq!(with(2, 1.0), [true, false, true, false]);
        assert_eq!(with(0, 0.6), [true, false, true, false]);
        assert_eq!(with(0, 0.75), [true, false, true, true]);
        assert_eq!(with(0, 0.01), [false, false, true, false]);
        assert_eq!(with(1, 1.0), [false, false, true, false]);
        // top-p counts what top-k left: 0.4 of 0.7 is more than half.
        assert_eq!(with(2, 0.55), [false, false, true, false]);
    }

    #[test]
    fn the_best_token_and_numbers_that_are_none() {
        let mut greedy = Sampler::new(Sampling::GREEDY);
        assert_eq!(greedy.next(&[1.0, 3.0, 3.0, -f32::INFINITY]), Some(1));
        assert_eq!(greedy.next(&[1.0, f32::NAN]), None);
        let mut a = Sampler::new(Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 7 });
        let mut b = a.clone();
        let logits = [0.1; 50];
        assert!((0..50).all(|_| a.next(&logits) == b.next(&logits)));
    }
}
