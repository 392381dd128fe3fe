"""From metrics to the places people look at: a logger and one file per sink."""
