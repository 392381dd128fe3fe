"""Results of several runs: statistics over tasks and seeds, figures and tables."""
