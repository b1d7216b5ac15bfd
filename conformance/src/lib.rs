//! Harness for running unmodified programs.
