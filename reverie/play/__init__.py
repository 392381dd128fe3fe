"""Play with trained agents and their world models in the browser.

`simulation.py` steps environment and world model together, `session.py` runs it in a
thread at a fixed rate, and `server.py` connects sessions to pages over WebSockets.
`runs.py` reads the runs of a folder for `reverie view`.
"""
