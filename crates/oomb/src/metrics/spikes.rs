//! Which losses stand out. It must not know what is done about them.

use std::collections::VecDeque;

/// Losses that are remembered.
const WINDOW: usize = 50;
/// Losses before which nothing is said.
const LEAST: usize = 10;

/// Finds losses that stand out. The rule: a loss is a spike if it is above the median of the last 50 by more than 6 times
/// their median distance from it, and by more than a tenth of the median; spikes are not remembered.
#[derive(Debug, Clone, Default)]
pub struct Spikes {
    last: VecDeque<f64>,
}

impl Spikes {
    /// Looks at the loss of the next step; the median of those before it where it is a spike.
    pub fn see(&mut self, loss: f64) -> Option<f64> {
        if !loss.is_finite() {
            return None;
        }
        let spike = self.above(loss);
        if spike.is_none() {
            self.last.push_back(loss);
            if self.last.len() > WINDOW {
                self.last.pop_front();
            }
        }
        spike
    }

    fn above(&self, loss: f64) -> Option<f64> {
        if self.last.len() < LEAST {
            return None;
        }
        let middle = median(self.last.iter().copied().collect());
        let spread = median(self.last.iter().map(|loss| (loss - middle).abs()).collect());
        (loss > middle + (6.0 * spread).max(0.1 * middle.abs())).then_some(middle)
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_jump_is_a_spike_and_noise_is_not() {
        let mut spikes = Spikes::default();
        // Falls from 5 to 3 with noise of 0.1.
        let noisy = |step: usize| 3.0 + 2.0 * 0.97_f64.powi(step as i32) + 0.1 * ((step * 7919) % 13) as f64 / 13.0;
        assert!((0..200).all(|step| spikes.see(noisy(step)).is_none()));
        let median = spikes.see(4.2).expect("a jump by 1.1");
        assert!((3.0..3.2).contains(&median), "{median}");
        assert!(spikes.see(9.0).is_some(), "the next is as well");
        assert!(spikes.see(3.1).is_none() && spikes.see(f64::NAN).is_none());
    }

    #[test]
    fn nothing_is_said_at_the_start() {
        let mut spikes = Spikes::default();
        assert!([1.0, 100.0, 1.0, 100.0].into_iter().all(|loss| spikes.see(loss).is_none()));
    }
}
