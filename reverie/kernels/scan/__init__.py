"""Fast versions of recurrent loops over time."""
