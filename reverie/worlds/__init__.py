"""Models of an environment that can be followed, dreamt in and looked into."""
