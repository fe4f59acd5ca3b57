"""Trained models scored: benchmarks through lm-evaluation-harness, in-context learning, long contexts."""
