//! Losses by the position of their token in its document: what a longer context is worth. It must not know how losses are
//! computed.

use crate::plot::LinePlot;
use oomb_device::ops::loss::IGNORE;
use serde::Serialize;

/// How positions are put together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spacing {
    /// 0 to 63, then each bucket as long as all before it.
    Log,
    /// Sixteen of the same length.
    Equal,
}

const FIRST_BUCKET: usize = 64;
const EQUAL_BUCKETS: usize = 16;

/// The labels whose tokens stand in `start..end` of their document.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Bucket {
    /// First position, tokens.
    pub start: usize,
    /// End, exclusive.
    pub end: usize,
    /// Labels that counted.
    pub labels: usize,
    /// Nats, over all labels.
    #[serde(skip)]
    pub sum: f64,
}

/// A bucket with what follows from its sum; `None` where there was no label.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct BucketLoss {
    /// The positions.
    #[serde(flatten)]
    pub bucket: Bucket,
    /// Nats per label.
    pub loss: Option<f64>,
    /// `exp` of the loss.
    pub perplexity: Option<f64>,
}

/// Sums of losses by position, from 0 to the longest sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct Positions {
    spacing: Spacing,
    buckets: Vec<Bucket>,
}

impl Positions {
    /// Empty buckets for documents of at most `tokens` tokens.
    pub fn new(tokens: usize, spacing: Spacing) -> Self {
        let mut edges = vec![0];
        match spacing {
            Spacing::Log => edges.extend((0..).map(|power| FIRST_BUCKET << power).take_while(|&edge| edge < tokens)),
            Spacing::Equal => edges.extend((1..EQUAL_BUCKETS).map(|i| i * tokens / EQUAL_BUCKETS)),
        }
        edges.push(tokens);
        edges.dedup();
        let buckets = edges.windows(2).map(|edge| Bucket { start: edge[0], end: edge[1], labels: 0, sum: 0.0 }).collect();
        Self { spacing, buckets }
    }

    /// Adds the losses of a sequence; all three of one length.
    ///
    /// # Panics
    /// If a position is beyond the last bucket.
    pub fn add(&mut self, positions: &[u32], labels: &[u32], losses: &[f64]) {
        assert!(positions.len() == labels.len() && labels.len() == losses.len(), "positions, labels and losses of one sequence");
        for ((&position, _), &loss) in positions.iter().zip(labels).zip(losses).filter(|((_, label), _)| **label != IGNORE) {
            let index = self.buckets.partition_point(|bucket| bucket.end <= position as usize);
            let bucket = &mut self.buckets[index];
            bucket.labels += 1;
            bucket.sum += loss;
        }
    }

    /// Every bucket that has a label.
    pub fn losses(&self) -> Vec<BucketLoss> {
        let filled = self.buckets.iter().filter(|bucket| bucket.labels > 0);
        filled
            .map(|bucket| {
                let loss = Some(bucket.sum / bucket.labels as f64).filter(|loss| loss.is_finite());
                BucketLoss { bucket: *bucket, loss, perplexity: loss.map(f64::exp) }
            })
            .collect()
    }

    /// Loss over position.
    pub fn svg(&self, title: &str) -> String {
        // A bucket stands at its middle: the geometric one where buckets double.
        let middle = |bucket: &Bucket| match self.spacing {
            Spacing::Log => ((bucket.start.max(1) * bucket.end) as f64).sqrt(),
            Spacing::Equal => (bucket.start + bucket.end) as f64 / 2.0,
        };
        let losses = self.losses();
        let points: Vec<_> = losses.iter().filter_map(|b| Some((middle(&b.bucket), b.loss?))).collect();
        let log_x = self.spacing == Spacing::Log;
        LinePlot { title, x_label: "position in the document, tokens", log_x, points: &points }.svg()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_cover_every_position_once() {
        for spacing in [Spacing::Log, Spacing::Equal] {
            for tokens in [2, 3, 15, 16, 17, 63, 64, 65, 1000, 4096] {
                let mut positions = Positions::new(tokens, spacing);
                let all: Vec<u32> = (0..tokens as u32).collect();
                positions.add(&all, &vec![0; tokens], &vec![2.0; tokens]);
                let losses = positions.losses();
                assert_eq!((losses[0].bucket.start, losses.last().unwrap().bucket.end), (0, tokens));
                for bucket in &losses {
                    assert_eq!(bucket.bucket.labels, bucket.bucket.end - bucket.bucket.start);
                    assert_eq!(bucket.loss, Some(2.0));
                }
            }
        }
        let ends: Vec<usize> = Positions::new(1000, Spacing::Log).buckets.iter().map(|bucket| bucket.end).collect();
        assert_eq!(ends, [64, 128, 256, 512, 1000]);
    }

    #[test]
    fn a_loss_goes_to_its_position_in_the_document() {
        let mut positions = Positions::new(128, Spacing::Log);
        // Two documents in one sequence; the last token of each has no label.
        positions.add(&[0, 1, 2, 0, 70, 71], &[5, 5, IGNORE, 5, 5, IGNORE], &[1.0, 2.0, 99.0, 3.0, 8.0, 99.0]);
        let losses = positions.losses();
        assert_eq!(
            losses.iter().map(|bucket| (bucket.bucket.labels, bucket.loss)).collect::<Vec<_>>(),
            [(3, Some(2.0)), (1, Some(8.0))]
        );
        assert!(positions.svg("loss").matches("<circle").count() == 2);
    }
}
