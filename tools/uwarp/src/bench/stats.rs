//! Medians, and ratios of neighbours.

use serde::Serialize;

use super::protocol::Figure;

/// The middle one, or the mean of the two middle ones.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() % 2 {
        _ if sorted.is_empty() => None,
        1 => sorted.get(middle).copied(),
        _ => Some((sorted.get(middle - 1)? + sorted.get(middle)?) / 2.0),
    }
}

/// Median, least and most of the ratios to what stands beside in the same round.
pub fn beside(values: &[f64], raw: &[f64]) -> Option<[f64; 3]> {
    let ratios: Vec<f64> = values.iter().zip(raw).map(|(value, raw)| value / raw).collect();
    let bound = |of: fn(f64, f64) -> f64| ratios.iter().copied().reduce(of);
    Some([median(&ratios)?, bound(f64::min)?, bound(f64::max)?])
}

/// Median and 99th percentile of durations in nanoseconds, in microseconds. Reorders them.
pub fn summary(nanoseconds: &mut [u32]) -> Option<(f64, f64)> {
    nanoseconds.sort_unstable();
    let at = |share: f64| {
        let index = (nanoseconds.len() as f64 * share) as usize;
        nanoseconds.get(index.min(nanoseconds.len().saturating_sub(1))).map(|&n| f64::from(n) / 1000.0)
    };
    Some((at(0.5)?, at(0.99)?))
}

/// One side's rounds.
#[derive(Clone, Debug, Serialize)]
pub struct Side {
    pub median: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p99: Option<f64>,
    pub rounds: Vec<f64>,
}

impl Side {
    pub fn new(figures: &[Figure]) -> Option<Side> {
        let rounds: Vec<_> = figures.iter().map(|figure| figure.value).collect();
        let tails: Vec<_> = figures.iter().filter_map(|figure| figure.p99).collect();
        Some(Side { median: median(&rounds)?, p99: median(&tails), rounds })
    }
}

/// uwarp over raw TCP.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Ratio {
    pub median: f64,
    pub least: f64,
    pub most: f64,
}

impl Ratio {
    /// Each round is compared with the raw one just before it: a machine that slows down for a while slows
    /// both.
    pub fn new(uwarp: &[Figure], raw: &[Figure]) -> Option<Ratio> {
        Ratio::of(uwarp.iter().zip(raw).map(|(uwarp, raw)| uwarp.value / raw.value))
    }

    /// Of the 99th percentiles.
    pub fn of_tails(uwarp: &[Figure], raw: &[Figure]) -> Option<Ratio> {
        Ratio::of(uwarp.iter().zip(raw).filter_map(|(uwarp, raw)| Some(uwarp.p99? / raw.p99?)))
    }

    fn of(ratios: impl Iterator<Item = f64>) -> Option<Ratio> {
        let ratios: Vec<_> = ratios.collect();
        Some(Ratio {
            median: median(&ratios)?,
            least: ratios.iter().copied().min_by(f64::total_cmp)?,
            most: ratios.iter().copied().max_by(f64::total_cmp)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0]), Some(3.0));
        assert_eq!(median(&[9.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 9.0]), Some(3.0));
    }

    #[test]
    fn percentiles_of_few_values_are_among_them() {
        assert_eq!(summary(&mut []), None);
        assert_eq!(summary(&mut [1500]), Some((1.5, 1.5)));
        let mut hundred: Vec<u32> = (1..=100).rev().map(|n| n * 1000).collect();
        assert_eq!(summary(&mut hundred), Some((51.0, 100.0)));
    }

    #[test]
    fn a_slow_spell_of_the_machine_leaves_the_ratio_alone() {
        let figures = |values: &[f64]| -> Vec<_> {
            values.iter().map(|&value| Figure { value, p99: None, operations: 1 }).collect()
        };
        let ratio = Ratio::new(&figures(&[11.0, 33.0, 11.0]), &figures(&[10.0, 30.0, 10.0])).unwrap();
        assert!((ratio.median - 1.1).abs() < 1e-9 && (ratio.most - 1.1).abs() < 1e-9);
    }
}
