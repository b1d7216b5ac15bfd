//! How many cases property tests run.

use proptest::prelude::ProptestConfig;

/// This many cases, or the number in `PROPTEST_CASES`.
pub fn config(cases: u32) -> ProptestConfig {
    let default = ProptestConfig::default();
    let cases = if std::env::var_os("PROPTEST_CASES").is_some() { default.cases } else { cases };
    ProptestConfig { cases, max_shrink_iters: 4000, failure_persistence: None, ..default }
}
