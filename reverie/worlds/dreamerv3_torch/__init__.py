"""The world model of dreamerv3-torch, an earlier version of DreamerV3."""
