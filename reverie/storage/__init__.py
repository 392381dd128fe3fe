"""File formats that are written atomically and read without running code: segments, episodes."""
